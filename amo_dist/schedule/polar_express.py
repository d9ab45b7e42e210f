"""Polar Express: the composition of quintics that maps a lower bound ``ell`` closest to one.

Every number here comes from ``+ - * /``, ``sqrt`` and comparisons of Python floats, which IEEE 754
defines to the last bit, and from none of the functions it leaves to the C library (``pow``
foremost: ``x**3`` calls it). Ranks on unlike machines thus compose the very same coefficients
without exchanging them.

Source: Amsel et al., "The Polar Express: Optimal Matrix Sign Methods and Their Application to the
Muon Algorithm" (2025).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

from amo_dist.config import Triple, fail
from amo_dist.schedule.types import Schedule, evaluate

# ``s``: each step but the last is composed as if its input were this much larger.
SAFETY = 1.01
# A step's interval of approximation begins no lower than this fraction of its upper end.
CUSHION = 0.02

_LIMIT_RATIO = 1 - 5e-6
_LEVEL_TOLERANCE = 1e-15
_MAX_EXCHANGES = 100


def compose(ell: float, steps: int) -> tuple[Triple, ...]:
    """Compose the Newton-Schulz coefficients for singular values in ``[ell, 1]``.

    Args:
        ell: Lower bound on the normalized singular values, in (0, 1].
        steps: Number of Newton-Schulz steps, at least 1.

    Returns:
        One ``(a, b, c)`` for each step. The list for ``k`` steps differs from the first ``k`` of a
        longer one in its last triple alone, which carries no safety factor.

    Raises:
        ValueError: ``ell`` or ``steps`` is out of range.
    """
    is_real = isinstance(ell, (int, float)) and not isinstance(ell, bool)
    if not (is_real and 0.0 < ell <= 1.0):
        fail("ell", ell, "a number in (0, 1]")
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        fail("steps", steps, "an integer >= 1")
    return _run(float(ell), steps)


def schedule_for(ell_effective: float, steps: int) -> Schedule:
    """The schedule AMO runs for an effective ``ell``: composed at ``SAFETY`` times it.

    Args:
        ell_effective: Observed ``ell`` over ``SAFETY``, in (0, 1].
        steps: Number of Newton-Schulz steps.
    """
    return Schedule(compose(times_safety(ell_effective), steps), norm_scale=SAFETY)


def times_safety(ell_effective: float) -> float:
    """The ``ell`` to compose for: ``SAFETY`` times an effective one, at most 1."""
    # A single row has ell_raw = 1; dividing and multiplying by SAFETY may end just above it.
    return min(SAFETY * ell_effective, 1.0) if ell_effective <= 1.0 else ell_effective


def simulate(ell: float, steps: int) -> float:
    """The image of ``ell`` under ``compose(ell, steps)``: the least singular value it leaves.

    Args:
        ell: Lower bound on the normalized singular values, in (0, 1].
        steps: Number of Newton-Schulz steps, at least 1.

    Returns:
        The lower bound after the last step; near 1 where orthogonalization succeeds.

    Raises:
        ValueError: ``ell`` or ``steps`` is out of range.
    """
    return Schedule(compose(ell, steps)).image(ell)


def error_curve(ell: float, ks: Iterable[int]) -> dict[int, float]:
    """The projected error ``E(k) = 1 - simulate(ell, k)`` for each number of steps in ``ks``.

    Args:
        ell: Lower bound on the normalized singular values, in (0, 1].
        ks: Numbers of Newton-Schulz steps, each at least 1.

    Returns:
        ``{k: E(k)}`` in the order of ``ks``.

    Raises:
        ValueError: ``ell`` or a number of steps is out of range.
    """
    return {k: 1.0 - simulate(ell, k) for k in ks}


@lru_cache(maxsize=8192)
def _run(ell: float, steps: int) -> tuple[Triple, ...]:
    """The composed triples."""
    triples: list[Triple] = []
    lower, upper = ell, 1.0
    for step in range(1, steps + 1):
        triples.append(_step(lower, upper, is_last=step == steps))
        lower = evaluate(triples[-1], lower)
        upper = 2.0 - lower
    return tuple(triples)


def _step(lower: float, upper: float, *, is_last: bool) -> Triple:
    """The triple of one step for ``[lower, upper]``."""
    floor = CUSHION * upper
    a, b, c = _best_quintic(max(lower, floor), upper)
    if floor > lower:
        # Fitted above the floor only, p is too small below it: centre its range on one again.
        rescale = 2.0 / (evaluate((a, b, c), lower) + evaluate((a, b, c), upper))
        a, b, c = a * rescale, b * rescale, c * rescale
    return (a, b, c) if is_last else for_input_over((a, b, c), SAFETY)


def for_input_over(triple: Triple, s: float) -> Triple:
    """The step that divides its input by ``s``, and then is that of a triple."""
    a, b, c = triple
    return a / s, b / (s * s * s), c / (s * s * s * s * s)


def _best_quintic(lower: float, upper: float) -> Triple:
    """The odd quintic closest to one on ``[lower, upper]``, in the maximum norm (Remez).

    The best quintic errs by ``+E, -E, +E, -E`` at four points: the ends and its inner extrema.
    """
    if lower / upper > _LIMIT_RATIO:
        # All four points merge: p osculates one at the point, and the exchange would be noise.
        cube = upper * upper * upper
        return 1.875 / upper, -1.25 / cube, 0.375 / (cube * upper * upper)
    inner = (3.0 * lower + 1.0) / 4.0, (lower + 3.0) / 4.0
    previous = math.inf
    for _ in range(_MAX_EXCHANGES):
        triple, level = _equioscillate((lower, *inner, upper))
        extrema = _inner_extrema(triple)
        if abs(level - previous) < _LEVEL_TOLERANCE or extrema is None:
            break
        if not lower < extrema[0] < extrema[1] < upper:
            break
        inner, previous = extrema, level
    return triple


def _equioscillate(points: tuple[float, float, float, float]) -> tuple[Triple, float]:
    """The quintic with ``1 - p = +E, -E, +E, -E`` at ``points``, and ``E``.

    With ``t = x^2`` the condition reads ``a + b t + c t^2 = (1 -+ E) / x``. The third divided
    difference vanishes on the left, which gives ``E``; Newton's form gives a, b and c. The
    denominator of ``E`` sums terms of one sign, so no linear system has to be solved.
    """
    t = tuple(x * x for x in points)
    numerator = denominator = 0.0
    sign = 1.0
    for i, x in enumerate(points):
        weight = x
        for j in range(4):
            if j != i:
                weight *= t[i] - t[j]
        numerator += 1.0 / weight
        denominator += sign / weight
        sign = -sign
    level = numerator / denominator
    v0, v1, v2 = (1.0 - level) / points[0], (1.0 + level) / points[1], (1.0 - level) / points[2]
    d01 = (v1 - v0) / (t[1] - t[0])
    d12 = (v2 - v1) / (t[2] - t[1])
    c = (d12 - d01) / (t[2] - t[0])
    return (v0 - t[0] * d01 + t[0] * t[1] * c, d01 - (t[0] + t[1]) * c, c), level


def _inner_extrema(triple: Triple) -> tuple[float, float] | None:
    """The two positive roots of ``p'(x) = a + 3 b x^2 + 5 c x^4``; ``None`` where they merge."""
    a, b, c = triple
    discriminant = 9.0 * b * b - 20.0 * a * c
    if not (discriminant > 0.0 and c > 0.0 and b < 0.0 and a > 0.0):
        return None
    # The larger square first; the smaller from Vieta's product, free of cancellation.
    larger = (-3.0 * b + math.sqrt(discriminant)) / (10.0 * c)
    return math.sqrt(a / (5.0 * c * larger)), math.sqrt(larger)
