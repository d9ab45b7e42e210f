"""The engine's pipeline over any layout on real ranks, with negation for Newton-Schulz."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from amo_dist.distributed.bucket import Bucket, Memory, Place, make_buckets
from amo_dist.distributed.plan import assign, plan_exchange
from amo_dist.engine.step import Engine
from tests.layouts import Model, local_tensor


class Negation(Engine):
    """The tensors that a rank holds of a model, and a pipeline that negates every matrix of it.

    Args:
        model: Model laid out over the world.
        rank: This rank.
        dtype: Dtype in which matrices travel.
        bucket_bytes: Argument of `plan_exchange`.
    """

    def __init__(self, model: Model, rank: int, dtype: torch.dtype, bucket_bytes: int) -> None:
        self.model, self.rank, self.dtype = model, rank, dtype
        self.plan = plan_exchange(
            model.matrices,
            assign(model.matrices, [1.0] * len(model.matrices)),
            rank=rank,
            peers=range(dist.get_world_size()),
            itemsize=dtype.itemsize,
            bucket_bytes=bucket_bytes,
        )
        self.buckets: list[Bucket] = []
        self.numbers: dict[int, int] = {}
        """Number of the bucket of each list of places, by its identity."""
        self.events: list[str] = []
        """Events with the number of the bucket, in order."""
        self.local: list[Tensor] = []
        self.written: list[Tensor] = []

    def hold(self, factor: int) -> None:
        """Integers whose absolute value is below 256: they are exact in bfloat16."""
        wholes = [
            factor * torch.arange(math.prod(t.shape), dtype=torch.float32).view(t.shape)
            for t in self.model.tensors
        ]
        pairs = zip(self.model.tensors, wholes, strict=True)
        self.local = [local_tensor(layout, whole, self.rank).clone() for layout, whole in pairs]
        self.written = [torch.full_like(tensor, math.nan) for tensor in self.local]

    def negate(self) -> None:
        """One step; a collective over the world."""
        if not self.buckets:
            self.buckets = make_buckets(
                self.plan,
                self.model.matrices,
                group=dist.group.WORLD,
                memory=Memory(torch.device("cpu")),
                dtype=self.dtype,
            )
        self.numbers = {
            id(places): number
            for number, bucket in enumerate(self.buckets)
            for places in (bucket.outgoing, bucket.incoming)
        }
        buckets: Any = self.buckets
        step: Any = None
        self._pipeline(step, buckets, is_first=True)

    def check(self) -> None:
        """Each element was written once, and is the negative of what was held."""
        for tensor, expected in zip(self.written, self.local, strict=True):
            assert torch.equal(tensor, -expected)

    def _cut(self, tensors: Sequence[Tensor], place: Place) -> Tensor:
        return place.region.view(tensors[self.model.matrices[place.matrix].param])

    # The methods below stand in for the engine's own, which `_pipeline` and `_bucket` call.

    def _adamw(self, step: Any) -> None:
        self.events.append("meanwhile")

    def _pack_momentum(self, step: Any, places: Any) -> None:
        self.events.append(f"read {self.numbers[id(places)]}")
        for place in places:
            place.tensor.copy_(self._cut(self.local, place))

    def _orthogonalize(self, step: Any, bucket: Any) -> None:
        self.events.append(f"compute {self.numbers[id(bucket.outgoing)]}")
        for index, whole in zip(bucket.owned, bucket.wholes, strict=True):
            assert whole.shape == self.model.matrices[index].shape
            assert whole.dtype == self.dtype
            assert not whole.isnan().any()  # all of it has arrived
            whole.neg_()

    def _take_results(self, step: Any, places: Any) -> None:
        self.events.append(f"write {self.numbers[id(places)]}")
        for place in places:
            target = self._cut(self.written, place)
            assert target.isnan().all()  # each element is written once
            target.copy_(place.tensor)
        for whole in self.buckets[self.numbers[id(places)]].wholes:
            whole.fill_(math.nan)  # nothing of an earlier bucket is read from now on
