"""The vote before each step: all ranks learn whether it may change anything, and if not, why.

Each rank sends a `Ballot`, whose vector of integers one all-reduce brings to its maximum::

    2 if a matrix has a gradient, 1 if only another parameter has one, else 0
    1 if the rank waits, 0 if not, -1 if it failed before it knew
    1 + the rank whose gradient is NaN, inf or too large; 0 without one
    1 + the rank whose last update was NaN or inf; 0 without one
    marks: whether the rank waits, its text, which gradients exist in each set of ranks, and what
        each set of replicas holds
    the negatives of all marks: greatest mark plus greatest negative is at most 1 if all are alike

Every rank gets the same `Tally` of that, the first four and which marks differ, so no rank raises
while others wait for it. Words, with the culprit named, are gathered only if the tally is bad. A
rank that could not prepare its step sends its error in place of its text.

On a CPU the tally is read before anything changes: step k raises for its own gradients. On a
device, reading would wait for the backward pass, and most steps read late::

    step k      vote (the maximum stays on the device), exchange, update under a mask of the tally
    step k + 1  read the tally of step k: raise, or count a skipped step; then the next vote

A bad step leaves parameters and state as they were. A failure in step k after its vote goes into
the ballot of step k + 1, which changes nothing. That step raises if it reads its own tally, else
step k + 2 does.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from amo_dist.compat import AsyncCollectiveTensor, local_of, placements_of
from amo_dist.config import require
from amo_dist.distributed.layout import flattened
from amo_dist.distributed.ranks import (
    RankMismatchError,
    check_alike,
    control_device,
    failure_text,
    fingerprint56,
    gather_json,
)
from amo_dist.engine.parameters import Param, Parameters
from amo_dist.engine.replicas import ReplicaMarks, no_marks, unlike_replica
from amo_dist.engine.world import World
from amo_dist.kernels.elementwise import exceed

logger = logging.getLogger(__name__)

# Steps in a row without a gradient of any matrix; the last of them is an error.
MAX_IDLE_STEPS = 10

# Largest entry of a matrix's gradient: float32 momentum holds the sum of many of them.
LARGEST_GRADIENT = 2.0**100

# Positions of two flags in the vector and in a `Tally`, and the number of values before the marks.
# A value of a `Tally` from the first of these two on says that a step is bad, if it is not 0.
_GRADIENT, _UPDATE, _NUM_FLAGS = 2, 3, 4
# Mark, and negative alike, of a rank without an opinion: below all others. Where all ranks abstain,
# the two add up to a negative number, and none differs.
_ABSTENTION = -(2**60)
# Mark of a rank that reads the tally at once. Not 1: marks that differ by one count as alike, for
# the shares of gradients in `mark_replicas`.
_WAITS = 2


class MissingGradientError(RuntimeError):
    """A parameter has a gradient on some of its ranks only, or matrices had none for long."""


class NonFiniteGradientError(FloatingPointError):
    """A gradient is NaN, inf or too large, and the configuration says that this is an error."""


class NonFiniteUpdateError(FloatingPointError):
    """Orthogonalizing a matrix gave NaN or inf: its momentum or its schedule is at fault."""


class Gradients(NamedTuple):
    """The gradients of this rank for one step.

    Attributes:
        local: This rank's part of each in its parameter's placements, None without one.
        misplaced: Indices of those in other placements, whose part is not known yet.
    """

    local: list[Tensor | None]
    misplaced: list[int]


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
    """What one rank sends, and the words for it if any rank asks.

    Attributes:
        step: Optimizer step, 0 for a ballot on a text alone.
        waits: Whether this rank reads the tally at once; None if it failed before it knew, and
            does as the others do.
        text: Lines that must be alike on all ranks, or a `failure_text`.
        has_grad: Whether each parameter has a gradient.
        gradients: Parameters with a gradient on this rank; set if it is NaN, inf or too large.
        num_idle: Steps in a row without a gradient of any matrix.
        updates: Matrices that this rank updated in the last step; set if it made NaN or inf.
        replicas: Contents of this rank that its replicas must share.
        vector: Integers of which the vote takes the maximum over ranks, int64, 1-D.
    """

    step: int
    waits: bool | None
    text: str
    has_grad: Sequence[bool]
    gradients: Flags
    updates: Flags
    replicas: ReplicaMarks
    vector: Tensor


class Tally(NamedTuple):
    """What all ranks receive, on the host; all but the first two are 0 in a good step.

    Attributes:
        exists: 2 if a matrix has a gradient on any rank (or any parameter, in a world without
            matrices), 1 if another parameter has one, else 0.
        waits: 1 if a rank waits, 0 if none does, -1 if all have failed.
        gradient: 1 + rank with a gradient that is NaN, inf or too large; 0 for none.
        update: 1 + rank whose last update was NaN or inf; 0 for none.
        waits_differ: Whether only some ranks wait.
        texts_differ: Whether ranks have unlike texts.
        sets_differ: Whether the gradients that exist differ, for each set of ranks, and whether
            contents do, for each set of replicas.
    """

    exists: int
    waits: int
    gradient: int
    update: int
    waits_differ: int
    texts_differ: int
    sets_differ: Sequence[int]

    @classmethod
    def of(cls, values: Sequence[int]) -> Tally:
        """The meaning of what `Ballots` has reduced."""
        exists, waits, gradient, update, waits_differ, texts_differ, *sets = values
        return cls(exists, waits, gradient, update, waits_differ, texts_differ, sets)


@dataclasses.dataclass(slots=True, eq=False)
class Verdict:
    """The decision of all ranks about one step.

    Attributes:
        ballots: Ballots of the world.
        ballot: This rank's ballot, until the decision is read.
        read: Function that waits for the tally's values, until then.
        skip_mask: 0-dim boolean on the device: whether the step must leave parameters and state
            untouched. None if the host knows that it may change them.
        is_known: Whether the host knows the decision: it has been read.
        is_skipped: Whether the host knows that the step changes nothing, as the settings say of a
            bad gradient.
        is_before_first_gradient: Whether no gradient has ever existed: the step does not count.
    """

    ballots: Ballots
    ballot: Ballot | None
    read: Callable[[], list[int]] | None
    skip_mask: Tensor | None
    is_known: bool = False
    is_skipped: bool = False
    is_before_first_gradient: bool = False

    def settle(self) -> None:
        """Read the decision, once; a collective if it is bad, to gather the words.

        Raises:
            As `Ballots.vote`.
        """
        assert self.read is not None
        assert self.ballot is not None
        self.is_known, tally, ballot = True, Tally.of(self.read()), self.ballot
        self.is_before_first_gradient = ballot.step == 1 and not tally.exists
        self.read = self.ballot = None  # memory
        self.is_skipped = self.ballots.judge(ballot, tally)
        if not self.is_skipped:
            self.skip_mask = None

    def pending_outcome(self) -> Literal["skipped", "undone"] | None:
        """The outcome of a bad step that nobody has read yet; None where nothing is left to learn.

        It waits for the device and logs a bad step, but communicates nothing, as one rank may save
        alone: `settle` gives the words of all ranks.
        """
        if self.read is None or self.ballot is None:
            return None
        tally = Tally.of(self.read())
        is_idle = tally.exists < 2 and self.ballots.num_idle == MAX_IDLE_STEPS - 1
        others = tally.update, tally.waits_differ, tally.texts_differ, *tally.sets_differ, is_idle
        if not (tally.gradient or any(others)):
            return None
        logger.warning("step %d changed nothing; the next step says why", self.ballot.step)
        return "skipped" if self.ballots.skips and not any(others) else "undone"


class Ballots:
    """Compares the ranks of a world before each step.

    Args:
        world: All ranks, and the sets of them that must have gradients alike.
        parameters: Parameters of this process.
        skips: Whether a bad gradient skips the step, and is no error.

    Attributes:
        is_fresh: Whether no step has been taken since the start, or since a load: until then each
            step waits for its verdict, and compares replicas.
        num_idle: Steps in a row without a gradient of any matrix.
        updates: Matrices that this rank updated in the last step, for the next ballot; set if it
            made NaN or inf.
    """

    def __init__(self, world: World, parameters: Parameters, *, skips: bool) -> None:
        self._world, self._params, self.skips = world, parameters.params, skips
        self._param_device, self._device = parameters.device, parameters.device
        if self._device.type == "cpu":
            self._device = control_device(world.group)
        self.is_fresh, self.updates = True, Flags()
        # Indices of the parameters of each set of ranks, None for a set without this rank.
        self._indices_by_set: list[list[int] | None] = []
        for ranks in world.rank_sets:
            own = [i for i, others in enumerate(world.gradient_ranks) if others == ranks]
            self._indices_by_set.append(own if world.rank in ranks else None)
        # Greatest entry of a good gradient of each parameter; and those of the parameters that had
        # one in the last step, on the device.
        self._bounds = [largest_gradient(param) for param in parameters.params]
        self._sent_bounds: tuple[list[float], Tensor] = [], torch.empty(0)
        # Failure of this rank for the next ballot.
        self._failure = ""
        self._no_marks = no_marks(world)
        self.num_idle = 0

    # ---------------------------------------------------------------- before a step

    def fill(
        self,
        step: int,
        waits: bool | None,
        text: str,
        gradients: Gradients | None = None,
        replicas: ReplicaMarks | None = None,
        *,
        with_updates: bool = True,
    ) -> Ballot:
        """This rank's ballot; communicates nothing.

        Args:
            step: Number of the coming step, 0 for a text alone.
            waits: `Ballot.waits`.
            text: Lines that must be alike on all ranks, or a `failure_text`.
            gradients: Gradients of this rank; None for a text alone and after a failure.
            replicas: Contents that replicas must share; None in most steps.
            with_updates: Whether it carries what ``updates`` holds.
        """
        params = self._params
        grads, misplaced = gradients or Gradients([None] * len(params), [])
        full = {i: grad for i, grad in enumerate(grads) if grad is not None and grad.numel()}
        unusable = Flags()
        if full:
            # A gradient in other placements, such as Partial, may be a term of a sum over ranks.
            num_terms, moved = len(self._world.ranks), set(misplaced)
            bounds = [self._bounds[i] / (num_terms if i in moved else 1) for i in full]
            if bounds != self._sent_bounds[0]:
                self._sent_bounds = bounds, _sent(bounds, torch.float64, self._param_device)
            names = [params[i].name for i in full]
            unusable = Flags(names, exceed([*full.values()], self._sent_bounds[1]))
        has_grad, exists = [grad is not None for grad in grads], 0
        if any(has_grad):
            is_matrix = (has and bool(p.views) for p, has in zip(params, has_grad, strict=True))
            exists = 2 if not self._world.registry or any(is_matrix) else 1
        text = self._failure or text
        marks = [_ABSTENTION if waits is None else _WAITS * waits, fingerprint56(text)]
        for indices in self._indices_by_set:
            own = None if indices is None else bytes(has_grad[i] for i in indices)
            marks.append(_ABSTENTION if own is None else fingerprint56(own.hex()))
        replicas = replicas or self._no_marks
        marks += [_ABSTENTION if mark is None else mark for mark in replicas.marks]
        negatives = [mark if mark == _ABSTENTION else -mark for mark in marks]
        head = [exists, -1 if waits is None else int(waits), 0, 0]
        vector = _sent([*head, *marks, *negatives], torch.int64, self._device)
        updates = self.updates if with_updates else Flags()
        for position, flags in ((_GRADIENT, unusable), (_UPDATE, updates)):
            if flags.values is not None:
                is_any = flags.values.any().to(self._device)
                vector[position].masked_fill_(is_any, self._world.rank + 1)
        return Ballot(step, waits, text, has_grad, unusable, updates, replicas, vector)

    def vote(self, ballot: Ballot) -> Verdict:
        """Agree with all ranks on a step; a collective over the world.

        Raises:
            RankMismatchError: On every rank; names the ranks and the line that differs.
            MissingGradientError: On every rank; names a parameter and two ranks, or matrices
                without a gradient on any rank.
            ValueError: On every rank, for a mistake on one, such as a sparse gradient.
            NonFiniteUpdateError: On every rank; names the first matrix whose last update was NaN
                or inf. Its parameter was only decayed then.
            NonFiniteGradientError: On every rank; names a parameter and a rank.
            RuntimeError: On every rank, for what has failed on one of them.
        """
        reduced = self._reduce(ballot)
        self._failure, self.updates = "", Flags()
        skip_mask = reduced[_GRADIENT:].any()
        if self.num_idle == MAX_IDLE_STEPS - 1:  # one more such step is an error
            skip_mask |= reduced[0] < 2
        waits = ballot.waits
        read = reduced.tolist if waits else fetch(reduced)
        if waits is None:
            waits = Tally.of(read()).waits != 0
        verdict = Verdict(self, ballot, read, skip_mask)
        if waits:
            verdict.settle()
            self.is_fresh &= verdict.is_before_first_gradient or verdict.is_skipped
        return verdict

    def vote_on_text(self, text: str, *, with_updates: bool = False) -> None:
        """Compare a text alone; a collective over the world, of the form of `vote`.

        A rank that is at its next step meets this one there, and both raise.

        Args:
            text: Text that must be alike on all ranks, or a `failure_text`.
            with_updates: Whether to vote on what ``updates`` holds, too; the next `vote` does
                so again.

        Raises:
            RankMismatchError: On every rank; names the ranks and the line that differs.
            NonFiniteUpdateError: On every rank, as in `vote`.
            RuntimeError: On every rank, for a failure of one of them.
        """
        ballot = self.fill(0, True, text, with_updates=with_updates)
        reduced, self._failure = self._reduce(ballot), ""
        self.judge(ballot, Tally.of(reduced.tolist()))

    def _reduce(self, ballot: Ballot) -> Tensor:
        """The values of `Tally.of`, on the device; a collective over the world."""
        vector, group = ballot.vector, self._world.group
        if group is not None:
            dist.all_reduce(vector, op=dist.ReduceOp.MAX, group=group)
        flags, marks = vector[:_NUM_FLAGS], vector[_NUM_FLAGS:].view(2, -1)
        spreads = marks.sum(dim=0) > 1
        return torch.cat([flags, spreads.to(torch.int64)])

    def report_failure(self, part: str, error: Exception) -> None:
        """Keep a failure of this rank for the next ballot: all ranks raise when they read that.

        Args:
            part: Name of the failed part of a step.
            error: Its exception; raised at once in a world of one rank.
        """
        if self._world.group is None:
            raise error
        # Only text is kept: the error would keep alive the tensors of its frames on a full device.
        logger.error("%s failed here; the next vote raises it on all ranks", part, exc_info=error)
        self._failure = self._failure or failure_text(part, error)

    def log_updates(self) -> None:
        """Log which updates of this rank were left out in the last step; waits for it."""
        for name in self.updates.names_set():
            logger.warning(
                "%s: the last update of this matrix was NaN or inf on rank %d and was left out: "
                "what is saved now lacks it, and all ranks raise at their next step",
                *(name, self._world.rank),
            )

    # ---------------------------------------------------------------- words

    def judge(self, ballot: Ballot, tally: Tally) -> bool:
        """Whether to leave a step out; raises if that is an error."""
        if tally.waits_differ:  # ranks that do not wait take part in no collective of words
            raise RankMismatchError(
                "a step: ranks are about to do different things; this one (another one "
                f"has other lines):\n{ballot.text}"
            )
        has_words = bool(tally.gradient or tally.update or any(tally.sets_differ))
        if has_words or tally.texts_differ:
            # The step changed nothing: what failed here while it ran under the mask needs no error.
            self._failure = ""
        if tally.texts_differ:
            check_alike("a step", ballot.text, self._world.group)
        words = self._gather_words(ballot) if has_words else {}
        num_sets = len(self._world.rank_sets)
        if any(tally.sets_differ[:num_sets]):
            self._raise_for_missing(ballot.step, words)
        if ballot.step and (ballot.step == 1 or self.num_idle or tally.exists < 2):
            self._check_existence(ballot, tally.exists)
        if tally.update:
            self._raise_for_updates(words)
        if any(tally.sets_differ[num_sets:]):
            contents = {rank: own["replicas"] for rank, own in words.items()}
            raise RankMismatchError(unlike_replica(self._world.replica_sets, contents))
        if not tally.gradient:
            return False
        ranks = {name: rank for rank, own in words.items() for name in own["gradients"]}
        name = min(ranks)
        reason = (
            f"{name}: found a NaN, an inf or an entry too large for the optimizer's state in its "
            f"gradient on rank {ranks[name]} in step {ballot.step} (the first of {len(ranks)} such "
            "parameters)"
        )
        if self.skips:
            if self._world.speaks:
                logger.warning("step %d skipped: %s", ballot.step, reason)
            return True
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
            "replicas": ballot.replicas.contents,
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
        self.num_idle = 0 if exists == 2 else self.num_idle + 1
        if not self.num_idle:
            if step > 1:
                return
            pairs = zip(self._params, ballot.has_grad, strict=True)
            unused = [param.name for param, has_grad in pairs if param.views and not has_grad]
            if unused and self._world.speaks:
                logger.warning(
                    "%s: found no gradient in step 1, as of a parameter that the model does not "
                    "use, or no longer holds; it stays as it is until it has one",
                    first_names(unused),
                )
            return
        names = [matrix.name for matrix in registry] or [param.name for param in self._params]
        text = f"{first_names(names)}: found no gradient on any rank in step {step}"
        if self.num_idle >= MAX_IDLE_STEPS or (exists and step == 1):
            count = f", the last of {self.num_idle} such steps" if self.num_idle > 1 else ""
            self.num_idle -= 1  # the step did not count
            raise MissingGradientError(
                f"{text}{count}, expected that of one at least: call backward() before step(), and "
                "build the optimizer after all that replaces the model's parameters, such as "
                "fully_shard: it holds those that it was built with, unless a trainer swaps them "
                "in its param_groups before the first step"
            )
        if self.num_idle == 1 and self._world.speaks:
            logger.warning("%s: parameters and state stay as they are", text)

    def local_gradients(self) -> Gradients:
        """This rank's part of each gradient.

        Raises:
            ValueError: A gradient is in no form of the parameter; names it.
        """
        grads: list[Tensor | None] = []
        misplaced = list[int]()
        for index, param in enumerate(self._params):
            tensor, grad = param.tensor, param.tensor.grad
            if grad is None:
                grads.append(None)
                continue
            if grad.layout is not torch.strided:
                raise ValueError(f"{param.name}: found a sparse gradient, expected a dense one")
            if isinstance(tensor, DTensor):
                if not isinstance(grad, DTensor):
                    raise ValueError(f"{param.name}: found a plain gradient, expected a DTensor")
                if placements_of(grad) != placements_of(tensor):
                    misplaced.append(index)
                    can_move = self._world.gradient_ranks[index] == param.layout.ranks
                    own, expected = f"a gradient on {placements_of(grad)}", tensor.placements
                    remedy = "ranks without a gradient of their experts cannot help to move it"
                    require(can_move, param.name, own, f"{expected}: {remedy}")
            grads.append(local_gradient(param, grad))
        return Gradients(grads, misplaced)


def local_gradient(param: Param, grad: Tensor) -> Tensor:
    """This rank's part of a gradient, in the form of `Parameters.tensors`."""
    if isinstance(grad, DTensor):
        grad = local_of(grad)
    if isinstance(grad, AsyncCollectiveTensor):
        grad = grad.wait()
    return flattened(grad.contiguous()) if param.is_convolution else grad


def largest_gradient(param: Param) -> float:
    """Largest entry of a good gradient of a parameter.

    AdamW keeps squares in the dtype of the parameter, and an infinite one never recovers.
    """
    if param.views:
        return LARGEST_GRADIENT
    return math.sqrt(torch.finfo(param.tensor.dtype).max) / 2


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


def first_names(names: Sequence[str]) -> str:
    """The first three names, and the number of the others."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"
