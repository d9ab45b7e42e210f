"""ROOT: one Newton-Schulz triple for each shape of matrix, fitted to the spectra of that shape.

Source: ROOT, as the AMO paper sets it up: ``(a, b, c)`` minimises ``mean((g^5(sigma) - 1)^2)`` with
``g(x) = a x + b x^3 + c x^5`` over singular values of which one half is measured and the other
random, and is repeated five times, without safety scale and without preconditioning.

One rank fits and broadcasts before the first step, because least squares in floating point does not
give the same bits on every machine. The triples are part of the saved state, so a resumed run goes
on with them.
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
"""``T``: how often the triple is repeated, in the fit and in training."""
NUM_VALUES = 1024
"""Singular values in each half of a calibration set."""
PROXY_ELLS = (1e-5, 1e-4, 1e-3, 1e-2)
"""Smallest singular values of the spectra that stand in for measured ones."""
RANDOM_LEAST = 1e-3
"""The independent singular values in the random half go from here to one."""

Spectra = tuple[tuple[float, ...], ...]


def objective(triple: Tensor | Triple, values: Tensor) -> Tensor:
    """``mean((g^5(sigma) - 1)^2)``, 0-dim.

    Args:
        triple: ``(a, b, c)``; as a tensor of shape ``(3,)`` where it takes gradients.
        values: Singular values over the Frobenius norm of their matrix, shape ``(k,)``.
    """
    x = values
    for _ in range(NUM_STEPS):
        square = x * x
        x = x * (triple[0] + square * (triple[1] + square * triple[2]))
    return (x - 1).square().mean()


@functools.lru_cache(maxsize=256)
def calibration_set(shape: tuple[int, int], measured: Spectra = ()) -> Tensor:
    """The singular values a triple is fitted to: float64, shape ``(2 * NUM_VALUES,)``, read-only.

    One half is measured: quantiles of the given spectra, each over its Euclidean norm. Where none
    are given, proxies of the geometry stand in: geometric sequences of ``min(m, n)`` values whose
    norm is one and whose least is one of ``PROXY_ELLS``, which covers what the AMO paper observes.
    The other half is random: one quarter is the spectrum of a Gaussian matrix of this shape (the
    quantiles of its Marchenko-Pastur law), one quarter independent, log-uniform from
    ``RANDOM_LEAST`` on, which keeps the iteration stable up to a matrix of rank one. The AMO paper
    says no more of either half than that one is a geometry proxy and the other random.

    Args:
        shape: ``(m, n)``.
        measured: Singular values of momentum matrices of this shape, in any scale and order.
    """
    short, long = min(shape), max(shape)
    spectra = measured or tuple(_geometric(short, ell) for ell in PROXY_ELLS)
    count = -(-NUM_VALUES // len(spectra))
    half = [value for spectrum in spectra for value in _quantiles(_unit(spectrum), count)]
    gaussian = _marchenko_pastur(short, long, NUM_VALUES // 2)
    # Seeded alike for all shapes; random() is promised to stay the same between Python versions.
    generator = random.Random(0)
    log_uniform = [RANDOM_LEAST ** generator.random() for _ in range(NUM_VALUES // 2)]
    values = [*half[:NUM_VALUES], *gaussian, *log_uniform]
    return torch.tensor(values, dtype=torch.float64, device="cpu")


@functools.lru_cache(maxsize=256)
def fit(shape: tuple[int, int], measured: Spectra = ()) -> Triple:
    """The triple of a shape, by L-BFGS in float64 from the ``kj`` triple; kept in the process.

    Args:
        shape: ``(m, n)``.
        measured: As for `calibration_set`.
    """
    values = calibration_set(shape, measured)
    start = named_schedule("kj").schedule.coefficients[0]
    # A first step that is too long ends where the polynomial overflows, so shorter ones follow.
    for first_step in (1.0, 0.1, 0.01):
        found = _minimize(start, values, first_step)
        if objective(found, values) < objective(start, values):  # false for NaN
            return found
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
        # The logarithm has the same minimum, and line searches stay within double precision.
        loss = objective(triple, values).log()
        loss.backward()
        return loss

    optimizer.step(closure)  # with gradients, wherever it is called
    a, b, c = triple.tolist()
    return a, b, c


def _unit(spectrum: Sequence[float]) -> list[float]:
    norm = math.sqrt(math.fsum(value * value for value in spectrum))
    return [value / norm for value in spectrum]


def _quantiles(values: Sequence[float], count: int) -> list[float]:
    ordered = sorted(values)
    return [ordered[(2 * i + 1) * len(ordered) // (2 * count)] for i in range(count)]


def _geometric(size: int, ell: float) -> tuple[float, ...]:
    """``size`` values in geometric sequence, of norm one; the least is ``ell`` where it can be."""
    if size == 1 or ell * math.sqrt(size) >= 1:
        return (1 / math.sqrt(size),) * size
    low, high = 0.0, 2 * math.log(1 / ell)  # of the logarithm of the greatest over the least
    for _ in range(60):
        middle = (low + high) / 2
        # Squares over the least of them: a geometric series.
        exponent = 2 * middle / (size - 1)
        squares = math.expm1(size * exponent) / math.expm1(exponent)
        low, high = (middle, high) if squares * ell * ell < 1 else (low, middle)
    return tuple(_unit([math.exp(low * i / (size - 1)) for i in range(size)]))


def _marchenko_pastur(short: int, long: int, count: int) -> list[float]:
    """Quantiles of the singular values of a Gaussian matrix over its Frobenius norm."""
    ratio = math.sqrt(short / long)
    low, high = (1 - ratio) ** 2, (1 + ratio) ** 2
    # With lambda = low + (high - low) sin^2 t the density in t is smooth.
    num_cells = 4096
    angles = [(i + 0.5) / num_cells * math.pi / 2 for i in range(num_cells)]
    lambdas = [low + (high - low) * math.sin(t) ** 2 for t in angles]
    weights = [(math.sin(t) * math.cos(t)) ** 2 / x for t, x in zip(angles, lambdas, strict=True)]
    passed, total = list(accumulate(weights)), math.fsum(weights)
    cells = [bisect_left(passed, (i + 0.5) / count * total) for i in range(count)]
    found = [math.sqrt(lambdas[cell]) for cell in cells]
    # A whole spectrum of `short` such values has norm one.
    norm = math.sqrt(math.fsum(value * value for value in found) * short / count)
    # The law is of large matrices: for one row it goes beyond what a singular value can be.
    return [min(value / norm, 1.0) for value in found]


@dataclasses.dataclass(frozen=True, slots=True)
class Fit(fields.Stored):
    """The triple of one shape, and what it was fitted to."""

    triple: tuple[fields.Float, fields.Float, fields.Float]
    objective: fields.Float
    """At the triple."""
    num_measured: fields.CountOrZero
    """How many measured spectra were among what it was fitted to."""
    calibration: fields.Name
    """A digest of these singular values."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fits(fields.Stored):
    """The fit of each shape."""

    fits: Mapping[str, Fit] | None = None
    """By shape, such as ``8x6``; None before the first step."""


