"""One observation: singular values and the errors of trial schedules, their exactness and time.

``python -m benchmarks.spectra`` first lists errors on hard spectra, then times one observation of
Qwen3-1.7B, with 205 trial schedules, against ``svdvals`` in float32, on the same matrices in the
same rounds: one matrix of each distinct shape, weighted to the 56 of an observation (``--full``
runs all 56).

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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from amo_dist.kernels.newton_schulz import orthogonalize
from amo_dist.kernels.spectrum import distances
from amo_dist.kernels.spectrum import spectrum as measured_spectrum
from amo_dist.schedule.polar_express import compose
from benchmarks.measure import paired, ratio, report
from benchmarks.shapes import MODELS

SAMPLE_SIZE = 8
NORM_SCALE = 1.01
STEPS = range(3, 8)
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
    parser.add_argument("--model", default="Qwen3-1.7B", choices=MODELS)
    parser.add_argument("--full", action="store_true", help="all matrices of one observation")
    parser.add_argument("--scale", type=int, default=1, help="divides every side of the model")
    parser.add_argument("--kappa", type=float, default=1e5, help="of the timed matrices")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--dtypes", action="store_true", help="errors by dtype, and nothing else")
    parser.add_argument("--study", type=Path, help="folder of spectra")
    options = parser.parse_args(args)
    torch.set_num_threads(options.threads)
    if options.dtypes:
        report("spectra_dtypes", measure_dtypes(options.study), options.output)
        return 0
    errors = [
        measure_errors(shape, kind, kappa)
        for shape in ERROR_SHAPES
        for kind in ("decaying", "clustered", "lonely", "deficient")
        for kappa in KAPPAS
    ]
    report("spectra_errors", errors, None if options.output is None else _beside(options.output))
    times = measure_times(options)
    report("spectra", times, options.output, vars(options))
    return 0


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.stem}_errors{path.suffix}")


@functools.cache
def trials() -> Tensor:
    """Schedules of 3 to 7 steps for ten bounds a decade: ``(205, 7, 3)``."""
    schedules = []
    for tenths in range(-50, -9):
        for steps in STEPS:
            padding = [(1.0, 0.0, 0.0)] * (STEPS[-1] - steps)
            schedules.append([*compose(10 ** (tenths / 10), steps), *padding])
    return torch.tensor(schedules, dtype=torch.float64)


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


METHODS: dict[str, Callable[[Tensor], float]] = {
    "svd float64": lambda x: torch.linalg.svdvals(x)[-1].item(),
    "svd float32": lambda x: torch.linalg.svdvals(x.float())[-1].item(),
}


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
        return row | dict.fromkeys(("ell", *METHODS), math.nan)
    row["ell"] = abs(ell.item() * torch.linalg.vector_norm(sigma).item() * kappa - 1)
    return row | {name: abs(method(x) * kappa - 1) for name, method in METHODS.items()}


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
                result = run(x.to(wire), dtype=getattr(torch, ns_dtype), backend="standard").to(
                    wire
                )
                error = ((result.double() - exact).norm() / exact.norm()).item()
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


CONTENDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "observe": observe,
    "svdvals float32": torch.linalg.svdvals,
}


def _repeat(run: Callable[[Tensor], object], x: Tensor, times: int) -> None:
    for _ in range(times):
        run(x)


def ell_by_svd(x: Tensor, *, tau: float = 1e-10) -> Tensor:
    """``max(sigma_min, tau) / ||x||_F`` of one matrix by a decomposition: the slow twin.

    Args:
        x: Momentum matrix, ``(m, n)``, float32 or float64.
        tau: Least singular value told apart from zero.

    Returns:
        ``ell``, float64, 0-dim; NaN without a singular value above ``tau``.
    """
    sigma = torch.linalg.svdvals(x.double())
    ell = (sigma[-1].clamp(min=tau) / torch.linalg.vector_norm(sigma)).clamp(max=1.0)
    return torch.where(sigma[0] > tau, ell, math.nan)


def measure_times(options: argparse.Namespace) -> list[dict[str, object]]:
    sides = [
        tuple(sorted(size // options.scale for size in matrix.shape))
        for matrix in MODELS[options.model].block()
    ]
    counts = Counter({shape: SAMPLE_SIZE * count for shape, count in Counter(sides).items()})
    rows: list[dict[str, object]] = []
    totals: Counter[str] = Counter()
    trials()
    for (m, n), count in counts.items():
        repeats = count if options.full else 1
        sigma = spectrum("decaying", m, options.kappa)
        # float32, as momentum is: its rounding adds to the smallest values, on all methods alike.
        x = with_spectrum(sigma, n, torch.float32)
        runs = {
            name: functools.partial(_repeat, run, x, repeats) for name, run in CONTENDERS.items()
        }
        seconds = paired(runs, options.rounds, clock=options.clock, warmup=0)
        medians = {name: statistics.median(times) / repeats for name, times in seconds.items()}
        for name, median in medians.items():
            totals[name] += count * median
        exact = ell_by_svd(x).item() if min(m, n) <= 1024 or options.full else math.nan
        row: dict[str, object] = {"shape": f"{m}x{n}", "matrices": count}
        row |= {f"{name} ms": 1e3 * median for name, median in medians.items()}
        row |= {f"of {name}": ratio(seconds, "observe", name) for name in list(CONTENDERS)[1:]}
        ell = measured_spectrum(x)[0].item()
        rows.append(row | {"ell": ell, "error": abs(ell / exact - 1)})
    total: dict[str, object] = {"shape": "observation", "matrices": sum(counts.values())}
    total |= {f"{name} ms": 1e3 * seconds for name, seconds in totals.items()}
    total |= {f"of {name}": totals["observe"] / totals[name] for name in list(CONTENDERS)[1:]}
    return [*rows, total | {"ell": "", "error": ""}]


if __name__ == "__main__":
    raise SystemExit(main())
