"""The smallest singular value of a large matrix, without its other singular values.

A factor of the matrix is made once, in float64; Lanczos on the inverse of ``X X^T``, applied by
triangular solves, then finds its greatest eigenvalue ``1 / sigma_min^2`` in a few iterations. The
answer is checked against the matrix itself, and a factor that was not exact enough gives way to
the next: LU or Cholesky, then QR, then the singular value decomposition.

- Square: LU with partial pivoting, half the work of a QR factor, and as exact for all but contrived
  matrices.
- Otherwise: Cholesky of the Gram matrix of the short side, of which only the blocks on and below
  the diagonal are computed. It squares the condition number, and the check fails it from about
  1e7 on.
- QR (R alone): right for every condition number that float64 can tell from infinity.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

Solve = Callable[[Tensor], Tensor]
"""Applies ``(X X^T)^-1``, X with its short side as rows, to a column ``(m, 1)``."""

SMALL = 128
"""Up to this short side a singular value decomposition is as fast."""
_TOLERANCE = 5e-4
"""Bound on the residual over the eigenvalue: half of it bounds the relative error of sigma."""
_AGREEMENT = 2.5e-4
"""Relative difference allowed between the sigma of a factor and that of the matrix itself; float32
data are good to 1e-3 at kappa 1e9."""
_MAX_ITERATIONS = 160
_CHECK_EVERY = 4


def first_of(x: Tensor, *methods: Callable[[Tensor], Tensor | None]) -> Tensor | None:
    """Result of the first method that succeeds, on the device of ``x`` or else on the CPU.

    cuSOLVER fails on matrices that the CPU decomposes (pytorch #94772, #105359, #107082), and one
    matrix that is not measured must not end a run.

    Args:
        x: Argument of each method.
        methods: Functions that raise, or return None, where they fail.

    Returns:
        Result, on the device of ``x``; None, with a warning, where each has failed.
    """
    failure: Exception | None = None
    for device in dict.fromkeys((x.device, torch.device("cpu"))):
        for method in methods:
            try:
                result = method(x.to(device))
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                failure, result = error, None
            if result is not None:
                return result.to(x.device)
    logger.warning("no decomposition of a matrix %s: %s", tuple(x.shape), failure)
    return None


@torch.no_grad()
def sigma_min(x: Tensor) -> Tensor:
    """The smallest singular value, right to 1e-3 relative up to a condition number of 1e9.

    Below the resolution of float64, about ``1e-16 * sigma_max``, the answer is noise of that size
    or exactly zero, as that of a decomposition is. Deterministic: the start vector is fixed.

    Args:
        x: One finite matrix, shape ``(m, n)``, float64, neither dim 0, entries of moderate size
            (``1 / sigma_min^2`` must not overflow, or the answer is zero).

    Returns:
        Float64, 0-dim, on the device of ``x``; NaN where each decomposition fails.
    """
    x = (x.mT if x.shape[0] > x.shape[1] else x).contiguous()
    is_small, is_square = x.shape[0] <= SMALL, x.shape[0] == x.shape[1]
    quick = _by_lu if is_square else _by_cholesky
    sigma = first_of(x, *(() if is_small else (quick, _by_qr)), _by_svd)
    return x.new_tensor(math.nan) if sigma is None else sigma


def _by_svd(x: Tensor) -> Tensor:
    sigma: Tensor = torch.linalg.svdvals(x)[-1]
    return sigma


def _by_lu(x: Tensor) -> Tensor | None:
    factor, pivots, info = torch.linalg.lu_factor_ex(x)
    if info.item():
        return None

    def solve(v: Tensor) -> Tensor:
        inner = torch.linalg.lu_solve(factor, pivots, v)
        outer: Tensor = torch.linalg.lu_solve(factor, pivots, inner, adjoint=True)
        return outer

    return _smallest(x, solve)


def _by_cholesky(x: Tensor) -> Tensor | None:
    factor, info = torch.linalg.cholesky_ex(lower_gram(x))
    # Not cholesky_solve, which copies the factor at every call.
    return None if info.item() else _smallest(x, _inverse(factor.mT))


def _inverse(upper: Tensor) -> Solve:
    """``(R^T R)^-1``, R being ``upper``."""
    solve = torch.linalg.solve_triangular
    return lambda v: solve(upper, solve(upper.mT, v, upper=False), upper=True)


def lower_gram(x: Tensor, num_blocks: int = 8) -> Tensor:
    """``X X^T``, but zeros above the blocks on the diagonal: Cholesky does not read them."""
    m = x.shape[0]
    gram = x.new_zeros(m, m)
    for block in range(num_blocks):
        start, stop = m * block // num_blocks, m * (block + 1) // num_blocks
        gram[start:, start:stop] = x[start:] @ x[start:stop].mT
    return gram


def _by_qr(x: Tensor) -> Tensor | None:
    """Sigma from R alone; R belongs to a matrix within rounding of X, so a singular R is proof."""
    upper = torch.geqrf(x.mT)[0][: x.shape[0]].triu()
    if not upper.diagonal().all().item():
        return x.new_tensor(0.0)
    return _smallest(x, _inverse(upper), overflow=0.0)


def _smallest(x: Tensor, solve: Solve, overflow: float | None = None) -> Tensor | None:
    """Sigma by Lanczos on ``solve``; None where it has not converged or X itself disagrees.

    ``overflow`` is the answer where ``1 / sigma^2`` overflows, and nothing can be checked.
    """
    ritz = _lanczos(solve, x)
    if ritz is None:
        return None
    eigenvalue, vector = ritz
    if not math.isfinite(eigenvalue):
        return None if overflow is None else x.new_tensor(overflow)
    estimate = 1 / math.sqrt(eigenvalue)
    # Once more through the inverse: remains of the large singular directions would drown the small
    # one in the product below.
    vector = solve(vector)
    vector = vector / torch.linalg.vector_norm(vector)
    exact: float = torch.linalg.vector_norm(x.mT @ vector).item()
    resolution = 10 * torch.finfo(x.dtype).eps * torch.linalg.vector_norm(x).item()
    is_checked = exact <= resolution or abs(exact - estimate) <= _AGREEMENT * exact
    return x.new_tensor(exact) if is_checked else None


def _lanczos(solve: Solve, x: Tensor) -> tuple[float, Tensor] | None:
    """Greatest eigenpair of ``solve``, fully reorthogonalized; None unless it converges.

    Where the products overflow, the eigenvalue is infinite.
    """
    m = x.shape[0]
    limit = min(_MAX_ITERATIONS, m)
    basis = x.new_empty(limit + 1, m)
    basis[0] = _start(m).to(x.device)
    tridiagonal = torch.zeros(limit + 1, limit + 1, dtype=torch.float64, device="cpu")
    for k in range(limit):
        vectors = basis[: k + 1]
        product = solve(basis[k].unsqueeze(1)).squeeze(1)
        overlap = vectors @ product
        product = product - overlap @ vectors
        product = product - (vectors @ product) @ vectors  # twice is enough
        norm = torch.linalg.vector_norm(product)
        diagonal, coupling = torch.stack((overlap[k], norm)).tolist()
        if not (math.isfinite(diagonal) and math.isfinite(coupling)):
            return math.inf, basis[k].unsqueeze(1)
        tridiagonal[k, k] = diagonal
        is_last = coupling <= 1e-15 * diagonal
        if is_last or (k + 1) % _CHECK_EVERY == 0 or k + 1 == limit:
            values, combinations = torch.linalg.eigh(tridiagonal[: k + 1, : k + 1])
            eigenvalue, weights = values[-1].item(), combinations[:, -1]
            if is_last or coupling * abs(weights[-1].item()) <= _TOLERANCE * eigenvalue:
                return eigenvalue, vectors.mT @ weights.to(x.device).unsqueeze(1)
        tridiagonal[k, k + 1] = tridiagonal[k + 1, k] = coupling
        basis[k + 1] = product / norm
    return None


@functools.lru_cache(maxsize=16)
def _start(m: int) -> Tensor:
    """A fixed unit vector with a part in every singular direction of any matrix not made for it."""
    # On the CPU in any case: the generator belongs to it, whatever the default device is.
    generator = torch.Generator("cpu").manual_seed(0)
    start = torch.randn(m, generator=generator, dtype=torch.float64, device="cpu")
    unit: Tensor = start / torch.linalg.vector_norm(start)
    return unit
