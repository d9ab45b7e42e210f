"""Small messages among real ranks, and comparisons whose errors reach every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from amo_dist.distributed.ranks import (
    check_alike,
    failure_text,
    gather_json,
    max_over,
    raise_if_unlike,
)
from tests.distributed.harness import Ranks


def raised(function: Callable[[], object]) -> str:
    """Kind and text of the error that a function raises, or nothing."""
    try:
        function()
    except (RuntimeError, ValueError, FloatingPointError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def texts(rank: int, world_size: int, own: list[str]) -> dict[int, Any]:
    same = gather_json({"of": "all"}, dist.group.WORLD)
    assert all(value is same[0] for value in same.values())  # parsed once
    return gather_json([own[rank]], dist.group.WORLD)


@pytest.mark.parametrize("own", [["", "b", ""], ["a", "bb" * 1000, "ü€\n\0"], ["x", "y", "x"]])
def test_texts_of_any_length_arrive(run_on: Ranks, own: list[str]) -> None:
    assert run_on(3)(texts, own) == [{rank: [text] for rank, text in enumerate(own)}] * 3


def maxima(rank: int, world_size: int) -> list[int]:
    own = torch.tensor([rank, -rank, 7, -(2**56) * rank])
    greatest: list[int] = max_over(own, dist.group.WORLD).tolist()
    return greatest


def test_maxima(run_on: Ranks) -> None:
    assert run_on(3)(maxima) == [[2, 0, 7, 0]] * 3


def differing_texts(rank: int, world_size: int) -> list[str]:
    group = dist.group.WORLD
    text = "same\nodd" if rank == 2 else "same\neven"
    # Only the second pair differs; the first learns of it too.
    pair = (0, 1) if rank < 2 else (2, 3)
    failure = failure_text("loading", KeyError("step")) if rank == 3 else text
    return [
        raised(lambda: check_alike("things", text, group)),
        raised(lambda: raise_if_unlike("plans", gather_json([(pair, text)], group))),
        raised(lambda: raise_if_unlike("plans", gather_json([(pair, str(pair))], group))),
        raised(lambda: check_alike("things", failure, group)),
    ]


def test_a_mismatch_or_failure_is_raised_on_every_rank(run_on: Ranks) -> None:
    things, plans, alike, failure = run_on(4)(differing_texts)[0]
    assert run_on(4)(differing_texts) == [[things, plans, alike, failure]] * 4
    start = "RankMismatchError: things: rank(s) 2 differ from rank 0; "
    assert things == f"{start}rank 0 has even; rank 2 has odd"
    start = "RankMismatchError: plans: rank(s) 3 differ from rank 2; "
    assert plans == f"{start}rank 2 has odd; rank 3 has even"
    assert (alike, failure) == ("", "RuntimeError: loading failed on rank 3: KeyError: 'step'")
