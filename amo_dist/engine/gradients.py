"""What all ranks agree on before a step: what comes, which gradients exist, are they usable.

One reduction carries it. Every rank comes to the same verdict, so that no rank raises while the
others wait for it. Where reading costs nothing, as on a CPU, the verdict is read before anything
changes. On a device that would wait for the backward pass: there the verdict is applied where it
is, by leaving parameters and state as they were, and is read when it has arrived, at the latest
before the next step and before state is saved.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from amo_dist.config import MuonConfig
from amo_dist.distributed.agreement import RankMismatchError, check_alike, failure_text
from amo_dist.distributed.groups import Membership
from amo_dist.engine.ballot import Ballot, Cast, Marks
from amo_dist.engine.parameters import Parameters, gradient_is_misplaced, local_gradient
from amo_dist.engine.world import World
from amo_dist.kernels.interface import Kernels

logger = logging.getLogger(__name__)


class NonFiniteGradientError(FloatingPointError):
    """A gradient is NaN, inf or too large, and the configuration says that this is an error."""


class NonFiniteUpdateError(FloatingPointError):
    """Orthogonalizing a matrix gave NaN or inf: its momentum or its schedule is at fault."""


class MissingGradientError(RuntimeError):
    """A parameter has a gradient on some of its ranks only, or nothing has one at all."""


@dataclasses.dataclass(frozen=True, slots=True)
class Agreement:
    """What a step needs to know.

    Attributes:
        fault: Why it must leave parameters and state untouched, or nothing.
        grads: This rank's part of each gradient in its parameter's placements, None where there is
            none.
        bad: Whether it must leave them untouched after all: 0-dim, boolean, on the device. None
            where ``fault`` tells.
    """

    fault: str
    grads: Sequence[Tensor | None]
    bad: Tensor | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Pending:
    """A verdict on its way to the host."""

    step: int
    text: str
    read: Callable[[], list[int]]


class GradientCheck:
    """Compares gradients across the world.

    Args:
        world: Gives every parameter and matrix of the world its slots.
        parameters: Of this process.
        config: Decides the largest gradient entry that each of them can take, and whether an
            unusable gradient skips the step; else it is an error.
        kernels: Of the parameters' device.
    """

    def __init__(
        self, world: World, parameters: Parameters, config: MuonConfig, kernels: Kernels
    ) -> None:
        self._world, self._kernels = world, kernels
        self._skips = config.nonfinite == "skip_step"
        self._entries = parameters.entries
        self._params = [entry.param for entry in parameters.entries]
        self._had_gradient: bool | None = None  # None until a step has had one
        self._ballot = Ballot(world, parameters, config, kernels)
        self._updates: tuple[tuple[str, ...], Tensor] | None = None
        self._pending: _Pending | None = None
        self._failure = ""

    @property
    def is_pending(self) -> bool:
        """Whether the verdict of the last step has not been looked at."""
        return self._pending is not None

    def report_failure(self, what: str, error: Exception) -> None:
        """Keep what failed on this rank alone: all ranks raise it at the next agreement.

        A rank that stopped in the middle of a step would leave the others waiting.

        Args:
            what: Failed.
            error: How; raised here and now where there are no others.
        """
        if self._world.group is None:
            raise error
        # Text alone: the error would keep alive what its frames hold, on a full device.
        logger.error("%s failed; all ranks raise at their next agreement", what, exc_info=error)
        self._failure = self._failure or failure_text(what, error)

    def report_updates(
        self, nonfinite: Mapping[tuple[str, ...], Tensor], bad: Tensor | None
    ) -> None:
        """Keep what this rank saw of the updates it computed, for the next `agree`.

        Args:
            nonfinite: By names of matrices, a boolean for each; not read on the host here.
            bad: Of the `Agreement` of this step.
        """
        self._updates = None
        if nonfinite:
            flags = torch.cat(list(nonfinite.values()))
            # A bad step was not taken, and its updates say nothing about momentum or schedule.
            flags = flags if bad is None else flags & ~bad
            self._updates = tuple(itertools.chain(*nonfinite)), flags

    def warn_of_updates(self) -> None:
        """Log what `report_updates` told of bad updates on this rank; communicates nothing."""
        names, flags = self._updates or ((), None)
        for name in itertools.compress(names, () if flags is None else flags.tolist()):
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
            RuntimeError: As `agree_on_text`.
        """
        self._check_updates(self.agree_on_text("the last update", self._updates))

    def agree(self, step: int, intent: str, momentum: float, *, waits: bool) -> Agreement:
        """Agree on what a step is about to do and on its gradients; a collective over the world.

        Args:
            step: That is about to be taken.
            intent: What must be alike on all ranks, as text; ``waits`` is part of it.
            momentum: The greatest of any group.
            waits: Whether to wait for the verdict; else it is applied on the device, and `settle`
                tells of it.

        Raises:
            RankMismatchError: On every rank; names the ranks and the line that differs.
            MissingGradientError: On every rank; names a parameter and two ranks, or matrices
                where none has had a gradient on any rank in any step so far.
            ValueError: On every rank, for a foreign gradient; names a parameter and a rank.
            NonFiniteUpdateError: On every rank; names the first matrix whose last update was NaN
                or inf. Its parameter was only decayed then.
            NonFiniteGradientError: On every rank; names a parameter and a rank.
            RuntimeError: On every rank, for what `report_failure` was told on one.
        """
        intent = self._text(intent)
        cast = self._ballot.cast(intent, self._params, self._updates, momentum, waits=waits)
        self._updates = None
        if waits:
            is_first = self._had_gradient is None
            fault = self._judge(self._read(cast), intent, step)
            if is_first:
                self._warn_of_missing(cast.grads, step)
            return Agreement(fault, [] if fault else self._placed(cast.grads))
        self._pending = _Pending(step, intent, self._kernels.fetch(cast.vector))
        grads, bad = cast.grads, self._ballot.is_bad(cast.vector)
        if cast.is_misplaced:
            # To bring a gradient to its placements is a collective that hangs where a rank has
            # none: this waits, for the backward pass too, until it is known that all have one.
            marks = self._ballot.count(self._read(cast))
            if not marks.clashes:
                grads = self._placed(grads)
        return Agreement("", grads, bad)

    def settle(self, *, saving: bool = False) -> str:
        """Look at the verdict of the last step, where nobody has; a collective where texts differ.

        Args:
            saving: State is about to be saved, perhaps by one rank alone: nothing is communicated,
                and where texts differ the next step tells how.

        Returns:
            Why that step left parameters and state untouched, or nothing.

        Raises:
            As `agree`, of the step before; parameters and state are those before that step.
        """
        pending = self._pending
        if pending is None:
            return ""
        values = pending.read()
        if saving and self._ballot.count(values).is_unlike:
            raise RankMismatchError(
                f"step {pending.step}: ranks were about to do different things, and did nothing; "
                "which ranks and what, their next step tells"
            )
        self._pending = None
        return self._judge(values, pending.text, pending.step)

    def agree_on_text(
        self, text: str, updates: tuple[tuple[str, ...], Tensor] | None = None
    ) -> Marks:
        """Compare a text in place of a coming step; a collective over the world.

        It has the form of `agree`: a rank that is at its next step meanwhile, as where a load
        failed on some ranks only, meets it there, and all raise instead of waiting.

        Args:
            text: What must be alike on all ranks.
            updates: For `Ballot.cast`.

        Raises:
            RankMismatchError: On every rank; names the ranks and the line that differs.
            RuntimeError: On every rank, for what `report_failure` was told on one.
        """
        text = self._text(text)
        cast = self._ballot.cast(text, [None] * len(self._params), updates, waits=True)
        marks = self._ballot.count(self._read(cast))
        self._compare(marks, text)
        return marks

    def _text(self, text: str) -> str:
        """What this rank tells: that it has failed, once, or the text."""
        text, self._failure = self._failure or text, ""
        return text

    def _read(self, cast: Cast) -> list[int]:
        """The vector, waited for."""
        return self._kernels.fetch(cast.vector)()

    def _placed(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Local gradients in the placements of their parameters; a collective where one moves."""
        return [
            local_gradient(param) if gradient_is_misplaced(param) else grad
            for param, grad in zip(self._params, grads, strict=True)
        ]

    def _judge(self, values: Sequence[int], text: str, step: int) -> str:
        """Why a step must be left out, or nothing; raises where that is an error."""
        marks = self._ballot.count(values)
        self._compare(marks, text)
        self._check_presence(marks, step)
        self._check_existence(marks, step)
        self._check_updates(marks)
        reason = self._describe(marks, step)
        if reason and not self._skips:
            raise NonFiniteGradientError(
                f"{reason}; nothing was changed. Set nonfinite = 'skip_step' to go on without "
                "such steps"
            )
        return reason

    def _compare(self, marks: Marks, text: str) -> None:
        if marks.is_unlike and marks.is_mixed:
            # Some ranks wait while others go on: they have no collective in common.
            raise RankMismatchError(
                "the coming step: ranks are about to do different things; this one (another one "
                f"has other lines):\n{text}"
            )
        if marks.is_unlike:
            check_alike("the coming step", text, self._world.group)

    def _check_presence(self, marks: Marks, step: int) -> None:
        """Raise where a gradient is missing on some ranks alone, or is foreign."""
        for slot, odd in marks.foreign.items():
            raise ValueError(
                f"{self._world.slots[slot][0]}: found a sparse gradient, or a plain one of a "
                f"DTensor, on rank {odd - 1} in step {step}, expected a dense one in the form of "
                "the parameter"
            )
        for slot, (here, nowhere) in marks.clashes.items():
            raise MissingGradientError(
                f"{self._world.slots[slot][0]}: found a gradient on rank {here - 1} and none on "
                f"rank {nowhere - 1} in step {step}, expected one on all of its ranks or on none"
            )

    def _check_existence(self, marks: Marks, step: int) -> None:
        """Raise where nothing has ever had a gradient; warn where that is so again."""
        had = self._had_gradient
        if marks.has_gradient:
            self._had_gradient = True
            return
        names = [matrix.name for matrix in self._world.registry]
        names = names or [name for name, _ in self._world.slots]
        told = f"found no gradient on any rank in step {step}"
        if had is None:
            raise MissingGradientError(
                f"{_some(names)}: {told}, expected that of one at least: call backward() before "
                "step(), and build the optimizer after all that replaces the model's parameters, "
                "such as fully_shard: it holds those that it was built with, unless a trainer "
                "swaps them in its param_groups before the first step"
            )
        if had:
            logger.warning("%s: %s: they stay as they are", _some(names), told)
        self._had_gradient = False

    def _warn_of_missing(self, grads: Sequence[Tensor | None], step: int) -> None:
        """Log which matrices have none in the first step that has gradients."""
        pairs = zip(self._entries, grads, strict=True)
        names = [entry.name for entry, grad in pairs if entry.views and grad is None]
        if names:
            logger.warning(
                "%s: found no gradient in step %d, as of a parameter that the model does not use, "
                "or no longer holds; it stays as it is until it has one",
                *(_some(names), step),
            )

    def _check_updates(self, marks: Marks) -> None:
        """Raise for the first bad update among the marks of all matrices."""
        for index, mark in marks.updates.items():
            matrix = self._world.registry[index]
            raise NonFiniteUpdateError(
                f"{matrix.name}: the last update of this {matrix.operator_type} matrix was NaN or "
                f"inf on its owner, rank {mark - 1} (the first of {len(marks.updates)} such "
                "matrices), and was left out. Its momentum_buffer is damaged, or its schedule "
                "diverges: check the schedule's coefficients, and go on from an earlier checkpoint"
            )

    def _describe(self, marks: Marks, step: int) -> str:
        """The first unusable gradient; empty for none."""
        for slot, mark in marks.gradients.items():
            return (
                f"{self._world.slots[slot][0]}: found a NaN, an inf or an entry too large for the "
                f"optimizer's state in its gradient on rank {mark - 1} in step {step} (the first "
                f"of {len(marks.gradients)} such parameters)"
            )
        return ""


def raise_together(
    what: str, failure: Exception | None, membership: Membership, check: GradientCheck | None
) -> None:
    """Raise on every rank what failed on one; a collective over the world.

    A rank that is at its next step meanwhile meets this there, and raises, too.

    Args:
        what: This rank has done, or has failed to do.
        failure: How, if so; raised as it is where there are no other ranks.
        membership: Of this process.
        check: Once the ranks know one another.

    Raises:
        ValueError: On every rank, where the failure on one is one; names the rank and its error.
        RuntimeError: On every rank, for any other failure.
        RankMismatchError: On every rank, where another one does something else.
    """
    if len(membership.ranks) == 1:
        if failure is not None:
            raise failure
        return
    text = what if failure is None else failure_text(what, failure)
    if check is not None:
        check.agree_on_text(text)
    else:
        with membership.patience():
            # What the first step of another rank begins with.
            check_alike("configuration", text, membership.join())


def _some(names: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"
