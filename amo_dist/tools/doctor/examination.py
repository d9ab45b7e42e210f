"""Checks on all ranks at once, none of which can hang the others.

A check runs on a thread of its own. When it ends, or its time is up, the ranks sign a store, which
shows who is missing, and exchange the outcomes over a group on the CPU that no check uses.
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
        is_collective: Whether ranks wait for each other in ``measure``.
        skip: Reason to skip the check here; empty to run it.
    """

    name: str
    measure: Callable[[], Any] = dict
    figure: str | Callable[[Sequence[Any]], str] = str
    is_collective: bool = True
    skip: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a check, the same on all ranks.

    Attributes:
        name: Name of the check.
        verdict: ``ok``, ``FAIL`` or ``skip``.
        figure: Measurement or fault, in a line.
        values: Values of each rank; empty if any rank failed.
        errors: Full errors by rank.
    """

    name: str
    verdict: str
    figure: str
    values: Sequence[Any] = ()
    errors: Mapping[int, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.verdict:<4} {self.name}: {self.figure}"


class Examination:
    """Runs checks one after the other; all ranks construct it and call it alike.

    Once ranks may be out of step (one is stuck or missing, or left a collective that others are
    in), the remaining checks are skipped.

    Args:
        site: Ranks of the examination.
        seconds: Seconds for all checks together.
        deadline: Seconds for one check.
        report: Function that every rank calls with each verdict.
    """

    def __init__(
        self,
        site: Site,
        *,
        seconds: float,
        deadline: float,
        report: Callable[[Verdict], object],
    ) -> None:
        self.verdicts: list[Verdict] = []
        self.is_stuck = False
        """Whether a check still runs on any rank, so that processes must end by ``os._exit``."""
        self._site, self._report = site, report
        self._end, self._deadline = time.monotonic() + seconds, deadline
        self._skip_reason = ""

    def run(self, checks: Sequence[Check]) -> None:
        """Run checks, and keep their verdicts."""
        for check in checks:
            skip = self._skip_reason or check.skip
            verdict = Verdict(check.name, "skip", skip) if skip else self._examine(check)
            self.verdicts.append(verdict)
            self._report(verdict)

    def _examine(self, check: Check) -> Verdict:
        outcome = self._measure(check, min(self._deadline, self._end - time.monotonic()))
        left = max(0.0, self._end - time.monotonic())
        try:
            self._site.sign(f"check {len(self.verdicts)}", GRACE + min(left, self._deadline))
            outcomes = self._site.gather(outcome)
        except RuntimeError as fault:  # a `Fault`, or a rank that was lost in between
            self.is_stuck = True
            self._skip_reason = f"after {check.name} ranks are missing"
            return Verdict(check.name, "FAIL", str(fault))
        states = [outcome["state"] for outcome in outcomes]
        self.is_stuck = "stuck" in states
        is_torn = check.is_collective and 0 < states.count("broke") < len(states)
        if self.is_stuck or is_torn:
            self._skip_reason = f"after {check.name} ranks may be out of step"
        elif outcomes[0]["left"] < self._deadline / 4:  # rank 0's clock decides for all
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
            except Exception as error:
                is_fault = isinstance(error, Fault)
                text = str(error) if is_fault else f"{type(error).__name__}: {error}"
                state = "ended" if is_fault else "broke"
                outcome.update(state=state, error=text, traceback=traceback.format_exc())

        thread = threading.Thread(target=work, daemon=True, name=check.name)
        thread.start()
        thread.join(seconds)
        stuck = {"state": "stuck", "error": f"no end within {seconds:.0f} s"}
        return {**(outcome or stuck), "left": self._end - time.monotonic()}


def conclude(check: Check, outcomes: Sequence[Mapping[str, Any]]) -> Verdict:
    """Conclude the verdict from the outcomes of a check on all ranks."""
    errors = {rank: made["error"] for rank, made in enumerate(outcomes) if "error" in made}
    if errors:
        full = {rank: outcomes[rank].get("traceback", text) for rank, text in errors.items()}
        return Verdict(check.name, "FAIL", _by_rank(errors, outcomes), errors=full)
    values = [outcome["values"] for outcome in outcomes]
    try:
        figure = check.figure if isinstance(check.figure, str) else check.figure(values)
        return Verdict(check.name, "ok", figure, values)
    except Fault as fault:
        return Verdict(check.name, "FAIL", str(fault), values)


def _by_rank(errors: Mapping[int, str], outcomes: Sequence[Mapping[str, Any]]) -> str:
    """List each error once with its ranks; those that only waited come last."""
    order = sorted(errors, key=lambda rank: outcomes[rank]["state"] == "stuck")
    texts = []
    for text in dict.fromkeys(errors[rank] for rank in order):
        ranks = [rank for rank, other in errors.items() if other == text]
        culprits = "all ranks" if 1 < len(ranks) == len(outcomes) else name_ranks(ranks)
        short = " ".join(text.split())[:MOST_CHARACTERS]
        texts.append(short if len(outcomes) == 1 else f"{culprits}: {short}")
    return "; ".join(texts)


def check_alike(values: Sequence[Mapping[str, Any]]) -> None:
    """Check that all ranks have the same values.

    Raises:
        Fault: They differ; the message has the key, rank 0's value, and the ranks with another.
    """
    for key, expected in values[0].items():
        others = [rank for rank, value in enumerate(values) if value[key] != expected]
        if others:
            value = values[others[0]][key]
            raise Fault(f"{key}: rank 0 has {expected}, {name_ranks(others)} {value}")
