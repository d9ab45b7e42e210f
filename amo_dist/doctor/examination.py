"""Checks on all ranks at once, none of which can hang the others.

A check runs on a thread of its own. When it ends, or its time is up, the ranks exchange its outcome
over a store, which shows who is missing and waits for no check.
"""

from __future__ import annotations

import dataclasses
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from amo_dist.doctor.site import Fault, Site, name_ranks

GRACE = 10.0
"""Seconds for the other ranks to answer after a check has ended here or run out of time."""
MOST_CHARACTERS = 400
"""Most characters of an error in a line; the JSON holds the whole error."""


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        name: Name in its line.
        measure: Function that all ranks call; returns JSON values of this rank. An error is a
            failure.
        figure: Text of a success, or a function that makes it from the values of all ranks, in
            their order, and may raise `Fault`.
        skip: Reason to skip the check here; empty to run it.
    """

    name: str
    measure: Callable[[], Any] = dict
    figure: str | Callable[[Sequence[Any]], str] = str
    skip: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a check, the same on all ranks.

    Attributes:
        name: Name of the check.
        verdict: ``ok``, ``FAIL`` or ``skip``.
        figure: Measurement or fault, in a line.
        outcomes: Values or full error of each rank.
    """

    name: str
    verdict: str
    figure: str
    outcomes: Sequence[Mapping[str, Any]] = ()

    def __str__(self) -> str:
        return f"{self.verdict:<4} {self.name}: {self.figure}"


class Examination:
    """Runs checks one after the other; all ranks construct it and call it alike.

    Once ranks may be out of step (one is stuck or missing, or an error ended the check on some
    ranks alone), the remaining checks are skipped.

    Args:
        site: Ranks of the examination.
        seconds: Seconds for all checks together; one check may take half of them.
        report: Function that every rank calls with each verdict.
    """

    def __init__(self, site: Site, seconds: float, report: Callable[[Verdict], object]) -> None:
        self.verdicts: list[Verdict] = []
        self.is_stuck = False
        """Whether a check still runs on any rank, so that processes must end by ``os._exit``."""
        self._site, self._report = site, report
        self._end, self._longest = time.monotonic() + seconds, seconds / 2
        self._skip_reason = ""

    def run(self, checks: Sequence[Check]) -> None:
        """Run checks, and keep their verdicts."""
        for check in checks:
            skip = self._skip_reason or check.skip
            verdict = Verdict(check.name, "skip", skip) if skip else self._examine(check)
            self.verdicts.append(verdict)
            self._report(verdict)

    def _examine(self, check: Check) -> Verdict:
        seconds = min(self._longest, self._end - time.monotonic())
        outcome = self._measure(check, seconds)
        key = f"check {len(self.verdicts)}"
        try:
            outcomes = self._site.exchange(key, outcome, seconds + GRACE)
        except RuntimeError as fault:  # a `Fault`, or a rank that was lost in between
            self.is_stuck = True
            self._skip_reason = f"after {check.name} ranks are missing"
            return Verdict(check.name, "FAIL", str(fault))
        states = [outcome["state"] for outcome in outcomes]
        self.is_stuck = "stuck" in states
        if self.is_stuck or 0 < states.count("broke") < len(states):
            self._skip_reason = f"after {check.name} ranks may be out of step"
        elif outcomes[0]["left"] < self._longest / 8:  # rank 0's clock decides for all
            self._skip_reason = "no time left (--seconds)"
        return conclude(check, outcomes)

    def _measure(self, check: Check, seconds: float) -> dict[str, Any]:
        """Run a check on a thread; returns its outcome on this rank as JSON values."""
        outcome: dict[str, Any] = {}

        def work() -> None:
            try:
                if self._site.is_cuda:
                    torch.cuda.set_device(self._site.device)  # a new thread starts on device 0
                outcome.update(state="ended", values=check.measure())
            except Fault as fault:
                outcome.update(state="ended", error=str(fault))
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
                outcome.update(state="broke", error=text, traceback=traceback.format_exc())

        thread = threading.Thread(target=work, daemon=True, name=check.name)
        thread.start()
        thread.join(seconds)
        stuck = {"state": "stuck", "error": f"no end within {seconds:.0f} s"}
        return {**(outcome or stuck), "left": self._end - time.monotonic()}


def conclude(check: Check, outcomes: Sequence[Mapping[str, Any]]) -> Verdict:
    """Conclude the verdict from the outcomes of a check on all ranks.

    The line has the error of the first rank that did more than wait, and all ranks with the same.
    """
    errors = {rank: made["error"] for rank, made in enumerate(outcomes) if "error" in made}
    try:
        if errors:
            first = min(errors, key=lambda rank: outcomes[rank]["state"] == "stuck")
            ranks = name_ranks([rank for rank, text in errors.items() if text == errors[first]])
            text = " ".join(errors[first].split())[:MOST_CHARACTERS]
            raise Fault(text if len(outcomes) == 1 else f"{ranks}: {text}")
        values = [outcome["values"] for outcome in outcomes]
        figure = check.figure if isinstance(check.figure, str) else check.figure(values)
        return Verdict(check.name, "ok", figure, outcomes)
    except Fault as fault:
        return Verdict(check.name, "FAIL", str(fault), outcomes)
