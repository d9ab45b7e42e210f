"""Learning rate, weight decay, betas and eps of a resumed run: the checkpoint's, or the config's.

A checkpoint brings its own, and PyTorch takes them without a word: a rate that was changed for the
rest of a run would be logged, and not be used. How the rate develops (``[lr_scheduler]``,
``training.steps``) is no part of a checkpoint and always that of the config.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from torch.optim import Optimizer

logger = logging.getLogger(__name__)

_FIELDS = {
    "initial_lr": ("optimizer.lr",),  # `lr` itself is where the schedule stands
    "weight_decay": ("optimizer.weight_decay",),
    "betas": ("optimizer.beta1", "optimizer.beta2"),
    "eps": ("optimizer.eps",),
}
"""Keys of a parameter group, and the fields of the config that their values come from."""


def rule_of(config: Any) -> str:
    """``error``, ``keep_checkpoint`` or ``use_config``, from ``[optimizer]``."""
    rule: str = config.on_config_change
    if rule == "error" and config.name == "AMO":
        # Who takes over AMO's settings, or keeps them, means these too.
        rule = config.amo.on_config_change
    return "use_config" if rule == "replan" else rule


def install(container: Any, config: Any) -> None:
    """Have the rule of ``[optimizer]`` decide when the container's optimizers load a state.

    Args:
        container: Of any class; its ``on_config_change`` tells the rule to schedulers.
        config: torchtitan's ``[optimizer]`` section, with the project's fields.
    """
    container.on_config_change = rule_of(config)
    hook = functools.partial(_resolve_groups, container.on_config_change)
    for optimizer in container.optimizers:
        optimizer.register_load_state_dict_pre_hook(hook)


def resolve(rule: str, differing: Mapping[str, tuple[Any, Any]]) -> bool:
    """Whether the config's values replace those of the checkpoint, where some differ.

    Args:
        rule: ``error``, ``keep_checkpoint`` or ``use_config``.
        differing: Field -> the values of the checkpoint and of the config.

    Raises:
        ValueError: With the rule ``error``.
    """
    if not differing:
        return False
    changes = "; ".join(
        f"{field}: found {found!r} in the checkpoint, expected {expected!r} as in this config"
        for field, (found, expected) in differing.items()
    )
    if rule == "error":
        raise ValueError(
            f"{changes}; optimizer.on_config_change = 'keep_checkpoint' or 'use_config' goes on "
            "with one of them"
        )
    kept = "config" if rule == "use_config" else "checkpoint"
    logger.warning("the values of the %s are in force: %s", kept, changes)
    return rule == "use_config"


def _resolve_groups(
    rule: str, optimizer: Optimizer, state_dict: Mapping[str, Any]
) -> dict[str, Any] | None:
    """A load hook: the state with the values that go on, or ``None`` to take it as it is."""
    found, groups = state_dict.get("param_groups"), optimizer.param_groups
    if not isinstance(found, list) or len(found) != len(groups):
        return None  # which the optimizer itself refuses
    differing: dict[str, tuple[Any, Any]] = {}
    for saved, group in zip(found, groups, strict=True):
        differing |= dict(_differing(saved, group))
    if not resolve(rule, differing):
        return None
    replaced = [_with_own(saved, group) for saved, group in zip(found, groups, strict=True)]
    return {**state_dict, "param_groups": replaced}


def _differing(
    saved: Mapping[str, Any], group: Mapping[str, Any]
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for key, fields in _FIELDS.items():
        if key not in saved or key not in group:
            continue
        pairs = zip(fields, _several(saved[key]), _several(group[key]), strict=True)
        yield from ((field, (old, new)) for field, old, new in pairs if old != new)


def _several(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _with_own(saved: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    own = {key: group[key] for key in _FIELDS if key in saved and key in group}
    if "initial_lr" in own:
        own["lr"] = moved(saved["lr"], saved["initial_lr"], own["initial_lr"])
    return {**saved, **own}


def moved(rate: float, peak: float, new_peak: float) -> float:
    """A rate of a schedule with another peak; to the last bit where the peak stays."""
    if peak == new_peak or peak == 0:
        return rate if peak == new_peak else new_peak
    return rate / peak * new_peak
