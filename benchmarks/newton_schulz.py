"""Newton-Schulz by shape, steps and dtype against the machine's own GEMM rate.

``python -m benchmarks.newton_schulz``. The rate is that of one square product of the same short
side (the best of the square and of the shape's own ``X X^T``), measured in the same rounds.
``effective`` counts the flops of the standard form, whatever a form saves; ``executed`` counts the
flops that run.

``--owned-by-rank-of 32`` measures instead the work of one rank in an optimizer step: the matrices
of ``--model`` that the busiest of so many ranks owns, in the batches that the optimizer makes of
them under a uniform schedule. The rate is then that of a square product of the longest
side.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from amo_dist.config import MuonConfig
from amo_dist.distributed.plan import assign, load_by_rank, plan_exchange
from amo_dist.kernels.newton_schulz import NS_BACKENDS, orthogonalize, step_sizes
from amo_dist.schedule.allocate import ns_step_flops
from amo_dist.schedule.polar_express import compose
from benchmarks.measure import paired, ratio, report
from benchmarks.shapes import MODELS
from torchtitan_ext.tools.step_cost import OWNERSHIPS, lay_out

SHAPES = ("512x512", "1024x1024", "512x1536", "1024x3072", "256x1024")
LARGE_SHAPES = ("2048x2048", "2048x6144")

Batch = tuple[int, tuple[int, int]]
"""Number and shape of matrices that are orthogonalized by one call."""


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.newton_schulz", description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--large", action="store_true", help=f"also {' '.join(LARGE_SHAPES)}")
    parser.add_argument("--owned-by-rank-of", type=int, metavar="RANKS")
    parser.add_argument("--model", choices=MODELS, default="Qwen3-1.7B")
    parser.add_argument("--ownership", choices=OWNERSHIPS, default=MuonConfig().ownership)
    parser.add_argument("--steps", nargs="+", type=int, default=[5])
    parser.add_argument("--ell", type=float, default=1e-3, help="the schedules are composed for it")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(args)
    torch.set_num_threads(options.threads)
    shapes = [*options.shapes, *(LARGE_SHAPES if options.large else ())]
    cases: Sequence[Callable[..., list[dict[str, object]]]] = (
        [functools.partial(measure, shape) for shape in shapes]
        if options.owned_by_rank_of is None
        else [measure_owned]
    )
    rows = [
        row
        for dtype in options.dtypes
        for case in cases
        for steps in options.steps
        for row in case(steps, getattr(torch, dtype), options)
    ]
    name = "newton_schulz" if options.owned_by_rank_of is None else "newton_schulz_owned"
    report(name, rows, options.output, vars(options))
    return 0


def flops(sizes: Sequence[int], shape: Sequence[int]) -> float:
    """Flops of steps taken one or two at once; full products, also where half of one is computed.

    Args:
        sizes: Numbers of steps taken at once.
        shape: ``(m, n)``, either side short.
    """
    m, n = sorted(shape)
    # A pair takes two products by X less than two steps, and three small ones more.
    saved_by_pair = 2 * 2.0 * m * m * n - 3 * 2.0 * m**3
    return sum(sizes) * ns_step_flops(m, n) - list(sizes).count(2) * saved_by_pair


def contenders(
    batches: Sequence[Tensor],
    steps: int,
    dtype: torch.dtype,
    names: Sequence[str],
    ell: float,
) -> dict[str, Callable[[], object]]:
    """Functions that run each backend on all batches."""
    runs: dict[str, Callable[[], object]] = {}
    for name in names:
        function = functools.partial(
            orthogonalize, coefficients=_coefficients(ell, steps), dtype=dtype, backend=name
        )
        runs[name] = lambda function=function: [function(x) for x in batches]
    return runs


def _coefficients(ell: float, steps: int) -> tuple[tuple[float, float, float], ...]:
    return tuple(compose(1.01 * ell, steps))


def measure(
    shape: str, steps: int, dtype: torch.dtype, options: argparse.Namespace
) -> list[dict[str, object]]:
    """One row for each backend of one shape."""
    m, n = (int(size) for size in shape.split("x"))
    coefficients = _coefficients(options.ell, steps)
    x = torch.randn(m, n, generator=torch.Generator().manual_seed(0)).to(options.device)
    cast = x.to(dtype)
    square = cast[:, :m].contiguous()

    sizes = {name: step_sizes(name, (m, n), coefficients, dtype, x.device) for name in NS_BACKENDS}
    names = [name for name in NS_BACKENDS[1:] if name == "standard" or 2 in sizes[name]]
    by_label = contenders([x], steps, dtype, names, options.ell)
    products = {
        "gemm square": lambda: square @ square,
        "gemm X X^T": lambda: cast @ cast.mT,
    }
    seconds = paired({**products, **by_label}, options.rounds, clock=options.clock)
    peak = max(
        2 * m**3 / statistics.median(seconds["gemm square"]),
        2 * m * m * n / statistics.median(seconds["gemm X X^T"]),
    )
    exact = orthogonalize(x, coefficients, dtype=torch.float64, backend="standard")
    rows: list[dict[str, object]] = []
    for name in by_label:
        star = " (auto)" if sizes["auto"] == sizes[name] else ""
        time = statistics.median(seconds[name])
        result = orthogonalize(x, coefficients, dtype=dtype, backend=name).double()
        rows.append(
            {
                "dtype": str(dtype).removeprefix("torch."),
                "shape": shape,
                "steps": steps,
                "backend": name + star,
                "at once": "".join(map(str, sizes[name])),
                "ms": 1e3 * time,
                "of standard": ratio(seconds, name, "standard"),
                "gemm GF/s": peak / 1e9,
                "effective %": 100 * flops((1,) * steps, (m, n)) / time / peak,
                "executed %": 100 * flops(sizes[name], (m, n)) / time / peak,
                "error": ((result - exact).norm() / exact.norm()).item(),
            }
        )
    return rows


def owned_batches(
    model: str, ranks: int, *, steps: int, ownership: str, itemsize: int
) -> list[Batch]:
    """Batches that the busiest of ``ranks`` orthogonalizes in a step, sharded by FSDP2."""
    registry = MODELS[model].matrices()
    matrices = lay_out(registry, ranks)
    costs = [float(steps * ns_step_flops(*info.shape)) for info in registry]
    jobs = assign(matrices, costs, ownership=ownership)
    loads = load_by_rank({job.matrix: job.owner for job in jobs}, costs)
    plan = plan_exchange(
        matrices,
        jobs,
        rank=max(loads, key=lambda rank: loads[rank]),
        peers=range(ranks),
        itemsize=itemsize,
        bucket_bytes=MuonConfig().bucket_bytes,
    )
    return [
        (count, shape)
        for bucket in (*plan.local, *plan.buckets)
        for shape, count in Counter(matrices[index].shape for index in bucket.owned).items()
    ]


def measure_owned(
    steps: int, dtype: torch.dtype, options: argparse.Namespace
) -> list[dict[str, object]]:
    """One row for each backend, of a rank's share of an optimizer step."""
    ranks, device = options.owned_by_rank_of, options.device
    owned = owned_batches(
        options.model, ranks, steps=steps, ownership=options.ownership, itemsize=dtype.itemsize
    )
    generator = torch.Generator().manual_seed(0)
    batches = [
        torch.randn(count, *shape, generator=generator).to(device, dtype) for count, shape in owned
    ]
    side = max(size for _, shape in owned for size in shape)
    square = torch.randn(side, side, generator=generator).to(device, dtype)
    by_label = contenders(batches, steps, dtype, ("standard", "auto"), options.ell)
    gemm = {"gemm": lambda: square @ square}
    seconds = paired({**gemm, **by_label}, options.rounds, clock=options.clock)
    peak = 2 * side**3 / statistics.median(seconds["gemm"])
    effective = float(sum(count * steps * ns_step_flops(*shape) for count, shape in owned))
    rows: list[dict[str, object]] = []
    for label in by_label:
        time = statistics.median(seconds[label])
        executed = sum(
            count * _executed(shape, steps, dtype, label, options) for count, shape in owned
        )
        rows.append(
            {
                "dtype": str(dtype).removeprefix("torch."),
                "model": options.model,
                "ranks": ranks,
                "matrices": sum(count for count, _ in owned),
                "calls": len(owned),
                "steps": steps,
                "backend": label,
                "ms": 1e3 * time,
                "of standard": ratio(seconds, label, "standard"),
                "TFLOP/s": effective / time / 1e12,
                "gemm TFLOP/s": peak / 1e12,
                "effective %": 100 * effective / time / peak,
                "executed %": 100 * executed / time / peak,
            }
        )
    return rows


def _executed(
    shape: tuple[int, int],
    steps: int,
    dtype: torch.dtype,
    name: str,
    options: argparse.Namespace,
) -> float:
    coefficients, device = _coefficients(options.ell, steps), torch.device(options.device)
    return flops(step_sizes(name, shape, coefficients, dtype, device), shape)


if __name__ == "__main__":
    raise SystemExit(main())
