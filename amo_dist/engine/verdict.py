"""What all ranks agree on before a step: what comes, which gradients exist, are they usable.

One small reduction carries a few flags; the words, with the culprit named, are gathered only where
a flag is set. Every rank comes to the same verdict, so that no rank raises while others wait for
it. Where reading costs nothing, as on a CPU, the verdict is read before anything changes. On a
device that would wait for the backward pass: there the verdict is applied where it is, by leaving
parameters and state as they were, and is read when it has arrived, at the latest before the next
step and before state is saved.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from amo_dist.config import MuonConfig
from amo_dist.distributed.agreement import (
    RankMismatchError,
    check_alike,
    control_device,
    failure_text,
    gather_json,
    max_over,
    text_mark,
)
from amo_dist.engine.parameters import Parameters, raw_gradient
from amo_dist.engine.world import World, sharing_ranks
from amo_dist.kernels.elementwise import exceed

logger = logging.getLogger(__name__)

_ABSENT, _PRESENT, _EMPTY, _FOREIGN = range(4)
_MISPLACED = 4
"""Added to what kind of gradient it is."""
_WAITS, _GOES_ON, _EXISTS, _IS_FOREIGN, _GRADIENT, _UPDATE, _MARKS = range(7)
"""Places in the vector. A flag is a rank's number plus one, so that the greatest names a rank. From
``_MARKS`` on come the mark of the text and, for each set of ranks that shares parameters, that of
which gradients exist; then the negatives of all marks, so that unlike ones show in a maximum."""
_MOST_STEPS_WITHOUT = 10
"""Steps in a row without any gradient on any rank, the last of which is an error."""
_MOST_PATTERNS = 64
"""Patterns of gradients, existing and missing, whose tensors are kept."""
_NO_MARK = -(2**60)
"""In place of a mark, and of its negative, of a set of other ranks."""


Updates: TypeAlias = tuple[Sequence[str], Tensor]
"""Names of matrices, and whether the last update of each was NaN or inf: boolean, 1-D."""


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
class _Pattern:
    """What follows from which gradients exist, on the device for as long as that is so."""

    kinds: bytes
    """Of each parameter's gradient."""
    told: Tensor
    """The vector without the mark of the text."""
    held: tuple[int, ...]
    """Parameters with a gradient that has entries here."""
    bounds: Tensor
    """Largest entry that each of ``held`` may have."""
    is_misplaced: bool
    """Whether a gradient is in placements of its own."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Ballot:
    """What this rank told before a step, in words where somebody asks."""

    step: int
    text: str
    pattern: _Pattern
    is_bad: Tensor | None = None
    """Whether each of the gradients that are held is unusable."""
    updates: Updates | None = None


class Verdict:
    """Compares the ranks of the world before each step.

    In a step whose gradients exist as they did before, nothing is copied to the device from the
    host: numbers come as arguments of kernels.

    Args:
        world: All ranks, and which of them share parameters.
        parameters: Of this process.
        config: Decides the largest gradient entry that each of them can take, and whether an
            unusable gradient skips the step; else it is an error.
    """

    def __init__(self, world: World, parameters: Parameters, config: MuonConfig) -> None:
        self._world, self._entries = world, parameters.entries
        self._skips = config.nonfinite == "skip_step"
        self._mark = world.rank + 1
        self._momentum = config.momentum
        is_far = parameters.device.type != "cpu"
        self._device = parameters.device if is_far else control_device(world.group)
        self._num_marks = 1 + len(world.rank_sets)
        size = _MARKS + 2 * self._num_marks
        self._vector = torch.zeros(size, dtype=torch.int64, device=self._device)
        self._slots = self._vector.unbind()
        sizes = [_IS_FOREIGN, _MARKS - _IS_FOREIGN, self._num_marks, self._num_marks]
        self._parts = self._vector.split(sizes)[1:]
        self._patterns: dict[tuple[bool, bytes], _Pattern] = {}
        self._had_gradient = False
        self._steps_without = 0
        """Steps in a row in which nothing had a gradient on any rank."""
        self._updates: Updates | None = None
        self._failure = ""
        self.pending: tuple[_Ballot, Callable[[], list[int]]] | None = None
        """What was told, and what reads the verdict on the last step, if nobody has yet."""

    # ---------------------------------------------------------------- before a step

    def agree(self, step: int, intent: str, momentum: float, *, waits: bool) -> Agreement:
        """Agree on what a step is about to do and on its gradients; a collective over the world.

        Args:
            step: That is about to be taken.
            intent: What must be alike on all ranks, as text; ``waits`` is part of it.
            momentum: The greatest of any group, which bounds gradients from now on.
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
        if momentum > self._momentum:
            self._momentum = momentum
            self._patterns.clear()
        kinds, grads = bytearray(), []
        for entry in self._entries:
            kind, grad = _kind(entry.param)
            kinds.append(kind)
            grads.append(grad)
        pattern = self._pattern(waits, bytes(kinds))
        is_bad = None
        if pattern.held:
            is_bad = exceed([grads[i] for i in pattern.held], pattern.bounds)  # type: ignore[misc]
        updates, self._updates = self._updates, None
        text, self._failure = self._failure or intent, ""
        ballot = _Ballot(step, text, pattern, is_bad, updates)
        vector = self._cast(ballot)
        if waits:
            had_gradient = self._had_gradient
            fault = self._judge(ballot, vector.tolist())
            if self._had_gradient and not had_gradient:
                self._warn_of_missing(grads, step)
            if not fault and pattern.is_misplaced:
                grads = self._placed(grads)
            return Agreement(fault, [] if fault else grads)
        self.pending = ballot, _fetch(vector)
        if pattern.is_misplaced and not any(self._unlike(vector.tolist())[1:]):
            # To bring a gradient to its placements is a collective that hangs where a rank has
            # none: this waits, for the backward pass too, until it is known that all have one.
            grads = self._placed(grads)
        flags, marks, negated = self._parts
        return Agreement("", grads, torch.cat([flags, marks + negated]).any())

    def agree_on_text(self, text: str, *, with_updates: bool = False) -> None:
        """Compare a text in place of a coming step; a collective over the world.

        It has the form of `agree`: a rank that is at its next step meanwhile, as where a load
        failed on some ranks only, meets it there, and all raise instead of waiting.

        Args:
            text: What must be alike on all ranks.
            with_updates: Whether to agree on what `report_updates` told, too; the next `agree` does
                so again.

        Raises:
            RankMismatchError: On every rank; names the ranks and the line that differs.
            NonFiniteUpdateError: As `agree`.
            RuntimeError: On every rank, for what `report_failure` was told on one.
        """
        text, self._failure = self._failure or text, ""
        pattern = self._pattern(True, bytes(len(self._entries)))
        ballot = _Ballot(0, text, pattern, updates=self._updates if with_updates else None)
        values = self._cast(ballot).tolist()
        self._compare(ballot, values)
        if values[_UPDATE]:
            self._raise_for_updates(self._gather(ballot))

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
        self, outcomes: Sequence[tuple[Sequence[str], Tensor]], bad: Tensor | None
    ) -> None:
        """Keep what this rank saw of the updates it computed, for the next `agree`.

        Args:
            outcomes: Names of matrices, and whether the update of each was NaN or inf; not read on
                the host here.
            bad: Of the `Agreement` of this step.
        """
        self._updates = None
        if outcomes:
            names, found = zip(*outcomes, strict=True)
            flags = torch.cat(found).flatten()
            # A bad step was not taken, and its updates say nothing about momentum or schedule.
            flags = flags if bad is None else flags.masked_fill_(bad, False)
            self._updates = [*itertools.chain(*names)], flags

    def warn_of_updates(self) -> None:
        """Log what `report_updates` told of bad updates on this rank; communicates nothing."""
        for name in _flagged(self._updates):
            logger.warning(
                "%s: the last update of this matrix was NaN or inf and was left out: what is "
                "saved now lacks it, and all ranks raise at their next step",
                name,
            )

    # ---------------------------------------------------------------- after a step

    def settle(self) -> str:
        """Look at the verdict of the last step, where nobody has; gathers words if it is bad.

        Returns:
            Why that step left parameters and state untouched, or nothing.

        Raises:
            As `agree`, of the step before; parameters and state are those before that step.
        """
        if self.pending is None:
            return ""
        (ballot, read), self.pending = self.pending, None
        return self._judge(ballot, read())

    def peek(self) -> bool:
        """Whether the last step was left out, for saving, perhaps by one rank alone.

        Nothing is communicated, and `settle` tells again, with the words of all ranks.

        Raises:
            As `settle`, but names the step alone.
        """
        if self.pending is None:
            return False
        ballot, read = self.pending
        values = read()
        self.pending = ballot, lambda: values
        unlike = self._unlike(values)
        later = f"in step {ballot.step}, which changed nothing: see the next step"
        if unlike[0]:
            raise RankMismatchError(f"ranks were about to do different things {later}")
        if values[_IS_FOREIGN] or any(unlike):
            raise MissingGradientError(f"gradients are not alike {later}")
        if values[_UPDATE]:
            where = f"the update before was NaN or inf on rank {values[_UPDATE] - 1}"
            raise NonFiniteUpdateError(f"{where} {later}")
        if values[_GRADIENT] and not self._skips:
            where = f"a gradient was NaN, inf or too large on rank {values[_GRADIENT] - 1}"
            raise NonFiniteGradientError(f"{where} {later}")
        return bool(values[_GRADIENT])

    # ---------------------------------------------------------------- the vector

    def _cast(self, ballot: _Ballot) -> Tensor:
        """Tell all ranks; the maximum over them."""
        mark = text_mark(ballot.text)
        self._vector.copy_(ballot.pattern.told)
        self._slots[_MARKS].fill_(mark)
        self._slots[_MARKS + self._num_marks].fill_(-mark)
        if ballot.is_bad is not None:
            self._slots[_GRADIENT].masked_fill_(ballot.is_bad.any().to(self._device), self._mark)
        if ballot.updates is not None:
            _, flags = ballot.updates
            self._slots[_UPDATE].masked_fill_(flags.any().to(self._device), self._mark)
        return max_over(self._vector, self._world.group)

    def _pattern(self, waits: bool, kinds: bytes) -> _Pattern:
        """What follows from which gradients exist; copied to the device once, which waits."""
        if (waits, kinds) in self._patterns:
            return self._patterns[waits, kinds]
        if len(self._patterns) >= _MOST_PATTERNS:
            self._patterns.clear()
        registry = self._world.registry
        pairs = list(zip(self._entries, kinds, strict=True))
        head = [0] * _MARKS
        head[_WAITS], head[_GOES_ON] = int(waits), int(not waits)
        head[_EXISTS] = int(any(kind and (e.views or not registry) for e, kind in pairs))
        head[_IS_FOREIGN] = self._mark * (_FOREIGN in kinds)
        marks = [0]
        for ranks in self._world.rank_sets:
            own = [kind != _ABSENT for e, kind in pairs if sharing_ranks(e.layout.ranks) == ranks]
            marks.append(text_mark(str(own)) if self._world.rank in ranks else _NO_MARK)
        negated = [mark if mark == _NO_MARK else -mark for mark in marks]
        held = tuple(i for i, kind in enumerate(kinds) if kind & ~_MISPLACED == _PRESENT)
        # Of a sum each rank sees one term.
        num_ranks = max([len(ranks) for ranks in self._world.rank_sets], default=1)
        bounds = []
        for index in held:
            bound = second_moment_bound(self._entries[index].param.dtype)
            if self._entries[index].views:
                bound = momentum_bound(torch.float32, self._momentum)
            bounds.append(bound / (num_ranks if kinds[index] & _MISPLACED else 1))
        device = self._entries[0].param.device
        found = self._patterns[waits, kinds] = _Pattern(
            kinds,
            torch.tensor([*head, *marks, *negated], dtype=torch.int64, device=self._device),
            held,
            torch.tensor(bounds, dtype=torch.float64, device=device),
            any(kind & _MISPLACED for kind in kinds),
        )
        return found

    def _unlike(self, values: Sequence[int]) -> list[bool]:
        """Whether ranks gave unlike marks: of their texts, then of each set's gradients."""
        marks, negated = values[_MARKS : _MARKS + self._num_marks], values[-self._num_marks :]
        return [mark != -other for mark, other in zip(marks, negated, strict=True)]

    def _placed(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Local gradients in the placements of their parameters; a collective where one moves."""
        found = list(grads)
        for index, entry in enumerate(self._entries):
            param, grad = entry.param, entry.param.grad
            if not (isinstance(grad, DTensor) and isinstance(param, DTensor)):
                continue
            if grad.placements != param.placements:
                found[index] = raw_gradient(grad.redistribute(placements=param.placements))
        return found

    # ---------------------------------------------------------------- the words

    def _judge(self, ballot: _Ballot, values: Sequence[int]) -> str:
        """Why a step must be left out, or nothing; raises where that is an error."""
        self._compare(ballot, values)
        is_unlike = bool(values[_IS_FOREIGN]) or any(self._unlike(values)[1:])
        if is_unlike or values[_GRADIENT] or values[_UPDATE]:
            found = self._gather(ballot)
            if is_unlike:
                self._raise_for_presence(ballot.step, found)
        if values[_EXISTS]:
            self._had_gradient, self._steps_without = True, 0
        else:
            self._report_no_gradient(ballot.step)
        if values[_UPDATE]:
            self._raise_for_updates(found)
        if not values[_GRADIENT]:
            return ""
        ranks = {name: rank for rank, told in found.items() for name in told["bad"]}
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
        """What each rank knows, in words; a collective over the world."""
        flags = [] if ballot.is_bad is None else ballot.is_bad.tolist()
        kinds: dict[str, dict[str, int]] = {}
        for entry, kind in zip(self._entries, ballot.pattern.kinds, strict=True):
            ranks = str(sharing_ranks(entry.layout.ranks) or f"rank {self._world.rank} alone")
            kinds.setdefault(ranks, {})[entry.name] = kind & ~_MISPLACED
        bad = [self._entries[i].name for i in itertools.compress(ballot.pattern.held, flags)]
        mine = {"kinds": kinds, "bad": bad, "updates": _flagged(ballot.updates)}
        return dict(zip(self._world.ranks, gather_json(mine, self._world.group), strict=True))

    def _compare(self, ballot: _Ballot, values: Sequence[int]) -> None:
        if not self._unlike(values)[0]:
            return
        if values[_WAITS] and values[_GOES_ON]:
            # Some ranks wait while others go on: they have no collective in common.
            raise RankMismatchError(
                "the coming step: ranks are about to do different things; this one (another one "
                f"has other lines):\n{ballot.text}"
            )
        check_alike("the coming step", ballot.text, self._world.group)

    def _raise_for_presence(self, step: int, found: Mapping[int, Mapping[str, Any]]) -> None:
        ranks_by_kind: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
        for rank, told in found.items():
            for sharing, kinds in told["kinds"].items():
                for name, kind in kinds.items():
                    ranks_by_kind[name, sharing][kind] = rank
        for (name, _), ranks in sorted(ranks_by_kind.items()):
            if _FOREIGN in ranks:
                raise ValueError(
                    f"{name}: found a sparse gradient, or a plain one of a DTensor, on rank "
                    f"{ranks[_FOREIGN]} in step {step}, expected a dense one in the form of the "
                    "parameter"
                )
        for (name, _), ranks in sorted(ranks_by_kind.items()):
            if _ABSENT in ranks and len(ranks) > 1:
                nowhere = ranks.pop(_ABSENT)
                raise MissingGradientError(
                    f"{name}: found a gradient on rank {max(ranks.values())} and none on rank "
                    f"{nowhere} in step {step}, expected one on all of its ranks or on none"
                )

    def _raise_for_updates(self, found: Mapping[int, Mapping[str, Any]]) -> None:
        owners = {name: rank for rank, told in found.items() for name in told["updates"]}
        name = min(owners)
        kind = next(each.operator_type for each in self._world.registry if each.name == name)
        raise NonFiniteUpdateError(
            f"{name}: the last update of this {kind} matrix was NaN or inf on its owner, rank "
            f"{owners[name]} (the first of {len(owners)} such matrices), and was left out. Its "
            "momentum_buffer is damaged, or its schedule diverges: check the schedule's "
            "coefficients, and go on from an earlier checkpoint"
        )

    def _report_no_gradient(self, step: int) -> None:
        """Warn once that nothing has a gradient; raise when that lasts."""
        self._steps_without += 1
        if 1 < self._steps_without < _MOST_STEPS_WITHOUT:
            return
        names = [matrix.name for matrix in self._world.registry]
        names = names or [entry.name for entry in self._entries]
        reason = f"{_some(names)}: found no gradient on any rank in step {step}"
        if self._steps_without == 1:
            logger.warning("%s: parameters and state stay as they are", reason)
            return
        raise MissingGradientError(
            f"{reason}, the last of {self._steps_without} such steps, expected that of one "
            "parameter at least: call backward() before step(), and build the optimizer after all "
            "that replaces the model's parameters, such as fully_shard. It holds the parameters "
            "that it was built with, unless a trainer swaps them in its param_groups before the "
            "first step"
        )

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


def _fetch(values: Tensor) -> Callable[[], list[int]]:
    """Begin to bring a small vector to the host; what is returned waits until it is there.

    On CUDA by a copy to pinned memory, behind what the stream holds by now; the host goes on. Each
    vector has memory of its own: the one before may not have been read yet.
    """
    if values.device.type != "cuda":
        return values.clone().tolist
    landing, event = torch.empty_like(values, device="cpu", pin_memory=True), torch.cuda.Event()
    landing.copy_(values, non_blocking=True)
    event.record(torch.cuda.current_stream(values.device))

    def read() -> list[int]:
        event.synchronize()
        found: list[int] = landing.tolist()
        return found

    return read


def _kind(param: Tensor) -> tuple[int, Tensor | None]:
    """What kind of gradient a parameter has, and this rank's part of it."""
    grad = param.grad
    if grad is None:
        return _ABSENT, None
    if grad.is_sparse or (isinstance(param, DTensor) and not isinstance(grad, DTensor)):
        return _FOREIGN, None
    kind = 0
    if isinstance(grad, DTensor) and isinstance(param, DTensor):
        # `placements` takes ten times as long, for hundreds of parameters.
        kind = 0 if grad._spec.placements == param._spec.placements else _MISPLACED
        grad = raw_gradient(grad)
    return kind + (_PRESENT if grad.numel() else _EMPTY), grad


def _flagged(updates: Updates | None) -> list[str]:
    """The names whose flag is set; reads them on the host."""
    names, flags = updates or ([], torch.empty(0, device="cpu"))
    return [*itertools.compress(names, flags.tolist())]


def _some(names: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"
