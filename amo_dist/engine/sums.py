"""Rules that look at pieces of matrices and at sums over whole ones, as NorMuon and AdaMuon do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from amo_dist.distributed.layout import as_matrix, cut, cut_like
from amo_dist.distributed.plan import Part
from amo_dist.engine.parameters import Locals, Parameters
from amo_dist.engine.rule import Finish, MatrixPiece, UpdateRule
from amo_dist.engine.world import World

Done: TypeAlias = tuple[list[Part], list[Tensor]]
"""Pieces with their updates."""


class Sums:
    """Runs a rule over pieces: those that ask for a sum wait until all ranks have added to it.

    Args:
        parameters: Of this process.
        local: Parts of them and of their state.
        groups: Parameter groups of the optimizer.
        rule: Turns results into updates.
        device: Over which ranks add up; sums of host memory go there and back.
    """

    def __init__(
        self,
        parameters: Parameters,
        local: Locals,
        groups: Sequence[Mapping[str, Any]],
        rule: UpdateRule,
        device: torch.device,
    ) -> None:
        self._parameters, self._local, self._groups = parameters, local, groups
        self._rule, self._device = rule, device
        self._sizes = [
            rule.sums(matrix, parameters.entries[matrix.tensor].views[0].dim)
            for matrix in parameters.matrices
        ]
        self.num_rounds = max(map(len, self._sizes), default=0)
        """How often a step must `add_up`, each time for `go_on`; alike on all ranks."""
        # Results whose rule waits for a sum over the matrix, each with this rank's share of it.
        self._waiting: list[tuple[Part, Finish, Tensor]] = []
        self._bad: Tensor | None = None

    def begin(self, bad: Tensor | None) -> None:
        """Begin a step.

        Args:
            bad: 0-dim, boolean, on the device: where true, the rule's own state stays as it is.
        """
        self._bad, self._waiting = bad, []

    def piece(self, part: Part) -> MatrixPiece:
        """What a rule is told of a piece."""
        matrix = self._parameters.matrices[part.matrix]
        entry = self._parameters.entries[matrix.tensor]
        param, box = self._local.params[matrix.tensor], part.piece.source
        state = {
            name: cut_like(value, box, param.shape)
            for name, value in self._local.state[matrix.tensor].items()
        }
        dim, group = entry.views[0].dim, self._groups[entry.group]
        return MatrixPiece(matrix, part.piece.target, dim, cut(param, box), state, group)

    def take(self, results: Sequence[tuple[Part, Tensor]]) -> Done:
        """Give the rule results for pieces; returns the updates that wait for no sum."""
        with record_function("amo::finish"):
            return self._advance(
                (part, self._rule.finish(as_matrix(value), self.piece(part)), None)
                for part, value in results
            )

    def go_on(self, totals: Mapping[int, Tensor]) -> Done:
        """Give the rule the sums that `add_up` found; returns the updates that wait for no other.

        Args:
            totals: By matrix.
        """
        waiting, self._waiting = self._waiting, []
        with record_function("amo::finish"):
            return self._advance((part, each, totals[part.matrix]) for part, each, _ in waiting)

    def _advance(self, waiting: Iterable[tuple[Part, Finish, Tensor | None]]) -> Done:
        """Send each generator its sum; those that return are done, the others wait for the next."""
        parts: list[Part] = []
        updates: list[Tensor] = []
        for part, finish, total in waiting:
            with self._guarded(part):
                try:
                    share = finish.send(total)  # type: ignore[arg-type]
                except StopIteration as stop:
                    parts.append(part)
                    updates.append(stop.value)
                else:
                    self._waiting.append((part, finish, share))
        return parts, updates

    @contextlib.contextmanager
    def _guarded(self, part: Part) -> Iterator[None]:
        """Take back what the body does to state of the rule's own, where the step is bad."""
        if self._bad is None:
            yield
            return
        own = [value for name, value in self.piece(part).state.items() if name != "momentum_buffer"]
        before = [value.clone() for value in own]
        yield
        for value, old in zip(own, before, strict=True):
            value.copy_(torch.where(self._bad, old, value))

    def add_up(self, number: int, world: World) -> dict[int, Tensor]:
        """The totals of the ``number``-th sum, by matrix, over all of its ranks.

        One all-reduce for each set of ranks that shares matrices.
        """
        matrices = self._parameters.matrices
        dtype, device = self._rule.sum_dtype, self._parameters.device
        totals = {
            index: torch.zeros(sizes[number], dtype=dtype, device=device)
            for index, sizes in enumerate(self._sizes)
            if number < len(sizes)
        }
        for part, _, share in self._waiting:
            # Of replicas only the first counts.
            if world.rank in matrices[part.matrix].replicas[0]:
                totals[part.matrix] += share
        for ranks, group in world.groups_by_ranks.items():
            here = [index for index in totals if tuple(sorted(matrices[index].ranks)) == ranks]
            if here and group is not None:
                vector = torch.cat([totals[index] for index in here]).to(self._device)
                dist.all_reduce(vector, group=group)
                parts = vector.to(device).split([totals[index].numel() for index in here])
                totals.update(zip(here, parts, strict=True))
        return totals
