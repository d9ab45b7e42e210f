"""AMO: the optimizer whose policy observes, plans and locks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
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
        betas: Of AdamW.
        eps: Of AdamW.
        process_group: As for `Muon`.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        *,
        config: AMOConfig | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        settings = AMOConfig() if config is None else config
        super().__init__(
            params,
            lr,
            weight_decay,
            schedule=AMOPolicy(settings),
            config=settings,
            betas=betas,
            eps=eps,
            process_group=process_group,
        )
