"""The verdict of all ranks on each step: may it change parameters and state, and if not, why.

`amo_dist.engine.vote` carries flags and fingerprints. Words, with the culprit named, are gathered
only if a flag is set. Every rank reaches the same verdict, so no rank raises while others wait for
it. On a CPU the verdict is read before anything changes. On a device, reading would wait for the
backward pass::

    step k      vote (stays on the device), exchange, update unless the vote is bad
    step k + 1  read the vote of step k: raise, or count a skipped step; then vote again

A bad step leaves parameters and state as they were. A failure in step k itself goes into the vote
of step k + 1, which leaves that step out, and step k + 2 raises.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from amo_dist.config import MuonConfig
from amo_dist.distributed.agreement import (
    RankMismatchError,
    check_alike,
    failure_text,
    gather_json,
)
from amo_dist.engine.parameters import Parameters
from amo_dist.engine.vote import (
    ABSENT,
    FOREIGN,
    MISPLACED,
    Pattern,
    Tally,
    Vote,
    fetch,
    local_gradients,
    place_gradients,
)
from amo_dist.engine.world import World, sharing_ranks
from amo_dist.kernels.elementwise import exceed

logger = logging.getLogger(__name__)

MAX_IDLE_STEPS = 10
"""Steps in a row without any gradient of a matrix; the last of them is an error."""


class MissingGradientError(RuntimeError):
    """A parameter has a gradient on some of its ranks only, or matrices had none for long."""


class NonFiniteGradientError(FloatingPointError):
    """A gradient is NaN, inf or too large, and the configuration says that this is an error."""


class NonFiniteUpdateError(FloatingPointError):
    """Orthogonalizing a matrix gave NaN or inf: its momentum or its schedule is at fault."""


@dataclasses.dataclass(frozen=True, slots=True)
class Agreement:
    """Result of a vote.

    Attributes:
        fault: Reason for which the step must leave parameters and state untouched, or nothing.
        grads: This rank's part of each gradient in its parameter's placements, None without one.
        bad: 0-dim boolean on the device: whether the step must leave them untouched after all.
            None if ``fault`` tells.
        is_idle: Whether no gradient has ever existed: the step does nothing and does not count.
    """

    fault: str
    grads: Sequence[Tensor | None]
    bad: Tensor | None = None
    is_idle: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class _Ballot:
    """This rank's vote, from which words are made if any rank asks.

    Attributes:
        step: Optimizer step, 0 for a vote on a text alone.
        text: Lines that must be alike on all ranks.
        pattern: Gradients of this rank.
        exceeds: Whether each gradient of ``pattern.nonempty`` is unusable.
        names: Names of matrices that this rank updated in the last step.
        updates: Whether each of these updates was NaN or inf.
    """

    step: int
    text: str
    pattern: Pattern
    exceeds: Tensor | None
    names: Sequence[str]
    updates: Tensor | None


class Verdict:
    """Compares the ranks of the world before each step.

    Args:
        world: All ranks, and the sets of them that share parameters.
        parameters: Parameters of this process.
        config: Says whether a bad gradient skips the step; its momentum bounds gradients.
    """

    def __init__(self, world: World, parameters: Parameters, config: MuonConfig) -> None:
        self._world, self._params = world, parameters.params
        self._skips = config.nonfinite == "skip_step"
        self._vote = Vote(world, parameters, config.momentum)
        self._has_begun, self._num_idle, self._failure = False, 0, ""
        self._names: Sequence[str] = ()
        self._updates: Tensor | None = None
        self._pending: tuple[_Ballot, Callable[[], list[int]]] | None = None
        """Ballot of the last step, and a function that reads the result, until somebody has."""

    # ---------------------------------------------------------------- before a step

    def agree(self, step: int, text: str, momentum: float, *, waits: bool) -> Agreement:
        """Vote on a step; a collective over the world.

        Args:
            step: Number of the coming step.
            text: Lines that must be alike on all ranks; ``waits`` is one of them.
            momentum: Greatest momentum of any group, which bounds gradients from now on.
            waits: Whether to read the verdict now; else it stays on the device until `settle`.

        Raises:
            RankMismatchError: On every rank; names the ranks and the line that differs.
            MissingGradientError: On every rank; names a parameter and two ranks, or matrices
                without a gradient on any rank.
            ValueError: On every rank, for a foreign gradient; names a parameter and a rank.
            NonFiniteUpdateError: On every rank; names the first matrix whose last update was NaN
                or inf. Its parameter was only decayed then.
            NonFiniteGradientError: On every rank; names a parameter and a rank.
            RuntimeError: On every rank, for what `report_failure` got on one of them.
        """
        kinds, grads = local_gradients(self._params)
        pattern, exceeds = self._vote.pattern(waits, kinds, momentum), None
        if pattern.nonempty:
            exceeds = exceed([grads[i] for i in pattern.nonempty], pattern.bounds)  # type: ignore[misc]
        ballot, vector = self._cast(step, text, pattern, exceeds, with_updates=True)
        self._names, self._updates = (), None
        if not waits:
            self._pending = ballot, fetch(vector)
            # Moving a gradient is a collective, which hangs if a rank has none: this waits for the
            # backward pass until all ranks are known to have one.
            if pattern.is_misplaced and not self._vote.tally(vector.tolist()).gradients_differ:
                grads = place_gradients(self._params, grads)
            return Agreement("", grads, self._vote.is_bad(vector))
        is_first, tally = not self._has_begun, self._vote.tally(vector.tolist())
        fault = self._judge(ballot, tally)
        if is_first and not tally.exists:
            return Agreement("", [], is_idle=True)
        if is_first:
            self._warn_of_missing(grads, step)
        if fault:
            return Agreement(fault, [])
        if pattern.is_misplaced:
            grads = place_gradients(self._params, grads)
        return Agreement("", grads)

    def agree_on_text(self, text: str, *, with_updates: bool = False) -> None:
        """Vote on a text alone; a collective over the world, of the form of `agree`.

        A rank that is at its next step meets this one there, and both raise.

        Args:
            text: Lines that must be alike on all ranks.
            with_updates: Whether to vote on what `report_updates` got, too; the next `agree` does
                so again.

        Raises:
            RankMismatchError: On every rank; names the ranks and the line that differs.
            NonFiniteUpdateError: On every rank, as in `agree`.
            RuntimeError: On every rank, for what `report_failure` got on one of them.
        """
        pattern = self._vote.pattern(True, bytes(len(self._params)))
        ballot, vector = self._cast(0, text, pattern, None, with_updates=with_updates)
        tally = self._vote.tally(vector.tolist())
        self._compare(ballot, tally)
        if tally.update:
            self._raise_for_updates(self._gather(ballot))

    def report_failure(self, part: str, error: Exception) -> None:
        """Keep a failure of this rank alone: others wait for it, so all raise at the next vote.

        Args:
            part: Name of the failed part of a step.
            error: Its exception; raised at once in a world of one rank.
        """
        if self._world.group is None:
            raise error
        # Only text is kept: the error would keep alive the tensors of its frames on a full device.
        logger.error("%s failed; all ranks raise at their next agreement", part, exc_info=error)
        self._failure = self._failure or failure_text(part, error)

    def report_updates(
        self, outcomes: Sequence[tuple[Sequence[str], Tensor]], bad: Tensor | None
    ) -> None:
        """Keep which updates of this rank were NaN or inf, for the next vote.

        Args:
            outcomes: Names of matrices, and a flag for each, on the device.
            bad: ``bad`` of this step's `Agreement`: a bad step says nothing about its updates.
        """
        self._names, self._updates = (), None
        if outcomes:
            names, flags = zip(*outcomes, strict=True)
            updates = torch.cat(flags).flatten()
            self._names = [*itertools.chain(*names)]
            self._updates = updates if bad is None else updates.masked_fill_(bad, False)

    # ---------------------------------------------------------------- after a step

    def settle(self) -> str:
        """Read the verdict of the last step if nobody has; gathers words if it is bad.

        Returns:
            Reason for which that step left parameters and state untouched, or nothing.

        Raises:
            As `agree`, for the last step; parameters and state are those before it.
        """
        if self._pending is None:
            return ""
        (ballot, read), self._pending = self._pending, None
        return self._judge(ballot, self._vote.tally(read()))

    def peek(self) -> Literal["taken", "skipped", "undone"]:
        """Outcome of the last step, for saving: waits for it, and logs a bad one.

        It communicates nothing, as one rank may save alone; `settle` gives the words of all ranks.
        """
        for name in self._bad_updates(self._names, self._updates):
            logger.warning(
                "%s: the last update of this matrix was NaN or inf and was left out: what is "
                "saved now lacks it, and all ranks raise at their next step",
                name,
            )
        if self._pending is None:
            return "taken"
        ballot, read = self._pending
        values = read()
        self._pending = ballot, lambda: values
        tally = self._vote.tally(values)
        if not tally.is_bad:
            return "taken"
        is_skip = False
        if tally.waits_differ or tally.texts_differ:
            cause = "ranks were about to do different things"
        elif tally.foreign or tally.gradients_differ:
            cause = "gradients were not alike"
        elif tally.update:
            cause = f"the update before was NaN or inf on rank {tally.update - 1}"
        else:
            is_skip = self._skips
            cause = f"a gradient was NaN, inf or too large on rank {tally.gradient - 1}"
        logger.warning("step %d changed nothing: %s; the next step says more", ballot.step, cause)
        return "skipped" if is_skip else "undone"

    # ---------------------------------------------------------------- the words

    def _cast(
        self,
        step: int,
        text: str,
        pattern: Pattern,
        exceeds: Tensor | None,
        *,
        with_updates: bool,
    ) -> tuple[_Ballot, Tensor]:
        """Make this rank's ballot, and reduce the votes of all ranks."""
        text, self._failure = self._failure or text, ""
        names, updates = (self._names, self._updates) if with_updates else ((), None)
        ballot = _Ballot(step, text, pattern, exceeds, names, updates)
        return ballot, self._vote.reduce(pattern, text, exceeds, updates)

    def _judge(self, ballot: _Ballot, tally: Tally) -> str:
        """Reason to leave a step out, or nothing; raises if that is an error."""
        words: dict[int, dict[str, Any]] = {}
        if tally.is_bad:
            self._compare(ballot, tally)
            words = self._gather(ballot)
        if tally.foreign or tally.gradients_differ:
            _check_presence(ballot.step, {rank: w["kinds"] for rank, w in words.items()})
        if tally.exists == 2:
            self._has_begun, self._num_idle = True, 0
        else:
            self._count_idle(ballot.step, tally.exists)
        if tally.update:
            self._raise_for_updates(words)
        if not tally.gradient:
            return ""
        ranks = {name: rank for rank, own in words.items() for name in own["gradients"]}
        name = min(ranks)
        reason = (
            f"{name}: found a NaN, an inf or an entry too large for the optimizer's state in its "
            f"gradient on rank {ranks[name]} in step {ballot.step} (the first of {len(ranks)} such "
            "parameters)"
        )
        if self._skips:
            return reason
        raise NonFiniteGradientError(
            f"{reason}; nothing was changed. Set nonfinite = 'skip_step' to go on without such "
            "steps"
        )

    def _gather(self, ballot: _Ballot) -> dict[int, dict[str, Any]]:
        """Words of each rank; a collective over the world."""
        flags = [] if ballot.exceeds is None else ballot.exceeds.tolist()
        kinds: dict[str, dict[str, int]] = {}
        for param, kind in zip(self._params, ballot.pattern.kinds, strict=True):
            ranks = str(sharing_ranks(param.layout.ranks) or f"rank {self._world.rank} alone")
            kinds.setdefault(ranks, {})[param.name] = kind & ~MISPLACED
        bad = [self._params[i].name for i in itertools.compress(ballot.pattern.nonempty, flags)]
        updates = self._bad_updates(ballot.names, ballot.updates)
        own = {"kinds": kinds, "gradients": bad, "updates": updates}
        return dict(zip(self._world.ranks, gather_json(own, self._world.group), strict=True))

    def _compare(self, ballot: _Ballot, tally: Tally) -> None:
        if tally.waits_differ:  # ranks that do not wait take part in no collective of words
            raise RankMismatchError(
                "the coming step: ranks are about to do different things; this one (another one "
                f"has other lines):\n{ballot.text}"
            )
        if tally.texts_differ:
            check_alike("the coming step", ballot.text, self._world.group)

    def _raise_for_updates(self, words: dict[int, dict[str, Any]]) -> None:
        owners = {name: rank for rank, own in words.items() for name in own["updates"]}
        name = min(owners)
        kind = next(m.operator_type for m in self._world.registry if m.name == name)
        raise NonFiniteUpdateError(
            f"{name}: the last update of this {kind} matrix was NaN or inf on its owner, rank "
            f"{owners[name]} (the first of {len(owners)} such matrices), and was left out. Its "
            "momentum_buffer is damaged, or its schedule diverges: check the schedule's "
            "coefficients, and go on from an earlier checkpoint"
        )

    def _count_idle(self, step: int, exists: int) -> None:
        """Warn of a step without any gradient of a matrix, and raise for many in a row."""
        self._num_idle += 1
        names = [matrix.name for matrix in self._world.registry]
        names = names or [param.name for param in self._params]
        text = f"{_first_names(names)}: found no gradient on any rank in step {step}"
        if self._num_idle >= MAX_IDLE_STEPS or (exists and not self._has_begun):
            count = f", the last of {self._num_idle} such steps" if self._num_idle > 1 else ""
            raise MissingGradientError(
                f"{text}{count}, expected that of one at least: call backward() before step(), and "
                "build the optimizer after all that replaces the model's parameters, such as "
                "fully_shard: it holds those that it was built with, unless a trainer swaps them "
                "in its param_groups before the first step"
            )
        if self._num_idle == 1:
            logger.warning("%s: parameters and state stay as they are", text)

    def _warn_of_missing(self, grads: Sequence[Tensor | None], step: int) -> None:
        """Log which matrices have no gradient in the first step that has gradients."""
        pairs = zip(self._params, grads, strict=True)
        names = [param.name for param, grad in pairs if param.views and grad is None]
        if names:
            logger.warning(
                "%s: found no gradient in step %d, as of a parameter that the model does not use, "
                "or no longer holds; it stays as it is until it has one",
                *(_first_names(names), step),
            )

    @staticmethod
    def _bad_updates(names: Sequence[str], updates: Tensor | None) -> list[str]:
        """Names whose flag is set; reads the flags on the host."""
        return [] if updates is None else [*itertools.compress(names, updates.tolist())]


