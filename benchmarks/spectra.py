"""One observation: singular values and the errors of trial schedules, their exactness and time.

``python -m benchmarks.spectra`` first lists errors on hard spectra, then times one observation of
Qwen3-1.7B, with 205 trial schedules, against ``svdvals`` in float32, on the same matrices in the
same rounds: one matrix of each distinct shape, weighted to the 56 of an observation.

``--dtypes`` lists instead how far results of Newton-Schulz, as they arrive, are from those of the
same schedule in float64, by ``ns_dtype`` and ``wire_dtype``. ``--study DIR`` adds momentum spectra
that ``python -m benchmarks.plan_quality run --spectra DIR`` has taken while a model was trained.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from amo_dist.config import AMOConfig
from amo_dist.engine.observe import coefficient_table
from amo_dist.kernels.newton_schulz import orthogonalize
from amo_dist.kernels.spectrum import distances
from amo_dist.kernels.spectrum import spectrum as measured_spectrum
from amo_dist.schedule.polar_express import compose
from amo_dist.schedule.source import Amo
from benchmarks.measure import paired, report
from benchmarks.shapes import MODELS, block

MODEL, SAMPLE_SIZE = MODELS["Qwen3-1.7B"], 8
NORM_SCALE = 1.01
ERROR_SHAPES = ((64, 64), (256, 256), (256, 768), (512, 512))
KAPPAS = (1e3, 1e5, 1e6, 1e7, 1e9)
ROUNDING = 1e-14
"""Rounding of a polynomial near 1: a root mean square below it has no correct digit."""
DTYPES = (
    *(("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "bfloat16")),
    *(("float16", "float32"), ("float32", "bfloat16"), ("float32", "float32")),
)
"""``ns_dtype`` and ``wire_dtype``."""


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spectra", description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--dtypes", action="store_true", help="errors by dtype, and nothing else")
    parser.add_argument("--study", type=Path, help="folder of spectra")
    options = parser.parse_args(args)
    torch.set_num_threads(1)
    if options.dtypes:
        report("spectra_dtypes", measure_dtypes(options.study), options.output)
        return 0
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


def matrices(study: Path | None) -> Iterator[tuple[str, Tensor]]:
    """Kinds of momentum and float32 matrices of that kind."""
    for shape in ERROR_SHAPES[:3]:
        for kappa in KAPPAS[:2]:
            for kind in ("decaying", "clustered", "lonely", "deficient"):
                yield kind, with_spectrum(spectrum(kind, shape[0], kappa), shape[1]).float()
            for seed in range(4):
                generator = torch.Generator().manual_seed(seed)
                rows = torch.logspace(0, -math.log10(kappa), shape[0], dtype=torch.float64)
                x = torch.randn(shape, generator=generator, dtype=torch.float64)
                yield "graded rows", (rows.unsqueeze(1) * x).float()
    for path in sorted(study.glob("*.pt")) if study else ():
        later = torch.load(path, weights_only=True)["later"]
        for sigma in later[max(later)].values():
            yield "study", with_spectrum(sigma.double().view(-1), 2 * sigma.numel()).float()


def measure_dtypes(study: Path | None) -> list[dict[str, object]]:
    """Relative errors in the Frobenius norm, for five and seven steps composed for 1e-3."""
    errors: dict[tuple[str, str, str], list[float]] = {}
    for kind, x in matrices(study):
        for steps in (5, 7):
            run = functools.partial(orthogonalize, coefficients=compose(NORM_SCALE * 1e-3, steps))
            exact = run(x, dtype=torch.float64)
            for ns_dtype, wire_dtype in DTYPES:
                wire = getattr(torch, wire_dtype)
                result = run(x.to(wire), dtype=getattr(torch, ns_dtype), backend="standard")
                error = ((result.to(wire).double() - exact).norm() / exact.norm()).item()
                errors.setdefault((kind, ns_dtype, wire_dtype), []).append(error)
    return [
        {
            "matrices": kind,
            "ns_dtype": ns_dtype,
            "wire_dtype": wire_dtype,
            "cases": len(cases),
            "mean": statistics.fmean(cases),
            "greatest": math.nan if any(map(math.isnan, cases)) else max(cases),
        }
        for (kind, ns_dtype, wire_dtype), cases in errors.items()
    ]


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
