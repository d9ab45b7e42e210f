"""Communication of one bucket runs under the computation of another, in bounded memory."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from amo_dist import Muon, MuonConfig, param_groups
from amo_dist.distributed.exchange import Exchange
from amo_dist.distributed.layout import MatrixLayout, matrix_layout, mesh_layout
from amo_dist.distributed.ownership import assign
from amo_dist.distributed.plan import Part, Task, plan_exchange
from tests.distributed import models
from tests.distributed.harness import Ranks
from tests.layouts import local_tensor, placements_of

ROWS, COLUMNS = 16, 8
MATRIX_BYTES = ROWS * COLUMNS * 4


class Allocations(TorchDispatchMode):
    """Bytes of the storages that were made inside and are still alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.largest = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves(args) if torch.is_tensor(leaf)
        }
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if torch.is_tensor(leaf):
                self._note(leaf.untyped_storage(), before)
        return result

    def _note(self, storage: torch.UntypedStorage, before: set[int]) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in before or key in self._known or size == 0:
            return
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        self.largest = max(self.largest, size)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def fsdp_matrices(count: int, world_size: int) -> list[MatrixLayout]:
    layout = mesh_layout((ROWS, COLUMNS), torch.arange(world_size), placements_of("fsdp", (1,)))
    return [matrix_layout(f"m{index:02}", layout, index) for index in range(count)]


def run_exchange(
    rank: int, world_size: int, count: int, matrices_in_bucket: int, in_flight: int
) -> tuple[list[str], int, int, int]:
    """Events in order; peak of live bytes, the largest allocation, and bytes left afterwards."""
    matrices = fsdp_matrices(count, world_size)
    jobs = assign(matrices, [1.0] * count)
    plan = plan_exchange(
        matrices,
        jobs,
        rank=rank,
        peers=range(world_size),
        bytes_by_matrix=[MATRIX_BYTES] * count,
        bucket_bytes=matrices_in_bucket * MATRIX_BYTES,
    )
    exchange = Exchange(
        plan,
        group=dist.group.WORLD,
        device=torch.device("cpu"),
        wire_dtype=torch.float32,
        wide_dtype=torch.float32,
        buckets_in_flight=in_flight,
    )
    number = {matrix: index for index, bucket in enumerate(plan.buckets) for matrix in bucket.owned}
    of_matrix = {
        part.matrix: index
        for index, bucket in enumerate(plan.buckets)
        for parts in (*(task.kept for task in bucket.tasks), *bucket.gather.send)
        for part in parts
    }
    whole = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)
    local = [local_tensor(matrix_of(m, world_size), whole, rank).clone() for m in matrices]
    written = [torch.zeros_like(tensor) for tensor in local]
    events: list[str] = []

    def cut(tensors: Sequence[torch.Tensor], part: Part) -> torch.Tensor:
        (top, bottom), (left, right) = part.piece.source
        return tensors[part.matrix][top:bottom, left:right]

    def read(parts: Sequence[Part], places: Sequence[torch.Tensor]) -> None:
        events.append(f"read {of_matrix[parts[0].matrix]}")
        for part, place in zip(parts, places, strict=True):
            place.copy_(cut(local, part))

    def compute(task: Task, found: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        events.append(f"compute {number[task.owned[0]]}")
        assert all(torch.equal(matrix, whole) for matrix in found)
        return [-matrix for matrix in found]

    def write(parts: Sequence[Part], values: Sequence[torch.Tensor]) -> None:
        events.append(f"write {of_matrix.get(parts[0].matrix, -1)}")
        for part, value in zip(parts, values, strict=True):
            cut(written, part).copy_(value)

    with Allocations() as allocations:
        exchange.run(read, compute, write, meanwhile=lambda: events.append("meanwhile"))
    for tensor, expected in zip(written, local, strict=True):
        assert torch.equal(tensor, -expected)
    return events, allocations.peak, allocations.largest, allocations.live


def matrix_of(matrix: MatrixLayout, world_size: int) -> Any:
    return mesh_layout(matrix.shape, torch.arange(world_size), placements_of("fsdp", (1,)))


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_the_gathers_in_flight_start_before_the_computation(run_on: Ranks, in_flight: int) -> None:
    buckets = 6
    for events, *_ in run_on(2)(run_exchange, 2 * buckets, 1, in_flight):
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


@pytest.mark.parametrize("in_flight", [1, 2, 3])
@pytest.mark.parametrize("matrices_in_bucket", [1, 3])
def test_memory_is_bounded_by_the_buckets_in_flight(
    run_on: Ranks, in_flight: int, matrices_in_bucket: int
) -> None:
    bucket = matrices_in_bucket * MATRIX_BYTES
    few = run_on(2)(run_exchange, 2 * matrices_in_bucket * 6, matrices_in_bucket, in_flight)
    many = run_on(2)(run_exchange, 2 * matrices_in_bucket * 20, matrices_in_bucket, in_flight)
    for (_, peak, largest, left), (_, peak_of_many, *_) in zip(few, many, strict=True):
        # Half of a bucket leaves and half arrives: a flight is one bucket. In flight are the
        # gathers, two deliveries, and the gathered and the resulting matrices of one bucket.
        assert peak <= (in_flight + 2 + 2) * bucket
        assert peak_of_many == peak
        assert largest <= bucket
        # The buffers of flights and of what is computed together stay, for the next step.
        assert 0 < left <= (in_flight + 2 + 1) * bucket


def test_a_remainder_bucket_allocates_no_more_than_a_full_one(run_on: Ranks) -> None:
    # Three buckets each: the last of them full, or of one matrix on one rank and none on the other.
    full = run_on(2)(run_exchange, 18, 3, 2)
    with_remainder = run_on(2)(run_exchange, 13, 3, 2)
    for (_, peak, largest, _), (_, peak_with, largest_with, _) in zip(
        full, with_remainder, strict=True
    ):
        assert peak_with <= peak
        assert largest_with <= largest


def trace(rank: int, world_size: int) -> list[tuple[str, float, float]]:
    """The ranges of one optimizer step, as a profiler sees them: name, start and end."""
    model = models.make_model("fsdp", models.shapes(models.EVEN_SHAPES))
    optimizer = Muon(param_groups(model), config=MuonConfig(bucket_bytes=256))
    models.set_gradients(model, 1, 1)
    optimizer.step()
    models.set_gradients(model, 1, 2)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found:
        optimizer.step()
    return [
        (event.name, event.time_range.start, event.time_range.end)
        for event in found.events()
        if event.name.startswith("amo::")
    ]


def test_a_profile_shows_gathers_ahead_of_the_computation(run_on: Ranks) -> None:
    for events in run_on(2)(trace):
        names = [name for name, *_ in sorted(events, key=lambda event: event[1])]
        assert names[0] == "amo::momentum"
        # Two buckets are on their way before the first matrix is orthogonalized, and the results
        # of the first leave before the second is: sends and receipts alternate with computation.
        first = names.index("amo::orthogonalize")
        assert names[1:first].count("amo::gather") >= 2
        following = names.index("amo::orthogonalize", first + 1)
        between = names[first + 1 : following]
        assert between.index("amo::scatter") < between.index("amo::gather")
        assert names.count("amo::orthogonalize") > 2
        assert {"amo::update", "amo::scatter"} <= set(names)
