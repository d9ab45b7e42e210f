"""Gradients of this rank: their kind, their bounds, and the ranks that lack one."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from amo_dist.engine.parameters import Entry, raw_gradient

ABSENT, PRESENT, EMPTY, FOREIGN = range(4)
MISPLACED = 4
"""Added to the kind of a gradient whose placements differ from those of its parameter."""


class MissingGradientError(RuntimeError):
    """A parameter has a gradient on some of its ranks only, or matrices had none for long."""


def local_gradient(param: Tensor) -> tuple[int, Tensor | None]:
    """Kind of a parameter's gradient, and this rank's part of it."""
    grad = param.grad
    if grad is None:
        return ABSENT, None
    if grad.is_sparse or (isinstance(param, DTensor) and not isinstance(grad, DTensor)):
        return FOREIGN, None
    kind = 0
    if isinstance(grad, DTensor) and isinstance(param, DTensor):
        # `placements` takes ten times as long, for hundreds of parameters.
        kind = 0 if grad._spec.placements == param._spec.placements else MISPLACED
        grad = raw_gradient(grad)
    return kind + (PRESENT if grad.numel() else EMPTY), grad


def place_gradients(
    entries: Sequence[Entry], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Local gradients in the placements of their parameters; a collective where one moves."""
    placed = list(grads)
    for index, entry in enumerate(entries):
        param, grad = entry.param, entry.param.grad
        if not (isinstance(grad, DTensor) and isinstance(param, DTensor)):
            continue
        if grad.placements != param.placements:
            placed[index] = raw_gradient(grad.redistribute(placements=param.placements))
    return placed


def gradient_bound(entry: Entry, momentum: float) -> float:
    """Largest entry of a gradient that the state of its parameter can take."""
    if entry.views:
        return momentum_bound(torch.float32, momentum)
    return second_moment_bound(entry.param.dtype)


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
