"""Communication of one bucket runs under the computation of another, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

from amo_dist import Muon, MuonConfig, param_groups
from amo_dist.distributed.bucket import BUCKETS_IN_FLIGHT
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
        # A bucket is read twice: what is sent, when its gather starts, and what stays.
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
        # Half of a bucket leaves and half arrives: a flight is one bucket. There are the gathers,
        # as many deliveries, and the matrices of one bucket, which are computed in place.
        # The negation looks for NaN in a matrix: a boolean for each entry, and one for all.
        assert peak <= (2 * BUCKETS_IN_FLIGHT + 1) * bucket + ROWS * COLUMNS + 1
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
    for buckets in optimizer._engine._bucket_lists:
        for bucket in buckets:
            packed = (bucket._momentum_out, bucket._momentum_in)
            packed += (bucket._results_out, bucket._results_in)
            found += [*(side.memory for side in packed), *bucket.wholes]
    return [memory for memory in found if memory.numel()]


def fail_once(rank: int, world_size: int) -> None:
    """An error while the first buckets travel; what they carry must not be taken for the next.

    The twin takes that step with a learning rate of zero: its momentum moves, too.
    """
    model, twin = (models.make_model("fsdp", models.shapes()) for _ in range(2))
    optimizer, other = (Muon(param_groups(each), lr=0.1, config=CONFIG) for each in (model, twin))

    def step(of: torch.nn.Module, run: Callable[[], object], number: int) -> None:
        models.set_gradients(of, 1, number)
        run()

    for number in (1, 2):
        step(model, optimizer.step, number)
        step(twin, other.step, number)
    under_way = buffers(optimizer)  # held, so that no other tensor gets their memory
    assert under_way
    with (
        mock.patch("amo_dist.engine.step.adamw_step", side_effect=KeyboardInterrupt("meanwhile")),
        pytest.raises(KeyboardInterrupt, match="meanwhile"),
    ):
        step(model, optimizer.step, 3)
    for group in other.param_groups:
        group["lr"] = 0.0
    step(twin, other.step, 3)
    for group in other.param_groups:
        group["lr"] = 0.1
    step(model, optimizer.step, 4)
    step(twin, other.step, 4)
    matrices = set(models.types())
    pairs = zip(model.named_parameters(), twin.parameters(), strict=True)
    for (name, param), expected in pairs:
        if name in matrices:
            assert torch.equal(param.to_local(), expected.to_local()), name
    storages = {each.untyped_storage().data_ptr() for each in under_way}
    assert storages.isdisjoint(each.untyped_storage().data_ptr() for each in buffers(optimizer))


def test_what_an_error_left_under_way_does_not_arrive_in_a_later_step(run_on: Ranks) -> None:
    run_on(2)(fail_once)
