"""Geometry of every matrix at fixed steps: momentum, and what Newton-Schulz made of it.

A tracked step gathers all matrices in the dtype of momentum; each is measured by the rank that owns
it anyway, and orthogonalized from the same bits as in any other step. Training goes on as without
tracking, to the last bit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from amo_dist.distributed.agreement import sum_over
from amo_dist.distributed.spans import span
from amo_dist.engine.world import World
from amo_dist.kernels.geometry import SPECTRAL_METRICS, ns_residual, spectral_metrics
from amo_dist.schedule.grouping import layer_index

logger = logging.getLogger(__name__)

WHAT = ("momentum", "residual", "both")
"""What to measure: momentum's spectrum; with the residual; with the result's spectrum too."""

Record = dict[str, Any]
Sink = Callable[[int, Sequence[Record]], None]
"""Called on rank 0 with the step and the records of all matrices, sorted by name."""


class GeometryTracker:
    """Measures every matrix at each multiple of ``interval`` steps.

    Give it to ``Muon.tracker`` of every rank before the first step.

    Args:
        interval: Steps from one measurement to the next.
        what: One of `WHAT`.
        sink: Takes the records, on rank 0; without it they are only kept in ``records``.

    Raises:
        ValueError: ``interval`` or ``what`` is out of range.
    """

    def __init__(self, interval: int, what: str = "both", sink: Sink | None = None) -> None:
        if interval < 1:
            raise ValueError(f"interval: found {interval!r}, expected an integer >= 1")
        if what not in WHAT:
            raise ValueError(f"what: found {what!r}, expected one of {', '.join(WHAT)}")
        self.records: list[Record] = []
        """The records of the last tracked step, the same on every rank."""
        self.seconds = 0.0
        """Seconds that the slowest rank spent measuring at the last tracked step."""
        self.first_step: int | None = None
        """The first step that was asked about: where this process began."""
        self._interval = interval
        self._what = what
        self.sink = sink
        self._measured: dict[str, Tensor] = {}
        self._seconds = 0.0
        self._has_told = False

    def is_due(self, step: int) -> bool:
        """Whether a step is tracked; the same on every rank."""
        if self.first_step is None:
            self.first_step = step
        return step % self._interval == 0

    def measure(self, name: str, momentum: Tensor, result: Tensor) -> None:
        """Measure one matrix that this rank owns and reports.

        Args:
            name: Of the matrix.
            momentum: What was orthogonalized, ``(m, n)``, before it was narrowed.
            result: What Newton-Schulz made of it, ``(m, n)``.
        """
        start = time.perf_counter()
        with span("amo::track"):
            parts = [spectral_metrics(momentum)]  # each waits for the device: timed in full
            if self._what != "momentum":
                parts.append(ns_residual(result).reshape(1).cpu())
            if self._what == "both":
                parts.append(spectral_metrics(result))
            self._measured[name] = torch.cat(parts)
        self._seconds += time.perf_counter() - start

    def collect(self, step: int, world: World) -> None:
        """Bring the measurements of all ranks together; a collective over the world.

        Args:
            step: The step just taken; one that was skipped leaves no records.
            world: The agreed structure.
        """
        width = 1 + self._width()
        vector = [0.0] * (width * len(world.registry))
        for slot, info in enumerate(world.registry):
            found = self._measured.get(info.name)
            if found is not None and world.rank in world.homes[info.name]:
                vector[slot * width : (slot + 1) * width] = [1.0, *found.tolist()]
        num_ranks = 1 if world.group is None else world.group.size()
        seconds = [0.0] * num_ranks
        seconds[world.rank] = self._seconds
        total = sum_over([*vector, *seconds], world.group)
        self.seconds = max(total[len(vector) :])
        self._measured, self._seconds = {}, 0.0
        self.records = [
            {
                "step": step,
                "name": info.name,
                "layer": layer_index(info.name),
                "operator_type": info.operator_type,
                "shape": list(info.shape),
                **self._values(total[slot * width + 1 : (slot + 1) * width]),
            }
            for slot, info in enumerate(world.registry)
            if total[slot * width] == 1.0
        ]
        if world.rank == 0 and self.records:
            self._tell()
            if self.sink is not None:
                self.sink(step, self.records)

    def _width(self) -> int:
        size = len(SPECTRAL_METRICS)
        return {"momentum": size, "residual": size + 1, "both": 2 * size + 1}[self._what]

    def _values(self, numbers: Sequence[float]) -> Mapping[str, Any]:
        size = len(SPECTRAL_METRICS)
        values: Record = dict(zip(SPECTRAL_METRICS, numbers, strict=False))
        if len(numbers) > size:
            values["ns_residual"] = numbers[size]
        if len(numbers) > size + 1:
            rest = numbers[size + 1 :]
            values["orthogonalized"] = dict(zip(SPECTRAL_METRICS, rest, strict=True))
        return values

    def _tell(self) -> None:
        level = logging.DEBUG if self._has_told else logging.INFO
        self._has_told = True
        text = "geometry of %d matrices: %.2f s on the slowest rank, every %d steps"
        logger.log(level, text, len(self.records), self.seconds, self._interval)
