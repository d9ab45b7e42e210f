"""Sums over whole matrices whose pieces lie on several ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from amo_dist.distributed.layout import Matrix
from amo_dist.engine.parameters import Piece
from amo_dist.engine.world import World


class MatrixSums:
    """The ``allsum`` of one step: each call is one reduction for each set of ranks.

    Every rank calls as often as the rule's `sums` declares, also if its rule fails: `finish` makes
    up for missing calls, so that no rank waits for another.

    Args:
        matrices: Matrices of this process.
        sizes: Number of elements of each sum, call by call, for each matrix.
        pieces: Pieces of this rank, in the order of shares.
        world: Says which ranks share matrices.
        dtype: Dtype of shares and totals.
        device: Device over which ranks add up.
        home: Device of shares and totals, which go to ``device`` and back.
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        sizes: Sequence[tuple[int, ...]],
        pieces: Sequence[Piece],
        world: World,
        dtype: torch.dtype,
        device: torch.device,
        home: torch.device,
    ) -> None:
        self._matrices, self._sizes, self._pieces = matrices, sizes, pieces
        self._world, self._dtype, self._device, self._home = world, dtype, device, home
        self._indices = {matrix.name: index for index, matrix in enumerate(matrices)}
        self._num_left = max(map(len, sizes), default=0)
        self._num_calls = 0
        self.error: Exception | None = None
        """Error of a reduction, after which no rank can go on."""

    def __call__(self, shares: Sequence[Tensor | None]) -> list[Tensor]:
        """Add up shares over all pieces of each matrix, on all of its ranks.

        Raises:
            ValueError: The rule asks for more sums than it declared, or gives another number of
                shares than there are pieces.
        """
        if not self._num_left or len(shares) != len(self._pieces):
            raise ValueError(
                f"allsum: found call {self._num_calls + 1} with {len(shares)} shares, expected "
                f"{self._num_calls + self._num_left} calls, as `sums` declares, each with a share "
                f"for each of {len(self._pieces)} pieces"
            )
        totals: dict[int, Tensor] = {}
        for piece, share in zip(self._pieces, shares, strict=True):
            # Replicas hold the same numbers: only the first one counts.
            if share is not None and self._world.rank in piece.matrix.replicas[0]:
                index = self._indices[piece.matrix.name]
                totals[index] = totals[index] + share if index in totals else share
        totals = self._reduce(totals)
        zero = torch.zeros(1, dtype=self._dtype, device=self._home)
        return [totals.get(self._indices[piece.matrix.name], zero) for piece in self._pieces]

    def finish(self) -> None:
        """Take part in the sums that the rule has not asked for; nothing after a failed one."""
        while self._num_left and self.error is None:
            self._reduce({})

    def _reduce(self, totals: dict[int, Tensor]) -> dict[int, Tensor]:
        number = self._num_calls
        self._num_calls, self._num_left = number + 1, self._num_left - 1
        sizes = {i: size[number] for i, size in enumerate(self._sizes) if number < len(size)}
        try:
            with record_function("amo::sums"):
                for ranks, group in self._world.groups_by_ranks.items():
                    shared = [
                        index
                        for index, size in sizes.items()
                        if size and tuple(sorted(self._matrices[index].ranks)) == ranks
                    ]
                    if shared and group is not None:
                        self._add_up(totals, [(index, sizes[index]) for index in shared], group)
        except Exception as error:
            self.error = error
            raise
        return totals

    def _add_up(
        self, totals: dict[int, Tensor], shared: list[tuple[int, int]], group: dist.ProcessGroup
    ) -> None:
        """All-reduce the totals of some matrices as one vector, in place."""
        zeros = {
            size: torch.zeros(size, dtype=self._dtype, device=self._device)
            for size in {size for _, size in shared}
        }
        parts = [totals.get(index, zeros[size]).to(self._device) for index, size in shared]
        vector = torch.cat(parts)
        dist.all_reduce(vector, group=group)
        sums = vector.to(self._home).split([size for _, size in shared])
        totals.update({index: total for (index, _), total in zip(shared, sums, strict=True)})
