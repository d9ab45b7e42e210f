"""What all ranks agree on before a step: which gradients exist, and whether they are finite.

One small all-reduce, of a fixed length, carries it. Every rank comes to the same verdict before
anything has changed, so that no rank raises while the others wait for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from amo_dist.distributed.agreement import control_device, max_over
from amo_dist.world import World


class NonFiniteGradientError(FloatingPointError):
    """A gradient holds NaN or inf, and the configuration says that this is an error."""


class MissingGradientError(RuntimeError):
    """A parameter has a gradient on some of its ranks only."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepVerdict:
    """The agreed answer.

    Attributes:
        has_gradient: For each parameter of this process.
        skips: True where this step leaves parameters and state untouched.
        reason: Why it does.
    """

    has_gradient: tuple[bool, ...]
    skips: bool
    reason: str


class StepGuard:
    """Compares gradients across the world.

    Args:
        world: Gives every parameter of the world its slots.
        names: Parameters of this process.
    """

    def __init__(self, world: World, names: Sequence[str]) -> None:
        self._world = world
        self._names = names
        slot_by_name = {name: slot for slot, name in enumerate(world.names)}
        self._slots = [slot_by_name[name] for name in names]

    def agree(self, grads: Sequence[Tensor | None], *, skips: bool) -> StepVerdict:
        """Agree on the gradients of one step; a collective over the world.

        Args:
            grads: Local gradients, in the order of ``names``.
            skips: Whether a non-finite gradient skips the step; else it is an error.

        Raises:
            NonFiniteGradientError: On every rank; names a parameter and a rank.
            MissingGradientError: On every rank; names a parameter and two ranks.
        """
        present, absent, nonfinite = self._reduced(grads)
        for slot, name in enumerate(self._world.names):
            if present[slot] and absent[slot]:
                raise MissingGradientError(
                    f"{name}: found a gradient on rank {present[slot] - 1} and none on rank "
                    f"{absent[slot] - 1}, expected one on all ranks or on none"
                )
        reason = self._describe(nonfinite)
        if reason and not skips:
            raise NonFiniteGradientError(
                f"{reason}; nothing was changed. Set nonfinite = 'skip_step' to go on without "
                "such steps"
            )
        return StepVerdict(
            has_gradient=tuple(bool(present[slot]) for slot in self._slots),
            skips=bool(reason),
            reason=reason,
        )

    def _reduced(self, grads: Sequence[Tensor | None]) -> tuple[list[int], list[int], list[int]]:
        """By slot, the greatest rank (from 1) that has a gradient, lacks it, has a bad one."""
        mark, num_names = self._world.rank + 1, len(self._world.names)
        flags = torch.zeros((3, num_names), dtype=torch.int64)
        for slot, grad in zip(self._slots, grads, strict=True):
            flags[0 if grad is not None else 1, slot] = mark
        nonempty = [
            (slot, grad)
            for slot, grad in zip(self._slots, grads, strict=True)
            if grad is not None and grad.numel() > 0
        ]
        device = control_device(self._world.group)
        flags = flags.to(device)
        if nonempty:
            # The largest entry, not the 2-norm: that of finite 1e30 entries is infinite.
            largest = torch.stack(
                torch._foreach_norm([grad for _, grad in nonempty], ord=float("inf"))
            )
            bad = (~torch.isfinite(largest)).to(device=device, dtype=torch.int64) * mark
            flags[2, [slot for slot, _ in nonempty]] = bad
        present, absent, nonfinite = max_over(flags, self._world.group).tolist()
        return present, absent, nonfinite

    def _describe(self, nonfinite: Sequence[int]) -> str:
        bad = [
            (name, mark - 1)
            for name, mark in zip(self._world.names, nonfinite, strict=True)
            if mark
        ]
        if not bad:
            return ""
        name, rank = bad[0]
        return (
            f"{name}: found a NaN or inf in its gradient on rank {rank} (the first of {len(bad)} "
            "such parameters)"
        )
