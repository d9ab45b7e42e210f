"""Checks of the machines: bytes of all-to-alls, spectra against a decomposition on the CPU."""

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
"""What the kernels promise of ``ell``."""
NOISE = 1e-6
"""Of singular values over the norm: what cannot be told from 0."""
RESIDUAL_ERROR = 1e-3
"""Of mean squared residuals: five steps lift a singular value of 1e-7 that is rounding to 1e-4."""

_COEFFICIENTS = tuple(composed(1e-3, 5).coefficients)

Values = Mapping[str, Any]


def checks(site: Site) -> list[Check]:
    """All checks of this file, in the order in which they run."""
    return [
        Check(
            "all-to-all",
            functools.partial(all_to_all, site),
            tell_all_to_all,
            skip="" if site.world_size > 1 else "needs 2 ranks",
        ),
        Check("spectra", functools.partial(spectra, site), tell_spectra, is_collective=False),
    ]


# ------------------------------------------------------------------ all-to-all


def all_to_all(site: Site) -> int:
    """Exchange bytes in zero and odd numbers, as ranks exchange matrices; how many this rank sent.

    Raises:
        Fault: Other bytes have arrived.
    """
    rank, size = site.rank, site.world_size
    most = 2**26 if site.is_cuda else 2**22
    send = [_num_bytes(rank, other, most // size) for other in range(size)]
    receive = [_num_bytes(other, rank, most // size) for other in range(size)]
    sent = torch.cat([_bytes(rank, other, n, site.device) for other, n in enumerate(send)])
    found = sent.new_zeros(sum(receive))
    dist.all_to_all_single(found, sent, receive, send)
    parts = [_bytes(other, rank, n, site.device) for other, n in enumerate(receive)]
    for other, (part, expected) in enumerate(zip(found.split(receive), parts, strict=True)):
        if not torch.equal(part, expected):
            raise Fault(f"from rank {other}: found other bytes than the {len(part)} that it sent")
    return len(sent)


def _num_bytes(source: int, target: int, most: int) -> int:
    """None to oneself and to some; to the others an odd number."""
    share = (3 * source + 5 * target) % 4
    return 0 if source == target or not share else most * share // 3 // 2 * 2 + 1


def _bytes(source: int, target: int, count: int, device: torch.device) -> Tensor:
    numbers = torch.arange(count, device=device)
    return ((7 * numbers + 31 * source + 17 * target) % 251).to(torch.uint8)


def tell_all_to_all(values: Sequence[int]) -> str:
    """Of the rank that sent the most."""
    return f"{max(values):,} bytes in uneven parts"


# ------------------------------------------------------------------ spectra


def spectra(site: Site) -> dict[str, Any]:
    """How far what is observed of hard matrices is off from a decomposition on the CPU.

    Raises:
        Fault: By more than the kernels promise.
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
        found = observe(matrix.to(site.device), trials.to(site.device), 1.01).cpu()
        off = abs(found[0].item() - ell)
        if not off <= ELL_ERROR * ell + NOISE * (ell < NOISE):
            raise Fault(f"{name}: ell: found {found[0].item():.6g}, expected {ell:.6g}")
        errors = schedule_errors(sigma / 1.01, trials).view(-1)
        difference = (found[1:] - errors).abs().max().item()
        if not difference <= RESIDUAL_ERROR:
            raise Fault(
                f"{name}: residuals: found {found[1:].tolist()}, expected {errors.tolist()}"
            )
        worst = max(worst, difference)
    return {"cases": list(cases), "worst": worst}


def tell_spectra(values: Sequence[Values]) -> str:
    """Of all matrices."""
    worst = max(one["worst"] for one in values)
    return f"{', '.join(values[0]['cases'])}: residuals within {worst:.1e} of the CPU's"
