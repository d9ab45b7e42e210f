"""Checks of machines and network, without the optimizer."""

from __future__ import annotations

import functools
import os
import re
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from amo_dist.doctor.examination import Check
from amo_dist.doctor.site import Fault, Site, name_ranks
from amo_dist.kernels.newton_schulz import orthogonalize
from amo_dist.kernels.spectrum import spectrum
from amo_dist.schedule.polar_express import schedule_for

# Relative difference of a result in bfloat16: five steps lift roundings of 2^-9 to 0.01.
DIFFERENCE = 0.05
# Relative error of ``ell`` that the kernels promise.
ELL_ERROR = 1e-3
# Time of a rank over the median at which its device counts as slow.
SLOW = 2.0
# Timings, of which the shortest counts: the others include connections, or something disturbed.
TIMINGS = 5


def checks(site: Site, folder: Path | None = None) -> list[Check]:
    """List the checks of arithmetic, network and the disk of a folder, if one is given."""
    alone = "" if site.world_size > 1 else "needs 2 ranks"
    figure = functools.partial(arithmetic_figure, compares=site.is_cuda)
    listed = [
        Check("arithmetic", functools.partial(arithmetic, site), figure),
        Check("network", functools.partial(network, site), speed_figure, skip=alone),
    ]
    if folder is not None:
        listed.append(Check("disk", functools.partial(disk, site, folder), speed_figure))
    return listed


def require_usable_driver() -> None:
    """Refuse NVIDIA's driver under which this PyTorch sees no GPU, unless the GPUs are hidden.

    Raises:
        ValueError: Names the driver's version and that of PyTorch.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None and (version := nvidia_driver()):
        raise ValueError(
            f"AMO_DEVICE: found NVIDIA's driver {version} on {socket.gethostname()}, under which "
            f"PyTorch {torch.__version__}, built for CUDA {torch.version.cuda}, sees no GPU; "
            "expected a driver and a build that fit (launch/README.md has a table); "
            "AMO_DEVICE=cpu runs on CPUs"
        )


def nvidia_driver() -> str:
    """Version of NVIDIA's driver whose devices this process may use; empty without one."""
    version = Path("/proc/driver/nvidia/version")
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    # A container without GPUs shows the version of its host, but not the device.
    if is_hidden or not (version.exists() and Path("/dev/nvidiactl").exists()):
        return ""
    number = re.search(r"\d+\.\d[\d.]*", version.read_text())
    return number[0] if number else "of an unknown version"


# ------------------------------------------------------------------ arithmetic


def arithmetic(site: Site) -> dict[str, float]:
    """Compare Newton-Schulz and ``ell`` on the device with those on the CPU.

    Returns:
        The greatest relative ``difference`` of Newton-Schulz, and the ``seconds`` of one.

    Raises:
        Fault: They differ by more than rounding explains.
    """
    # A device gets a batch: one matrix would take it less time than the launches take the CPU.
    batch, m, n = (16, 1024, 1536) if site.is_cuda else (1, 128, 192)
    generator = torch.Generator("cpu").manual_seed(0)
    full = torch.randn(m, n, generator=generator, device="cpu")
    graded = full * torch.logspace(0, -4, m, device="cpu").unsqueeze(-1)
    ell = spectrum(graded)[0].item()
    observed = spectrum(graded.to(site.device))[0].item()
    if not abs(observed - ell) <= ELL_ERROR * ell:
        raise Fault(f"ell: found {observed:.6g}, expected {ell:.6g}")
    coefficients = schedule_for(1e-3, 5).coefficients
    expected = orthogonalize(full, coefficients, dtype=torch.float32)
    stack = full.to(site.device).repeat(batch, 1, 1)
    run = functools.partial(orthogonalize, stack, coefficients, dtype=torch.bfloat16)
    count = 100 if site.is_cuda else 1  # a device raises its clock only under load
    difference = ((run()[0].float().cpu() - expected).norm() / expected.norm()).item()
    if not difference <= DIFFERENCE:
        raise Fault(f"the result differs by {difference:.3g} from the CPU's")
    return {"difference": difference, "seconds": least_seconds(run, site, count)}


def least_seconds(run: Callable[[], object], site: Site, count: int) -> float:
    """Seconds of one call, from the shortest of `TIMINGS` of so many."""
    seconds = []
    for _ in range(TIMINGS):
        start = time.perf_counter()
        for _ in range(count):
            run()
        if site.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds) / count


def arithmetic_figure(values: Sequence[Mapping[str, float]], *, compares: bool) -> str:
    """Format the greatest difference and time.

    Args:
        values: Values of all ranks.
        compares: Whether ranks have a device each, so that their times can be compared.

    Raises:
        Fault: A device is slow.
    """
    seconds = [value["seconds"] for value in values]
    median = sorted(seconds)[len(seconds) // 2]
    slow = [rank for rank, value in enumerate(seconds) if value > SLOW * median]
    if compares and slow:
        times = max(seconds) / median
        raise Fault(f"{name_ranks(slow)}: {times:.1f} times as slow as the median")
    difference = max(value["difference"] for value in values)
    return f"within {difference:.1e} of the CPU's, {max(seconds) * 1e3:.2f} ms each"


# ------------------------------------------------------------------ network and disk


def network(site: Site) -> float:
    """Exchange odd numbers of bytes, and none with some ranks, as ranks exchange matrices.

    Returns:
        Bytes per second that this rank sends.

    Raises:
        Fault: Other bytes than the sent ones arrived.
    """
    rank, ranks = site.rank, range(site.world_size)
    most = (2**26 if site.is_cuda else 2**22) // site.world_size

    def content(source: int, target: int) -> torch.Tensor:
        share = (3 * source + 5 * target) % 4
        numbers = torch.arange(most * share // 3 | 1 if share else 0, device=site.device)
        return ((7 * numbers + 31 * source + 17 * target) % 251).to(torch.uint8)

    sent, expected = ([content(rank, r) for r in ranks], [content(r, rank) for r in ranks])
    receives, sends = [len(part) for part in expected], [len(part) for part in sent]
    received, outgoing = torch.cat(expected).zero_(), torch.cat(sent)
    send = functools.partial(dist.all_to_all_single, received, outgoing, receives, sends)
    seconds = least_seconds(send, site, count=1)
    dist.all_reduce(torch.ones(1, device="cpu"))  # over gloo, as asynchronous checkpoints meet
    for other, part in enumerate(received.split(receives)):
        if not torch.equal(part, expected[other]):
            raise Fault(f"from rank {other}: found other bytes than the {len(part)} that it sent")
    return sum(sends) / seconds


def disk(site: Site, folder: Path) -> float:
    """Write a file to the disk, read it, and delete it.

    Returns:
        Bytes per second of writing.

    Raises:
        Fault: The folder takes no file, or other bytes came back.
    """
    data = os.urandom(2**26 if site.is_cuda else 2**20)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-") as file:
            start = time.perf_counter()
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            seconds = time.perf_counter() - start
            if Path(file.name).read_bytes() != data:
                raise Fault(f"{file.name}: found other bytes than were written")
    except (OSError, ValueError) as error:
        raise Fault(f"{folder}: found no folder that takes a file: {error}") from None
    return len(data) / seconds


def speed_figure(values: Sequence[float]) -> str:
    """Format the bytes per second of the slowest rank."""
    return f"{min(values) / 1e9:.3f} GB/s on the slowest rank"
