"""Names of the ranks that a failed collective waited for; a collective that succeeds asks nothing.

This helps under gloo, whose collectives raise an error. NCCL's raise none: ``wait()`` holds the
stream and not the host, and at the time-out PyTorch's watchdog ends the process. PyTorch's flight
recorder then names the missing ranks: see ``TORCH_FR_BUFFER_SIZE`` (before:
``TORCH_NCCL_TRACE_BUFFER_SIZE``) and ``TORCH_NCCL_DUMP_ON_TIMEOUT``.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable

import torch.distributed as dist

from amo_dist.compat import default_store

ROLL_CALL_S = 10.0
"""Seconds that a rank waits for the others to answer."""
_calls = Counter[str]()
"""Number of roll calls of this process by activity: answers to an earlier call do not count."""
DID_NOT_ANSWER = "did not answer"
_POLL = 0.1


class AbsentRanksError(RuntimeError):
    """A collective failed, and some ranks do not answer: they are stopped, dead or far behind."""


def name_absent(error: RuntimeError, activity: str, ranks: Iterable[int] | None = None) -> None:
    """Name the ranks that do not answer after a collective failed; do nothing for other errors.

    The error of a collective says only that it timed out or that a connection was closed. Each rank
    that gets such an error writes so into the store of the process group, and waits for the other
    ranks to write the same. A rank that never writes is absent.

    Args:
        error: Error that the collective raised.
        activity: Name of what the ranks were doing, for the message.
        ranks: Global ranks that took part; by default all ranks of the job.

    Raises:
        AbsentRanksError: Some ranks have not answered for `ROLL_CALL_S`; names them.
    """
    is_of_gloo = "/gloo/" in str(error)  # gloo raises a plain RuntimeError
    if isinstance(error, AbsentRanksError) or not dist.is_initialized():
        return
    if not (is_of_gloo or isinstance(error, dist.DistError)):
        return
    rank = dist.get_rank()
    members = range(dist.get_world_size()) if ranks is None else ranks
    missing = [other for other in members if other != rank]
    _calls[activity] += 1
    call = f"amo/failed/{activity}/{_calls[activity]}"
    # The store may live in a stopped process and never answer, so that a thread asks it.
    thread = threading.Thread(target=_look_for, args=(call, rank, missing), daemon=True)
    thread.start()
    thread.join(1.5 * ROLL_CALL_S)
    if not missing:
        return
    store = ", nor the store of the process group" if thread.is_alive() else ""
    reason = " ".join(str(error).split())[:200]
    raise AbsentRanksError(
        f"{activity}: rank(s) {', '.join(map(str, missing))} {DID_NOT_ANSWER}{store}: stopped, "
        f"dead or far behind; a collective of rank {rank} failed for it: {reason}"
    ) from error


def _look_for(call: str, rank: int, missing: list[int]) -> None:
    """Answer a roll call for this rank, and remove from ``missing`` the ranks that answer."""
    store, end = default_store(), time.monotonic() + ROLL_CALL_S
    store.set(f"{call}/{rank}", "1")
    while missing and time.monotonic() < end:
        for other in [*missing]:
            if store.check([f"{call}/{other}"]):
                missing.remove(other)
        time.sleep(_POLL)
