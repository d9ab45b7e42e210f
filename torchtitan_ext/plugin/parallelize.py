"""Parallelisation of torchtitan's models, where the stock functions need a correction."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torchtitan.models.moe.utils as moe_utils
import torchtitan.models.qwen3.infra.parallelize as qwen3_parallelize
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.models.moe import moe
from torchtitan.tools import utils

Parallelize = Callable[..., nn.Module]


def parallelize(
    stock: Parallelize, model: nn.Module, parallel_dims: Any, job_config: Any
) -> nn.Module:
    """Parallelize a model the stock way, for the device at hand.

    Args:
        stock: torchtitan's function for the model.
        model: On the meta device; changed in place.
        parallel_dims: torchtitan's degrees and meshes.
        job_config: The whole config.

    Returns:
        The parallelized model.
    """
    on_cpu = utils.device_type == "cpu"
    if on_cpu and parallel_dims.tp_enabled:
        _wrap_attention_for_cpu(model)
    with _tied_weights_in_one_group(model):
        model = stock(model, parallel_dims, job_config)
    if on_cpu:
        _force_sum_reduction(model)
        _dispatch_tokens_on_cpu()
    return model


def _force_sum_reduction(model: nn.Module) -> None:
    """Let FSDP2 scale gradients outside the collective: gloo has no PREMUL_SUM."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def _dispatch_tokens_on_cpu() -> None:
    """Let mixtures of experts sort and count tokens where CUDA's kernels are missing."""
    if not isinstance(moe_utils.generate_permute_indices, functools.partial):
        moe_utils.generate_permute_indices = functools.partial(
            moe_utils.generate_permute_indices, use_cpu=True
        )
        moe.torch = _TorchWithHistc("torch")


class _TorchWithHistc(types.ModuleType):
    """``torch`` for one module, with a ``histc`` of integers, which CPUs lack."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def histc(values: torch.Tensor, **bins: Any) -> torch.Tensor:
        # Exact: numbers of experts, and counts, far below 2^53.
        return torch.histc(values.double(), **bins).to(values.dtype)


class _LocalAttention(nn.Module):
    """Attention on local tensors, where the CPU kernel has no sharding rule.

    The heads are what is sharded, and attention never looks across heads.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *tensors: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        first = tensors[0]
        if not isinstance(first, DTensor):
            return self.inner(*tensors, **kwargs)  # type: ignore[no-any-return]
        local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
        output = self.inner(*local, **kwargs)
        return DTensor.from_local(output, first.device_mesh, first.placements, run_check=False)


def _wrap_attention_for_cpu(model: nn.Module) -> None:
    for block in model.layers.values():  # type: ignore[operator]
        block.attention.inner_attention = _LocalAttention(block.attention.inner_attention)


@contextlib.contextmanager
def _tied_weights_in_one_group(model: nn.Module) -> Iterator[None]:
    """Make FSDP2 manage a tied embedding, the last norm and the head as one group.

    torchtitan wraps the embedding and ``[norm, output]`` apart. With tied weights both then hold
    one parameter, which PyTorch refuses from 2.13 on (``ValueError``: shared parameter).
    """
    if not getattr(model, "enable_weight_tying", False):
        yield
        return
    embedding: nn.Module = model.tok_embeddings  # type: ignore[assignment]
    output: nn.Module = model.output  # type: ignore[assignment]
    fully_shard = _llama4_parallelize().fully_shard

    def wrap(module: Any, **kwargs: Any) -> Any:
        if module is embedding:
            return module  # waits for the call below
        if isinstance(module, list) and output in module:
            return fully_shard([embedding, *module], **kwargs)
        return fully_shard(module, **kwargs)

    with mock.patch.object(_llama4_parallelize(), "fully_shard", wrap):
        yield


def _llama4_parallelize() -> Any:
    """The module whose ``apply_fsdp`` wraps qwen3."""
    import torchtitan.models.llama4.infra.parallelize as module

    assert qwen3_parallelize.apply_fsdp is module.apply_fsdp
    return module


class _ScaleGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a constant."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] * ctx.factor, None


def build_loss(stock: Callable[..., Any], job_config: Any, **kwargs: Any) -> Callable[..., Any]:
    """A model's loss, whose gradients DDP adds up.

    torchtitan divides the loss by the tokens of all ranks and keeps FSDP2 from dividing again, but
    not DDP, which takes the mean: gradients would be smaller by the number of replicas, and
    clipping and AdamW's epsilon would see it.
    """
    loss_fn: Callable[..., Any] = stock(job_config, **kwargs)
    dims = kwargs["parallel_dims"]
    if not dims.dp_replicate_enabled or dims.fsdp_enabled:
        return loss_fn
    scale: Callable[..., torch.Tensor] = _ScaleGradient.apply
    return lambda *args: scale(loss_fn(*args), float(dims.dp_replicate))
