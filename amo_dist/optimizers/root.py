"""ROOT: one Newton-Schulz triple per shape of matrix, fitted to the spectra of that shape.

Source: ROOT, as set up in the AMO paper. ``(a, b, c)`` minimises ``mean((g^5(sigma) - 1)^2)`` with
``g(x) = a x + b x^3 + c x^5`` over singular values, half measured and half random. Training repeats
the triple five times, without safety scale and without preconditioning.

One rank fits and broadcasts before the first step, because least squares in floating point does not
give the same bits on every machine. The triples are part of the saved state, so a resumed run keeps
them.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import random
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from amo_dist.config import Triple
from amo_dist.optimizers.muon import Muon
from amo_dist.schedule import fields
from amo_dist.schedule.coefficients import named_schedule
from amo_dist.schedule.grouping import Groups, collect
from amo_dist.schedule.policies import Policy
from amo_dist.schedule.types import MatrixInfo, Schedule

NUM_STEPS = 5
"""``T``: repetitions of the triple, in the fit and in training."""
NUM_VALUES = 1024
"""Singular values in each half of a calibration set."""
PROXY_ELLS = (1e-5, 1e-4, 1e-3, 1e-2)
"""Smallest singular values of the spectra that stand in for measured ones."""
RANDOM_LEAST = 1e-3
"""Least of the independent singular values in the random half; the greatest is 1."""

Spectra = tuple[tuple[float, ...], ...]


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
def calibration_set(shape: tuple[int, int], measured: Spectra = ()) -> Tensor:
    """Make the singular values of a fit: float64, shape ``(2 * NUM_VALUES,)``, read-only.

    The measured half holds quantiles of the measured spectra, each over its Euclidean norm. Without
    measurements geometric sequences stand in: ``min(m, n)`` values of norm 1 whose least is one of
    ``PROXY_ELLS``, a range that covers the AMO paper's observations. The random half holds the
    spectrum of a Gaussian matrix of this shape (quantiles of its Marchenko-Pastur law) and as many
    independent values, log-uniform from ``RANDOM_LEAST`` to 1, which keep the iteration stable up
    to a matrix of rank one. The AMO paper only says that one half is a geometry proxy and the other
    random.

    Args:
        shape: ``(m, n)``.
        measured: Singular values of momentum matrices of this shape, in any scale and order.
    """
    short, long = min(shape), max(shape)
    spectra = measured or tuple(_geometric(short, ell) for ell in PROXY_ELLS)
    count = -(-NUM_VALUES // len(spectra))
    half = [value for spectrum in spectra for value in _quantiles(_unit(spectrum), count)]
    gaussian = _marchenko_pastur(short, long, NUM_VALUES // 2)
    # The seed is the same for all shapes; Python keeps the sequence of random() across versions.
    generator = random.Random(0)
    log_uniform = [RANDOM_LEAST ** generator.random() for _ in range(NUM_VALUES // 2)]
    values = [*half[:NUM_VALUES], *gaussian, *log_uniform]
    return torch.tensor(values, dtype=torch.float64, device="cpu")


@functools.lru_cache(maxsize=256)
def fit(shape: tuple[int, int], measured: Spectra = ()) -> Triple:
    """Fit the triple of a shape by L-BFGS in float64 from the ``kj`` triple; cached.

    Args:
        shape: ``(m, n)``.
        measured: Argument of `calibration_set`.
    """
    values = calibration_set(shape, measured)
    start = named_schedule("kj").schedule.coefficients[0]
    # A first step that is too long makes the polynomial overflow, so shorter ones follow.
    for first_step in (1.0, 0.1, 0.01):
        triple = _minimize(start, values, first_step)
        if objective(triple, values) < objective(start, values):  # false for NaN
            return triple
    return start


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

    optimizer.step(closure)  # L-BFGS enables gradients itself
    a, b, c = triple.tolist()
    return a, b, c


def _unit(spectrum: Sequence[float]) -> list[float]:
    norm = math.sqrt(math.fsum(value * value for value in spectrum))
    return [value / norm for value in spectrum]


def _quantiles(values: Sequence[float], count: int) -> list[float]:
    ordered = sorted(values)
    return [ordered[(2 * i + 1) * len(ordered) // (2 * count)] for i in range(count)]


def _geometric(size: int, ell: float) -> tuple[float, ...]:
    """Make a geometric sequence of norm 1 with the least value ``ell``, if that is possible."""
    if size == 1 or ell * math.sqrt(size) >= 1:
        return (1 / math.sqrt(size),) * size
    low, high = 0.0, 2 * math.log(1 / ell)  # bounds on log(greatest / least)
    for _ in range(60):
        middle = (low + high) / 2
        # The squares over the least one form a geometric series.
        exponent = 2 * middle / (size - 1)
        squares = math.expm1(size * exponent) / math.expm1(exponent)
        low, high = (middle, high) if squares * ell * ell < 1 else (low, middle)
    return tuple(_unit([math.exp(low * i / (size - 1)) for i in range(size)]))


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


@dataclasses.dataclass(frozen=True, slots=True)
class Fit(fields.Stored):
    """Fitted triple of one shape, and its calibration."""

    triple: tuple[fields.Float, fields.Float, fields.Float]
    objective: fields.Float
    """Objective at the triple."""
    num_measured: fields.CountOrZero
    """Number of measured spectra in the calibration set."""
    calibration: fields.Name
    """Digest of the calibration set."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fits(fields.Stored):
    """Fits of all shapes."""

    fits: Mapping[str, Fit] | None = None
    """Fit by shape, such as ``8x6``; None before the first step."""


