"""What all ranks agree on before a step: what comes, which gradients exist, are they usable.

One reduction of five integers carries it. Further ones, which say whose gradient it is, follow
only if one is missing, foreign or unusable, or must first be brought to its parameter's placements
(which communicates). Every rank comes to the same verdict before anything has changed, so that no
rank raises while the others wait for it.
"""

from __future__ import annotations

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
        entries = parameters.entries
        self._params = [entry.param for entry in entries]
        of_matrices = momentum_bound(getattr(torch, config.momentum_dtype), config.momentum)
        self._bounds = [
            of_matrices if entry.views else second_moment_bound(entry.param.dtype)
            for entry in entries
        ]
        # Parameters first, then matrices.
        keys = [*world.slots, *(matrix.name for matrix in world.registry)]
        self._slot_by_key = {key: slot for slot, key in enumerate(keys)}
        self._slots = [self._slot_by_key[slot_of(e.name, e.layout.ranks)] for e in entries]
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
        numbers = self._numbers([None] * len(self._params))
        self._check_updates(max_over(numbers, self._world.group).tolist())

    def agree(self, intent: str, *, skips: bool) -> tuple[str, list[Tensor | None]]:
        """Agree on what a step is about to do and on its gradients; a collective over the world.

        Args:
            intent: What must be alike on all ranks, as text.
            skips: Whether an unusable gradient skips the step; else it is an error.

        Returns:
            Why this step must leave parameters and state untouched, or nothing; and this rank's
            part of each gradient in its parameter's placements, None where there is none.

        Raises:
            RankMismatchError: On every rank; names the ranks and the line that differs.
            MissingGradientError: On every rank; names a parameter and two ranks.
            ValueError: On every rank, for a foreign gradient; names a parameter and a rank.
            NonFiniteUpdateError: On every rank; names the first matrix whose last update was NaN
                or inf. Its parameter was only decayed then.
            NonFiniteGradientError: On every rank; names a parameter and a rank.
        """
        params = self._params
        foreign = list(map(gradient_is_foreign, params))
        is_odd = any(foreign) or any(param.grad is None for param in params)
        # Where one must move, the others have to know first which gradients exist.
        is_late = any(foreign) or any(map(gradient_is_misplaced, params))
        grads = [None if is_late else local_gradient(param) for param in params]
        numbers = self._numbers(grads)
        anyone_odd, anyone_late, anyone_bad = self._reduce(intent, (is_odd, is_late), numbers)
        if anyone_odd:
            self._agree_on_presence()
        if is_late:
            grads = [local_gradient(param) for param in params]
            numbers = self._numbers(grads)
        marks: list[int] = []
        if anyone_late or anyone_bad:
            marks = max_over(numbers, self._world.group).tolist()
        self._updates = {}
        self._check_updates(marks)
        reason = self._describe(marks)
        if reason and not skips:
            raise NonFiniteGradientError(
                f"{reason}; nothing was changed. Set nonfinite = 'skip_step' to go on without "
                "such steps"
            )
        return reason, grads

    def agree_on_text(self, text: str) -> None:
        """Compare a text in place of a coming step; a collective over the world.

        It has the form of `agree`: a rank that is at its next step meanwhile, as where a load
        failed on some ranks only, meets it there, and all raise instead of waiting.

        Args:
            text: What must be alike on all ranks.

        Raises:
            RankMismatchError: On every rank; names the ranks and the line that differs.
        """
        self._reduce(text, (False, False), self._numbers([None] * len(self._params)))

    def _reduce(self, text: str, flags: Sequence[bool], numbers: Tensor) -> list[bool]:
        """Compare texts; whether each flag, and any of the numbers, is set on any rank."""
        # The greatest mark of the text and, negated, the least: equal where all texts are.
        mark = text_mark(text)
        told = torch.tensor([mark, -mark, *flags], device=numbers.device)
        is_bad = numbers.any().view(1).to(told.dtype)
        vector = max_over(torch.cat([told, is_bad]), self._world.group)
        greatest, negated_least, *found = vector.tolist()
        if greatest != -negated_least:
            check_alike("the coming step", text, self._world.group)
        return list(map(bool, found))

    def _agree_on_presence(self) -> None:
        """Raise where a gradient is missing on some ranks alone, or is foreign; a collective."""
        world, mark = self._world, self._world.rank + 1
        present, absent, foreign = ([0] * len(world.slots) for _ in range(3))
        for slot, param in zip(self._slots, self._params, strict=True):
            (absent if param.grad is None else present)[slot] = mark
            foreign[slot] = mark * gradient_is_foreign(param)
        marks = torch.tensor([present, absent, foreign], device=control_device(world.group))
        parts = max_over(marks.flatten(), world.group).view(3, -1).tolist()
        for (name, ranks), here, nowhere, odd in zip(world.slots, *parts, strict=True):
            if odd:
                raise ValueError(
                    f"{name}: found a sparse gradient, or a plain one of a DTensor, on rank "
                    f"{odd - 1}, expected a dense one in the form of the parameter"
                )
            # A tensor of one rank's own may have a gradient whatever its namesakes have.
            if ranks and here and nowhere:
                raise MissingGradientError(
                    f"{name}: found a gradient on rank {here - 1} and none on rank "
                    f"{nowhere - 1}, expected one on all of its ranks or on none"
                )

    def _numbers(self, grads: Sequence[Tensor | None]) -> Tensor:
        """This rank's mark, from 1, by slot of an unusable gradient or a bad update; else 0."""
        device, mark = control_device(self._world.group), self._world.rank + 1
        numbers = torch.zeros(len(self._slot_by_key), dtype=torch.int64, device=device)
        held = [
            (slot, bound, grad)
            for slot, bound, grad in zip(self._slots, self._bounds, grads, strict=True)
            if grad is not None and grad.numel() > 0
        ]
        if held:
            slots, bounds, tensors = zip(*held, strict=True)
            is_bad = self._kernels.exceed(tensors, bounds)
            numbers[list(slots)] = is_bad.to(device, torch.int64) * mark
        if self._updates:
            places = [self._slot_by_key[name] for names in self._updates for name in names]
            is_bad = torch.cat(list(self._updates.values()))
            numbers[places] = is_bad.to(device, torch.int64) * mark
        return numbers

    def _check_updates(self, marks: Sequence[int]) -> None:
        """Raise for the first bad update among the marks of all slots."""
        num_params = len(self._world.slots)
        if bad := [slot for slot, mark in enumerate(marks) if mark and slot >= num_params]:
            matrix, rank = self._world.registry[bad[0] - num_params], marks[bad[0]] - 1
            raise NonFiniteUpdateError(
                f"{matrix.name}: the last update of this {matrix.operator_type} matrix was NaN or "
                f"inf on its owner, rank {rank} (the first of {len(bad)} such matrices), and was "
                "left out. Its momentum_buffer is damaged, or its schedule diverges: check the "
                "schedule's coefficients, and go on from an earlier checkpoint"
            )

    def _describe(self, marks: Sequence[int]) -> str:
        """The first unusable gradient among the marks of all slots; empty for none."""
        bad = [slot for slot, mark in enumerate(marks[: len(self._world.slots)]) if mark]
        if not bad:
            return ""
        (name, _), rank = self._world.slots[bad[0]], marks[bad[0]] - 1
        return (
            f"{name}: found a NaN, an inf or an entry too large for the optimizer's state in its "
            f"gradient on rank {rank} (the first of {len(bad)} such parameters)"
        )
