"""The two forms of Newton-Schulz are one map, and a rule says which is taken."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from amo_dist.kernels import newton_schulz as module
from amo_dist.kernels.newton_schulz import (
    NS_BACKENDS,
    gram,
    newton_schulz,
    orthogonalize,
    resolve_backend,
    standard,
    symmetric_product,
)
from amo_dist.schedule.polar_express import compose

KJ = ((3.4445, -4.7750, 2.0315),) * 5
SHAPES = [(1, 1), (1, 9), (7, 7), (16, 48), (33, 99), (99, 33), (64, 65), (130, 400), (400, 130)]
STEPS = compose(1.01e-3, 6)
CPU = torch.device("cpu")


def unit_matrix(m: int, n: int, ell: float | None = None) -> Tensor:
    """Float64, Frobenius norm below one: Gaussian, or with singular values decaying to ``ell``."""
    generator = torch.Generator().manual_seed(m)
    x = torch.randn(m, n, generator=generator, dtype=torch.float64)
    if ell is not None:
        u, _, v = torch.linalg.svd(x, full_matrices=False)
        x = u * torch.logspace(0, math.log10(ell), m, dtype=torch.float64) @ v
    return x / (1.01 * x.norm())


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("steps", [1, 2, 5, 6])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_both_forms_are_one_map(shape: tuple[int, int], steps: int, batch: tuple[int, ...]) -> None:
    coefficients = compose(1e-2, steps)
    x = unit_matrix(*shape)
    if batch:
        x = torch.stack([x, -x, x.flip(0)])
    before, short = x.clone(), x.mT if shape[0] > shape[1] else x
    expected = standard(x, coefficients)
    for known in (None, short @ short.mT):
        for form in (standard, gram):
            given = None if known is None else known.clone()
            found = form(x, coefficients, given)
            # Float64, whose rounding pairs of steps multiply by up to 1e4 here.
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
            assert found.is_contiguous()
    assert torch.equal(x, before)


@pytest.mark.parametrize("m", [255, 256, 391, 1100])
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_blocks_of_a_symmetric_product_are_all_of_it(
    m: int, batch: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = torch.randn(*batch, m, 70, generator=torch.Generator().manual_seed(0)).to(dtype) / 8
    added = symmetric_product(x)
    found = symmetric_product(x, added, -0.7, 1.3)
    exact = -0.7 * added.double() + 1.3 * x.double() @ x.double().mT
    # One rounding of bfloat16, of entries up to about two; float64 sums of 70.
    atol = 1e-2 if dtype == torch.bfloat16 else 1e-13
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=atol)


@pytest.mark.parametrize("requested", NS_BACKENDS)
@pytest.mark.parametrize("preconditioner", ["frobenius", "aol"])
@pytest.mark.parametrize("shape", [(2, 300, 70), (2, 300, 140)])
def test_orthogonalize_runs_any_backend(
    requested: str, preconditioner: str, shape: tuple[int, ...]
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    args = {"preconditioner": preconditioner, "dtype": torch.float32}
    found = orthogonalize(x, compose(1e-2, 5), backend=requested, **args)  # type: ignore[arg-type]
    expected = orthogonalize(x, compose(1e-2, 5), backend="standard", **args)  # type: ignore[arg-type]
    # float32 products keep about 5e-7, several times over.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="backend: found 'fast'"):
        orthogonalize(x, compose(1e-2, 5), backend="fast")


@pytest.mark.parametrize("backend", ["standard", "gram"])
@pytest.mark.parametrize("preconditioner", ["frobenius", "aol"])
def test_batched_products_agree_with_the_loop(backend: str, preconditioner: str) -> None:
    x = torch.randn(3, 150, 130, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[1] = 0
    options: Any = {"norm_scale": 1.01, "preconditioner": preconditioner, "dtype": torch.float64}
    expected = newton_schulz(x, KJ, backend=backend, **options)
    with mock.patch.object(module, "on_cpu", return_value=False):
        found = newton_schulz(x, KJ, backend=backend, **options)
    # Batched products may sum in another order; float64, lifted by the slopes of five quintics.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


def test_what_auto_gives_the_gram_form() -> None:
    def chosen(m: int, n: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> str:
        return resolve_backend("auto", (m, n), KJ, dtype, torch.device(device))

    for dtype in (torch.float32, torch.float64):
        assert chosen(1024, 3072, dtype) == chosen(3072, 1024, dtype) == "gram"
        assert chosen(128, 256, dtype) == "gram"
        assert chosen(1024, 2047, dtype) == chosen(1024, 1024, dtype) == "standard"
        assert chosen(127, 1024, dtype) == "standard"
    assert chosen(1024, 3072, torch.bfloat16) == chosen(1024, 3072, torch.float16) == "standard"
    assert chosen(1024, 3072, device="cuda") == chosen(1024, 3072, device="meta") == "standard"


def test_the_gram_form_by_name_gives_way_where_it_is_not_exact() -> None:
    def found(m: int, n: int, dtype: torch.dtype, device: str) -> str:
        return resolve_backend("gram", (m, n), KJ, dtype, torch.device(device))

    for device in ("cpu", "cuda"):
        assert found(300, 128, torch.float32, device) == "gram"
        assert found(300, 127, torch.float32, device) == "standard"
        assert found(1024, 3072, torch.bfloat16, device) == "standard"
        assert found(1024, 3072, torch.float16, device) == "standard"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("requested", NS_BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_batch_is_the_loop_on_cuda(requested: str, dtype: torch.dtype) -> None:
    x = torch.randn(4, 136, 256, generator=torch.Generator().manual_seed(0)).cuda()
    args = {"dtype": dtype, "backend": requested}
    found = orthogonalize(x, compose(1e-2, 5), **args)  # type: ignore[arg-type]
    loop = torch.stack([orthogonalize(each, compose(1e-2, 5), **args) for each in x])  # type: ignore[arg-type]
    # Batched products sum in another order: the dtype's floor, a few times over.
    floor = 2e-2 if dtype == torch.bfloat16 else 5e-6
    assert relative(found, loop.double()) < floor
