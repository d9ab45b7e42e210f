"""AdaMuon: Muon on the sign of the momentum, with an elementwise second moment of its result.

Source: AdaMuon, as the AMO paper sets it up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from amo_dist.distributed.layout import Matrix
from amo_dist.engine.parameters import Param, Piece
from amo_dist.engine.rule import AllSum, UpdateRule
from amo_dist.kernels.exact_sums import fraction_bits, norm_factor, sum_of_squares
from amo_dist.optimizers.muon import Muon

# Added to the root of the second moment.
EPS = 1e-8


class FixedNormRule(UpdateRule):
    """A rule whose updates have the Frobenius norm ``update_scale * sqrt(m n)``."""

    sum_dtype = torch.int64

    def set_norms(
        self,
        updates: Sequence[Tensor],
        pieces: Sequence[Piece],
        decays: Sequence[float],
        allsum: AllSum,
    ) -> None:
        """Scale updates in place, by one sum over whole matrices.

        Args:
            updates: Results over the root of their second moment; see `fraction_bits`.
            pieces: Pieces of the updates.
            decays: Decays of their second moments.
            allsum: Argument of `UpdateRule.post`.
        """
        counts = [piece.matrix.num_elements for piece in pieces]
        bits = list(map(fraction_bits, counts, decays))
        totals = allsum(list(map(sum_of_squares, updates, bits)))
        for update, total, num_bits, count in zip(updates, totals, bits, counts, strict=True):
            target = self.config.update_factor * math.sqrt(count)
            update.mul_(norm_factor(total, num_bits, target))

    def scale(self, shape: tuple[int, int]) -> float:
        """One: `post` has scaled the update."""
        return 1.0


class AdaMuonRule(FixedNormRule):
    """The sign of the momentum, and an elementwise second moment of the result.

    With the momentum ``M``, and the result ``O`` of m outputs and n inputs::

        O = orthogonalize(sign(M))
        V <- momentum * V + (1 - momentum) * O * O
        N = O / (sqrt(V) + 1e-8)
        U = N * update_scale * sqrt(m * n) / ||N||_F
    """

    def state(self, param: Param) -> dict[str, Tensor]:
        """``second_moment``, float32, in the shape of the parameter."""
        return {"second_moment": torch.zeros_like(param.tensor, dtype=torch.float32)}

    def pre(self, momentum: Tensor, piece: Piece) -> Tensor:
        """The sign of the momentum, elementwise."""
        return momentum.sign_()

    def sums(self, matrix: Matrix) -> tuple[int, ...]:
        """The squared norm."""
        return (1,)

    def post(
        self, results: Sequence[Tensor], pieces: Sequence[Piece], allsum: AllSum
    ) -> Sequence[Tensor]:
        """``O / (sqrt(V) + EPS)``, scaled to the Frobenius norm ``update_scale * sqrt(m n)``."""
        updates, decays = [], [float(piece.group["momentum"]) for piece in pieces]
        for result, piece, decay in zip(results, pieces, decays, strict=True):
            wide = result.to(torch.float32)
            # Each operation is rounded by itself: a fused one may have other bits in another shard.
            moment = piece.state["second_moment"] * decay + wide.square().mul_(1 - decay)
            piece.state["second_moment"] = moment
            updates.append(wide / moment.sqrt().add_(EPS))
        self.set_norms(updates, pieces, decays, allsum)
        return updates


class AdaMuon(Muon):
    """AdaMuon over any layout, on the machinery of `Muon`, whose arguments it takes.

    ``B <- momentum * B + G``; ``O = orthogonalize(sign(G + momentum * B))`` with five steps of the
    ``kj`` table; ``V <- momentum * V + (1 - momentum) * O * O``; the update is ``O / (sqrt(V) +
    1e-8)``, scaled to the Frobenius norm ``update_scale * sqrt(m n)``. That norm is one of the
    whole matrix: each rank sums the squares of its pieces, and one all-reduce per step (for each
    set of ranks that shares parameters) adds them up, in integers: sharded training equals that of
    whole matrices bit for bit.

    State: beside that of `Muon`, ``second_moment`` for matrices, float32, with the placements of
    the parameter; two values per element in all, as with AdamW.
    """

    rule_class = AdaMuonRule
