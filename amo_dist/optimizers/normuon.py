"""NorMuon: Muon whose updates are evened out over the neurons of a layer.

Source: Li et al., "NorMuon: Making Muon more efficient and scalable" (arXiv 2510.05491).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, zeros

from amo_dist.distributed.layout import Matrix
from amo_dist.engine.hyperparameters import is_below
from amo_dist.engine.parameters import Param, Piece
from amo_dist.engine.rule import AllSum
from amo_dist.kernels.exact_sums import sum_of_squares
from amo_dist.optimizers.adamuon import EPS, FixedNormRule, batches
from amo_dist.optimizers.muon import Muon

# Largest entry of a result; entries of an orthogonal matrix are at most one.
LARGEST = 2.0


class NorMuonRule(FixedNormRule):
    """One second moment per neuron, and a fixed norm of the whole update.

    For each neuron i, a row of ``nn.Linear``'s weight, with m outputs and n inputs::

        v_i <- beta2 * v_i + (1 - beta2) * mean_j O_ij^2
        V_ij = O_ij / (sqrt(v_i) + 1e-8)
        U = V * sqrt(min(m, n)) / ||V||_F
    """

    defaults = MappingProxyType({"beta2": 0.95})

    def check(self, group: Mapping[str, Any]) -> None:
        """Refuse a ``beta2`` outside of [0, 1)."""
        if not is_below(group.get("beta2"), 1.0):
            raise ValueError(f"beta2: found {group.get('beta2')!r}, expected a number in [0, 1)")

    def state(self, param: Param) -> dict[str, Tensor]:
        """``neuron_moment``, float32: as the parameter, with size 1 along a neuron's inputs."""
        return {"neuron_moment": _zeros_per_neuron(param)}

    def sums(self, matrix: Matrix) -> tuple[int, ...]:
        """Squares by neuron if ranks hold parts of neurons; then the squared norm."""
        return (0 if _has_whole_neurons(matrix) else matrix.shape[matrix.dim], 1)

    def post(
        self, results: Sequence[Tensor], pieces: Sequence[Piece], allsum: AllSum
    ) -> Sequence[Tensor]:
        """``O / (sqrt(v) + EPS)``, scaled to the Frobenius norm ``sqrt(min(m, n))``."""
        alike = batches(results, pieces)
        # Beyond this bound, which no orthogonal matrix reaches, sums of squares would leave int64.
        updates = [x.clamp_(-LARGEST, LARGEST) for x, _, _ in alike]
        # Sums of integers have the same bits however the matrix is cut.
        bits = [62 - math.ceil(math.log2(_num_inputs(p) * LARGEST**2)) for _, p, _ in alike]
        squares, shares = list[Tensor](), list[Tensor | None]([None] * len(pieces))
        for x, num_bits, (_, piece, indices) in zip(updates, bits, alike, strict=True):
            squares.append(sum_of_squares(x, num_bits, 2 - piece.dim))
            if not _has_whole_neurons(piece.matrix):
                wide = x.new_zeros(len(indices), piece.matrix.shape[piece.dim], dtype=torch.int64)
                wide[:, slice(*piece.box[piece.dim])] = squares[-1]
                for index, share in zip(indices, wide.unbind(), strict=True):
                    shares[index] = share
        totals = allsum(shares)
        for number, (_, piece, indices) in enumerate(alike):
            if not _has_whole_neurons(piece.matrix):
                own = torch.stack([totals[index] for index in indices])
                squares[number] = own[:, slice(*piece.box[piece.dim])]
            mean = squares[number].to(torch.float64) * (2.0 ** -bits[number] / _num_inputs(piece))
            beta2 = piece.group["beta2"]
            moments = torch.stack([pieces[index].state["neuron_moment"] for index in indices])
            moments = moments * beta2 + mean.float().view(moments.shape).mul_(1 - beta2)
            for index, moment in zip(indices, moments.unbind(), strict=True):
                pieces[index].state["neuron_moment"] = moment
            updates[number].div_(moments.sqrt().add_(EPS))
        decays = [piece.group["beta2"] for _, piece, _ in alike]
        return self.set_norms(updates, alike, len(pieces), decays, allsum)


def _zeros_per_neuron(param: Param) -> Tensor:
    """float32 zeros with size 1 along the dims of a neuron's inputs, in the parameter's placements.

    Where such a dim is sharded, the zeros are replicated.
    """
    tensor, output_dim = param.tensor, param.views[0].dim
    dims: Sequence[int] = (tensor.dim() - 1 - output_dim,)
    if param.is_convolution:
        dims = (0,) if output_dim else range(1, tensor.dim())
    shape = [1 if dim in dims else size for dim, size in enumerate(tensor.shape)]
    if not isinstance(tensor, DTensor):
        return torch.zeros(shape, dtype=torch.float32, device=tensor.device)
    placements = [
        Replicate() if isinstance(p, Shard) and p.dim % tensor.dim() in dims else p
        for p in tensor.placements
    ]
    mesh = tensor.device_mesh
    made = zeros(shape, dtype=torch.float32, device_mesh=mesh, placements=placements)
    return made.to(tensor.device)  # the host, for parameters that are offloaded


def _num_inputs(piece: Piece) -> int:
    return piece.matrix.shape[1 - piece.dim]


def _has_whole_neurons(matrix: Matrix) -> bool:
    """Whether every rank with the moment of a neuron of the matrix holds all of the neuron."""
    whole = (0, matrix.shape[1 - matrix.dim])
    held = [*matrix.regions_by_rank.values(), *matrix.empty_by_rank.values()]
    regions = (region for own in held for region in own)
    return all(region.target[1 - matrix.dim] == whole for region in regions)


class NorMuon(Muon):
    """NorMuon over any layout, on the machinery of `Muon`, whose arguments it takes.

    ``O = orthogonalize(M)`` as `Muon`; for each neuron i (a row of ``nn.Linear``'s weight) ``v_i <-
    beta2 * v_i + (1 - beta2) * mean_j O_ij^2``; the update is ``O_ij / (sqrt(v_i) + 1e-8)``, scaled
    to the norm of an orthogonal matrix, and then by ``adjust_lr`` as that of `Muon`.

    State: beside that of `Muon`, ``neuron_moment``, one float32 per neuron. One all-reduce per step
    adds up the norms; another one adds up the squares of neurons that ranks hold in parts, as under
    tensor parallelism. Both are sums of integers: sharded training equals that of whole matrices
    bit for bit.

    The keyword ``beta2``, which is also a key of parameter groups, is the decay of the second
    moment, in [0, 1); 0.95 by default.
    """

    rule_class = NorMuonRule
