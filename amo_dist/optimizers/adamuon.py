"""AdaMuon: Muon on the sign of the momentum, with an elementwise second moment of its result.

Source: AdaMuon, as the AMO paper sets it up. Everything but the sum of squares of a whole matrix is
elementwise, and that sum is taken in integers, which add up to the same bits in any order: sharded
training equals that of whole matrices bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from amo_dist.distributed.layout import local_tensor
from amo_dist.distributed.plan import Part
from amo_dist.distributed.spans import span
from amo_dist.engine.step import StepWork, cut
from amo_dist.kernels.elementwise import wide_dtype
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


def normalized(moment: Tensor, value: Tensor) -> Tensor:
    """``O / (sqrt(V) + 1e-8)`` as a new tensor in the dtype of ``V``."""
    return value.to(moment.dtype) / moment.sqrt().add_(EPS)


def fraction_bits(num_elements: int, decay: float) -> int:
    """Binary places for the squares of a matrix, as many as their sum leaves in 63 bits.

    An entry of ``O / sqrt(V)`` is at most ``(1 - decay)^-1/2``, since ``V`` holds
    ``(1 - decay) * O * O``; twice its square leaves room for rounding.

    Args:
        num_elements: Of the whole matrix.
        decay: That of the second moment.
    """
    return 62 - math.ceil(math.log2(2 * num_elements / (1 - decay)))


def sum_of_squares(values: Tensor, num_bits: int) -> Tensor:
    """``sum(values^2) * 2^num_bits`` as a 0-dim int64: the same bits however a matrix is cut.

    Each square, exact in float64 for float32 values, is rounded to a multiple of ``2^-num_bits``;
    for a matrix of ten million entries that is ``2^-33``, beside squares that average about one.

    Args:
        values: Entries of one matrix, at most those that `fraction_bits` was told of.
        num_bits: From `fraction_bits`.
    """
    squares = values.to(torch.float64).square_()
    return squares.mul_(2.0**num_bits).round_().to(torch.int64).sum()


class AdaMuonWork(StepWork):
    """Signs in; second moment and norm of the whole matrix out. Arguments as for `StepWork`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._arrived: list[tuple[Part, Tensor]] = []
        matrices = self._parameters.matrices
        self._bits = [fraction_bits(m.num_elements, self._config.momentum) for m in matrices]

    def read(self, parts: Sequence[Part], places: Sequence[Tensor]) -> None:
        """The sign of the momentum, elementwise, before anything is rounded to travel."""
        dtype = wide_dtype(getattr(torch, self._config.momentum_dtype))
        wide = [torch.empty_like(place, dtype=dtype) for place in places]
        super().read(parts, wide)
        for place, momentum in zip(places, wide, strict=True):
            place.copy_(momentum.sign_())

    def write(self, parts: Sequence[Part], values: Sequence[Tensor]) -> None:
        """Take results into the second moment, and keep copies until the norms are known."""
        with span("amo::second_moment"):
            for part, value in zip(parts, values, strict=True):
                if self._grads[self._parameters.matrices[part.matrix].tensor] is not None:
                    update_second_moment(self._moment(part), value, self._config.momentum)
                    self._arrived.append((part, value.clone()))

    def finish(self, groups_by_ranks: Mapping[tuple[int, ...], dist.ProcessGroup | None]) -> None:
        """Scale every update to the Frobenius norm ``update_scale * sqrt(m n)`` and apply it.

        One all-reduce for each set of ranks, of one integer for each of its matrices.
        """
        if not self._parameters.matrices:
            return
        with span("amo::norm"):
            sums = self._partial_sums()
            for ranks, group in groups_by_ranks.items():
                here = [
                    index
                    for index, matrix in enumerate(self._parameters.matrices)
                    if tuple(sorted(matrix.ranks)) == ranks
                ]
                if here and group is not None:
                    totals = sums[here]
                    dist.all_reduce(totals, group=group)
                    sums[here] = totals
            factors = self._factors(sums)
        self._apply(
            [
                (part, normalized(self._moment(part), value).mul_(factors[part.matrix]), 1.0)
                for part, value in self._arrived
            ]
        )
        self._arrived.clear()

    def _moment(self, part: Part) -> Tensor:
        tensor = self._parameters.matrices[part.matrix].tensor
        state = self._state[self._parameters.entries[tensor].param]
        return cut(local_tensor(state["second_moment"]), part.piece)

    def _partial_sums(self) -> Tensor:
        """By matrix, the squares of what this rank holds; of replicas only the first counts."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        matrices = self._parameters.matrices
        sums = torch.zeros(len(matrices), dtype=torch.int64, device=self._params[0].device)
        for part, value in self._arrived:
            # Ranks of the first replica hold each element once.
            if rank in matrices[part.matrix].replicas[0]:
                values = normalized(self._moment(part), value)
                sums[part.matrix] += sum_of_squares(values, self._bits[part.matrix])
        return sums

    def _factors(self, sums: Tensor) -> Tensor:
        """By matrix, float32: the wanted norm over that of the whole matrix; 0 for a zero one."""
        matrices = self._parameters.matrices
        wanted = [self._config.update_scale * math.sqrt(m.num_elements) for m in matrices]
        units = [2.0**-bits for bits in self._bits]
        columns = torch.tensor([wanted, units], dtype=torch.float64, device=sums.device)
        factors = columns[0] / (sums.to(torch.float64) * columns[1]).sqrt()
        return factors.masked_fill_(sums == 0, 0.0).to(torch.float32)


class AdaMuon(Muon):
    """AdaMuon over any layout, on the machinery of `Muon`.

    ``B <- momentum * B + G``; ``O = orthogonalize(sign(G + momentum * B))`` with five steps of the
    ``kj`` table; ``V <- momentum * V + (1 - momentum) * O * O``; the update is ``O / (sqrt(V) +
    1e-8)``, scaled to the Frobenius norm ``update_scale * sqrt(m n)``. That norm is one of the
    whole matrix: each rank sums the squares of its pieces, and one all-reduce a step (for each set
    of ranks that shares parameters) adds them up.

    State: beside that of `Muon`, ``second_moment`` for matrices, float32, with the placements of
    the parameter; two values a parameter in all, as with AdamW.

    Args:
        params: What `amo_dist.param_groups` returns.
        lr: Learning rate of all groups.
        weight_decay: Decoupled.
        schedule: As for `Muon`.
        config: Numerics and exchange; ``momentum`` is the decay of the second moment, too.
        betas: Of AdamW.
        eps: Of AdamW.
        process_group: As for `Muon`.
    """

    _work_class = AdaMuonWork

    def _matrix_state(self, param: Tensor) -> dict[str, Tensor]:
        moment = torch.zeros_like(param, dtype=torch.float32)
        return {**super()._matrix_state(param), "second_moment": moment}
