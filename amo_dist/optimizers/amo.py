"""AMO: the optimizer that observes, plans and locks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from amo_dist.config import AMOConfig
from amo_dist.optimizers.muon import Muon, check_config
from amo_dist.schedule.source import Amo


class AMO(Muon):
    """Adaptive Muon Orthogonalization: `Muon` whose schedules are observed, planned and locked.

    Args:
        params: Groups from `amo_dist.param_groups`.
        lr: Argument of `Muon`.
        weight_decay: Argument of `Muon`.
        config: Settings of `Muon`, and of observation and plan.
        options: Other arguments of `Muon`, but for ``schedule``.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor | None = None,
        weight_decay: float | None = None,
        *,
        config: AMOConfig | None = None,
        **options: Any,
    ) -> None:
        if "schedule" in options:
            raise TypeError("AMO makes its own schedules: leave schedule out, or use Muon")
        settings = check_config(config, AMOConfig)
        super().__init__(
            params, lr, weight_decay, schedule=Amo(settings), config=settings, **options
        )
