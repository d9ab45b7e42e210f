"""Newton-Schulz on the Gram matrix ``A = X X^T``; X is multiplied at restarts and at the end alone.

All small matrices are polynomials of one A: they commute, and every product of them is symmetric.
Two forms of one map, which round differently:

- `iterate_factor` multiplies whole polynomials ``p_k(A)`` up. It survives long segments, in wide
  dtypes.
- `iterate_deviation` carries what a polynomial adds to a multiple of the identity, so that the
  multiple is never rounded. In narrow dtypes it is by far the better one, in short segments.

`gram_stability` says for which coefficients and restarts they hold.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

from torch import Tensor

from amo_dist.config import Triple
from amo_dist.kernels.products import (
    Call,
    plain,
    results,
    short_side,
    square_like,
    symmetric,
    times,
)


def iterate_factor(
    x: Tensor,
    coefficients: Sequence[Triple],
    restarts: Sequence[int],
    blocks: tuple[int, int],
    gram: Tensor | None,
    *,
    out: Tensor,
) -> Iterator[Call]:
    """The steps; X becomes ``p_j(A) ... p_i(A) X`` at the end of each segment ``i .. j``.

    Args:
        x: ``(m, n)`` or ``(b, m, n)``, contiguous, singular values at most one.
        coefficients: One triple a step.
        restarts: Steps before which A is formed anew.
        blocks: Of ``X X^T``, then of products of small matrices.
        gram: The first A, where it is at hand.
        out: Where the result goes, like ``x``.

    Returns:
        Calls that, one after the other, run the steps.
    """
    gram_blocks, square_blocks = blocks
    bounds = (0, *restarts, len(coefficients))
    places = results(out, len(bounds) - 1)
    for start, stop in itertools.pairwise(bounds):
        if gram is None:
            short, gram = short_side(x), square_like("gram", x)
            yield from symmetric(short, short, gram_blocks, out=gram)
        factor = gram
        for step in range(start, stop):
            a, b, c = coefficients[step]
            # What the last step left is still read in this one.
            polynomial, product = (
                square_like(f"{use} {step % 2}", x) for use in ("polynomial", "factor")
            )
            yield from symmetric(gram, gram, square_blocks, gram, b, c, out=polynomial)
            yield functools.partial(polynomial.diagonal(dim1=-2, dim2=-1).add_, a)
            if step == start:
                factor = polynomial
            else:
                yield from symmetric(polynomial, factor, square_blocks, out=product)
                factor = product
            if step + 1 < stop:
                half, following = square_like("half", x), square_like("gram", x)
                yield from symmetric(polynomial, gram, square_blocks, out=half)
                yield from symmetric(half, polynomial, square_blocks, out=following)
                gram = following
        factors = (x, factor) if x.shape[-2] > x.shape[-1] else (factor, x)
        x, gram = next(places), None
        yield plain(*factors, out=x)


def iterate_deviation(
    x: Tensor,
    coefficients: Sequence[Triple],
    restarts: Sequence[int],
    blocks: tuple[int, int],
    gram: Tensor | None,
    *,
    panels: int = 1,
    out: Tensor,
) -> Iterator[Call]:
    """The same, each polynomial held as ``a I + D`` and their product as ``s I + E``.

    ``D = b A + c A A``; the next A is ``(a I + D) A (a I + D)``, and ``E`` becomes
    ``a E + D E + s D``.

    Args:
        x: As for `iterate_factor`; so are the others.
        coefficients: One triple a step.
        restarts: Steps before which A is formed anew.
        blocks: Of ``X X^T``, then of products of small matrices.
        gram: The first A, where it is at hand.
        panels: Parts of the long side that are multiplied into one after the other.
        out: Where the result goes, like ``x``.

    Returns:
        As `iterate_factor`.
    """
    gram_blocks, square_blocks = blocks
    bounds = (0, *restarts, len(coefficients))
    places = results(out, len(bounds) - 1)
    for start, stop in itertools.pairwise(bounds):
        if gram is None:
            short, gram = short_side(x), square_like("gram", x)
            yield from symmetric(short, short, gram_blocks, out=gram)
        deviation, scale = gram, 1.0
        for step in range(start, stop):
            a, b, c = coefficients[step]
            # What the last step left is still read in this one.
            d, product = (square_like(f"{use} {step % 2}", x) for use in ("polynomial", "factor"))
            yield from symmetric(gram, gram, square_blocks, gram, b, c, out=d)
            if step == start:
                deviation, scale = d, a
            else:
                yield from symmetric(d, deviation, square_blocks, deviation, a, out=product)
                yield functools.partial(product.add_, d, alpha=scale)
                deviation, scale = product, scale * a
            if step + 1 < stop:
                half, following = square_like("half", x), square_like("gram", x)
                yield from symmetric(gram, d, square_blocks, gram, a, out=half)
                yield from symmetric(half, d, square_blocks, half, a, out=following)
                gram = following
        result = next(places)
        yield from times(deviation, x, scale, panels, out=result)
        x, gram = result, None
