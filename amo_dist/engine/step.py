"""One step of the optimizer: momentum, gather, orthogonalize, scatter, apply.

Momentum stays sharded. Each matrix has one owner rank, which during a step gathers it,
orthogonalizes it, and sends the results back::

    rank 0   momentum ─┐           ┌─ orthogonalize its matrices ─┐            ┌─ apply
    rank 1   momentum ─┼─ gather ──┼─ orthogonalize its matrices ─┼─ scatter ──┼─ apply
    rank 2   momentum ─┘           └─ orthogonalize its matrices ─┘            └─ apply

Five invariants hold in every step:

1. All ranks call the same collectives in the same order.
2. After the vote a failure of one rank alone goes into its next ballot, and all ranks raise when
   they read that. What no rank can go on after is raised there: a lost device, a failed collective,
   no memory even to receive.
3. The host waits for nothing but the ballot of the last step in a step that measures nothing,
   keeps its owners and finds gradients in the placements of their parameters.
4. The sizes of messages never depend on which gradients exist: zeros stand in for missing ones.
5. On a CPU, bits do not depend on how a matrix is cut over ranks.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw
from torch.profiler import record_function

from amo_dist.config import MuonConfig, require
from amo_dist.distributed.bucket import Bucket, Exchange, bring_down, on_host
from amo_dist.distributed.layout import cut_like
from amo_dist.distributed.plan import Held, assign, copies_of, plan_exchange
from amo_dist.distributed.ranks import GroupLike, Membership, failure_text, this_rank
from amo_dist.engine.ballot import (
    Ballot,
    Ballots,
    Flags,
    Verdict,
    first_names,
    local_gradient,
)
from amo_dist.engine.hyperparameters import GroupSettings, read_groups
from amo_dist.engine.parameters import MOMENTUM, Param, Parameters, Piece, check_float16
from amo_dist.engine.replicas import mark_replicas
from amo_dist.engine.rule import MatrixSums, UpdateRule
from amo_dist.engine.world import World
from amo_dist.kernels.elementwise import (
    GROUP_ELEMENTS,
    ROUNDED_OFF,
    advance,
    apply_update,
    drop_nonfinite,
    look_ahead,
    master_weights,
    new_lists,
    on_cpu,
    real,
    set_weights,
    update_momentum,
    wide_dtype,
)
from amo_dist.kernels.newton_schulz import EXACT_NORM_BOUND, orthogonalize, scale_to_exact_norm
from amo_dist.kernels.quack import library
from amo_dist.kernels.spectrum import ns_residual
from amo_dist.schedule.allocate import ns_step_flops
from amo_dist.schedule.types import Schedule

Groups: TypeAlias = Sequence[Mapping[str, Any]]
State: TypeAlias = MutableMapping[Tensor, dict[str, Tensor]]


@dataclasses.dataclass(frozen=True, slots=True)
class Orders:
    """Orders of the optimizer for one step.

    Attributes:
        step: Optimizer step, counted from 1.
        schedules: Schedule of each matrix of this process.
        digest: Digest of the settings, of all schedules and of the source's state.
        owners_of: Step whose schedules weight the owners in force: ``first`` of this process, or
            that at which AMO ``locked``.
        sample: Names of the matrices to observe after the step; empty at most steps.
        candidates: Coefficients of the schedules whose errors the observation measures, float64 on
            the CPU, ``(schedules, steps, 3)``; None at most steps.
        checked: Name of the matrix whose residual is measured; None at most steps.
        measures: Whether the step measures anything.
    """

    step: int
    schedules: Sequence[Schedule]
    digest: str
    owners_of: Literal["first", "locked"]
    sample: Sequence[str]
    candidates: Tensor | None
    checked: str | None
    measures: bool


@dataclasses.dataclass(slots=True, eq=False)
class Step:
    """Everything that belongs to the step at hand, and is freed with it.

    Attributes:
        ballot: This rank's ballot.
        orders: Orders for it; None if this rank could not prepare it, and only communicates.
        settings: Hyperparameters of each parameter group.
        weights: This rank's part of each parameter.
        states: This rank's part of each parameter's state, by name.
        grads: This rank's part of each gradient, None without one.
        misplaced: Indices of gradients in other placements than their parameters.
        sampled: Exchanges of the observation.
        skip_mask: See `Verdict`.
        results: Pieces whose results wait for the rule's `post`.
        outcomes: Names of orthogonalized matrices, and flags of those whose result was NaN or inf.
        norms: Norm below which the factor to the exact norm is bounded, and norms of results.
        residual: Residual of the matrix to check, 0-dim; None on the ranks that do not own it.
        observe_seconds: Seconds that this rank took to measure the sample.
    """

    ballot: Ballot
    orders: Orders | None = None
    settings: Sequence[GroupSettings] = ()
    weights: Sequence[Tensor] = ()
    states: Sequence[Mapping[str, Tensor]] = ()
    grads: list[Tensor | None] = dataclasses.field(default_factory=list)
    misplaced: Sequence[int] = ()
    sampled: list[Exchange] = dataclasses.field(default_factory=list)
    skip_mask: Tensor | None = None
    results: list[tuple[Piece, Tensor]] = dataclasses.field(default_factory=list)
    outcomes: list[tuple[tuple[str, ...], Tensor]] = dataclasses.field(default_factory=list)
    norms: list[tuple[float, Tensor]] = dataclasses.field(default_factory=list)
    residual: Tensor | None = None
    observe_seconds: float = 0.0


# Stands for the weight of a piece outside of `UpdateRule.post`.
_NOTHING = torch.empty(0, device="cpu")
# A change of a parameter: its piece, or None for all of it; and its gradient of AdamW, its
# orthogonalized momentum, or its new weights.
Change: TypeAlias = tuple[Param, "Piece | None", Tensor]


class Engine:
    """Runs steps; made once per optimizer, and anew when a checkpoint is loaded.

    The optimizer gives it a schedule for each matrix, and the matrices to measure.

    Args:
        parameters: Parameters of this process.
        groups: Parameter groups of the optimizer.
        rule: The optimizer's rule.
        config: Mathematics and exchange, with the dtypes in force.
        process_group: Process group of the user, for `Membership`.

    Attributes:
        is_connected: Whether all ranks have agreed on their structure; before, ``world`` and
            ``ballots`` are unset.
        world: Agreed structure of all ranks.
        update_scales: Muon's own scale of each matrix, also if the rule has another: AMO's plan
            weights errors by it.
        sent_bytes: Bytes of matrices that this rank sent to others in the last step.

    Raises:
        ValueError: The settings cannot run with this rule, or the process group does not fit these
            parameters.
    """

    is_connected = False
    world: World
    ballots: Ballots

    def __init__(
        self,
        parameters: Parameters,
        groups: Groups,
        rule: UpdateRule,
        config: MuonConfig,
        process_group: GroupLike = None,
    ) -> None:
        self.parameters, self.config, self.rule = parameters, config, rule
        self._groups = list(groups)
        self.membership = Membership([param.tensor for param in parameters.params], process_group)
        self._dtype: torch.dtype = getattr(torch, config.ns_dtype)
        assert config.wire_dtype is not None
        self._wire: torch.dtype = getattr(torch, config.wire_dtype)
        self._params_on_device = parameters.device.type != "cpu"
        self.matrix_device = parameters.matrix_device
        # Argument of `read_groups`.
        self.check = rule.check if rule.has_check else None
        self._library = library(config.ns_kernels, self.matrix_device, self._dtype)
        self._is_offloaded = self.matrix_device != parameters.device
        self._frees_memory = self.matrix_device.type != "cpu"
        check_float16(parameters, groups, config.bfloat16_params)
        shapes = [m.shape if m.dim == 0 else m.shape[::-1] for m in parameters.matrices]
        self.update_scales = [UpdateRule.scale(rule, shape) for shape in shapes]
        self._sum_sizes = {matrix.name: rule.sums(matrix) for matrix in parameters.matrices}
        counts = sorted(set(map(len, self._sum_sizes.values())))
        expected = "the same number for all matrices, with 0 elements for those without one"
        require(len(counts) <= 1, f"{type(rule).__name__}.sums", f"{counts} sums", expected)
        # Pieces of this rank, by their matrix and region. Those without elements have state that
        # this rank holds as a replica.
        self._pieces: dict[Held, Piece] = {}
        self._empty_pieces: list[Piece] = []
        rank = this_rank()
        for index, (matrix, shape) in enumerate(zip(parameters.matrices, shapes, strict=True)):
            param, scale = parameters.params[matrix.param], rule.scale(shape)
            for region in matrix.regions_by_rank.get(rank, ()):
                self._pieces[index, region] = Piece(matrix, region, scale, param, self._groups)
            for region in matrix.empty_by_rank.get(rank, ()) if rule.has_post else ():
                self._empty_pieces.append(Piece(matrix, region, scale, param, self._groups))
        # Pieces whose momentum another replica sends to the owner.
        self._unsent: list[Piece] = []
        # Exchanges of training, and `Orders.owners_of` of their owners. Until all ranks have agreed
        # on them they are made anew.
        self._exchanges: list[Exchange] = []
        self._owners_of: str | None = None
        self._exchanges_are_agreed = False
        self.sent_bytes = 0
        # `Step.norms` of the last step, for metrics.
        self._norms: list[tuple[float, Tensor]] = []

    def make_state(self, states: State) -> None:
        """Make zero state for every parameter, so that all ranks have the same keys."""
        for param in self.parameters.params:
            tensor = param.tensor
            is_master = self.config.bfloat16_params == "master" and tensor.dtype == torch.bfloat16
            if param.views:
                dtype = torch.promote_types(tensor.dtype, torch.float32)
                state = {MOMENTUM: torch.zeros_like(tensor, dtype=dtype)}
                state |= self.rule.state(param)
            else:
                dtype = torch.float32 if is_master else tensor.dtype
                state = {
                    # Fused kernels, which devices run, count steps on the parameter's device.
                    "step": torch.zeros((), dtype=torch.float32, device=tensor.device),
                    "exp_avg": torch.zeros_like(tensor, dtype=dtype),
                    "exp_avg_sq": torch.zeros_like(tensor, dtype=dtype),
                }
            if is_master:
                state[ROUNDED_OFF] = torch.zeros_like(tensor, dtype=torch.float32)
            for value in state.values():
                value.requires_grad_(False)
            states[tensor] = state
        self.parameters.note_state(states)

    def connect(self, world: World, name: str) -> None:
        """Take the structure on which all ranks have agreed, and the optimizer's name."""
        first, num_others = self.parameters.params[0].name, len(self.parameters.params) - 1
        # Stages of a pipeline have parameters of their own.
        own = f" over {first} and {num_others} more parameters" if world.shares_all else ""
        self._identity = name + own
        skips = self.config.nonfinite == "skip_step"
        self.world, self.ballots = world, Ballots(world, self.parameters, skips=skips)
        self.is_connected = True

    # ---------------------------------------------------------------- one step

    def prepare(self, orders: Orders, groups: Groups, state: State) -> Step:
        """Do everything of a step that may fail on this rank alone; communicates nothing.

        Args:
            orders: Orders of the optimizer.
            groups: Its parameter groups as they are now.
            state: Its state, by parameter.
        """
        self._groups[:] = groups  # in place: the pieces hold this list, too
        self.sent_bytes, self._norms = 0, []
        settings = read_groups(groups, self.check, self.rule.defaults)
        weights, states = self.parameters.tensors(state)
        gradients = self.ballots.local_gradients()
        needs_exchanges = orders.owners_of != self._owners_of or not self._exchanges_are_agreed
        # Reading the verdict costs a CPU nothing. A device waits where it makes new exchanges (a
        # rank without them cannot take part in a step under a mask), measures (a skipped step
        # observes nothing), or is fresh (a step before the first gradient does not count).
        waits = (
            not self._params_on_device
            or needs_exchanges
            or orders.measures
            or self.ballots.is_fresh
        )
        if needs_exchanges:
            self.discard()  # memory, before new buffers are made
            every = range(len(self.parameters.matrices))
            self._exchanges = self._make_exchanges(every, orders.schedules, self._wire)
            self._owners_of = orders.owners_of
            buckets = [bucket for exchange in self._exchanges for bucket in exchange.buckets]
            for bucket in buckets:
                names = [self.parameters.matrices[index].name for index in bucket.owned]
                bucket.label = f"orthogonalizing {first_names(names)}"
            sent = {id(piece) for bucket in buckets for piece in bucket.sent}
            self._unsent = [p for p in self._pieces.values() if id(p) not in sent]
        if self._frees_memory:
            self._restore()
        sampled = list[Exchange]()
        if orders.sample:
            names = [matrix.name for matrix in self.parameters.matrices]
            indices = [index for index, name in enumerate(names) if name in orders.sample]
            # Training rounds what it sends to less.
            dtype = torch.float32
            sampled = self._make_exchanges(indices, orders.schedules, dtype, returns=False)
        lines = [
            f"step {orders.step}",
            self._identity,
            f"settings, schedules and state {orders.digest}",
            f"measured {list(orders.sample)}, {orders.checked}",
            f"{'a new' if needs_exchanges else 'the last'} exchange plan",
            f"{'waits' if waits else 'does not wait'} for the verdict",
        ]
        if self.world.shares_all:  # stages of a pipeline have groups of their own
            lines += [f"group {index}: {own.text}" for index, own in enumerate(settings)]
        replicas = None
        if self.ballots.is_fresh and self.world.replica_sets:
            placed = [
                None if i in gradients.misplaced else g for i, g in enumerate(gradients.local)
            ]
            params = self.parameters.params
            replicas = mark_replicas(self.world, params, weights, states, placed)
        ballot = self.ballots.fill(orders.step, waits, "\n".join(lines), gradients, replicas)
        return Step(
            ballot,
            orders,
            settings,
            weights,
            states,
            grads=gradients.local,
            misplaced=gradients.misplaced,
            sampled=sampled,
        )

    def give_up(self, number: int, error: Exception) -> Step:
        """A step that this rank could not prepare: it tells all ranks why, and only communicates.

        Args:
            number: Optimizer step.
            error: Error of `prepare`, or of the orders; raised at once in a world of one rank.
        """
        if self.world.group is None:
            raise error
        text = failure_text(f"step {number}", error)
        return Step(self.ballots.fill(number, None, text))

    def vote(self, step: Step) -> Verdict:
        """Agree with all ranks on a step; a collective over the world.

        Raises:
            As `Ballots.vote`.
        """
        try:
            verdict = self.ballots.vote(step.ballot)
        except Exception:
            if not self._exchanges_are_agreed:
                self.discard()
            self._release()
            raise
        self._exchanges_are_agreed = True
        if verdict.is_skipped or verdict.is_before_first_gradient:
            self._release()
        return verdict

    def _restore(self) -> None:
        """Bring the memory of messages back."""
        for exchange in self._exchanges:
            exchange.restore()

    def _release(self) -> None:
        """Free the memory of messages on a device until the next step."""
        for exchange in self._exchanges:
            exchange.release()

    def discard(self) -> None:
        """Forget the exchanges: the next step makes new ones."""
        self._exchanges, self._owners_of, self._exchanges_are_agreed = [], None, False

    def run(self, step: Step, verdict: Verdict) -> None:
        """Update every parameter; a collective over the ranks that share parameters.

        If something fails on this rank alone, it goes on to communicate: all ranks raise when they
        read their next ballot. It sends NaN in place of momentum, from which owners make a zero
        update, or zeros in place of results: such matrices are only decayed.

        Args:
            step: Step on which all ranks have voted.
            verdict: Verdict that lets it run, or which nobody has read yet.
        """
        step.skip_mask = verdict.skip_mask
        if step.orders is None:
            self._make_room()
        try:
            # Moving a gradient is a collective, which hangs if a rank has none or does not take
            # part: this waits for the backward pass until the step is known to be good. A step that
            # the host knows to be bad does not come here.
            if step.misplaced and verdict.pending_outcome() is None:
                self._move_gradients(step)
            elif step.misplaced:
                step.grads = [None] * len(step.grads)
            if self._unsent:
                self.guarded(step, "updating momentum", self._update_momentum)
            self.sent_bytes += sum(exchange.sent_bytes for exchange in self._exchanges)
            # A rank without a matrix has no exchange, but AdamW.
            lists = [exchange.buckets for exchange in self._exchanges] or [[]]
            for number, buckets in enumerate(lists):
                self._pipeline(step, buckets, has_adamw=number == 0)
            if self._frees_memory:
                self._release()
            if self.rule.has_post and self.parameters.matrices:
                self._post(step)
        except BaseException:
            self.discard()  # messages under way must not arrive in the buffers of a later step
            raise
        self._norms = step.norms
        if step.outcomes:
            names, flags = zip(*step.outcomes, strict=True)
            values = torch.cat(flags).flatten()
            if step.skip_mask is not None:  # a step that changed nothing says nothing
                values.masked_fill_(step.skip_mask, False)
            self.ballots.updates = Flags([*itertools.chain(*names)], values)

    def _move_gradients(self, step: Step) -> None:
        """Bring gradients to the placements of their parameters; a collective for each."""
        for index in step.misplaced:
            param = self.parameters.params[index]
            assert isinstance(param.tensor, DTensor)
            assert isinstance(param.tensor.grad, DTensor)
            grad = param.tensor.grad.redistribute(placements=param.tensor.placements)
            step.grads[index] = local_gradient(param, grad)

    def _make_room(self) -> None:
        """Bring the memory of messages back after a failure, which may be the lack of it.

        The other ranks have not read yet that this one has failed, and run the step under a mask.
        To receive what they send, the gradients of this rank give way if nothing else does: all
        ranks raise before they could be used.
        """
        try:
            self._restore()
        except torch.OutOfMemoryError:
            for param in self.parameters.params:
                param.tensor.grad = None
            torch.accelerator.empty_cache()
            self._restore()

    def guarded(
        self,
        step: Step,
        part: str,
        work: Callable[..., None],
        *args: Any,
        instead: tuple[Sequence[Tensor], float] = ((), 0.0),
    ) -> None:
        """Do local work of a step, which must not communicate, and go on if it fails on this rank.

        Args:
            step: The step; one that this rank could not prepare does no work.
            part: Name of the work.
            work: Function of the step and of ``args``.
            args: Its other arguments.
            instead: Tensors to fill if it fails, and the number to fill them with.
        """
        if step.orders is None:  # what lies in its buffers is sent: all ranks run under a mask
            return
        try:
            work(step, *args)
        except Exception as error:
            if isinstance(error, torch.AcceleratorError):
                raise  # the device is lost: each later call would fail and be logged in turn
            self.ballots.report_failure(f"step {step.orders.step}: {part}", error)
            for tensor in instead[0]:
                tensor.fill_(instead[1])

    def _update_momentum(self, step: Step) -> None:
        """Update the momentum of replicas that another one sends to the owner."""
        rows_by_momentum: dict[float, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for piece in self._unsent:
            index, momentum = piece.param.index, step.settings[piece.param.group].momentum
            if (grad := step.grads[index]) is not None:
                row = piece.view(step.states[index][MOMENTUM]), piece.view(grad)
                rows_by_momentum[momentum].append(row)
        with record_function("amo::momentum"):
            for momentum, rows in rows_by_momentum.items():
                buffers, grads = map(list, zip(*rows, strict=True))
                update_momentum(buffers, grads, momentum, skip_mask=step.skip_mask)

    def _adamw(self, step: Step) -> None:
        """Update the parameters without matrices; a shard gets the bits of the whole.

        On a CPU PyTorch's foreach kernels run: the fused one gives an element other bits in another
        shard. On a device the fused ones run, which skip a bad step without the host.
        """
        pairs = zip(self.parameters.params, step.grads, strict=True)
        updates = [(p, None, grad) for p, grad in pairs if not p.views and grad is not None]
        with record_function("amo::adamw"):
            is_skipped = None if step.skip_mask is None else step.skip_mask.to(torch.float32)
            for group, batch, weights in self._batches(step, updates):
                states = [step.states[param.index] for param, _, _ in batch]
                grads = [x.to(w.dtype) for (_, _, x), w in zip(batch, weights, strict=True)]
                is_fused = not on_cpu(weights[0])
                averages = [state["exp_avg"] for state in states]
                squares = [state["exp_avg_sq"] for state in states]
                if any(weight.is_complex() for weight in weights):
                    weights, grads, averages, squares = map(
                        real, (weights, grads, averages, squares)
                    )
                adamw(
                    list(weights),
                    grads,
                    averages,
                    squares,
                    [],
                    [state["step"] for state in states],
                    foreach=not is_fused,
                    fused=is_fused,
                    found_inf=is_skipped,
                    amsgrad=False,
                    beta1=group.betas[0],
                    beta2=group.betas[1],
                    lr=group.lr,
                    weight_decay=group.weight_decay,
                    eps=group.eps,
                    maximize=False,
                )

    def _pipeline(self, step: Step, buckets: Sequence[Bucket], *, has_adamw: bool) -> None:
        """Run the buckets of one exchange to their end.

        While one bucket is computed the next one is gathered, and the results of the last travel.
        AdamW, with the first exchange, and the buckets that do not travel run under the first
        gather::

                        turn 0     turn 1     turn 2
            gather  0        1          2
            compute             0          1          2
            scatter                        0          1          2

        All of them end before those of the next exchange begin: three sets of ranks that overlap
        in pairs could otherwise wait for one another in a circle.
        """
        staying = [self._bucket(step, bucket) for bucket in buckets if not bucket.moves]
        moving = [self._bucket(step, bucket) for bucket in buckets if bucket.moves]
        none: Iterator[None] = iter(())  # stands for a bucket before the first or after the last
        runs = [none, *moving, none, none]
        next(runs[1], None)  # its gather starts
        if has_adamw:
            self.guarded(step, "AdamW", self._adamw)
        for run in staying:
            for _ in run:
                pass
        for last, this, coming in zip(runs, runs[1:], runs[2:], strict=False):
            next(this, None)  # its momentum has arrived
            next(coming, None)  # its gather starts
            next(this, None)  # it is orthogonalized
            next(last, None)  # its results have arrived, and are applied
            next(this, None)  # its scatter starts, from memory that is free now

    def _bucket(self, step: Step, bucket: Bucket) -> Iterator[None]:
        """One bucket, from momentum to updated parameters.

        If it travels, it pauses four times: while it is gathered, when it has arrived, when it is
        orthogonalized, and while results travel.
        """
        targets, wholes = (bucket.outgoing, math.nan), (bucket.wholes, 0.0)
        self.guarded(step, "updating momentum", self._send_momentum, bucket, instead=targets)
        yield from bucket.gather()
        yield
        self.guarded(step, bucket.label, self._orthogonalize, bucket, instead=wholes)
        yield
        yield from bucket.scatter()
        self.guarded(step, "updating matrices", self._take_results, bucket)

    def _send_momentum(self, step: Step, bucket: Bucket, advances: bool = True) -> None:
        """Update momentum, and write what is to be orthogonalized to where it is sent from.

        A parameter without a gradient sends zeros: the sizes of messages were agreed before.

        Args:
            step: The step.
            bucket: The bucket.
            advances: Whether to update; an observation reads what the step has updated.
        """
        if not bucket.sent:
            return
        with record_function("amo::momentum"):
            staging = on_host(bucket.outgoing) if self._is_offloaded else bucket.outgoing
            rows_by_form = defaultdict[Any, list[tuple[Piece, Tensor, Tensor]]](list)
            for piece, target in zip(bucket.sent, staging, strict=True):
                if (grad := step.grads[piece.param.index]) is None:
                    target.zero_()
                else:
                    own = step.settings[piece.param.group]
                    rows_by_form[own.momentum, own.lookahead].append((piece, grad, target))
            for (momentum, lookahead), rows in rows_by_form.items():
                pieces, grads, targets = map(list, zip(*rows, strict=True))
                grads = [piece.view(grad) for piece, grad in zip(pieces, grads, strict=True)]
                states = [step.states[piece.param.index] for piece in pieces]
                pairs = zip(pieces, states, strict=True)
                buffers = [piece.view(state[MOMENTUM]) for piece, state in pairs]
                out = targets
                if self.rule.has_pre:  # before anything is rounded to travel
                    dtype = wide_dtype(*(buffer.dtype for buffer in buffers))
                    _, (out,) = new_lists(buffers, dtype, 1)
                if advances:
                    mask = step.skip_mask
                    advance(buffers, grads, momentum, lookahead, out, skip_mask=mask)
                else:
                    look_ahead(buffers, grads, lookahead, out)
                if self.rule.has_pre:
                    torch._foreach_copy_(targets, list(self.rule.pre(out, pieces)))
            if self._is_offloaded:
                torch._foreach_copy_(bucket.outgoing, staging, non_blocking=True)

    def _orthogonalize(self, step: Step, bucket: Bucket) -> None:
        """Orthogonalize the matrices of a bucket in place; zeros for results that are not finite.

        Those of one shape and schedule are one batch.
        """
        assert step.orders is not None
        alike: dict[tuple[object, Schedule], list[tuple[str, Tensor]]] = defaultdict(list)
        for index, whole in zip(bucket.owned, bucket.wholes, strict=True):
            matrix, schedule = self.parameters.matrices[index], step.orders.schedules[index]
            # A CPU takes two products of one matrix faster than one product of a batch of two.
            kind = index if on_cpu(whole) else matrix.shape
            alike[kind, schedule].append((matrix.name, whole))
        with record_function("amo::orthogonalize"):
            for (_, schedule), batch in alike.items():
                names, wholes = map(list, zip(*batch, strict=True))
                x = torch.stack(wholes) if len(wholes) > 1 else wholes[0]
                results = orthogonalize(
                    x,
                    schedule.coefficients,
                    norm_scale=schedule.norm_scale,
                    preconditioner=schedule.preconditioner,
                    dtype=self._dtype,
                    library=self._library,
                )
                results = results if results.dim() == 3 else results.unsqueeze(0)
                step.outcomes.append((tuple(names), drop_nonfinite(results)))
                if (checked := step.orders.checked) in names:
                    result = results[names.index(checked)]
                    self.guarded(step, f"measuring {checked}", self._measure_residual, result)
                if self.config.update_norm == "exact":
                    least = math.sqrt(min(x.shape[-2:])) / EXACT_NORM_BOUND
                    step.norms.append((least, scale_to_exact_norm(results)))
                torch._foreach_copy_(wholes, results.unbind())

    def _measure_residual(self, step: Step, result: Tensor) -> None:
        """Measure how far a result is from orthogonal; 0 for zeros, which have no gradient."""
        step.residual = ns_residual(result) * result.any()

    def _take_results(self, step: Step, bucket: Bucket) -> None:
        """Apply results, or keep them for the rule's `post`."""
        results = bucket.incoming
        if self._is_offloaded and results:
            results = bring_down(results)
        pairs = zip(bucket.received, results, strict=True)
        present = [(piece, x) for piece, x in pairs if step.grads[piece.param.index] is not None]
        if not self.rule.has_post:
            self._apply(step, present)
        elif present:
            pieces, kept = map(list, zip(*present, strict=True))
            if not self._is_offloaded:  # the memory of the bucket serves the next one
                _, (copies,) = new_lists(kept, self._wire, 1)
                torch._foreach_copy_(copies, kept)
                kept = copies
            step.results += zip(pieces, kept, strict=True)

    def _post(self, step: Step) -> None:
        """Apply what the rule makes of all results of this rank; a collective for each sum."""
        for piece in self._empty_pieces:
            if step.orders is not None and step.grads[piece.param.index] is not None:
                weight = piece.view(step.weights[piece.param.index])
                step.results.append((piece, weight.new_empty(weight.shape, dtype=self._wire)))
        pieces, dtype = [piece for piece, _ in step.results], self.rule.sum_dtype
        sums = MatrixSums(self.parameters, self._sum_sizes, pieces, self.world, dtype)
        self.guarded(step, "finishing updates", self._finish, sums)
        sums.finish()
        if sums.error is not None:
            raise sums.error

    def _finish(self, step: Step, sums: MatrixSums) -> None:
        """Run the rule's `post`, and apply its state and updates."""
        pieces = [piece for piece, _ in step.results]
        stored: list[tuple[Piece, str, Tensor]] = []
        try:
            for piece in pieces:
                weight, state = step.weights[piece.param.index], step.states[piece.param.index]
                own = [name for name in state if name not in (MOMENTUM, ROUNDED_OFF)]
                source = piece.region.source
                piece.state = {name: cut_like(state[name], source, weight.shape) for name in own}
                stored += [(piece, name, x) for name, x in piece.state.items()]
                piece.weight = piece.view(weight)
                if self.rule.sets_weights and ROUNDED_OFF in state:
                    piece.weight = piece.weight + piece.view(state[ROUNDED_OFF])
            with record_function("amo::post"):
                updates = self.rule.post([x for _, x in step.results], pieces, sums)
            new = [piece.state[name] for piece, name, _ in stored]
            set_weights([x for _, _, x in stored], new, skip_mask=step.skip_mask)
            self._apply(step, list(zip(pieces, updates, strict=True)))
        finally:
            for piece in pieces:  # nothing holds tensors longer than a step
                piece.weight, piece.state = _NOTHING, {}

    def _apply(self, step: Step, pairs: Sequence[tuple[Piece, Tensor]]) -> None:
        """Decay pieces of parameters, and subtract their scaled updates; or set new weights."""
        updates = [(piece.param, piece, x) for piece, x in pairs]
        with record_function("amo::update"):
            for group, batch, weights in self._batches(step, updates):
                changes = [x for _, _, x in batch]
                if self.rule.sets_weights:
                    set_weights(weights, changes, skip_mask=step.skip_mask)
                    continue
                apply_update(
                    weights,
                    changes,
                    lr=group.lr,
                    weight_decay=group.weight_decay,
                    scales=[piece.scale for _, piece, _ in batch if piece is not None],
                    cautious=self.config.cautious_decay,
                    skip_mask=step.skip_mask,
                )

    def _batches(
        self, step: Step, updates: Sequence[Change]
    ) -> Iterator[tuple[GroupSettings, Sequence[Change], Sequence[Tensor]]]:
        """Updates that are computed together: settings of their group, updates, weights to change.

        The weights are float32 where there are master weights, and those are lent in parts: copies
        of all would be a second model in memory.
        """
        parts: dict[tuple[int, int], list[Change]] = defaultdict(list)
        num_lent = 0
        for update in updates:
            param, _, change = update
            part = 0
            if ROUNDED_OFF in param.state_forms:
                num_lent += change.numel()
                part = 1 + num_lent // GROUP_ELEMENTS
            parts[param.group, part].append(update)
        for (group, part), batch in parts.items():
            lists = [[step.weights[param.index] for param, _, _ in batch]]
            if part:
                lists.append([step.states[param.index][ROUNDED_OFF] for param, _, _ in batch])
            weights, *left = (
                [piece.view(x) if piece else x for (_, piece, _), x in zip(batch, own, strict=True)]
                for own in lists
            )
            if not part:
                yield step.settings[group], batch, weights
                continue
            with master_weights(weights, *left) as masters:
                yield step.settings[group], batch, masters

    # ---------------------------------------------------------------- plans and buffers

    def gather_sample(self, step: Step) -> Iterator[tuple[str, Tensor]]:
        """Gather the momentum to observe: name and whole matrix of each that this rank gets."""
        while step.sampled:
            exchange = step.sampled.pop(0)
            self.sent_bytes += exchange.sent_bytes
            for bucket in exchange.buckets:
                targets = (bucket.outgoing, math.nan)
                part, work = "reading momentum to observe", self._send_momentum
                self.guarded(step, part, work, bucket, False, instead=targets)
                for _ in bucket.gather():
                    pass
                for index, whole in zip(bucket.owned, bucket.wholes, strict=True):
                    yield self.parameters.matrices[index].name, whole

    def _make_exchanges(
        self,
        indices: Sequence[int],
        schedules: Sequence[Schedule],
        dtype: torch.dtype,
        *,
        returns: bool = True,
    ) -> list[Exchange]:
        """The exchange of each set of matrices with the same replicas.

        They follow from what all ranks know, and communicate nothing.

        Args:
            indices: Indices of the matrices to exchange.
            schedules: Schedules: the cost of a matrix is that of its Newton-Schulz steps.
            dtype: Dtype in which the matrices travel.
            returns: Whether owners send results back.
        """
        world, config, matrices = self.world, self.config, self.parameters.matrices
        pairs = zip(schedules, matrices, strict=True)
        costs = [float(s.num_steps * ns_step_flops(*matrix.shape)) for s, matrix in pairs]
        owners_by_replicas = assign(matrices, costs, indices=indices, ownership=config.ownership)
        exchanges = []
        for replicas, owners in owners_by_replicas.items():
            sets = itertools.chain(*replicas), copies_of(replicas, world.rank)
            group, along = (world.groups_by_ranks[tuple(sorted(ranks))] for ranks in sets)
            peers, copies = (
                (world.rank,) if own is None else dist.get_process_group_ranks(own)
                for own in (group, along)
            )
            plan = plan_exchange(
                matrices,
                owners,
                replicas,
                rank=world.rank,
                peers=peers,
                copies=copies,
                itemsize=dtype.itemsize,
                bucket_bytes=config.bucket_bytes,
                returns=returns,
            )
            exchanges.append(
                Exchange(
                    plan,
                    matrices,
                    self._pieces,
                    group=group,
                    copies=along,
                    device=self.matrix_device,
                    dtype=dtype,
                )
            )
        return exchanges

    def num_bounded(self) -> int:
        """Updates of this rank in the last step that the bound of the exact norm kept smaller."""
        counts = [((norms > 0) & (norms < least)).sum() for least, norms in self._norms]
        return sum(int(count.item()) for count in counts)
