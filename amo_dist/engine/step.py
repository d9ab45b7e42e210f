"""One step of the optimizer: momentum, gather, orthogonalize, scatter, apply.

Momentum stays sharded. Each matrix has one owner rank, which during a step gathers it,
orthogonalizes it, and sends the results back::

    rank 0   momentum ─┐           ┌─ orthogonalize its matrices ─┐            ┌─ apply
    rank 1   momentum ─┼─ gather ──┼─ orthogonalize its matrices ─┼─ scatter ──┼─ apply
    rank 2   momentum ─┘           └─ orthogonalize its matrices ─┘            └─ apply

Five invariants hold in every step:

1. All ranks call the same collectives in the same order.
2. After the vote no rank raises alone: a failure of one rank goes into the next ballot, and all
   ranks raise when they read that.
3. The host waits for nothing but the ballot of the last step in a step that measures nothing,
   keeps its owners and finds gradients in the placements of their parameters.
4. The sizes of messages never depend on which gradients exist: zeros stand in for missing ones.
5. On a CPU, bits do not depend on how a matrix is cut over ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw
from torch.profiler import record_function

from amo_dist.config import MuonConfig, require
from amo_dist.distributed.bucket import (
    BUCKETS_IN_FLIGHT,
    Bucket,
    Exchange,
    Place,
    bring_down,
    on_host,
)
from amo_dist.distributed.layout import Region, flattened
from amo_dist.distributed.plan import assign, plan_exchange
from amo_dist.distributed.ranks import GroupLike, Membership
from amo_dist.engine.ballot import Ballots, Verdict
from amo_dist.engine.hyperparameters import describe_group, learning_rate, momentum_of
from amo_dist.engine.parameters import (
    MOMENTUM,
    LocalParam,
    Parameters,
    Piece,
    check_float16,
)
from amo_dist.engine.rule import MatrixSums, UpdateRule
from amo_dist.engine.world import World
from amo_dist.kernels.elementwise import (
    GROUP_ELEMENTS,
    ROUNDED_OFF,
    apply_update,
    drop_nonfinite,
    master_weights,
    nesterov,
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
        balances_locked_work: Whether owners balance the work of the locked schedules. False before
            the lock, when they balance that of the first schedules, and always in round robin.
        sample: Names of the matrices to observe after the step; empty at most steps.
        candidates: Schedules whose errors the observation measures.
        checked: Name of the matrix whose residual is measured; None at most steps.
    """

    step: int
    schedules: Sequence[Schedule]
    digest: str
    balances_locked_work: bool
    sample: Sequence[str]
    candidates: Sequence[Schedule]
    checked: str | None


@dataclasses.dataclass(slots=True, eq=False)
class Step:
    """Everything that belongs to the step at hand.

    Attributes:
        orders: Orders for it.
        params: This rank's part of each parameter.
        momentum_settings: Momentum of each group, and the coefficient of the buffer in the matrix
            to orthogonalize, ``G + c * B``; None for ``B`` alone.
        skip_mask: 0-dim boolean on the device: if true, nothing may change; None if the host knows
            that the step is good.
        results: Pieces whose results wait for the rule's `post`.
        outcomes: Names of orthogonalized matrices, and flags of those whose result was NaN or inf.
        norms: Norm below which the factor to the exact norm is bounded, and norms of results.
        residual: Residual of the matrix to check, 0-dim; None on the ranks that do not own it.
        observe_seconds: Seconds that this rank took to measure the sample.
    """

    orders: Orders
    params: Sequence[LocalParam]
    momentum_settings: Sequence[tuple[float, float | None]]
    skip_mask: Tensor | None
    results: list[tuple[Piece, Tensor]] = dataclasses.field(default_factory=list)
    outcomes: list[tuple[tuple[str, ...], Tensor]] = dataclasses.field(default_factory=list)
    norms: list[tuple[float, Tensor]] = dataclasses.field(default_factory=list)
    residual: Tensor | None = None
    observe_seconds: float = 0.0


