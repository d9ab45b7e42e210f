"""ROOT: one Newton-Schulz triple per shape of matrix, fitted to spectra of that shape.

Source: ROOT, as set up in the AMO paper. ``(a, b, c)`` minimises ``mean((g^5(sigma) - 1)^2)`` with
``g(x) = a x + b x^3 + c x^5`` over singular values, half proxies of the geometry and half random.
Training repeats the triple five times, without safety scale and without preconditioning.

Every rank fits before the first step. Least squares in floating point does not give the same bits
on every machine; the ballot of the step finds ranks that differ. The triples are part of the saved
state, so a resumed run keeps them.
"""

from __future__ import annotations

import functools
import math
import random
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from amo_dist.config import MuonConfig, Triple, fail
from amo_dist.optimizers.muon import Muon
from amo_dist.schedule.coefficients import named_schedule
from amo_dist.schedule.source import Source
from amo_dist.schedule.types import MatrixInfo, Schedule

# ``T``: repetitions of the triple, in the fit and in training.
NUM_STEPS = 5
# Singular values in each half of a calibration set.
NUM_VALUES = 1024
# Smallest singular values of the spectra that stand in for measured ones.
PROXY_ELLS = (1e-5, 1e-4, 1e-3, 1e-2)
# Least of the independent singular values in the random half; the greatest is 1.
RANDOM_LEAST = 1e-3


class Root(Source):
    """One schedule per shape ``(m, n)``: a fitted triple, five times."""

    name = "root"

    def __init__(self) -> None:
        self._fits: Mapping[str, Sequence[float]] = {}

    def key(self, matrix: MatrixInfo) -> str:
        """The shape, such as ``8x6``; a transposed one is another."""
        return f"{matrix.shape[0]}x{matrix.shape[1]}"

    def bind(self, registry: Sequence[MatrixInfo]) -> None:
        """Fit every shape, unless fits were loaded."""
        shapes = {self.key(matrix): matrix.shape for matrix in registry}
        if not self._fits:
            self._fits = {name: fit(shapes[name]) for name in sorted(shapes)}
        if set(self._fits) != set(shapes):
            fail("control.source.fits", sorted(self._fits), f"the shapes {sorted(shapes)}")

    def schedules(self, step: int) -> Mapping[str, Schedule]:
        """Schedules of all shapes, the same at every step."""
        return {
            name: Schedule(((a, b, c),) * NUM_STEPS, norm_scale=1.0)
            for name, (a, b, c) in self._fits.items()
        }

    def state(self) -> dict[str, Any]:
        """Triple by shape."""
        return {"name": self.name, "fits": dict(self._fits)}

    def load(
        self, state: Mapping[str, Any], config: MuonConfig, changed: Collection[str], step: int
    ) -> None:
        """See `Source.load`."""
        if self._fits and state["fits"] and set(self._fits) != set(state["fits"]):
            fail("control.source.fits", sorted(state["fits"]), f"the shapes {sorted(self._fits)}")
        self._fits = state["fits"] or self._fits


class ROOT(Muon):
    """Muon whose coefficients are fitted to each shape of matrix; see `Root`.

    Args:
        params: Groups from `amo_dist.param_groups`.
        options: Arguments of `Muon`, but for ``schedule``.
    """

    def __init__(self, params: Any, *args: Any, **options: Any) -> None:
        if "schedule" in options:
            raise TypeError("ROOT fits its own schedules: leave schedule out, or use Muon")
        super().__init__(params, *args, schedule=Root(), **options)


def objective(triple: Tensor | Triple, values: Tensor) -> Tensor:
    """Compute ``mean((g^5(sigma) - 1)^2)``, 0-dim.

    Args:
        triple: ``(a, b, c)``; a tensor of shape ``(3,)`` if it needs gradients.
        values: Singular values over the Frobenius norm of their matrix, shape ``(k,)``.
    """
    x = values
    for _ in range(NUM_STEPS):
        square = x * x
        x = x * (triple[0] + square * (triple[1] + square * triple[2]))
    return (x - 1).square().mean()


