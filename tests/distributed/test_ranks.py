"""Small messages among real ranks, and comparisons whose errors reach every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from amo_dist.distributed.ranks import (
    gather_json,
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
