"""The vote of all ranks before each step: on the step, on which gradients exist, on their values.

One reduction of a small vector carries flags and fingerprints. Words, with the culprit named, are
gathered only where a flag is set. Every rank reaches the same verdict, so that no rank raises while
others wait for it. On a CPU the verdict is read before anything changes. On a device reading would
wait for the backward pass: there a bad step leaves parameters and state as they were, and the next
step, or saving, reads why.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from amo_dist.config import MuonConfig
from amo_dist.distributed.agreement import (
    RankMismatchError,
    check_alike,
    control_device,
    failure_text,
    fingerprint56,
    gather_json,
    max_over,
)
from amo_dist.engine import gradients
from amo_dist.engine.gradients import MissingGradientError
from amo_dist.engine.parameters import Parameters
from amo_dist.engine.world import World, sharing_ranks
from amo_dist.kernels.elementwise import exceed

logger = logging.getLogger(__name__)

_EXISTS, _FOREIGN, _GRADIENT, _UPDATE, _MARKS = range(5)
"""Positions in the vector. ``_EXISTS`` is 1 where any gradient exists and 2 where one of a matrix
does; the other flags are the number of a rank plus one. From ``_MARKS`` on come fingerprints: of
waiting, of the text, and per set of ranks that shares parameters of which gradients exist; then
their negatives, so that unlike fingerprints show in a maximum."""
_TEXT = _MARKS + 1
_SETS = slice(2, None)
"""Fingerprints of gradients among all fingerprints."""
_ABSTAIN = -(2**60)
"""Identity of the maximum: fingerprint, and negative, for sets of ranks without this one."""
_MAX_PATTERNS = 64
MAX_IDLE_STEPS = 10
"""Steps in a row without any gradient of a matrix; the last of them is an error."""


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
        bad: Whether the step must leave them untouched after all: 0-dim, boolean, on the device.
            None where ``fault`` tells.
        is_idle: Whether no gradient has ever existed: the step does nothing and does not count.
    """

    fault: str
    grads: Sequence[Tensor | None]
    bad: Tensor | None = None
    is_idle: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class _Pattern:
    """Constants that follow from which gradients exist, on the device.

    Attributes:
        kinds: Kind of each parameter's gradient.
        vector: This rank's vote, but for the text and the values.
        nonempty: Indices of parameters whose gradient has entries on this rank.
        bounds: Largest entry that each gradient of ``nonempty`` may have.
        is_misplaced: Whether a gradient has placements of its own.
    """

    kinds: bytes
    vector: Tensor
    nonempty: tuple[int, ...]
    bounds: Tensor
    is_misplaced: bool


@dataclasses.dataclass(frozen=True, slots=True)
class _LocalStatus:
    """This rank's vote, from which words are made where they are asked for."""

    step: int
    text: str
    pattern: _Pattern
    exceeds: Tensor | None = None
    """Whether each gradient of ``pattern.nonempty`` is unusable."""
    updates: tuple[Sequence[str], Tensor] | None = None
    """Names of matrices, and whether the last update of each was NaN or inf."""


