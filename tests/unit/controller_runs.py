"""Controllers of a small world, run to a given point, for the tests of the controller."""

from __future__ import annotations

from typing import Any

import pytest

from amo_dist.config import AMOConfig
from amo_dist.schedule.amo import AMOPolicy
from amo_dist.schedule.plan import Plan
from amo_dist.schedule.types import MatrixInfo
from tests import spectra
from tests.held import Held

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
CONFIG = AMOConfig.paper(**TIMES)
MEASURED = AMOConfig(**TIMES)
BOTH = [pytest.param(CONFIG, id="projected"), pytest.param(MEASURED, id="measured")]
ELL = {"attn_q": 3e-5, "mlp_down": 2e-3, "expert": 0.04}


def controller(config: AMOConfig = CONFIG) -> Held:
    fresh = Held(AMOPolicy(config))
    fresh.bind(REGISTRY)
    return fresh


def observe(target: Held, step: int, ell: dict[str, float] = ELL) -> None:
    ells = {name: ell[name.rsplit(".", 1)[1]] for name in target.sample(step)}
    spectra.record(target, step, ells)


def planned(config: AMOConfig = CONFIG, ell: dict[str, float] = ELL) -> Held:
    target = controller(config)
    for step in range(config.interval, config.observe_until + 1, config.interval):
        observe(target, step, ell)
    target.adopt_plan(target.make_plan())
    return target


def plan_of(config: AMOConfig = CONFIG, ell: dict[str, float] = ELL) -> Plan:
    plan = planned(config, ell).plan
    assert plan is not None
    return plan
