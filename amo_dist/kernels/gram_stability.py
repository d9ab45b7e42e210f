"""Whether the Gram form of Newton-Schulz survives rounding, for one list of coefficients.

The Gram form iterates on ``A = X X^T`` alone and multiplies the polynomials up into one factor of
X. Rounding moves an eigenvalue of A by about ``u``, the unit of the dtype, however small the
singular value behind it; steep quintics then blow up what no longer belongs to any X. A restart
(multiply out, form A anew) ends that, and costs two large products.

Each singular value goes its own way, so the whole question is one of scalars: it is answered by
running them in plain float arithmetic with an error of ``u`` injected at every product. Standard
Newton-Schulz is the Gram form that restarts at every step, and is the measure.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

Triple = tuple[float, float, float]

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