class Verdict:
    """Compares the ranks of the world before each step.

    A step whose gradients exist as before copies nothing from the host to the device.

    Args:
        world: All ranks, and the sets of them that share parameters.
        parameters: Parameters of this process.
        config: Bounds gradients by its momentum; says whether a bad gradient skips the step.
    """

    def __init__(self, world: World, parameters: Parameters, config: MuonConfig) -> None:
        self._world, self._entries = world, parameters.entries
        self._skips = config.nonfinite == "skip_step"
        self._momentum = config.momentum
        is_far = parameters.device.type != "cpu"
        self._device = parameters.device if is_far else control_device(world.group)
        self._num_marks = 2 + len(world.rank_sets)
        size = _MARKS + 2 * self._num_marks
        self._vector = torch.zeros(size, dtype=torch.int64, device=self._device)
        self._slots = self._vector.unbind()
        self._patterns: dict[tuple[bool, bytes], _Pattern] = {}
        self._has_begun, self._num_idle = False, 0
        self._updates: tuple[Sequence[str], Tensor] | None = None
        self._failure = ""
        self._pending: tuple[_LocalStatus, Callable[[], list[int]]] | None = None
        """Vote on the last step, and what reads the result, if nobody has yet."""

    # ---------------------------------------------------------------- before a step

    def agree(self, step: int, text: str, momentum: float, *, waits: bool) -> Agreement:
        """Vote on a step; a collective over the world.

        Args:
            step: Number of the coming step.
            text: Lines that must be alike on all ranks; ``waits`` is one of them.
            momentum: Greatest momentum of any group, which bounds gradients from now on.
            waits: Whether to read the verdict now; else it holds on the device, and `settle` reads.

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
        if momentum > self._momentum:
            self._momentum = momentum
            self._patterns.clear()
        pairs = [gradients.local_gradient(entry.param) for entry in self._entries]
        grads = [grad for _, grad in pairs]
        pattern = self._pattern(waits, bytes(kind for kind, _ in pairs))
        exceeds = None
        if pattern.nonempty:
            exceeds = exceed([grads[i] for i in pattern.nonempty], pattern.bounds)  # type: ignore[misc]
        updates, self._updates = self._updates, None
        text, self._failure = self._failure or text, ""
        status = _LocalStatus(step, text, pattern, exceeds, updates)
        vector = self._all_reduce(status)
        if not waits:
            self._pending = status, _fetch(vector)
            # Moving a gradient is a collective, which hangs where a rank has none: this waits for
            # the backward pass until all ranks are known to have one.
            if pattern.is_misplaced and not any(self._unlike(vector.tolist())[_SETS]):
                grads = gradients.place_gradients(self._entries, grads)
            flags, marks, negatives = vector[_FOREIGN:].split(
                [_MARKS - _FOREIGN, self._num_marks, self._num_marks]
            )
            return Agreement("", grads, torch.cat([flags, marks + negatives]).any())
        is_first, values = not self._has_begun, vector.tolist()
        fault = self._raise_if_bad(status, values)
        if is_first and not values[_EXISTS]:
            return Agreement("", [], is_idle=True)
        if is_first:
            self._warn_of_missing(grads, step)
        if not fault and pattern.is_misplaced:
            grads = gradients.place_gradients(self._entries, grads)
        return Agreement(fault, [] if fault else grads)

    def agree_on_text(self, text: str, *, with_updates: bool = False) -> None:
        """Vote on a text alone; a collective over the world, of the form of `agree`.

        A rank that is at its next step meanwhile meets this one there, and both raise.

        Args:
            text: Lines that must be alike on all ranks.
            with_updates: Whether to agree on what `report_updates` got, too; the next `agree` does
                so again.

        Raises:
            RankMismatchError: On every rank; names the ranks and the line that differs.
            NonFiniteUpdateError: As `agree`.
            RuntimeError: On every rank, for what `report_failure` got on one of them.
        """
        text, self._failure = self._failure or text, ""
        pattern = self._pattern(True, bytes(len(self._entries)))
        updates = self._updates if with_updates else None
        status = _LocalStatus(0, text, pattern, updates=updates)
        values = self._all_reduce(status).tolist()
        self._compare(status, values)
        if values[_UPDATE]:
            self._raise_for_updates(self._gather(status))

    def report_failure(self, what: str, error: Exception) -> None:
        """Keep a failure of this rank alone, as others wait for it: all raise at the next vote.

        Args:
            what: Name of what failed.
            error: Its exception, raised at once where there is one rank.
        """
        if self._world.group is None:
            raise error
        # Text alone: the error would keep alive what its frames hold, on a full device.
        logger.error("%s failed; all ranks raise at their next agreement", what, exc_info=error)
        self._failure = self._failure or failure_text(what, error)

    def report_updates(
        self, outcomes: Sequence[tuple[Sequence[str], Tensor]], bad: Tensor | None
    ) -> None:
        """Keep which updates of this rank were NaN or inf, for the next vote.

        Args:
            outcomes: Names of matrices, and a flag for each, on the device.
            bad: ``bad`` of this step's `Agreement`: a bad step says nothing about its updates.
        """
        self._updates = None
        if outcomes:
            names, parts = zip(*outcomes, strict=True)
            flags = torch.cat(parts).flatten()
            flags = flags if bad is None else flags.masked_fill_(bad, False)
            self._updates = [*itertools.chain(*names)], flags

    # ---------------------------------------------------------------- after a step

    def settle(self) -> str:
        """Read the verdict of the last step, where nobody has; gathers words if it is bad.

        Returns:
            Reason for which that step left parameters and state untouched, or nothing.

        Raises:
            As `agree`, of the last step; parameters and state are those before it.
        """
        if self._pending is None:
            return ""
        (status, read), self._pending = self._pending, None
        return self._raise_if_bad(status, read())

    def peek(self) -> Literal["taken", "skipped", "undone"]:
        """Outcome of the last step, for saving: communicates nothing, waits for it, and logs.

        `settle` tells of it again, with the words of all ranks.
        """
        for name in _flagged(self._updates):
            logger.warning(
                "%s: the last update of this matrix was NaN or inf and was left out: what is "
                "saved now lacks it, and all ranks raise at their next step",
                name,
            )
        if self._pending is None:
            return "taken"
        status, read = self._pending
        values = read()
        self._pending = status, lambda: values
        unlike = self._unlike(values)
        is_skip = False
        if any(unlike[:2]):
            cause = "ranks were about to do different things"
        elif values[_FOREIGN] or any(unlike):
            cause = "gradients were not alike"
        elif values[_UPDATE]:
            cause = f"the update before was NaN or inf on rank {values[_UPDATE] - 1}"
        elif values[_GRADIENT]:
            is_skip = self._skips
            cause = f"a gradient was NaN, inf or too large on rank {values[_GRADIENT] - 1}"
        else:
            return "taken"
        logger.warning("step %d changed nothing: %s; the next step tells more", status.step, cause)
        return "skipped" if is_skip else "undone"

    # ---------------------------------------------------------------- the vector

    def _all_reduce(self, status: _LocalStatus) -> Tensor:
        """Maximum of all ranks' votes."""
        fingerprint, own = fingerprint56(status.text), self._world.rank + 1
        self._vector.copy_(status.pattern.vector)
        self._slots[_TEXT].fill_(fingerprint)
        self._slots[_TEXT + self._num_marks].fill_(-fingerprint)
        _, updates = status.updates or (None, None)
        for slot, flags in ((_GRADIENT, status.exceeds), (_UPDATE, updates)):
            if flags is not None:
                self._slots[slot].masked_fill_(flags.any().to(self._device), own)
        return max_over(self._vector, self._world.group)

    def _pattern(self, waits: bool, kinds: bytes) -> _Pattern:
        """Constants of these kinds; copied to the device once, which waits."""
        if (waits, kinds) in self._patterns:
            return self._patterns[waits, kinds]
        if len(self._patterns) >= _MAX_PATTERNS:
            self._patterns.clear()
        pairs, world = list(zip(self._entries, kinds, strict=True)), self._world
        exists = max(
            ((2 if e.views or not world.registry else 1) for e, k in pairs if k), default=0
        )
        marks = [int(waits), 0]
        for ranks in world.rank_sets:
            own = [bool(kind) for e, kind in pairs if sharing_ranks(e.layout.ranks) == ranks]
            marks.append(fingerprint56(str(own)) if world.rank in ranks else _ABSTAIN)
        negatives = [mark if mark == _ABSTAIN else -mark for mark in marks]
        flags = [exists, (world.rank + 1) * (gradients.FOREIGN in kinds), 0, 0]
        nonempty = [i for i, k in enumerate(kinds) if k & ~gradients.MISPLACED == gradients.PRESENT]
        # A rank sees one term of a gradient that is a sum over ranks.
        num_ranks = max([len(ranks) for ranks in world.rank_sets], default=1)
        bounds = [
            gradients.gradient_bound(self._entries[i], self._momentum)
            / (num_ranks if kinds[i] & gradients.MISPLACED else 1)
            for i in nonempty
        ]
        pattern = self._patterns[waits, kinds] = _Pattern(
            kinds,
            torch.tensor([*flags, *marks, *negatives], dtype=torch.int64, device=self._device),
            tuple(nonempty),
            torch.tensor(bounds, dtype=torch.float64, device=self._entries[0].param.device),
            any(kind & gradients.MISPLACED for kind in kinds),
        )
        return pattern

    def _unlike(self, values: Sequence[int]) -> list[bool]:
        """Whether ranks differ: in waiting, in their text, in each set's gradients."""
        marks, negatives = values[_MARKS : _MARKS + self._num_marks], values[-self._num_marks :]
        return [mark != -other for mark, other in zip(marks, negatives, strict=True)]

    # ---------------------------------------------------------------- the words

    def _raise_if_bad(self, status: _LocalStatus, values: Sequence[int]) -> str:
        """Reason to leave a step out, or nothing; raises where that is an error."""
        self._compare(status, values)
        is_unlike = bool(values[_FOREIGN]) or any(self._unlike(values)[_SETS])
        words: dict[int, dict[str, Any]] = {}
        if is_unlike or values[_GRADIENT] or values[_UPDATE]:
            words = self._gather(status)
        if is_unlike:
            gradients.check_presence(status.step, {rank: w["kinds"] for rank, w in words.items()})
        self._count_idle(status.step, values[_EXISTS])
        if values[_UPDATE]:
            self._raise_for_updates(words)
        if not values[_GRADIENT]:
            return ""
        ranks = {name: rank for rank, own in words.items() for name in own["bad"]}
        name = min(ranks)
        reason = (
            f"{name}: found a NaN, an inf or an entry too large for the optimizer's state in its "
            f"gradient on rank {ranks[name]} in step {status.step} (the first of {len(ranks)} such "
            "parameters)"
        )
        if self._skips:
            return reason
        raise NonFiniteGradientError(
            f"{reason}; nothing was changed. Set nonfinite = 'skip_step' to go on without such "
            "steps"
        )

    def _gather(self, status: _LocalStatus) -> dict[int, dict[str, Any]]:
        """Words of each rank; a collective over the world."""
        flags = [] if status.exceeds is None else status.exceeds.tolist()
        kinds: dict[str, dict[str, int]] = {}
        for entry, kind in zip(self._entries, status.pattern.kinds, strict=True):
            ranks = str(sharing_ranks(entry.layout.ranks) or f"rank {self._world.rank} alone")
            kinds.setdefault(ranks, {})[entry.name] = kind & ~gradients.MISPLACED
        bad = [self._entries[i].name for i in itertools.compress(status.pattern.nonempty, flags)]
        own = {"kinds": kinds, "bad": bad, "updates": _flagged(status.updates)}
        return dict(zip(self._world.ranks, gather_json(own, self._world.group), strict=True))

    def _compare(self, status: _LocalStatus, values: Sequence[int]) -> None:
        waiting, text, *_ = self._unlike(values)
        if waiting:  # ranks that go on have no collective in common with those that wait
            raise RankMismatchError(
                "the coming step: ranks are about to do different things; this one (another one "
                f"has other lines):\n{status.text}"
            )
        if text:
            check_alike("the coming step", status.text, self._world.group)

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
        if exists == 2:
            self._has_begun, self._num_idle = True, 0
            return
        self._num_idle += 1
        names = [matrix.name for matrix in self._world.registry]
        names = names or [entry.name for entry in self._entries]
        text = f"{_first_names(names)}: found no gradient on any rank in step {step}"
        if self._num_idle >= MAX_IDLE_STEPS or (exists and not self._has_begun):
            row = f", the last of {self._num_idle} such steps" if self._num_idle > 1 else ""
            raise MissingGradientError(
                f"{text}{row}, expected that of one at least: call backward() before step(), and "
                "build the optimizer after all that replaces the model's parameters, such as "
                "fully_shard: it holds those that it was built with, unless a trainer swaps them "
                "in its param_groups before the first step"
            )
        if self._num_idle == 1:
            logger.warning("%s: parameters and state stay as they are", text)

    def _warn_of_missing(self, grads: Sequence[Tensor | None], step: int) -> None:
        """Log which matrices have no gradient in the first step that has gradients."""
        pairs = zip(self._entries, grads, strict=True)
        names = [entry.name for entry, grad in pairs if entry.views and grad is None]
        if names:
            logger.warning(
                "%s: found no gradient in step %d, as of a parameter that the model does not use, "
                "or no longer holds; it stays as it is until it has one",
                *(_first_names(names), step),
            )


def _fetch(values: Tensor) -> Callable[[], list[int]]:
    """Begin to bring a small vector to the host; the returned function waits until it is there.

    On CUDA it is copied to pinned memory behind the work of the stream. Each vector has memory of
    its own: the one before may not have been read yet.
    """
    if values.device.type != "cuda":
        return values.clone().tolist
    landing, event = torch.empty_like(values, device="cpu", pin_memory=True), torch.cuda.Event()
    landing.copy_(values, non_blocking=True)
    event.record(torch.cuda.current_stream(values.device))

    def read() -> list[int]:
        event.synchronize()
        numbers: list[int] = landing.tolist()
        return numbers

    return read


def _flagged(updates: tuple[Sequence[str], Tensor] | None) -> list[str]:
    """Names whose flag is set; reads the flags on the host."""
    names, flags = updates or ([], torch.empty(0, device="cpu"))
    return [*itertools.compress(names, flags.tolist())]


def _first_names(names: Sequence[str]) -> str:
    """The first three names, and the number of the others."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"
