"""The exchange on real ranks, and errors that reach every rank instead of hanging some."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
from amo_dist.distributed.exchange import Exchange
from amo_dist.distributed.ownership import assign
from amo_dist.distributed.plan import Part, Task, plan_exchange
from amo_dist.distributed.relays import relay
from amo_dist.engine.gradients import MissingGradientError, NonFiniteGradientError
from tests.distributed.harness import Ranks
from tests.layouts import build, local_tensor
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


class Negation:
    """What a rank holds of a model, and an exchange that negates every matrix of it.

    Two matrices travel wide, and those of one kind (the index modulo 3) are computed together.
    """

    def __init__(
        self, rank: int, world_size: int, kind: str, owners: str, nodes: tuple[int, ...]
    ) -> None:
        is_3d = kind.startswith(("experts", "ep"))
        mesh = torch.arange(world_size).view(MESHES[kind])
        self.model = build(kind, mesh, list(SHAPES_3D if is_3d else SHAPES_2D))
        matrices = self.model.matrices
        self.wide = frozenset({0, 2})
        jobs = assign(matrices, [1.0] * len(matrices), owners=owners)
        self.plan = plan_exchange(
            matrices,
            relay(matrices, jobs, dict(enumerate(nodes))),
            rank=rank,
            peers=range(world_size),
            bytes_by_matrix=[matrix.num_elements * 2 for matrix in matrices],
            bucket_bytes=100,
            wide=self.wide,
            split=by_kind,
        )
        self.exchange = Exchange(
            self.plan,
            group=dist.group.WORLD,
            device=torch.device("cpu"),
            wire_dtype=torch.bfloat16,
            wide_dtype=torch.float32,
            buckets_in_flight=2,
        )
        self.rank = rank
        self.local: list[torch.Tensor] = []
        self.written: list[torch.Tensor] = []
        self.places: list[torch.Tensor] = []
        self.lent: list[torch.Tensor] = []

    def hold(self, factor: int) -> None:
        """Integers whose absolute value is below 256: they are exact in bfloat16."""
        wholes = [
            factor * torch.arange(math.prod(t.shape), dtype=torch.float32).view(t.shape)
            for t in self.model.tensors
        ]
        pairs = zip(self.model.tensors, wholes, strict=True)
        self.local = [local_tensor(layout, whole, self.rank).clone() for layout, whole in pairs]
        self.written = [torch.full_like(tensor, math.nan) for tensor in self.local]
        self.places = []

    def cut(self, tensors: Sequence[torch.Tensor], part: Part) -> torch.Tensor:
        box = tuple(slice(*interval) for interval in part.piece.source)
        return tensors[self.model.matrices[part.matrix].tensor][box]

    def read(self, parts: Sequence[Part], places: Sequence[torch.Tensor]) -> None:
        for part, place in zip(parts, places, strict=True):
            value = self.cut(self.local, part)
            assert place.shape == value.shape
            place.copy_(value)
        self.places += places

    def compute(self, task: Task, found: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        for index, matrix in zip(task.owned, found, strict=True):
            assert matrix.shape == self.model.matrices[index].shape
            assert matrix.dtype == (torch.float32 if index in self.wide else torch.bfloat16)
        assert len({index % 3 for index in task.owned}) == 1
        for result in self.lent:
            result.fill_(math.nan)  # of an earlier task: nothing reads it any more
        self.lent = [(-matrix).to(torch.bfloat16) for matrix in found]
        return self.lent

    def write(self, parts: Sequence[Part], values: Sequence[torch.Tensor]) -> None:
        for part, value in zip(parts, values, strict=True):
            place = self.cut(self.written, part)
            assert place.isnan().all()  # each element is written once
            place.copy_(value)

    def run(self, meanwhile: Callable[[], None]) -> None:
        self.exchange.run(self.read, self.compute, self.write, meanwhile)

    def check(self) -> None:
        for tensor, expected in zip(self.written, self.local, strict=True):
            assert torch.equal(tensor, -expected)


def by_kind(owned: tuple[int, ...]) -> list[tuple[int, ...]]:
    tasks = (tuple(index for index in owned if index % 3 == kind) for kind in range(3))
    return [task for task in tasks if task]


def exchange(rank: int, world_size: int, kind: str, owners: str, nodes: tuple[int, ...]) -> bool:
    """Step after step, over the same buffers; whether there are relays."""
    negation = Negation(rank, world_size, kind, owners, nodes)
    places: list[list[int]] = []
    for factor in (1, -1, 2):
        ran: list[str] = []
        negation.hold(factor)
        negation.run(lambda ran=ran: ran.append(""))  # type: ignore[misc]
        assert ran == [""]
        negation.check()
        places.append([place.data_ptr() for place in negation.places])
        volumes = sent_by_plan(negation.plan)
        assert dict(negation.exchange.sent_bytes) == {
            peer: volume.num_bytes(2, 4) for peer, volume in volumes.items()
        }
        assert dict(negation.exchange.sent_elements) == {
            peer: volume.elements for peer, volume in volumes.items()
        }
    assert places[0] == places[1] == places[2]
    return any(bucket.forward for bucket in negation.plan.buckets)


@pytest.mark.parametrize("owners", ["mesh", "replica"])
@pytest.mark.parametrize("kind", sorted(MESHES))
def test_every_rank_gets_its_part_of_every_result_once(
    run_on: Ranks, kind: str, owners: str
) -> None:
    assert run_on(4)(exchange, kind, owners, (0, 0, 0, 0)) == [False] * 4


@pytest.mark.parametrize(
    ("kind", "nodes"),
    [
        ("ddp", (0, 0, 2, 2)),
        ("ddp", (0, 1, 1, 1)),
        ("ddp", (0, 1, 0, 3)),
        # Of HSDP ranks 0 and 2 hold the same shard, and so do 1 and 3.
        ("hsdp", (0, 1, 0, 1)),
        ("hsdp", (0, 1, 1, 1)),
    ],
)
def test_relays_bring_every_rank_its_part_once(
    run_on: Ranks, kind: str, nodes: tuple[int, ...]
) -> None:
    assert run_on(4)(exchange, kind, "mesh", nodes) == [True] * 4


def fail_once(rank: int, world_size: int) -> None:
    """An error while the first buckets travel; what they carry must not be taken for the next."""
    negation = Negation(rank, world_size, "fsdp", "mesh", (0, 0, 0, 0))

    def fail() -> None:
        raise RuntimeError("meanwhile")

    for factor in (1, -1):
        negation.hold(factor)
        negation.run(lambda: None)
        negation.check()
    negation.hold(2)
    with pytest.raises(RuntimeError, match="meanwhile"):
        negation.run(fail)
    under_way = negation.places  # held, so that no other tensor gets their memory
    assert under_way
    negation.hold(1)
    negation.run(lambda: None)
    negation.check()
    storages = {place.untyped_storage().data_ptr() for place in under_way if place.numel()}
    assert storages.isdisjoint(place.untyped_storage().data_ptr() for place in negation.places)


def test_what_an_error_left_under_way_does_not_arrive_in_a_later_step(run_on: Ranks) -> None:
    run_on(4)(fail_once)


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
