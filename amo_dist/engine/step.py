"""One step's work on matrices, as the exchange calls for it: read, compute, write."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from amo_dist.config import MuonConfig
from amo_dist.distributed.layout import Piece
from amo_dist.distributed.plan import Bucket, Part
from amo_dist.distributed.spans import span
from amo_dist.engine.batches import Batches
from amo_dist.engine.observer import Observer
from amo_dist.engine.parameters import Parameters
from amo_dist.kernels.devices import make_kernels
from amo_dist.kernels.elementwise import update_scale
from amo_dist.kernels.geometry import ns_residual
from amo_dist.kernels.interface import Kernels
from amo_dist.schedule.types import Schedule
from amo_dist.tools.tracker import GeometryTracker


class StepWork:
    """Momentum in, scaled update out, for pieces of this rank's shards.

    Args:
        parameters: Of this process.
        params: Local tensors of the parameters.
        grads: Local gradients; None for a parameter that is skipped on all ranks.
        buffers: Local momentum buffers, already updated, by index of the parameter.
        groups: Parameter groups of the optimizer.
        config: Numerics.
        batches: Of the matrices that this rank owns.
        observed: Names of the matrices to observe.
        observer: Measures them.
        guarded: Name of the matrix whose residual is measured, if any.
        state: Of the optimizer, by parameter.
        tracker: Measures every owned matrix, in a tracked step.
        kernels: Of the device; outlive the step.
    """

    def __init__(
        self,
        *,
        parameters: Parameters,
        params: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        buffers: Mapping[int, Tensor],
        groups: Sequence[Mapping[str, Any]],
        config: MuonConfig,
        batches: Batches,
        kernels: Kernels,
        observed: frozenset[str],
        observer: Observer,
        state: Mapping[Tensor, Mapping[str, Any]],
        guarded: str | None = None,
        tracker: GeometryTracker | None = None,
    ) -> None:
        self.residuals: dict[str, Tensor] = {}
        """Residual of the guarded matrix, where this rank reports it: float64, 0-dim."""
        self.nonfinite: dict[tuple[str, ...], Tensor] = {}
        """By names of matrices, whether the update of each was NaN or inf: boolean, 1-dim."""
        self._parameters = parameters
        self._params = params
        self._grads = grads
        self._buffers = buffers
        self._groups = groups
        self._config = config
        self._batches = batches
        self._observed = observed
        self._observer = observer
        self._guarded = guarded
        self._state = state
        self._tracker = tracker
        self._kernels = kernels
        kernels.begin_step()

    def read(self, parts: Sequence[Part], places: Sequence[Tensor]) -> None:
        """Write the momentum to orthogonalize; zeros where a parameter has no gradient.

        What travels must not depend on which gradients exist: sizes were agreed before.
        """
        buffers, grads, found = [], [], []
        for part, place in zip(parts, places, strict=True):
            tensor = self._parameters.matrices[part.matrix].tensor
            grad = self._grads[tensor]
            if grad is None:
                place.zero_()
                continue
            buffers.append(cut(self._buffers[tensor], part.piece))
            grads.append(cut(grad, part.piece))
            found.append(place)
        if self._config.nesterov:
            self._kernels.nesterov(buffers, grads, self._config.momentum, found)
        elif found:
            torch._foreach_copy_(found, buffers)

    def compute(self, bucket: Bucket, matrices: list[Tensor]) -> list[Tensor]:
        """Orthogonalize the owned matrices of a bucket, and observe those that were drawn."""
        if self._observed:
            for index, matrix in zip(bucket.owned, matrices, strict=True):
                name = self._parameters.matrices[index].name
                if name in self._observed and index in bucket.reported:
                    self._observer.measure(name, matrix)
        with span("amo::orthogonalize"):
            results = self._orthogonalize(bucket.owned, matrices)
        if self._guarded is not None:
            for index, result in zip(bucket.owned, results, strict=True):
                name = self._parameters.matrices[index].name
                if name == self._guarded and index in bucket.reported:
                    self._guard(name, result)
        if self._tracker is not None:
            for index, matrix, result in zip(bucket.owned, matrices, results, strict=True):
                if index in bucket.reported:
                    self._tracker.measure(self._parameters.matrices[index].name, matrix, result)
        return results

    def write(self, parts: Sequence[Part], values: Sequence[Tensor]) -> None:
        """Apply the update to the pieces whose result has arrived."""
        matrices = self._parameters.matrices
        arrived = [
            (part, value, update_scale(matrices[part.matrix].shape, self._config.update_scale))
            for part, value in zip(parts, values, strict=True)
            if self._grads[matrices[part.matrix].tensor] is not None
        ]
        self._apply(arrived)

    def finish(self, groups_by_ranks: Mapping[tuple[int, ...], dist.ProcessGroup | None]) -> None:
        """What remains once every result has been written; collective where a subclass needs it.

        Args:
            groups_by_ranks: Process group of each set of ranks that shares parameters.
        """

    def _apply(self, updates: Sequence[tuple[Part, Tensor, float]]) -> None:
        """Subtract updates, each with its scale, from the pieces of the parameters."""
        by_group: dict[int, list[tuple[Tensor, Tensor, float]]] = defaultdict(list)
        for part, value, scale in updates:
            tensor = self._parameters.matrices[part.matrix].tensor
            piece = cut(self._params[tensor], part.piece)
            by_group[self._parameters.entries[tensor].group].append((piece, value, scale))
        with span("amo::update"):
            for index, members in by_group.items():
                group = self._groups[index]
                self._kernels.apply_update(
                    [piece for piece, _, _ in members],
                    [value for _, value, _ in members],
                    lr=group["lr"] * group["lr_scale"],
                    weight_decay=group["weight_decay"],
                    scale=[scale for _, _, scale in members],
                )

    def _guard(self, name: str, result: Tensor) -> None:
        with span("amo::ns_guard"):
            # The residual of zeros, as without a gradient, says nothing.
            is_zero = ~torch.any(result != 0)
            self.residuals[name] = ns_residual(result).masked_fill(is_zero, math.nan)

    def _orthogonalize(self, owned: tuple[int, ...], matrices: Sequence[Tensor]) -> list[Tensor]:
        """Those of one shape and schedule together, which may run as batched products.

        The results are lent by the kernels until the next call.
        """
        results: dict[int, Tensor] = {}
        for batch in self._batches.of(owned):
            result = batch.run([matrices[position] for position in batch.positions])
            bad = self._kernels.drop_nonfinite(result)
            if bad is not None:
                self.nonfinite[batch.names] = bad
            results.update(zip(batch.positions, result.unbind(), strict=True))
        return [results[position] for position in range(len(owned))]


def kernels_of(parameters: Parameters, config: MuonConfig) -> Kernels:
    """The kernels of the parameters' device.

    Args:
        parameters: Of this process.
        config: Numerics.

    Raises:
        ValueError: The devices of the parameters cannot run what is asked for.
    """
    found = [
        make_kernels(
            device,
            ns_dtype=getattr(torch, config.ns_dtype),
            ns_backend=config.ns_backend,
            cuda_graphs=config.cuda_graphs,
        )
        for device in dict.fromkeys(entry.param.device for entry in parameters.entries)
    ]
    return found[0]


def count_backends(
    parameters: Parameters, schedules: Sequence[Schedule], kernels: Kernels
) -> Counter[str]:
    """How many matrices of this process each Newton-Schulz backend runs, by name.

    Args:
        parameters: Of this process.
        schedules: Of each matrix.
        kernels: Of their device.
    """
    return Counter(
        kernels.backend_name(matrix.shape, schedule.coefficients)
        for matrix, schedule in zip(parameters.matrices, schedules, strict=True)
    )


def cut(local: Tensor, piece: Piece) -> Tensor:
    """The box of a local tensor that a piece names; shares memory."""
    if piece.source_shape == local.shape:
        return local
    return local[tuple(slice(start, stop) for start, stop in piece.source)]
