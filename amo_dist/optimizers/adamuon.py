"""AdaMuon: Muon on the sign of the momentum, with an elementwise second moment of its result.

Source: AdaMuon, as the AMO paper sets it up.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from amo_dist.distributed.layout import MatrixLayout
from amo_dist.engine.parameters import momentum_of
from amo_dist.engine.rule import Finish, MatrixPiece, UpdateRule
from amo_dist.kernels.exact_sums import fraction_bits, norm_factor, sum_of_squares
from amo_dist.optimizers.muon import Muon

EPS = 1e-8
"""Added to the root of the second moment."""


def update_second_moment(moment: Tensor, value: Tensor, decay: float) -> None:
    """``V <- decay * V + (1 - decay) * O * O``, in place; each operation is rounded by itself.

    Args:
        moment: ``V``, float32; modified.
        value: ``O``, of the same shape, any floating dtype.
        decay: That of the momentum.
    """
    square = value.to(moment.dtype).square()
    moment.mul_(decay).add_(square.mul_(1 - decay))


class AdaMuonRule(UpdateRule):
    """Signs in; divided by the root of the second moment, and scaled to a given norm, out."""

    sum_dtype = torch.int64

    def state(self, param: Tensor, dim: int) -> dict[str, Tensor]:
        """``second_moment``, float32, as large as the parameter."""
        return {"second_moment": torch.zeros_like(param, dtype=torch.float32)}

    def prepare(self, momentum: Tensor, piece: MatrixPiece) -> Tensor:
        """The sign of the momentum, elementwise."""
        return momentum.sign_()

    def sums(self, matrix: MatrixLayout, dim: int) -> tuple[int, ...]:
        """The squared norm."""
        return (1,)

    def finish(self, result: Tensor, piece: MatrixPiece) -> Finish:
        """``O / (sqrt(V) + EPS)``, scaled to the Frobenius norm ``update_scale * sqrt(m n)``."""
        (decay, _), num_elements = momentum_of(piece.group, self.config), piece.matrix.num_elements
        moment = piece.state["second_moment"]
        update_second_moment(moment, result, decay)
        update = result.to(moment.dtype) / moment.sqrt().add_(EPS)
        bits = fraction_bits(num_elements, decay)
        total = yield sum_of_squares(update, bits)
        wanted = self.config.update_factor * math.sqrt(num_elements)
        return update.mul_(norm_factor(total, bits, wanted))

    def scale(self, shape: tuple[int, int]) -> float:
        """One: `finish` has scaled the update."""
        return 1.0


class AdaMuon(Muon):
    """AdaMuon over any layout, on the machinery of `Muon`, whose arguments it takes.

    ``B <- momentum * B + G``; ``O = orthogonalize(sign(G + momentum * B))`` with five steps of the
    ``kj`` table; ``V <- momentum * V + (1 - momentum) * O * O``; the update is ``O / (sqrt(V) +
    1e-8)``, scaled to the Frobenius norm ``update_scale * sqrt(m n)``. That norm is one of the
    whole matrix: each rank sums the squares of its pieces, and one all-reduce a step (for each set
    of ranks that shares parameters) adds them up, in integers: sharded training equals that of
    whole matrices bit for bit.

    State: beside that of `Muon`, ``second_moment`` for matrices, float32, with the placements of
    the parameter; two values a parameter in all, as with AdamW.
    """

    rule_class = AdaMuonRule
