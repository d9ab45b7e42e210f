"""Checks of the machines: versions and settings, all-to-alls, spectra, Newton-Schulz by backend."""

from __future__ import annotations

import functools
import os
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import collect_env
from torch.utils.benchmark import Timer

from amo_dist.config import NS_BACKENDS
from amo_dist.kernels.newton_schulz import orthogonalize, resolve_backend
from amo_dist.kernels.spectra import DEFAULT_TAU, observe, schedule_errors
from amo_dist.schedule.polar_express import composed
from amo_dist.tools.doctor.examination import Check, alike
from amo_dist.tools.doctor.models import normal
from amo_dist.tools.doctor.site import Fault, Site
from amo_dist.tools.shapes import DecoderShape, Model

NS_ERROR = 0.05
"""Most of Newton-Schulz in bfloat16 against float64, relative to the norm: each backend has about
0.01, the rounding of five steps."""
ELL_ERROR = 1e-3
"""What the kernels promise of ``ell``."""
NOISE = 1e-6
"""Of singular values over the norm: what cannot be told from 0."""
RESIDUAL_ERROR = 1e-3
"""Of mean squared residuals: five steps lift a singular value of 1e-7 that is rounding to 1e-4."""
WORTH = 0.95
"""Share of the time of ``standard`` that another backend must stay below to be advised."""

_COEFFICIENTS = tuple(composed(1e-3, 5).coefficients)
_DECIDING = ("NCCL_", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "OMP_NUM_THREADS")
"""Beginnings of the variables that decide how ranks run."""

Values = Mapping[str, Any]


def checks(site: Site, model: Model) -> list[Check]:
    """All checks of this file, in the order in which they run.

    Args:
        site: Where.
        model: Newton-Schulz is measured on its matrices.
    """
    return [
        Check("settings", functools.partial(settings, site), tell_settings),
        Check(
            "all-to-all",
            functools.partial(all_to_all, site),
            tell_all_to_all,
            skip="" if site.world_size > 1 else "needs 2 ranks",
        ),
        Check("spectra", functools.partial(spectra, site), tell_spectra, is_collective=False),
        Check(
            "newton-schulz",
            functools.partial(newton_schulz, site, model.shape),
            tell_newton_schulz,
            is_collective=False,
        ),
    ]


def seconds_of(run: Callable[[], object]) -> float:
    """Mean of three calls after two, on devices until their work is done."""
    threads = torch.get_num_threads()
    return Timer("run()", globals={"run": run}, num_threads=threads).timeit(3).mean


# ------------------------------------------------------------------ versions and settings


def settings(site: Site) -> dict[str, Any]:
    """What runs here, and what launcher and environment leave a rank.

    Returns:
        ``alike``: what all ranks must have; ``cpus`` of this rank, and bytes ``outside`` of
        PyTorch: NCCL's buffers, the context, and what other processes hold.
    """
    common = {"python": platform.python_version(), "torch": torch.__version__}
    outside = 0
    if site.is_cuda:
        common |= {
            "cuda": str(torch.version.cuda),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "driver": str(collect_env.get_nvidia_driver_version(collect_env.run)),
        }
        free, total = torch.cuda.mem_get_info(site.device)
        outside = total - free - torch.cuda.memory_reserved(site.device)
    device = torch.cuda.get_device_name(site.device) if site.is_cuda else platform.machine()
    common |= {"device": device, "float32 products": torch.get_float32_matmul_precision()}
    common |= {key: os.environ[key] for key in sorted(os.environ) if key.startswith(_DECIDING)}
    neighbours = next(len(ranks) for ranks in site.nodes if site.rank in ranks)
    cpus = len(os.sched_getaffinity(0)) / neighbours
    return {"alike": common, "cpus": cpus, "outside": outside}


def tell_settings(values: Sequence[Values]) -> str:
    """All of them, once; raises `Fault` where ranks differ."""
    known = {key for one in values for key in one["alike"]}
    alike([{key: one["alike"].get(key, "none") for key in sorted(known)} for one in values])
    told = [f"{name} {found}" for name, found in values[0]["alike"].items()]
    told.append(f"{min(one['cpus'] for one in values):.3g} CPUs a rank")
    if outside := max(one["outside"] for one in values):
        told.append(f"{outside / 2**20:.0f} MiB outside PyTorch")
    return ", ".join(told)


# ------------------------------------------------------------------ all-to-all


