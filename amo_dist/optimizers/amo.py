"""AMO: the optimizer that observes, plans and locks."""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor

from amo_dist.config import AMOConfig
from amo_dist.distributed.ranks import GroupLike
from amo_dist.optimizers.muon import Muon, check_config
from amo_dist.schedule.amo import AMOPolicy

logger = logging.getLogger(__name__)


class AMO(Muon):
    """Adaptive Muon Orthogonalization: `Muon` whose schedules are observed, planned and locked.

    Args:
        params: Groups from `amo_dist.param_groups`.
        lr: Learning rate of all groups.
        weight_decay: Decoupled weight decay.
        config: Settings of `Muon`, and of observation and plan.
        betas: Betas of AdamW.
        eps: Epsilon of AdamW.
        process_group: Argument of `Muon`.
        allow_no_matrices: Argument of `Muon`.
        num_steps: Optimizer steps of the run; AMO warns if the run ends before the plan is locked.
        unknown: Unknown keywords, which are refused; for a setting of ``config`` the error has the
            line to write.
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
        process_group: GroupLike = None,
        allow_no_matrices: bool = False,
        num_steps: int | None = None,
        **unknown: Any,
    ) -> None:
        settings = check_config(config, AMOConfig)
        if num_steps is not None and num_steps < settings.lock_step and not settings.observe_only:
            logger.warning(
                "config: the plan locks at step %d, and the run ends at step %d: write "
                "config=AMOConfig.for_run(%d)",
                *(settings.lock_step, num_steps, num_steps),
            )
        super().__init__(
            params,
            lr,
            weight_decay,
            schedule=AMOPolicy(settings),
            config=settings,
            betas=betas,
            eps=eps,
            process_group=process_group,
            allow_no_matrices=allow_no_matrices,
            **unknown,
        )
