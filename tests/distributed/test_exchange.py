"""The exchange on real ranks, and errors that reach every rank instead of hanging some."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from amo_dist.distributed import agreement
from amo_dist.distributed.agreement import (
    RankMismatchError,
    broadcast_text,
    check_alike,
    check_alike_by_ranks,
    gather_json,
    gather_text,
    max_over,
    sum_over,
)
from amo_dist.engine.verdict import MissingGradientError, NonFiniteGradientError
from tests.distributed.harness import Ranks
from tests.distributed.negation import Negation
from tests.layouts import build
from tests.ledger import sent_by_plan

# ------------------------------------------------------------------ the exchange alone

SHAPES_2D = [(7, 5), (1, 6), (3, 2), (8, 8), (6, 1)]
SHAPES_3D = [(3, 4, 5), (5, 2, 3)]
MESHES = {
    "fsdp": (4,),
    "hsdp": (2, 2),
    "tp_rows": (4,),
    "fsdp_tp_columns": (2, 2),
    "fsdp_tp_rows": (2, 2),
    "experts_0": (4,),
    "experts_2": (4,),
    "ep_fsdp": (2, 2),
    "ddp": (4,),
}


def exchange(rank: int, world_size: int, kind: str) -> None:
    """Step after step, over the same buffers."""
    is_3d = kind.startswith(("experts", "ep"))
    mesh = torch.arange(world_size).view(MESHES[kind])
    model = build(kind, mesh, list(SHAPES_3D if is_3d else SHAPES_2D))
    negation = Negation(model, rank, torch.bfloat16, 100)
    for factor in (1, -1, 2):
        negation.hold(factor)
        negation.negate()
        assert negation.events.count("meanwhile") == 1
        negation.events.clear()
        negation.check()
    volumes = sent_by_plan(negation.plan)
    assert negation.plan.num_sent() == {peer: volume.elements for peer, volume in volumes.items()}


@pytest.mark.parametrize("kind", sorted(MESHES))
def test_every_rank_gets_its_part_of_every_result_once(run_on: Ranks, kind: str) -> None:
    run_on(4)(exchange, kind)


# ------------------------------------------------------------------ texts


def texts(rank: int, world_size: int, mine: list[str]) -> tuple[str, list[str], list[Any]]:
    group = dist.group.WORLD
    same = gather_json({"of": "all"}, group)
    assert all(value is same[0] for value in same)  # parsed once
    return (
        broadcast_text(mine[rank], group),
        gather_text(mine[rank], group),
        gather_json([mine[rank]], group),
    )


@pytest.mark.parametrize(
    "mine",
    [
        ["a", "a", "a"],
        ["", "", ""],
        ["", "b", ""],
        ["a", "bb" * 1000, "ü€\n\0"],
        ["x", "y", "x"],
    ],
)
def test_texts_of_any_length_arrive(run_on: Ranks, mine: list[str]) -> None:
    for broadcast, gathered, values in run_on(3)(texts, mine):
        assert broadcast == mine[0]
        assert gathered == mine
        assert values == [[text] for text in mine]


def sums(rank: int, world_size: int) -> list[float]:
    # A slot that one rank writes comes out to the bit.
    values = [0.0] * world_size
    values[rank] = 0.1 + rank
    return sum_over([*values, float("nan") if rank == 1 else 0.0], dist.group.WORLD)


def test_a_slot_of_one_rank_is_exact_and_nan_spreads(run_on: Ranks) -> None:
    for found in run_on(3)(sums):
        assert found[:3] == [0.1, 1.1, 2.1]
        assert math.isnan(found[3])


def maxima(rank: int, world_size: int) -> list[list[int]]:
    """Sent by each to each, and round the ring as in a large world."""
    values = torch.tensor([rank, -rank, 7, -(2**56) * rank])
    direct = max_over(values.clone(), dist.group.WORLD)
    with mock.patch.object(agreement, "_DIRECT_RANKS", 1):
        return [direct.tolist(), max_over(values, dist.group.WORLD).tolist()]


def test_small_maxima_are_alike_however_they_travel(run_on: Ranks) -> None:
    assert run_on(3)(maxima) == [[[2, 0, 7, 0]] * 2] * 3


def raised(function: Callable[[], object]) -> str:
    try:
        function()
    except (
        RankMismatchError,
        MissingGradientError,
        NonFiniteGradientError,
    ) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def differing_texts(rank: int, world_size: int) -> list[str]:
    group = dist.group.WORLD
    text = "same\nodd" if rank == 2 else "same\neven"
    # Only the second pair differs; the first learns of it too.
    pair = (0, 1) if rank < 2 else (2, 3)
    return [
        raised(lambda: check_alike("things", text, group)),
        raised(lambda: check_alike_by_ranks("plans", {pair: text}, group)),
        raised(lambda: check_alike_by_ranks("plans", {pair: str(pair)}, group)),
    ]


def test_a_mismatch_is_told_on_every_rank(run_on: Ranks) -> None:
    where = "rank 0 has even; rank 2 has odd"
    pair = "rank 2 has odd; rank 3 has even"
    for found in run_on(4)(differing_texts):
        assert found == [
            f"RankMismatchError: things: rank(s) 2 differ from rank 0; {where}",
            f"RankMismatchError: plans: rank(s) 3 differ from rank 2; {pair}",
            "",
        ]
