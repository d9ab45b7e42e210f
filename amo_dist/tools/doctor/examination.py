"""Checks on all ranks at once, none of which can hang the others.

A check runs on a thread of its own. When it ends, or its time is up, all ranks tell how it went
them over a group of their own, on the CPU: ranks that do not answer there are named.
"""

from __future__ import annotations

import dataclasses
import datetime
import re
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from amo_dist.distributed.agreement import gather_json

GRACE = 10.0
"""Seconds to answer, once a check has ended on this rank, or its time is up."""
MOST_CHARACTERS = 400
"""Of an error in a line; the JSON holds all of it."""


class Fault(RuntimeError):
    """What a check measured is wrong; raised where no collective is under way."""


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """One thing to find out.

    Attributes:
        name: Of its line.
        measure: Called on all ranks; JSON values of this rank. An error is a failure.
        tell: The figure, from the values of all ranks in their order; raises `Fault`.
        is_collective: Whether ranks wait for each other in ``measure``.
        skip: Why there is nothing to do here, if so.
    """

    name: str
    measure: Callable[[], Any] = dict
    tell: Callable[[Sequence[Any]], str] = str
    is_collective: bool = True
    skip: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """How a check ended, the same on all ranks.

    Attributes:
        name: Of the check.
        verdict: ``ok``, ``FAIL`` or ``skip``.
        figure: What was found, or what is wrong, in a line.
        values: Of each rank; empty where any failed.
        errors: By rank, in full.
    """

    name: str
    verdict: str
    figure: str
    values: Sequence[Any] = ()
    errors: Mapping[int, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.verdict:<4} {self.name}: {self.figure}"


class Examination:
    """Runs checks one after the other; all ranks make it and call it alike.

    Once ranks may be out of step (one is stuck or missing, or left a collective that others are
    in) the rest is skipped.

    Args:
        control: Process group of all ranks on the CPU that no check uses; None on one rank.
        device: Of this rank.
        seconds: For all checks.
        deadline: Seconds for one check.
        say: Called with each verdict, on every rank.
    """

    def __init__(
        self,
        control: dist.ProcessGroup | None,
        device: torch.device,
        *,
        seconds: float,
        deadline: float,
        say: Callable[[Verdict], object],
    ) -> None:
        self.verdicts: list[Verdict] = []
        self.is_stuck = False
        """Whether a check still runs on some rank: a process must then end by ``os._exit``."""
        self._control, self._device, self._say = control, device, say
        self._end, self._deadline = time.monotonic() + seconds, deadline
        self._why_not = ""
        self._wake = threading.Event()
        self._is_told_to_stop = False

    def run(self, checks: Sequence[Check]) -> None:
        """Run checks, and keep their verdicts."""
        for check in checks:
            skip = self._why_not or check.skip
            verdict = Verdict(check.name, "skip", skip) if skip else self._examine(check)
            self.verdicts.append(verdict)
            self._say(verdict)

    def stop(self, *_: object) -> None:
        """End the check under way now, as if its time were up; may be called by a signal."""
        self._is_told_to_stop = True
        self._wake.set()

    def _examine(self, check: Check) -> Verdict:
        most = min(self._deadline, self._end - time.monotonic())
        outcome = self._measure(check, most)
        left = 0.0 if self._is_told_to_stop else max(0.0, self._end - time.monotonic())
        try:
            outcomes = self._gather(outcome, GRACE + min(left, self._deadline))
        except RuntimeError as error:
            self.is_stuck = True
            self._why_not = f"after {check.name} ranks are missing"
            return Verdict(check.name, "FAIL", _missing(str(error)))
        states = [one["state"] for one in outcomes]
        self.is_stuck = "stuck" in states
        is_torn = check.is_collective and 0 < states.count("broke") < len(states)
        if self.is_stuck or is_torn:
            self._why_not = f"after {check.name} ranks may be out of step"
        elif outcomes[0]["left"] < self._deadline / 4:  # by one clock: all ranks go on, or none
            self._why_not = "no time left (--seconds)"
        return conclude(check, outcomes)

    def _measure(self, check: Check, seconds: float) -> dict[str, Any]:
        """How the check went on this rank, JSON values."""
        outcome: dict[str, Any] = {}
        self._wake.clear()

        def work() -> None:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a new thread is on device 0
            try:
                found: dict[str, Any] = {"state": "ended", "values": check.measure()}
            except Exception as error:
                state = "ended" if isinstance(error, Fault) else "broke"
                kind = "" if isinstance(error, Fault) else f"{type(error).__name__}: "
                found = {"state": state, "error": f"{kind}{error}"}
                found["traceback"] = traceback.format_exc()
            outcome.update(found)
            self._wake.set()

        if not self._is_told_to_stop:
            threading.Thread(target=work, daemon=True, name=check.name).start()
            self._wake.wait(seconds)
        left = {"left": self._end - time.monotonic()}
        if outcome:
            return {**outcome, **left}
        why = "stopped from outside" if self._is_told_to_stop else f"no end within {seconds:.0f} s"
        return {"state": "stuck", "error": why, **left}

    def _gather(self, outcome: dict[str, Any], seconds: float) -> list[dict[str, Any]]:
        if self._control is not None:
            timeout = datetime.timedelta(seconds=seconds)
            dist.monitored_barrier(self._control, timeout, wait_all_ranks=True)
        outcomes: list[dict[str, Any]] = gather_json(outcome, self._control)
        return outcomes


def conclude(check: Check, outcomes: Sequence[Mapping[str, Any]]) -> Verdict:
    """The verdict from how a check went on each rank."""
    errors = {rank: one["error"] for rank, one in enumerate(outcomes) if "error" in one}
    if errors:
        full = {rank: outcomes[rank].get("traceback", text) for rank, text in errors.items()}
        return Verdict(check.name, "FAIL", _by_rank(errors, outcomes), errors=full)
    values = [one["values"] for one in outcomes]
    try:
        return Verdict(check.name, "ok", check.tell(values), values)
    except Fault as fault:
        return Verdict(check.name, "FAIL", str(fault), values)


def _by_rank(errors: Mapping[int, str], outcomes: Sequence[Mapping[str, Any]]) -> str:
    """Each error once, with its ranks; those that only waited come last."""
    order = sorted(errors, key=lambda rank: outcomes[rank]["state"] == "stuck")
    told = []
    for text in dict.fromkeys(errors[rank] for rank in order):
        ranks = [rank for rank, other in errors.items() if other == text]
        where = "all ranks" if 1 < len(ranks) == len(outcomes) else name_ranks(ranks)
        short = " ".join(text.split())[:MOST_CHARACTERS]
        told.append(short if len(outcomes) == 1 else f"{where}: {short}")
    return "; ".join(told)


def name_ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 1, 3``."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _missing(error: str) -> str:
    """Who did not answer, as rank 0 learns it from the barrier."""
    found = re.search(r"Ranks ([\d, ]+) failed to pass", error)
    if found is None:
        return f"the ranks did not meet: {' '.join(error.split())[:MOST_CHARACTERS]}"
    return f"no answer from {name_ranks([int(rank) for rank in found[1].split(',')])}"


def alike(values: Sequence[Mapping[str, Any]]) -> None:
    """Compare what all ranks must have alike.

    Raises:
        Fault: Names the key, what rank 0 has, and who has something else.
    """
    for key, expected in values[0].items():
        others = [rank for rank, found in enumerate(values) if found[key] != expected]
        if others:
            found = values[others[0]][key]
            raise Fault(f"{key}: rank 0 has {expected}, {name_ranks(others)} {found}")
