"""The spectrum of one matrix, and the errors that Newton-Schulz schedules leave of it.

A schedule acts on each singular value alone, so its distance to the polar factor follows from the
spectrum, exactly, for as many schedules as one likes. All arithmetic is float64. A momentum matrix
must come in as float32 at least, never as a bf16 copy, whose rounding lifts the small singular
values by orders of magnitude.

The singular values are the roots of the eigenvalues of the Gram matrix of the short side, found in
0.13 to 0.39 of the time of a decomposition in float32. An eigenvalue is off by a few roundings of
the *largest* one. Below `_noise` it says nothing, and counts as zero: that is a singular value of
about 1e-7 of the largest. Above, errors of schedules hardly feel it: to 1e-6 the same as those from
a decomposition up to a condition number of 1e6.
"""

from __future__ import annotations

import logging
import math

import torch
from torch import Tensor

from amo_dist.kernels.elementwise import largest_entry
from amo_dist.kernels.newton_schulz import EXACT_NORM_BOUND

logger = logging.getLogger(__name__)

# ``tau`` of the AMO paper: ``ell`` counts a smaller least singular value as this one. It is
# absolute, in the unit of the matrix.
DEFAULT_TAU = 1e-10
# Up to this short side a singular value decomposition is as fast.
SMALL = 128

# An ``ell`` below it is as good as zero for every plan.
_FELT = 1e-6


@torch.no_grad()
def spectrum(x: Tensor, tau: float = DEFAULT_TAU) -> tuple[Tensor, Tensor, bool]:
    """``ell = max(sigma_min, tau) / ||x||_F`` of one matrix, and all its singular values.

    Args:
        x: Shape ``(m, n)``, any floating dtype. One matrix and its transpose get the same bits,
            unless it is square.
        tau: Least singular value told apart from zero, in the unit of ``x``.

    Returns:
        ``ell``, float64, 0-dim, in (0, 1]; the singular values over ``||x||_F``, float64,
        ``(min(m, n),)``, descending; and whether ``tau`` took the place of the least of them and
        lifted ``ell`` above 1e-6. NaN without a spectrum: empty, an entry that is not finite, no
        singular value above ``tau``; or where each decomposition fails.
    """
    nothing = x.new_full((min(x.shape) + 1,), math.nan, dtype=torch.float64)
    largest = largest_entry(x).item() if x.numel() > 0 else 0.0
    if not 0 < largest < math.inf:
        return nothing[0], nothing[1:], False
    unit = (x.mT if x.shape[0] > x.shape[1] else x).to(
        torch.float64, copy=True, memory_format=torch.contiguous_format
    )
    unit.div_(largest)
    sigma = singular_values(unit)
    # No entry exceeds sigma_max; the clamp would answer above one for a matrix below tau.
    if sigma[0].isnan() or (largest <= tau and not sigma[0].item() * largest > tau):
        return nothing[0], nothing[1:], False
    norm = torch.linalg.vector_norm(unit)
    ell = (sigma[-1].clamp(min=tau / largest) / norm).clamp(max=1.0)
    is_clamped = sigma[-1].item() < tau / largest and ell.item() > _FELT
    return ell, sigma / norm, is_clamped


def singular_values(x: Tensor) -> Tensor:
    """All singular values, right to about 1e-7 of the largest, and far better above that.

    Small matrices are decomposed: it takes little longer, and their means average less error out.

    Args:
        x: One finite matrix, shape ``(m, n)``, float64, neither dim 0, entries of moderate size
            (their squares must stay in range).

    Returns:
        Float64, ``(min(m, n),)``, descending, on the device of ``x``; NaN, with a warning, where
        each decomposition fails.
    """
    x = x.mT if x.shape[0] > x.shape[1] else x
    quick = () if x.shape[0] <= SMALL else (_by_eigenvalues,)
    # cuSOLVER fails on matrices that the CPU decomposes (pytorch #94772, #105359, #107082), a
    # device may have no room left, and one matrix that is not measured must not end a run.
    for device in dict.fromkeys((x.device, torch.device("cpu"))):
        for method in (*quick, torch.linalg.svdvals):
            try:
                sigma: Tensor = method(x.to(device))
                return sigma.to(x.device)
            except RuntimeError as error:
                failure = error
    logger.warning("no decomposition of a matrix %s: %s", tuple(x.shape), failure)
    return x.new_full((x.shape[0],), math.nan)


