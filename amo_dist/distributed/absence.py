"""Which ranks a collective waited for in vain: asked only once it has failed.

That is of use under gloo, whose collectives raise. Under NCCL nothing is raised: ``wait()`` holds
the stream and not the host, and at the time-out PyTorch's watchdog ends the process. Which ranks
were missing is then told by PyTorch's flight recorder: see ``TORCH_FR_BUFFER_SIZE`` (before:
``TORCH_NCCL_TRACE_BUFFER_SIZE``) and ``TORCH_NCCL_DUMP_ON_TIMEOUT``.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable

import torch.distributed as dist

ROLL_CALL_S = 10.0
"""Seconds that a rank waits for the others to answer."""
_calls = Counter[str]()
"""Roll calls of this process, by what was under way: answers to an earlier one do not count."""
DID_NOT_ANSWER = "did not answer"
_POLL = 0.1


class AbsentRanksError(RuntimeError):
    """A collective failed, and some ranks do not answer: they are stopped, dead or far behind."""


def name_absent(error: RuntimeError, what: str, ranks: Iterable[int] | None = None) -> None:
    """Name the ranks that do not answer, where a collective has failed; else do nothing.

    A collective tells at most that it timed out (the time-out is that of the process group), or
    that a connection was closed. On every rank it fails on, this says so in the store of the
    process group, and waits for the others to do the same. Steps that succeed do nothing of this.

    Args:
        error: What was raised.
        what: Was under way, for the message.
        ranks: Global ranks that took part; by default those of the job.

    Raises:
        AbsentRanksError: Some ranks have not answered for `ROLL_CALL_S`; names them.
    """
    is_of_gloo = "/gloo/" in str(error)  # which raises plain errors
    if isinstance(error, AbsentRanksError) or not dist.is_initialized():
        return
    if not (is_of_gloo or isinstance(error, dist.DistError)):
        return
    rank = dist.get_rank()
    members = range(dist.get_world_size()) if ranks is None else ranks
    missing = [other for other in members if other != rank]
    # A store that lives in a process which is stopped itself never answers.
    _calls[what] += 1
    call = f"amo/failed/{what}/{_calls[what]}"
    thread = threading.Thread(target=_look_for, args=(call, rank, missing), daemon=True)
    thread.start()
    thread.join(1.5 * ROLL_CALL_S)
    if not missing:
        return
    store = ", nor the store of the process group" if thread.is_alive() else ""
    reason = " ".join(str(error).split())[:200]
    raise AbsentRanksError(
        f"{what}: rank(s) {', '.join(map(str, missing))} {DID_NOT_ANSWER}{store}: stopped, dead or "
        f"far behind; a collective of rank {rank} failed for it: {reason}"
    ) from error


def _look_for(call: str, rank: int, missing: list[int]) -> None:
    """Answer a roll call for this rank, and remove from ``missing`` the ranks that answer."""
    store, end = dist.distributed_c10d._get_default_store(), time.monotonic() + ROLL_CALL_S
    store.set(f"{call}/{rank}", "1")
    while missing and time.monotonic() < end:
        for other in [*missing]:
            if store.check([f"{call}/{other}"]):
                missing.remove(other)
        time.sleep(_POLL)