class RootPolicy(Policy):
    """One schedule per shape: a fitted triple, five times.

    The fits are this policy's plan: due before the first step, made on one rank, adopted by all.

    Args:
        spectra: Measured singular values by shape ``(m, n)``, one sequence per matrix.

    Raises:
        ValueError: A spectrum is empty or all zero, or has a value that is negative or not finite.
    """

    name = "root"
    is_fixed = False

    def __init__(
        self, spectra: Mapping[tuple[int, int], Sequence[Sequence[float]]] | None = None
    ) -> None:
        self._spectra = {
            shape: tuple(_check_spectrum(shape, spectrum) for spectrum in measured)
            for shape, measured in (spectra or {}).items()
        }

    def groups(self, registry: Sequence[MatrixInfo]) -> Groups:
        """Group matrices by shape ``(m, n)``; a transposed shape is another group."""
        return collect(registry, lambda matrix: _shape_name(matrix.shape))

    def start(self) -> Fits:
        """Start without fits."""
        return Fits()

    def schedules(self, state: Fits, groups: Groups, step: int) -> Mapping[str, Schedule]:
        """Schedules of all shapes, the same at every step."""
        if state.fits is None:
            fields.fail("step", step, "a fit before it")
        return {
            name: Schedule((fitted.triple,) * NUM_STEPS, norm_scale=1.0)
            for name, fitted in state.fits.items()
        }

    def plan_due(self, state: Fits) -> bool:
        """Whether no fit was made."""
        return state.fits is None

    def make_plan(self, state: Fits, groups: Groups) -> str:
        """Fit every shape; returns the fits as JSON."""
        fits: dict[str, Fit] = {}
        for name, matrices in groups.members.items():
            shape = matrices[0].shape
            measured = self._spectra.get(shape, ())
            triple, values = fit(shape, measured), calibration_set(shape, measured)
            error = objective(triple, values).item()
            text = " ".join(value.hex() for value in values.tolist())
            digest = hashlib.sha256(text.encode()).hexdigest()
            fits[name] = Fit(triple, error, len(measured), digest)
        return json.dumps(Fits(fits).to_dict(), sort_keys=True)

    def adopt_plan(self, state: Fits, groups: Groups, payload: str) -> Fits:
        """Adopt the fits that one rank made; see `Policy.adopt_plan`."""
        return self._read(fields.read_json("plan", payload), groups)

    def _fields(self, state: Fits) -> dict[str, Any]:
        return state.to_dict()

    def _read(self, values: Mapping[str, Any], groups: Groups | None) -> Fits:
        """Read saved fits, which hold even if this run has other spectra."""
        state = Fits.from_dict(values, "state")
        if groups is not None and state.fits is not None and set(state.fits) != set(groups.members):
            fields.fail("fits", sorted(state.fits), f"the shapes {sorted(groups.members)}")
        return state


def _shape_name(shape: tuple[int, int]) -> str:
    return f"{shape[0]}x{shape[1]}"


def _check_spectrum(shape: tuple[int, int], spectrum: Sequence[float]) -> tuple[float, ...]:
    values = tuple(map(float, spectrum))
    if not any(values) or not all(0 <= value < math.inf for value in values):
        expected = "finite numbers >= 0, not all of them zero"
        fields.fail(f"spectra[{_shape_name(shape)}]", values, expected)
    return values


class ROOT(Muon):
    """Muon whose coefficients are fitted to each shape of matrix; see `RootPolicy`.

    Args:
        params: Groups from `amo_dist.param_groups`.
        lr: Learning rate of all groups.
        weight_decay: Decoupled weight decay.
        spectra: Measured singular values by shape; proxies stand in for shapes without any.
        options: Arguments ``config``, ``betas``, ``eps``, ``process_group`` and
            ``allow_no_matrices`` of `Muon`.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        *,
        spectra: Mapping[tuple[int, int], Sequence[Sequence[float]]] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, weight_decay, schedule=RootPolicy(spectra), **options)
