"""Single steps and pairs of steps are one map, and a rule tells which are taken."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from amo_dist.kernels import elementwise
from amo_dist.kernels import newton_schulz as module
from amo_dist.kernels.newton_schulz import (
    orthogonalize,
    run_steps,
    safe_sizes,
    standard,
    step_sizes,
)
from amo_dist.schedule.coefficients import named_schedule
from amo_dist.schedule.polar_express import compose, schedule_for
from amo_dist.schedule.types import Schedule

KJ = ((3.4445, -4.7750, 2.0315),) * 5
SHAPES = [(1, 1), (1, 9), (7, 7), (16, 48), (33, 99), (99, 33), (64, 65), (130, 400), (400, 130)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("steps", [1, 2, 5, 6])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_both_forms_are_one_map(shape: tuple[int, int], steps: int, batch: tuple[int, ...]) -> None:
    coefficients = compose(1e-2, steps)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(shape[0]), dtype=torch.float64)
    x /= 1.01 * x.norm()
    if batch:
        x = torch.stack([x, -x, x.flip(0)])
    before, short = x.clone(), x.mT if shape[0] > shape[1] else x
    expected = module.standard(x, coefficients)
    halves = [1] * (steps % 2) + [2] * (steps // 2)
    for known in (None, short @ short.mT):
        for sizes in ([1] * steps, halves, halves[::-1]):
            start = None if known is None else known.clone()
            found = run_steps(x, coefficients, sizes, start)
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
    added = module.symmetric_product(x)
    found = module.symmetric_product(x, added, -0.7, 1.3)
    exact = -0.7 * added.double() + 1.3 * x.double() @ x.double().mT
    # One rounding of bfloat16, of entries up to about two; float64 sums of 70.
    atol = 1e-2 if dtype == torch.bfloat16 else 1e-13
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=atol)


@pytest.mark.parametrize("backend", module.NS_BACKENDS)
@pytest.mark.parametrize("preconditioner", ["frobenius", "aol"])
@pytest.mark.parametrize("size", [70, 140])
def test_every_backend_agrees_with_the_loop_of_single_steps(
    backend: str, preconditioner: str, size: int
) -> None:
    shape = (3, 2 * size + 10, size)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[1] = 0
    options: Any = {"norm_scale": 1.01, "preconditioner": preconditioner, "dtype": torch.float64}
    expected = orthogonalize(x, KJ, backend="standard", **options)
    for on_cpu in (True, False):
        with mock.patch.object(module, "on_cpu", return_value=on_cpu):
            found = orthogonalize(x, KJ, backend=backend, **options)
        # Products may sum in another order; float64, lifted by the slopes of five quintics.
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


class Float64Copies(TorchDispatchMode):
    """Sizes of the tensors that a reduction in float64 would copy on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.float64 in (*args, *(kwargs or {}).values()):
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def test_devices_copy_no_batch_in_float64() -> None:
    x = torch.randn(3, 160, 130, generator=torch.Generator().manual_seed(0)).bfloat16()
    with mock.patch.object(module, "on_cpu", return_value=False), Float64Copies() as copies:
        results = orthogonalize(x, KJ, dtype=torch.bfloat16)
        with mock.patch.object(elementwise, "on_cpu", return_value=False):
            elementwise.drop_nonfinite(results)
    assert max(copies.sizes, default=0) <= len(x)


SINGLE, WIDE, NARROW = (1,) * 5, (2, 2, 1), (1, 2, 2)
Sizes = tuple[int, ...]


@pytest.mark.parametrize(
    ("backend", "device", "shape", "wide", "narrow"),
    [
        ("auto", "cpu", (1024, 3072), WIDE, NARROW),
        ("auto", "cpu", (2560, 1024), WIDE, NARROW),
        ("auto", "cpu", (1024, 2559), WIDE, SINGLE),
        ("auto", "cpu", (1024, 2047), SINGLE, SINGLE),
        ("auto", "cpu", (64, 1024), WIDE, NARROW),
        ("auto", "cpu", (63, 1024), SINGLE, SINGLE),
        ("auto", "cuda", (1024, 2560), SINGLE, NARROW),
        ("auto", "cuda", (127, 1024), SINGLE, SINGLE),
        # By name they are taken for every aspect.
        ("gram", "cpu", (300, 64), WIDE, NARROW),
        ("gram", "cpu", (300, 63), SINGLE, SINGLE),
        ("gram", "cuda", (300, 128), WIDE, NARROW),
        ("gram", "cuda", (300, 127), SINGLE, SINGLE),
        ("standard", "cpu", (128, 3000), SINGLE, SINGLE),
    ],
)
def test_pairs_are_taken_where_they_save_time(
    backend: str, device: str, shape: tuple[int, int], wide: Sizes, narrow: Sizes
) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        found = module.step_sizes(backend, shape, KJ, dtype, torch.device(device))
        assert found == (narrow if dtype.itemsize == 2 else wide)


def test_a_pair_is_safe_where_later_steps_bear_its_rounding() -> None:
    # A quintic that is flat at one bears much; composed steps diverge 1 % above their interval.
    # Coefficients of a user may diverge anyway, and overflow: no pair, no error.
    flat = ((15 / 8, -10 / 8, 3 / 8),) * 4
    for dtype, sizes in ((torch.bfloat16, (1, 1, 1, 2)), (torch.float16, (1, 2, 2))):
        eps = torch.finfo(dtype).eps
        assert safe_sizes(flat, eps) == (2, 2)
        assert safe_sizes(compose(1.01e-3, 5), eps) == sizes
        assert safe_sizes(((1e200, 1e200, 1e200),) * 3, eps) == (1, 1, 1)
        assert safe_sizes(((2.0, -1.0, 0.0),), eps) == (1,)
        assert safe_sizes(((1.5, -0.5, 0.0),) * 2, eps) == (2,)


