from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amo_dist import Muon, MuonConfig, param_groups
from amo_dist.config import Triple
from amo_dist.kernels import newton_schulz
from amo_dist.kernels.newton_schulz import orthogonalize, scale_to_exact_norm
from amo_dist.schedule.coefficients import named_schedule

KJ, YOU = (named_schedule(name).schedule.coefficients for name in ("kj", "you"))
PRINTED: tuple[Triple, ...] = (
    (8.4703, -25.1081, 18.6293),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
)
"""Muon-CANS as its paper prints it."""
TAYLOR: Triple = (15 / 8, -10 / 8, 3 / 8)
"""The quintic that is flat at one: converges for every spectrum in (0, 1], if slowly."""
CONVERGED = (TAYLOR,) * 40

# Chosen to hurt: single rows and columns, one entry, squares, and odd sizes around SIMD widths.
SHAPES = [(1, 1), (1, 17), (17, 1), (8, 8), (33, 65), (65, 33), (31, 128)]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def apply_scalar(coefficients: tuple[Triple, ...], x: Tensor) -> Tensor:
    for a, b, c in coefficients:
        x = a * x + b * x**3 + c * x**5
    return x


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("coefficients", [KJ, YOU, PRINTED], ids=["kj", "you", "cans"])
def test_equals_the_scalar_map_on_singular_values(
    shape: tuple[int, int], coefficients: tuple[Triple, ...]
) -> None:
    x = torch.randn(shape, generator=generator(), dtype=torch.float64)
    found = orthogonalize(x, coefficients, dtype=torch.float64)
    u, sigma, vh = torch.linalg.svd(x, full_matrices=False)
    sigma /= 1.01 * x.norm() + 1e-7 * x.abs().max()  # eps is relative to the largest entry
    expected = u * apply_scalar(coefficients, sigma) @ vh
    # Five quintics of slope up to 8.5 lift rounding (1e-16) by at most 8.5 * 4.2^4 = 2600.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert found.dtype == torch.float64
    assert found.is_contiguous()


@pytest.mark.parametrize(
    ("shape", "preconditioner"),
    [
        *((shape, "frobenius") for shape in [*SHAPES, (24, 24), (40, 300), (130, 300)]),
        # It scales rows, and a square has no short side to tell them from columns.
        *((shape, "aol") for shape in [*SHAPES, (40, 300), (130, 300)] if shape[0] != shape[1]),
    ],
)
@pytest.mark.parametrize("backend", ["standard", "gram"])
def test_transposes(shape: tuple[int, int], preconditioner: str, backend: str) -> None:
    x = torch.randn(shape, generator=generator(), dtype=torch.float64)
    args = {"preconditioner": preconditioner, "dtype": torch.float64, "backend": backend}
    found = orthogonalize(x.mT, KJ, **args)  # type: ignore[arg-type]
    expected = orthogonalize(x, KJ, **args)  # type: ignore[arg-type]
    # As for the scalar map: rounding, lifted by the slopes of five quintics (3.4^5 = 480).
    torch.testing.assert_close(found, expected.mT, rtol=0, atol=1e-12)
    assert found.is_contiguous()


@pytest.mark.parametrize("exponent", [-120, -66, -10, 10, 66, 120])
@pytest.mark.parametrize("preconditioner", ["frobenius", "aol"])
def test_powers_of_two_change_no_bit(exponent: int, preconditioner: str) -> None:
    x = torch.rand(9, 20, generator=generator()) + 0.5
    expected = orthogonalize(x, KJ, preconditioner=preconditioner)
    # Seven times as far in float64: the dtype of the products does not narrow the scaling.
    for scaled in (x * 2.0**exponent, x.double() * 2.0 ** (7 * exponent)):
        found = orthogonalize(scaled, KJ, dtype=torch.bfloat16, preconditioner=preconditioner)
        assert torch.equal(found, expected)


