"""What a user passes to the optimizers, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

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


def check_hyperparameters(values: Mapping[str, Any], place: str = "") -> None:
    """Refuse what no training can mean.

    Args:
        values: Any of ``lr``, ``lr_scale``, ``weight_decay``, ``eps`` and ``betas``.
        place: Goes before the field in the message, such as ``groups[1].``.

    Raises:
        ValueError: Names the field, what was found and what was expected.
    """
    for field in ("lr", "lr_scale", "weight_decay", "eps"):
        if field in values and not _is_rate(values[field]):
            found = f"{place}{field}: found {values[field]!r}"
            raise ValueError(f"{found}, expected a finite number >= 0")
    betas = values.get("betas", (0.0, 0.0))
    is_pair = isinstance(betas, Sequence) and len(betas) == 2
    if not is_pair or not all(_is_rate(beta) and beta < 1 for beta in betas):
        raise ValueError(f"{place}betas: found {betas!r}, expected two numbers in [0, 1)")


def check_each_group(groups: Sequence[Mapping[str, Any]]) -> None:
    """`check_hyperparameters` of each parameter group, named by its index.

    Raises:
        ValueError: Names the group and the field, what was found and what was expected.
    """
    for index, group in enumerate(groups):
        check_hyperparameters(group, f"groups[{index}].")


def _is_rate(found: object) -> bool:
    if isinstance(found, Tensor):
        return found.numel() == 1 and _is_rate(found.item())
    return isinstance(found, Real) and math.isfinite(found) and float(found) >= 0
