"""What one process can show of agreement: identities without a group, and what errors say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from amo_dist.distributed.agreement import (
    RankMismatchError,
    broadcast_text,
    check_alike,
    check_alike_by_ranks,
    control_device,
    gather_json,
    gather_text,
    is_alike,
    max_over,
    sum_over,
)
from amo_dist.engine import world


def entry(name: str, **fields: Any) -> dict[str, Any]:
    found = {"dtype": "torch.float32", "layout": "L", "ranks": [0, 1], "matrices": []}
    found["hyperparameters"] = "lr 0.5"
    return {"name": name, **found, **fields}


def matrix(name: str, operator_type: str = "attn_q", **fields: Any) -> dict[str, Any]:
    return entry(name, matrices=[[name, [2, 3], operator_type]], **fields)


def test_without_a_group_everything_is_the_identity() -> None:
    assert sum_over([1.5, float("inf")], None) == [1.5, float("inf")]
    assert max_over(torch.tensor([1, -2]), None).tolist() == [1, -2]
    assert broadcast_text("grüße", None) == "grüße"
    assert gather_text("a", None) == ["a"]
    assert gather_json({"a": [1]}, None) == [{"a": [1]}]
    assert is_alike("a", None)
    assert control_device(None) == torch.device("cpu")
    check_alike("anything", "text", None)
    check_alike_by_ranks("anything", {(0,): "text"}, None)


@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [
        (["a", "b"], ["a"], ["rank 0 has b (and 0 more), rank 1 has not"]),
        (["a"], ["a", "c", "d"], ["rank 1 has c (and 1 more), rank 0 has not"]),
        (["a", "b"], ["a", "x"], ["rank 0 has b", "rank 1 has x"]),
        (["a", "b"], ["b", "a"], ["number 0 is a (adamw", "on rank 0, b (adamw", "on rank 1"]),
    ],
)
def test_names_that_differ_are_told(one: list[str], two: list[str], expected: list[str]) -> None:
    by_rank = [[entry(name) for name in names] for names in (one, two)]
    with pytest.raises(RankMismatchError) as caught:
        world._check_shared(by_rank)
    for part in expected:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("field", "found", "shown"),
    [
        ("dtype", "torch.bfloat16", "torch.bfloat16"),
        ("layout", "M", "M,"),
        ("matrices", [["a", [2, 3], "attn_k"]], "attn_k"),
        ("hyperparameters", "lr 0.25", "lr 0.25"),
    ],
)
def test_a_field_that_differs_is_told(field: str, found: Any, shown: str) -> None:
    by_rank = [[matrix("z"), matrix("a")], [matrix("z"), {**matrix("a"), field: found}]]
    with pytest.raises(RankMismatchError, match=r"number 1 is a .* on rank 0, a .* on rank 1") as e:
        world._check_shared(by_rank)
    assert shown in str(e.value)


def test_ranks_that_share_nothing_may_differ() -> None:
    world._check_shared([[entry("a", ranks=[0])], [entry("b", ranks=[1])]])


def test_one_name_for_two_matrices_is_an_error() -> None:
    by_rank = [[matrix("a", ranks=[0])], [matrix("a", "attn_k", ranks=[1])]]
    with pytest.raises(RankMismatchError, match=r"a: rank 0 has .*attn_q.*; rank 1 has .*attn_k"):
        world._registry(by_rank)


def test_the_registry_holds_the_matrices_of_all_ranks_sorted() -> None:
    by_rank = [[matrix("b", ranks=[0])], [matrix("a", ranks=[1]), entry("n", ranks=[1])]]
    assert [info.name for info in world._registry(by_rank)] == ["a", "b"]
    assert world._homes(by_rank) == {"b": (0,), "a": (1,)}
