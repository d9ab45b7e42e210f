"""Hyperparameters of parameter groups: which keys there are, which values make sense."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

from torch import Tensor

from amo_dist.config import NESTEROV, fail, require

# Hyperparameters of every parameter group.
_NUMBERS = ("lr", "muon_lr_factor", "weight_decay", "eps", "betas", "momentum", "nesterov")
# Keys that every parameter group must have.
_REQUIRED = ("params", "algorithm", *_NUMBERS)
# Options of PyTorch's optimizers that are not offered, and may say so.
_OFF = frozenset({"capturable", "maximize", "differentiable", "amsgrad"})
# Similarity to a hyperparameter, by difflib, from which a key is taken for a misspelling of it:
# "beta" is as similar to "betas" as 0.89.
_MISSPELT = 0.87
# Least number that counts as zero: PyTorch's ``LinearLR`` ends at -1e-18 by rounding.
_LEAST_RATE = -1e-12


def check_keys(groups: Sequence[Mapping[str, Any]], own_keys: Iterable[str] = ()) -> None:
    """Refuse misspelt hyperparameters at construction; other keys are notes of the user's.

    Args:
        groups: Parameter groups.
        own_keys: Keys of a rule's own hyperparameters.

    Raises:
        ValueError: A key resembles a hyperparameter, or an option that is not offered is on; names
            the group and the field.
    """
    known = sorted({*_NUMBERS, *own_keys})
    for index, group in enumerate(groups):
        for key in sorted(group.keys() - {*_REQUIRED, *known}, key=str):
            place = f"groups[{index}].{key}"
            is_off = key not in _OFF or not group[key]
            require(is_off, place, group[key], "false: this option is not offered")
            close = difflib.get_close_matches(str(key), known, 1, _MISSPELT)
            require(not close, place, "a key that nothing reads", f"one of {', '.join(known)}")


class GroupSettings(NamedTuple):
    """Hyperparameters of a parameter group, as one step reads them.

    Attributes:
        lr: Learning rate times the group's multiplier; a 0-dim tensor only if it is on a device.
        weight_decay: Decoupled weight decay.
        betas: Betas of AdamW.
        eps: Epsilon of AdamW.
        momentum: Decay of the momentum buffer.
        lookahead: Coefficient ``c`` of the buffer in the matrix to orthogonalize, ``G + c * B``;
            None for ``B`` alone.
        text: All of them, and the rule's own, for comparison among ranks.
    """

    lr: float | Tensor
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    momentum: float
    lookahead: float | None
    text: str


def read_groups(
    groups: Sequence[Mapping[str, Any]],
    check: Callable[[Mapping[str, Any]], None] | None = None,
    own_keys: Iterable[str] = (),
) -> list[GroupSettings]:
    """Read the groups of the coming step, and refuse those with which none can be taken.

    Schedulers write to groups between steps. A learning rate on a device is not read: the host
    would wait. Other values on a device are.

    Args:
        groups: Parameter groups.
        check: Check of a rule, called with each group that has matrices; None for none.
        own_keys: Keys of a rule's own hyperparameters.

    Raises:
        ValueError: A key is missing, or a value is out of range; names the group and the field,
            what was found and what was expected.
    """
    settings = []
    for index, group in enumerate(groups):
        place = f"groups[{index}]."
        if missing := [key for key in _REQUIRED if key not in group]:
            require(False, place + missing[0], "none", "its value")
        check_hyperparameters(group, place)
        if check is not None and group["algorithm"] == "muon":
            try:
                check(group)
            except ValueError as error:
                raise ValueError(f"{place}{error}") from None
        words = []
        for key in dict.fromkeys((*_NUMBERS, *own_keys)):
            value = group[key]
            if isinstance(value, Tensor):
                value = value.item() if value.device.type == "cpu" else "of a tensor"
            if key == "betas":
                value = tuple(map(float, value))
            elif not isinstance(value, (bool, str)):
                value = float(value)  # one and 1.0 are the same
            words.append(f"{key} {value}")
        momentum, nesterov = float(group["momentum"]), group["nesterov"]
        if isinstance(nesterov, bool):
            nesterov = momentum if nesterov else None
        beta1, beta2 = map(float, group["betas"])
        rate = group["lr"] * group["muon_lr_factor"]
        is_on_cpu = isinstance(rate, Tensor) and rate.device.type == "cpu"
        settings.append(
            GroupSettings(
                float(rate) if is_on_cpu else rate,
                float(group["weight_decay"]),
                (beta1, beta2),
                float(group["eps"]),
                momentum,
                None if nesterov is None else float(nesterov),
                ", ".join(words),
            )
        )
    return settings


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
