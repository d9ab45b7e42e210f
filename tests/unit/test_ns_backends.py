from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from amo_dist.config import NS_BACKENDS, Triple
from amo_dist.kernels import plain
from amo_dist.kernels.cpu import backends, program
from amo_dist.kernels.cpu.backends import STANDARD, Backend, batch_size, choose_backend, cost
from amo_dist.kernels.cpu.program import Program
from amo_dist.kernels.cpu.workspace import Workspace
from amo_dist.kernels.devices import make_kernels
from amo_dist.kernels.interface import Kernels
from amo_dist.kernels.newton_schulz import orthogonalize
from amo_dist.kernels.plain import short_side
from amo_dist.schedule.budget import ns_step_flops
from amo_dist.schedule.polar_express import compose

KJ = ((3.4445, -4.7750, 2.0315),) * 5
FLOAT32_UNIT = 2 * torch.finfo(torch.float32).eps
SHAPES = [(1, 1), (1, 9), (7, 7), (16, 48), (33, 99), (99, 33), (64, 65), (130, 400), (400, 130)]
ON_CPU = [name for name in NS_BACKENDS if name not in ("triton", "gram_newton_schulz")]
ELLS = [1e-2, 1e-3, 1e-4, 1e-6, 1e-8]


def unit_matrix(m: int, n: int, ell: float | None = None) -> Tensor:
    """Float64, Frobenius norm below one: Gaussian, or with singular values decaying to ``ell``."""
    generator = torch.Generator().manual_seed(m)
    x = torch.randn(m, n, generator=generator, dtype=torch.float64)
    if ell is not None:
        u, _, v = torch.linalg.svd(x, full_matrices=False)
        x = u * torch.logspace(0, math.log10(ell), m, dtype=torch.float64) @ v
    return x / (1.01 * x.norm())


