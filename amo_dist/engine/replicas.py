"""What replicas must share: compared in the first step, and in the first after a load.

Replicas that nobody averages would train apart without a word: a process group without DDP around
the model, or a trainer that averages gradients inside its own optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amo_dist.distributed.ranks import Ranks, fingerprint56
from amo_dist.engine.parameters import Param
from amo_dist.engine.world import World
from amo_dist.kernels.elementwise import real

# Units of a gradient's share in the norm of all: replicas may round their gradients apart, as under
# tensor parallelism, which moves it by less than a tenth of this. Gradients of other data move it
# by about one.
_UNIT = 0.03
# What is compared of a parameter, in this order.
_PARTS = ("parameter or state", "gradient")


class ReplicaMarks(NamedTuple):
    """Contents of one rank for a vote.

    Attributes:
        marks: For each set of replicas a mark of parameters and state, which must be the same, and
            one of gradients, which may differ by one; None without an opinion.
        contents: Digest and gradient's share of each parameter by its name, for each set of this
            rank by its index.
    """

    marks: Sequence[int | None]
    contents: Mapping[str, Mapping[str, Sequence[float]]]


def no_marks(world: World) -> ReplicaMarks:
    """Marks of a rank that compares nothing."""
    return ReplicaMarks([None] * (2 * len(world.replica_sets)), {})


def mark_replicas(
    world: World,
    params: Sequence[Param],
    weights: Sequence[Tensor],
    states: Sequence[Mapping[str, Tensor]],
    grads: Sequence[Tensor | None],
) -> ReplicaMarks:
    """Marks of this rank's replicated tensors; reads them on the host.

    Args:
        world: The replicas of each parameter.
        params: Parameters of this process.
        weights: Local tensor of each.
        states: Local tensors of its state, by name.
        grads: Local gradient; None without one, or where it is a term of a sum over ranks.
    """
    marks: list[int | None] = []
    contents: dict[str, dict[str, list[float]]] = {}
    for number, ranks in enumerate(world.replica_sets):
        own: dict[str, list[float]] = {}
        squares = 0.0
        for param, replicas in zip(params, world.replica_ranks, strict=True):
            if replicas == ranks:
                index = param.index
                tensors = [weights[index], *(states[index][name] for name in param.state_forms)]
                share, square = _share(grads[index])
                own[param.name] = [sum(map(_digest, tensors)), share]
                squares += square
        if not own:
            marks += [None, None]
            continue
        contents[str(number)] = own
        text = str([digest for digest, _ in own.values()])
        share = math.fsum(share for _, share in own.values()) / (math.sqrt(squares) or 1.0)
        is_number = math.isfinite(share)  # a NaN is named by another flag
        marks += [fingerprint56(text), round(share / _UNIT) if is_number else None]
    return ReplicaMarks(marks, contents)


def unlike_replica(sets: Sequence[Ranks], contents: Mapping[int, Mapping[str, Any]]) -> str:
    """The error that names what two replicas have apart.

    Args:
        sets: Sets of replicas.
        contents: `ReplicaMarks.contents` of each rank.
    """
    for part, kind in enumerate(_PARTS):
        apart = [
            (abs(theirs[part] - own[part]), name, (ranks[0], rank))
            for number, ranks in enumerate(sets)
            for name, own in contents[ranks[0]].get(str(number), {}).items()
            for rank in ranks[1:]
            if (theirs := contents[rank][str(number)][name])[part] != own[part]
        ]
        if apart:
            _, name, (first, other) = max(apart)
            return (
                f"{name}: found another {kind} on rank {other} than on rank {first}, its replica; "
                "expected the same on both: average gradients before the step, as DDP and "
                "fully_shard do, and begin with the same parameters. Without DDP around the model, "
                "leave process_group out"
            )
    return "parameters: found replicas with other contents, expected the same on all"


def _digest(tensor: Tensor) -> int:
    """A sum of the bits of a tensor."""
    (tensor,) = real([tensor])
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return int(tensor.contiguous().view(widths[tensor.element_size()]).sum(dtype=torch.int64))


def _share(grad: Tensor | None) -> tuple[float, float]:
    """Difference of the sums of even and odd entries of a gradient, and its sum of squares."""
    if grad is None or not grad.numel():
        return 0.0, 0.0
    (grad,) = real([grad])
    flat = grad.reshape(-1)
    sums = [flat[start::2].sum(dtype=torch.float64) for start in (0, 1)]
    norm = torch.linalg.vector_norm(flat, dtype=torch.float64)
    return (sums[0] - sums[1]).item(), norm.square().item()