@pytest.fixture(params=["devices", "cpu"])
def each_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices scale a batch in one pass."""
    monkeypatch.setattr(newton_schulz, "on_cpu", lambda _: request.param == "cpu")


@pytest.mark.usefixtures("each_path")
@pytest.mark.parametrize("scale", [1e-45, 1e-40, 1e-30, 1e-20, 1e17, 1e30, 3e37])
@pytest.mark.parametrize("preconditioner", ["frobenius", "aol"])
def test_extreme_entries(scale: float, preconditioner: str) -> None:
    x = torch.randn(12, 30, generator=generator()) * scale
    assert x.count_nonzero() > 0
    options: dict[str, Any] = {"preconditioner": preconditioner, "dtype": torch.float32}
    found = orthogonalize(x, CONVERGED, eps=0.0, **options).double()
    # float32 products keep about 5e-7; at 1e-45 entries are whole multiples of the least denormal.
    torch.testing.assert_close(found @ found.mT, torch.eye(12).double(), rtol=0, atol=1e-5)
    # The sign of the input is kept: a polar factor has a positive inner product with it.
    assert (found * (x.double() / scale)).sum() > 0


@pytest.mark.usefixtures("each_path")
def test_largest_bfloat16_entries() -> None:
    x = torch.full((3, 5), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    found = orthogonalize(x, KJ).float()
    # From 2^127 on, the least power of two above an entry is infinite, and x over it zero.
    assert found.mean() > 0.1
    # Rank one with all singular vectors flat: one value everywhere, up to bf16 rounding.
    torch.testing.assert_close(found, found.mean().expand(3, 5), rtol=2**-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("preconditioner", ["frobenius", "aol"])
@pytest.mark.parametrize("shape", [(3, 9, 20), (6, 20, 9), (4, 1, 33), (1, 16, 16), (2, 130, 300)])
def test_batch_is_the_loop_bit_for_bit(
    shape: tuple[int, ...], preconditioner: str, dtype: torch.dtype
) -> None:
    x = torch.randn(shape, generator=generator()) * torch.logspace(-9, 9, shape[0]).view(
        -1, *[1] * (len(shape) - 1)
    )
    before = x.clone()
    found = orthogonalize(x, YOU, preconditioner=preconditioner, dtype=dtype)
    assert torch.equal(x, before)  # in float32 and wide nothing on the way forces a copy
    loop = [
        orthogonalize(m, YOU, preconditioner=preconditioner, dtype=dtype)
        for m in x.reshape(-1, *shape[-2:])
    ]
    assert torch.equal(found, torch.stack(loop).view(shape))
    assert found.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_strides_change_no_bit(dtype: torch.dtype) -> None:
    padded = torch.randn(200, 666, generator=generator())
    x = padded[::2, ::2].contiguous()
    expected = orthogonalize(x, KJ, dtype=dtype)
    assert torch.equal(orthogonalize(padded[::2, ::2], KJ, dtype=dtype), expected)
    assert torch.equal(orthogonalize(x.mT.contiguous().mT, KJ, dtype=dtype), expected)


@pytest.mark.usefixtures("each_path")
@pytest.mark.parametrize("preconditioner", ["frobenius", "aol"])
@pytest.mark.parametrize("eps", [0.0, 1e-7])
def test_zeros_stay_and_non_finite_entries_spoil_their_matrix_alone(
    preconditioner: str, eps: float
) -> None:
    x = torch.randn(5, 4, 6, generator=generator())
    good = orthogonalize(x[0], KJ, preconditioner=preconditioner, eps=eps)
    x[1] = 0
    for index, bad in enumerate((math.nan, math.inf, -math.inf), start=2):
        x[index, 2, 3] = bad
    found = orthogonalize(x, KJ, preconditioner=preconditioner, eps=eps)
    assert torch.equal(found[0], good)
    assert found[1].count_nonzero() == 0
    assert found[2:].isnan().all()


def test_aol_scales_rows_by_their_gram_sums() -> None:
    x = torch.randn(10, 30, generator=generator(), dtype=torch.float64)
    found = orthogonalize(x, YOU[1:], preconditioner="aol", dtype=torch.float64)
    u, sigma, vh = torch.linalg.svd((x @ x.mT).abs().sum(dim=1).rsqrt()[:, None] * x, False)
    expected = u * apply_scalar(YOU[1:], sigma) @ vh
    # Rounding lifted by slopes of at most 4^4 = 256.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_few_compiled_products_of_past_schedules_are_kept() -> None:
    for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        assert int(os.environ[name]) <= 256


# ---------------------------------------------------------------- Muon-CANS in bfloat16


GUARDED = named_schedule("cans").schedule
# The peak of the last map, 1.12, and what five roundings in bfloat16 add to it.
BOUND = 1.2
# Found by a search for entries that rounding lifts the most; half of the guard lets it diverge.
WORST = ((45.0, -37.0, -33.0), (-6.0, 50.0, 47.0))


def largest(x: Tensor, coefficients: tuple[Triple, ...], backend: str = "auto") -> float:
    scale = GUARDED.norm_scale
    found = orthogonalize(x, coefficients, norm_scale=scale, backend=backend).double()
    return float(torch.linalg.matrix_norm(found.nan_to_num(1e30, 1e30, -1e30), ord=2).max())


def test_without_the_guard_they_diverge() -> None:
    x = torch.tensor(WORST)
    assert largest(x, PRINTED) > 10  # measured: 1e6 and more
    for backend in ("auto", "standard", "gram"):
        assert largest(x, GUARDED.coefficients, backend) < BOUND


# ---------------------------------------------------------------- the exact norm


def updates(count: int, m: int, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, m, n, generator=torch.Generator().manual_seed(m)).to(dtype)


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (1, 7), (64, 192)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_those_of_polar_factors(shape: tuple[int, int], dtype: torch.dtype) -> None:
    found = updates(3, *shape, dtype)
    scale_to_exact_norm(found)
    # Entries are rounded once, and a sum of 12,288 squares in float32 is off by a few roundings.
    tolerance = max(torch.finfo(dtype).eps, 1e-6)
    for matrix in found.double():
        norm = torch.linalg.vector_norm(matrix).item()
        assert norm == pytest.approx(math.sqrt(min(shape)), rel=tolerance)


def test_the_factor_is_at_most_two() -> None:
    """Without a bound an update of rank one would grow by ``sqrt(min(m, n))``, here 16 times."""
    column, row = updates(1, 256, 1)[0], updates(1, 1, 320)[0]
    rank_one = (column / column.norm()) @ (row / row.norm())
    batch = torch.stack([rank_one, 20 * rank_one, 0 * rank_one])
    norms = scale_to_exact_norm(batch)
    torch.testing.assert_close(norms, torch.tensor([1.0, 20.0, 0.0]))
    # 16 is the exact norm; a norm of 20 is above half of it, and scaled in full.
    expected = torch.tensor([2.0, 16.0, 0.0])
    torch.testing.assert_close(torch.linalg.matrix_norm(batch, 2), expected)


def test_the_update_of_one_token_stays_bounded_and_is_counted() -> None:
    """Its gradient has rank one, as that of a rarely routed expert or of the first steps."""
    spectral = {}
    for norm in ("as_is", "exact"):
        model = nn.Linear(128, 128, bias=False)
        before = model.weight.detach().clone()
        config = MuonConfig(update_norm=norm)
        groups = param_groups(model, patterns={"weight": "mlp_up"})
        optimizer = Muon(groups, lr=1.0, weight_decay=0.0, config=config)
        model.weight.grad = torch.outer(torch.arange(128.0) - 60, torch.arange(128.0) / 100 - 1)
        optimizer.step()
        spectral[norm] = torch.linalg.matrix_norm(model.weight.detach() - before, 2).item()
        assert optimizer.metrics()["newton_schulz/bounded"] == (norm == "exact")
    # bfloat16 rounds the two results apart.
    assert spectral["exact"] <= 2.01 * spectral["as_is"]
