"""Which matrices of a rank run Newton-Schulz together, laid out once for as long as it stays so."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence

from torch import Tensor

from amo_dist.engine.parameters import Parameters
from amo_dist.kernels.choice import Work
from amo_dist.kernels.interface import Kernels, Orthogonalizer
from amo_dist.kernels.team import Team
from amo_dist.schedule.types import Schedule

_MOST_MEASURED = 8
"""Matrices of a batch that is measured: buckets hold no more of those that take long."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Batch:
    """Matrices of one shape and schedule."""

    positions: tuple[int, ...]
    """Of the matrices, among those that were asked for."""
    names: tuple[str, ...]
    run: Callable[[Sequence[Tensor]], Tensor]
    """From the matrices to their results, ``(b, m, n)``."""


class Batches:
    """Keeps batches while schedules stay as they are, which after the lock is for good.

    Args:
        parameters: Of this process.
        kernels: Of the parameters' device.
    """

    def __init__(self, parameters: Parameters, kernels: Kernels) -> None:
        self._parameters = parameters
        self._kernels = kernels
        self._schedules: Sequence[Schedule] = ()
        self._known: dict[tuple[tuple[int, ...], Team | None], tuple[_Batch, ...]] = {}
        self._nonfinite: dict[tuple[str, ...], Tensor] = {}

    def begin_step(self, schedules: Sequence[Schedule]) -> None:
        """Take the schedules of a step, one for each matrix of the process."""
        if schedules != self._schedules:
            self._known.clear()
        self._schedules = schedules

    def run(
        self, owned: tuple[int, ...], matrices: Sequence[Tensor], team: Team | None = None
    ) -> list[Tensor]:
        """Orthogonalize matrices; one whose result is NaN or inf gives zeros, and is noted.

        Args:
            owned: Their indices.
            matrices: ``(m, n)`` each.
            team: Who shares them; ``matrices`` are slabs then, and all members call this.

        Returns:
            The results, in the dtype of the products; lent until the next call.
        """
        batches = self._known.get((owned, team))
        if batches is None:
            batches = self._known[owned, team] = self._lay_out(owned, team)
        results: dict[int, Tensor] = {}
        for batch in batches:
            found = batch.run([matrices[position] for position in batch.positions])
            bad = self._kernels.drop_nonfinite(found, team)
            if bad is not None:
                self._nonfinite[batch.names] = bad
            results.update(zip(batch.positions, found.unbind(), strict=True))
        return [results[position] for position in range(len(owned))]

    def works(self, schedules: Sequence[Schedule]) -> list[Work]:
        """What all matrices take, as batches of about the size that one rank gets.

        Args:
            schedules: One for each matrix of the process.
        """
        found: dict[tuple[tuple[int, int], Schedule], int] = defaultdict(int)
        for matrix, schedule in zip(self._parameters.matrices, schedules, strict=True):
            found[matrix.shape, schedule] += 1
        num_ranks = max((len(each.ranks) for each in self._parameters.matrices), default=1)
        return [
            Work(
                min(-(-count // num_ranks), _MOST_MEASURED),
                shape,
                tuple(schedule.coefficients),
                schedule.norm_scale,
                schedule.preconditioner,
            )
            for (shape, schedule), count in found.items()
        ]

    def forget(self) -> None:
        """Lay all batches out anew: their kernels have changed."""
        self._known.clear()

    def take_nonfinite(self) -> dict[tuple[str, ...], Tensor]:
        """By names of matrices, which results were NaN or inf since the last call: boolean, 1-D."""
        found, self._nonfinite = self._nonfinite, {}
        return found

    def _lay_out(self, owned: tuple[int, ...], team: Team | None) -> tuple[_Batch, ...]:
        # By whole shapes: slabs may be alike on one member of a team alone.
        alike: dict[tuple[Schedule, tuple[int, int]], list[int]] = defaultdict(list)
        for position, index in enumerate(owned):
            alike[self._schedules[index], self._parameters.matrices[index].shape].append(position)
        return tuple(
            _Batch(
                tuple(positions),
                tuple(self._parameters.matrices[owned[position]].name for position in positions),
                self._orthogonalizer(len(positions), shape, schedule, team, slot),
            )
            for slot, ((schedule, shape), positions) in enumerate(alike.items())
        )

    def _orthogonalizer(
        self, count: int, shape: tuple[int, int], schedule: Schedule, team: Team | None, slot: int
    ) -> Orthogonalizer:
        what = schedule.coefficients, schedule.norm_scale, schedule.preconditioner
        if team is None:
            return self._kernels.orthogonalizer(count, shape, *what, slot=slot)
        return self._kernels.team_orthogonalizer(shape, *what, team, slot=slot)
