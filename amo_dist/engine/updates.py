"""From orthogonalized results to updated parameters, piece by piece."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from amo_dist.distributed.layout import MatrixLayout, flattened, local_tensor
from amo_dist.distributed.plan import Part
from amo_dist.distributed.spans import span
from amo_dist.engine.parameters import Parameters, learning_rate
from amo_dist.engine.pieces import Cuts, as_matrix, cut, cut_like
from amo_dist.engine.rounding import Rounding
from amo_dist.engine.rule import Finish, MatrixPiece, UpdateRule
from amo_dist.engine.world import World
from amo_dist.kernels.interface import Kernels


class Updates:
    """Writes updates: as results arrive, or at the end of a step where the rule asks for sums.

    Args:
        parameters: Of this process.
        groups: Parameter groups of the optimizer.
        state: Of the optimizer, by parameter.
        rule: Turns results into updates.
        kernels: Of the parameters' device.
        rounding: Writes bfloat16 parameters.
    """

    def __init__(
        self,
        parameters: Parameters,
        groups: Sequence[Mapping[str, Any]],
        state: Mapping[Tensor, Mapping[str, Tensor]],
        rule: UpdateRule,
        kernels: Kernels,
        rounding: Rounding,
    ) -> None:
        self._parameters, self._groups, self._state = parameters, groups, state
        self._rule, self._kernels, self._rounding = rule, kernels, rounding
        self._finishes = type(rule).finish is not UpdateRule.finish
        self._sums = [
            rule.sums(matrix, parameters.entries[matrix.tensor].views[0].dim)
            for matrix in parameters.matrices
        ]
        self._params: Sequence[Tensor] = ()
        self._grads: Sequence[Tensor | None] = ()
        self._bad: Tensor | None = None
        self._cuts = Cuts(parameters)
        self._scales = [self._scale(matrix) for matrix in parameters.matrices]
        # Results whose rule waits for a sum over the matrix, each with this rank's share of it.
        self._pending: list[tuple[Part, Finish, Tensor]] = []

    def begin(
        self, params: Sequence[Tensor], grads: Sequence[Tensor | None], bad: Tensor | None
    ) -> None:
        """Begin a step.

        Args:
            params: Local tensors of the parameters.
            grads: By parameter; None for one that is skipped on all ranks.
            bad: As for `Kernels.begin_step`; state of the rule's own stays as it is, too.
        """
        self._params, self._grads, self._bad = params, grads, bad

    def end(self) -> None:
        """Forget all that belongs to a step."""
        self._params, self._grads, self._pending, self._bad = (), (), [], None

    def piece(self, part: Part) -> MatrixPiece:
        """What a rule is told of a piece."""
        matrix = self._parameters.matrices[part.matrix]
        entry = self._parameters.entries[matrix.tensor]
        param, box = self._params[matrix.tensor], part.piece.source
        state = {
            name: cut_like(flattened(local_tensor(value)), box, param.shape)
            for name, value in self._state[entry.param].items()
        }
        dim, group = entry.views[0].dim, self._groups[entry.group]
        return MatrixPiece(matrix, part.piece.target, dim, cut(param, box), state, group)

    def take(self, parts: Sequence[Part], values: Sequence[Tensor]) -> None:
        """Results for pieces of this rank; lent, so that they are used up here."""
        if not self._finishes:
            self._apply(parts, values)
            return
        with span("amo::finish"):
            done = self._advance(
                (part, self._rule.finish(as_matrix(value), self.piece(part)), None)
                for part, value in zip(parts, values, strict=True)
                if self._has_gradient(part)
            )
        self._apply(*done)

    def _has_gradient(self, part: Part) -> bool:
        return self._grads[self._parameters.matrices[part.matrix].tensor] is not None

    def finish(
        self, world: World, deferring: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> None:
        """Add up the sums that rules wait for, and write the rest; a collective if there are any.

        One all-reduce for each set of ranks that shares matrices, and for each sum of the rule.

        Args:
            world: Process groups.
            deferring: Goes around what communicates nothing, and keeps its error for later.
        """
        for number in range(max(map(len, self._sums), default=0)):
            with span("amo::sums"):
                totals = self._add_up(number, world)
            pending, self._pending = self._pending, []
            with deferring(), span("amo::finish"):
                done = self._advance((part, each, totals[part.matrix]) for part, each, _ in pending)
                self._apply(*done)

    def _advance(
        self, waiting: Iterable[tuple[Part, Finish, Tensor | None]]
    ) -> tuple[list[Part], list[Tensor]]:
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
                    self._pending.append((part, finish, share))
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

    def _add_up(self, number: int, world: World) -> dict[int, Tensor]:
        """The totals of the ``number``-th sum, by matrix, over all of its ranks."""
        matrices = self._parameters.matrices
        dtype, device = self._rule.sum_dtype, self._parameters.device
        totals = {
            index: torch.zeros(sizes[number], dtype=dtype, device=device)
            for index, sizes in enumerate(self._sums)
            if number < len(sizes)
        }
        for part, _, share in self._pending:
            # Of replicas only the first counts.
            if world.rank in matrices[part.matrix].replicas[0]:
                totals[part.matrix] += share
        for ranks, group in world.groups_by_ranks.items():
            here = [index for index in totals if tuple(sorted(matrices[index].ranks)) == ranks]
            if here and group is not None:
                vector = torch.cat([totals[index] for index in here])
                dist.all_reduce(vector, group=group)
                parts = vector.split([totals[index].numel() for index in here])
                totals.update(zip(here, parts, strict=True))
        return totals

    def _apply(self, parts: Sequence[Part], updates: Sequence[Tensor]) -> None:
        """Decay the pieces of the parameters, and subtract their scaled updates."""
        places = self._cuts.take(self._params, parts)
        values = [each if each.dim() == 2 else as_matrix(each) for each in updates]
        by_group: dict[int, list[int]] = defaultdict(list)
        matrices, entries = self._parameters.matrices, self._parameters.entries
        for position, part in enumerate(parts):
            tensor = matrices[part.matrix].tensor
            if self._grads[tensor] is not None:
                by_group[entries[tensor].group].append(position)
        with span("amo::update"):
            for index, members in by_group.items():
                group = self._groups[index]
                # What is widened one by one: float32 copies of all would be a second model.
                lists = [[i] for i in members] if self._rounding.is_wanted else [members]
                for some in lists:
                    with contextlib.ExitStack() as stack:
                        self._kernels.apply_update(
                            [self._target(parts[i], places[i], stack) for i in some],
                            [values[i] for i in some],
                            lr=learning_rate(group),
                            weight_decay=float(group["weight_decay"]),
                            scale=[self._scales[parts[i].matrix] for i in some],
                            cautious=self._rule.config.cautious_decay,
                        )

    def _target(self, part: Part, place: Tensor, stack: contextlib.ExitStack) -> Tensor:
        """What is updated: a piece of a parameter, or float32 values that are written there."""
        if not self._rounding.is_for(place):
            return place
        tensor = self._parameters.matrices[part.matrix].tensor
        return stack.enter_context(self._rounding.widened(tensor, place, part.piece.source))

    def _scale(self, matrix: MatrixLayout) -> float:
        rows, columns = matrix.shape
        outputs_are_columns = self._parameters.entries[matrix.tensor].views[0].dim == 1
        return self._rule.scale((columns, rows) if outputs_are_columns else (rows, columns))
