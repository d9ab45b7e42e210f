"""Geometry of every matrix at fixed steps: its momentum and the result of Newton-Schulz.

A tracked step gathers all matrices in the dtype of momentum. The owner of a matrix measures it, and
orthogonalizes the same bits as in any other step, so tracking changes no bit of training.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections import ChainMap
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from amo_dist.distributed.ranks import gather_json, slowest
from amo_dist.engine.world import World
from amo_dist.kernels.geometry import SPECTRAL_METRICS, ns_residual, spectral_metrics

logger = logging.getLogger(__name__)

_LAYER = re.compile(r"(?:^|\.)(?:\w*(?:layers?|blocks?)|h)\.(\d+)\.")

WHAT = ("momentum", "residual", "both")
"""Measurements: the spectrum of momentum; also the residual and norm of the result; also the
spectrum of the result."""

Record = dict[str, Any]
Sink = Callable[[int, Sequence[Record]], None]
"""Function of the step and the records of all matrices, by name; the first rank calls it."""


class GeometryTracker:
    """Measures every matrix at each multiple of ``interval`` steps.

    Set it as ``Muon.tracker`` on every rank before the first step.

    Args:
        interval: Optimizer steps between measurements.
        what: Measurements, one of `WHAT`.
        sink: Function that takes the records on the first rank; None keeps them in ``records``
            alone.

    Raises:
        ValueError: ``interval`` or ``what`` is out of range.
    """

    def __init__(self, interval: int, what: str = "both", sink: Sink | None = None) -> None:
        if interval < 1:
            raise ValueError(f"interval: found {interval!r}, expected an integer >= 1")
        if what not in WHAT:
            raise ValueError(f"what: found {what!r}, expected one of {', '.join(WHAT)}")
        self.records: list[Record] = []
        """Records of the last tracked step, the same on every rank."""
        self.seconds = 0.0
        """Seconds that the slowest rank spent measuring at the last tracked step."""
        self.first_step: int | None = None
        """First step of this process."""
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
            name: Name of the matrix.
            momentum: Momentum ``(m, n)`` in its own dtype.
            result: Orthogonalized momentum ``(m, n)``.
        """
        start = time.perf_counter()
        with record_function("amo::track"):
            record = _named_metrics(momentum)  # waits for the device, so the time is complete
            if self._what != "momentum":
                record["ns_residual"] = ns_residual(result).item()
                norm = torch.linalg.vector_norm(result, dtype=torch.float64).item()
                record["update_norm"] = norm / math.sqrt(min(result.shape))  # 1 for a polar factor
            if self._what == "both":
                record["orthogonalized"] = _named_metrics(result)
            self._measured[name] = record
        self._seconds += time.perf_counter() - start

    def collect(self, step: int, world: World) -> None:
        """Gather the measurements of all ranks; a collective over the world.

        Args:
            step: Step just taken; a skipped one leaves no records.
            world: World that the ranks agreed on.
        """
        own = {
            name: m
            for name, m in self._measured.items()
            if world.rank in world.reporting_ranks[name]
        }
        measured = ChainMap(*gather_json(own, world.group))
        self.seconds = slowest(self._seconds, world.group)
        self._measured, self._seconds = {}, 0.0
        level = logging.DEBUG if self.records else logging.INFO  # logged once at INFO
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


def layer_index(name: str) -> int | None:
    """The number of the layer that a parameter lies in; None outside of any.

    It is the number after ``layers``, ``blocks`` or the like, wherever that stands: 5 in
    ``0.layers.5.attention.wq.weight``.
    """
    match = _LAYER.search(name)
    return None if match is None else int(match[1])
