"""Hyperparameters of parameter groups: which keys there are, which values make sense."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

from torch import Tensor

from amo_dist.config import NESTEROV, MuonConfig, fail, require

# Keys that every parameter group must have.
_REQUIRED = ("params", "algorithm", "lr", "muon_lr_factor", "weight_decay", "betas", "eps")
# Keys of a parameter group that every optimizer reads.
_KEYS = frozenset({*_REQUIRED, "control", "momentum", "nesterov"})
# Keys in which users, schedulers and PyTorch's checkpoint helpers keep notes of their own.
_NOTES = frozenset(
    {
        *("name", "param_names", "matrix_views", "initial_lr", "max_lr", "min_lr", "swa_lr"),
        # Schedulers multiply these two into a group's `lr`: those of timm, MAE and BEiT `lr_scale`,
        # those of dinov2 and dinov3 `lr_multiplier`.
        *("base_momentum", "max_momentum", "lr_scale", "lr_multiplier"),
        *("foreach", "fused"),
    }
)
# Options of PyTorch's optimizers that are not offered, and may say so.
_OFF = frozenset({"capturable", "maximize", "differentiable", "amsgrad"})
# Least number that counts as zero: PyTorch's ``LinearLR`` ends at -1e-18 by rounding.
_LEAST_RATE = -1e-12


def check_keys(groups: Sequence[Mapping[str, Any]], own_keys: Iterable[str] = ()) -> None:
    """Refuse keys that nothing reads, at construction: later, wrappers keep notes of their own.

    Args:
        groups: Parameter groups.
        own_keys: Keys of a rule's own hyperparameters.

    Raises:
        ValueError: A key is unknown, such as a misspelt one, or an option that is not offered is
            on; names the group and the field.
    """
    own = set(own_keys)
    known = ", ".join(sorted((_KEYS - {"params", "algorithm", "control"}) | own))
    for index, group in enumerate(groups):
        for key in sorted(group.keys() - _KEYS - _NOTES - own, key=str):
            is_off, place = key in _OFF and not group[key], f"groups[{index}].{key}"
            require(is_off, place, "a key that nothing reads", f"one of {known}")


def check_groups(
    groups: Sequence[Mapping[str, Any]], check: Callable[[Mapping[str, Any]], None]
) -> None:
    """Refuse groups with which no step can be taken; at each step, as schedulers write to them.

    A tensor on a device is not read: the host would wait.

    Args:
        groups: Parameter groups.
        check: Check of a rule, called with each group that has matrices.

    Raises:
        ValueError: A key is missing, or a value is out of range; names the group and the field,
            what was found and what was expected.
    """
    for index, group in enumerate(groups):
        place = f"groups[{index}]."
        if missing := [key for key in _REQUIRED if key not in group]:
            raise ValueError(f"{place}{missing[0]}: found none, expected its value")
        check_hyperparameters(group, place)
        if group["algorithm"] == "muon":
            try:
                check(group)
            except ValueError as error:
                raise ValueError(f"{place}{error}") from None


def check_hyperparameters(values: Mapping[str, Any], place: str = "") -> None:
    """Refuse values with which no training makes sense.

    Args:
        values: Any of ``lr``, ``muon_lr_factor``, ``weight_decay``, ``eps``, ``betas``,
            ``momentum`` and ``nesterov``.
        place: Text that goes before the field in the message, such as ``groups[1].``.

    Raises:
        ValueError: Names the field, what was found and what was expected.
    """
    for field in ("lr", "muon_lr_factor", "weight_decay", "eps"):
        if field in values and not is_below(values[field], math.inf):
            fail(f"{place}{field}", values[field], "a finite number >= 0")
    betas = values.get("betas", (0.0, 0.0))
    is_pair = isinstance(betas, Sequence) and len(betas) == 2
    if not is_pair or not all(is_below(beta, 1.0) for beta in betas):
        fail(f"{place}betas", betas, "two numbers in [0, 1)")
    momentum, nesterov = values.get("momentum", 0.0), values.get("nesterov", True)
    if not is_below(momentum, 1.0):
        fail(f"{place}momentum", momentum, "a number in [0, 1)")
    if not isinstance(nesterov, bool) and not is_below(nesterov, math.nextafter(10, 11)):
        fail(f"{place}nesterov", nesterov, NESTEROV)


def is_below(value: object, end: float) -> bool:
    """Whether a value is a number from 0 up to and without ``end``; a device is not read."""
    if isinstance(value, Tensor):
        is_number = value.numel() == 1 and not value.is_complex()
        return is_number and (value.device.type != "cpu" or is_below(value.item(), end))
    try:
        return isinstance(value, Real) and _LEAST_RATE <= float(value) < end
    except OverflowError:  # an int that is greater than any float
        return False


def describe_group(group: Mapping[str, Any], own_keys: Iterable[str] = ()) -> str:
    """The hyperparameters of a group as text, for comparison among ranks.

    A learning rate on a device is left out: to read it would wait for the device.

    Args:
        group: A parameter group.
        own_keys: Keys of a rule's own hyperparameters.
    """
    keys = ("lr", "muon_lr_factor", "weight_decay", "eps", "betas", "momentum", "nesterov")
    words = []
    for key in dict.fromkeys((*keys, *own_keys)):
        value: Any = group.get(key, "of the settings")
        if isinstance(value, Tensor):
            value = value.item() if value.device.type == "cpu" else "of a tensor"
        if key == "betas":
            value = tuple(map(float, value))
        elif not isinstance(value, (bool, str)):
            value = float(value)  # one and 1.0 are the same
        words.append(f"{key} {value}")
    return ", ".join(words)


def learning_rate(group: Mapping[str, Any]) -> float | Tensor:
    """Learning rate of a group times its ``muon_lr_factor``; a tensor only if it is on a device."""
    rate: float | Tensor = group["lr"] * group["muon_lr_factor"]
    is_on_cpu = isinstance(rate, Tensor) and rate.device.type == "cpu"
    return float(rate) if is_on_cpu else rate


def momentum_of(group: Mapping[str, Any], config: MuonConfig) -> tuple[float, float | None]:
    """Momentum of a group, and its coefficient of the buffer, None for the buffer alone.

    They are those of the settings by default.
    """
    momentum = float(group.get("momentum", config.momentum))
    nesterov = group.get("nesterov", config.nesterov)
    if isinstance(nesterov, bool):
        return momentum, momentum if nesterov else None
    return momentum, float(nesterov)
