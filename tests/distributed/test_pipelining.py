"""Communication of one bucket runs under the computation of another, in bounded memory."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from amo_dist import Muon, MuonConfig, param_groups
from amo_dist.distributed.bucket import BUCKETS_IN_FLIGHT, Bucket
from tests import runs
from tests.distributed import models
from tests.distributed.harness import Ranks
from tests.distributed.negation import Negation
from tests.layouts import build
from tests.memory import Storages

ROWS, COLUMNS = 16, 8
MATRIX_BYTES = ROWS * COLUMNS * 4


def run_exchange(
    rank: int, world_size: int, count: int, matrices_in_bucket: int
) -> tuple[list[str], int, int, int]:
    """Events in order; peak of live bytes, the largest allocation, and bytes left afterwards."""
    model = build("fsdp", torch.arange(world_size), [(ROWS, COLUMNS)] * count)
    negation = Negation(model, rank, torch.float32, matrices_in_bucket * MATRIX_BYTES)
    negation.hold(1)
    with Storages() as storages:
        negation.negate()
    events = list(negation.events)
    negation.check()
    return events, storages.peak, storages.largest, storages.live


def test_the_gathers_in_flight_start_before_the_computation(run_on: Ranks) -> None:
    buckets, in_flight = 6, BUCKETS_IN_FLIGHT
    for events, *_ in run_on(2)(run_exchange, 2 * buckets, 1):
        started = {k: events.index(f"read {k}") for k in range(buckets)}
        computed = {k: events.index(f"compute {k}") for k in range(buckets)}
        assert max(started[k] for k in range(in_flight)) < events.index("meanwhile") < computed[0]
        for k in range(buckets):
            for ahead in range(1, in_flight):
                if k + ahead < buckets:
                    assert started[k + ahead] < computed[k]
            if k + in_flight < buckets:
                assert started[k + in_flight] > computed[k]
            # The results of a bucket land under the computation of the next one.
            last_write = len(events) - 1 - events[::-1].index(f"write {k}")
            if k + 1 < buckets:
                assert last_write > computed[k + 1]


@pytest.mark.parametrize("matrices_in_bucket", [1, 3])
def test_memory_is_bounded_by_the_buckets_in_flight(run_on: Ranks, matrices_in_bucket: int) -> None:
    bucket = matrices_in_bucket * MATRIX_BYTES
    few = run_on(2)(run_exchange, 2 * matrices_in_bucket * 6, matrices_in_bucket)
    many = run_on(2)(run_exchange, 2 * matrices_in_bucket * 20, matrices_in_bucket)
    for (_, peak, largest, left), (_, peak_of_many, *_) in zip(few, many, strict=True):
        # A rank's half of both owners' buckets leaves, and its own bucket arrives: a flight is two
        # buckets. There are the gathers, as many deliveries, and the matrices of one bucket, which
        # are computed in place.
        # The negation looks for NaN in a matrix: a boolean for each entry, and one for all.
        assert peak <= (4 * BUCKETS_IN_FLIGHT + 1) * bucket + ROWS * COLUMNS + 1
        assert peak_of_many == peak
        assert largest <= bucket
        # All buffers stay, for the next step.
        assert 0 < left <= peak


def test_a_remainder_bucket_allocates_no_more_than_a_full_one(run_on: Ranks) -> None:
    # Three buckets each: the last of them full, or of one matrix on one rank and none on the other.
    full = run_on(2)(run_exchange, 18, 3)
    with_remainder = run_on(2)(run_exchange, 13, 3)
    for (_, peak, largest, _), (_, peak_with, largest_with, _) in zip(
        full, with_remainder, strict=True
    ):
        assert peak_with <= peak
        assert largest_with <= largest


# ------------------------------------------------------------------ the whole optimizer

CONFIG = MuonConfig(bucket_bytes=256)


def buffers(optimizer: Muon) -> list[Tensor]:
    """Memory in which matrices travel and are put together."""
    found = list[Tensor]()
    for exchange in optimizer._engine._exchanges:
        for bucket in exchange.buckets:
            if bucket.moves:
                packed = (bucket._momentum_out, bucket._momentum_in)
                packed += (bucket._results_out, bucket._results_in)
                found += [side.memory for side in packed]
            found += bucket.wholes
    return [memory for memory in found if memory.numel()]


def fail_once(rank: int, world_size: int) -> None:
    """An error while the first buckets travel; what they carry must not be taken for the next.

    The twin takes that step with a learning rate of zero: its momentum moves, too.
    """
    model, twin = (models.make_model("fsdp", models.shapes()) for _ in range(2))
    optimizer, other = (Muon(param_groups(each), lr=0.1, config=CONFIG) for each in (model, twin))

    runs.train(model, optimizer, 1, 2)
    runs.train(twin, other, 1, 2)
    under_way = buffers(optimizer)  # held, so that no other tensor gets their memory
    assert under_way
    with (
        mock.patch("amo_dist.engine.step.adamw", side_effect=KeyboardInterrupt("meanwhile")),
        pytest.raises(KeyboardInterrupt, match="meanwhile"),
    ):
        runs.train(model, optimizer, 3, 3)
    for group in other.param_groups:
        group["lr"] = 0.0
    runs.train(twin, other, 3, 3)
    for group in other.param_groups:
        group["lr"] = 0.1
    weights = runs.train(model, optimizer, 4, 4)
    expected = runs.train(twin, other, 4, 4)
    for name in models.types():
        assert torch.equal(weights[name], expected[name]), name
    storages = {each.untyped_storage().data_ptr() for each in under_way}
    assert storages.isdisjoint(each.untyped_storage().data_ptr() for each in buffers(optimizer))


def test_what_an_error_left_under_way_does_not_arrive_in_a_later_step(run_on: Ranks) -> None:
    run_on(2)(fail_once)


# ------------------------------------------------------------------ overlapping sets of ranks


def collectives_by_group(rank: int, world_size: int) -> list[tuple[int, ...]]:
    """Ranks of each exchange of a step, over three sets of ranks that overlap."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    tensors = {}
    for number in range(4):
        for name in ("rows", "columns", "all"):
            placements = [Shard(0), Replicate()] if name == "all" else [Shard(0)]
            whole = models.initial(f"{name}{number}", (8, 4))
            own = mesh if name == "all" else mesh[name]
            tensors[f"layers.{number}.{name}"] = nn.Parameter(
                distribute_tensor(whole, own, placements)  # type: ignore[arg-type]
            )
    model = models.build(tensors)
    groups = param_groups(model, unknown="matrix")
    optimizer = Muon(groups, lr=0.1, config=MuonConfig(bucket_bytes=64))
    ranks = list[tuple[int, ...]]()
    start = Bucket._exchange

    def spy(bucket: Bucket, *packed: Any) -> Any:
        ranks.append(tuple(dist.get_process_group_ranks(bucket._group)))
        return start(bucket, *packed)

    for step in (1, 2):
        models.set_gradients(model, 1, step)
        ranks.clear()
        with mock.patch.object(Bucket, "_exchange", spy):
            optimizer.step()
    return ranks


def test_the_buckets_of_one_set_of_ranks_end_before_those_of_the_next(run_on: Ranks) -> None:
    """Else three sets could wait for one another in a circle, each rank in a set of its own."""
    for rank, ranks in enumerate(run_on(4)(collectives_by_group)):
        in_a_row = [each for each, _ in itertools.groupby(ranks)]
        assert len(in_a_row) == len(set(ranks)) == 3, rank
        assert in_a_row == sorted(in_a_row)
        assert len(ranks) > 2 * 3  # several buckets of a set
