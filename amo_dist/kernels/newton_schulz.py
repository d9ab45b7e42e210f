"""Newton-Schulz orthogonalization of plain local matrices.

An odd quintic ``p(x) = a x + b x^3 + c x^5`` applied to a matrix acts on its singular values alone:
``p(X) = a X + (b A + c A A) X`` with ``A = X X^T``. Composed polynomials that send every singular
value in ``[ell, 1]`` close to one therefore send a matrix close to its polar factor, with matrix
products only. Source: the AMO paper; the quintic form goes back to Muon (Jordan et al., 2024).

`standard` takes three products per step, two of them by the large X. `pair` takes two steps at
once: it iterates on the small A and multiplies into X once for both. All matrices of the size of A
are polynomials of one A: they commute, and every product of them is symmetric.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from amo_dist.config import Triple
from amo_dist.kernels.elementwise import largest_entry, on_cpu, wide_dtype

# Signature of `symmetric_product`.
Product = Callable[..., Tensor]

# Forms of the Newton-Schulz steps; see `step_sizes`.
NS_BACKENDS = ("auto", "standard", "gram")

# Long side over short side from which a pair saves more than its small products take; in 16 bits,
# where symmetric products gain less, from a higher one on.
_MIN_ASPECT, _MIN_NARROW_ASPECT = 2, 2.5
# Short side below which small products take as long as large ones, on a CPU and elsewhere.
_MIN_ROWS, _MIN_ROWS_ELSEWHERE = 64, 128
# Greatest singular value that the rounding of a pair may lead to, and the same over the greatest of
# exact steps, of which the larger counts: some short schedules end near two.
_GREATEST, _GREATEST_EXCESS = 1.5, 1.25
# Least positive numbers.
_LEAST_ENTRY = {torch.float32: 2.0**-149, torch.float64: 2.0**-1074}
# Least ``eps`` that is added to a norm, over the spacing of the dtype at one: the rounding of the
# iterates hides a smaller one.
_LEAST_EPS = 2.0**-9
# Rows from which a block of a symmetric product on a CPU saves more than its call takes, in 32 bits
# and for an inner side at least twice as long as the outer one. Twice as many for a shorter inner
# side, and twice as many in 16 bits, where products take less time, and those of fewer rows than
# the last number gain nothing.
_BLOCK_ROWS, _MAX_BLOCKS, _MIN_NARROW_ROWS = 64, 8, 384


def has_bfloat16(device: torch.device) -> bool:
    """Whether a device computes products in bfloat16 faster than in float32, but for tiny ones.

    Devices do, and CPUs with units for it, which oneDNN uses: AVX512-BF16, AMX-BF16 or Arm's BF16.
    Without them a CPU takes up to 40 times as long.
    """
    if device.type != "cpu":
        return True
    units, names = torch.cpu.get_capabilities(), ("avx512_bf16", "amx_bf16", "bf16")
    return torch.backends.mkldnn.is_available() and any(units.get(name) for name in names)


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
    library: Library | None = None,
) -> Tensor:
    """Approximate the polar factor ``U V^T`` of each matrix ``U S V^T``.

    Norms are taken in float32 (float64 where ``x`` or ``dtype`` is), of matrices scaled so that no
    entry that the input can hold overflows or vanishes, and the normalized matrix is rounded once
    to ``dtype`` for the products.

    Args:
        x: Matrices, ``(m, n)`` or ``(b, m, n)``, not empty, any floating dtype and strides; not
            modified.
        coefficients: Triples ``(a, b, c)``, one for each step, at least one.
        norm_scale: Safety factor ``s``: the first iterate is ``x / (s * ||x||_F + eps)``. Rounding
            in ``dtype`` may push the largest singular value above one, where steep quintics
            diverge; 1.01 prevents it. Not used by ``"aol"``.
        preconditioner: ``"frobenius"`` divides by the Frobenius norm. ``"aol"`` scales row ``i`` of
            the short side by ``(sum_j |A_ij|)^-1/2`` with ``A = x x^T`` (almost-orthogonal layers,
            as in Turbo-Muon), which bounds the singular values by one more tightly; the scaled
            ``A`` serves the first step.
        dtype: Floating dtype of the products and of the result.
        eps: Addend of the norm, in units of the largest entry, hence relative; left out where
            ``dtype`` would not show it.
        backend: Form of the steps: ``auto``, ``standard`` or ``gram``; see `step_sizes`.
        library: Products in place of `TORCH`.

    Returns:
        New contiguous tensor of the shape of ``x`` in ``dtype``. An all-zero matrix gives zeros; a
        matrix with a NaN or infinite entry gives NaN in every entry.

    On CPU a batch equals the loop over its matrices bit for bit. Elsewhere it runs as batched
    products.
    """
    coefficients = tuple(coefficients)
    sizes = step_sizes(backend, x.shape[-2:], coefficients, dtype, x.device)

    # On a CPU batched products have other bits than single ones.
    is_loop, results = x.dim() == 3 and on_cpu(x), list[Tensor]()
    for part in x if is_loop else (x,):
        first, known = first_iterate(part, norm_scale, preconditioner, dtype, eps)
        results.append(run_steps(first, coefficients, sizes, known, library or TORCH))
    return torch.stack(results) if is_loop else results[0]


def step_sizes(
    backend: str,
    shape: Sequence[int],
    coefficients: tuple[Triple, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[int, ...]:
    """Numbers of steps that are taken at once, from the first on: 2 for a `pair`, else 1.

    Depends on the arguments alone, and of the device on its kind: the same on every rank.

    ``auto`` takes pairs where they save time: in 16 bits for matrices at least 2.5 times as long as
    they are short; in 32 and more on a CPU alone, from twice as long on. ``gram`` takes them
    for every aspect. Both take single steps for a short side below 64, on other devices than a CPU
    below 128, and those pairs alone that are safe: in 32 bits all of them, in 16 bits as
    `safe_sizes` tells.

    Args:
        backend: One of `NS_BACKENDS`.
        shape: ``(m, n)`` of the whole matrix, either side short.
        coefficients: Triples, one for each step.
        dtype: Dtype of the products.
        device: Device of the matrices.
    """
    short, long = sorted(shape)
    num_steps, is_narrow = len(coefficients), dtype.itemsize <= 2
    least_aspect = _MIN_NARROW_ASPECT if is_narrow else _MIN_ASPECT
    # Other devices may round float32 products to TensorFloat-32, if the user has set so.
    is_near = device.type == "cpu"
    is_faster = long >= least_aspect * short and (is_narrow or is_near)
    is_small = short < (_MIN_ROWS if is_near else _MIN_ROWS_ELSEWHERE)
    if backend == "standard" or is_small or not (backend == "gram" or is_faster):
        return (1,) * num_steps
    if is_narrow:
        return safe_sizes(coefficients, torch.finfo(dtype).eps)
    return (2,) * (num_steps // 2) + (1,) * (num_steps % 2)


@functools.lru_cache(maxsize=1024)
def safe_sizes(coefficients: tuple[Triple, ...], eps: float) -> tuple[int, ...]:
    """Numbers of steps to take at once so that no pair leads to divergence, most pairs last.

    A pair multiplies X by a matrix with entries up to ``a0 * a1``, the product of the slopes at
    zero, each rounded by up to ``eps / 2`` of itself; the largest singular value may grow by as
    much. Steep quintics diverge above the interval for which they were made. So a pair is taken
    where the steps that follow keep such a singular value below `_GREATEST`, as the polynomials
    themselves tell.

    Args:
        coefficients: Triples, one for each step.
        eps: Spacing of the dtype of the products at one.
    """
    num_steps = len(coefficients)
    bounds = [_image_bound(1.0, coefficients[:stop]) for stop in range(num_steps + 1)]
    limit = max(_GREATEST, _GREATEST_EXCESS * bounds[-1])
    sizes: list[int] = []
    stop = num_steps
    while stop:
        is_pair = False
        if stop > 1:
            excess = abs(coefficients[stop - 2][0] * coefficients[stop - 1][0]) * eps / 2
            is_pair = _image_bound(bounds[stop] * (1 + excess), coefficients[stop:]) < limit
        sizes.append(2 if is_pair else 1)
        stop -= sizes[-1]
    return tuple(reversed(sizes))


def _image_bound(bound: float, coefficients: Sequence[Triple]) -> float:
    """Greatest absolute value to which quintics, one after the other, send ``[0, bound]``."""
    for a, b, c in coefficients:
        # The derivative a + 3 b t + 5 c t^2, with t = x^2, is zero at an inner extremum.
        root = math.sqrt(max(9 * b * b - 20 * a * c, 0.0))
        squares = [(-3 * b + root) / (10 * c), (-3 * b - root) / (10 * c)] if c else []
        squares += [-a / (3 * b)] if b and not c else []
        points = [bound, *(math.sqrt(t) for t in squares if 0 < t < bound * bound)]
        bound = max(abs(x * (a + x * x * (b + x * x * c))) for x in points)
    return bound


def first_iterate(
    x: Tensor, norm_scale: float, preconditioner: str, dtype: torch.dtype, eps: float
) -> tuple[Tensor, Tensor | None]:
    """Scale matrices so that no singular value exceeds one, nearly.

    Args:
        x: Matrices, ``(m, n)``, or ``(b, m, n)`` elsewhere than on a CPU, not empty; not modified.
        norm_scale: Safety factor of the Frobenius norm.
        preconditioner: ``"frobenius"`` or ``"aol"``.
        dtype: Dtype of the result.
        eps: Addend of the norm, in units of the largest entry.

    Returns:
        Scaled matrices, contiguous; the Gram matrices of their short sides, or None where the
        preconditioner does not compute them.
    """
    wide = wide_dtype(x.dtype, dtype)
    if eps <= _LEAST_EPS * torch.finfo(dtype).eps:
        eps = 0.0
    if not on_cpu(x):
        # The maximum is taken in the dtype of x, which may be half as long to read. The clamps turn
        # 0 / 0 into 0. Few launches, and one copy in the wide dtype; entries up to one have squares
        # in its range.
        largest = largest_entry(x).to(wide).clamp_(min=_LEAST_ENTRY[wide])
        unit = x.div(largest)
        if preconditioner == "aol":
            return _precondition_aol(unit.contiguous(), dtype)
        norm = torch.linalg.vector_norm(unit, dim=(-2, -1), keepdim=True)
        divisor = norm.mul_(norm_scale).add_(eps).clamp_(min=_LEAST_ENTRY[wide])
        first = torch.empty(x.shape, dtype=dtype, device=x.device)
        return torch.div(unit, divisor, out=first), None
    # The host computes with the numbers of a matrix: a call takes as long as a small product.
    low, high = (bound.item() for bound in torch.aminmax(x))
    # NaN where both are. A zero matrix is divided by a number, too.
    greatest = max(high, -low, _LEAST_ENTRY[wide])
    # Contiguous before any sum or product, whose bits depend on the strides. Matrices are divided,
    # not multiplied by a reciprocal: that of a denormal is infinite. They are widened first: a CPU
    # takes ten times as long to divide numbers of one dtype by those of another.
    unit = x.to(wide, copy=True, memory_format=torch.contiguous_format)
    if preconditioner == "aol":
        return _precondition_aol(unit.div_(greatest), dtype)
    # A power of two changes no bit. This one takes the greatest entry into [1, 2); the next higher
    # one would be infinite for entries from 2^127 on.
    mantissa, exponent = math.frexp(greatest)
    unit.div_(math.ldexp(1.0, exponent - 1) if math.isfinite(greatest) else math.nan)
    total = torch.linalg.vector_norm(unit, dim=(-2, -1)).item()
    scaled = max(total, 1.0) * norm_scale  # a norm is at least one but for zero matrices
    if eps:
        scaled += torch.tensor(2 * mantissa, dtype=wide, device="cpu").mul_(eps).item()
    return unit.div_(scaled).to(dtype), None


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
        x: Factor, ``(m, k)`` or ``(b, m, k)``. For a symmetric one ``x x^T`` is its square.
        added: Addend, symmetric, ``(..., m, m)``.
        beta: Factor of ``added``.
        alpha: Factor of the product.
        right: Right factor in place of ``x^T``; the product must be symmetric all the same.
    """
    m, k = x.shape[-2:]
    if not on_cpu(x) and added is x:  # the square of a symmetric matrix
        return _multiply(x, x, added, beta, alpha)
    right = x.mT if right is None else right
    is_narrow = x.element_size() <= 2
    rows = _BLOCK_ROWS * (2 if is_narrow else 1) * (1 if k >= 2 * m else 2)
    num_blocks = min(m // rows, _MAX_BLOCKS)
    if num_blocks < 2 or (is_narrow and m < _MIN_NARROW_ROWS) or not on_cpu(x):
        return _multiply(x, right, added, beta, alpha)
    # Only blocks on and above the diagonal are computed, and mirrored: the same sums in less time.
    out = x.new_empty(*x.shape[:-1], m)
    for block in range(num_blocks):
        start, stop = m * block // num_blocks, m * (block + 1) // num_blocks
        upper, columns = out[..., start:stop, start:], right[..., start:]
        addend = None if added is None else added[..., start:stop, start:]
        _multiply(x[..., start:stop, :], columns, addend, beta, alpha, out=upper)
        # Contiguous before and after it is transposed: a strided copy takes ten times as long.
        mirrored = upper[..., stop - start :].contiguous().mT.contiguous()
        out[..., stop:, start:stop].copy_(mirrored)
    return out


def _apply(factor: Tensor, x: Tensor, multiple: float, is_tall: bool) -> Tensor:
    """``multiple * X + factor X``, X being ``x`` or, where that is tall, its transpose."""
    left, right = (x, factor) if is_tall else (factor, x)
    return _multiply(left, right, x if multiple else None, multiple)


def _precondition_aol(unit: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``diag(d) X`` and ``diag(d) X X^T diag(d)`` with ``d_i = (sum_j |X X^T|_ij)^-1/2``.

    Args:
        unit: X or, where that is tall, its transpose; of a wide dtype; modified.
        dtype: Dtype of the results.
    """
    is_tall = unit.shape[-2] > unit.shape[-1]
    x = unit.to(dtype)
    small = (symmetric_product(x.mT, right=x) if is_tall else symmetric_product(x)).to(unit.dtype)
    del x  # memory
    row_sums = small.abs().sum(dim=-1, keepdim=True)
    # A row of zeros, or one whose squares vanish in dtype, stays as it is.
    d = row_sums.rsqrt().masked_fill_(row_sums == 0, 1.0)
    (unit.mT if is_tall else unit).mul_(d)
    return unit.to(dtype), small.mul_(d).mul_(d.mT).to(dtype)


class Library(NamedTuple):
    """Products of Newton-Schulz steps.

    Attributes:
        product: `symmetric_product`, or a function in its place.
        apply: ``apply(factor, x, multiple, is_tall)``: ``multiple * x + factor x``, or for a tall
            ``x`` ``multiple * x + x factor``.
    """

    product: Product
    apply: Callable[[Tensor, Tensor, float, bool], Tensor]


# PyTorch's products.
TORCH = Library(symmetric_product, _apply)


def run_steps(
    x: Tensor,
    coefficients: tuple[Triple, ...],
    sizes: Sequence[int],
    known: Tensor | None = None,
    library: Library = TORCH,
) -> Tensor:
    """Run the steps, one or two at once.

    Args:
        x: First iterates, ``(m, n)`` or ``(b, m, n)``, contiguous, singular values at most one; not
            modified.
        coefficients: Triples, one for each step.
        sizes: Numbers of steps to take at once, each 1 or 2; their sum is the number of steps.
        known: ``A``, the Gram matrix of the short side of ``x``, where it is known.
        library: Products.
    """
    stop = 0
    for size in sizes:
        start, stop = stop, stop + size
        part = coefficients[start:stop]
        x = (pair if size == 2 else standard)(x, part, known, library=library)
        known = None
    return x


def standard(
    x: Tensor,
    coefficients: Sequence[Triple],
    known: Tensor | None = None,
    *,
    library: Library = TORCH,
) -> Tensor:
    """Run steps of three products each.

    Args:
        x: Iterates, ``(m, n)`` or ``(b, m, n)``, contiguous, singular values at most one; not
            modified.
        coefficients: Triples, one for each step.
        known: ``A``, the Gram matrix of the short side of ``x``, where it is known.
        library: Products. ``product`` is called for X without ``added``, for a tall X with
            ``right``, and for A.
    """
    is_tall = x.shape[-2] > x.shape[-1]
    for a, b, c in coefficients:
        if known is None:
            known = library.product(x.mT, right=x) if is_tall else library.product(x)
        # b A + c A A, then a X + that times X.
        x, known = library.apply(library.product(known, known, b, c), x, a, is_tall), None
    return x


def pair(
    x: Tensor,
    coefficients: Sequence[Triple],
    known: Tensor | None = None,
    *,
    library: Library = TORCH,
) -> Tensor:
    """Run two steps at once, with two products by X instead of four.

    Rounding moves an eigenvalue of A by about a unit of the dtype, however small the singular value
    behind it, and steep quintics amplify that until A is formed anew. In float32 a pair leaves
    room; three steps at once do not (30 times the error of `standard`). In 16 bits the position of
    a pair in its schedule decides; see `safe_sizes`.

    Args:
        x: Iterates, ``(m, n)`` or ``(b, m, n)``, contiguous, singular values at most one; not
            modified.
        coefficients: Triples of the two steps.
        known: ``A``, the Gram matrix of the short side of ``x``, where it is known.
        library: Products.
    """
    (a0, b0, c0), (a1, b1, c1) = coefficients
    product, is_tall = library.product, x.shape[-2] > x.shape[-1]
    if known is None:
        known = product(x.mT, right=x) if is_tall else product(x)
    p = product(known, known, beta=b0, alpha=c0)
    p.diagonal(dim1=-2, dim2=-1).add_(a0)
    known = product(product(p, right=known.mT), right=p.mT)  # A of the iterate in between
    q = product(known, known, beta=b1, alpha=c1)
    q.diagonal(dim1=-2, dim2=-1).add_(a1)
    factor = product(q, right=p.mT)
    del known, p, q  # memory, of which a pair thus takes no more than a single step
    return library.apply(factor, x, 0.0, is_tall)


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
    is_matrix = left.dim() == 2
    if added is None:
        # `@` of batches reshapes six times on the way to the same product.
        return (torch.mm if is_matrix else torch.bmm)(left, right, out=out)
    multiply = torch.addmm if is_matrix else torch.baddbmm
    return multiply(added, left, right, beta=beta, alpha=alpha, out=out)


# Largest factor of `scale_to_exact_norm`.
EXACT_NORM_BOUND = 2.0


def scale_to_exact_norm(updates: Tensor) -> Tensor:
    """Scale each result, in place, to the Frobenius norm of an exact polar factor.

    That norm is ``sqrt(min(m, n))``. If Newton-Schulz stops early, small singular values stay below
    one, so fewer steps would also be a lower learning rate. With the exact norm a schedule decides
    the direction of an update alone.

    The factor is at most `EXACT_NORM_BOUND`. The polar factor of a matrix of rank r has the norm
    ``sqrt(r)``: without a bound, an update of low rank, such as that of a rarely routed expert,
    would grow by ``sqrt(min(m, n) / r)``. Factors in training are below 2.

    Norms and factors are float32, of float64 updates float64. A factor is multiplied in that dtype
    and rounded once. An all-zero matrix stays zero. On CPU a matrix gets the same bits alone and in
    a batch.

    Args:
        updates: Finite, ``(b, m, n)``, not empty, any floating dtype; modified.

    Returns:
        Norms before scaling, ``(b,)``; those below ``sqrt(min(m, n)) / EXACT_NORM_BOUND`` were
        bounded.
    """
    size = math.sqrt(min(updates.shape[-2:]))
    wide = torch.promote_types(updates.dtype, torch.float32)
    least = size / EXACT_NORM_BOUND
    norms: Tensor = torch.linalg.vector_norm(updates, dim=(-2, -1), keepdim=True, dtype=wide)
    factors = size / norms.clamp_min(least)
    if on_cpu(updates):
        # A CPU copies a matrix to multiply it by a tensor of another dtype, unless that is 0-dim.
        for update, factor in zip(updates, factors.flatten(), strict=True):
            update.mul_(factor)
    else:
        updates.mul_(factors)
    return norms.view(-1)
