"""Which matrices of a rank run Newton-Schulz together, laid out once for as long as it stays so."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

from amo_dist.engine.parameters import Parameters
from amo_dist.kernels.interface import Kernels, Orthogonalizer
from amo_dist.schedule.types import Schedule


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """Matrices of one shape and schedule.

    Attributes:
        positions: Of the matrices, among those that were asked for.
        names: Of the matrices.
        run: Orthogonalizes them.
    """

    positions: tuple[int, ...]
    names: tuple[str, ...]
    run: Orthogonalizer


class Batches:
    """Keeps batches while schedules stay as they are, which after the lock is for good.

    Args:
        parameters: Of this process.
        kernels: Of their device.
    """

    def __init__(self, parameters: Parameters, kernels: Kernels) -> None:
        self._parameters = parameters
        self._kernels = kernels
        self._schedules: Sequence[Schedule] = ()
        self._known: dict[tuple[int, ...], tuple[Batch, ...]] = {}

    def begin_step(self, schedules: Sequence[Schedule]) -> None:
        """Take the schedules of a step, one for each matrix of the process."""
        if schedules != self._schedules:
            self._known.clear()
        self._schedules = schedules

    def of(self, owned: tuple[int, ...]) -> tuple[Batch, ...]:
        """The batches of some matrices, which are given as indices."""
        found = self._known.get(owned)
        if found is None:
            found = self._known[owned] = self._make(owned)
        return found

    def _make(self, owned: tuple[int, ...]) -> tuple[Batch, ...]:
        alike: dict[tuple[Schedule, tuple[int, int]], list[int]] = defaultdict(list)
        for position, index in enumerate(owned):
            matrix = self._parameters.matrices[index]
            alike[self._schedules[index], matrix.shape].append(position)
        return tuple(
            Batch(
                tuple(positions),
                tuple(self._parameters.matrices[owned[position]].name for position in positions),
                self._kernels.orthogonalizer(
                    len(positions),
                    shape,
                    schedule.coefficients,
                    schedule.norm_scale,
                    schedule.preconditioner,
                    slot=slot,
                ),
            )
            for slot, ((schedule, shape), positions) in enumerate(alike.items())
        )
