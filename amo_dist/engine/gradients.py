"""What all ranks agree on before a step: what comes, which gradients exist, are they usable.

One reduction of seven integers carries it. Further ones, which say whose gradient it is, follow
only if one is missing, foreign or unusable, or must first be brought to its parameter's placements
(which communicates). Every rank comes to the same verdict before anything has changed, so that no
rank raises while the others wait for it.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from amo_dist.config import MuonConfig
from amo_dist.distributed.agreement import check_alike, control_device, max_over, text_mark
from amo_dist.engine.parameters import (
    Parameters,
    gradient_is_foreign,
    gradient_is_misplaced,
    local_gradient,
)
from amo_dist.engine.world import World, slot_of
from amo_dist.kernels.interface import Kernels

logger = logging.getLogger(__name__)


class NonFiniteGradientError(FloatingPointError):
    """A gradient is NaN, inf or too large, and the configuration says that this is an error."""


class NonFiniteUpdateError(FloatingPointError):
    """Orthogonalizing a matrix gave NaN or inf: its momentum or its schedule is at fault."""


class MissingGradientError(RuntimeError):
    """A parameter has a gradient on some of its ranks only."""


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What the ranks agreed on.

    Attributes:
        reason: Why this step must leave parameters and state untouched; empty where it need not.
        grads: This rank's part of each gradient, in its parameter's placements; None for none.
    """

    reason: str
    grads: list[Tensor | None]


def momentum_bound(dtype: torch.dtype, momentum: float) -> float:
    """Largest gradient entry that can never overflow a momentum buffer of this dtype.

    A sum of gradients below ``bound`` stays below ``bound / (1 - momentum)``, with Nesterov too;
    a factor of two is left for rounding.
    """
    return torch.finfo(dtype).max * (1.0 - momentum) / 2.0


def second_moment_bound(dtype: torch.dtype) -> float:
    """Largest gradient entry whose square AdamW's ``exp_avg_sq`` can hold, with room to round.

    An infinite second moment never recovers: its parameter would stand still for good.
    """
    return math.sqrt(torch.finfo(dtype).max) / 2.0


