"""The engine's pipeline over any layout on real ranks, with negation for Newton-Schulz."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from amo_dist.distributed.exchange import Exchange
from amo_dist.distributed.ownership import assign
from amo_dist.distributed.plan import Part, plan_exchange
from amo_dist.engine import step
from amo_dist.engine.step import Engine
from tests.layouts import Model, local_tensor


class Negation(Engine):
    """What a rank holds of a model, and an exchange that negates every matrix of it.

    Args:
        model: Laid out over the world.
        rank: This one.
        dtype: In which matrices travel.
        bucket_bytes: As for `plan_exchange`.
    """

    def __init__(self, model: Model, rank: int, dtype: torch.dtype, bucket_bytes: int) -> None:
        self.model, self.rank, self.dtype = model, rank, dtype
        jobs = assign(model.matrices, [1.0] * len(model.matrices))
        self.plan = plan_exchange(
            model.matrices,
            jobs,
            rank=rank,
            peers=range(dist.get_world_size()),
            itemsize=dtype.itemsize,
            bucket_bytes=bucket_bytes,
        )
        self.exchange = Exchange(
            self.plan, group=dist.group.WORLD, device=torch.device("cpu"), dtype=dtype
        )
        nothing: Any = None
        self.parameters = self._local = self.groups = self._rounding = nothing
        self._grads, self._bad = (), None
        self.events: list[str] = []
        """What happened, with the number of the bucket, in order."""
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
        if not self.exchange.lanes:
            self.exchange.allocate()
        laid: Any = [
            SimpleNamespace(
                exchange=self.exchange,
                lane=lane,
                batches=[(number, lane)],
                sent=(number, lane.sent.parts, lane.sent.views, lane),
                kept=(number, lane.kept, lane.kept_views, None),
                returned=(number, lane.returned.parts, lane.returned.views, None),
            )
            for number, lane in enumerate(self.exchange.lanes)
        ]
        self._laid = laid
        with mock.patch.object(step, "adamw_step", self._adamw):
            self._pipeline()

    def check(self) -> None:
        """Each element was written once, and is the negative of what was held."""
        for tensor, expected in zip(self.written, self.local, strict=True):
            assert torch.equal(tensor, -expected)

    def _cut(self, tensors: Sequence[Tensor], part: Part) -> Tensor:
        box = tuple(slice(*interval) for interval in part.piece.source)
        return tensors[self.model.matrices[part.matrix].tensor][box]

    # What follows stands in for the engine's own, which `_bucket` and `_pipeline` call.

    def _adamw(self, *_: object) -> None:
        self.events.append("meanwhile")

    def _read(self, pieces: Any) -> None:
        number, parts, places, starting = pieces
        self.events.append(f"read {number}")
        if starting is not None:
            for whole in starting.wholes:
                whole.fill_(math.nan)  # nothing of an earlier bucket is read from now on
        for part, place in zip(parts, places, strict=True):
            value = self._cut(self.local, part)
            assert place.shape == value.shape
            place.copy_(value)

    def _orthogonalize(self, batch: Any) -> None:
        number, lane = batch
        self.events.append(f"compute {number}")
        for job, whole in zip(lane.jobs, lane.wholes, strict=True):
            assert whole.shape == self.model.matrices[job.matrix].shape
            assert whole.dtype == self.dtype
            assert not whole.isnan().any()  # all of it has arrived
            whole.neg_()

    def _update(self, pieces: Any) -> None:
        number, parts, places, _ = pieces
        self.events.append(f"write {number}")
        for part, value in zip(parts, places, strict=True):
            place = self._cut(self.written, part)
            assert place.isnan().all()  # each element is written once
            place.copy_(value)
