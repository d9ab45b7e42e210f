"""All singular values of one matrix, and the errors that Newton-Schulz schedules leave of them.

A schedule acts on each singular value alone, so its residual and its distance to the polar factor
follow from the spectrum, exactly, for as many schedules as one likes.

The singular values are the roots of the eigenvalues of the Gram matrix of the short side, found in
0.13 to 0.39 of the time of a decomposition in float32. The price is at the small end: an eigenvalue
is off by a few roundings of the *largest* one.

- Below `_noise` an eigenvalue says nothing, and counts as zero. That is a singular value of about
  1e-7 of the largest, which seven steps composed for 1e-5 lift to 0.005.
- Above, errors of schedules hardly feel it: to 1e-6 the same as those from a decomposition up to a
  condition number of 1e6.
- ``ell`` is a relative matter, so where the least eigenvalue is not well above the noise,
  `sigma_min` finds it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from amo_dist.kernels.elementwise import largest_entry
from amo_dist.kernels.sigma_min import SMALL, first_of, lower_gram, sigma_min

DEFAULT_TAU = 1e-10
"""Least singular value told apart from zero, in the unit of the matrix; see `geometry`."""

_RELATIVE_ERROR = 1e-3
"""Relative error of ``ell``, which `sigma_min` promises too."""
_CHUNK = 2**16
"""Number of values that are computed at a time: 0.5 MB, of which a cache holds three copies."""


@torch.no_grad()
def observe(
    x: Tensor, coefficients: Tensor, norm_scale: float, *, exact_norm: bool = False
) -> tuple[Tensor, Tensor]:
    """``ell`` of one matrix, and the errors that trial schedules leave of its spectrum.

    With ``s`` a singular value of ``x / (norm_scale * ||x||_F)`` and ``p`` the polynomial of a
    schedule, both errors are means over the directions of the short side, of which one that is
    zero counts 1.

    Args:
        x: Momentum matrix, shape ``(m, n)``, float32 or float64.
        coefficients: Float64, shape ``(num_schedules, num_steps, 3)``: ``(a, b, c)`` of each
            Newton-Schulz step of each schedule, which sends ``s`` to ``a s + b s^3 + c s^5``. Pad
            a shorter schedule with ``(1, 0, 0)``.
        norm_scale: Factor of the norm by which the matrix is divided.
        exact_norm: Whether distances are those of updates of the exact norm; see
            `schedule_errors`.

    Returns:
        ``ell``, 0-dim, and the errors, ``(2, num_schedules)``, float64 on the device of ``x``: the
        mean of ``(p(s)^2 - 1)^2``, the mean squared residual; the mean of ``(p(s) - 1)^2``, the
        mean squared distance to the polar factor. NaN throughout where ``ell`` is (see
        `ell_and_spectrum`).

    Raises:
        ValueError: ``x`` has not two dims or no floating dtype, or ``coefficients`` another shape.
    """
    validate(x, "(m, n)")
    if coefficients.dim() != 3 or coefficients.shape[-1] != 3:
        raise ValueError(
            f"coefficients: found shape {tuple(coefficients.shape)}, "
            "expected (num_schedules, num_steps, 3)"
        )
    ell, spectrum = ell_and_spectrum(x)
    sigma = spectrum / norm_scale
    return ell, schedule_errors(sigma, coefficients.to(x.device), exact_norm=exact_norm)


def ell_and_spectrum(x: Tensor, tau: float = DEFAULT_TAU) -> tuple[Tensor, Tensor]:
    """``max(sigma_min, tau) / ||x||_F`` of one matrix, and its singular values over ``||x||_F``.

    Args:
        x: Shape ``(m, n)``, any floating dtype. One matrix and its transpose get the same bits,
            unless it is square.
        tau: Least singular value told apart from zero.

    Returns:
        ``ell``, float64, 0-dim, in (0, 1], and float64 ``(min(m, n),)``, descending. NaN without
        geometry: empty, an entry that is not finite, no singular value above ``tau``; or where
        each decomposition fails.
    """
    nothing = no_geometry(x), no_geometry(x).expand(min(x.shape))
    largest = largest_entry(x).item() if x.numel() > 0 else 0.0
    if not 0 < largest < math.inf:
        return nothing
    unit = (x.mT if x.shape[0] > x.shape[1] else x).to(
        torch.float64, copy=True, memory_format=torch.contiguous_format
    )
    unit.div_(largest)
    sigma = singular_values(unit)
    # The clamp would answer above one for a matrix that is hardest. No entry exceeds sigma_max.
    if largest <= tau and not sigma[0].item() * largest > tau:
        return nothing
    norm = torch.linalg.vector_norm(unit)
    least = _least(unit, sigma)
    if (least + sigma[0]).isnan():
        return nothing
    return (least.clamp(min=tau / largest) / norm).clamp(max=1.0), sigma / norm


def singular_values(x: Tensor) -> Tensor:
    """All singular values, right to about 1e-7 of the largest, and far better above that.

    The eigenvalues of the Gram matrix, ``sigma^2``, have an absolute error (see `_noise`), and
    those that it hides are zero. Small matrices are decomposed: it takes little longer, and their
    means average less error out.

    Args:
        x: One finite matrix, shape ``(m, n)``, float64, neither dim 0, entries of moderate size
            (their squares must stay in range).

    Returns:
        Float64, ``(min(m, n),)``, descending, on the device of ``x``; NaN where each decomposition
        fails.
    """
    x = x.mT if x.shape[0] > x.shape[1] else x
    quick = () if x.shape[0] <= SMALL else (_by_eigenvalues,)
    sigma = first_of(x, *quick, torch.linalg.svdvals)
    return x.new_full((x.shape[0],), math.nan) if sigma is None else sigma


def _by_eigenvalues(x: Tensor) -> Tensor:
    squares: Tensor = torch.linalg.eigvalsh(lower_gram(x), UPLO="L").flip(0)
    return squares.masked_fill(squares <= _noise(squares), 0.0).sqrt()


def _noise(squares: Tensor) -> Tensor:
    """Bound on the error of an eigenvalue of the Gram matrix, given all in descending order.

    Measured on matrices with known null spaces, of 64 to 2048 rows, square and 1:3: flat, graded,
    log-spaced and spiked spectra, equal rows, all entries equal. It grows with the root of the
    number of rows: eigenvalues that should be zero came out as 10 eps of the largest at 256 rows,
    23 at 512, 28 at 1024, 22 at 2048. At 16384 rows the bound is 6e-14: a condition number of 1e6
    is 18 times above.
    """
    return squares[0] * (2 * math.sqrt(squares.shape[0]) * torch.finfo(squares.dtype).eps)


def _least(x: Tensor, sigma: Tensor) -> Tensor:
    """The smallest singular value of a matrix of which all are known as well as they can be."""
    if sigma.shape[0] <= SMALL:
        return sigma[-1]
    # The error of a root is half of its square's.
    squares = sigma.square()
    if (squares[-1] * (2 * _RELATIVE_ERROR) >= _noise(squares)).item():
        return sigma[-1]
    return sigma_min(x)


def schedule_errors(sigma: Tensor, coefficients: Tensor, *, exact_norm: bool = False) -> Tensor:
    """Errors that schedules leave of known singular values: exact, on scalars.

    Args:
        sigma: Singular values that enter the first step, float64, shape ``(m,)``.
        coefficients: Coefficients in the form of `observe`, on the device of ``sigma``.
        exact_norm: Whether distances are of results that are scaled to the Frobenius norm of an
            exact polar factor; residuals are of results as they are.

    Returns:
        Float64, shape ``(2, num_schedules)``: mean squared residual, mean squared distance to the
        polar factor.
    """
    errors = sigma.new_empty(2, coefficients.shape[0])
    size = max(1, _CHUNK // max(1, sigma.shape[0]))
    for chunk, out in zip(coefficients.split(size), errors.split(size, dim=1), strict=True):
        values = sigma.expand(chunk.shape[0], -1).clone()
        for a, b, c in chunk.unsqueeze(-1).permute(1, 2, 0, 3):
            square = values.square()
            values *= (square * c).add_(b).mul_(square).add_(a)
        out[0] = values.square().sub_(1).square_().mean(dim=1)
        if exact_norm:
            mean = values.square().mean(dim=1, keepdim=True)
            values *= mean.masked_fill_(mean == 0, 1).rsqrt_()  # zero stays zero
        out[1] = values.sub_(1).square_().mean(dim=1)
    return errors


def validate(x: Tensor, expected: str = "(..., m, n)") -> None:
    """Check that ``x`` holds matrices, or is one where ``(m, n)`` is expected.

    Raises:
        ValueError: Fewer dims, more than two where one matrix is expected, no floating dtype.
    """
    if x.dim() < 2 or (x.dim() > 2 and expected == "(m, n)"):
        raise ValueError(f"x: found shape {tuple(x.shape)}, expected {expected}")
    if not x.is_floating_point():
        raise ValueError(f"x.dtype: found {x.dtype}, expected a floating dtype")


def no_geometry(x: Tensor) -> Tensor:
    """NaN, float64, shape ``(...)``: the metrics of matrices without geometry."""
    return torch.full(x.shape[:-2], float("nan"), dtype=torch.float64, device=x.device)
