"""One observation: singular values and the errors of trial schedules, their exactness and time.

``python -m benchmarks.spectra`` first lists errors on hard spectra, then times one observation of
Qwen3-1.7B, with 205 trial schedules, against ``svdvals`` in float32, on the same matrices in the
same rounds: one matrix of each distinct shape, weighted to the 56 of an observation.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from amo_dist.config import AMOConfig
from amo_dist.engine.observe import coefficient_table
from amo_dist.kernels.spectrum import distances
from amo_dist.kernels.spectrum import spectrum as measured_spectrum
from amo_dist.schedule.source import Amo
from benchmarks.measure import paired, report
from benchmarks.shapes import MODELS, block

MODEL, SAMPLE_SIZE = MODELS["Qwen3-1.7B"], 8
NORM_SCALE = 1.01
ERROR_SHAPES = ((64, 64), (256, 256), (256, 768), (512, 512))
KAPPAS = (1e3, 1e5, 1e6, 1e7, 1e9)
ROUNDING = 1e-14
"""Rounding of a polynomial near 1: a root mean square below it has no correct digit."""


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spectra", description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(args)
    torch.set_num_threads(1)
    errors_path = options.output and options.output.with_stem(f"{options.output.stem}_errors")
    errors = [
        measure_errors(shape, kind, kappa)
        for shape in ERROR_SHAPES
        for kind in ("decaying", "clustered", "lonely", "deficient")
        for kappa in KAPPAS
    ]
    report("spectra_errors", errors, errors_path)
    times = measure_times(options.rounds, options.clock)
    report("spectra", times, options.output, vars(options))
    return 0


@functools.cache
def trials() -> Tensor:
    """The candidates of an observation, 3 to 7 steps for ten bounds a decade: ``(205, 7, 3)``."""
    return coefficient_table(Amo(AMOConfig()).candidates())


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
    """Float64 ``(m,)``, descending from one; ``kappa`` is that of the values that are not zero."""
    sigma = torch.ones(m, dtype=torch.float64)
    if kind in ("decaying", "deficient"):
        sigma = torch.logspace(0, -math.log10(kappa), m, dtype=torch.float64)
    if kind == "deficient":
        sigma[m - m // 4 :] = 0
    elif kind == "clustered":  # half of them within a thousandth of the smallest
        sigma[m // 2 :] = (1 + torch.linspace(1e-3, 0, m - m // 2, dtype=torch.float64)) / kappa
    elif kind == "lonely":
        sigma[-1] = 1 / kappa
    return sigma


def measure_errors(shape: tuple[int, int], kind: str, kappa: float) -> dict[str, object]:
    """Greatest relative errors over all trial schedules, and those of the least singular value.

    The references are the singular values of a decomposition in float64 for the former, and the
    spectrum that the matrix was made with for the latter (``nan`` if that ends with zero).
    """
    sigma = spectrum(kind, shape[0], kappa)
    x = with_spectrum(sigma, shape[1])
    ell, values, _ = measured_spectrum(x)
    exact = torch.linalg.svdvals(x)
    unit = exact / torch.linalg.vector_norm(exact)
    own, reference = (distances(one / NORM_SCALE, trials()).sqrt() for one in (values, unit))
    row: dict[str, object] = {"shape": f"{shape[0]}x{shape[1]}", "spectrum": kind, "kappa": kappa}
    beyond = ((own - reference).abs() - ROUNDING).clamp(min=0)
    row["distance"] = 2 * (beyond / reference).max().item()  # of the square
    if kind == "deficient":
        return row | dict.fromkeys(("ell", "svd float64", "svd float32"), math.nan)
    row["ell"] = abs(ell.item() * torch.linalg.vector_norm(sigma).item() * kappa - 1)
    row["svd float64"] = abs(exact[-1].item() * kappa - 1)
    row["svd float32"] = abs(torch.linalg.svdvals(x.float())[-1].item() * kappa - 1)
    return row


def observe(x: Tensor) -> Tensor:
    """The errors of all trial schedules, as an observation measures them."""
    return distances(measured_spectrum(x)[1] / NORM_SCALE, trials())


def measure_times(rounds: int, clock: str) -> list[dict[str, object]]:
    """Time of an observation and of ``svdvals``: a row for each shape, and one for all matrices."""
    counts = Counter(tuple(sorted(matrix.shape)) for matrix in block(MODEL))
    rows, totals = [], dict.fromkeys(("observe", "svdvals"), 0.0)
    trials()  # made once, before anything is timed
    for (m, n), in_block in counts.items():
        count = SAMPLE_SIZE * in_block
        # float32, as momentum is.
        x = with_spectrum(spectrum("decaying", m, 1e5), n, torch.float32)
        runs = {
            "observe": functools.partial(observe, x),
            "svdvals": functools.partial(torch.linalg.svdvals, x),
        }
        seconds = paired(runs, rounds, clock=clock, warmup=0)
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        totals = {name: total + count * medians[name] for name, total in totals.items()}
        rows.append(time_row(f"{m}x{n}", count, medians))
    return [*rows, time_row("observation", sum(counts.values()) * SAMPLE_SIZE, totals)]


def time_row(shape: str, count: int, seconds: Mapping[str, float]) -> dict[str, object]:
    row: dict[str, object] = {"shape": shape, "matrices": count}
    row |= {f"{name} ms": 1e3 * own for name, own in seconds.items()}
    return row | {"of svdvals": seconds["observe"] / seconds["svdvals"]}


if __name__ == "__main__":
    raise SystemExit(main())
