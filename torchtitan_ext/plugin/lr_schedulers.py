"""Learning rate schedulers that any pipeline stage can load."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torchtitan.components.lr_scheduler as titan

from torchtitan_ext.plugin import hyperparameters

_PER_GROUP = ("base_lrs", "_last_lr")


class LRSchedulersContainer(titan.LRSchedulersContainer):
    """torchtitan's container, for optimizers of unlike numbers of groups and a changed peak rate.

    All ranks save the state under one key, and one of them is kept. A pipeline stage without
    matrices, such as one of the embedding alone, has one parameter group where others have two.

    Attributes:
        on_config_change: What to do where the peak is not that of the checkpoint; see
            :func:`torchtitan_ext.plugin.hyperparameters.rule_of`.
    """

    on_config_change = "error"

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load one state into all schedulers, its rates one for each group here.

        Raises:
            ValueError: If the state has another number of groups, whose rates differ; or another
                peak, where :attr:`on_config_change` is ``error``.
        """
        for scheduler in self.schedulers:
            num_groups = len(scheduler.optimizer.param_groups)
            state = copy.deepcopy(state_dict)
            for key in _PER_GROUP:
                state[key] = _rates(key, state[key], num_groups)
            self._settle_peak(state, scheduler.base_lrs)
            scheduler.load_state_dict(state)

    def _settle_peak(self, state: dict[str, Any], own: list[float]) -> None:
        saved: list[float] = state["base_lrs"]
        pairs = [(old, new) for old, new in zip(saved, own, strict=True) if old != new]
        if not hyperparameters.resolve(
            self.on_config_change, {"optimizer.lr": pairs[0]} if pairs else {}
        ):
            return
        rates = zip(state["_last_lr"], saved, own, strict=True)
        state["_last_lr"] = [hyperparameters.moved(*rate) for rate in rates]
        state["base_lrs"] = list(own)


def _rates(key: str, rates: list[float], num_groups: int) -> list[float]:
    if len(rates) == num_groups:
        return rates
    if len(set(rates)) != 1:
        raise ValueError(
            f"lr_scheduler.{key}: found {rates}, expected {num_groups} rates, or one for all groups"
        )
    return rates[:1] * num_groups


def build_lr_schedulers(
    stock: Callable[..., titan.LRSchedulersContainer], optimizers: Any, *args: Any, **kwargs: Any
) -> titan.LRSchedulersContainer:
    """What ``stock`` builds from the same arguments, as :class:`LRSchedulersContainer`."""
    container = stock(optimizers, *args, **kwargs)
    if type(container) is titan.LRSchedulersContainer:
        container.__class__ = LRSchedulersContainer  # which saves no more
        container.on_config_change = getattr(optimizers, "on_config_change", "error")
    return container