@pytest.mark.cuda
@pytest.mark.parametrize("requested", module.NS_BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_batch_is_the_loop_on_cuda(requested: str, dtype: torch.dtype) -> None:
    x = torch.randn(4, 136, 256, generator=torch.Generator().manual_seed(0)).cuda()
    args: Any = {"dtype": dtype, "backend": requested}
    found = orthogonalize(x, compose(1e-2, 5), **args)
    loop = torch.stack([orthogonalize(matrix, compose(1e-2, 5), **args) for matrix in x])
    # Batched products sum in another order: the dtype's floor, a few times over.
    floor = 2e-2 if dtype == torch.bfloat16 else 5e-6
    assert (found - loop).double().norm() < floor * loop.double().norm()


# ---------------------------------------------------------------- pairs never diverge


NAMES = ("kj", "you", "pe", "turbo", "cans")
SCHEDULES: dict[str, Schedule] = {name: named_schedule(name).schedule for name in NAMES}
SCHEDULES |= {
    f"{ell:.0e} in {steps}": schedule_for(ell, steps)
    for steps in range(3, 9)
    for ell in (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
}
NUM_MATRICES = 144
"""Matrices of each schedule and dtype: 15,120 for 35 schedules in three dtypes."""
ROWS, COLUMNS = 16, 40


@pytest.fixture(scope="module")
def bases() -> tuple[Tensor, Tensor, Tensor]:
    """Gaussian matrices, and their singular vectors, which stand in new pairs for each schedule."""
    gaussian = torch.randn(NUM_MATRICES, ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    left, _, right = torch.linalg.svd(gaussian.double(), full_matrices=False)
    return gaussian.double(), left, right


def hostile(bases: tuple[Tensor, Tensor, Tensor], seed: int) -> Tensor:
    """Float64 matrices of Frobenius norm one: an eighth of each kind, random in its parameters."""
    draw = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(count, *shape, generator=draw, dtype=torch.float64)

    count, i = NUM_MATRICES // 8, torch.arange(ROWS, dtype=torch.float64)
    gaussian, left, right = (
        basis[torch.randperm(NUM_MATRICES, generator=draw)].split(count) for basis in bases
    )
    num_large = 1 + (uniform(1) ** 2 * ROWS / 2).floor()
    spectra = [
        10 ** (-6 * uniform(1) * i / ROWS),
        (1 + i) ** -(0.2 + 2 * uniform(1)),
        torch.where(i < num_large, 1.0, 10 ** (-4 * uniform(1))),
    ]
    # Left singular vectors close to unit vectors: the roundings of A do not average out.
    rows = [10 ** (-4 * uniform(1) * i / ROWS), (1 + i) ** -(0.2 + 2 * uniform(1))]
    spikes = torch.where(i < num_large, 1.0, 10 ** (-3 * uniform(1))).diag_embed()
    spikes = torch.nn.functional.pad(spikes, (0, COLUMNS - ROWS))
    sparse = (uniform(ROWS, COLUMNS) < 0.05) * gaussian[1]
    sparse[:, 0, 0] += 20 * uniform()
    x = torch.cat(
        [
            gaussian[0],
            *(left[k] * sigma[:, None] @ right[k] for k, sigma in enumerate(spectra)),
            *(sigma[:, :, None] * gaussian[2 + k] for k, sigma in enumerate(rows)),
            spikes + 1e-3 * uniform(1, 1) * gaussian[4],
            sparse,
        ]
    )
    return x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)


def greatest(x: Tensor) -> float:
    """The greatest singular value of all matrices."""
    x = x.double()
    assert x.isfinite().all()
    return torch.linalg.eigvalsh(x @ x.mT).max().sqrt().item()


def errors(results: Tensor, exact: Tensor) -> Tensor:
    dims = (-2, -1)
    norm = torch.linalg.vector_norm(exact, dim=dims)
    return torch.linalg.vector_norm(results.double() - exact, dim=dims) / norm


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", SCHEDULES)
def test_safe_pairs_never_diverge(
    name: str, dtype: torch.dtype, bases: tuple[Tensor, Tensor, Tensor]
) -> None:
    # Pairs throughout gave NaN for up to a fifth of decaying rows in bfloat16, and singular values
    # of 1e3 for one matrix in a hundred: what exceeds one by 1 % diverges in the steps that follow.
    schedule = SCHEDULES[name]
    coefficients = schedule.coefficients
    x = hostile(bases, seed=list(SCHEDULES).index(name)).div(schedule.norm_scale).to(dtype)
    # Their shapes are too small for pairs: the sizes are those of larger ones of the same aspect.
    sizes = step_sizes("auto", (320, 800), coefficients, dtype, torch.device("cpu"))
    exact = standard(x.double(), coefficients)
    results = run_steps(x, coefficients, sizes)
    # Measured on 68,000 matrices of 16 to 128 rows: at most 1.13 of the greatest of exact steps,
    # and 1.06 without pairs; the rule allows 1.5, or 1.25 of the greatest where that is more.
    assert greatest(results) < max(1.5, 1.25 * greatest(exact))
    single, pairs = errors(standard(x, coefficients), exact), errors(results, exact)
    # Measured: at most 4.3 on average over the matrices of a schedule, 2.9 for the largest error;
    # in float32 1.4 and 2.4.
    assert (pairs / single).log().mean().exp() < 5
    assert pairs.max() < 4 * single.max()
