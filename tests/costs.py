"""What a step costs each rank, before and after a lock, for each way of dealing matrices."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from amo_dist.config import MuonConfig
from amo_dist.schedule.types import MatrixInfo
from amo_dist.tools.cost import OWNERSHIPS, StepCost, lay_out

Row = dict[str, Any]


def cost_rows(
    registry: Sequence[MatrixInfo],
    steps: Mapping[str, int],
    ranks: int,
    *,
    max_team: int = 1,
    **layout: Any,
) -> list[Row]:
    """Summaries by ownership and schedule; with teams after those without."""
    matrices = lay_out(registry, ranks, **layout)
    schedules = (("uniform", dict.fromkeys(steps, 5)), ("locked", steps))
    rows = []
    for most, ownership, (schedule, by_type) in itertools.product(
        sorted({1, max_team}), OWNERSHIPS, schedules
    ):
        config = MuonConfig(ownership=ownership, max_team=most)
        cost = StepCost(registry, matrices, by_type, ranks, config=config)
        rows.append({"ownership": ownership, "schedule": schedule, **cost.summary()})
    return rows
