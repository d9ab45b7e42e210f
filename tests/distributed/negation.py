"""The engine's pipeline over any layout on real ranks, with negation for Newton-Schulz."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from amo_dist.distributed.bucket import Bucket, make_buckets
from amo_dist.distributed.layout import Region
from amo_dist.distributed.ownership import assign
from amo_dist.distributed.plan import plan_exchange
from amo_dist.engine.step import Engine
from tests.layouts import Model, local_tensor


class PlainPiece(NamedTuple):
    """A region of a matrix on this rank, and its place in a bucket."""

    matrix: int
    region: Region
    place: Tensor


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
        self.buckets: list[Bucket[PlainPiece]] = []
        self.numbers: dict[int, int] = {}
        """Number of the bucket of each list of pieces, by its identity."""
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
                PlainPiece,
                group=dist.group.WORLD,
                device=torch.device("cpu"),
                dtype=self.dtype,
            )
        self.numbers = {
            id(pieces): number
            for number, bucket in enumerate(self.buckets)
            for pieces in (bucket.sent, bucket.kept, bucket.returned)
        }
        for number, bucket in enumerate(self.buckets):
            bucket.batches = {(number, None): []}
        buckets: Any = self.buckets
        step: Any = None
        self._pipeline(step, buckets, lambda: self.events.append("meanwhile"))

    def check(self) -> None:
        """Each element was written once, and is the negative of what was held."""
        for tensor, expected in zip(self.written, self.local, strict=True):
            assert torch.equal(tensor, -expected)

    def _cut(self, tensors: Sequence[Tensor], piece: PlainPiece) -> Tensor:
        box = tuple(slice(*interval) for interval in piece.region.source)
        return tensors[self.model.matrices[piece.matrix].param][box]

    # The methods below stand in for the engine's own, which `_bucket` calls.

    def _pack_momentum(self, step: Any, pieces: Any) -> None:
        number = self.numbers[id(pieces)]
        self.events.append(f"read {number}")
        bucket = self.buckets[number]
        if pieces is bucket.sent:
            for whole in bucket.wholes:
                whole.fill_(math.nan)  # nothing of an earlier bucket is read from now on
        for piece in pieces:
            piece.place.copy_(self._cut(self.local, piece).view(piece.place.shape))

    def _orthogonalize(self, step: Any, bucket: Any, *_: Any) -> None:
        number = self.numbers[id(bucket.sent)]
        self.events.append(f"compute {number}")
        for job, whole in zip(bucket.jobs, bucket.wholes, strict=True):
            assert whole.shape == self.model.matrices[job.matrix].shape
            assert whole.dtype == self.dtype
            assert not whole.isnan().any()  # all of it has arrived
            whole.neg_()

    def _take_results(self, step: Any, pieces: Any) -> None:
        self.events.append(f"write {self.numbers[id(pieces)]}")
        for piece in pieces:
            target = self._cut(self.written, piece)
            assert target.isnan().all()  # each element is written once
            target.copy_(piece.place.view(target.shape))