def all_to_all(site: Site) -> dict[str, float]:
    """Exchange bytes in zero and odd numbers, as ranks exchange matrices; GB/s out of this rank.

    Raises:
        Fault: Other bytes have arrived.
    """
    rank, size = site.rank, site.world_size
    most = 2**12 if site.is_quick else 2**26 if site.is_cuda else 2**22
    send = [_num_bytes(rank, other, most // size) for other in range(size)]
    receive = [_num_bytes(other, rank, most // size) for other in range(size)]
    sent = torch.cat([_bytes(rank, other, n, site.device) for other, n in enumerate(send)])
    found = sent.new_zeros(sum(receive))

    def run() -> None:
        dist.all_to_all_single(found, sent, receive, send)

    seconds = seconds_of(run)
    parts = [_bytes(other, rank, n, site.device) for other, n in enumerate(receive)]
    for other, (part, expected) in enumerate(zip(found.split(receive), parts, strict=True)):
        if not torch.equal(part, expected):
            raise Fault(f"from rank {other}: found other bytes than the {len(part)} that it sent")
    return {"bytes": len(sent), "rate": len(sent) / seconds / 1e9}


def _num_bytes(source: int, target: int, most: int) -> int:
    """None to oneself and to some; to the others an odd number."""
    share = (3 * source + 5 * target) % 4
    return 0 if source == target or not share else most * share // 3 // 2 * 2 + 1


def _bytes(source: int, target: int, count: int, device: torch.device) -> Tensor:
    numbers = torch.arange(count, device=device)
    return ((7 * numbers + 31 * source + 17 * target) % 251).to(torch.uint8)


def tell_all_to_all(values: Sequence[Values]) -> str:
    """The slowest of all ranks."""
    slow = min((one for one in values if one["bytes"]), key=lambda one: one["rate"])
    return f"{slow['bytes']:,} bytes in uneven parts, {slow['rate']:.3g} GB/s out of a rank"


# ------------------------------------------------------------------ spectra


def spectra(site: Site) -> dict[str, Any]:
    """How far what is observed of hard matrices is off from a decomposition on the CPU.

    Raises:
        Fault: By more than the kernels promise.
    """
    m, n = (1024, 1536) if site.is_cuda and not site.is_quick else (192, 320)
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


# ------------------------------------------------------------------ Newton-Schulz


def newton_schulz(site: Site, shape: DecoderShape) -> dict[str, Any]:
    """Milliseconds for the matrices of a block, one by one in bfloat16, and the largest error.

    Returns:
        Of each backend that runs here.

    Raises:
        Fault: A backend fails, or is off by more than `NS_ERROR`.
    """
    counts = Counter(info.shape for info in shape.block())
    found = {name: {"ms": 0.0, "error": 0.0} for name in NS_BACKENDS if _differs(name, counts)}
    for (m, n), count in counts.items():
        x = normal("newton-schulz", (m, n)).to(site.device)
        exact = orthogonalize(x, _COEFFICIENTS, dtype=torch.float64, backend="standard")
        for name, row in list(found.items()):
            run = functools.partial(orthogonalize, x, _COEFFICIENTS, backend=name)
            try:
                error = ((run().double() - exact).norm() / exact.norm()).item()
                row["ms"] += 1e3 * count * seconds_of(run)
            except ValueError:  # not on this device
                del found[name]
                continue
            except Exception as cause:  # a compiler's, too
                raise Fault(f"{name} at {m} x {n}: {type(cause).__name__}: {cause}") from cause
            if not error <= NS_ERROR:
                raise Fault(
                    f"{name} at {m} x {n}: found an error of {error:.3g}, expected at most "
                    f"{NS_ERROR}"
                )
            row["error"] = max(row["error"], error)
    return found


def _differs(name: str, shapes: Iterable[tuple[int, int]]) -> bool:
    """Whether a backend is one of its own for some shape, and does not give way to another."""
    cpu, dtype = torch.device("cpu"), torch.bfloat16
    return any(resolve_backend(name, shape, _COEFFICIENTS, dtype, cpu) == name for shape in shapes)


def tell_newton_schulz(values: Sequence[Values]) -> str:
    """Milliseconds of the slowest rank, and what to set ``ns_backend`` to."""
    common = [name for name in values[0] if all(name in one for one in values)]
    slowest = {name: max(one[name]["ms"] for one in values) for name in common}
    best = min(slowest, key=slowest.__getitem__)
    best = best if slowest[best] < WORTH * slowest["standard"] else "standard"
    told = ", ".join(f"{name} {ms:.3g} ms" for name, ms in slowest.items())
    worst = max(one[name]["error"] for one in values for name in common)
    return f"a block takes {told}; errors up to {worst:.1e}; advice: ns_backend = {best!r}"
