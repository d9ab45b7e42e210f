"""Newton-Schulz orthogonalization of plain local matrices.

An odd quintic ``p(x) = a x + b x^3 + c x^5`` applied to a matrix acts on its singular values alone:
``p(X) = a X + (b A + c A A) X`` with ``A = X X^T``. Composed polynomials that send every singular
value in ``[ell, 1]`` close to one therefore send a matrix close to its polar factor, with matrix
products only. Source: the AMO paper; the quintic form goes back to Muon (Jordan et al., 2024).

`standard` takes three products a step, two of them by the large X. `gram` takes two steps at once:
it iterates on the small A and multiplies into X once for both. All matrices of the size of A are
polynomials of one A: they commute, and every product of them is symmetric.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from amo_dist.config import PRECONDITIONERS, Triple
from amo_dist.kernels.elementwise import largest_entry, on_cpu, wide_dtype

Product = Callable[..., Tensor]
"""`symmetric_product`, or what takes its place."""

NS_BACKENDS = ("auto", "standard", "gram")
"""How Newton-Schulz may be run; see `resolve_backend`."""

_MIN_ASPECT = 2
"""Long side over short side from which `gram` saves more than its small products take."""
_MIN_ROWS = 128
"""Below, small products take as long as large ones."""
_LEAST_ENTRY = {torch.float32: 2.0**-149, torch.float64: 2.0**-1074}
"""The least positive numbers."""
_LEAST_SEEN = 2.0**-9
"""Of the spacing of a dtype at one: what is added to a divisor below that, rounding swallows."""
_BLOCK_ROWS, _MOST_BLOCKS = 128, 8
"""On a CPU blocks of a symmetric product are worth their calls from two of these rows on; in 16
bits, where products take less, from two of twice as many."""


@torch.no_grad()
def orthogonalize(
    x: Tensor,
    coefficients: Sequence[Triple],
    *,
    norm_scale: float = 1.01,
    preconditioner: str = "frobenius",
    dtype: torch.dtype = torch.bfloat16,
    eps: float = 1e-7,
    backend: str = "auto",
) -> Tensor:
    """Approximate the polar factor ``U V^T`` of each matrix ``U S V^T`` of a batch.

    Norms are taken in float32 (float64 where ``x`` or ``dtype`` is), of matrices scaled so that no
    entry that the input can hold overflows or vanishes, and the normalized matrix is rounded once
    to ``dtype`` for the products.

    Args:
        x: Matrices, shape ``(..., m, n)``, any floating dtype; not modified. Any size may be 0.
        coefficients: One ``(a, b, c)`` for each step, at least one.
        norm_scale: Safety factor ``s``: the first iterate is ``x / (s * ||x||_F + eps)``. Rounding
            in ``dtype`` may push the largest singular value above one, where steep quintics
            diverge; 1.01 prevents it. Has no part in ``"aol"``.
        preconditioner: ``"frobenius"`` divides by the Frobenius norm. ``"aol"`` scales row ``i`` of
            the short side by ``(sum_j |A_ij|)^-1/2`` with ``A = x x^T`` (almost-orthogonal layers,
            as in Turbo-Muon), which bounds the singular values by one more tightly; the scaled
            ``A`` serves the first step.
        dtype: Floating dtype of the products and of the result.
        eps: Added to the norm in units of the largest entry, hence relative; none where ``dtype``
            would not show it.
        backend: How the steps are run: ``auto``, ``standard`` or ``gram``; see `resolve_backend`.

    Returns:
        New contiguous tensor of the shape of ``x`` in ``dtype``. An all-zero matrix gives zeros;
        one with a NaN or infinite entry gives NaN in every entry.

    Raises:
        ValueError: fewer than two dims, a dtype that is not floating, no coefficients, an unknown
            preconditioner or backend, or ``norm_scale`` that is not positive.

    On CPU a batch equals the loop over its matrices bit for bit. Elsewhere it runs as batched
    products.
    """
    checks = {
        "x": (x.dim() >= 2, tuple(x.shape), "a shape (..., m, n)"),
        "x.dtype": (x.dtype.is_floating_point, x.dtype, "a floating dtype"),
        "dtype": (dtype.is_floating_point, dtype, "a floating dtype"),
        "coefficients": (len(coefficients) > 0, "none", "one (a, b, c) for each step"),
        "norm_scale": (norm_scale > 0, norm_scale, "a number > 0"),
        "preconditioner": (
            preconditioner in PRECONDITIONERS,
            repr(preconditioner),
            f"one of {PRECONDITIONERS}",
        ),
        "backend": (backend in NS_BACKENDS, repr(backend), f"one of {NS_BACKENDS}"),
    }
    for field, (is_good, found, expected) in checks.items():
        if not is_good:
            raise ValueError(f"{field}: found {found}, expected {expected}")
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=dtype, device=x.device)
    m, n = x.shape[-2:]
    return newton_schulz(
        x.reshape(-1, m, n),
        tuple(coefficients),
        norm_scale=norm_scale,
        preconditioner=preconditioner,
        dtype=dtype,
        backend=backend,
        eps=eps,
    ).view(x.shape)


def newton_schulz(
    x: Tensor,
    coefficients: tuple[Triple, ...],
    *,
    norm_scale: float,
    preconditioner: str,
    dtype: torch.dtype,
    backend: str = "auto",
    eps: float = 1e-7,
) -> Tensor:
    """`orthogonalize`, without checks.

    Args:
        x: ``(m, n)`` or ``(b, m, n)``, not empty, any floating dtype and strides; not modified.
        coefficients: One ``(a, b, c)`` for each step, at least one.
        norm_scale: Safety factor.
        preconditioner: ``"frobenius"`` or ``"aol"``.
        dtype: Of the products and of the result.
        backend: For `resolve_backend`.
        eps: Added to the norm, in units of the largest entry.

    Returns:
        New contiguous tensor of the shape of ``x`` in ``dtype``.
    """
    form = resolve_backend(backend, x.shape[-2:], coefficients, dtype, x.device)

    def run(x: Tensor) -> Tensor:
        first, known = first_iterate(x, norm_scale, preconditioner, dtype, eps)
        return (gram if form == "gram" else standard)(first, coefficients, known)

    if x.dim() == 2 or not on_cpu(x):
        return run(x)
    # There a batch takes as long as the loop, and has other bits.
    alone = [run(each) for each in x]
    return alone[0].unsqueeze(0) if len(alone) == 1 else torch.stack(alone)


def resolve_backend(
    requested: str,
    shape: Sequence[int],
    coefficients: tuple[Triple, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> str:
    """What runs matrices of a shape; the same on every rank, for nothing is measured.

    ``auto`` is ``gram`` on a CPU for matrices at least twice as long as they are short, else
    ``standard``. ``gram``, also by name, gives way to ``standard`` in dtypes of 16 bits, in which
    it may diverge, for a short side below 128, and for a single step.

    Args:
        requested: One of `NS_BACKENDS`.
        shape: ``(m, n)``, either side short.
        coefficients: One triple a step.
        dtype: Of the products.
        device: Of the matrices.
    """
    short, long = sorted(shape)
    if requested == "auto":
        requested = "gram" if device.type == "cpu" and long >= _MIN_ASPECT * short else "standard"
    may_be_gram = dtype.itemsize > 2 and short >= _MIN_ROWS and len(coefficients) > 1
    return "standard" if requested == "gram" and not may_be_gram else requested


def first_iterate(
    x: Tensor, norm_scale: float, preconditioner: str, dtype: torch.dtype, eps: float
) -> tuple[Tensor, Tensor | None]:
    """Scale matrices so that no singular value exceeds one, nearly.

    Args:
        x: ``(m, n)`` or ``(b, m, n)``, not empty; not modified.
        norm_scale: Safety factor of the Frobenius norm.
        preconditioner: ``"frobenius"`` or ``"aol"``.
        dtype: Of the result.
        eps: Added to the norm, in units of the largest entry.

    Returns:
        The scaled matrices, contiguous; and, where they are known, the Gram matrices of their short
        sides.
    """
    wide = wide_dtype(x.dtype, dtype)
    # The maximum is taken in the dtype of x, which may be half as long to read, and is the same in
    # any order. The clamp keeps zero matrices from 0 / 0.
    largest = largest_entry(x).to(wide).clamp_(min=_LEAST_ENTRY[wide])
    # Contiguous before any sum or product, whose bits depend on the strides. Matrices are divided,
    # not multiplied by a reciprocal: that of a denormal is infinite.
    x = x.contiguous()
    if preconditioner == "aol":
        unit = x.div(largest)
        return precondition_aol(unit, dtype, symmetric_product, x.shape[-2] > x.shape[-1])
    # A power of two changes no bit. This one takes the largest entry into [1, 2); the next higher
    # one would be infinite for entries from 2^127 on.
    scaled = torch.frexp(largest).mantissa.mul_(2)
    unit = x.div(largest.div_(scaled))
    # A norm is at least one but for zero matrices: the clamp turns 0 / 0 into 0 / 1.
    norm = torch.linalg.vector_norm(unit, dim=(-2, -1), keepdim=True).clamp_(min=1.0)
    divisor = norm.to(torch.float64).mul_(norm_scale)
    if eps > _LEAST_SEEN * torch.finfo(dtype).eps:
        divisor += eps * scaled
    return unit.div_(divisor.to(wide)).to(dtype), None


def symmetric_product(
    x: Tensor,
    added: Tensor | None = None,
    beta: float = 1.0,
    alpha: float = 1.0,
    *,
    right: Tensor | None = None,
) -> Tensor:
    """``beta * added + alpha * x x^T``, or ``x x^T`` alone, with one rounding.

    Args:
        x: ``(m, k)`` or ``(b, m, k)``. Where it is itself symmetric, ``x x^T`` is its square.
        added: ``(..., m, m)``, symmetric.
        beta: Factor of ``added``.
        alpha: Factor of the product.
        right: In place of ``x^T``; the product must be symmetric all the same.
    """
    m = x.shape[-2]
    rows = _BLOCK_ROWS if x.element_size() > 2 else 2 * _BLOCK_ROWS
    num_blocks = min(m // rows, _MOST_BLOCKS)
    if not on_cpu(x) and added is x:  # the square of a symmetric matrix
        return _multiply(x, x, added, beta, alpha)
    right = x.mT if right is None else right
    if num_blocks < 2 or not on_cpu(x):
        return _multiply(x, right, added, beta, alpha)
    # Only blocks on and above the diagonal; the rest is mirrored. The same sums, in less time.
    out = x.new_empty(*x.shape[:-1], m)
    for block in range(num_blocks):
        start, stop = m * block // num_blocks, m * (block + 1) // num_blocks
        upper, columns = out[..., start:stop, start:], right[..., start:]
        plus = None if added is None else added[..., start:stop, start:]
        _multiply(x[..., start:stop, :], columns, plus, beta, alpha, out=upper)
        # Both contiguous: a strided transposed copy takes ten times as long.
        mirrored = upper[..., stop - start :].contiguous().mT.contiguous()
        out[..., stop:, start:stop].copy_(mirrored)
    return out


def _apply(factor: Tensor, x: Tensor, multiple: float, is_tall: bool) -> Tensor:
    """``multiple * X + factor X``, X being ``x`` or, where that is tall, its transpose.

    Called with what nobody else holds: the memory of factors and iterates is free after it.
    """
    left, right = (x, factor) if is_tall else (factor, x)
    return _multiply(left, right, x if multiple else None, multiple)


def precondition_aol(
    unit: Tensor, dtype: torch.dtype, product: Product, is_tall: bool
) -> tuple[Tensor, Tensor]:
    """``diag(d) X`` and ``diag(d) X X^T diag(d)`` with ``d_i = (sum_j |X X^T|_ij)^-1/2``.

    Args:
        unit: X or, where that is tall, its transpose; wide, used up.
        dtype: Of the results.
        product: As for `standard`.
        is_tall: Whether the short side is that of the columns.
    """
    x = unit.to(dtype)
    small = (product(x.mT, right=x) if is_tall else product(x)).to(unit.dtype)
    del x  # memory
    row_sums = small.abs().sum(dim=-1, keepdim=True)
    # A row of zeros (or one whose squares vanish in dtype) has nothing to scale.
    d = row_sums.rsqrt().masked_fill_(row_sums == 0, 1.0)
    (unit.mT if is_tall else unit).mul_(d)
    return unit.to(dtype), small.mul_(d).mul_(d.mT).to(dtype)


def standard(
    x: Tensor,
    coefficients: Sequence[Triple],
    known: Tensor | None = None,
    *,
    product: Product = symmetric_product,
    is_tall: bool | None = None,
) -> Tensor:
    """Run the steps, of three products each.

    Args:
        x: ``(m, n)`` or ``(b, m, n)``, contiguous, singular values at most one; not modified.
        coefficients: One triple a step.
        known: ``A``, the Gram matrix of the short side of ``x``, where it is known.
        product: In place of `symmetric_product`: of X, without ``added``, and of A; of a tall X
            with ``right``.
        is_tall: Whether the short side is that of the columns; None: as the shape has it.
    """
    is_tall = x.shape[-2] > x.shape[-1] if is_tall is None else is_tall
    for a, b, c in coefficients:
        if known is None:
            known = product(x.mT, right=x) if is_tall else product(x)
        x, known = _apply(product(known, known, b, c), x, a, is_tall), None
    return x


def gram(x: Tensor, coefficients: Sequence[Triple], known: Tensor | None = None) -> Tensor:
    """Run steps two at once, with two products by X instead of four.

    Rounding moves an eigenvalue of A by about a unit of the dtype, however small the singular value
    behind it, and steep quintics amplify that until A is formed anew. In float32 a pair leaves
    room; three steps do not (30 times the error of `standard`). In bfloat16 two steps composed for
    an ell of 1e-3 round the largest singular value by up to 8 %, and whatever exceeds one by more
    than 1 % diverges in the steps that follow: one in a hundred matrices of decaying rows did.

    Args:
        x: ``(m, n)`` or ``(b, m, n)``, contiguous, singular values at most one; not modified.
        coefficients: One triple a step.
        known: ``A``, the Gram matrix of the short side of ``x``, where it is known.
    """
    num_paired, is_tall = len(coefficients) // 2 * 2, x.shape[-2] > x.shape[-1]
    for (a0, b0, c0), (a1, b1, c1) in zip(
        coefficients[:num_paired:2], coefficients[1::2], strict=True
    ):
        if known is None:
            known = symmetric_product(x.mT, right=x) if is_tall else symmetric_product(x)
        p = symmetric_product(known, known, b0, c0)
        p.diagonal(dim1=-2, dim2=-1).add_(a0)
        known = symmetric_product(symmetric_product(p, right=known.mT), right=p.mT)
        q = symmetric_product(known, known, b1, c1)
        q.diagonal(dim1=-2, dim2=-1).add_(a1)
        x, known = _apply(symmetric_product(q, right=p.mT), x, 0.0, is_tall), None
    return standard(x, coefficients[num_paired:], known)


def _multiply(
    left: Tensor,
    right: Tensor,
    added: Tensor | None = None,
    beta: float = 1.0,
    alpha: float = 1.0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """``beta * added + alpha * left right``: fused, which halves the bfloat16 error."""
    is_one = left.dim() == 2
    if added is None:
        # `@` of batches reshapes six times on the way to the same product.
        return (torch.mm if is_one else torch.bmm)(left, right, out=out)
    multiply = torch.addmm if is_one else torch.baddbmm
    return multiply(added, left, right, beta=beta, alpha=alpha, out=out)


EXACT_NORM_BOUND = 2.0
"""Largest factor of `scale_to_exact_norm`."""


def scale_to_exact_norm(
    updates: Tensor, shape: Sequence[int], add: Callable[[Tensor], None] | None = None
) -> Tensor:
    """Scale each result, in place, to the Frobenius norm of an exact polar factor.

    That norm is ``sqrt(min(m, n))``. If Newton-Schulz stops early, small singular values stay below
    one, so fewer steps would also be a lower learning rate. With the exact norm a schedule decides
    the direction of an update alone.

    The factor is at most `EXACT_NORM_BOUND`. The polar factor of a matrix of rank r has the norm
    ``sqrt(r)``: without a bound, an update of low rank, such as that of a rarely routed expert,
    would grow by ``sqrt(min(m, n) / r)``. Factors in training are below 2.

    Norms and factors are float32, of float64 updates float64. A factor is multiplied in that dtype
    and rounded once. An all-zero matrix stays zero. On CPU a matrix gets the same bits alone and in
    a batch, except in teams, whose sums depend on the number of members.

    Args:
        updates: Finite, ``(b, m, n)``, not empty, any floating dtype; modified.
        shape: ``(m, n)`` of each whole matrix.
        add: Adds up squared norms over a team, in place; None if these are whole matrices.

    Returns:
        Norms before scaling, ``(b,)``; those below ``sqrt(min(m, n)) / EXACT_NORM_BOUND`` were
        bounded.
    """
    size, wide = math.sqrt(min(shape)), torch.promote_types(updates.dtype, torch.float32)
    least = size / EXACT_NORM_BOUND
    if add is None and on_cpu(updates):
        # One by one: a reduction over a batch need not add in the order of one over a matrix.
        by_matrix = []
        for update in updates.unbind():
            norm = torch.linalg.vector_norm(update, dtype=wide)
            update.mul_(size / norm.clamp_min(least))
            by_matrix.append(norm)
        return torch.stack(by_matrix)
    norms: Tensor = torch.linalg.vector_norm(updates, dim=(-2, -1), keepdim=True, dtype=wide)
    if add is not None:
        add(norms.square_())
        norms.sqrt_()
    updates.mul_(size / norms.clamp_min(least))
    return norms.view(-1)
