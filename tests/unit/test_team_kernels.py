"""Newton-Schulz of slabs on several members equals that of the whole matrix, to rounding."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from amo_dist.distributed.teams import slabs
from amo_dist.kernels.newton_schulz import orthogonalize
from amo_dist.kernels.team import drop_nonfinite_slabs, orthogonalize_slabs
from amo_dist.schedule.polar_express import compose

STEPS = compose(1e-3, 5)
SHAPES = [(6, 40), (40, 6), (16, 16), (5, 7), (7, 5), (1, 9), (9, 1), (24, 25)]
"""Wide, tall, square; slabs of unequal widths, and narrower than the short side."""


class Member:
    """One of several threads that bring together what they hold."""

    def __init__(self, rank: int, held: list[Tensor | None], barrier: threading.Barrier) -> None:
        self._rank, self._held, self._barrier = rank, held, barrier

    def add(self, values: Tensor) -> None:
        self._bring(values, lambda found: found.sum(dim=0))

    def take_greatest(self, values: Tensor) -> None:
        # NaN is lost, as a maximum of NCCL's may lose it.
        self._bring(values, lambda found: found.nan_to_num(0.0, torch.inf).amax(dim=0))

    def _bring(self, values: Tensor, how: Callable[[Tensor], Tensor]) -> None:
        assert values.is_contiguous()
        self._held[self._rank] = values.clone()
        self._barrier.wait(20)
        found = how(torch.stack([each for each in self._held if each is not None]))
        self._barrier.wait(20)
        values.copy_(found)


def share(
    matrices: list[Tensor],
    size: int,
    preconditioner: str = "frobenius",
    dtype: torch.dtype = torch.float32,
    steps: tuple[tuple[float, float, float], ...] = STEPS,
) -> tuple[Tensor, list[list[bool]]]:
    """The results put together, and which of them each member dropped."""
    held: list[Tensor | None] = [None] * size
    barrier = threading.Barrier(size)
    shape = matrices[0].shape

    def run(rank: int) -> tuple[Tensor, list[bool]]:
        (top, bottom), (left, right) = slabs((shape[0], shape[1]), size)[rank]
        team = Member(rank, held, barrier)
        found = orthogonalize_slabs(
            torch.stack([matrix[top:bottom, left:right] for matrix in matrices]),
            steps,
            norm_scale=1.01,
            preconditioner=preconditioner,
            dtype=dtype,
            team=team,
            is_tall=shape[0] > shape[1],
        )
        return found, drop_nonfinite_slabs(found, team).flatten().tolist()

    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(run, range(size)))
    dim = 1 if shape[0] > shape[1] else 2
    return torch.cat([found for found, _ in results], dim), [bad for _, bad in results]


def random(shape: tuple[int, int], count: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    scales = torch.logspace(0, -2, min(shape))
    found = torch.randn(count, *shape, generator=generator)
    return list(found * (scales if shape[0] > shape[1] else scales[:, None]))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("preconditioner", ["frobenius", "aol"])
def test_slabs_give_the_whole_result(
    shape: tuple[int, int], size: int, preconditioner: str
) -> None:
    matrices = random(shape)
    found, bad = share(matrices, size, preconditioner=preconditioner)
    expected = orthogonalize(
        torch.stack(matrices), STEPS, dtype=torch.float32, preconditioner=preconditioner
    )
    # float32, in which five steps multiply what rounding does to small singular values.
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    assert bad == [[False, False]] * size


@pytest.mark.parametrize("shape", [(32, 96), (96, 32)])
def test_bfloat16_is_as_exact_as_on_one_rank(shape: tuple[int, int]) -> None:
    matrices = random(shape, 12)
    stacked = torch.stack(matrices)
    exact = orthogonalize(stacked.double(), STEPS, dtype=torch.float64)
    found, _ = share(matrices, 4, dtype=torch.bfloat16)
    whole = orthogonalize(stacked, STEPS, dtype=torch.bfloat16, backend="standard")
    errors = [float((each.double() - exact).norm()) for each in (found, whole)]
    # Partial sums are rounded once more, by about as much as their sum: less than sqrt(2) in all.
    assert errors[0] < 1.4 * errors[1]


@pytest.mark.parametrize("preconditioner", ["frobenius", "aol"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_bad_entry_of_one_slab_drops_the_matrix_on_all_members(
    preconditioner: str, value: float
) -> None:
    matrices = random((6, 40), 3)
    matrices[1][0, 39] = value
    found, bad = share(matrices, 4, preconditioner)
    assert bad == [[False, True, False]] * 4
    assert not found[1].any()
    assert found[[0, 2]].isfinite().all()


def test_what_overflows_in_the_last_step_of_one_member_is_dropped_on_all() -> None:
    matrix = torch.zeros(2, 8)
    matrix[0, 0] = matrix[1, 1] = 1.0
    _, bad = share([matrix], 2, steps=((3e38, 3e38, 3e38),))
    assert bad == [[True]] * 2


def test_zero_matrices_give_zeros_and_scales_do_not_matter() -> None:
    found, bad = share([torch.zeros(4, 12)], 2)
    assert not found.any()
    assert bad == [[False]] * 2
    (matrix,) = random((4, 12), 1)
    tiny, _ = share([matrix * 2.0**-100], 2)  # whose squares vanish
    huge, _ = share([matrix * 2.0**100], 2)
    assert torch.equal(tiny, huge)
