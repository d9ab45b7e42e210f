"""The steps of Newton-Schulz in each of their forms, laid out as calls on fixed memory.

What a call is made of takes Python as long as a small product takes: so calls are laid out once,
and made over and over on other values.

The Gram form iterates on the small ``A = X X^T`` and multiplies X at restarts and at the end alone;
with a restart before every step it is the standard form. All small matrices are polynomials of one
A: they commute, and every product of them is symmetric. Their product is carried in one of two
ways, which round differently:

- by factors: whole polynomials ``p_k(A)`` are multiplied up. It survives long segments, in wide
  dtypes.
- by deviations: each polynomial is held as ``a I + D`` and their product as ``s I + E``, so that
  the multiple of the identity is never rounded. In narrow dtypes it is by far the better one, in
  short segments.

`gram_stability` says for which coefficients and restarts they hold.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Generator, Iterator, Sequence

import torch
from torch import Tensor

from amo_dist.config import Triple
from amo_dist.kernels.cpu.backends import Backend, is_narrow
from amo_dist.kernels.cpu.workspace import Workspace
from amo_dist.kernels.plain import short_side

Call = Callable[[], object]
"""A kernel with its arguments."""
Segment = Generator[Call, None, tuple[Tensor, float | None]]
"""Gives its calls; returns the factor of X, and beside it the multiple of the identity, if any."""


class Program:
    """Calls that take a first iterate to its result, to be run on any values in its memory.

    Args:
        first: Where the first iterate will lie, ``(m, n)`` or ``(b, m, n)``, contiguous.
        out: Where the result goes, like ``first``.
        coefficients: One triple a step.
        backend: The form, its blocks, panels and restarts.
        workspace: Memory for all that lies between.
        has_gram: Whether ``gram`` will be filled beforehand, too.
    """

    def __init__(
        self,
        first: Tensor,
        out: Tensor,
        coefficients: Sequence[Triple],
        backend: Backend,
        workspace: Workspace,
        *,
        has_gram: bool = False,
    ) -> None:
        self._backend = backend
        self._workspace = workspace
        self._like = out
        self.gram = self._small("gram")
        """Where the Gram matrix of the short side of X lies, ``(..., m, m)``."""
        self._square = functools.partial(symmetric, num_blocks=backend.square_blocks)
        self._calls = tuple(self._lay_out(first, out, coefficients, has_gram))

    def run(self) -> None:
        """Run the steps."""
        for call in self._calls:
            call()

    def _lay_out(
        self, x: Tensor, out: Tensor, coefficients: Sequence[Triple], has_gram: bool
    ) -> Iterator[Call]:
        """X becomes ``p_j(A) ... p_i(A) X`` at the end of each segment ``i .. j``."""
        # The other forms are the Gram form with a restart before every step.
        is_gram, every_step = self._backend.name == "gram", range(1, len(coefficients))
        carry = self._by_deviations
        if is_gram and not is_narrow(x.dtype):
            carry = self._by_factors
        bounds = (0, *(self._backend.restarts if is_gram else every_step), len(coefficients))
        places = self._places(out, len(bounds) - 1)
        for (start, stop), result in zip(itertools.pairwise(bounds), places, strict=True):
            if not has_gram:
                short = short_side(x)
                yield from symmetric(
                    short, short, num_blocks=self._backend.gram_blocks, out=self.gram
                )
            factor, scale = yield from carry(coefficients[start:stop])
            if scale is None:
                is_tall = x.shape[-2] > x.shape[-1]
                yield plain(*((x, factor) if is_tall else (factor, x)), out=result)
            else:
                yield from times(factor, x, scale, self._backend.panels, out=result)
            x, has_gram = result, False

    def _by_factors(self, coefficients: Sequence[Triple]) -> Segment:
        factor = gram = self.gram
        for step, (a, b, c) in enumerate(coefficients):
            polynomial, product = self._pair(step)
            yield from self._square(gram, gram, gram, b, c, out=polynomial)
            yield functools.partial(polynomial.diagonal(dim1=-2, dim2=-1).add_, a)
            if step == 0:
                factor = polynomial
            else:
                yield from self._square(polynomial, factor, out=product)
                factor = product
            if step + 1 < len(coefficients):
                half = self._small("half")
                yield from self._square(polynomial, gram, out=half)
                yield from self._square(half, polynomial, out=gram)
        return factor, None

    def _by_deviations(self, coefficients: Sequence[Triple]) -> Segment:
        """``D = b A + c A A``; the next A is ``(a I + D) A (a I + D)``, E: ``a E + D E + s D``."""
        deviation, scale, gram = self.gram, 1.0, self.gram
        for step, (a, b, c) in enumerate(coefficients):
            d, product = self._pair(step)
            yield from self._square(gram, gram, gram, b, c, out=d)
            if step == 0:
                deviation, scale = d, a
            else:
                yield from self._square(d, deviation, deviation, a, out=product)
                yield functools.partial(product.add_, d, alpha=scale)
                deviation, scale = product, scale * a
            if step + 1 < len(coefficients):
                half = self._small("half")
                yield from self._square(gram, d, gram, a, out=half)
                yield from self._square(half, d, half, a, out=gram)
        return deviation, scale

    def _small(self, use: str) -> Tensor:
        """Memory for a square matrix of the short side of each matrix."""
        *batch, m, n = self._like.shape
        return self._workspace.take(use, (*batch, min(m, n), min(m, n)), self._like.dtype)

    def _pair(self, step: int) -> tuple[Tensor, Tensor]:
        # What the last step left is still read in this one.
        return self._small(f"polynomial {step % 2}"), self._small(f"factor {step % 2}")

    def _places(self, last: Tensor, count: int) -> Iterator[Tensor]:
        """Where large products go: into two places in turn, the last one into ``last``."""
        other, third = self._workspace.take("iterate", last.shape, last.dtype), last
        if not is_narrow(last.dtype):
            # Bits of wide products depend on where their factors begin.
            third = self._workspace.take("iterate 2", last.shape, last.dtype)
        turns = (third if remaining % 2 == 0 else other for remaining in range(count)[:0:-1])
        return itertools.chain(turns, [last])


def even_parts(length: int, count: int) -> Iterator[tuple[int, int]]:
    """``(start, stop)`` of consecutive parts whose lengths differ by one at most.

    Args:
        length: Of all together.
        count: Of parts.
    """
    return itertools.pairwise(length * part // count for part in range(count + 1))


def plain(left: Tensor, right: Tensor, *, out: Tensor) -> Call:
    """``left right``; `torch.matmul` takes longer to find out which of the two to call."""
    multiply = torch.mm if left.dim() == 2 else torch.bmm
    return functools.partial(multiply, left, right, out=out)


def fused(
    added: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float = 1.0, *, out: Tensor
) -> Call:
    """``beta * added + alpha * left right`` with one rounding."""
    multiply = torch.addmm if left.dim() == 2 else torch.baddbmm
    return functools.partial(multiply, added, left, right, beta=beta, alpha=alpha, out=out)


def times(factor: Tensor, x: Tensor, beta: float, panels: int, *, out: Tensor) -> Iterator[Call]:
    """``(beta I + factor) X`` by panels, X being ``x`` or, where that is tall, ``x.mT``."""
    is_tall = x.shape[-2] > x.shape[-1]
    long_dim = x.dim() - 2 if is_tall else x.dim() - 1
    for start, stop in even_parts(x.shape[long_dim], panels):
        part, result = (each.narrow(long_dim, start, stop - start) for each in (x, out))
        left, right = (part, factor) if is_tall else (factor, part)
        yield fused(part, left, right, beta, out=result)


def symmetric(
    left: Tensor,
    right: Tensor,
    added: Tensor | None = None,
    beta: float = 1.0,
    alpha: float = 1.0,
    *,
    num_blocks: int,
    out: Tensor,
) -> Iterator[Call]:
    """``beta * added + alpha * left right^T``, known to be symmetric, by blocks of rows."""
    m = left.shape[-2]
    for start, stop in even_parts(m, num_blocks):
        rows, columns = left[..., start:stop, :], right[..., start:, :].mT
        upper = out[..., start:stop, start:]
        if added is None:
            yield plain(rows, columns, out=upper)
        else:
            yield fused(added[..., start:stop, start:], rows, columns, beta, alpha, out=upper)
        if stop < m:
            below = out[..., stop:, start:stop]
            yield functools.partial(_mirror, upper[..., stop - start :], below)


def _mirror(upper: Tensor, below: Tensor) -> None:
    # Both contiguous: a strided transposed copy takes ten times as long.
    below.copy_(upper.contiguous().mT.contiguous())
