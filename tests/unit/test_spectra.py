from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from amo_dist.kernels import spectra as module
from amo_dist.kernels.geometry import spectral_metrics
from amo_dist.kernels.sigma_min import SMALL, sigma_min
from amo_dist.kernels.spectra import schedule_errors, singular_values
from amo_dist.schedule.polar_express import compose
from benchmarks.spectra import ell, ell_by_svd, with_spectrum

NORM_SCALE = 1.01
M = SMALL + 12
"""Just above the size from which the Gram matrix is used."""
PAD = (1.0, 0.0, 0.0)
SCHEDULES = [
    compose(bound, steps)
    for bound, steps in itertools.product((1e-5, 1e-4, 1e-3, 1e-2, 1e-1), range(3, 8))
]


def stacked(schedules: list[tuple[tuple[float, float, float], ...]]) -> Tensor:
    longest = max(map(len, schedules))
    rows = [[*each, *[PAD] * (longest - len(each))] for each in schedules]
    return torch.tensor(rows, dtype=torch.float64)


TRIALS = stacked(SCHEDULES)


def observe(x: Tensor, coefficients: Tensor, norm_scale: float) -> Tensor:
    """One vector: ``ell``, residuals, distances."""
    ell, errors = module.observe(x, coefficients, norm_scale)
    assert errors.shape == (2, len(coefficients))
    return torch.cat([ell.view(1), errors.view(-1)])


