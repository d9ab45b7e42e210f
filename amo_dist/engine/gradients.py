"""Gradients of this rank: their kind, their bounds, and checks that name ranks without one."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from amo_dist.engine.parameters import Param

ABSENT, PRESENT, EMPTY, FOREIGN = range(4)
MISPLACED = 4
"""Added to the kind of a gradient whose placements differ from those of its parameter."""


class MissingGradientError(RuntimeError):
    """A parameter has a gradient on some of its ranks only, or matrices had none for long."""


def local_gradients(params: Sequence[Param]) -> tuple[bytes, list[Tensor | None]]:
    """Kind of each parameter's gradient, and this rank's part of it."""
    kinds = bytearray(len(params))
    grads: list[Tensor | None] = [None] * len(params)
    for index, param in enumerate(params):
        tensor, grad = param.tensor, param.tensor.grad
        if grad is None:
            continue  # ABSENT
        is_sharded = isinstance(tensor, DTensor)
        if grad.is_sparse or (is_sharded and not isinstance(grad, DTensor)):
            kinds[index] = FOREIGN
            continue
        if isinstance(grad, DTensor) and isinstance(tensor, DTensor):
            # `placements` takes ten times as long as `_spec`, for hundreds of parameters.
            if grad._spec.placements != tensor._spec.placements:
                kinds[index] = MISPLACED
            grad = _local_part(grad)
        kinds[index] += PRESENT if grad.numel() else EMPTY
        grads[index] = grad
    return bytes(kinds), grads


def place_gradients(params: Sequence[Param], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Local gradients in the placements of their parameters; a collective if one must move."""
    placed = list(grads)
    for index, param in enumerate(params):
        tensor, grad = param.tensor, param.tensor.grad
        if isinstance(grad, DTensor) and isinstance(tensor, DTensor):
            if grad.placements != tensor.placements:
                placed[index] = _local_part(grad.redistribute(placements=tensor.placements))
    return placed


def _local_part(grad: Tensor) -> Tensor:
    """This rank's part of a gradient as it is; a misplaced one is only one term of a sum."""
    if not isinstance(grad, DTensor):
        return grad
    local: Tensor = grad._local_tensor
    return local.wait() if hasattr(local, "wait") else local


def gradient_bound(param: Param, momentum: float) -> float:
    """Largest entry of a gradient that the state of its parameter can take."""
    if param.views:
        return momentum_bound(torch.float32, momentum)
    return second_moment_bound(param.tensor.dtype)


def momentum_bound(dtype: torch.dtype, momentum: float) -> float:
    """Largest gradient entry that can never overflow a momentum buffer of this dtype.

    A sum of gradients below ``bound`` stays below ``bound / (1 - momentum)``, with Nesterov too;
    a factor of two is left for rounding.
    """
    return torch.finfo(dtype).max * (1.0 - momentum) / 2.0


def second_moment_bound(dtype: torch.dtype) -> float:
    """Largest gradient entry whose square AdamW's ``exp_avg_sq`` can hold, with room to round.

    An infinite second moment never recovers: its parameter would stand still for good.
    """
    return math.sqrt(torch.finfo(dtype).max) / 2.0


def check_presence(step: int, kinds_by_rank: Mapping[int, Mapping[str, Mapping[str, int]]]) -> None:
    """Raise for the first foreign gradient, or one that only some ranks of its parameter have.

    Args:
        step: Optimizer step, for the message.
        kinds_by_rank: Kind of each gradient, by rank, sharing ranks and name.

    Raises:
        ValueError: Names a parameter and a rank with a foreign gradient.
        MissingGradientError: Names a parameter, a rank with a gradient and one without.
    """
    ranks_by_kind: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
    for rank, kinds_by_set in kinds_by_rank.items():
        for sharing, kinds in kinds_by_set.items():
            for name, kind in kinds.items():
                ranks_by_kind[name, sharing][kind] = rank
    for (name, _), ranks in sorted(ranks_by_kind.items()):
        if FOREIGN in ranks:
            raise ValueError(
                f"{name}: found a sparse gradient, or a plain one of a DTensor, on rank "
                f"{ranks[FOREIGN]} in step {step}, expected a dense one in the form of the "
                "parameter"
            )
        if ABSENT in ranks and len(ranks) > 1:
            lacking = ranks.pop(ABSENT)
            raise MissingGradientError(
                f"{name}: found a gradient on rank {max(ranks.values())} and none on rank "
                f"{lacking} in step {step}, expected one on all of its ranks or on none"
            )
