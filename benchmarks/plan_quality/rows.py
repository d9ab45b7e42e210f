"""What is compared after the switch: one line for each row."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from amo_dist import Schedule
from amo_dist.schedule.allocate import flop_budget, least_error, ns_step_flops
from amo_dist.schedule.coefficients import named_schedule
from amo_dist.schedule.plan import GRID
from amo_dist.schedule.polar_express import schedule_for
from benchmarks.plan_quality.spectra import MEASURES, Shapes, Spectra, images, measures

BASE_STEPS, BASE_ELL = 5, 1e-3
"""Steps and ``ell`` of the uniform schedule, which all rows run up to the switch."""
ELLS = tuple(sorted({*GRID, BASE_ELL}))
LEAST, MOST = 3, 7
"""The range of steps that a plan of `amo_dist.AMOConfig` may give."""

_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """Schedules after the switch: of all matrices alike, or by a plan.

    Attributes:
        title: For tables.
        steps: Steps of a uniform schedule.
        named: Name of a named schedule.
        measure: What a plan minimises, one of `MEASURES`.
        weighting: ``alike`` or ``entries``.
        ratio: Flops over those of uniform five steps.
        least: Fewest steps that a type may get; fewer where the budget asks for it.
        by_depth: Whether the thirds of the depth are planned apart.
    """

    title: str
    steps: int = BASE_STEPS
    named: str = ""
    measure: str = ""
    weighting: str = "entries"
    ratio: float = 1.0
    least: int = LEAST
    by_depth: bool = False


def _plan(title: str, measure: str, ratio: float, **fields: Any) -> Row:
    return Row(f"{title}, {ratio}", measure=measure, ratio=ratio, **fields)


ROWS: Mapping[str, Row] = {
    "uniform-5": Row("uniform 5", steps=5),
    "uniform-4": Row("uniform 4", steps=4),
    "uniform-3": Row("uniform 3", steps=3),
    "kj": Row("Muon-KJ", named="kj"),
    "residual-alike-0.8": _plan("residual, alike", "residual", 0.8, weighting="alike"),
    "residual-0.8": _plan("residual, entries", "residual", 0.8),
    "distance-0.8": _plan("distance, entries", "distance", 0.8),
    "distance-0.6": _plan("distance, entries", "distance", 0.6),
    "distance-0.5": _plan("distance, entries", "distance", 0.5),
    "distance-0.6-from-1": _plan("distance, entries, 1 to 7 steps", "distance", 0.6, least=1),
    "direction-0.8": _plan("direction, entries", "direction", 0.8),
    "depth-0.6-from-1": _plan(
        "distance, entries, by type and depth, 1 to 7 steps",
        *("distance", 0.6),
        least=1,
        by_depth=True,
    ),
}
"""Rows by name, in the order in which they run."""


class Planner:
    """Makes rows out for one model, from spectra up to the switch.

    Args:
        spectra: Spectra of the uniform run.
        shapes: Shapes of the matrices, by name.
        types: Operator types of the matrices, by name.
    """

    def __init__(self, spectra: Spectra, shapes: Shapes, types: Mapping[str, str]) -> None:
        self._shapes, self._types = shapes, types
        tried = [schedule_for(ell, k) for k in range(1, MOST + 1) for ell in ELLS]
        # Errors by name: ``(steps - 1, ell, measure)``, means over the steps observed.
        self._errors = {
            name: torch.stack(
                [measures(images(observed[name], tried)) for observed in spectra.values()]
            )
            .mean(0)
            .view(MOST, len(ELLS), len(MEASURES))
            for name in shapes
        }

    def choose(self, row: Row) -> tuple[dict[str, Schedule], dict[str, tuple[int, float]]]:
        """The schedules of a row by name of the matrix, and its plan.

        The plan has, by group, the steps and the ``ell`` that they are composed for; it is empty
        for a row without one.
        """
        if not row.measure:
            schedule = schedule_for(BASE_ELL, row.steps)
            if row.named:
                schedule = named_schedule(row.named).schedule
            return dict.fromkeys(self._shapes, schedule), {}
        groups: dict[str, list[str]] = {}
        for name in self._shapes:
            groups.setdefault(self._group(name, row), []).append(name)
        costs = [sum(ns_step_flops(*self._shapes[n]) for n in names) for names in groups.values()]
        budget = flop_budget(row.ratio, costs, BASE_STEPS)
        low = min(row.least, budget // sum(costs))
        choices = [self._choices(names, row, low) for names in groups.values()]
        curves = [{k: error for k, (error, _) in own.items()} for own in choices]
        allocation = least_error(curves, budget, costs)
        schedules: dict[str, Schedule] = {}
        plan = {}
        for (group, names), k, own in zip(groups.items(), allocation, choices, strict=True):
            _, ell = own[k]
            plan[group] = (k, ell)
            schedules |= dict.fromkeys(names, schedule_for(ell, k))
        return schedules, plan

    def _choices(self, names: Sequence[str], row: Row, low: int) -> dict[int, tuple[float, float]]:
        """Least weighted error of a group by steps, and its ``ell``; ties go to the greater one."""
        measure, counts_entries = MEASURES.index(row.measure), row.weighting == "entries"
        # The error of an update is (0.2 sqrt(max(m, n)))^2 min(m, n) times a mean over directions.
        weights = {n: math.prod(self._shapes[n]) if counts_entries else 1 for n in names}
        errors = sum(weights[name] * self._errors[name][..., measure] for name in names)
        return {
            k: min(
                zip(errors[k - 1].tolist(), ELLS, strict=True),
                key=lambda choice: (choice[0], -choice[1]),
            )
            for k in range(low, MOST + 1)
        }

    def _group(self, name: str, row: Row) -> str:
        if not row.by_depth:
            return self._types[name]
        layers = 1 + max(map(_layer, self._shapes))
        return f"{self._types[name]} {('early', 'middle', 'late')[3 * _layer(name) // layers]}"


def _layer(name: str) -> int:
    match = _LAYER.search(name)
    assert match is not None
    return int(match[1])


def relative_flops(schedules: Mapping[str, Schedule], shapes: Shapes) -> float:
    """Newton-Schulz flops of a step over those of uniform five steps."""
    costs = {name: ns_step_flops(*shape) for name, shape in shapes.items()}
    spent = sum(schedules[name].num_steps * cost for name, cost in costs.items())
    return spent / (BASE_STEPS * sum(costs.values()))