def spectrum(kind: str, m: int, kappa: float) -> Tensor:
    if kind in ("log", "deficient"):
        sigma = torch.logspace(0, -math.log10(kappa), m, dtype=torch.float64)
        if kind == "deficient":
            sigma[m - m // 4 :] = 0
        return sigma
    sigma = torch.ones(m, dtype=torch.float64)
    sigma[m // 2 :] = (1 + torch.linspace(1e-3, 0, m - m // 2, dtype=torch.float64)) / kappa
    return sigma


def random(m: int, n: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(m, n, generator=generator, dtype=torch.float64)


def slow_errors(sigma: Tensor) -> Tensor:
    """Of each of `SCHEDULES`, one by one and without padding."""
    found = []
    for schedule in SCHEDULES:
        p = sigma
        for a, b, c in schedule:
            p = a * p + b * p**3 + c * p**5
        found.append([((p**2 - 1) ** 2).mean(), ((p - 1) ** 2).mean()])
    return torch.tensor(found, dtype=torch.float64).T


def assert_agrees(found: Tensor, expected: Tensor) -> None:
    """Within 1e-6, but for the rounding of p itself: some schedules end 1e-15 from one."""
    difference = (found.sqrt() - expected.sqrt()).abs()
    assert (difference <= 0.5e-6 * expected.sqrt() + 1e-14).all()


@pytest.mark.parametrize("kind", ["log", "clustered", "deficient"])
@pytest.mark.parametrize("kappa", [1e1, 1e6])
@pytest.mark.parametrize(("m", "aspect"), [(64, 3), (M, 1), (M, 3), (256, 1)])
def test_errors_are_those_of_a_decomposition(kind: str, kappa: float, aspect: int, m: int) -> None:
    x = with_spectrum(spectrum(kind, m, kappa), aspect * m)
    sigma = torch.linalg.svdvals(x)
    expected = slow_errors(sigma / (NORM_SCALE * torch.linalg.vector_norm(sigma)))
    assert_agrees(observe(x, TRIALS, NORM_SCALE)[1:].view(2, -1), expected)


@pytest.mark.parametrize("n", [M, 3 * M])
@pytest.mark.parametrize("kind", ["zero_rows", "equal_rows", "low_rank", "all_equal"])
def test_directions_that_are_zero_count_one(n: int, kind: str) -> None:
    x = random(M, n)
    rank = M - 9
    if kind == "zero_rows":
        x[:9] = 0
    elif kind == "equal_rows":
        x[:9] = x[9:18]
    elif kind == "low_rank":
        x, rank = x[:, :30].abs() @ x[:30].abs(), 30  # one value far above the rest
    else:
        x, rank = torch.full_like(x, math.pi), 1
    sigma = singular_values(x)
    assert int((sigma > 0).sum()) == rank
    unit = sigma / (NORM_SCALE * sigma.norm())
    expected = (slow_errors(unit[:rank]) * rank + (M - rank)) / M
    assert_agrees(observe(x, TRIALS, NORM_SCALE)[1:].view(2, -1), expected)


@pytest.mark.parametrize("m", [M, 256])
def test_values_of_a_millionth_of_the_largest_are_kept(m: int) -> None:
    sigma = spectrum("log", m, 1e6)
    found = singular_values(with_spectrum(sigma, m))
    # Errors of eigenvalues stay below 6e-15 here; relative to 1e-12, and half of it for the root.
    assert ((found / sigma - 1).abs() <= 3e-15 / sigma.square()).all()


@pytest.mark.parametrize("kappa", [1e2, 1e5, 3e5, 1e6, 3e6, 1e7, 1e9])
@pytest.mark.parametrize("kind", ["log", "clustered"])
@pytest.mark.parametrize("n", [256, 768])
def test_ell_at_every_condition_number(kappa: float, kind: str, n: int) -> None:
    sigma = spectrum(kind, 256, kappa)
    x = with_spectrum(sigma, n)
    # The promise.
    assert ell(x).item() == pytest.approx((sigma[-1] / sigma.norm()).item(), rel=1e-3)
    assert observe(x, TRIALS[:0], NORM_SCALE).tolist() == [ell(x).item()]


def test_ell_needs_factors_only_below_what_eigenvalues_resolve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    sigma_min = module.sigma_min
    monkeypatch.setattr(module, "sigma_min", lambda x: calls.append(1) or sigma_min(x))
    for n in (256, 768):
        for kappa in (1e1, 1e3, 1e5, 4e5):
            ell(with_spectrum(spectrum("log", 256, kappa), n))
        assert not calls
        ell(with_spectrum(spectrum("log", 256, 1e6), n))
        assert calls.pop()


def test_tau_clamps() -> None:
    x = with_spectrum(spectrum("deficient", M, 1e3), M)
    for scale in (1.0, 1e-5):
        # The clamp is absolute, and above what rounding leaves of a zero.
        found = observe(x * scale, TRIALS[:1], NORM_SCALE)
        assert found[0].item() == pytest.approx(1e-10 / scale / x.norm().item(), rel=1e-9)


@pytest.mark.parametrize("scale", [1e-9, 1.5e-10, 0.5e-10, 1e-11, 1e-200])
@pytest.mark.parametrize("m", [3, M])
def test_no_value_above_tau_is_no_geometry(m: int, scale: float) -> None:
    # sigma_max is `scale`, and the largest entry less.
    x = with_spectrum(spectrum("log", m, 2.0), 2 * m) * scale
    found = observe(x, TRIALS, NORM_SCALE)
    assert found.isnan().tolist() == [scale < 1e-10] * (1 + 2 * len(SCHEDULES))
    assert found[0].item() == pytest.approx(ell_by_svd(x).item(), rel=1e-9, nan_ok=True)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("m", [3, M])
def test_an_entry_that_is_not_finite_is_no_geometry(m: int, bad: float) -> None:
    x = random(m, m + 2)
    x[1, 2] = bad
    assert observe(x, TRIALS, NORM_SCALE).isnan().all()


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0), (3, 4), (M, 2 * M)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_is_no_geometry(shape: tuple[int, int], dtype: torch.dtype) -> None:
    found = observe(torch.zeros(shape, dtype=dtype), TRIALS, NORM_SCALE)
    assert found.shape == (1 + 2 * len(SCHEDULES),)
    assert found.dtype == torch.float64
    assert found.isnan().all()


@pytest.mark.parametrize("shape", [(5, 8), (M, M), (M, 2 * M)])
def test_float32_is_measured_exactly(shape: tuple[int, int]) -> None:
    x = random(*shape).float()
    found = observe(x, TRIALS, NORM_SCALE)
    assert found.dtype == torch.float64
    assert torch.equal(found, observe(x.double(), TRIALS, NORM_SCALE))


@pytest.mark.parametrize("shape", [(1, 9), (5, 8), (M, 2 * M)])
def test_the_transpose_has_the_same_bits(shape: tuple[int, int]) -> None:
    x = random(*shape)
    found = observe(x, TRIALS, NORM_SCALE)
    assert torch.equal(observe(x.mT, TRIALS, NORM_SCALE), found)
    assert torch.equal(observe(x.mT.contiguous(), TRIALS, NORM_SCALE), found)


@pytest.mark.parametrize("shape", [(1, 9), (9, 1), (1, 1)])
def test_one_row_or_column_has_one_value(shape: tuple[int, int]) -> None:
    found = observe(torch.full(shape, -7.0), TRIALS, NORM_SCALE)
    # Rounding of float64.
    assert found[0].item() == pytest.approx(1.0, rel=1e-14)
    assert_agrees(
        found[1:].view(2, -1), slow_errors(torch.tensor([1 / NORM_SCALE], dtype=torch.float64))
    )


@pytest.mark.parametrize("m", [7, M])
def test_zero_columns_of_the_long_side_change_nothing(m: int) -> None:
    x = random(m, 2 * m)
    padded = torch.cat((x, x.new_zeros(m, 5)), dim=1)
    found, other = observe(x, TRIALS, NORM_SCALE), observe(padded, TRIALS, NORM_SCALE)
    # Products are summed in another order; kappa is below ten.
    assert other[0].item() == pytest.approx(found[0].item(), rel=1e-12)
    assert_agrees(other[1:], found[1:])


def test_padding_changes_no_bit() -> None:
    x = random(M, 2 * M)
    found = observe(x, TRIALS, NORM_SCALE)[1:].view(2, -1)
    padding = torch.tensor(PAD, dtype=torch.float64).expand(len(SCHEDULES), 3, 3)
    longer = torch.cat((padding, TRIALS, padding), dim=1)
    assert torch.equal(observe(x, longer, NORM_SCALE)[1:].view(2, -1), found)
    for index in (0, 7, 24):
        alone = observe(x, stacked([SCHEDULES[index]]), NORM_SCALE)
        assert torch.equal(alone[1:], found[:, index])


@pytest.mark.parametrize("m", [1, 5, 257, 1000])
def test_chunks_change_no_bit(m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sigma = random(1, m)[0].abs().clamp(max=1)
    found = schedule_errors(sigma, TRIALS)
    for size in (1, 2 * m, 3 * m + 1, 24 * m, 1000 * m):
        monkeypatch.setattr(module, "_CHUNK", size)
        assert torch.equal(schedule_errors(sigma, TRIALS), found)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor made within."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.found = max(self.found, result.numel())
        return result


def test_many_schedules_of_many_values_take_little_memory() -> None:
    sigma, trials = torch.rand(16384, dtype=torch.float64) / 2, TRIALS.repeat(9, 1, 1)[:205]
    with Largest() as largest:
        schedule_errors(sigma, trials)
    # A few such copies at a time, of 8 bytes each.
    assert largest.found * 8 <= 1e6


def test_mistakes() -> None:
    x = random(3, 4)
    with pytest.raises(ValueError, match=r"x: found shape \(2, 3, 4\), expected \(m, n\)"):
        observe(torch.stack((x, x)), TRIALS, NORM_SCALE)
    with pytest.raises(ValueError, match=r"x\.dtype: found torch\.int64"):
        observe(x.long(), TRIALS, NORM_SCALE)
    for shape in ((3,), (2, 3), (2, 5, 4)):
        with pytest.raises(ValueError, match=r"coefficients: found shape .*, expected \(num_sch"):
            observe(x, torch.ones(shape), NORM_SCALE)


def test_input_is_not_modified() -> None:
    for m in (3, M):
        x, trials = random(m, m + 1), TRIALS.clone()
        before = x.clone()
        observe(x, trials, NORM_SCALE)
        assert torch.equal(x, before)
        assert torch.equal(trials, TRIALS)


def broken(*args: object, **options: object) -> Tensor:
    raise torch.linalg.LinAlgError("linalg.eigh: The algorithm failed to converge")


def test_a_failed_decomposition_gives_way_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(SMALL + 12, 2 * SMALL, generator=torch.Generator().manual_seed(0))
    coefficients = torch.tensor([compose(1e-3, 5)], dtype=torch.float64)
    expected = observe(x, coefficients, 1.01)
    monkeypatch.setattr(torch.linalg, "eigvalsh", broken)
    # Right to 1e-7 of the largest singular value both ways, and the spectrum is near flat.
    torch.testing.assert_close(observe(x, coefficients, 1.01), expected, rtol=1e-6, atol=0)


def test_a_matrix_that_nothing_decomposes_is_no_sample(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    coefficients = torch.tensor([compose(1e-3, 5)], dtype=torch.float64)
    for name in ("eigvalsh", "svdvals", "lu_factor_ex", "cholesky_ex"):
        monkeypatch.setattr(torch.linalg, name, broken)
    monkeypatch.setattr(torch, "geqrf", broken)
    for shape in ((5, 9), (SMALL + 12, 2 * SMALL), (SMALL + 12, SMALL + 12)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        assert observe(x, coefficients, 1.01).isnan().all()
        assert "no decomposition of a matrix" in caplog.text
        assert spectral_metrics(x).isnan().all()
        assert sigma_min(x.double()).isnan()
        caplog.clear()


def test_an_ell_that_nothing_finds_is_no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    # The spectrum is there, but hides the smallest singular value.
    x = with_spectrum(torch.logspace(0, -8, SMALL + 12, dtype=torch.float64), 2 * SMALL)
    assert not observe(x, torch.zeros(0, 1, 3, dtype=torch.float64), 1.01).isnan()
    for name in ("svdvals", "cholesky_ex"):
        monkeypatch.setattr(torch.linalg, name, broken)
    monkeypatch.setattr(torch, "geqrf", broken)
    found = observe(x, torch.tensor([compose(1e-3, 5)], dtype=torch.float64), 1.01)
    assert found.isnan().all()


def test_what_is_out_of_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.linalg, "svdvals", full)
    with pytest.raises(torch.OutOfMemoryError):
        singular_values(torch.ones(3, 5, dtype=torch.float64))
