"""Newton-Schulz by shape, steps and dtype against the machine's own GEMM rate.

``python -m benchmarks.newton_schulz``. The rate is that of one square product of the same short
side (the best of the square and of the shape's own ``X X^T``), measured in the same rounds.
``effective`` counts the flops of the standard form, whatever a backend saves; ``executed`` counts
what the backend runs.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

from amo_dist.kernels.backends import STANDARD, Backend, choose_backend, cost, executed_flops
from amo_dist.kernels.newton_schulz import orthogonalize
from amo_dist.schedule.polar_express import compose
from benchmarks.measure import paired, ratio, report

SHAPES = ("512x512", "1024x1024", "512x1536", "1024x3072", "256x1024")
LARGE_SHAPES = ("2048x2048", "2048x6144")


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.newton_schulz", description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--large", action="store_true", help=f"also {' '.join(LARGE_SHAPES)}")
    parser.add_argument("--steps", nargs="+", type=int, default=[5])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(args)
    torch.set_num_threads(options.threads)
    shapes = [*options.shapes, *(LARGE_SHAPES if options.large else ())]
    rows = [
        row
        for dtype in options.dtypes
        for shape in shapes
        for steps in options.steps
        for row in measure(shape, steps, getattr(torch, dtype), options)
    ]
    report("newton_schulz", rows, options.output, vars(options))
    return 0


def measure(
    shape: str, steps: int, dtype: torch.dtype, options: argparse.Namespace
) -> list[dict[str, object]]:
    """One row for each backend of one shape."""
    m, n = (int(size) for size in shape.split("x"))
    coefficients = compose(1.01e-3, steps)
    x = torch.randn(m, n, generator=torch.Generator().manual_seed(0)).to(options.device)
    cast = x.to(dtype)
    square = cast[:, :m].contiguous()

    def chosen(requested: str) -> Backend:
        return choose_backend(
            x.shape, coefficients, dtype=dtype, device_type=x.device.type, requested=requested
        )

    contenders = {
        "gemm square": lambda: square @ square,
        "gemm X X^T": lambda: cast @ cast.mT,
    }
    by_name = {requested: chosen(requested) for requested in ("standard", "symmetric", "gram")}
    by_name = {name: backend for name, backend in by_name.items() if backend.name == name}
    for name in by_name:
        contenders[name] = lambda name=name: orthogonalize(
            x, coefficients, dtype=dtype, backend=name
        )
    seconds = paired(contenders, options.rounds, clock=options.clock)
    peak = max(
        2 * m**3 / statistics.median(seconds["gemm square"]),
        2 * m * m * n / statistics.median(seconds["gemm X X^T"]),
    )
    exact = orthogonalize(x, coefficients, dtype=torch.float64, backend="standard")
    rows: list[dict[str, object]] = []
    for name, backend in by_name.items():
        time = statistics.median(seconds[name])
        found = orthogonalize(x, coefficients, dtype=dtype, backend=name).double()
        rows.append(
            {
                "dtype": str(dtype).removeprefix("torch."),
                "shape": shape,
                "steps": steps,
                "backend": f"{name}{' (auto)' if chosen('auto') == backend else ''}",
                "blocks": backend.num_blocks,
                "restarts": str(list(backend.restarts)),
                "ms": 1e3 * time,
                "of standard": ratio(seconds, name, "standard"),
                "gemm GF/s": peak / 1e9,
                "effective %": 100 * cost(STANDARD, m, n, steps) / time / peak,
                "executed %": 100 * executed_flops(backend, m, n, steps) / time / peak,
                "error": ((found - exact).norm() / exact.norm()).item(),
            }
        )
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