class GradientCheck:
    """Compares gradients across the world.

    Args:
        world: Gives every parameter and matrix of the world its slots.
        parameters: Of this process.
        config: Decides the largest gradient entry that each of them can take.
        kernels: Of the parameters' device.
    """

    def __init__(
        self, world: World, parameters: Parameters, config: MuonConfig, kernels: Kernels
    ) -> None:
        self._world = world
        self._kernels = kernels
        self._params = [entry.param for entry in parameters.entries]
        of_matrices = momentum_bound(getattr(torch, config.momentum_dtype), config.momentum)
        self._bounds = [
            of_matrices if entry.views else second_moment_bound(entry.param.dtype)
            for entry in parameters.entries
        ]
        numbers = {slot: number for number, slot in enumerate(world.slots)}
        self._slots = [numbers[slot_of(e.name, e.layout.ranks)] for e in parameters.entries]
        self._matrix_slots = {matrix.name: slot for slot, matrix in enumerate(world.registry)}
        self._sizes = [len(world.slots), len(world.registry)]
        self._updates: Mapping[tuple[str, ...], Tensor] = {}

    def report_updates(self, nonfinite: Mapping[tuple[str, ...], Tensor]) -> None:
        """Keep what this rank saw of the updates it computed, for the next `agree`.

        Args:
            nonfinite: By names of matrices, a boolean for each; not read on the host here.
        """
        self._updates = nonfinite

    def warn_of_updates(self) -> None:
        """Log what `report_updates` told of bad updates on this rank; communicates nothing."""
        for names, bad in self._updates.items():
            for name in itertools.compress(names, bad.tolist()):
                logger.warning(
                    "%s: the last update of this matrix was NaN or inf and was left out: what is "
                    "saved now lacks it, and all ranks raise at their next step",
                    name,
                )

    def agree_on_updates(self) -> None:
        """Agree on what `report_updates` told on all ranks; a collective over the world.

        Raises:
            NonFiniteUpdateError: On every rank; names the first matrix whose last update was NaN
                or inf. The next `agree` raises it again.
        """
        numbers = self._numbers([None] * len(self._slots))
        _, updates = max_over(numbers, self._world.group).split(self._sizes)
        self._check_updates(updates.tolist())

    def agree(self, intent: str, *, skips: bool) -> Verdict:
        """Agree on what a step is about to do and on its gradients; a collective over the world.

        Args:
            intent: What must be alike on all ranks, as text.
            skips: Whether an unusable gradient skips the step; else it is an error.

        Raises:
            RankMismatchError: On every rank; names the ranks and the line that differs.
            MissingGradientError: On every rank; names a parameter and two ranks.
            ValueError: On every rank, for a foreign gradient; names a parameter and a rank.
            NonFiniteUpdateError: On every rank; names the first matrix whose last update was NaN
                or inf. Its parameter was only decayed then.
            NonFiniteGradientError: On every rank; names a parameter and a rank.
        """
        params = self._params
        foreign = [gradient_is_foreign(param) for param in params]
        absent = [param.grad is None for param in params]
        # Where one must move, the others have to know first which gradients exist.
        is_late = any(foreign) or any(map(gradient_is_misplaced, params))
        grads = [] if is_late else [local_gradient(param) for param in params]
        numbers = None if is_late else self._numbers(grads)
        found = self._reduce(intent, (is_late, any(foreign), any(absent)), numbers)
        anyone_late, anyone_foreign, anyone_absent, *anything_bad = found
        if anyone_foreign or anyone_absent:
            self._agree_on_presence(absent, foreign)
        if is_late:
            grads = [local_gradient(param) for param in params]
        unusable, updates = ([0] * size for size in self._sizes)
        if anyone_late or any(anything_bad):
            mine = self._numbers(grads) if numbers is None else numbers
            reduced = max_over(mine, self._world.group).split(self._sizes)
            unusable, updates = (part.tolist() for part in reduced)
        self._updates = {}
        self._check_updates(updates)
        reason = self._describe(unusable)
        if reason and not skips:
            raise NonFiniteGradientError(
                f"{reason}; nothing was changed. Set nonfinite = 'skip_step' to go on without "
                "such steps"
            )
        return Verdict(reason, grads)

    def agree_on_text(self, text: str) -> None:
        """Compare a text in place of a coming step; a collective over the world.

        It has the form of `agree`: a rank that is at its next step meanwhile, as where a load
        failed on some ranks only, meets it there, and all raise instead of waiting.

        Args:
            text: What must be alike on all ranks.

        Raises:
            RankMismatchError: On every rank; names the ranks and the line that differs.
        """
        self._reduce(text, (False, False, False), None)

    def _reduce(self, text: str, flags: Sequence[bool], numbers: Tensor | None) -> list[bool]:
        """Compare texts; whether a flag is set on any rank, then the two that `_numbers` makes."""
        # The greatest mark of the text and, negated, the least: equal where all texts are.
        mark = text_mark(text)
        told = torch.tensor([mark, -mark, *flags], device=control_device(self._world.group))
        parts = told.new_zeros(sum(self._sizes)) if numbers is None else numbers
        bad = [part.any().view(1).to(told.dtype) for part in parts.split(self._sizes)]
        vector = max_over(torch.cat([told, *bad]), self._world.group)
        greatest, negated_least, *found = vector.tolist()
        if greatest != -negated_least:
            check_alike("the coming step", text, self._world.group)
        return list(map(bool, found))

    def _agree_on_presence(self, is_absent: Sequence[bool], is_foreign: Sequence[bool]) -> None:
        """Raise where a gradient is missing on some ranks alone, or is foreign; a collective."""
        num_slots, mark = len(self._world.slots), self._world.rank + 1
        flags = [0] * (3 * num_slots)
        for slot, absent, foreign in zip(self._slots, is_absent, is_foreign, strict=True):
            flags[num_slots + slot if absent else slot] = mark
            flags[2 * num_slots + slot] = mark * foreign
        vector = torch.tensor(flags, dtype=torch.int64, device=control_device(self._world.group))
        found = max_over(vector, self._world.group).tolist()
        parts = (found[start : start + num_slots] for start in range(0, 3 * num_slots, num_slots))
        for (name, ranks), present, absent, foreign in zip(self._world.slots, *parts, strict=True):
            if foreign:
                raise ValueError(
                    f"{name}: found a sparse gradient, or a plain one of a DTensor, on rank "
                    f"{foreign - 1}, expected a dense one in the form of the parameter"
                )
            # A tensor of one rank's own may have a gradient whatever its namesakes have.
            if ranks and present and absent:
                raise MissingGradientError(
                    f"{name}: found a gradient on rank {present - 1} and none on rank "
                    f"{absent - 1}, expected one on all of its ranks or on none"
                )

    def _numbers(self, grads: Sequence[Tensor | None]) -> Tensor:
        """This rank's mark, from 1, by slot of an unusable gradient or a bad update; else 0."""
        device, mark = control_device(self._world.group), self._world.rank + 1
        numbers = torch.zeros(sum(self._sizes), dtype=torch.int64, device=device)
        for places, bad in (self._unusable(grads), self._bad_updates()):
            if places:
                numbers[places] = bad.to(numbers.device, torch.int64) * mark
        return numbers

    def _unusable(self, grads: Sequence[Tensor | None]) -> tuple[list[int], Tensor]:
        """Slots, and whether each gradient has a NaN, an inf or an entry beyond its bound."""
        held = [
            (slot, bound, grad)
            for slot, bound, grad in zip(self._slots, self._bounds, grads, strict=True)
            if grad is not None and grad.numel() > 0
        ]
        slots = [slot for slot, _, _ in held]
        if not held:
            return slots, torch.empty(0)
        return slots, self._kernels.exceed(
            [grad for _, _, grad in held], [bound for _, bound, _ in held]
        )

    def _bad_updates(self) -> tuple[list[int], Tensor]:
        """Slots of the matrices whose last update this rank computed, and whether it was bad."""
        offset = len(self._world.slots)
        places = [offset + self._matrix_slots[name] for names in self._updates for name in names]
        return places, torch.cat(list(self._updates.values())) if places else torch.empty(0)

    def _check_updates(self, updates: Sequence[int]) -> None:
        bad = [
            (matrix, found - 1)
            for matrix, found in zip(self._world.registry, updates, strict=True)
            if found
        ]
        if bad:
            matrix, rank = bad[0]
            raise NonFiniteUpdateError(
                f"{matrix.name}: the last update of this {matrix.operator_type} matrix was NaN or "
                f"inf on its owner, rank {rank} (the first of {len(bad)} such matrices), and was "
                "left out. Its momentum_buffer is damaged, or its schedule diverges: check the "
                "schedule's coefficients, and go on from an earlier checkpoint"
            )

    def _describe(self, unusable: Sequence[int]) -> str:
        bad = [
            (name, mark - 1)
            for (name, _), mark in zip(self._world.slots, unusable, strict=True)
            if mark
        ]
        if not bad:
            return ""
        name, rank = bad[0]
        return (
            f"{name}: found a NaN, an inf or an entry too large for the optimizer's state in its "
            f"gradient on rank {rank} (the first of {len(bad)} such parameters)"
        )
