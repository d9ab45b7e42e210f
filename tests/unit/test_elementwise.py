from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from amo_dist.kernels import elementwise
from amo_dist.kernels.elementwise import apply_update, drop_nonfinite, update_momentum


@pytest.fixture(params=["devices", "cpu"], autouse=True)
def each_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "devices":
        monkeypatch.setattr(elementwise, "on_cpu", lambda tensor: False)


MOMENTUM = 0.95


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nesterov_is_rounded_once_into_given_places(dtype: torch.dtype) -> None:
    # Columns of a wider matrix, larger than what CPU takes at once, and a flat buffer.
    shape = (2**12, 130)
    buffer, grad = (torch.randn(shape) for _ in range(2))
    wide, flat = torch.zeros(shape[0], 200, dtype=dtype), torch.zeros(buffer.numel(), dtype=dtype)
    places = [wide[:, 30:160], flat.view(shape)]
    elementwise.look_ahead([buffer] * 2, [grad] * 2, MOMENTUM, out=places)
    expected = (buffer * MOMENTUM + grad).to(dtype)
    assert all(torch.equal(place, expected) for place in places)
    assert wide[:, :30].count_nonzero() == wide[:, 160:].count_nonzero() == 0


def test_mixed_dtypes_in_one_list() -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
    params = [torch.full((5,), 1.5, dtype=d) for d in dtypes]
    alone = [w.clone() for w in params]
    updates = [torch.full((5,), 0.7, dtype=torch.bfloat16) for _ in dtypes]
    apply_update(params, updates, lr=0.1, weight_decay=0.1, scales=[0.3] * len(params))
    for w, single, x in zip(params, alone, updates, strict=True):
        apply_update([single], [x], lr=0.1, weight_decay=0.1, scales=[0.3])
        assert torch.equal(w, single)


@pytest.mark.parametrize("lr_dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_tensor_learning_rate_gives_the_bits_of_a_float(
    lr_dtype: torch.dtype, weight_decay: float
) -> None:
    # Many rates: arithmetic in float32 would agree on most of them.
    options: dict[str, Any] = {"weight_decay": weight_decay, "scales": [0.2, 0.7]}
    draw = torch.Generator().manual_seed(0)
    for value in torch.linspace(1e-4, 3e-3, 12, dtype=lr_dtype):
        for dtype in (torch.float32, torch.bfloat16):
            params, updates = torch.randn(2, 2, 33, 17, generator=draw).to(dtype)
            by_tensor, by_float = [*params.clone()], [*params]
            apply_update(by_tensor, [*updates], lr=value, **options)
            apply_update(by_float, [*updates], lr=value.item(), **options)
            assert all(map(torch.equal, by_tensor, by_float))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_entries_beyond_a_bound_are_found(dtype: torch.dtype) -> None:
    # Of 1e30 entries the 2-norm is infinite in float32, and no entry is.
    good = [torch.ones(3, 4), torch.full((5,), 1e30), -torch.ones(2), torch.ones(300, 400)]
    bad = [torch.full((), torch.nan), torch.tensor([1.0, -torch.inf]), torch.tensor([1.0, -2.0])]
    found, bounds = [each.to(dtype) for each in [*good, *bad]], [1.0, 1.1e30, 1.0, 1.0] + [1.5] * 3
    given = torch.tensor(bounds, dtype=torch.float64)
    assert elementwise.exceed(found, given).tolist() == [False] * 4 + [True] * 3


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_that_are_not_finite_become_zero(dtype: torch.dtype, value: float) -> None:
    updates = torch.randn(3, 4, 5).to(dtype)
    kept = updates.clone()
    assert drop_nonfinite(updates).flatten().tolist() == [False] * 3
    assert torch.equal(updates, kept)
    # Finite, though their sum is not.
    large = torch.full((1, 4, 5), torch.finfo(dtype).max, dtype=dtype)
    assert drop_nonfinite(large).flatten().tolist() == [False]
    updates[1, 2, 3] = value
    assert drop_nonfinite(updates).flatten().tolist() == [False, True, False]
    assert not updates[1].any()
    assert torch.equal(updates[::2], kept[::2])


def test_lists_with_gaps_between_rows_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device one such tensor would send its whole list to a launch for each tensor."""
    spy = mock.Mock(wraps=torch._foreach_mul_)
    monkeypatch.setattr(torch, "_foreach_mul_", spy)
    buffers = [torch.ones(4, 6), torch.ones(4, 12)[:, :6], torch.ones(4, 6)]
    update_momentum(buffers, [torch.ones(4, 6)] * 3, 0.5)
    lists = [[tensor.is_contiguous() for tensor in call.args[0]] for call in spy.mock_calls]
    assert sorted(lists) == [[False], [True, True]]
    assert all(buffer.eq(1.5).all() for buffer in buffers)


# ---------------------------------------------------------------- a step may change nothing

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gradient_dtype", DTYPES)
@pytest.mark.parametrize("number", [torch.nan, torch.inf, 0.0, -0.0, 1.0])
def test_a_set_mask_changes_no_bit(
    dtype: torch.dtype, gradient_dtype: torch.dtype, number: float
) -> None:
    before = torch.tensor([0.0, -0.0, 1.5, -2e-30, torch.nan, torch.inf]).to(dtype)
    incoming, bad = torch.full((6,), number, dtype=gradient_dtype), torch.tensor(True)
    momentum, param = before.clone(), before.clone()
    update_momentum([momentum], [incoming], 0.9, skip_mask=bad)
    apply_update([param], [incoming], lr=0.1, weight_decay=0.1, scales=[0.2], skip_mask=bad)
    for after in (momentum, param):
        assert torch.equal(after.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_unset_mask_gives_the_bits_of_none(dtype: torch.dtype) -> None:
    values, results = [torch.randn(7, 5).to(dtype) for _ in range(4)], []
    for bad in (None, torch.tensor(False)):
        first, second, *others = (value.clone() for value in values)
        update_momentum([first, second], others, 0.9, skip_mask=bad)
        options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "scales": [0.2, 0.3]}
        apply_update([first, second], others, **options, skip_mask=bad)
        results.append((first, second))
    assert all(map(torch.equal, *results))
