"""Muon-CANS in bfloat16: what diverges as printed stays bounded by the guard of the named table."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from amo_dist.config import Triple
from amo_dist.kernels.newton_schulz import orthogonalize
from amo_dist.schedule.coefficients import CANS_GUARD, named_schedule
from amo_dist.schedule.types import evaluate

PRINTED: tuple[Triple, ...] = (
    (8.4703, -25.1081, 18.6293),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
)
GUARDED = named_schedule("cans").schedule
# The peak of the last map, 1.12, and what five roundings in bfloat16 add to it.
BOUND = 1.2
# Found by a search for entries that rounding lifts the most; half of the guard lets it diverge.
WORST = ((45.0, -37.0, -33.0), (-6.0, 50.0, 47.0))


def orthogonal_rows(m: int, n: int, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    q: Tensor = torch.linalg.qr(torch.randn(n, m, generator=draw))[0]
    return q.mT.contiguous()


def spiked(m: int, n: int, seed: int) -> Tensor:
    """One singular value above the others, which are alike."""
    draw = torch.Generator().manual_seed(seed)
    level = torch.rand((), generator=draw)
    sigma = torch.cat([torch.ones(1), level.expand(m - 1)])
    left, right = orthogonal_rows(m, m, seed + 1), orthogonal_rows(m, n, seed + 2)
    return left * sigma @ right


def largest(x: Tensor, coefficients: tuple[Triple, ...], backend: str = "auto") -> float:
    scale = GUARDED.norm_scale
    found = orthogonalize(x, coefficients, norm_scale=scale, backend=backend).double()
    return float(torch.linalg.matrix_norm(found.nan_to_num(1e30, 1e30, -1e30), ord=2).max())


# Small and narrow, in which single roundings count, and one in which they average.
SHAPES = [(2, 3), (4, 5), (6, 6), (6, 256), (7, 14), (12, 13), (128, 129)]


@pytest.mark.parametrize("kind", [orthogonal_rows, spiked])
@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_stay_bounded(
    shape: tuple[int, int], kind: Callable[[int, int, int], Tensor]
) -> None:
    m, n = shape
    batch = torch.stack([kind(m, n, seed) for seed in range(8 if m > 100 else 50)])
    for backend in ("auto", "standard", "gram"):
        assert largest(batch, GUARDED.coefficients, backend) < BOUND
    assert largest(batch.mT, GUARDED.coefficients) < BOUND


def test_without_the_guard_they_diverge() -> None:
    x = torch.tensor(WORST)
    assert largest(x, PRINTED) > 10  # measured: 1e6 and more
    for backend in ("auto", "standard", "gram"):
        assert largest(x, GUARDED.coefficients, backend) < BOUND


def test_each_step_after_the_first_bears_a_larger_input() -> None:
    assert GUARDED.coefficients[0] == PRINTED[0]
    for triple, printed in zip(GUARDED.coefficients[1:], PRINTED[1:], strict=True):
        # The same polynomial of an input that is smaller by the guard.
        expected = evaluate(printed, 0.7 / CANS_GUARD)
        assert evaluate(triple, 0.7) == pytest.approx(expected, rel=1e-14)
