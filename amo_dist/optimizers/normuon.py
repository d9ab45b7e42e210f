"""NorMuon: Muon whose updates are evened out over the neurons of a layer.

Source: Li et al., "NorMuon: Making Muon more efficient and scalable" (arXiv 2510.05491).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from amo_dist.distributed.layout import MatrixLayout, zeros_per_slice
from amo_dist.engine.parameters import is_between
from amo_dist.engine.rule import Finish, MatrixPiece, UpdateRule
from amo_dist.kernels.exact_sums import fraction_bits, norm_factor, sum_of_squares
from amo_dist.optimizers.muon import Muon

EPS = 1e-8
"""Added to the root of the second moment."""
LARGEST = 2.0
"""Largest entry of a result; entries of an orthogonal matrix are at most one."""


class NorMuonRule(UpdateRule):
    """One second moment a neuron, and a given norm of the whole update."""

    defaults = MappingProxyType({"beta2": 0.95})
    sum_dtype = torch.int64

    def check(self, group: Mapping[str, Any]) -> None:
        """``beta2`` is a decay."""
        if not is_between(group.get("beta2"), 1.0):
            raise ValueError(f"beta2: found {group.get('beta2')!r}, expected a number in [0, 1)")

    def state(self, param: Tensor, dim: int) -> dict[str, Tensor]:
        """``neuron_moment``, float32: as the parameter, with size 1 along a neuron's inputs."""
        return {"neuron_moment": zeros_per_slice(param, -1 - dim)}

    def sums(self, matrix: MatrixLayout, dim: int) -> tuple[int, ...]:
        """Squares by neuron, where ranks hold parts of one; then the squared norm."""
        return (1,) if _is_whole(matrix, dim) else (matrix.shape[dim], 1)

    def finish(self, result: Tensor, piece: MatrixPiece) -> Finish:
        """``O / (sqrt(v) + EPS)``, scaled to the Frobenius norm ``update_scale * sqrt(m n)``."""
        beta2, dim, matrix = piece.group["beta2"], piece.dim, piece.matrix
        # Beyond this bound, which no orthogonal matrix reaches, sums of squares would leave int64.
        update = result.to(torch.float32, copy=True).clamp_(-LARGEST, LARGEST)
        moment, num_inputs = piece.state["neuron_moment"], matrix.shape[1 - dim]
        # Before the sum: two pieces of one rank may hold parts of the same neurons.
        decayed = moment * beta2
        # Exact sums: the same bits however the matrix is cut.
        bits = 62 - math.ceil(math.log2(num_inputs * LARGEST**2))
        squares = sum_of_squares(update, bits, 1 - dim)
        if not _is_whole(matrix, dim):
            share = squares.new_zeros(matrix.shape[dim])
            share[slice(*piece.box[dim])] = squares
            squares = (yield share)[slice(*piece.box[dim])]
        mean = (squares.to(torch.float64) * (2.0**-bits / num_inputs)).float()
        moment.copy_(decayed.add_(mean.view(moment.shape).mul_(1 - beta2)))
        update.div_(moment.sqrt().add_(EPS))
        bits = fraction_bits(matrix.num_elements, beta2)
        total = yield sum_of_squares(update, bits)
        wanted = self.config.update_factor * math.sqrt(matrix.num_elements)
        return update.mul_(norm_factor(total, bits, wanted))

    def scale(self, shape: tuple[int, int]) -> float:
        """One: `finish` has scaled the update."""
        return 1.0


def _is_whole(matrix: MatrixLayout, dim: int) -> bool:
    """Whether every piece of the matrix holds its neurons whole."""
    whole = (0, matrix.shape[1 - dim])
    pieces = (piece for held in matrix.pieces_by_rank.values() for piece in held)
    return all(piece.target[1 - dim] == whole for piece in pieces)


class NorMuon(Muon):
    """NorMuon over any layout, on the machinery of `Muon`, whose arguments it takes.

    ``O = orthogonalize(M)`` as `Muon`; for each neuron i (a row of ``nn.Linear``'s weight) ``v_i <-
    beta2 * v_i + (1 - beta2) * mean_j O_ij^2``; the update is ``O_ij / (sqrt(v_i) + 1e-8)``, scaled
    to the Frobenius norm ``update_scale * sqrt(m n)``.

    State: beside that of `Muon`, ``neuron_moment``, one float32 a neuron. One all-reduce a step
    adds up the norms; another one the squares of neurons that ranks hold in parts, as tensor
    parallelism does. Both are in integers: sharded training equals that of whole matrices bit for
    bit.

    Args:
        beta2: Decay of the second moment, in [0, 1), 0.95 by default; a keyword, and a key of
            parameter groups.
    """

    rule_class = NorMuonRule
