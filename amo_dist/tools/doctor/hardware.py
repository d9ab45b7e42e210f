"""Checks of the machines: versions, bandwidth, rates of products, Newton-Schulz by backend."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import collect_env

from amo_dist.config import NS_BACKENDS, Triple
from amo_dist.engine.timing import slowest
from amo_dist.kernels.devices import make_kernels
from amo_dist.kernels.newton_schulz import orthogonalize
from amo_dist.schedule.budget import ns_step_flops
from amo_dist.schedule.polar_express import composed
from amo_dist.tools.doctor.examination import Check, alike
from amo_dist.tools.doctor.site import Fault, Site, local_index

ROUNDS = 5
"""Of which the median is taken."""
NS_STEPS = 5
NS_ERROR = 0.05
"""Most of Newton-Schulz in bfloat16 against float64, relative to the norm: each backend has about
0.01, the rounding of five steps."""

_MESSAGES = (2**12, 2**20, 2**23, 2**26, 2**28)
"""Bytes that a rank puts into a collective."""
_SIDES = (256, 512, 1024, 2048, 4096, 8192)

Values = Mapping[str, Any]


def checks(site: Site) -> list[Check]:
    """All checks of this file, in the order in which they run."""
    world = [range(site.world_size)]
    most = max(map(len, site.nodes))
    across = [local_index(site.nodes, index) for index in range(most)]
    is_flat = len(site.nodes) == 1
    return [
        Check("versions", functools.partial(versions, site.device), tell_versions),
        *(
            Check(
                f"bandwidth {where}",
                functools.partial(bandwidth, site, groups),
                tell_bandwidth,
                skip="" if any(len(ranks) > 1 for ranks in groups) else why,
            )
            for where, groups, why in (
                ("of the world", [] if is_flat else world, "that of the node"),
                ("within a node", site.nodes, "one rank a node"),
                ("across nodes", across, "one node"),
            )
        ),
        _local("products", products, site, tell_products),
        _local("memory and launches", memory, site, tell_memory),
        _local("newton-schulz", newton_schulz, site, tell_newton_schulz),
    ]


def _local(
    name: str,
    measure: Callable[[Site], Any],
    site: Site,
    tell: Callable[[Sequence[Any]], str],
) -> Check:
    return Check(name, functools.partial(measure, site), tell, is_collective=False)


def hardware_table(values_by_check: Mapping[str, Sequence[Values]]) -> dict[str, float]:
    """The figures that ``amo preflight --hardware`` takes, as far as they were measured.

    Of each the figure of the worst rank, as a step waits for it. What is measured is what is
    reached, so that the efficiencies beside it are 1. Units are those of ``hardware.toml`` there.

    Args:
        values_by_check: Values of all ranks of the checks that passed, by name.
    """
    found: dict[str, float] = {}
    for values in values_by_check.values():
        for rates in (one.get("hardware", {}) for one in values):
            for name, value in rates.items():
                is_time = name.endswith(("_us", "_half_dim"))
                worst = max if is_time else min
                found[name] = worst(value, found.get(name, value))
    schulz = values_by_check.get("newton-schulz", ())
    if schulz and "bf16_tflops" in found:
        found["ns_efficiency"] = min(one["ns_tflops"] for one in schulz) / found["bf16_tflops"]
        found["ns_half_dim"] = max(one["ns_half_dim"] for one in schulz)
    for where, name in (("within a node", "nvlink"), ("across nodes", "network")):
        values = [one for one in values_by_check.get(f"bandwidth {where}", ()) if one]
        if values:
            found[f"{name}_gb_per_s"] = min(one["all_to_all"] for one in values)
            found[f"{name}_efficiency"] = 1.0
            found["collective_us"] = max(one["latency_us"] for one in values)
    return found


# ------------------------------------------------------------------ time


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(run: Callable[[], object], device: torch.device, rounds: int = ROUNDS) -> float:
    """Of a call, once it has been made before."""
    seconds = []
    for turn in range(1 + rounds):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        if turn:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def climb(
    sizes: Sequence[int],
    make: Callable[[int], Callable[[], object]],
    site: Site,
    least: int = 1,
    group: dist.ProcessGroup | None = None,
) -> Iterator[tuple[int, float]]:
    """Sizes and median seconds, smallest first, while the next may take its share of the time.

    Args:
        sizes: Ascending, each at most eight times the work of the one before.
        make: What to measure at a size.
        site: Its ``share`` ends the climb.
        least: So many sizes are measured in any case.
        group: Of ranks that measure together: all stop where the slowest does.
    """
    for count, size in enumerate(sizes, start=1):
        seconds = slowest(median_seconds(make(size), site.device), group)
        yield size, seconds
        if count >= least and 8 * (1 + ROUNDS) * seconds > site.share:
            return


# ------------------------------------------------------------------ versions


def versions(device: torch.device) -> dict[str, Any]:
    """What must be alike on all ranks."""
    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    if device.type != "cuda":
        return {**found, "device": platform.machine()}
    return {
        **found,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "driver": collect_env.get_nvidia_driver_version(collect_env.run),
        "device": torch.cuda.get_device_name(device),
    }


def tell_versions(values: Sequence[Values]) -> str:
    """All of them, once; raises `Fault` where ranks differ."""
    alike(values)
    return ", ".join(f"{name} {found}" for name, found in values[0].items())


# ------------------------------------------------------------------ bandwidth


def bandwidth(site: Site, groups: Sequence[Sequence[int]]) -> dict[str, float]:
    """GB/s that leave this rank, in an all-to-all and an all-reduce of each group at once.

    Args:
        site: Where.
        groups: Disjoint; a rank that is in none takes part in making them.

    Raises:
        Fault: Wrong values have arrived.
    """
    mine = None
    for ranks in groups:
        group = dist.new_group(list(ranks)) if len(ranks) > 1 else None
        mine = group if site.rank in ranks else mine
    if mine is None:
        return {}
    rank, size = dist.get_rank(mine), dist.get_world_size(mine)
    _check_contents(rank, size, site.device, mine)

    def tensor(num_bytes: int) -> Tensor:
        count = max(1, num_bytes // 4 // size) * size
        return torch.ones(count, dtype=torch.float32, device=site.device)

    def all_to_all(num_bytes: int) -> Callable[[], object]:
        sent, received = tensor(num_bytes), tensor(num_bytes)
        return lambda: dist.all_to_all_single(received, sent, group=mine)

    def all_reduce(num_bytes: int) -> Callable[[], object]:
        summed = tensor(num_bytes)
        return lambda: dist.all_reduce(summed, group=mine)

    exchanged = list(climb(_MESSAGES, all_to_all, site, 2, mine))
    reduced = list(climb(_MESSAGES, all_reduce, site, 2, mine))
    leaves = (size - 1) / size / 1e9
    return {
        "all_to_all": leaves * max(num_bytes / seconds for num_bytes, seconds in exchanged),
        # A ring sends every byte but its own share twice.
        "all_reduce": 2 * leaves * max(num_bytes / seconds for num_bytes, seconds in reduced),
        "latency_us": 1e6 * exchanged[0][1],
        "largest_bytes": exchanged[-1][0],
    }


def _check_contents(rank: int, size: int, device: torch.device, group: dist.ProcessGroup) -> None:
    everyone = torch.arange(size, dtype=torch.float32, device=device)
    received = torch.empty_like(everyone)
    dist.all_to_all_single(received, torch.full_like(everyone, rank), group=group)
    total = torch.full_like(everyone, rank)
    dist.all_reduce(total, group=group)
    if not torch.equal(received, everyone):
        raise Fault(f"all-to-all: found {received.tolist()}, expected a number of each rank")
    if not bool((total == size * (size - 1) / 2).all()):
        raise Fault(f"all-reduce: found {total.tolist()}, expected the sum of all ranks")


def tell_bandwidth(values: Sequence[Values]) -> str:
    """The slowest of all ranks."""
    found = [one for one in values if one]
    exchanged, reduced = (min(one[name] for one in found) for name in ("all_to_all", "all_reduce"))
    latency = max(one["latency_us"] for one in found)
    return (
        f"all-to-all {exchanged:.3g}, all-reduce {reduced:.3g} GB/s out of a rank; "
        f"{_MESSAGES[0] // 1024} KiB take {latency:.0f} us"
    )


# ------------------------------------------------------------------ rates


def _random(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    found = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    return found.to(device, dtype)


def _tflops(site: Site, dtype: torch.dtype) -> float:
    """Of the fastest square product."""

    def product(side: int) -> Callable[[], object]:
        x = _random(side, side, device=site.device, dtype=dtype)
        return functools.partial(torch.mm, x, x, out=torch.empty_like(x))

    return max(2e-12 * side**3 / seconds for side, seconds in climb(_SIDES, product, site))


def products(site: Site) -> dict[str, Any]:
    """TFLOP/s of this rank, by dtype."""
    found = {name: _tflops(site, getattr(torch, name)) for name in ("bfloat16", "float32")}
    return {**found, "hardware": {"bf16_tflops": found["bfloat16"]}}


def tell_products(values: Sequence[Values]) -> str:
    """Medians, and the slowest rank."""
    parts = []
    for name in ("bfloat16", "float32"):
        rates = [one[name] for one in values]
        rank = min(range(len(rates)), key=rates.__getitem__)
        slow = f" (slowest: rank {rank}, {rates[rank]:.3g})" if len(rates) > 1 else ""
        parts.append(f"{name} {statistics.median(rates):.3g} TFLOP/s{slow}")
    return ", ".join(parts)


def memory(site: Site) -> dict[str, Any]:
    """TB/s read and written by an addition, and microseconds to launch a kernel."""

    def add(count: int) -> Callable[[], object]:
        x = torch.ones(count, device=site.device)
        return functools.partial(torch.add, x, x, out=torch.empty_like(x))

    climbed = climb((2**20, 2**23, 2**26), add, site)
    # The same operand twice: it is read once from memory.
    rates = [8e-12 * count / seconds for count, seconds in climbed]
    one = torch.zeros(1, device=site.device)
    launches = 200
    seconds = median_seconds(lambda: [one.add_(1.0) for _ in range(launches)], site.device)
    figures = {
        "memory_gb": _memory_gb(site),
        "hbm_tb_per_s": rates[-1],
        "hbm_efficiency": 1.0,
        "kernel_us": 1e6 * seconds / launches,
    }
    return {"hardware": figures}


def _memory_gb(site: Site) -> float:
    if site.is_cuda:
        return torch.cuda.get_device_properties(site.device).total_memory / 1e9
    ranks = next(len(ranks) for ranks in site.nodes if site.rank in ranks)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9 / ranks


def tell_memory(values: Sequence[Values]) -> str:
    """The slowest of all ranks."""
    found = [one["hardware"] for one in values]
    rate, launch = min(one["hbm_tb_per_s"] for one in found), max(one["kernel_us"] for one in found)
    size = min(one["memory_gb"] for one in found)
    return f"{size:.3g} GB a rank, {1e3 * rate:.3g} GB/s, a launch {launch:.2g} us"


# ------------------------------------------------------------------ Newton-Schulz


def newton_schulz(site: Site) -> dict[str, Any]:
    """Milliseconds and error against float64 of each backend, in bfloat16, by shape.

    Besides two figures of a model of costs, in which the rate on a short side of ``n`` is
    ``ns_tflops * n / (n + ns_half_dim)``.
    """
    side = (2048 if site.is_cuda else 512) if site.share else 128
    coefficients = composed(1e-3, NS_STEPS).coefficients
    by_shape: dict[str, dict[str, Any]] = {}
    rates = []
    for m, n in ((side // 4, side // 4), (side, side), (side, 3 * side)):
        x = _random(m, n, device=site.device)
        exact = orthogonalize(x, coefficients, dtype=torch.float64, backend="standard")
        rows = by_shape[f"{m} x {n}"] = {}
        for name in ("auto", *_backends(x, coefficients)):
            run = functools.partial(orthogonalize, x, coefficients, backend=name)
            try:
                error = (run().double() - exact).norm() / exact.norm()
                milliseconds = 1e3 * median_seconds(run, site.device, rounds=3)
            except Exception as cause:  # a compiler's, too
                raise Fault(f"{name} at {m} x {n}: {type(cause).__name__}: {cause}") from cause
            rows[name] = {"ms": milliseconds, "error": error.item()}
        rates.append(1e-9 * NS_STEPS * ns_step_flops(m, n) / rows["auto"]["ms"])
    return {"shapes": by_shape, **_fit((side // 4, side), rates)}


def _fit(sides: Sequence[int], rates: Sequence[float]) -> dict[str, float]:
    """The model of costs through two rates; without a half dim where the smaller is no slower."""
    slope = (1 / rates[0] - 1 / rates[1]) / (1 / sides[0] - 1 / sides[1])
    least = 1 / rates[1] - slope / sides[1]
    if slope <= 0 or least <= 0:
        return {"ns_tflops": rates[1], "ns_half_dim": 1.0}
    return {"ns_tflops": 1 / least, "ns_half_dim": max(1.0, slope / least)}


def _backends(x: Tensor, coefficients: Sequence[Triple]) -> list[str]:
    """Those that run here by their own name; ``gram`` steps aside where it is not stable."""
    found = []
    for name in NS_BACKENDS[1:]:
        with contextlib.suppress(ValueError):
            kernels = make_kernels(
                x.device, ns_dtype=torch.bfloat16, ns_backend=name, cuda_graphs=False
            )
            if kernels.backend_name(x.shape, coefficients) == name:
                found.append(name)
    return found


def tell_newton_schulz(values: Sequence[Values]) -> str:
    """Milliseconds of the slowest rank and the largest error; raises `Fault` above `NS_ERROR`."""
    parts = []
    for shape, rows in list(values[0]["shapes"].items())[1:]:
        told = []
        for name in rows:
            of_ranks = [one["shapes"][shape].get(name, {"ms": 0.0, "error": 0.0}) for one in values]
            errors = [one["error"] for one in of_ranks]
            for rank, error in enumerate(errors):
                if not error <= NS_ERROR:
                    raise Fault(
                        f"{name} at {shape} on rank {rank}: found an error of {error:.3g}, "
                        f"expected at most {NS_ERROR}"
                    )
            slowest_ms = max(one["ms"] for one in of_ranks)
            told.append(f"{name} {slowest_ms:.3g} ms ({max(errors):.1e})")
        parts.append(f"{shape}: {', '.join(told)}")
    return "; ".join(parts)
