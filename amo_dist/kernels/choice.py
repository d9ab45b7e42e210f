"""Which kernels run Newton-Schulz fastest on a device: by measuring them on the shapes at hand.

Clocks differ from run to run, so that two runs may choose unlike kernels, whose last bits differ.
A run keeps its choice, in its checkpoints too; ``ns_backend`` by name leaves nothing to a clock.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Mapping, Sequence

import torch

from amo_dist.config import Triple
from amo_dist.kernels.interface import Kernels, Orthogonalizer, backend_key

logger = logging.getLogger(__name__)

LEAST_GAIN = 0.95
"""Of the time of ``standard``: what takes longer is not worth other bits."""
MOST_ERROR = 2.0
"""Times the error of ``standard``: what is less exact is not taken."""
MOST_SECONDS = 20.0
"""After which no further kernel is begun; most of it goes to compilers."""
_ROUNDS = 3
_DECAY = 3.0
"""Decades between the largest and the smallest row: momentum is as hard to orthogonalize."""

Measured = Mapping[str, Mapping[str, Sequence[float]]]
"""By `backend_key` and backend: seconds of a batch, and the error of a result relative to its norm.
The errors of all schedules of a key count."""


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """A batch of matrices, as steps run it.

    Attributes:
        count: Of matrices.
        shape: ``(m, n)`` of each.
        coefficients: One ``(a, b, c)`` for each step.
        norm_scale: As for `Kernels.orthogonalizer`.
        preconditioner: As for `Kernels.orthogonalizer`.
    """

    count: int
    shape: tuple[int, int]
    coefficients: tuple[Triple, ...]
    norm_scale: float
    preconditioner: str

    @property
    def key(self) -> str:
        """What a choice is kept by."""
        return backend_key(self.shape, self.coefficients)


@torch.no_grad()
def measure(kernels: Kernels, works: Sequence[Work], device: torch.device) -> Measured:
    """Run each of ``kernels.candidates`` on each batch, for `MOST_SECONDS` or little longer.

    Args:
        kernels: Of the device.
        works: Several may have one key; each counts for the error, the slowest for the time.
        device: Where to run them.

    Returns:
        What could be measured: one that fails is left out, with a warning.
    """
    found: dict[str, dict[str, list[float]]] = {}
    if not kernels.candidates:
        return found
    deadline = time.monotonic() + MOST_SECONDS
    for work in works:
        x = _momentum(work, device).to(kernels.ns_dtype)
        exact = _exact(kernels, work, x[:1])
        for name in kernels.candidates:
            if time.monotonic() > deadline:
                logger.warning("kernels: %g s are over, the rest is not measured", MOST_SECONDS)
                return found
            if _by_name(kernels, name).backend_name(work.shape, work.coefficients) != name:
                continue  # the Gram form, where it is not stable
            rows = found.setdefault(work.key, {})
            try:
                seconds, error = _measure(kernels, name, work, x, exact)
            except Exception as cause:  # a compiler's, or out of memory
                logger.warning("kernels: %s at %s left out: %s", name, work.key, cause)
                rows[name] = [math.inf, math.inf]
                continue
            before = rows.get(name, [0.0, 0.0])
            rows[name] = [max(before[0], seconds), max(before[1], error)]
    return found


def choose(measured: Sequence[Measured]) -> dict[str, str]:
    """The fastest kernels that are exact enough on all ranks, by key.

    Args:
        measured: By each rank. The slowest counts; a key without ``standard`` is left out, and
            backends that some rank of a key lacks are not taken.
    """
    chosen: dict[str, str] = {}
    for key in sorted({key for one in measured for key in one}):
        rows = [one[key] for one in measured if key in one]
        if not all("standard" in row for row in rows):
            continue
        standard = max(row["standard"][0] for row in rows)
        seconds = {"standard": LEAST_GAIN * standard}
        for name in rows[0]:
            if all(name in row and row[name][1] <= MOST_ERROR * row["standard"][1] for row in rows):
                seconds[name] = min(seconds.get(name, math.inf), max(r[name][0] for r in rows))
        chosen[key] = best = min(seconds, key=lambda name: seconds[name])
        gain = "" if best == "standard" else f", {seconds[best] / standard:.2f} of standard's time"
        logger.info("kernels: %s runs %s%s", key, best, gain)
    return chosen


def _momentum(work: Work, device: torch.device) -> torch.Tensor:
    """Matrices of known values, ``(count, m, n)``, whose singular values decay."""
    m, n = work.shape
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(work.count, m, n, generator=generator, device=device)
    rows = torch.logspace(0, -_DECAY, min(m, n), device=device)
    return x * (rows if m > n else rows[:, None])


def _exact(kernels: Kernels, work: Work, x: torch.Tensor) -> torch.Tensor:
    wide = torch.float32 if kernels.ns_dtype.itemsize < 4 else torch.float64
    return _laid_out(type(kernels)(wide, "standard"), work, len(x))(list(x))


def _measure(
    kernels: Kernels, name: str, work: Work, x: torch.Tensor, exact: torch.Tensor
) -> tuple[float, float]:
    """Seconds of the fastest of some runs, after one that compiles; and the error."""
    run, matrices = _laid_out(_by_name(kernels, name), work, len(x)), list(x)
    error = run(matrices)[:1].to(exact.dtype).sub(exact).norm() / exact.norm()
    seconds = []
    for _ in range(_ROUNDS):
        _wait(x)
        start = time.perf_counter()
        run(matrices)
        _wait(x)
        seconds.append(time.perf_counter() - start)
    return min(seconds), error.item()


def _by_name(kernels: Kernels, name: str) -> Kernels:
    return type(kernels)(kernels.ns_dtype, name)


def _laid_out(kernels: Kernels, work: Work, count: int) -> Orthogonalizer:
    return kernels.orthogonalizer(
        count, work.shape, work.coefficients, work.norm_scale, work.preconditioner
    )


def _wait(x: torch.Tensor) -> None:
    if x.device.type != "cpu":
        torch.accelerator.synchronize(x.device)
