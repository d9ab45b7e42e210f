"""The smallest singular value: methods against each other, error and time.

``python -m benchmarks.sigma_min`` first lists errors on hard spectra, then times one observation of
Qwen3-1.7B against ``svdvals`` in float32 on the same matrices in the same rounds: one matrix of
each distinct shape, weighted to the 56 of an observation (``--full`` runs all 56).
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from amo_dist.kernels import sigma_min as module
from amo_dist.kernels.geometry import ell, ell_by_svd
from benchmarks.measure import paired, ratio, report
from benchmarks.shapes import MODELS

SAMPLE_SIZE = 8
ERROR_SHAPES = ((384, 384), (256, 768))
Method = Callable[[Tensor], float]


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sigma_min", description=__doc__)
    parser.add_argument("--model", default="Qwen3-1.7B", choices=MODELS)
    parser.add_argument("--full", action="store_true", help="all matrices of one observation")
    parser.add_argument("--scale", type=int, default=1, help="divides every side of the model")
    parser.add_argument("--kappa", type=float, default=1e5, help="of the timed matrices")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(args)
    torch.set_num_threads(options.threads)
    errors = [
        row
        for shape in ERROR_SHAPES
        for kind in ("decaying", "clustered", "lonely")
        for kappa in (1e3, 1e5, 1e7, 1e9)
        for row in [measure_errors(shape, kind, kappa)]
    ]
    report("sigma_min_errors", errors, None if options.output is None else _beside(options.output))
    times = measure_times(options)
    report("sigma_min", times, options.output, vars(options))
    return 0


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.stem}_errors{path.suffix}")


def with_spectrum(sigma: Tensor, n: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """``(m, n)`` with these singular values and random singular vectors."""
    generator = torch.Generator().manual_seed(0)
    m = sigma.numel()
    left, right = (
        torch.linalg.qr(torch.randn(size, m, generator=generator, dtype=dtype))[0]
        for size in (m, n)
    )
    return left * sigma.to(dtype) @ right.mT


def spectrum(kind: str, m: int, kappa: float) -> Tensor:
    if kind == "decaying":
        return torch.logspace(0, -math.log10(kappa), m, dtype=torch.float64)
    sigma = torch.ones(m, dtype=torch.float64)
    if kind == "clustered":  # half of them within a thousandth of the smallest
        sigma[m // 2 :] = (1 + torch.linspace(1e-3, 0, m - m // 2)) / kappa
    sigma[-1] = 1 / kappa
    return sigma


def _by(road: Callable[[Tensor], module.Solve | None]) -> Method:
    def method(x: Tensor) -> float:
        solve = road(x)
        found = None if solve is None else module._smallest(x, solve)
        return math.nan if found is None else found

    return method


METHODS: dict[str, Method] = {
    "ours": lambda x: module.sigma_min(x).item(),
    "lu": lambda x: _by(module._lu)(x) if x.shape[0] == x.shape[1] else math.nan,
    "cholesky": _by(module._cholesky),
    "qr": _by(module._qr),
    "svd float64": lambda x: torch.linalg.svdvals(x)[-1].item(),
    "svd float32": lambda x: torch.linalg.svdvals(x.float())[-1].item(),
}


def measure_errors(shape: tuple[int, int], kind: str, kappa: float) -> dict[str, object]:
    """Relative errors; ``nan`` where a method's own check rejected its answer."""
    x = with_spectrum(spectrum(kind, shape[0], kappa), shape[1])
    row: dict[str, object] = {"shape": f"{shape[0]}x{shape[1]}", "spectrum": kind, "kappa": kappa}
    return row | {name: abs(method(x) * kappa - 1) for name, method in METHODS.items()}


def _repeat(run: Callable[[Tensor], object], x: Tensor, times: int) -> None:
    for _ in range(times):
        run(x)


def measure_times(options: argparse.Namespace) -> list[dict[str, object]]:
    sides = [
        tuple(sorted(size // options.scale for size in one.shape))
        for one in MODELS[options.model].block()
    ]
    counts = Counter({shape: SAMPLE_SIZE * count for shape, count in Counter(sides).items()})
    rows: list[dict[str, object]] = []
    totals: Counter[str] = Counter()
    for (m, n), count in counts.items():
        repeats = count if options.full else 1
        sigma = spectrum("decaying", m, options.kappa)
        # float32, as momentum is: its rounding adds to the smallest values, on all methods alike.
        x = with_spectrum(sigma, n, torch.float32)
        contenders = {
            "ell": functools.partial(_repeat, ell, x, repeats),
            "svd32": functools.partial(_repeat, torch.linalg.svdvals, x, repeats),
        }
        seconds = paired(contenders, options.rounds, clock=options.clock, warmup=0)
        medians = {name: statistics.median(each) / repeats for name, each in seconds.items()}
        for name, median in medians.items():
            totals[name] += count * median
        exact = ell_by_svd(x).item() if min(m, n) <= 1024 or options.full else math.nan
        found = ell(x).item()
        rows.append(
            {
                "shape": f"{m}x{n}",
                "matrices": count,
                "ell ms": 1e3 * medians["ell"],
                "svdvals float32 ms": 1e3 * medians["svd32"],
                "ratio": ratio(seconds, "ell", "svd32"),
                "ell": found,
                "error": abs(found / exact - 1),
            }
        )
    total = {"shape": "observation", "matrices": sum(counts.values())}
    total |= {"ell ms": 1e3 * totals["ell"], "svdvals float32 ms": 1e3 * totals["svd32"]}
    return [*rows, {**total, "ratio": totals["ell"] / totals["svd32"], "ell": "", "error": ""}]


if __name__ == "__main__":
    raise SystemExit(main())
