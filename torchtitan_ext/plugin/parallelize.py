"""Parallelisation of torchtitan's models, where the stock functions need a correction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.tools import utils


def parallelize(stock: Callable[..., nn.Module], model: nn.Module, **settings: Any) -> nn.Module:
    """Parallelize a model the stock way, for the device at hand.

    Args:
        stock: torchtitan's function for the model.
        model: On the meta device; changed in place.
        **settings: Arguments of ``stock``.

    Returns:
        The parallelized model.

    Raises:
        ValueError: On a CPU, for an attention that has no backward pass there.
    """
    model = stock(model, **settings)
    if utils.device_type == "cpu":
        for module in model.modules():
            if isinstance(module, (FlexAttention, VarlenAttention)):
                kind = type(module).__name__
                raise ValueError(f"model.attention: found {kind}, expected 'sdpa' on a CPU")
            if isinstance(module, FSDPModule):
                # Scale gradients outside the collective: gloo has no PREMUL_SUM.
                module.set_force_sum_reduction_for_comms(True)
    return model
