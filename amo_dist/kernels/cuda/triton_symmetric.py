"""Symmetric products as a Triton kernel: only tiles on and above the diagonal are computed.

``beta * added + alpha * X X^T`` of a batch is symmetric where ``added`` is, so a program computes
one tile of the upper triangle and writes it twice, the second time mirrored. Each element is one
sum, taken by one program in the order of the columns: no atomics, no split sums, no autotuning, so
a matrix gives the same bits in every run, alone and in any batch.

Triton is no requirement of this package: it comes with the CUDA builds of PyTorch, and this module
is imported only once its backend is taken. It has been compiled for NVIDIA's architectures 8.0 and
9.0 and run by Triton's interpreter, not yet on a GPU, so tiles are chosen by thought, not by
measurement.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def tiling(m: int, dtype: torch.dtype) -> dict[str, int]:
    """How a product of ``m`` rows is cut, by its size and dtype alone.

    float32 runs without tensor cores, as PyTorch's own products do by default, and needs
    registers for it. Small matrices take small tiles, or most of a GPU would have none.

    Args:
        m: Rows of X.
        dtype: Of X.

    Returns:
        ``TILE``: rows, and columns, of a tile of the result. ``DEPTH``: columns of X taken at a
        time. ``num_warps`` of a program; ``num_stages``: loads under way at a time.
    """
    if dtype.itemsize > 2:
        return dict(TILE=64, DEPTH=16, num_warps=4, num_stages=3)
    if m < 1024:
        return dict(TILE=64, DEPTH=64, num_warps=4, num_stages=3)
    return dict(TILE=128, DEPTH=64, num_warps=8, num_stages=3)


@triton.jit  # type: ignore[untyped-decorator]
def product_kernel(  # type: ignore[no-untyped-def]  # Triton takes no annotations but its own
    x,
    added,
    out,
    m,
    k,
    beta,
    alpha,
    HAS_ADDED: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One program: one tile of one matrix, and its mirror image."""
    num_tiles = tl.cdiv(m, TILE)
    per_matrix = num_tiles * (num_tiles + 1) // 2
    matrix = tl.program_id(0) // per_matrix
    # The triangle folded into a rectangle: strip i of it holds row i, and the last rows but i.
    is_even = 1 - num_tiles % 2
    strip = tl.program_id(0) % per_matrix // (num_tiles + is_even)
    place = tl.program_id(0) % per_matrix % (num_tiles + is_even)
    is_first = place < num_tiles - strip
    row = tl.where(is_first, strip, num_tiles - is_even - strip)
    column = tl.where(is_first, strip + place, place - is_even)

    # 64 bits: a batch may hold more elements than an int32 counts.
    rows = (row * TILE + tl.arange(0, TILE)).to(tl.int64)
    columns = (column * TILE + tl.arange(0, TILE)).to(tl.int64)
    x += matrix.to(tl.int64) * m * k
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    for start in range(0, k, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        is_inside = (depth < k)[None, :]
        left = tl.load(
            x + rows[:, None] * k + depth[None, :], mask=(rows < m)[:, None] & is_inside, other=0.0
        )
        right = tl.load(
            x + columns[:, None] * k + depth[None, :],
            mask=(columns < m)[:, None] & is_inside,
            other=0.0,
        )
        # "ieee": Triton would round float32 to 10 bits of mantissa otherwise.
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")

    offset = matrix.to(tl.int64) * m * m
    upper = offset + rows[:, None] * m + columns[None, :]
    mask = (rows < m)[:, None] & (columns < m)[None, :]
    total *= alpha
    if HAS_ADDED:
        total += beta * tl.load(added + upper, mask=mask, other=0.0).to(tl.float32)
    result = total.to(out.dtype.element_ty)
    if row == column:
        # Symmetric to the last bit, whatever the order of sums inside a tile.
        result = tl.where(rows[:, None] <= columns[None, :], result, tl.trans(result))
    tl.store(out + upper, result, mask=mask)
    if row != column:
        tl.store(out + (offset + columns[None, :] * m + rows[:, None]), result, mask=mask)


def symmetric_product(
    x: Tensor,
    added: Tensor | None = None,
    beta: float = 1.0,
    alpha: float = 1.0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """``beta * added + alpha * x x^T``, accumulated in float32 and rounded once.

    Args:
        x: ``(m, k)`` or ``(b, m, k)``, contiguous; bfloat16, float16 or float32. Where it is
            itself symmetric, ``x x^T`` is its square. No size is 0.
        added: ``(..., m, m)``, symmetric, contiguous, in the dtype of ``x``. What is below its
            diagonal is read from above.
        beta: Factor of ``added``; a change of it compiles nothing anew.
        alpha: Factor of the product, likewise.
        out: ``(..., m, m)``, contiguous, in the dtype of ``x``; a new tensor where None.

    Returns:
        ``out``.
    """
    m, k = x.shape[-2:]
    out = x.new_empty(*x.shape[:-1], m) if out is None else out
    assert all(tensor.is_contiguous() for tensor in (x, out, x if added is None else added))
    cut = tiling(m, x.dtype)
    num_tiles = -(-m // cut["TILE"])
    grid = (num_tiles * (num_tiles + 1) // 2 * (x.numel() // (m * k)),)
    # Triton launches on the current device, whatever that of its arguments.
    with torch.cuda.device_of(x):
        product_kernel[grid](
            x,
            x if added is None else added,
            out,
            m,
            k,
            beta,
            alpha,
            HAS_ADDED=added is not None,
            **cut,
            # Stated, for its default differs between versions; without it float32 takes two
            # instructions for each product and sum.
            enable_fp_fusion=True,
        )
    return out