def _by_eigenvalues(x: Tensor) -> Tensor:
    squares: Tensor = torch.linalg.eigvalsh(_lower_gram(x), UPLO="L").flip(0)
    return squares.masked_fill(squares <= _noise(squares), 0.0).sqrt()


def _lower_gram(x: Tensor, num_blocks: int = 8) -> Tensor:
    """``X X^T``, but zeros above the blocks on the diagonal, which are not read."""
    m = x.shape[0]
    gram = x.new_zeros(m, m)
    for block in range(num_blocks):
        start, stop = m * block // num_blocks, m * (block + 1) // num_blocks
        gram[start:, start:stop] = x[start:] @ x[start:stop].mT
    return gram


def _noise(squares: Tensor) -> Tensor:
    """Bound on the error of an eigenvalue of the Gram matrix, given all in descending order.

    Measured on matrices with known null spaces, of 64 to 2048 rows, square and 1:3: flat, graded,
    log-spaced and spiked spectra, equal rows, all entries equal. It grows with the root of the
    number of rows: eigenvalues that should be zero came out as 10 eps of the largest at 256 rows,
    23 at 512, 28 at 1024, 22 at 2048. At 16384 rows the bound is 6e-14: a condition number of 1e6
    is 18 times above.
    """
    return squares[0] * (2 * math.sqrt(squares.shape[0]) * torch.finfo(squares.dtype).eps)


@torch.no_grad()
def distances(sigma: Tensor, coefficients: Tensor, *, exact_norm: bool = False) -> Tensor:
    """Mean squared distance to the polar factor that each schedule leaves: exact, on scalars.

    With ``p`` the polynomial of a schedule it is the mean of ``(p(s) - 1)^2`` over the ``m``
    directions of the short side, of which one that is zero counts 1; with the exact norm that of
    ``(f p(s) - 1)^2``, where ``f`` is the factor of `scale_to_exact_norm`.

    Args:
        sigma: Singular values that enter the first step, float64, shape ``(m,)``.
        coefficients: Float64, shape ``(num_schedules, num_steps, 3)``, on the device of ``sigma``:
            ``(a, b, c)`` of each Newton-Schulz step, which sends ``s`` to ``a s + b s^3 + c s^5``.
            Pad a shorter schedule with ``(1, 0, 0)``.
        exact_norm: Whether results are scaled by `scale_to_exact_norm`.

    Returns:
        Float64, shape ``(num_schedules,)``.
    """
    values = sigma.expand(coefficients.shape[0], -1).clone()
    for a, b, c in coefficients.unsqueeze(-1).permute(1, 2, 0, 3):
        square = values.square()
        values *= (square * c).add_(b).mul_(square).add_(a)
    if exact_norm:
        mean = values.square().mean(dim=1, keepdim=True)
        values *= mean.clamp_(min=EXACT_NORM_BOUND**-2).rsqrt_()
    return values.sub_(1).square_().mean(dim=1)


@torch.no_grad()
def ns_residual(x: Tensor) -> Tensor:
    """Normalised Newton-Schulz residual ``||X X^T - I||_F / sqrt(min(m, n))``, short side.

    Args:
        x: Matrices after orthogonalization, shape ``(..., m, n)``, any floating dtype.

    Returns:
        Float64, shape ``(...)``; 1 for a zero matrix, NaN for an empty or non-finite one.
    """
    x = x.to(torch.float64)
    x = x.mT if x.shape[-2] > x.shape[-1] else x
    size = x.shape[-2]
    if x.numel() == 0:
        return x.new_full(x.shape[:-2], math.nan)
    defect = x @ x.mT - torch.eye(size, dtype=x.dtype, device=x.device)
    residual: Tensor = torch.linalg.vector_norm(defect, dim=(-2, -1)) / size**0.5
    return residual.masked_fill(~torch.isfinite(residual), math.nan)
