"""How well a plan fits momentum that it has not seen.

A plan is made from the spectra that the uniform run observed, and scored on those of its later
steps: singular values are all that Newton-Schulz acts on, so the score needs no second run. With
``x_j = sigma_j / (norm_scale * ||M||_F)`` and ``p`` the map of a matrix's schedule, its residual is
``mean_j (p(x_j)^2 - 1)^2`` and its distance to the polar factor ``mean_j (p(x_j) - 1)^2``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from amo_dist.config import AMOConfig, sort_operator_types
from amo_dist.engine.observer import trial_tensor
from amo_dist.kernels.spectra import schedule_errors
from amo_dist.schedule.budget import ns_step_flops
from amo_dist.schedule.grouping import matrices_by_group
from amo_dist.schedule.observation import effective_ell
from amo_dist.schedule.planning import (
    costs_by_group,
    plan_allocation,
    plan_inputs,
    plan_measured,
    targets,
)
from amo_dist.schedule.polar_express import composed
from amo_dist.schedule.trials import ErrorSums, Trials
from amo_dist.schedule.types import MatrixInfo, Schedule
from benchmarks.plan_quality.settings import Settings

Spectra: TypeAlias = Mapping[int, Mapping[str, Tensor]]
"""Singular values over the Frobenius norm, float64, by step and name of the matrix."""
Planner: TypeAlias = Callable[[Spectra, Sequence[MatrixInfo]], Mapping[str, Schedule]]
"""From observed spectra to a schedule for each matrix by name."""

DEFAULTS = AMOConfig()
"""For the uniform schedule, the range of steps and the shrinkage."""


def split(spectra: Spectra, settings: Settings) -> tuple[Spectra, Spectra]:
    """What a plan is made from, at the steps of observation, and what it is scored on."""
    until, every = settings.observe_until, settings.observe_every
    seen = {step: found for step, found in spectra.items() if step <= until and step % every == 0}
    held_out = {step: found for step, found in spectra.items() if step > until}
    return seen, held_out


def errors(schedule: Schedule, values: Tensor) -> tuple[float, float]:
    """Mean squared residual, and mean squared distance to the polar factor, of one matrix.

    Args:
        schedule: Scaled by the Frobenius norm.
        values: Singular values over the Frobenius norm, float64, of the short side.
    """
    residual, distance = tried_errors(values, *trial_tensor([schedule]))
    return residual, distance


def score(
    schedules: Mapping[str, Schedule], held_out: Spectra, registry: Sequence[MatrixInfo]
) -> dict[str, Any]:
    """Root mean squares over all matrices and steps, and by operator type; flops of uniform."""
    found: dict[str, list[tuple[float, float]]] = {}
    for matrix in registry:
        found.setdefault(matrix.operator_type, []).extend(
            errors(schedules[matrix.name], spectra[matrix.name]) for spectra in held_out.values()
        )
    everything = [pair for pairs in found.values() for pair in pairs]
    steps: dict[str, set[int]] = {}
    for matrix in registry:
        steps.setdefault(matrix.operator_type, set()).add(schedules[matrix.name].num_steps)
    return {
        **_root_mean_square(everything),
        "flops": relative_flops(schedules, registry),
        "by_type": {
            kind: {"num_steps": sorted(steps[kind]), **_root_mean_square(found[kind])}
            for kind in sort_operator_types(found)
        },
    }


def _root_mean_square(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    residual, distance = (
        math.sqrt(statistics.fmean(values)) for values in zip(*pairs, strict=True)
    )
    return {"residual": residual, "distance": distance}


def relative_flops(schedules: Mapping[str, Schedule], registry: Sequence[MatrixInfo]) -> float:
    """Newton-Schulz flops of a step over those of the uniform schedule."""
    costs = {matrix.name: ns_step_flops(*matrix.shape) for matrix in registry}
    spent = sum(schedules[name].num_steps * cost for name, cost in costs.items())
    return spent / (DEFAULTS.base_steps * sum(costs.values()))


def uniform(seen: Spectra, registry: Sequence[MatrixInfo]) -> dict[str, Schedule]:
    """The schedule that AMO observes with, for every matrix."""
    schedule = composed(DEFAULTS.base_ell, DEFAULTS.base_steps)
    return {matrix.name: schedule for matrix in registry}


def projected(planner: str, budget_unit: str, granularity: str = "operator_type") -> Planner:
    """The paper's objective, at the budget of uniform.

    Args:
        planner: ``greedy`` or ``exact``.
        budget_unit: ``steps`` or ``flops``.
        granularity: What shares a schedule.
    """
    config = AMOConfig(
        objective="projected", planner=planner, budget_unit=budget_unit, granularity=granularity
    )

    def plan(seen: Spectra, registry: Sequence[MatrixInfo]) -> dict[str, Schedule]:
        groups = matrices_by_group(registry, granularity)
        robust = [_robust_ell(seen, matrices) for matrices in groups.values()]
        by_group = dict(zip(groups, targets(config, robust), strict=True))
        found = plan_allocation(config, by_group, costs=costs_by_group(groups)).schedules()
        return {matrix.name: found[group] for group, some in groups.items() for matrix in some}

    return plan


def measured(budget_unit: str, ratio: float = 1.0, granularity: str = "operator_type") -> Planner:
    """The measured residuals, exactly.

    Args:
        budget_unit: ``steps`` or ``flops``.
        ratio: Budget over that of uniform.
        granularity: What shares a schedule.
    """
    config = AMOConfig(budget_unit=budget_unit, budget_ratio=ratio, granularity=granularity)

    def plan(seen: Spectra, registry: Sequence[MatrixInfo]) -> dict[str, Schedule]:
        groups = matrices_by_group(registry, granularity)
        costs = costs_by_group(groups)
        inputs = plan_inputs(config, tuple(groups), costs)
        steps = range(inputs["min_steps"], inputs["max_steps"] + 1)
        trials = Trials(steps, config.base_steps, config.base_ell)
        tried = trial_tensor(trials.schedules())
        sums = ErrorSums.empty(groups, trials)
        for spectra in seen.values():
            sums = sums.plus(
                {
                    group: [tried_errors(spectra[m.name], *tried) for m in some]
                    for group, some in groups.items()
                }
            )
        found = plan_measured(
            config,
            {group: trials.best(sums.mean(group)) for group in groups},
            num_matrices={group: len(some) for group, some in groups.items()},
            ell_robust=[_robust_ell(seen, some) for some in groups.values()],
            costs=costs,
        ).schedules()
        return {matrix.name: found[group] for group, some in groups.items() for matrix in some}

    return plan


def tried_errors(values: Tensor, coefficients: Tensor, norm_scale: float) -> list[float]:
    """Errors of all trials on one matrix, as an observation measures them."""
    found: list[float] = schedule_errors(values / norm_scale, coefficients).view(-1).tolist()
    return found


def _robust_ell(seen: Spectra, matrices: Sequence[MatrixInfo]) -> float:
    """Median over observations of the medians over matrices, as `AMOPolicy` takes them."""
    medians = []
    for spectra in seen.values():
        ells = [effective_ell(m.name, spectra[m.name].min().item()) for m in matrices]
        if valid := [ell for ell in ells if ell is not None]:
            medians.append(statistics.median(valid))
    return statistics.median(medians) if medians else DEFAULTS.base_ell


PLANNERS: Mapping[str, Planner] = {
    "uniform PE": uniform,
    "paper, steps": projected("greedy", "steps"),
    "paper, flops": projected("exact", "flops"),
    "measured, steps": measured("steps"),
    "measured, flops 1.0": measured("flops"),
    "measured, flops 0.9": measured("flops", 0.9),
    "measured, flops 0.8": measured("flops", 0.8),
    "measured by shape, flops 1.0": measured("flops", granularity="shape"),
}
"""What is scored; one line for each."""


def score_all(
    spectra: Spectra, registry: Sequence[MatrixInfo], settings: Settings
) -> dict[str, Any]:
    """The score of each of `PLANNERS` on the held-out steps of one uniform run."""
    seen, held_out = split(spectra, settings)
    return {
        name: score(plan(seen, registry), held_out, registry) for name, plan in PLANNERS.items()
    }
