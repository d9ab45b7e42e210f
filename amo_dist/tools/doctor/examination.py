"""Checks on all ranks at once, none of which can hang the others.

A check runs on a thread of its own. When it ends, or its time is up, ranks sign a store, which
names those that do not, and tell how it went over a group on the CPU that no check uses.
"""

from __future__ import annotations

import dataclasses
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from amo_dist.tools.doctor.site import Fault, Site, name_ranks

GRACE = 10.0
"""Seconds to answer, once a check has ended on this rank, or its time is up."""
MOST_CHARACTERS = 400
"""Of an error in a line; the JSON holds all of it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """One thing to find out.

    Attributes:
        name: Of its line.
        measure: Called on all ranks; JSON values of this rank. An error is a failure.
        tell: The figure, or what makes it from the values of all ranks in their order, and may
            raise `Fault`.
        is_collective: Whether ranks wait for each other in ``measure``.
        skip: Why there is nothing to do here, if so.
    """

    name: str
    measure: Callable[[], Any] = dict
    tell: str | Callable[[Sequence[Any]], str] = str
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
        site: The ranks.
        seconds: For all checks.
        deadline: Seconds for one check.
        say: Called with each verdict, on every rank.
    """

    def __init__(
        self,
        site: Site,
        *,
        seconds: float,
        deadline: float,
        say: Callable[[Verdict], object],
    ) -> None:
        self.verdicts: list[Verdict] = []
        self.is_stuck = False
        """Whether a check still runs on some rank: a process must then end by ``os._exit``."""
        self._site, self._say = site, say
        self._end, self._deadline = time.monotonic() + seconds, deadline
        self._why_not = ""

    def run(self, checks: Sequence[Check]) -> None:
        """Run checks, and keep their verdicts."""
        for check in checks:
            skip = self._why_not or check.skip
            verdict = Verdict(check.name, "skip", skip) if skip else self._examine(check)
            self.verdicts.append(verdict)
            self._say(verdict)

    def _examine(self, check: Check) -> Verdict:
        most = min(self._deadline, self._end - time.monotonic())
        outcome = self._measure(check, most)
        left = max(0.0, self._end - time.monotonic())
        try:
            self._site.sign(f"check {len(self.verdicts)}", GRACE + min(left, self._deadline))
            outcomes = self._site.gather(outcome)
        except RuntimeError as fault:  # a `Fault`, or a rank that was lost in between
            self.is_stuck = True
            self._why_not = f"after {check.name} ranks are missing"
            return Verdict(check.name, "FAIL", str(fault))
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

        def work() -> None:
            try:
                if self._site.is_cuda:
                    torch.cuda.set_device(self._site.device)  # a new thread is on device 0
                found: dict[str, Any] = {"state": "ended", "values": check.measure()}
            except Exception as error:
                is_fault = isinstance(error, Fault)
                text = str(error) if is_fault else f"{type(error).__name__}: {error}"
                found = {"state": "ended" if is_fault else "broke", "error": text}
                found["traceback"] = traceback.format_exc()
            outcome.update(found)

        thread = threading.Thread(target=work, daemon=True, name=check.name)
        thread.start()
        thread.join(seconds)
        stuck = {"state": "stuck", "error": f"no end within {seconds:.0f} s"}
        return {**(outcome or stuck), "left": self._end - time.monotonic()}


def conclude(check: Check, outcomes: Sequence[Mapping[str, Any]]) -> Verdict:
    """The verdict from how a check went on each rank."""
    errors = {rank: one["error"] for rank, one in enumerate(outcomes) if "error" in one}
    if errors:
        full = {rank: outcomes[rank].get("traceback", text) for rank, text in errors.items()}
        return Verdict(check.name, "FAIL", _by_rank(errors, outcomes), errors=full)
    values = [one["values"] for one in outcomes]
    try:
        told = check.tell if isinstance(check.tell, str) else check.tell(values)
        return Verdict(check.name, "ok", told, values)
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
