"""Triton's kernels on CPU tensors: ``TRITON_INTERPRET=1 python -m tests.unit.triton_interpreted``.

Prints one JSON object: kind of case, case, and what was found. A process of its own, because the
variable counts when the kernel is defined.
"""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from amo_dist.kernels.cuda.triton_symmetric import symmetric_product
from amo_dist.kernels.devices import TRITON_DTYPES
from amo_dist.kernels.newton_schulz import standard
from amo_dist.schedule.polar_express import compose

# One row; less than a tile, a whole one, and more; an odd and an even number of tiles.
SHAPES = ((1, 1), (1, 9), (3, 33, 65), (2, 64, 64), (130, 70), (2, 200, 90))
# Large tiles are for half precision; the interpreter takes a second for each of a few products.
LARGE = (1025, 20)
ITERATED = ((1, 9), (2, 33, 65), (70, 80))
COEFFICIENTS = compose(1e-2, 5)


def widen_bfloat16() -> None:
    """Let the interpreter multiply bfloat16, which it keeps as uint16 and multiplies as that."""
    multiply = InterpreterBuilder.create_dot

    def create_dot(self: Any, left: Any, right: Any, *args: Any) -> Any:
        if left.dtype.scalar == tl.bfloat16:
            left, right = (self.create_fp_ext(each, tl.float32) for each in (left, right))
        return multiply(self, left, right, *args)

    InterpreterBuilder.create_dot = create_dot


def matrices(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Gaussian, norms of rows about one."""
    generator = torch.Generator().manual_seed(math.prod(shape))
    return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(dtype)


def error(found: Tensor, expected: Tensor) -> float:
    """Greatest over all entries, relative to the greatest entry; NaN where one is NaN."""
    return float((found.double() - expected).abs().max() / expected.abs().max())


def product(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    """``A = X X^T`` and ``b A + c X X^T`` against float64."""
    x = matrices(shape, dtype)
    empty = x.new_full((*shape[:-1], shape[-2]), math.nan)
    gram = symmetric_product(x, out=empty.clone())
    polynomial = symmetric_product(x, gram, -0.7, 1.3, out=empty.clone())
    exact = x.double() @ x.double().mT
    batch = zip(x, gram, strict=True) if x.dim() == 3 else ()
    return {
        "gram": error(gram, exact),
        "polynomial": error(polynomial, -0.7 * gram.double() + 1.3 * exact),
        "is_symmetric": torch.equal(gram, gram.mT) and torch.equal(polynomial, polynomial.mT),
        "batch_is_loop": all(
            torch.equal(symmetric_product(one, out=torch.empty_like(expected)), expected)
            for one, expected in batch
        ),
    }


def iteration(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    """All of Newton-Schulz, against the error of the standard form."""
    x = matrices(shape, torch.float64)
    x = x / (1.01 * torch.linalg.matrix_norm(x, keepdim=True))
    exact, narrow = standard(x, COEFFICIENTS), x.to(dtype)
    return {
        "standard": error(standard(narrow, COEFFICIENTS), exact),
        "triton": error(standard(narrow, COEFFICIENTS, product=symmetric_product), exact),
    }


def main() -> None:
    widen_bfloat16()
    products = [*itertools.product(SHAPES, TRITON_DTYPES), (LARGE, torch.bfloat16)]
    iterations = itertools.product(ITERATED, TRITON_DTYPES)
    found = {
        "product": {f"{shape} {dtype}": product(shape, dtype) for shape, dtype in products},
        "iteration": {f"{shape} {dtype}": iteration(shape, dtype) for shape, dtype in iterations},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
