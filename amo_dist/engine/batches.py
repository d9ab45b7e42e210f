"""Which matrices of a rank run Newton-Schulz together, laid out once for as long as it stays so."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

import torch

from amo_dist.config import MuonConfig
from amo_dist.engine.parameters import Parameters
from amo_dist.kernels.newton_schulz import Orthogonalizer
from amo_dist.schedule.types import Schedule


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """Matrices of one shape and schedule on one device.

    Attributes:
        positions: Of the matrices, among those that were asked for.
        names: Of the matrices.
        schedule: Of all of them.
        shape: ``(b, m, n)``.
        device: Where they lie.
        run: Orthogonalizes them.
    """

    positions: tuple[int, ...]
    names: tuple[str, ...]
    schedule: Schedule
    shape: tuple[int, int, int]
    device: torch.device
    run: Orthogonalizer


class Batches:
    """Keeps batches while schedules stay as they are, which after the lock is for good.

    Args:
        parameters: Of this process.
        config: Numerics.
    """

    def __init__(self, parameters: Parameters, config: MuonConfig) -> None:
        self._parameters = parameters
        self._config = config
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
        alike: dict[tuple[Schedule, tuple[int, int], torch.device], list[int]] = defaultdict(list)
        for position, index in enumerate(owned):
            matrix = self._parameters.matrices[index]
            device = self._parameters.entries[matrix.tensor].param.device
            alike[self._schedules[index], matrix.shape, device].append(position)
        return tuple(
            Batch(
                tuple(positions),
                tuple(self._parameters.matrices[owned[position]].name for position in positions),
                schedule,
                (len(positions), *shape),
                device,
                self._orthogonalizer(len(positions), shape, schedule, device),
            )
            for (schedule, shape, device), positions in alike.items()
        )

    def _orthogonalizer(
        self, count: int, shape: tuple[int, int], schedule: Schedule, device: torch.device
    ) -> Orthogonalizer:
        return Orthogonalizer(
            count,
            shape,
            schedule.coefficients,
            norm_scale=schedule.norm_scale,
            preconditioner=schedule.preconditioner,
            dtype=getattr(torch, self._config.ns_dtype),
            device_type=device.type,
            backend=self._config.ns_backend,
        )
