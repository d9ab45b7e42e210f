"""What a user passes to the optimizers, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from amo_dist.schedule.policies import Policy, TablePolicy, UniformPolicy, named_policy
from amo_dist.schedule.types import Schedule


def as_policy(schedule: str | Schedule | Mapping[str, Schedule] | Policy) -> Policy:
    """The policy that a name, one schedule, or one for each operator type stands for.

    Raises:
        ValueError: There is no schedule of this name.
    """
    if isinstance(schedule, Policy):
        return schedule
    if isinstance(schedule, str):
        return named_policy(schedule)
    return UniformPolicy(schedule) if isinstance(schedule, Schedule) else TablePolicy(schedule)


def check_hyperparameters(
    lr: float | Tensor, weight_decay: float, betas: tuple[float, float], eps: float
) -> None:
    """Refuse what no training can mean.

    Raises:
        ValueError: Names the field, what was found and what was expected.
    """
    for field, found in (("lr", lr), ("weight_decay", weight_decay), ("eps", eps)):
        if not float(found) >= 0 or not math.isfinite(found):
            raise ValueError(f"{field}: found {found!r}, expected a finite number >= 0")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas: found {betas!r}, expected two numbers in [0, 1)")
