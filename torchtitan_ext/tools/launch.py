"""The ranks of a run on this node: started, waited for, and when they fail explained."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from amo_dist.distributed.absence import DID_NOT_ANSWER
from torchtitan_ext import train
from torchtitan_ext.parent import end_with_parent
from torchtitan_ext.runs import folder as runs


def grace(config: Any) -> int:
    """Seconds after which ranks that were told to stop are killed.

    More than they grant themselves to save; torchrun's default is 30.
    """
    return int(config.comm.init_timeout_seconds) + 30


def start(arguments: Sequence[str], num_ranks: int, config: Any) -> int | None:
    """Run the ranks under torchrun; on failure tell what the first of them had to say.

    Args:
        arguments: Of torchtitan.
        num_ranks: Processes.
        config: Theirs; its dump folder exists, and gets what they write to standard error.

    Returns:
        0, the exit status of the rank that failed first, or 1 where a signal ended it; ``None``
        where this process was told to stop.
    """
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--shutdown-timeout", str(grace(config)), "--nproc-per-node", str(num_ranks)),
        *("-m", "torchtitan_ext.train", *arguments),
    ]
    errors = Path(config.dump_folder) / runs.ERRORS_FILE
    # torchrun adds a traceback of its own to every failure; ours are one line.
    with errors.open("w") as file:
        status = _wait(
            subprocess.Popen(
                command,
                env=runs.environment(num_ranks),
                stderr=file,
                preexec_fn=end_with_parent,
            )
        )
    if status in (0, None):
        return status
    print(f"Training failed; its whole output is in {errors}.", file=sys.stderr)
    reason, status = explain(errors.read_text(errors="replace"))
    print(reason, file=sys.stderr)
    return status


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    """The exit status of torchrun; ``None`` where this process was told to stop.

    torchrun ends its ranks when it is terminated. Killed, as ``subprocess.run`` does after an
    interrupt, it would leave them training.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        return None


def explain(text: str) -> tuple[str, int]:
    """Why ranks failed, in one line, and the exit status that says so.

    Args:
        text: What they and torchrun wrote to standard error.
    """
    failures = [dict(re.findall(_FIELD, block)) for block in re.split(_BLOCK, text)[1:]]
    failures = [one for one in failures if "rank" in one and "exitcode" in one]
    told = [line for line in text.splitlines() if line.startswith("error")]
    statuses = [int(one["exitcode"]) for one in failures]
    status = next((one for one in statuses[-1:] + statuses if one > 0), 1)
    # Who misses a rank says so in the end, whatever that rank had to say before.
    lost = [line for line in told if DID_NOT_ANSWER in line]
    if len(lost) < len(told):
        return next(line for line in told if line not in lost), status
    waited = [line for line in lost if "Timed out" in line]
    reason = reason_of(failures) if failures else _ENDED
    # torchrun has to kill a rank that is stopped.
    was_stopped = waited and "ended by SIGKILL" in reason
    if lost and (was_stopped or DID_NOT_ANSWER in reason or _ENDED in reason):
        return (waited or lost)[0], status
    if failures:
        return reason, status
    lines = [line for line in text.splitlines() if line.strip()]
    return f"error: {lines[-1] if lines else 'torchrun failed and told nothing'}", status


def reason_of(failures: Sequence[Mapping[str, str]]) -> str:
    """Why ranks failed, in one line: a user's mistake, a signal, or what failed first.

    Args:
        failures: ``rank``, ``exitcode`` and, where there is one, ``error_file`` of some.
    """
    mistakes = [one for one in failures if int(one["exitcode"]) == train.USER_ERROR]
    # torchrun ends the others by SIGTERM; who was killed otherwise dragged them along.
    killed = [one for one in failures if int(one["exitcode"]) in (-9, -11, -7)]
    if killed and not mistakes:
        name = signal.Signals(-int(killed[0]["exitcode"])).name
        hint = "; its memory may have run out" if name == "SIGKILL" else ""
        return f"error (rank {killed[0]['rank']}): ended by {name}{hint}"
    _, rank, message = min(_recorded(one) for one in mistakes or failures)
    return f"error (rank {rank}): {message.removeprefix('ValueError: ') if mistakes else message}"


_ENDED = "ended with status"
_BLOCK = r"(?m)^(?:\[rank\d+\]:)?\[\d+\]:$"
"""Begins what torchrun says of a rank that failed."""
_FIELD = r"(?m)^\s+(rank|exitcode|error_file|traceback)\s*: (-?\d+|\S.*)"


def _recorded(failure: Mapping[str, str]) -> tuple[int, str, str]:
    """When a rank left its error, its number, and the error; without one last, and its status."""
    file = Path(failure.get("error_file", ""))
    try:
        when = file.stat().st_mtime_ns
        message = json.loads(file.read_text())["message"]["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return sys.maxsize, failure["rank"], f"{_ENDED} {failure['exitcode']}"
    return when, failure["rank"], " ".join(str(message).split())[:400]
