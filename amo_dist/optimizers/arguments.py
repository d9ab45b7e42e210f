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


_READ = frozenset(
    {
        *("params", "algorithm", "control", "lr", "lr_scale", "weight_decay"),
        *("betas", "eps", "momentum", "nesterov"),
    }
)
"""Keys of a parameter group that every optimizer reads."""
_NOTED = frozenset(
    {
        *("name", "param_names", "matrix_views", "initial_lr", "max_lr", "min_lr", "swa_lr"),
        *("base_momentum", "max_momentum"),
    }
)
"""Keys in which users, PyTorch's schedulers and checkpoint helpers keep notes of their own."""


def check_keys(groups: Sequence[Mapping[str, Any]], own: Mapping[str, float]) -> None:
    """Refuse keys of groups that nothing reads, such as misspelt ones, and a bad momentum.

    Args:
        groups: Parameter groups.
        own: Hyperparameters of the optimizer's own.

    Raises:
        ValueError: Names the group and the key.
    """
    for index, group in enumerate(groups):
        place = f"groups[{index}]."
        if unknown := sorted(group.keys() - _READ - _NOTED - own.keys(), key=str):
            known = ", ".join(sorted((_READ - {"params", "algorithm", "control"}) | own.keys()))
            raise ValueError(
                f"{place}{unknown[0]}: found a key that nothing reads, expected one of {known}"
            )
        momentum, nesterov = group.get("momentum", 0.0), group.get("nesterov", True)
        if not (_is_rate(momentum) and momentum < 1):
            raise ValueError(f"{place}momentum: found {momentum!r}, expected a number in [0, 1)")
        if not isinstance(nesterov, bool):
            raise ValueError(f"{place}nesterov: found {nesterov!r}, expected True or False")
