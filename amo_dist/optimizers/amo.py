"""AMO: the optimizer whose policy observes, plans and locks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from amo_dist.config import AMOConfig
from amo_dist.optimizers.muon import Muon
from amo_dist.schedule.amo import AMOPolicy


class AMO(Muon):
    """Adaptive Muon Orthogonalization: `Muon` whose schedules are observed, planned and locked.

    Args:
        params: What `amo_dist.param_groups` returns.
        lr: Learning rate of all groups.
        weight_decay: Decoupled.
        config: The controller's settings, beside those of `Muon`.
        options: ``betas``, ``eps``, ``process_group`` and ``allow_no_matrices``, as for `Muon`.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        *,
        config: AMOConfig | None = None,
        **options: Any,
    ) -> None:
        settings = AMOConfig() if config is None else config
        policy = AMOPolicy(settings)
        super().__init__(params, lr, weight_decay, schedule=policy, config=settings, **options)
