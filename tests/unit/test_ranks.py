"""What one process can show of comparisons among ranks, and of the devices that they use."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from amo_dist.distributed import ranks
from amo_dist.distributed.ranks import (
    RankMismatchError,
    check_alike,
    control_device,
    raise_if_unlike,
)
from amo_dist.engine import world

ALL, PAIR = (0, 1, 2), (3, 1, 2)


@pytest.mark.parametrize(
    ("backends", "expected"), [("cpu:gloo,cuda:nccl", "cpu"), ("cuda:nccl", "cuda:2")]
)
def test_control_tensors_lie_on_the_device_of_the_parameters(
    monkeypatch: pytest.MonkeyPatch, backends: str, expected: str
) -> None:
    """A job whose ranks set no device leaves cuda:0 the current one."""
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: backends)
    group: Any = object()
    monkeypatch.setattr(ranks, "_devices", {group: torch.device("cuda:2")})
    assert control_device(group) == torch.device(expected)
    assert control_device(None) == torch.device("cpu")


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (({ALL: "a\nb\nd"}, {ALL: "a\nd"}, {ALL: "a\nb\nd"}), "1 .* has b; rank 1 has nothing"),
        (({ALL: "a"}, {ALL: "a\nc"}, {ALL: "a\nd"}), "1, 2 .* 0 has nothing; rank 1 has c"),
        (({ALL: "z\na\nb"}, {ALL: "z\nb\na"}, {ALL: "z\na\nb"}), "1 .* 0 has a; rank 1 has b"),
        (({ALL: "a\na"}, {ALL: "a\na"}, {ALL: "a"}), "2 .* rank 0 has a; rank 2 has nothing"),
        # A rank that does not know of a set, and the first of a set that is not in order.
        (({ALL: "a"}, {(1,): "a"}, {ALL: "a"}), "1 .* rank 0 has a; rank 1 has nothing"),
        (({}, {PAIR: "a"}, {PAIR: "b"}, {PAIR: "b"}), "1 differ from rank 3; rank 3 has b"),
    ],
)
def test_lines_that_differ_are_named(texts: tuple[dict[Any, str], ...], expected: str) -> None:
    pairs = {rank: list(own.items()) for rank, own in enumerate(texts)}
    with pytest.raises(RankMismatchError, match=rf"^things: rank\(s\) {expected}"):
        raise_if_unlike("things", pairs)


def test_a_pickle_finds_the_group_of_its_ranks_or_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = object()
    monkeypatch.setattr(ranks, "_is_distributed", lambda: True)
    monkeypatch.setattr(ranks, "_groups_of_the_job", lambda: {(0, 1): group})
    copied = ranks.PicklableGroup(None, ())
    for own in (group, None):  # None: that of the job
        copied.__setstate__(ranks.PicklableGroup(own, (0, 1)).__getstate__())
        assert copied.group is own
    with pytest.raises(ValueError, match=r"^process_group: found none of ranks \(0, 2\)"):
        copied.__setstate__((False, (0, 2)))


def test_ranks_that_share_nothing_may_differ() -> None:
    raise_if_unlike("things", {0: [((0,), "a")], 1: [((1,), "b")]})
    check_alike("things", "a", None)


def parameter(name: str, operator_type: str, *own_ranks: int) -> tuple[Any, ...]:
    return own_ranks, [(name, (2, 3), operator_type, 1.0)]


def test_the_registry_holds_the_matrices_of_all_ranks_sorted() -> None:
    by_rank = [[parameter("b", "attn_q", 0)], [parameter("a", "attn_q", 1), ((1, 2), [])]]
    assert [info.name for info in world.registry_of(by_rank)] == ["a", "b"]
    with pytest.raises(RankMismatchError, match=r"a: rank 1 has .*attn_q.*; rank 2 has .*attn_k"):
        world.registry_of([*by_rank, [parameter("a", "attn_k", 2)]])
