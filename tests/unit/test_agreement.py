"""What one process can show of agreement: identities without a group, and what errors say."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from amo_dist.distributed import agreement
from amo_dist.distributed.agreement import (
    RankMismatchError,
    broadcast_text,
    check_alike,
    check_alike_by_ranks,
    control_device,
    gather_json,
    gather_text,
    max_over,
    sum_over,
    take_device,
)
from amo_dist.engine import world


def parameter(name: str, *ranks: int, operator_type: str = "") -> tuple[Any, ...]:
    matrices = [(name, (2, 3), operator_type, 1.0)] if operator_type else []
    return ranks, matrices


def compare(monkeypatch: pytest.MonkeyPatch, by_rank: list[Any]) -> None:
    """Let ranks compare what they hold, without processes."""
    gathered = [list(found.items()) for found in by_rank]
    monkeypatch.setattr(agreement, "gather_json", lambda value, group: gathered)
    check_alike_by_ranks("things", by_rank[0], None)


def test_without_a_group_everything_is_the_identity() -> None:
    assert sum_over([1.5, float("inf")], None) == [1.5, float("inf")]
    assert max_over(torch.tensor([1, -2]), None).tolist() == [1, -2]
    assert broadcast_text("grüße", None) == "grüße"
    assert gather_text("a", None) == ["a"]
    assert gather_json({"a": [1]}, None) == [{"a": [1]}]
    assert control_device(None) == torch.device("cpu")
    check_alike("anything", "text", None)
    check_alike_by_ranks("anything", {(0,): "text"}, None)


NCCL, BOTH = "cuda:nccl", "cpu:gloo,cuda:nccl"


class Group:
    """Stands for a process group, and like one can be a key."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


@pytest.mark.parametrize(
    ("config", "bound", "given", "expected"),
    [
        (BOTH, "cuda:3", "cuda:2", "cpu"),
        (NCCL, "cuda:3", None, "cuda:3"),
        (NCCL, "cuda:3", "cuda:2", "cuda:3"),
        (NCCL, None, "cuda:2", "cuda:2"),
    ],
)
def test_control_tensors_lie_on_the_device_of_the_group(
    monkeypatch: pytest.MonkeyPatch,
    config: str,
    bound: str | None,
    given: str | None,
    expected: str,
) -> None:
    """``device_id`` of a job whose ranks set no device leaves cuda:0 the current one."""
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: config)
    bound_device = bound and torch.device(bound)
    group: Any = Group(bound_device_id=bound_device, group_name="of a test")
    monkeypatch.setattr(agreement, "_devices", {})
    if given is not None:
        take_device(group, torch.device(given))
    assert control_device(group) == torch.device(expected)


@pytest.mark.parametrize(
    ("config", "device", "message"),
    [
        (
            NCCL,
            "cpu",
            r"found the backends 'cuda:nccl' and parameters on cpu, .*cpu:gloo,cuda:nccl",
        ),
        (
            "cpu:gloo",
            "cuda:1",
            "parameters on cuda, expected a backend for cuda: init_process_grou",
        ),
        (NCCL, "cuda:1", ""),
        (BOTH, "cpu", ""),
        (BOTH, "cuda", ""),
    ],
)
def test_a_group_needs_a_backend_for_the_parameters(
    monkeypatch: pytest.MonkeyPatch, config: str, device: str, message: str
) -> None:
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: config)
    group: Any = Group(group_name="of a test")
    monkeypatch.setattr(agreement, "_devices", {})
    take_device(None, torch.device(device))
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        take_device(group, torch.device(device))


def test_a_group_that_is_gone_leaves_its_device_to_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch gives the name of a destroyed group to the next one."""
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: NCCL)
    group: Any = Group(group_name="0", bound_device_id=None)
    take_device(group, torch.device("cuda:3"))
    assert control_device(group) == torch.device("cuda:3")
    assert len(agreement._devices) == 1
    del group
    assert len(agreement._devices) == 0


@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [
        ("a\nb\nd", "a\nd", "rank 0 has b; rank 1 has nothing"),
        ("a", "a\nc\nd", "rank 0 has nothing; rank 1 has c"),
        ("a\nb\nd", "a\nd\nx", "rank 0 has b; rank 1 has x"),
        ("z\na\nb", "z\nb\na", "rank 0 has a; rank 1 has b"),
        ("a\na", "a", "rank 0 has a; rank 1 has nothing"),
        ("a", "", "rank 0 has a; rank 1 has "),
        ("a", "a\n", "rank 0 has nothing; rank 1 has "),
    ],
)
def test_lines_that_differ_are_told(
    monkeypatch: pytest.MonkeyPatch, one: str, two: str, expected: str
) -> None:
    with pytest.raises(RankMismatchError) as caught:
        compare(monkeypatch, [{(0, 1): one}, {(0, 1): two}])
    assert str(caught.value) == f"things: rank(s) 1 differ from rank 0; {expected}"


def test_a_rank_that_does_not_know_of_a_set_it_belongs_to_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(RankMismatchError) as caught:
        compare(monkeypatch, [{(0, 2, 1): "a"}, {(1,): "a"}, {(0, 2, 1): "a"}])
    expected = "rank(s) 1 differ from rank 0; rank 0 has a; rank 1 has nothing"
    assert str(caught.value) == f"things: {expected}"


def test_all_ranks_of_a_set_that_differ_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    by_rank = [{(3, 1, 2): text} if text else {} for text in ("", "a", "b", "b")]
    with pytest.raises(RankMismatchError, match=r"rank\(s\) 1 differ from rank 3; rank 3 has b"):
        compare(monkeypatch, by_rank)


def test_ranks_that_share_nothing_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    compare(monkeypatch, [{(0,): "a"}, {(1,): "b"}])


def test_one_name_for_two_matrices_is_an_error() -> None:
    by_rank = [
        [parameter("a", 0, operator_type="attn_q")],
        [parameter("a", 1, operator_type="attn_k")],
    ]
    with pytest.raises(RankMismatchError, match=r"a: rank 0 has .*attn_q.*; rank 1 has .*attn_k"):
        world._survey(by_rank)


def test_the_registry_holds_the_matrices_of_all_ranks_sorted() -> None:
    by_rank = [
        [parameter("b", 0, operator_type="attn_q")],
        [parameter("a", 1, operator_type="attn_q"), parameter("n", 1, 2)],
    ]
    registry, homes, sets = world._survey(by_rank)
    assert [info.name for info in registry] == ["a", "b"]
    assert homes == {"b": (0,), "a": (1,)}
    assert sets == {(), (1, 2)}
