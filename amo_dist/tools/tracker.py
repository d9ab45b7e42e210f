"""Geometry of every matrix at fixed steps: momentum, and what Newton-Schulz made of it.

A tracked step gathers all matrices in the dtype of momentum; each is measured by the rank that owns
it anyway, and orthogonalized from the same bits as in any other step. Training goes on as without
tracking, to the last bit.
"""

from __future__ import annotations

import logging
import math
import time
from collections import ChainMap
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from amo_dist.distributed.agreement import gather_json, slowest
from amo_dist.engine.world import World
from amo_dist.kernels.geometry import SPECTRAL_METRICS, ns_residual, spectral_metrics
from amo_dist.schedule.grouping import layer_index

logger = logging.getLogger(__name__)

WHAT = ("momentum", "residual", "both")
"""What to measure: momentum's spectrum; with the residual and norm of the result; with its
spectrum too."""

Record = dict[str, Any]
Sink = Callable[[int, Sequence[Record]], None]
"""Called on the first rank with the step and the records of all matrices, sorted by name."""


class GeometryTracker:
    """Measures every matrix at each multiple of ``interval`` steps.

    Give it to ``Muon.tracker`` of every rank before the first step.

    Args:
        interval: Steps from one measurement to the next.
        what: One of `WHAT`.
        sink: Takes the records, on the first rank; without it they are only kept in ``records``.

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
        self._measured: dict[str, Record] = {}
        self._seconds = 0.0

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
        with record_function("amo::track"):
            found = _named_metrics(momentum)  # each waits for the device: timed in full
            if self._what != "momentum":
                found["ns_residual"] = ns_residual(result).item()
                # Over that of an exact polar factor.
                norm = torch.linalg.vector_norm(result, dtype=torch.float64).item()
                found["update_norm"] = norm / math.sqrt(min(result.shape))
            if self._what == "both":
                found["orthogonalized"] = _named_metrics(result)
            self._measured[name] = found
        self._seconds += time.perf_counter() - start

    def collect(self, step: int, world: World) -> None:
        """Bring the measurements of all ranks together; a collective over the world.

        Args:
            step: The step just taken; one that was skipped leaves no records.
            world: The agreed structure.
        """
        mine = {
            name: found for name, found in self._measured.items() if world.rank in world.homes[name]
        }
        measured = ChainMap(*gather_json(mine, world.group))
        self.seconds = slowest(self._seconds, world.group)
        self._measured, self._seconds = {}, 0.0
        level = logging.DEBUG if self.records else logging.INFO  # told once
        self.records = [
            {
                "step": step,
                "name": info.name,
                "layer": layer_index(info.name),
                "operator_type": info.operator_type,
                "shape": list(info.shape),
                **measured[info.name],
            }
            for info in world.registry
            if info.name in measured
        ]
        if world.leads and self.records:
            text = "geometry of %d matrices: %.2f s on the slowest rank, every %d steps"
            logger.log(level, text, len(self.records), self.seconds, self._interval)
            if self.sink is not None:
                self.sink(step, self.records)


def _named_metrics(x: Tensor) -> Record:
    return dict(zip(SPECTRAL_METRICS, spectral_metrics(x).tolist(), strict=True))
