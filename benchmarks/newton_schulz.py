"""Newton-Schulz by shape, steps and dtype against the machine's own GEMM rate.

``python -m benchmarks.newton_schulz``. The rate is that of one square product of the same short
side (the best of the square and of the shape's own ``X X^T``), measured in the same rounds.
``effective`` counts the flops of the standard form, whatever a form saves; ``executed`` counts the
flops that run.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from amo_dist.kernels.newton_schulz import NS_BACKENDS, orthogonalize, step_sizes
from amo_dist.kernels.quack import library
from amo_dist.schedule.allocate import ns_step_flops
from amo_dist.schedule.polar_express import compose, times_safety
from benchmarks.measure import paired, ratio, report

SHAPES = ("512x512", "1024x1024", "512x1536", "1024x3072", "256x1024")
ELL, STEPS = 1e-3, 5


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.newton_schulz", description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--library", default="torch", choices=("torch", "quack"))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(args)
    torch.set_num_threads(1)
    rows = [
        row
        for dtype in options.dtypes
        for shape in options.shapes
        for row in measure(shape, getattr(torch, dtype), options)
    ]
    report("newton_schulz", rows, options.output, vars(options))
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


def measure(shape: str, dtype: torch.dtype, options: argparse.Namespace) -> list[dict[str, object]]:
    """One row for each backend of one shape."""
    m, n = (int(size) for size in shape.split("x"))
    coefficients = tuple(compose(times_safety(ELL), STEPS))
    x = torch.randn(m, n, generator=torch.Generator().manual_seed(0)).to(options.device)
    cast = x.to(dtype)
    square = cast[:, :m].contiguous()

    sizes = {name: step_sizes(name, (m, n), coefficients, dtype, x.device) for name in NS_BACKENDS}
    names = [name for name in NS_BACKENDS[1:] if name == "standard" or 2 in sizes[name]]
    products = library(options.library, x.device, dtype)
    run = functools.partial(orthogonalize, x, coefficients, dtype=dtype, library=products)
    runs = {name: functools.partial(run, backend=name) for name in names}
    gemms = {"gemm square": lambda: square @ square, "gemm X X^T": lambda: cast @ cast.mT}
    # One call would take a GPU less time than its launches take the CPU.
    count = 1 if options.device == "cpu" else 20

    def repeated(run: Callable[[], object]) -> Callable[[], None]:
        return lambda: [run() for _ in range(count)].clear()

    timed = {name: repeated(run) for name, run in {**gemms, **runs}.items()}
    seconds = paired(timed, options.rounds, clock=options.clock)
    peak = max(
        2 * count * m**3 / statistics.median(seconds["gemm square"]),
        2 * count * m * m * n / statistics.median(seconds["gemm X X^T"]),
    )
    exact = orthogonalize(x, coefficients, dtype=torch.float64, backend="standard")
    rows: list[dict[str, object]] = []
    for name, run in runs.items():
        star = " (auto)" if sizes["auto"] == sizes[name] else ""
        time = statistics.median(seconds[name]) / count
        result = run().double()
        rows.append(
            {
                "dtype": str(dtype).removeprefix("torch."),
                "shape": shape,
                "steps": STEPS,
                "backend": name + star,
                "at once": "".join(map(str, sizes[name])),
                "ms": 1e3 * time,
                "of standard": ratio(seconds, name, "standard"),
                "gemm GF/s": peak / 1e9,
                "effective %": 100 * flops((1,) * STEPS, (m, n)) / time / peak,
                "executed %": 100 * flops(sizes[name], (m, n)) / time / peak,
                "error": ((result - exact).norm() / exact.norm()).item(),
            }
        )
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
