"""Checks of the machines: bytes of all-to-alls, and spectra against the CPU's decomposition."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from amo_dist.kernels.spectra import DEFAULT_TAU, observe, schedule_errors
from amo_dist.schedule.polar_express import composed
from amo_dist.tools.doctor.examination import Check
from amo_dist.tools.doctor.models import normal
from amo_dist.tools.doctor.site import Fault, Site

ELL_ERROR = 1e-3
"""Relative error of ``ell`` that the kernels promise."""
NOISE = 1e-6
"""Singular value over the norm below which rounding hides it."""
RESIDUAL_ERROR = 1e-3
"""Error of mean squared residuals: five steps lift a rounding error of 1e-7 to 1e-4."""

_COEFFICIENTS = tuple(composed(1e-3, 5).coefficients)

Values = Mapping[str, Any]


def checks(site: Site) -> list[Check]:
    """List the checks of this file in the order in which they run."""
    return [
        Check(
            "all-to-all",
            functools.partial(all_to_all, site),
            all_to_all_figure,
            skip="" if site.world_size > 1 else "needs 2 ranks",
        ),
        Check("spectra", functools.partial(spectra, site), spectra_figure, is_collective=False),
    ]


# ------------------------------------------------------------------ all-to-all


def all_to_all(site: Site) -> int:
    """Exchange zero or odd numbers of bytes, as ranks exchange matrices.

    Returns:
        Number of bytes that this rank sent.

    Raises:
        Fault: Other bytes than the sent ones arrived.
    """
    rank, size = site.rank, site.world_size
    most = 2**26 if site.is_cuda else 2**22
    send = [_num_bytes(rank, other, most // size) for other in range(size)]
    receive = [_num_bytes(other, rank, most // size) for other in range(size)]
    sent = torch.cat([_bytes(rank, other, n, site.device) for other, n in enumerate(send)])
    received = sent.new_zeros(sum(receive))
    dist.all_to_all_single(received, sent, receive, send)
    parts = [_bytes(other, rank, n, site.device) for other, n in enumerate(receive)]
    for other, (part, expected) in enumerate(zip(received.split(receive), parts, strict=True)):
        if not torch.equal(part, expected):
            raise Fault(f"from rank {other}: found other bytes than the {len(part)} that it sent")
    return len(sent)


def _num_bytes(source: int, target: int, most: int) -> int:
    """Number of bytes between two ranks: odd, or 0 to oneself and to a quarter of the others."""
    share = (3 * source + 5 * target) % 4
    return 0 if source == target or not share else most * share // 3 // 2 * 2 + 1


def _bytes(source: int, target: int, count: int, device: torch.device) -> Tensor:
    numbers = torch.arange(count, device=device)
    return ((7 * numbers + 31 * source + 17 * target) % 251).to(torch.uint8)


def all_to_all_figure(values: Sequence[int]) -> str:
    """Format the bytes of the rank that sent the most."""
    return f"{max(values):,} bytes in uneven parts"


# ------------------------------------------------------------------ spectra


def spectra(site: Site) -> dict[str, Any]:
    """Compare observations of hard matrices with a decomposition on the CPU.

    Raises:
        Fault: They differ by more than the kernels promise.
    """
    m, n = (1024, 1536) if site.is_cuda else (192, 320)
    left, right = normal("left", (m, m // 4)), normal("right", (m // 4, n))
    full = normal("full", (m, n))
    decay = torch.logspace(0, -4, m, device="cpu").unsqueeze(-1)
    cases = {
        "normal": full,
        "low rank": left @ right,
        "zero rows": full * (torch.arange(m, device="cpu") % 3 > 0).unsqueeze(-1),
        "graded": full * decay,
    }
    trials = torch.tensor([_COEFFICIENTS], dtype=torch.float64, device="cpu")
    worst = 0.0
    for name, matrix in cases.items():
        sigma = torch.linalg.svdvals(matrix.double()) / matrix.double().norm()
        tau = DEFAULT_TAU / matrix.double().norm().item()
        ell = max(sigma[-1].item(), tau)
        observed, left = observe(matrix.to(site.device), trials.to(site.device), 1.01)
        error = abs(observed.item() - ell)
        if not error <= ELL_ERROR * ell + NOISE * (ell < NOISE):
            raise Fault(f"{name}: ell: found {observed.item():.6g}, expected {ell:.6g}")
        errors = schedule_errors(sigma / 1.01, trials)
        difference = (left.cpu() - errors).abs().max().item()
        if not difference <= RESIDUAL_ERROR:
            raise Fault(f"{name}: residuals: found {left.tolist()}, expected {errors.tolist()}")
        worst = max(worst, difference)
    return {"cases": list(cases), "worst": worst}


def spectra_figure(values: Sequence[Values]) -> str:
    """Format the greatest difference over all matrices and ranks."""
    worst = max(value["worst"] for value in values)
    return f"{', '.join(values[0]['cases'])}: residuals within {worst:.1e} of the CPU's"
