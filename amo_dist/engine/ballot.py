"""One ballot a step: all ranks learn whether the step may change anything, and if not, why.

Each rank fills a small vector of integers, of which one all-reduce takes the maximum::

    2 if a matrix has a gradient, 1 if only another parameter has one, else 0
    1 + the rank whose gradient is NaN, inf or too large; 0 without one
    1 + the rank whose last update was NaN or inf; 0 without one
    marks: whether the rank waits, its lines, and which gradients exist in each set of ranks
    the negatives of all marks: greatest mark plus greatest negative is 0 if all are alike

A failure of one rank takes the place of its lines. Words, with the culprit named, are gathered only
if a flag is set. Every rank reaches the same verdict, so no rank raises while others wait for it.
On a CPU the maximum is read before anything changes: step k raises for its own gradients. On a
device, reading would wait for the backward pass, and most steps read late::

    step k      ballot (its maximum stays on the device), exchange, update unless a flag is set
    step k + 1  read the maximum of step k: raise, or count a skipped step; then the next ballot

A step with a flag leaves parameters and state as they were. A failure in step k after its ballot
goes into the ballot of step k + 1, which changes nothing. That step raises if it reads its own
maximum, else step k + 2 does.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from amo_dist.compat import local_of, placements_of
from amo_dist.config import require
from amo_dist.distributed.ranks import (
    RankMismatchError,
    check_alike,
    control_device,
    failure_text,
    fingerprint56,
    gather_json,
    max_over,
)
from amo_dist.engine.parameters import Param, Parameters
from amo_dist.engine.world import World
from amo_dist.kernels.elementwise import exceed, real

logger = logging.getLogger(__name__)

# Steps in a row without a gradient of any matrix; the last of them is an error.
MAX_IDLE_STEPS = 10

# Largest entry of a matrix's gradient: float32 momentum holds the sum of many of them.
LARGEST_GRADIENT = 2.0**100

# Positions of two flags in the vector.
_GRADIENT, _UPDATE = 1, 2
# Mark, and negative alike, of a set of ranks without this one: it never is the maximum.
_ABSTENTION = -(2**60)


class MissingGradientError(RuntimeError):
    """A parameter has a gradient on some of its ranks only, or matrices had none for long."""


class NonFiniteGradientError(FloatingPointError):
    """A gradient is NaN, inf or too large, and the configuration says that this is an error."""


class NonFiniteUpdateError(FloatingPointError):
    """Orthogonalizing a matrix gave NaN or inf: its momentum or its schedule is at fault."""


class Verdict(NamedTuple):
    """Result of a ballot.

    Attributes:
        reason: Reason for which the step must leave parameters and state untouched, or nothing.
        grads: This rank's part of each gradient in its parameter's placements, None without one.
        skip_mask: 0-dim boolean on the device: whether the step must leave them untouched after
            all. None if ``reason`` tells.
        is_before_first_gradient: Whether no gradient has ever existed: the step does not count.
    """

    reason: str
    grads: Sequence[Tensor | None]
    skip_mask: Tensor | None = None
    is_before_first_gradient: bool = False


class Flags(NamedTuple):
    """Names, and a flag for each of them on the device."""

    names: Sequence[str] = ()
    values: Tensor | None = None

    def names_set(self) -> list[str]:
        """Names whose flag is set; reads the flags on the host."""
        if self.values is None:
            return []
        return [*itertools.compress(self.names, self.values.tolist())]


class Ballot(NamedTuple):
    """One rank's ballot, from which words are made if any rank asks.

    Attributes:
        step: Optimizer step, 0 for a ballot on a text alone.
        waits: Whether this rank reads the maximum at once.
        text: Lines that must be alike on all ranks, or a `failure_text`.
        has_grad: Whether each parameter has a gradient.
        gradients: Parameters with a gradient on this rank; set if it is NaN, inf or too large.
        updates: Matrices that this rank updated in the last step; set if it made NaN or inf.
    """

    step: int
    waits: bool
    text: str
    has_grad: Sequence[bool]
    gradients: Flags
    updates: Flags


class Tally(NamedTuple):
    """The result of a ballot, on the host; all but the first are 0 in a good step.

    Attributes:
        exists: 2 if a matrix has a gradient on any rank (or any parameter, in a world without
            matrices), 1 if another parameter has one, else 0.
        gradient: 1 + rank with a gradient that is NaN, inf or too large; 0 for none.
        update: 1 + rank whose last update was NaN or inf; 0 for none.
        waits_differ: Not 0 if only some ranks wait.
        texts_differ: Not 0 if ranks have unlike texts.
        gradients_differ: Whether ranks of a parameter have unlike sets of gradients.
    """

    exists: int
    gradient: int
    update: int
    waits_differ: int
    texts_differ: int
    gradients_differ: bool

    @classmethod
    def of(cls, values: Sequence[int]) -> Tally:
        """The meaning of what `Ballots` has reduced: the last values are those of sets of ranks."""
        exists, gradient, update, waits, texts, *sets = values
        return cls(exists, gradient, update, waits, texts, any(sets))

    @property
    def is_good(self) -> bool:
        """Whether the step may change parameters and state."""
        return not any(self[1:])


class Ballots:
    """Compares the ranks of a world before each step.

    Args:
        world: All ranks, and the sets of them that must have gradients alike.
        parameters: Parameters of this process.
        skips: Whether a bad gradient skips the step, and is no error.
    """

    def __init__(self, world: World, parameters: Parameters, *, skips: bool) -> None:
        self._world, self._params, self._skips = world, parameters.params, skips
        self._param_device, self._device = parameters.device, parameters.device
        if self._device.type == "cpu":
            self._device = control_device(world.group)
        # Indices of the parameters of each set of ranks, None for a set without this rank.
        self._indices_by_set: list[list[int] | None] = []
        for ranks in world.rank_sets:
            own = [i for i, others in enumerate(world.gradient_ranks) if others == ranks]
            self._indices_by_set.append(own if world.rank in ranks else None)
        self._bounds = [largest_gradient(param) for param in parameters.params]
        self._failure = ""
        # Steps in a row without a gradient of any matrix.
        self._num_missing = 0
        self._updates = Flags()
        # Ballot of the last step, and a function that reads the maximum, until somebody has.
        self._unread: tuple[Ballot, Callable[[], list[int]]] | None = None

    # ---------------------------------------------------------------- before a step

    def vote(self, step: int, text: str, fault: Exception | None, *, waits: bool) -> Verdict:
        """Agree with all ranks on a step; a collective over the world.

        Args:
            step: Number of the coming step.
            text: Lines that must be alike on all ranks.
            fault: Fault of this rank alone, which all ranks raise.
            waits: Whether to read the result now; else it stays on the device until
                `read_verdict`. Alike on all ranks.

        Raises:
            RankMismatchError: On every rank; names the ranks and the line that differs.
            MissingGradientError: On every rank; names a parameter and two ranks, or matrices
                without a gradient on any rank.
            ValueError: On every rank, for a mistake on one, such as a sparse gradient.
            NonFiniteUpdateError: On every rank; names the first matrix whose last update was NaN
                or inf. Its parameter was only decayed then.
            NonFiniteGradientError: On every rank; names a parameter and a rank.
            RuntimeError: On every rank, for what `report_failure` got on one of them.
        """
        grads: list[Tensor | None] = [None] * len(self._params)
        misplaced = list[int]()
        try:
            if fault is not None:
                raise fault
            grads, misplaced = self._local_gradients()
        except Exception as error:
            self.report_failure(f"step {step}", error)
        full = {i: grad for i, grad in enumerate(grads) if grad is not None and grad.numel()}
        unusable = Flags()
        if full:
            # A gradient in other placements, such as Partial, may be a term of a sum over ranks.
            num_terms = len(self._world.ranks) if misplaced else 1
            bounds = [self._bounds[i] / num_terms for i in full]
            sent = _sent(bounds, torch.float64, self._param_device)
            names = [self._params[i].name for i in full]
            unusable = Flags(names, exceed(real([*full.values()]), sent))
        has_grad = [grad is not None for grad in grads]
        ballot = Ballot(step, waits, self._failure or text, has_grad, unusable, self._updates)
        reduced = self._reduce(ballot)
        self._updates = Flags()
        reason, skip_mask = "", None
        if waits:
            tally = Tally.of(reduced.tolist())
            reason = self._judge(ballot, tally)
            if step == 1 and not tally.exists:  # the first step waits on any device
                return Verdict("", [], is_before_first_gradient=True)
        else:
            self._unread = ballot, fetch(reduced)
            skip_mask = reduced[1:].any()  # see `Tally.is_good`
        # Moving a gradient is a collective, which hangs if a rank has none: this waits for the
        # backward pass until all ranks are known to have one.
        if misplaced and not reason and not Tally.of(reduced.tolist()).gradients_differ:
            for index in misplaced:
                tensor, grad = self._params[index].tensor, self._params[index].tensor.grad
                assert isinstance(tensor, DTensor)
                assert isinstance(grad, DTensor)
                grads[index] = grad.redistribute(placements=tensor.placements).to_local()
        return Verdict(reason, grads, skip_mask)

    def vote_on_text(self, text: str, *, with_updates: bool = False) -> None:
        """Compare a text alone; a collective over the world, of the form of `vote`.

        A rank that is at its next step meets this one there, and both raise.

        Args:
            text: Text that must be alike on all ranks, or a `failure_text`.
            with_updates: Whether to vote on what `report_updates` got, too; the next `vote` does
                so again.

        Raises:
            RankMismatchError: On every rank; names the ranks and the line that differs.
            NonFiniteUpdateError: On every rank, as in `vote`.
            RuntimeError: On every rank, for a failure of one of them.
        """
        updates = self._updates if with_updates else Flags()
        has_grad = [False] * len(self._params)
        ballot = Ballot(0, True, self._failure or text, has_grad, Flags(), updates)
        self._judge(ballot, Tally.of(self._reduce(ballot).tolist()))

    def report_failure(self, part: str, error: Exception) -> None:
        """Keep a failure of this rank for the next ballot: all ranks raise when they read that.

        Args:
            part: Name of the failed part of a step.
            error: Its exception; raised at once in a world of one rank.
        """
        if self._world.group is None:
            raise error
        # Only text is kept: the error would keep alive the tensors of its frames on a full device.
        logger.error("%s failed here; the ballot tells all ranks", part, exc_info=error)
        self._failure = self._failure or failure_text(part, error)

    def report_updates(
        self, outcomes: Sequence[tuple[Sequence[str], Tensor]], skip_mask: Tensor | None
    ) -> None:
        """Keep which updates of this rank were NaN or inf, for the next ballot.

        Args:
            outcomes: Names of matrices, and a flag for each, on the device.
            skip_mask: Mask of this step's `Verdict`: a step that changed nothing says nothing
                about its updates.
        """
        self._updates = Flags()
        if outcomes:
            names, flags = zip(*outcomes, strict=True)
            values = torch.cat(flags).flatten()
            if skip_mask is not None:
                values.masked_fill_(skip_mask, False)
            self._updates = Flags([*itertools.chain(*names)], values)

    # ---------------------------------------------------------------- after a step

    def read_verdict(self) -> str:
        """Read the verdict of the last step if nobody has; gathers words if a flag is set.

        Returns:
            Reason for which that step left parameters and state untouched, or nothing.

        Raises:
            As `vote`, for the last step; parameters and state are those before it.
        """
        if self._unread is None:
            return ""
        (ballot, read), self._unread = self._unread, None
        return self._judge(ballot, Tally.of(read()))

    def last_outcome(self) -> Literal["taken", "skipped", "undone"]:
        """Outcome of the last step, for saving: waits for it, and logs a bad one.

        It communicates nothing, as one rank may save alone; `read_verdict` gives the words of all
        ranks.
        """
        for name in self._updates.names_set():
            logger.warning(
                "%s: the last update of this matrix was NaN or inf and was left out: what is "
                "saved now lacks it, and all ranks raise at their next step",
                name,
            )
        if self._unread is None:
            return "taken"
        ballot, read = self._unread
        tally = Tally.of(read())
        if tally.is_good:
            return "taken"
        logger.warning("step %d changed nothing; the next step says why", ballot.step)
        has_bad_gradient_alone = not any(tally[2:])
        return "skipped" if self._skips and has_bad_gradient_alone else "undone"

    # ---------------------------------------------------------------- vector and words

    def _reduce(self, ballot: Ballot) -> Tensor:
        """The values of `Tally.of` of all ranks, on the device; a collective over the world."""
        world, exists = self._world, 0
        self._failure = ""  # the text of the ballot has it
        for param, has_grad in zip(self._params, ballot.has_grad, strict=True):
            if has_grad:
                exists = max(exists, 2 if param.views or not world.registry else 1)
        marks = [int(ballot.waits), fingerprint56(ballot.text)]
        for indices in self._indices_by_set:
            own = None if indices is None else [ballot.has_grad[i] for i in indices]
            marks.append(_ABSTENTION if own is None else fingerprint56(str(own)))
        negatives = [mark if mark == _ABSTENTION else -mark for mark in marks]
        vector = _sent([exists, 0, 0, *marks, *negatives], torch.int64, self._device)
        for position, flags in ((_GRADIENT, ballot.gradients), (_UPDATE, ballot.updates)):
            if flags.values is not None:
                is_any = flags.values.any().to(self._device)
                vector[position].masked_fill_(is_any, world.rank + 1)
        sizes = [3, len(marks), len(marks)]  # flags, marks, negatives
        flags, greatest, negative = max_over(vector, world.group).split(sizes)
        return torch.cat([flags, greatest + negative])

    def _judge(self, ballot: Ballot, tally: Tally) -> str:
        """Reason to leave a step out, or nothing; raises if that is an error."""
        if tally.waits_differ:  # ranks that do not wait take part in no collective of words
            raise RankMismatchError(
                "the coming step: ranks are about to do different things; this one (another one "
                f"has other lines):\n{ballot.text}"
            )
        if tally.texts_differ:
            check_alike("the coming step", ballot.text, self._world.group)
        words = {} if tally.is_good else self._gather_words(ballot)
        if tally.gradients_differ:
            self._raise_for_missing(ballot.step, words)
        if ballot.step:
            self._check_existence(ballot, tally.exists)
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

    def _gather_words(self, ballot: Ballot) -> dict[int, dict[str, Any]]:
        """Names of parameters and matrices at fault, by rank; a collective over the world."""
        pairs = zip(self._params, self._world.gradient_ranks, ballot.has_grad, strict=True)
        own = {
            "missing": [(ranks, param.name) for param, ranks, has_grad in pairs if not has_grad],
            "gradients": ballot.gradients.names_set(),
            "updates": ballot.updates.names_set(),
        }
        return gather_json(own, self._world.group)

    def _raise_for_missing(self, step: int, words: dict[int, dict[str, Any]]) -> None:
        """Raise for the first gradient that only some ranks of its parameter have."""
        lacking: dict[tuple[str, tuple[int, ...]], set[int]] = defaultdict(set)
        for rank, own in words.items():
            for ranks, name in own["missing"]:
                lacking[name, tuple(ranks)].add(rank)
        for (name, ranks), without in sorted(lacking.items()):
            if having := set(ranks) - without:
                raise MissingGradientError(
                    f"{name}: found a gradient on rank {max(having)} and none on rank "
                    f"{max(without)} in step {step}, expected one on all of its ranks or on none"
                )

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

    def _check_existence(self, ballot: Ballot, exists: int) -> None:
        """Warn of matrices that have no gradient, and raise if none has one for long.

        Raises:
            MissingGradientError: No matrix has had a gradient in many steps, or in the first step
                with gradients.
        """
        step, registry = ballot.step, self._world.registry
        self._num_missing = 0 if exists == 2 else self._num_missing + 1
        if not self._num_missing:
            if step > 1:
                return
            pairs = zip(self._params, ballot.has_grad, strict=True)
            unused = [param.name for param, has_grad in pairs if param.views and not has_grad]
            if unused:
                logger.warning(
                    "%s: found no gradient in step 1, as of a parameter that the model does not "
                    "use, or no longer holds; it stays as it is until it has one",
                    _first_names(unused),
                )
            return
        names = [matrix.name for matrix in registry] or [param.name for param in self._params]
        text = f"{_first_names(names)}: found no gradient on any rank in step {step}"
        if self._num_missing >= MAX_IDLE_STEPS or (exists and step == 1):
            count = f", the last of {self._num_missing} such steps" if self._num_missing > 1 else ""
            raise MissingGradientError(
                f"{text}{count}, expected that of one at least: call backward() before step(), and "
                "build the optimizer after all that replaces the model's parameters, such as "
                "fully_shard: it holds those that it was built with, unless a trainer swaps them "
                "in its param_groups before the first step"
            )
        if self._num_missing == 1:
            logger.warning("%s: parameters and state stay as they are", text)

    def _local_gradients(self) -> tuple[list[Tensor | None], list[int]]:
        """This rank's part of each gradient, and indices of those in other DTensor placements.

        Raises:
            ValueError: A gradient is in no form of the parameter; names it.
        """
        grads: list[Tensor | None] = []
        misplaced = list[int]()
        for index, param in enumerate(self._params):
            tensor, grad = param.tensor, param.tensor.grad
            if grad is not None and grad.is_sparse:
                raise ValueError(f"{param.name}: found a sparse gradient, expected a dense one")
            if grad is not None and isinstance(tensor, DTensor):
                if not isinstance(grad, DTensor):
                    raise ValueError(f"{param.name}: found a plain gradient, expected a DTensor")
                if placements_of(grad) != placements_of(tensor):
                    misplaced.append(index)
                    can_move = self._world.gradient_ranks[index] == param.layout.ranks
                    own, expected = f"a gradient on {placements_of(grad)}", tensor.placements
                    remedy = "ranks without a gradient of their experts cannot help to move it"
                    require(can_move, param.name, own, f"{expected}: {remedy}")
                local: Tensor = local_of(grad)
                grad = local.wait() if hasattr(local, "wait") else local
            grads.append(grad)
        return grads, misplaced


def largest_gradient(param: Param) -> float:
    """Largest entry of a good gradient of a parameter.

    AdamW keeps squares in the dtype of the parameter, and an infinite one never recovers.
    """
    if param.views:
        return LARGEST_GRADIENT
    return math.sqrt(torch.finfo(param.dtype).max) / 2


# ---------------------------------------------------------------- host and device


def fetch(values: Tensor) -> Callable[[], list[int]]:
    """Begin to bring a small vector to the host; the returned function waits until it is there.

    On CUDA it is copied to pinned memory behind the work of the stream. Each vector has memory of
    its own: the last one may not have been read yet.
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


def _sent(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A small vector of numbers on a device; on CUDA without a wait."""
    vector = torch.tensor(values, dtype=dtype, device="cpu")
    if device.type == "cuda":
        vector = vector.pin_memory()
    return vector.to(device, non_blocking=True)


def _first_names(names: Sequence[str]) -> str:
    """The first three names, and the number of the others."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"