@functools.lru_cache(maxsize=256)
def calibration_set(shape: tuple[int, int]) -> Tensor:
    """Make the singular values of a fit: float64, shape ``(2 * NUM_VALUES,)``, read-only.

    The first half holds quantiles of geometric sequences: ``min(m, n)`` values of norm 1 whose
    least is one of ``PROXY_ELLS``, a range that covers the AMO paper's observations. The random
    half holds the spectrum of a Gaussian matrix of this shape (quantiles of its Marchenko-Pastur
    law) and as many independent values, log-uniform from ``RANDOM_LEAST`` to 1, which keep the
    iteration stable up to a matrix of rank one. The AMO paper only says that one half is a geometry
    proxy and the other random.

    Args:
        shape: ``(m, n)``.
    """
    short, long = min(shape), max(shape)
    count = NUM_VALUES // len(PROXY_ELLS)
    half = [x for ell in PROXY_ELLS for x in _quantiles(_unit(_geometric(short, ell)), count)]
    gaussian = _marchenko_pastur(short, long, NUM_VALUES // 2)
    # The seed is the same for all shapes; Python keeps the sequence of random() across versions.
    generator = random.Random(0)
    log_uniform = [RANDOM_LEAST ** generator.random() for _ in range(NUM_VALUES // 2)]
    return torch.tensor([*half, *gaussian, *log_uniform], dtype=torch.float64, device="cpu")


@functools.lru_cache(maxsize=256)
def fit(shape: tuple[int, int]) -> Triple:
    """Fit the triple of a shape by L-BFGS in float64 from the ``kj`` triple; cached.

    Args:
        shape: ``(m, n)``.
    """
    values = calibration_set(shape)
    start = named_schedule("kj").schedule.coefficients[0]
    # A first step that is too long makes the polynomial overflow, so shorter ones follow.
    for first_step in (1.0, 0.1, 0.01):
        triple = _minimize(start, values, first_step)
        if objective(triple, values) < objective(start, values):  # false for NaN
            return triple
    return start


@torch.enable_grad()
def _minimize(start: Triple, values: Tensor, first_step: float) -> Triple:
    triple = torch.tensor(start, dtype=torch.float64, device="cpu", requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [triple],
        lr=first_step,
        max_iter=200,
        tolerance_grad=1e-8,
        tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        # The logarithm has the same minimum and keeps line searches within double precision.
        loss = objective(triple, values).log()
        loss.backward()
        return loss

    optimizer.step(closure)
    a, b, c = triple.tolist()
    return a, b, c


def _unit(spectrum: Sequence[float]) -> list[float]:
    norm = math.sqrt(math.fsum(value * value for value in spectrum))
    return [value / norm for value in spectrum]


def _quantiles(values: Sequence[float], count: int) -> list[float]:
    ordered = sorted(values)
    return [ordered[(2 * i + 1) * len(ordered) // (2 * count)] for i in range(count)]


def _geometric(size: int, ell: float) -> list[float]:
    """Make a geometric sequence of norm 1 with the least value ``ell``, if that is possible."""
    if size == 1 or ell * math.sqrt(size) >= 1:
        return [1 / math.sqrt(size)] * size
    low, high = 0.0, 2 * math.log(1 / ell)  # bounds on log(greatest / least)
    for _ in range(60):
        middle = (low + high) / 2
        # The squares over the least one form a geometric series.
        exponent = 2 * middle / (size - 1)
        squares = math.expm1(size * exponent) / math.expm1(exponent)
        low, high = (middle, high) if squares * ell * ell < 1 else (low, middle)
    return _unit([math.exp(low * i / (size - 1)) for i in range(size)])


def _marchenko_pastur(short: int, long: int, count: int) -> list[float]:
    """Quantiles of the singular values of a Gaussian matrix over its Frobenius norm."""
    ratio = math.sqrt(short / long)
    low, high = (1 - ratio) ** 2, (1 + ratio) ** 2
    # Substituting lambda = low + (high - low) sin^2 t makes the density in t smooth.
    num_cells = 4096
    angles = [(i + 0.5) / num_cells * math.pi / 2 for i in range(num_cells)]
    lambdas = [low + (high - low) * math.sin(t) ** 2 for t in angles]
    weights = [(math.sin(t) * math.cos(t)) ** 2 / x for t, x in zip(angles, lambdas, strict=True)]
    passed, total = list(accumulate(weights)), math.fsum(weights)
    cells = [bisect_left(passed, (i + 0.5) / count * total) for i in range(count)]
    values = [math.sqrt(lambdas[cell]) for cell in cells]
    # A whole spectrum of `short` such values has norm 1.
    norm = math.sqrt(math.fsum(value * value for value in values) * short / count)
    # The law holds for large matrices; for a single row it exceeds 1, the greatest possible value.
    return [min(value / norm, 1.0) for value in values]