def _first_names(names: Sequence[str]) -> str:
    """The first three names, and the number of the others."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


def _check_presence(
    step: int, kinds_by_rank: Mapping[int, Mapping[str, Mapping[str, int]]]
) -> None:
    """Raise for the first foreign gradient, or one that only some ranks of its parameter have.

    Args:
        step: Optimizer step, for the message.
        kinds_by_rank: Kind of each gradient, by rank, sharing ranks and name.

    Raises:
        ValueError: Names a parameter and a rank with a foreign gradient.
        MissingGradientError: Names a parameter, a rank with a gradient and one without.
    """
    ranks_by_kind: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
    for rank, kinds_by_set in kinds_by_rank.items():
        for sharing, kinds in kinds_by_set.items():
            for name, kind in kinds.items():
                ranks_by_kind[name, sharing][kind] = rank
    for (name, _), ranks in sorted(ranks_by_kind.items()):
        if FOREIGN in ranks:
            raise ValueError(
                f"{name}: found a sparse gradient, or a plain one of a DTensor, on rank "
                f"{ranks[FOREIGN]} in step {step}, expected a dense one in the form of the "
                "parameter"
            )
        if ABSENT in ranks and len(ranks) > 1:
            lacking = ranks.pop(ABSENT)
            raise MissingGradientError(
                f"{name}: found a gradient on rank {max(ranks.values())} and none on rank "
                f"{lacking} in step {step}, expected one on all of its ranks or on none"
            )
