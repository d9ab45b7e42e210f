"""Whether the Gram form of Newton-Schulz survives rounding, for one list of coefficients.

The Gram form iterates on ``A = X X^T`` alone and multiplies the polynomials up into one factor of
X. Rounding moves an eigenvalue of A by about ``u``, the unit of the dtype, however small the
singular value behind it; steep quintics then blow up what no longer belongs to any X. A restart
(multiply out, form A anew) ends that, and costs two large products.

Each singular value goes its own way, so the whole question is one of scalars. Standard
Newton-Schulz is the Gram form that restarts at every step, and is the measure.

- In wide dtypes (`is_stable`) scalars are run in plain float arithmetic with an error of ``u``
  injected at every product.
- In narrow dtypes, where ``u`` is no small number, random errors of all roundings are carried to
  the end to first order (`first_pair_is_as_exact`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import torch

from amo_dist.config import Triple

WORST_CASE_FACTOR = 10.0
"""Most that the Gram form's error may exceed the standard form's, all errors of one sign.

Measured errors of what passes exceed it by one to four times; what diverges fails by 50 and more.
"""
# Four points an octave, down to where X is lost in the rounding of A in float32.
_GRID: tuple[float, ...] = (0.0, *(2.0 ** (-k / 4) for k in range(100)))
_BLOWN_UP = 1e6


@functools.lru_cache(maxsize=4096)
def is_stable(coefficients: tuple[Triple, ...], restarts: tuple[int, ...], unit: float) -> bool:
    """Whether the Gram form with these restarts is as good as the standard form, nearly.

    Args:
        coefficients: One triple a step.
        restarts: Steps before which A is formed anew, ascending, within 1 .. T - 1.
        unit: Error of each product relative to the largest singular value, which is one.
    """
    bound = WORST_CASE_FACTOR * _standard_error(coefficients, unit)
    return error(coefficients, restarts, unit, bound) <= bound


@functools.lru_cache(maxsize=1024)
def _standard_error(coefficients: tuple[Triple, ...], unit: float) -> float:
    return error(coefficients, tuple(range(1, len(coefficients))), unit)


def error(
    coefficients: Sequence[Triple],
    restarts: Sequence[int],
    unit: float,
    enough: float = float("inf"),
) -> float:
    """Greatest error of a singular value's image over all of [0, 1]; stops above ``enough``."""
    bounds = (0, *restarts, len(coefficients))
    segments = [coefficients[start:stop] for start, stop in itertools.pairwise(bounds)]
    worst = 0.0
    for x in _GRID:
        exact = _exact(x, coefficients)
        for shift in (unit, -unit):
            found = x
            for segment in segments:
                found = _image(found, segment, shift)
            worst = max(worst, abs(found - exact))
            if worst > enough:
                return worst
    return worst


def _exact(x: float, coefficients: Sequence[Triple]) -> float:
    for a, b, c in coefficients:
        square = x * x
        x = x * (a + square * (b + c * square))
    return x


def _image(x: float, segment: Sequence[Triple], shift: float) -> float:
    """One segment of the Gram form on one singular value, each eigenvalue shifted."""
    eigenvalue, factor = x * x + shift, 1.0
    for a, b, c in segment:
        p = a + eigenvalue * (b + c * eigenvalue)
        factor *= p
        eigenvalue = eigenvalue * p * p + shift
        if not (abs(factor) < _BLOWN_UP and abs(eigenvalue) < _BLOWN_UP):
            return _BLOWN_UP
    return max(-_BLOWN_UP, min(_BLOWN_UP, factor * x))


# ---------------------------------------------------------------- narrow dtypes

NOISE_FACTOR = 4.3
"""Most that the noise of a result may exceed the standard form's, at any singular value.

Over random schedules, shapes and flat, Gaussian, spiked and decaying spectra, what passes has 0.64
of the standard form's error on average and at most twice it; what fails, up to eight times.
"""
LARGE_NOISE_FACTOR = 5.7
"""The same from ``LARGE_ROWS`` rows on, where the roundings of small matrices average out.

What passes has 0.72 of the standard form's error on average, 1.02 in the worst schedule, and mostly
half of its greatest one over all spectra. Where that form is at its best it may have three times.
"""
LARGE_ROWS = 256
_PER_OCTAVE, _OCTAVES = 12, 8
"""Noise peaks where a quintic dips; what lies below 2^-8 of the largest, bfloat16 cannot tell."""
_TINY = 1e-12


def first_pair_is_as_exact(coefficients: tuple[Triple, ...], rows: int) -> bool:
    """Whether taking the first two steps at once, by deviations, rounds no worse than ``standard``.

    Later pairs are no option: they amplify what the first steps have rounded.

    Args:
        coefficients: One triple a step, at least two.
        rows: Short side of the matrix.
    """
    factor = NOISE_FACTOR if rows < LARGE_ROWS else LARGE_NOISE_FACTOR
    return noise_of_first_pair(coefficients) <= factor


@functools.lru_cache(maxsize=1024)
def noise_of_first_pair(coefficients: tuple[Triple, ...]) -> float:
    """Noise of the result over that of the standard form, where it is greatest.

    Roundings are taken for random and independent, in units of the square of the rounding unit,
    relative to the singular value that they change, and carried to the end by the derivative of
    what follows.

    Args:
        coefficients: One triple a step, at least two.
    """
    exponents = torch.arange(_PER_OCTAVE * _OCTAVES + 1, dtype=torch.float64, device="cpu")
    values = [torch.exp2(exponents / -_PER_OCTAVE)]
    deviations, slopes = [], []
    for a, b, c in coefficients:
        value = values[-1]
        square = value * value
        deviation = square * (b + c * square)
        image = value * (a + deviation)
        relative = value / (image.abs() + _TINY)
        # What is rounded beside the result is the deviation times X.
        deviations.append((deviation * relative).square())
        slopes.append((a + square * (3 * b + 5 * c * square)) * relative)
        values.append(image)
    carried = torch.ones_like(values[0])
    standard = torch.zeros_like(carried)
    pair = torch.zeros_like(carried)
    for step in reversed(range(len(coefficients))):
        # One more for the directions of the result, which nothing draws back.
        alone = (deviations[step] + 1) * carried.square() + 1
        if step > 1:
            pair = pair + alone
        elif step == 1:
            # The deviation of both steps, and three times that of the second: after two products
            # for its A.
            scale = coefficients[0][0] * coefficients[1][0]
            both = (values[2] - scale * values[0]) / (values[2].abs() + _TINY)
            noise = both.square() + 3 * deviations[1] + 1
            pair = pair + noise * carried.square() + 1
        else:
            pair = pair + deviations[0] * carried.square()
        standard = standard + alone
        carried = carried * slopes[step]
    return math.sqrt((pair / standard).max().item())
