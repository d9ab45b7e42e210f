"""Costs of a step on many ranks: uniform and locked, by ownership."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from amo_dist.config import MuonConfig
from amo_dist.schedule.types import MatrixInfo
from torchtitan_ext.tools.step_cost import OWNERSHIPS, StepCost, lay_out

Row = dict[str, Any]
"""``ownership`` and ``schedule``, and the figures of `StepCost.summary`."""


def step_costs(
    registry: Sequence[MatrixInfo],
    steps: Mapping[str, int],
    ranks: int,
    *,
    layout: str = "fsdp",
    replica_size: int = 8,
) -> list[Row]:
    matrices = lay_out(registry, ranks, layout=layout, replica_size=replica_size)
    schedules = (("uniform", dict.fromkeys(steps, 5)), ("locked", steps))
    cases = itertools.product(OWNERSHIPS, schedules)
    rows: list[Row] = []
    for ownership, (schedule, by_type) in cases:
        config = MuonConfig(ownership=ownership)
        cost = StepCost(registry, matrices, by_type, ranks, config=config)
        rows.append({"ownership": ownership, "schedule": schedule, **cost.summary()})
    return rows