class Update(NamedTuple):
    """A change of a parameter, or of a region of it.

    Attributes:
        local: The parameter.
        change: Gradient of AdamW, orthogonalized momentum, or new weights.
        region: Region that changes; None for all of the parameter.
        scale: Factor on orthogonalized momentum beside the learning rate.
    """

    local: LocalParam
    change: Tensor
    region: Region | None = None
    scale: float = 1.0

    def view(self, whole: Tensor) -> Tensor:
        """The part of the parameter, or of a state in its shape, that changes."""
        return whole if self.region is None else self.region.view(whole)


def batches(updates: Sequence[Update]) -> Iterator[tuple[int, list[Update], Sequence[Tensor]]]:
    """Updates that are computed together: index of their group, updates, and weights to change.

    The weights are float32 where there are master weights, and those are lent in parts: copies of
    all would be a second model in memory.
    """
    parts: dict[tuple[int, int], list[Update]] = defaultdict(list)
    num_lent = 0
    for update in updates:
        part = 0
        if ROUNDED_OFF in update.local.state:
            num_lent += update.change.numel()
            part = 1 + num_lent // GROUP_ELEMENTS
        parts[update.local.param.group, part].append(update)
    for (group, part), batch in parts.items():
        weights = [update.view(update.local.weight) for update in batch]
        if not part:
            yield group, batch, weights
            continue
        remainders = [update.view(update.local.state[ROUNDED_OFF]) for update in batch]
        with master_weights(weights, remainders) as masters:
            yield group, batch, masters


