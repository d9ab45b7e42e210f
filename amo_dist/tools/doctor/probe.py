"""Checks of a minute before training: one Newton-Schulz, an all-reduce, and the disk."""

from __future__ import annotations

import functools
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from amo_dist.kernels.newton_schulz import orthogonalize
from amo_dist.schedule.polar_express import composed
from amo_dist.tools.doctor.examination import Check
from amo_dist.tools.doctor.models import normal
from amo_dist.tools.doctor.site import Fault, Site, name_ranks

DIFFERENCE = 0.05
"""Relative difference of a result in bfloat16: five steps lift roundings of 2^-9 to 0.01."""
SLOW = 2.0
"""Time of a rank over the median at which its device counts as slow."""

_COEFFICIENTS = tuple(composed(1e-3, 5).coefficients)

Values = Mapping[str, Any]


def checks(site: Site, folder: Path) -> list[Check]:
    """List the checks of this file in the order in which they run.

    Args:
        site: Ranks of the examination.
        folder: Folder on the disk to check.
    """
    return [
        Check(
            "newton-schulz",
            functools.partial(newton_schulz, site),
            functools.partial(newton_schulz_figure, compares=site.is_cuda),
            is_collective=False,
        ),
        Check("disk", functools.partial(disk, site, folder), disk_figure, is_collective=False),
        Check(
            "all-reduce",
            functools.partial(all_reduce, site),
            all_reduce_figure,
            skip="" if site.world_size > 1 else "needs 2 ranks",
        ),
    ]


def newton_schulz(site: Site) -> dict[str, float]:
    """Compare one Newton-Schulz of the device with one in float32 on the CPU.

    Returns:
        The relative ``difference``, and the ``seconds`` of five more.

    Raises:
        Fault: They differ by more than rounding explains.
    """
    matrix = normal("probe", (1024, 1536) if site.is_cuda else (128, 192))
    expected = orthogonalize(matrix, _COEFFICIENTS, dtype=torch.float32)
    on_device = matrix.to(site.device)
    run = functools.partial(orthogonalize, on_device, _COEFFICIENTS, dtype=torch.bfloat16)
    result = run().float().cpu()
    difference = ((result - expected).norm() / expected.norm()).item()
    if not difference <= DIFFERENCE:
        raise Fault(f"the result differs by {difference:.3g} from the CPU's")
    start = time.perf_counter()
    for _ in range(5):
        run()
    if site.is_cuda:
        torch.cuda.synchronize()
    return {"difference": difference, "seconds": time.perf_counter() - start}


def newton_schulz_figure(values: Sequence[Values], *, compares: bool) -> str:
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
    return f"within {difference:.1e} of the CPU's, {max(seconds) * 200:.2f} ms each"


def disk(site: Site, folder: Path) -> float:
    """Write a file to the disk, read it, and delete it.

    Returns:
        Bytes per second of writing.

    Raises:
        Fault: Other bytes came back.
    """
    data = os.urandom(2**26 if site.is_cuda else 2**20)
    path = folder / f".probe-{socket.gethostname()}-{site.rank}-{os.getpid()}"
    try:
        start = time.perf_counter()
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        seconds = time.perf_counter() - start
        if path.read_bytes() != data:
            raise Fault(f"{path}: found other bytes than were written")
    finally:
        path.unlink(missing_ok=True)
    return len(data) / seconds


def disk_figure(values: Sequence[float]) -> str:
    """Format the sum of all ranks' speeds, and the slowest one."""
    return f"{sum(values) / 1e9:.2f} GB/s together, the slowest rank {min(values) / 1e9:.3f}"


def all_reduce(site: Site) -> float:
    """Sum a tensor over all ranks, and check every entry.

    Returns:
        Bytes per second.

    Raises:
        Fault: The sum is wrong.
    """
    numbers = torch.arange(2**24 if site.is_cuda else 2**18, device=site.device) % 1009
    tensor = (numbers + site.rank).float()  # Sums below 2^24 are exact in float32.
    expected = site.world_size * numbers + site.world_size * (site.world_size - 1) // 2
    start = time.perf_counter()
    dist.all_reduce(tensor)
    if site.is_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    if not torch.equal(tensor, expected.float()):
        raise Fault("the sum of all ranks is wrong")
    return tensor.numel() * 4 / seconds


def all_reduce_figure(values: Sequence[float]) -> str:
    """Format the speed of the slowest rank."""
    return f"the sum of {len(values)} ranks, {min(values) / 1e9:.2f} GB/s"
