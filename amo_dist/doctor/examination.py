"""Checks on all ranks at once, none of which can hang the others.

A check runs on a thread of its own. When it ends, or its time is up, the ranks exchange its outcome
over a store, which shows who is missing and waits for no check.
"""

from __future__ import annotations

import dataclasses
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from amo_dist.doctor.site import Fault, Site, name_ranks

# Seconds for the other ranks to answer after a check has ended here or run out of time.
GRACE = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        name: Name in its line.
        measure: Function that all ranks call; returns JSON values of this rank. An error is a
            failure.
        figure: Function that makes the text of a success from the values of all ranks, in their
            order, and may raise `Fault`.
        skip: Reason to skip the check here; empty to run it.
    """

    name: str
    measure: Callable[[], Any] = dict
    figure: Callable[[Sequence[Any]], str] = str
    skip: str = ""


class Verdict(NamedTuple):
    """The result of a check, the same on all ranks.

    Attributes:
        name: Name of the check.
        verdict: ``ok``, ``FAIL`` or ``skip``.
        figure: Measurement or fault, in a line.
        is_last: Whether ranks may be out of step after it, and a check may still run on one.
    """

    name: str
    verdict: str
    figure: str
    is_last: bool = False

    def __str__(self) -> str:
        return f"{self.verdict:<4} {self.name}: {self.figure}"


def examine(site: Site, checks: Sequence[Check], seconds: float) -> Iterator[Verdict]:
    """Run checks one after the other; all ranks call it alike.

    Once ranks may be out of step (one is stuck or missing, or an error ended the check on some
    ranks alone), the remaining checks are skipped.

    Args:
        site: Ranks of the examination.
        checks: Checks, the same on all ranks.
        seconds: Seconds for all checks together.

    Yields:
        The verdict of each check.
    """
    end, reason = time.monotonic() + seconds, ""
    for number, check in enumerate(checks):
        if reason or check.skip:
            yield Verdict(check.name, "skip", reason or check.skip)
            continue
        left = max(end - time.monotonic(), 0.0)
        outcome = _measure(site, check, left)
        try:
            outcomes = site.exchange(f"check {number}", outcome, left + GRACE)
        except RuntimeError as fault:  # a `Fault`, or a rank that was lost in between
            verdict = Verdict(check.name, "FAIL", str(fault), is_last=True)
        else:
            verdict = conclude(check, outcomes)
        if verdict.is_last:
            reason = f"after {check.name} ranks may be out of step"
        yield verdict


def _measure(site: Site, check: Check, seconds: float) -> dict[str, Any]:
    """Run a check on a thread; returns its outcome on this rank as JSON values."""
    outcome: dict[str, Any] = {}

    def work() -> None:
        try:
            if site.is_cuda:
                torch.cuda.set_device(site.device)  # a new thread starts on device 0
            outcome.update(state="ended", values=check.measure())
        except Fault as fault:
            outcome.update(state="ended", error=str(fault))
        except Exception as error:
            traceback.print_exc()
            outcome.update(state="broke", error=f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=work, daemon=True, name=check.name)
    thread.start()
    thread.join(seconds)
    return dict(outcome) or {"state": "stuck", "error": f"no end within {seconds:.0f} s"}


def conclude(check: Check, outcomes: Sequence[Mapping[str, Any]]) -> Verdict:
    """Conclude the verdict from the outcomes of a check on all ranks.

    The line has the error of the first rank that did more than wait, and all ranks with the same.
    """
    states = [outcome["state"] for outcome in outcomes]
    errors = {rank: made["error"] for rank, made in enumerate(outcomes) if "error" in made}
    try:
        if errors:
            first = min(errors, key=lambda rank: states[rank] == "stuck")
            ranks = name_ranks([rank for rank, text in errors.items() if text == errors[first]])
            text = " ".join(errors[first].split())
            raise Fault(text if len(outcomes) == 1 else f"{ranks}: {text}")
        return Verdict(check.name, "ok", check.figure([made["values"] for made in outcomes]))
    except Fault as fault:
        is_last = "stuck" in states or 0 < states.count("broke") < len(states)
        return Verdict(check.name, "FAIL", str(fault), is_last)
