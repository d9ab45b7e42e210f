"""Sources of a small world, run to a given point without tensors or ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from amo_dist.config import AMOConfig
from amo_dist.schedule.plan import Plan, best_curve, candidate_settings, make_plan
from amo_dist.schedule.polar_express import schedule_for
from amo_dist.schedule.source import Amo
from amo_dist.schedule.types import MatrixInfo, Measurement, Schedule

TYPES = ("attn_q", "mlp_down", "expert")
REGISTRY = [
    MatrixInfo(f"layers.{layer}.{name}", shape, name)
    for name, shape in zip(TYPES, [(8, 8), (4, 12), (6, 1)], strict=True)
    for layer in range(5)
]
TIMES: dict[str, Any] = {
    "observe_until": 6,
    "observe_every": 2,
    "transition_steps": 4,
    "sample_size": 3,
}
PAPER = AMOConfig.paper(**TIMES)
MEASURED = AMOConfig(**TIMES)
ELL = {"attn_q": 3e-5, "mlp_down": 2e-3, "expert": 0.04}
SIZE = 6


def spectrum(ell: float) -> list[float]:
    """Singular values from 1 down to about ``ell`` of their norm, evenly in logarithms."""
    return [ell ** (i / (SIZE - 1)) for i in range(SIZE)]


def distance(sigmas: Sequence[float], schedule: Schedule, exact_norm: bool = False) -> float:
    """The mean squared distance to the polar factor that a schedule leaves, in plain Python."""
    norm = schedule.norm_scale * math.hypot(*sigmas)
    images = [schedule.image(sigma / norm) for sigma in sigmas]
    factor, norm = 1.0, math.hypot(*images)
    if exact_norm and norm:
        factor = min(2.0, math.sqrt(len(images)) / norm)
    return sum((factor * y - 1) ** 2 for y in images) / len(images)


def amo(config: AMOConfig = PAPER) -> Amo:
    source = Amo(config)
    source.bind(REGISTRY)
    return source


def observed(source: Amo, ell_by_name: Mapping[str, float]) -> dict[str, Measurement]:
    """Observations of matrices of which only ``ell`` is known; NaN has none."""
    candidates = source.candidates()
    measurements = {
        ell: Measurement(ell, False, [distance(spectrum(ell), schedule) for schedule in candidates])
        for ell in {*ell_by_name.values()}
        if ell > 0
    }
    return {name: measurements[ell] for name, ell in ell_by_name.items() if ell > 0}


def observe(source: Amo, step: int, ell: Mapping[str, float] = ELL) -> list[str]:
    ells = {name: ell[name.rsplit(".", 1)[1]] for name in source.sample(step)}
    return source.record(step, observed(source, ells))


def planned(config: AMOConfig = PAPER, ell: Mapping[str, float] = ELL) -> Amo:
    source = amo(config)
    for step in range(config.interval, config.observe_until + 1, config.interval):
        observe(source, step, ell)
    assert source.plan is not None
    return source


def plan_of(config: AMOConfig, ells: Mapping[str, float] = ELL) -> Plan:
    """A measured plan of types of equal weights and costs, one matrix each."""
    curves = {}
    for name, ell in ells.items():
        tried = [schedule_for(one, steps) for steps, one in candidate_settings(config)]
        curves[name] = best_curve(config, [distance(spectrum(ell), one) for one in tried])
    return make_plan(config, curves, [1 / len(ells)] * len(ells), [10] * len(ells))
