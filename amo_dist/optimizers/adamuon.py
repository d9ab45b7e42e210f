"""AdaMuon: Muon on the sign of the momentum, with an elementwise second moment of its result.

Source: AdaMuon, as the AMO paper sets it up.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from amo_dist.distributed.layout import Matrix
from amo_dist.engine.parameters import Param, Piece
from amo_dist.engine.rule import AllSum, UpdateRule
from amo_dist.kernels.exact_sums import fraction_bits, norm_factor, sum_of_squares
from amo_dist.optimizers.muon import Muon

# Added to the root of the second moment.
EPS = 1e-8


# Results of one form as a batch in float32, one of their pieces, and the indices of all.
Batch: TypeAlias = tuple[Tensor, Piece, list[int]]


def batches(results: Sequence[Tensor], pieces: Sequence[Piece]) -> list[Batch]:
    """Results that are computed together, as a launch for each of hundreds would take too long.

    Those of a batch have one shape, box, matrix shape and parameter group.

    Args:
        results: Results of `UpdateRule.post`.
        pieces: Their pieces.
    """
    alike: dict[object, list[int]] = defaultdict(list)
    for index, piece in enumerate(pieces):
        key = (piece.box, piece.matrix.shape, piece.dim, piece.param.group, len(piece.matrix.ranks))
        alike[key, id(piece.matrix.regions_by_rank)].append(index)
    return [
        (torch.stack([results[i] for i in own]).to(torch.float32), pieces[own[0]], own)
        for own in alike.values()
    ]


class FixedNormRule(UpdateRule):
    """A rule whose updates have the Frobenius norm of orthogonal ones, ``sqrt(min(m, n))``."""

    sum_dtype = torch.int64

    def set_norms(
        self,
        updates: Sequence[Tensor],
        alike: Sequence[Batch],
        num_pieces: int,
        decays: Sequence[float],
        allsum: AllSum,
    ) -> list[Tensor]:
        """Scale updates in place, by one sum over whole matrices.

        Args:
            updates: Results over the root of their second moment, ``(b, m, n)``; see
                `fraction_bits`.
            alike: Result of `batches`, in the order of ``updates``.
            num_pieces: Number of pieces.
            decays: Decay of the second moment of each batch.
            allsum: Argument of `UpdateRule.post`.

        Returns:
            The update of each piece.
        """
        counts = [piece.matrix.num_elements for _, piece, _ in alike]
        bits = list(map(fraction_bits, counts, decays))
        shares: list[Tensor | None] = [None] * num_pieces
        for update, num_bits, (_, _, indices) in zip(updates, bits, alike, strict=True):
            sums = sum_of_squares(update.flatten(1), num_bits, 1)
            for index, share in zip(indices, sums.split(1), strict=True):
                shares[index] = share
        totals = allsum(shares)
        scaled: list[Tensor] = [update.new_empty(0) for update in updates[:1]] * num_pieces
        for update, num_bits, (_, piece, indices) in zip(updates, bits, alike, strict=True):
            total = torch.cat([totals[index] for index in indices])
            target = math.sqrt(min(piece.matrix.shape))
            update.mul_(norm_factor(total, num_bits, target).view(-1, 1, 1))
            for index, part in zip(indices, update.unbind(), strict=True):
                scaled[index] = part
        return scaled


class AdaMuonRule(FixedNormRule):
    """The sign of the momentum, and an elementwise second moment of the result.

    With the momentum ``M``, and the result ``O`` of m outputs and n inputs::

        O = orthogonalize(sign(M))
        V <- momentum * V + (1 - momentum) * O * O
        N = O / (sqrt(V) + 1e-8)
        U = N * sqrt(min(m, n)) / ||N||_F
    """

    def state(self, param: Param) -> dict[str, Tensor]:
        """``second_moment``, float32, in the shape of the parameter."""
        return {"second_moment": torch.zeros_like(param.tensor, dtype=torch.float32)}

    def pre(self, momenta: Sequence[Tensor], pieces: Sequence[Piece]) -> Sequence[Tensor]:
        """The sign of the momentum, elementwise."""
        torch._foreach_sign_(list(momenta))
        return momenta

    def sums(self, matrix: Matrix) -> tuple[int, ...]:
        """The squared norm."""
        return (1,)

    def post(
        self, results: Sequence[Tensor], pieces: Sequence[Piece], allsum: AllSum
    ) -> Sequence[Tensor]:
        """``O / (sqrt(V) + EPS)``, scaled to the Frobenius norm ``sqrt(min(m, n))``."""
        alike = batches(results, pieces)
        updates, decays = [], [float(piece.group["momentum"]) for _, piece, _ in alike]
        for (wide, _, indices), decay in zip(alike, decays, strict=True):
            # Each operation is rounded by itself: a fused one may have other bits in another shard.
            moments = torch.stack([pieces[index].state["second_moment"] for index in indices])
            moments = moments * decay + wide.square().mul_(1 - decay)
            for index, moment in zip(indices, moments.unbind(), strict=True):
                pieces[index].state["second_moment"] = moment
            updates.append(wide / moments.sqrt().add_(EPS))
        return self.set_norms(updates, alike, len(pieces), decays, allsum)


class AdaMuon(Muon):
    """AdaMuon over any layout, on the machinery of `Muon`, whose arguments it takes.

    ``B <- momentum * B + G``; ``O = orthogonalize(sign(G + momentum * B))`` with five steps of the
    ``kj`` table; ``V <- momentum * V + (1 - momentum) * O * O``; the update is ``O / (sqrt(V) +
    1e-8)``, scaled to the norm of an orthogonal matrix, and then by ``adjust_lr`` as that of
    `Muon`. That norm is one of the whole matrix: each rank sums the squares of its pieces, and one
    all-reduce per step (for each set of ranks that shares parameters) adds them up, in integers:
    sharded training equals that of whole matrices bit for bit.

    State: beside that of `Muon`, ``second_moment`` for matrices, float32, with the placements of
    the parameter; two values per element in all, as with AdamW.
    """

    rule_class = AdaMuonRule