def iterate(
    x: Tensor, coefficients: Sequence[Triple], backend: Backend, gram: Tensor | None = None
) -> Tensor:
    """The steps, on memory of their own, which holds NaN before."""
    out, workspace = torch.full_like(x, torch.nan), Workspace(x.device)
    for use in ("iterate", "iterate 2", "gram", "half"):
        workspace.take(use, x.shape, x.dtype).fill_(torch.nan)
    steps = Program(x, out, coefficients, backend, workspace, has_gram=gram is not None)
    if gram is not None:
        steps.gram.copy_(gram)
    steps.run()
    return out


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_all_backends_are_one_map(
    shape: tuple[int, int], blocks: int, steps: int, batch: tuple[int, ...]
) -> None:
    coefficients = compose(1e-2, steps)
    x = unit_matrix(*shape)
    if batch:
        x = torch.stack([x, -x, x.flip(0)])
    expected = iterate(x, coefficients, STANDARD)
    for backend in (
        Backend("symmetric", blocks, blocks),
        Backend("symmetric", blocks, 1, panels=3),
        Backend("gram", blocks, blocks),
        Backend("gram", blocks, 1, tuple(range(1, steps))),
        Backend("gram", 1, blocks, tuple(range(2, steps, 2))),
    ):
        found = iterate(x, coefficients, backend)
        # Float64; without restarts the Gram form multiplies rounding by up to 5e5 here.
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
        short = short_side(x)
        given = iterate(x, coefficients, backend, short @ short.mT)
        torch.testing.assert_close(given, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("requested", ON_CPU)
@pytest.mark.parametrize("preconditioner", ["frobenius", "aol"])
def test_orthogonalize_runs_any_backend(requested: str, preconditioner: str) -> None:
    x = torch.randn(2, 300, 70, generator=torch.Generator().manual_seed(0))
    args = {"preconditioner": preconditioner, "dtype": torch.float32}
    found = orthogonalize(x, compose(1e-2, 5), backend=requested, **args)  # type: ignore[arg-type]
    expected = orthogonalize(x, compose(1e-2, 5), backend="standard", **args)  # type: ignore[arg-type]
    # float32 products keep about 5e-7, several times over.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="backend: found 'fast'"):
        orthogonalize(x, compose(1e-2, 5), backend="fast")


@pytest.mark.parametrize("shape", [(768, 2400), (2400, 768)])
def test_panels_change_no_bit(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16() / 1500
    backend = choose_backend(shape, KJ[:2], dtype=torch.bfloat16)
    assert (backend.name, backend.panels) == ("symmetric", 6)
    found = iterate(x, KJ[:2], backend)
    assert torch.equal(found, iterate(x, KJ[:2], dataclasses.replace(backend, panels=1)))


def test_panels_are_for_what_is_long_narrow_and_not_small() -> None:
    def panels(m: int, n: int, dtype: torch.dtype) -> int:
        return choose_backend((m, n), KJ, dtype=dtype).panels

    assert panels(1024, 3072, torch.bfloat16) == 8
    assert panels(3072, 1024, torch.bfloat16) == 8
    assert panels(1024, 3072, torch.float32) == 1
    assert panels(1024, 1024, torch.bfloat16) == 1
    assert panels(512, 1536, torch.bfloat16) == 1


def test_small_matrices_run_together_on_cpu_where_the_loop_has_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def size(shape: tuple[int, int], **given: object) -> int:
        arguments: dict[str, Any] = {"dtype": torch.bfloat16, **given}
        return batch_size(arguments.pop("backend", STANDARD), shape, **arguments)

    monkeypatch.setattr(backends, "_has_bfloat16", lambda: True)
    # X and the next one, A and its polynomial: 0.5 and 1.25 MiB of 4.
    assert size((256, 256)) == 8
    assert size((256, 1024)) == size((1024, 256)) == 3
    assert size((2048, 2048)) == 1
    assert size((63, 256)) == 1
    assert size((256, 256), backend=Backend("symmetric", 2, 2)) == 1
    assert size((256, 256), dtype=torch.float32) == 1
    monkeypatch.setattr(backends, "_has_bfloat16", lambda: False)
    assert size((256, 256)) == 1


def test_processors_tell_what_they_multiply_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(**found: bool) -> bool:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
        return backends._has_bfloat16.__wrapped__()

    assert asked(avx512_bf16=True, amx_bf16=False)
    assert not asked(avx512_bf16=True, amx_bf16=True)  # has not been tried
    assert not asked(avx2=True)
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert not backends._has_bfloat16.__wrapped__()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_symmetric_is_as_exact_as_standard(dtype: torch.dtype) -> None:
    # Also on the hardest: rounding is the same, only the order of a sum may differ.
    for ell in (None, 1e-3, 1e-6):
        x = unit_matrix(64, 192, ell)
        coefficients = compose(1e-3, 5)
        exact = iterate(x, coefficients, STANDARD)
        standard = relative(iterate(x.to(dtype), coefficients, STANDARD), exact)
        found = relative(iterate(x.to(dtype), coefficients, Backend("symmetric", 4, 2)), exact)
        # Two draws of one error differ by tens of percent.
        assert found < 1.5 * standard


@pytest.mark.parametrize("shape", [(7, 7), (16, 48), (99, 33), (130, 400)])
@pytest.mark.parametrize("restarts", [(), (1,), (2,), (2, 3, 4), (1, 3), (2, 4)])
@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("by_deviations", [True, False])
def test_both_gram_forms_are_one_map(
    shape: tuple[int, int],
    restarts: tuple[int, ...],
    batch: tuple[int, ...],
    by_deviations: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coefficients = compose(1e-2, 5)
    x = unit_matrix(*shape)
    if batch:
        x = torch.stack([x, -x, x.flip(0)])
    expected = iterate(x, coefficients, STANDARD)
    short = short_side(x)
    monkeypatch.setattr(program, "is_narrow", lambda dtype: by_deviations)
    for gram in (None, short @ short.mT):
        for blocks in ((1, 1), (2, 4)):
            backend = Backend("gram", *blocks, restarts, panels=2)
            found = iterate(x, coefficients, backend, gram)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("shape", [*SHAPES, (256, 256), (768, 900)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_standard_form_has_the_bits_of_the_plain_one(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    x = unit_matrix(*shape).to(dtype)
    short = short_side(x)
    for gram in (None, short @ short.mT):
        found = iterate(x, KJ, STANDARD, gram)
        assert torch.equal(found, plain.iterate(x, KJ, gram))


def test_narrow_dtypes_take_the_first_pair_where_it_pays() -> None:
    def chosen(m: int, n: int, ell: float, steps: int, requested: str = "auto") -> Backend:
        return choose_backend(
            (m, n),
            compose(1.01 * ell, steps),
            dtype=torch.bfloat16,
            requested=requested,
        )

    assert chosen(256, 1024, 1e-2, 4) == Backend("gram", 1, 1, (2, 3))
    assert chosen(1024, 256, 1e-2, 4) == Backend("gram", 1, 1, (2, 3))
    assert chosen(1024, 3072, 1e-2, 5) == Backend("gram", 8, 4, (2, 3, 4), panels=8)
    assert chosen(1024, 1024, 1e-2, 5).name == "symmetric"
    assert chosen(256, 512, 1e-2, 5).name == "standard"
    assert chosen(256, 1024, 1e-3, 5).name == "gram"
    assert chosen(255, 1024, 1e-3, 5).name == "standard"
    assert chosen(64, 256, 1e-2, 5).name == "standard"
    assert chosen(256, 512, 1e-2, 5, "gram") == Backend("gram", 1, 1, (2, 3, 4))
    assert chosen(64, 256, 1e-2, 5, "gram") == Backend("gram", 1, 1, (2, 3, 4))
    # There are no two steps before the last.
    assert chosen(256, 1024, 1e-2, 2, "gram").name == "symmetric"


def test_choice_by_shape() -> None:
    def chosen(m: int, n: int, dtype: torch.dtype) -> Backend:
        return choose_backend((m, n), compose(1.01e-3, 5), dtype=dtype)

    def name(*args: Any) -> str:
        return chosen(*args).name

    assert name(64, 64, torch.float32) == "standard"
    assert name(1024, 1024, torch.float32) == "symmetric"
    assert name(1024, 3072, torch.float32) == name(3072, 1024, torch.float32) == "gram"
    assert name(256, 512, torch.bfloat16) == "standard"
    # The longer a product, the less its blocks cost beside what they save.
    assert chosen(512, 512, torch.bfloat16) == Backend("symmetric", 2, 2)
    assert chosen(512, 1536, torch.bfloat16) == Backend("gram", 4, 2, (2, 3, 4))
    assert name(2048, 2048, torch.bfloat16) == "symmetric"
    assert name(2048, 6144, torch.bfloat16) == "gram"


@pytest.mark.parametrize("requested", ON_CPU)
def test_unmeasured_devices_run_what_they_are_asked_for_by_name(requested: str) -> None:
    # Kernels of a device are made without touching it.
    shape, coefficients = (2048, 6144), compose(1.01e-3, 5)
    for device in ("cuda", "meta"):
        kernels = make_kernels(
            torch.device(device), ns_dtype=torch.float32, ns_backend=requested, cuda_graphs=False
        )
        expected = "standard" if requested == "auto" else requested
        assert kernels.backend_name(shape, coefficients) == expected
        assert kernels.task_elements is None


@pytest.mark.parametrize("requested", ["symmetric", "gram"])
@pytest.mark.parametrize("preconditioner", ["frobenius", "aol"])
def test_forms_by_name_run_on_batches_of_any_device(requested: str, preconditioner: str) -> None:
    x = torch.randn(3, 40, 25, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    coefficients = compose(1e-2, 5)
    run = Kernels(torch.float64, requested).orthogonalizer(
        3, (40, 25), coefficients, 1.01, preconditioner
    )
    expected = orthogonalize(
        x, coefficients, dtype=torch.float64, backend="standard", preconditioner=preconditioner
    )
    # Float64; the Gram form multiplies rounding.
    torch.testing.assert_close(run(list(x)), expected, rtol=0, atol=1e-9)


def test_cost_without_overhead_counts_flops() -> None:
    m, n = 128, 384
    assert cost(STANDARD, m, n, 5) == 5 * ns_step_flops(m, n)
    assert cost(Backend("symmetric"), m, n, 5) == 5 * ns_step_flops(m, n)
    # By hand: 3 blocks of 4, and 10 of 16.
    expected = 2 * m * m * (0.75 * n + 0.625 * m + n)
    assert cost(Backend("symmetric", 2, 4), m, n, 1) == expected
    # Two segments of 2 and 3 steps: 4 large products, and of the small ones 3 + 6.
    by_hand = 4 * (2 * m * m * n) + (2 + 1 + 2 + 3 + 2 + 4) * 2 * m**3
    assert cost(Backend("gram", restarts=(2,)), m, n, 5) == by_hand


def test_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    backends._log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="amo_dist.kernels.cpu.backends"):
        for ell in (1e-3, 1.1e-3, 1.2e-3):
            choose_backend((64, 640), compose(ell, 5), dtype=torch.float32)
    assert len(caplog.records) == 1
    assert "64 x 640, 5 steps" in caplog.text


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("requested", [*ON_CPU, "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_batch_is_the_loop_on_cuda(requested: str, dtype: torch.dtype) -> None:
    x = torch.randn(4, 96, 256, generator=torch.Generator().manual_seed(0)).cuda()
    args = {"dtype": dtype, "backend": requested}
    found = orthogonalize(x, compose(1e-2, 5), **args)  # type: ignore[arg-type]
    loop = torch.stack([orthogonalize(each, compose(1e-2, 5), **args) for each in x])  # type: ignore[arg-type]
    # Batched products sum in another order: the dtype's floor, a few times over.
    floor = 2e-2 if dtype == torch.bfloat16 else 5e-6
    assert relative(found, loop.double()) < floor
