"""Communication of one bucket runs under the computation of another, in bounded memory."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from amo_dist import Muon, MuonConfig, param_groups
from amo_dist.engine import step as engine_step
from tests import runs
from tests.distributed import models
from tests.distributed.harness import Ranks
from tests.memory import Storages

ROWS, COLUMNS = 16, 8


class Spy:
    """The exchanges of a step and what runs between them.

    Attributes:
        events: ``start`` and ``end`` of exchanges, ``compute`` and ``adamw``, in order.
        ranks: Ranks of each exchange.
        received: Memory of each exchange.
    """

    def __init__(self) -> None:
        self.events: list[str] = []
        self.ranks: list[tuple[int, ...]] = []
        self.received: list[Tensor] = []

    def log(self, event: str, function: Any) -> Any:
        """A function that leaves its event."""

        def call(*args: Any, **options: Any) -> Any:
            self.events.append(event)
            return function(*args, **options)

        return call


@contextlib.contextmanager
def spy() -> Iterator[Spy]:
    own, start = Spy(), dist.all_to_all_single

    def exchange(received: Tensor, *args: Any, **options: Any) -> Any:
        own.events.append("start")
        own.received.append(received)
        own.ranks.append(tuple(dist.get_process_group_ranks(options["group"])))
        return mock.Mock(wait=own.log("end", start(received, *args, **options).wait))

    with mock.patch.object(dist, "all_to_all_single", exchange), contextlib.ExitStack() as stack:
        for name, event in (("orthogonalize", "compute"), ("adamw", "adamw")):
            function = own.log(event, getattr(engine_step, name))
            stack.enter_context(mock.patch.object(engine_step, name, function))
        yield own


def first_step(
    rank: int, world_size: int, count: int, matrices_in_bucket: int
) -> tuple[list[str], int]:
    """Events of a step of so many matrices, and its peak of bytes."""
    shapes: dict[str, tuple[int, ...]] = {"norm.weight": (8,)}
    shapes |= {f"layers.{n}.attention.wq.weight": (ROWS, COLUMNS) for n in range(count)}
    model = models.make_model("fsdp", shapes)
    config = MuonConfig(bucket_bytes=matrices_in_bucket * 4 * ROWS * COLUMNS, ns_dtype="float32")
    optimizer = Muon(param_groups(model), config=config)
    models.set_gradients(model, 1, 1)
    with Storages() as storages, spy() as step:
        optimizer.step()
    return step.events, storages.peak


def test_two_buckets_are_on_their_way_while_one_is_computed(run_on: Ranks) -> None:
    """The gather of the next bucket, and the results of the one before."""
    expected = ["start", "adamw"]
    for bucket in range(6):
        expected += ["end"]
        expected += ["start"] if bucket < 5 else []
        expected += ["compute"]
        expected += ["end"] if bucket else []
        expected += ["start"]
    for events, _ in run_on(2)(first_step, 2 * 6, 1):
        assert events == [*expected, "end"]


@pytest.mark.parametrize("matrices_in_bucket", [1, 3])
def test_memory_does_not_grow_with_the_number_of_buckets(
    run_on: Ranks, matrices_in_bucket: int
) -> None:
    buckets = 2 * matrices_in_bucket
    few = run_on(2)(first_step, 3 * buckets, matrices_in_bucket)
    # The last bucket of an odd number is of one matrix on one rank, and of none on the other.
    for count in (2 * buckets + 1, 20 * buckets):
        many = run_on(2)(first_step, count, matrices_in_bucket)
        for (_, peak), (_, peak_of_many) in zip(few, many, strict=True):
            # Each matrix leaves flags of a few bytes, such as whether its result is finite.
            assert peak_of_many <= peak + 4 * count


# ------------------------------------------------------------------ steps that fail


def fail_once(rank: int, world_size: int) -> None:
    """An error while the first buckets travel; what they carry must not be taken for the next."""
    model, optimizer = runs.make("fsdp", Muon, shapes=models.shapes(), bucket_bytes=256)
    runs.train(model, optimizer, 1, 2)
    with (
        spy() as failed,  # holds the memory, so that no other tensor gets it
        mock.patch.object(engine_step, "adamw", side_effect=KeyboardInterrupt("meanwhile")),
        pytest.raises(KeyboardInterrupt, match="meanwhile"),
    ):
        runs.train(model, optimizer, 3, 3)
    # Momentum of the buckets that began has moved; the twin goes on from there.
    twin, other = runs.make("fsdp", Muon, shapes=models.shapes(), bucket_bytes=256)
    other.load_state_dict(optimizer.state_dict())
    twin.load_state_dict(model.state_dict())
    with spy() as later:
        weights = runs.train(model, optimizer, 4, 4)
    assert runs.equal(weights, runs.train(twin, other, 4, 4))
    assert failed.received
    storages = {memory.untyped_storage().data_ptr() for memory in failed.received}
    assert storages.isdisjoint(x.untyped_storage().data_ptr() for x in later.received)


def test_what_an_error_left_under_way_does_not_arrive_in_a_later_step(run_on: Ranks) -> None:
    run_on(2)(fail_once)


# ------------------------------------------------------------------ overlapping sets of ranks


def ranks_of_exchanges(rank: int, world_size: int) -> list[tuple[int, ...]]:
    """Ranks of each exchange of a step, over three sets of ranks that overlap."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    tensors = {}
    for number in range(4):
        for name, axes in (("rows", mesh["rows"]), ("columns", mesh["columns"]), ("all", mesh)):
            placements = [Shard(0), Replicate()][: axes.ndim]
            whole = models.initial(f"{name}{number}", (8, 4))
            tensor = distribute_tensor(whole, axes, placements)  # type: ignore[arg-type]
            tensors[f"layers.{number}.{name}"] = nn.Parameter(tensor)
    model = models.build(tensors)
    groups = param_groups(model, patterns={r"layers\..*": "mlp_up"})
    optimizer = Muon(groups, lr=0.1, config=MuonConfig(bucket_bytes=64))
    models.set_gradients(model, 1, 1)
    with spy() as step:
        optimizer.step()
    return step.ranks


def test_the_buckets_of_one_set_of_ranks_end_before_those_of_the_next(run_on: Ranks) -> None:
    """Else three sets could wait for one another in a circle, each rank in a set of its own."""
    for rank, ranks in enumerate(run_on(4)(ranks_of_exchanges)):
        in_a_row = [peers for peers, _ in itertools.groupby(ranks)]
        assert len(in_a_row) == len(set(ranks)) == 3, rank
        assert in_a_row == sorted(in_a_row)
        assert len(ranks) > 2 * 3  # several buckets of a set