class Engine:
    """Runs steps; made once per optimizer, and anew when a checkpoint is loaded.

    The optimizer gives it a schedule for each matrix, and the matrices to measure.

    Args:
        parameters: Parameters of this process.
        groups: Parameter groups of the optimizer, read at every step.
        state: State of the optimizer, by parameter.
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
        state: State,
        rule: UpdateRule,
        config: MuonConfig,
        process_group: GroupLike = None,
    ) -> None:
        self.parameters, self.config, self.rule = parameters, config, rule
        self.groups, self.state = groups, state
        self.membership = Membership([param.tensor for param in parameters.params], process_group)
        self._dtype: torch.dtype = getattr(torch, config.ns_dtype)
        assert config.wire_dtype is not None
        self.wire: torch.dtype = getattr(torch, config.wire_dtype)
        self._is_on_device = parameters.device.type != "cpu"
        self.device = parameters.matrix_device
        self._library = library(config.ns_kernels, self.device, self._dtype)
        self._is_staged = self.device != parameters.device
        check_float16(parameters, groups, config.bfloat16_params)
        shapes = [m.shape if m.dim == 0 else m.shape[::-1] for m in parameters.matrices]
        self._scales = [rule.scale(shape) for shape in shapes]
        self.update_scales = [UpdateRule.scale(rule, shape) for shape in shapes]
        self._sum_sizes = {matrix.name: rule.sums(matrix) for matrix in parameters.matrices}
        counts = sorted(set(map(len, self._sum_sizes.values())))
        expected = "the same number for all matrices, with 0 elements for those without one"
        require(len(counts) <= 1, f"{type(rule).__name__}.sums", f"{counts} sums", expected)
        # Exchanges of training, which serve step after step.
        self._exchanges: list[Exchange] = []
        # `Orders.balances_locked_work` of their owners; None while there are none.
        self._balances_locked_work: bool | None = None
        # Exchanges of the coming observation alone.
        self._sampled: list[Exchange] = []
        self.sent_bytes = 0
        # `Step.norms` of the last step, for metrics.
        self._norms: list[tuple[float, Tensor]] = []

    def make_state(self) -> None:
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
            self.state[tensor] = state

    def connect(self, world: World) -> None:
        """Take the structure on which all ranks have agreed."""
        skips = self.config.nonfinite == "skip_step"
        self.world, self.ballots = world, Ballots(world, self.parameters, skips=skips)
        self.is_connected = True

    # ---------------------------------------------------------------- one step

    def agree(self, orders: Orders, fault: Exception | None = None) -> Verdict:
        """Vote on the coming step and on its gradients; a collective over the world.

        Args:
            orders: Orders of the coming step.
            fault: Fault of this rank alone, which all ranks raise.

        Raises:
            As `Ballots.vote`.
        """
        is_new = orders.balances_locked_work is not self._balances_locked_work
        self._sampled = []  # those of a step that was skipped, or in which a rank raised
        if is_new:  # the old buffers are freed; None until no rank has raised
            self._exchanges, self._balances_locked_work = [], None
        # The host must know now whether the step is skipped (an observation of it is invalid),
        # lacks buffers (it cannot run), or comes before the first gradient (it does not count).
        measures = bool(orders.sample) or orders.checked is not None
        waits = not self._is_on_device or is_new or measures or orders.step == 1
        text = ""
        if fault is None:
            if is_new or orders.sample:
                self._make_buffers(orders, is_new)
            text = "\n".join(self._lines(orders, is_new=is_new, waits=waits))
        verdict = self.ballots.vote(orders.step, text, fault, waits=waits)
        if verdict.reason:
            self._sampled = []
        self._balances_locked_work = orders.balances_locked_work
        return verdict

    def _lines(self, orders: Orders, *, is_new: bool, waits: bool) -> list[str]:
        """Lines that must be alike on all ranks before a step."""
        lines = [
            f"step {orders.step}",
            f"settings, schedules and state {orders.digest}",
            f"measured {list(orders.sample)}, {orders.checked}",
            f"{'a new' if is_new else 'the last'} exchange plan",
            f"{'waits' if waits else 'does not wait'} for the verdict",
        ]
        if self.world.shares_all:  # stages of a pipeline have groups of their own
            for index, group in enumerate(self.groups):
                lines.append(f"group {index}: {describe_group(group, self.rule.defaults)}")
        return lines

    def _make_buffers(self, orders: Orders, is_new: bool) -> None:
        """Make the exchanges that the step lacks; if that fails here, the vote says so to all."""
        matrices, schedules = self.parameters.matrices, orders.schedules
        sampled = [i for i, matrix in enumerate(matrices) if matrix.name in orders.sample]
        dtype = torch.float32  # training rounds what it sends, and an observation does not
        try:
            if is_new:
                self._exchanges = self._make_exchanges(range(len(matrices)), schedules, self.wire)
            if orders.sample:
                self._sampled = self._make_exchanges(sampled, schedules, dtype, returns=False)
        except Exception as error:
            self.ballots.report_failure(f"step {orders.step}: allocating buffers", error)

    def run(self, orders: Orders, verdict: Verdict) -> Step:
        """Update every parameter; a collective over the ranks that share parameters.

        If something fails on this rank alone, it sends what it has, or NaN in place of momentum,
        from which owners make a zero update: such a matrix is only decayed. All ranks raise when
        they read their next ballot.

        Args:
            orders: Orders on which all ranks have agreed.
            verdict: Result of `agree`.

        Returns:
            The step, for the measurements that follow it.
        """
        self.sent_bytes = 0
        pairs = zip(self.parameters.params, verdict.grads, strict=True)
        params = [LocalParam(param, self.state[param.tensor], grad) for param, grad in pairs]
        settings = [momentum_of(group, self.config) for group in self.groups]
        step = Step(orders, params, settings, verdict.skip_mask)
        try:
            self._update_momentum(step)
            # There is one exchange at least, as sets of ranks that share nothing but parameters of
            # AdamW have an empty one.
            for number, exchange in enumerate(self._exchanges):
                self.sent_bytes += exchange.sent_bytes
                with exchange.in_use():
                    self._pipeline(step, exchange.buckets, is_first=number == 0)
            if self.rule.has_post and self.parameters.matrices:
                self._post(step)
        except BaseException:
            # Messages still under way must not arrive in the buffers of a later step.
            self._balances_locked_work, self._exchanges = None, []
            raise
        self._norms = step.norms
        self.ballots.report_updates(step.outcomes, step.skip_mask)
        return step

    def _update_momentum(self, step: Step) -> None:
        """Take this rank's gradients into the momentum."""
        with record_function("amo::momentum"), self._deferring(step, "updating momentum"):
            by_momentum: dict[float, list[tuple[Tensor, Tensor]]] = defaultdict(list)
            for local in step.params:
                if not local.param.views or local.grad is None:
                    continue
                if local.param.is_convolution:
                    local.grad = flattened(local.grad.contiguous())
                momentum, _ = step.momentum_settings[local.param.group]
                by_momentum[momentum].append((local.state[MOMENTUM], local.grad))
            for momentum, pairs in by_momentum.items():
                buffers, grads = map(list, zip(*pairs, strict=True))
                update_momentum(buffers, grads, momentum, skip_mask=step.skip_mask)

    def _adamw(self, step: Step) -> None:
        """Update the parameters without matrices; a shard gets the bits of the whole.

        On a CPU PyTorch's foreach kernels run: the fused one gives an element other bits in another
        shard. On a device the fused ones run, which skip a bad step without the host.
        """
        updates = [
            Update(local, local.grad)
            for local in step.params
            if not local.param.views and local.grad is not None
        ]
        with record_function("amo::adamw"), self._deferring(step, "AdamW"):
            is_skipped = None if step.skip_mask is None else step.skip_mask.to(torch.float32)
            for index, batch, weights in batches(updates):
                states, group = [update.local.state for update in batch], self.groups[index]
                beta1, beta2 = map(float, group["betas"])
                pairs, is_fused = zip(batch, weights, strict=True), not weights[0].is_cpu
                adamw(
                    real(weights),
                    real([update.change.to(weight.dtype) for update, weight in pairs]),
                    real([state["exp_avg"] for state in states]),
                    real([state["exp_avg_sq"] for state in states]),
                    [],
                    [state["step"] for state in states],
                    foreach=not is_fused,
                    fused=is_fused,
                    found_inf=is_skipped,
                    amsgrad=False,
                    beta1=beta1,
                    beta2=beta2,
                    lr=learning_rate(group),
                    weight_decay=float(group["weight_decay"]),
                    eps=float(group["eps"]),
                    maximize=False,
                )

    def _pipeline(self, step: Step, buckets: Sequence[Bucket], *, is_first: bool) -> None:
        """Run the buckets of one set of ranks to their end, with double buffering.

        AdamW, in the first set, and the buckets that do not travel run under the first gathers.
        Turn k of the loop computes bucket k, gathers bucket k + 2, and applies bucket k - 1::

                       before   turn 0            turn 1            turn 2
            bucket 0   gather | compute         | apply
            bucket 1   gather |                 | compute         | apply
            bucket 2          |         gather  |                 | compute         | apply
            bucket 3          |                 |         gather  |                 | ...

        All of them end before those of the next set begin: three sets that overlap in pairs could
        otherwise wait for one another in a circle.
        """
        staying = [self._bucket(step, bucket) for bucket in buckets if not bucket.moves]
        moving = [self._bucket(step, bucket) for bucket in buckets if bucket.moves]

        def advance(number: int) -> None:
            """Run a bucket up to its next pause, or to its end; nothing without such a bucket."""
            if 0 <= number < len(moving):
                next(moving[number], None)

        for number in range(BUCKETS_IN_FLIGHT):
            advance(number)  # its gather starts
        if is_first:
            self._adamw(step)
        for run in staying:
            next(run, None)  # it never pauses
        for number in range(len(moving) + 1):
            advance(number)  # gathered and orthogonalized; its scatter starts
            advance(number + BUCKETS_IN_FLIGHT)  # its gather starts, from buffers that are free now
            advance(number - 1)  # its results have arrived, and are applied

    def _bucket(self, step: Step, bucket: Bucket) -> Iterator[None]:
        """One bucket, from momentum to updated parameters; pauses twice if it travels."""
        with record_function("amo::gather"):
            self._pack_momentum(step, bucket.outgoing)
        yield from bucket.gather()
        with record_function("amo::orthogonalize"):
            self._orthogonalize(step, bucket)
        yield from bucket.scatter()
        self._take_results(step, bucket.incoming)

    def _pack_momentum(self, step: Step, places: Sequence[Place]) -> None:
        """Write the momentum to orthogonalize into its places; NaN if that fails.

        A parameter without a gradient sends zeros: the sizes of messages were agreed before.
        """
        targets = [place.tensor for place in places]
        if not targets:
            return
        with self._deferring(step, "reading momentum", targets, math.nan):
            staging = on_host(targets) if self._is_staged else targets
            by_group: dict[int, list[tuple[Piece, Tensor, Tensor]]] = defaultdict(list)
            for place, target in zip(places, staging, strict=True):
                piece = self._piece(step, place)
                if piece.local.grad is None:
                    target.zero_()
                else:
                    by_group[piece.local.param.group].append((piece, piece.local.grad, target))
            for group, rows in by_group.items():
                _, coefficient = step.momentum_settings[group]
                momenta = [piece.momentum for piece, _, _ in rows]
                out = [target for _, _, target in rows]
                if self.rule.has_pre:  # before anything is rounded to travel
                    out = [torch.empty_like(x, dtype=wide_dtype(x.dtype)) for x in momenta]
                if coefficient is not None:
                    grads = [piece.region.view(grad) for piece, grad, _ in rows]
                    nesterov(momenta, grads, coefficient, out=out)
                else:
                    torch._foreach_copy_(out, momenta)
                if self.rule.has_pre:
                    for (piece, _, target), values in zip(rows, out, strict=True):
                        target.copy_(self.rule.pre(values, piece))
            if self._is_staged:
                torch._foreach_copy_(targets, staging, non_blocking=True)

    def _orthogonalize(self, step: Step, bucket: Bucket) -> None:
        """Orthogonalize the matrices of a bucket in place; zeros for results that are not finite.

        Those of one shape and schedule are one batch. If one fails, its results are zeros, and this
        rank goes on to send them.
        """
        alike: dict[tuple[object, Schedule], list[tuple[str, Tensor]]] = defaultdict(list)
        for index, whole in zip(bucket.owned, bucket.wholes, strict=True):
            matrix, schedule = self.parameters.matrices[index], step.orders.schedules[index]
            # A CPU takes two products of one matrix faster than one product of a batch of two.
            kind = index if whole.is_cpu else matrix.shape
            alike[kind, schedule].append((matrix.name, whole))
        for (_, schedule), batch in alike.items():
            names, wholes = map(list, zip(*batch, strict=True))
            with self._deferring(step, f"orthogonalizing {names[0]}", wholes, 0.0):
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
                    with self._deferring(step, f"measuring {checked}"):
                        result = results[names.index(checked)]
                        # A matrix without a gradient is zero, and its residual says nothing.
                        step.residual = ns_residual(result) * result.any()
                if self.config.update_norm == "exact":
                    least = math.sqrt(min(x.shape[-2:])) / EXACT_NORM_BOUND
                    step.norms.append((least, scale_to_exact_norm(results)))
                torch._foreach_copy_(wholes, results.unbind())

    def _take_results(self, step: Step, places: Sequence[Place]) -> None:
        """Apply results, or keep them for the rule's `post`."""
        with self._deferring(step, "updating matrices"):
            results = [place.tensor for place in places]
            if self._is_staged and results:
                results = bring_down(results)
            pieces = [self._piece(step, place) for place in places]
            pairs = zip(pieces, results, strict=True)
            present = [(piece, x) for piece, x in pairs if piece.local.grad is not None]
            if not self.rule.has_post:
                self._apply(step, present)
                return
            for piece, result in present:  # the memory of the bucket serves the next one
                step.results.append((piece, result if self._is_staged else result.clone()))

    def _post(self, step: Step) -> None:
        """Apply what the rule makes of all results of this rank; a collective for each sum."""
        pieces = [piece for piece, _ in step.results]
        parameters, dtype = self.parameters, self.rule.sum_dtype
        sums = MatrixSums(parameters, self._sum_sizes, pieces, self.world, dtype)
        with self._deferring(step, "finishing updates"):
            try:
                for piece in pieces:
                    piece.state = piece.stored_state()
                    remainder = piece.local.state.get(ROUNDED_OFF)
                    if self.rule.sets_weights and remainder is not None:
                        piece.weight = piece.weight + piece.region.view(remainder)
                with record_function("amo::post"):
                    updates = self.rule.post([x for _, x in step.results], pieces, sums)
            finally:
                sums.finish()
                step.results.clear()
            for piece in pieces:
                stored = piece.stored_state()
                new = [piece.state[name] for name in stored]
                set_weights(list(stored.values()), new, skip_mask=step.skip_mask)
            self._apply(step, list(zip(pieces, updates, strict=True)))
        if sums.error is not None:
            raise sums.error

    def _apply(self, step: Step, pairs: Sequence[tuple[Piece, Tensor]]) -> None:
        """Decay pieces of parameters, and subtract their scaled updates; or set new weights."""
        updates = [Update(piece.local, x, piece.region, piece.scale) for piece, x in pairs]
        with record_function("amo::update"):
            for index, batch, weights in batches(updates):
                changes, group = [update.change for update in batch], self.groups[index]
                if self.rule.sets_weights:
                    set_weights(weights, changes, skip_mask=step.skip_mask)
                    continue
                apply_update(
                    weights,
                    changes,
                    lr=learning_rate(group),
                    weight_decay=float(group["weight_decay"]),
                    scales=[update.scale for update in batch],
                    cautious=self.config.cautious_decay,
                    skip_mask=step.skip_mask,
                )

    @contextlib.contextmanager
    def _deferring(
        self, step: Step, part: str, places: Sequence[Tensor] = (), fill: float = 0.0
    ) -> Iterator[None]:
        """Go on if the body fails on this rank alone; ``fill`` takes the places of its results.

        The body must not communicate: a rank that skips a collective leaves the others waiting.
        The exception is `_post`, whose `MatrixSums.finish` makes up for skipped ones.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, torch.AcceleratorError):
                raise  # the device is lost: each later call would fail and be logged in turn
            self.ballots.report_failure(f"step {step.orders.step}: {part}", error)
            for place in places:
                place.fill_(fill)

    # ---------------------------------------------------------------- plans and buffers

    def _piece(self, step: Step, place: Place) -> Piece:
        matrix, scale = self.parameters.matrices[place.matrix], self._scales[place.matrix]
        local = step.params[matrix.param]
        return Piece(matrix, place.region, scale, self.groups[local.param.group], local)

    def gather_sample(self, step: Step) -> Iterator[tuple[str, Tensor]]:
        """Gather the momentum to observe: name and whole matrix of each that this rank gets."""
        # Their memory is new and used once: there is nothing to bring back or to free.
        exchanges, self._sampled = self._sampled, []
        for exchange in exchanges:
            self.sent_bytes += exchange.sent_bytes
            for bucket in exchange.buckets:
                self._pack_momentum(step, bucket.outgoing)
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
        """The exchange of each set of ranks that shares matrices with this one.

        They follow from what all ranks know, and communicate nothing.

        Args:
            indices: Indices of the matrices to exchange.
            schedules: Schedules: the cost of a matrix is that of its Newton-Schulz steps.
            dtype: Dtype in which the matrices travel.
            returns: Whether owners send results back.
        """
        world, config, matrices = self.world, self.config, self.parameters.matrices
        pairs = zip(schedules, matrices, strict=True)
        jobs = assign(
            matrices,
            [float(s.num_steps * ns_step_flops(*matrix.shape)) for s, matrix in pairs],
            indices=indices,
            ownership=config.ownership,
            returns=returns,
        )
        exchanges = []
        for ranks, group in world.groups_by_ranks.items():
            plan = plan_exchange(
                matrices,
                jobs.get(ranks, ()),
                rank=world.rank,
                peers=ranks if group is None else dist.get_process_group_ranks(group),
                itemsize=dtype.itemsize,
                bucket_bytes=config.bucket_bytes,
            )
            exchanges.append(Exchange(plan, matrices, group=group, device=self.device, dtype=dtype))
        return exchanges

    def num_bounded(self) -> int:
        """Updates of this rank in the last step that the bound of the exact norm kept smaller."""
        counts = [((norms > 0) & (norms < least)).sum() for least, norms in self._norms]
        return sum(int(count.item()) for count in counts)
