"""Learning rate schedulers that any pipeline stage can load."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torchtitan.components.lr_scheduler as titan

_PER_GROUP = ("base_lrs", "_last_lr")


class LRSchedulersContainer(titan.LRSchedulersContainer):
    """torchtitan's container, for optimizers of unlike numbers of groups.

    All ranks save the state under one key, and one of them is kept. A pipeline stage without
    matrices, such as one of the embedding alone, has one parameter group where others have two.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load one state into all schedulers, its rates one for each group here.

        Raises:
            ValueError: If the state has another number of groups, whose rates differ.
        """
        for scheduler in self.schedulers:
            num_groups = len(scheduler.optimizer.param_groups)
            state = copy.deepcopy(state_dict)
            for key in _PER_GROUP:
                state[key] = _rates(key, state[key], num_groups)
            scheduler.load_state_dict(state)


def _rates(key: str, rates: list[float], num_groups: int) -> list[float]:
    if len(rates) == num_groups:
        return rates
    if len(set(rates)) != 1:
        raise ValueError(
            f"lr_scheduler.{key}: found {rates}, expected {num_groups} rates, or one for all groups"
        )
    return rates[:1] * num_groups


def build_lr_schedulers(
    stock: Callable[..., titan.LRSchedulersContainer], *args: Any, **kwargs: Any
) -> titan.LRSchedulersContainer:
    """What ``stock`` builds from the same arguments, as :class:`LRSchedulersContainer`."""
    container = stock(*args, **kwargs)
    if type(container) is titan.LRSchedulersContainer:
        container.__class__ = LRSchedulersContainer  # which adds no state
    return container