class RootPolicy(Policy):
    """One schedule for each shape: a fitted triple, five times.

    The fit is this policy's plan: due before the first step, made on one rank, adopted by all.

    Args:
        spectra: Measured singular values by shape ``(m, n)``, one sequence for each matrix.

    Raises:
        ValueError: A spectrum is empty or all zero, or holds what is no singular value.
    """

    name = "root"
    is_fixed = False

    def __init__(
        self, spectra: Mapping[tuple[int, int], Sequence[Sequence[float]]] | None = None
    ) -> None:
        self._spectra = {
            shape: tuple(_check_spectrum(shape, one) for one in given)
            for shape, given in (spectra or {}).items()
        }

    def groups(self, registry: Sequence[MatrixInfo]) -> Groups:
        """A group is a shape, with the sides as they lie."""
        return collect(registry, lambda matrix: _shape_name(matrix.shape))

    def start(self) -> Fits:
        """Nothing fitted."""
        return Fits()

    def schedules(self, state: Fits, groups: Groups, step: int) -> Mapping[str, Schedule]:
        """The fitted schedule of each shape, whatever the step."""
        if state.fits is None:
            fields.fail("step", step, "a fit before it")
        return {
            name: Schedule((each.triple,) * NUM_STEPS, norm_scale=1.0)
            for name, each in state.fits.items()
        }

    def plan_due(self, state: Fits) -> bool:
        """Whether there is no fit yet."""
        return state.fits is None

    def make_plan(self, state: Fits, groups: Groups) -> str:
        """Fit every shape, as JSON."""
        found: dict[str, Fit] = {}
        for name, matrices in groups.members.items():
            shape = matrices[0].shape
            measured = self._spectra.get(shape, ())
            triple, values = fit(shape, measured), calibration_set(shape, measured)
            error = objective(triple, values).item()
            text = " ".join(value.hex() for value in values.tolist())
            digest = hashlib.sha256(text.encode()).hexdigest()
            found[name] = Fit(triple, error, len(measured), digest)
        return json.dumps(Fits(found).to_dict(), sort_keys=True)

    def adopt_plan(self, state: Fits, groups: Groups, payload: str) -> Fits:
        """Take the fits that one rank made; see `Policy.adopt_plan`."""
        return self._read(fields.read_json("plan", payload), groups)

    def _fields(self, state: Fits) -> dict[str, Any]:
        return state.to_dict()

    def _read(self, found: Mapping[str, Any], groups: Groups | None) -> Fits:
        """Fits stay in force whatever spectra this run brings."""
        state = Fits.from_dict(found, "state")
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
        params: What `amo_dist.param_groups` returns.
        lr: Learning rate of all groups.
        weight_decay: Decoupled.
        spectra: Measured singular values by shape; proxies stand in for shapes without any.
        options: ``config``, ``betas``, ``eps``, ``process_group`` and ``allow_no_matrices``, as for
            `Muon`.
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
