"""What is compared after the switch: one line for each row."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from amo_dist import Schedule
from amo_dist.schedule.budget import flop_budget, ns_step_flops
from amo_dist.schedule.coefficients import named_schedule
from amo_dist.schedule.exact import least_error
from amo_dist.schedule.polar_express import composed
from amo_dist.schedule.trials import GRID
from benchmarks.plan_quality.spectra import (
    MEASURES,
    Shapes,
    Spectra,
    images,
    measures,
    weight,
)

BASE_STEPS, BASE_ELL = 5, 1e-3
"""Of the uniform schedule, which all rows run up to the switch."""
ELLS = tuple(sorted({*GRID, BASE_ELL}))
LEAST, MOST = 3, 7
"""The range of steps that a plan of `amo_dist.AMOConfig` may give."""

_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """Schedules after the switch: of all matrices alike, or by a plan.

    Attributes:
        title: For tables.
        steps: Of a uniform schedule; 0: none.
        named: Of a named schedule.
        measure: What a plan minimises, one of `MEASURES`.
        weighting: ``alike`` or ``entries``.
        ratio: Flops over those of uniform five steps.
        least: Fewest steps that a type may get; fewer where the budget asks for it.
        by_depth: Whether the thirds of the depth are planned apart.
    """

    title: str
    steps: int = 0
    named: str = ""
    measure: str = ""
    weighting: str = "entries"
    ratio: float = 1.0
    least: int = LEAST
    by_depth: bool = False


def _plan(title: str, measure: str, ratio: float, **how: Any) -> Row:
    return Row(f"{title}, {ratio}", measure=measure, ratio=ratio, **how)


ROWS: Mapping[str, Row] = MappingProxyType(
    {
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
)
"""By name, in the order in which they run."""


@dataclasses.dataclass(frozen=True, slots=True)
class Chosen:
    """A row made out for one model."""

    schedules: Mapping[str, Schedule]
    """By name of the matrix."""
    plan: Mapping[str, tuple[int, float]]
    """By group: steps, and the ``ell`` that they are composed for; empty without a plan."""


class Planner:
    """Makes rows out for one model, from spectra up to the switch.

    Args:
        spectra: Of the uniform run.
        shapes: Of the matrices, by name.
        types: Their operator types, by name.
    """

    def __init__(self, spectra: Spectra, shapes: Shapes, types: Mapping[str, str]) -> None:
        self._shapes, self._types = shapes, types
        tried = [composed(ell, k) for k in range(1, MOST + 1) for ell in ELLS]
        self._errors = {
            name: torch.stack([measures(images(found[name], tried)) for found in spectra.values()])
            .mean(0)
            .view(MOST, len(ELLS), len(MEASURES))
            for name in shapes
        }
        """By name: ``(steps - 1, ell, measure)``, means over the steps observed."""

    def choose(self, row: Row) -> Chosen:
        """The schedules of a row."""
        if row.measure:
            return self._planned(row)
        if row.named:
            schedule = named_schedule(row.named).schedule
        else:
            schedule = composed(BASE_ELL, row.steps)
        return Chosen(dict.fromkeys(self._shapes, schedule), {})

    def _planned(self, row: Row) -> Chosen:
        groups: dict[str, list[str]] = {}
        for name in self._shapes:
            groups.setdefault(self._group(name, row), []).append(name)
        costs = [sum(ns_step_flops(*self._shapes[n]) for n in some) for some in groups.values()]
        budget = flop_budget(row.ratio, costs, BASE_STEPS)
        low, high = min(row.least, budget // sum(costs)), MOST
        curves, ells = [], []
        for some in groups.values():
            table = torch.stack(
                [
                    weight(self._shapes[name], row.weighting)
                    * self._errors[name][..., MEASURES.index(row.measure)]
                    for name in some
                ]
            ).sum(0)
            found = {k: table[k - 1].tolist() for k in range(low, high + 1)}
            # Ties go to the greater ell.
            places = {
                k: min(range(len(ELLS)), key=lambda j, r=row_: (r[j], -j))
                for k, row_ in found.items()
            }
            curves.append({k: found[k][j] for k, j in places.items()})
            ells.append({k: ELLS[j] for k, j in places.items()})
        allocation = least_error(curves, budget, costs)
        plan = {
            group: (k, each[k]) for group, k, each in zip(groups, allocation, ells, strict=True)
        }
        return Chosen(
            {
                n: composed(plan[group][1], plan[group][0])
                for group in groups
                for n in groups[group]
            },
            plan,
        )

    def _group(self, name: str, row: Row) -> str:
        if not row.by_depth:
            return self._types[name]
        layers = 1 + max(map(_layer, self._shapes))
        return f"{self._types[name]} {('early', 'middle', 'late')[3 * _layer(name) // layers]}"


def _layer(name: str) -> int:
    found = _LAYER.search(name)
    assert found is not None
    return int(found[1])


def relative_flops(schedules: Mapping[str, Schedule], shapes: Shapes) -> float:
    """Newton-Schulz flops of a step over those of uniform five steps."""
    costs = {name: ns_step_flops(*shape) for name, shape in shapes.items()}
    spent = sum(schedules[name].num_steps * cost for name, cost in costs.items())
    return spent / (BASE_STEPS * sum(costs.values()))
