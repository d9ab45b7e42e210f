"""One step: momentum in, orthogonalized by its owners, scaled update out."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from amo_dist.config import MuonConfig
from amo_dist.distributed.agreement import check_alike_by_ranks
from amo_dist.distributed.exchange import BUCKETS_IN_FLIGHT, Exchange, Lane
from amo_dist.distributed.groups import GroupLike, Membership
from amo_dist.distributed.layout import as_matrix, cut, flattened
from amo_dist.distributed.ownership import assign
from amo_dist.distributed.plan import Part, plan_exchange
from amo_dist.distributed.teams import TeamGroup
from amo_dist.engine.adamw import adamw_step, make_state
from amo_dist.engine.parameters import (
    Locals,
    Parameters,
    describe_group,
    learning_rate,
    momentum_of,
)
from amo_dist.engine.rounding import Rounding
from amo_dist.engine.rule import UpdateRule
from amo_dist.engine.staging import bring_down, device_of_matrices, on_host, send_up
from amo_dist.engine.sums import Sums
from amo_dist.engine.verdict import Agreement, Verdict
from amo_dist.engine.world import World
from amo_dist.kernels.elementwise import (
    apply_update,
    drop_nonfinite,
    nesterov,
    update_momentum,
    wide_dtype,
)
from amo_dist.kernels.newton_schulz import (
    EXACT_NORM_BOUND,
    batch_size,
    newton_schulz,
    scale_to_exact_norm,
)
from amo_dist.kernels.quack import library
from amo_dist.kernels.team import drop_nonfinite_slabs, orthogonalize_slabs
from amo_dist.schedule.budget import ns_step_flops
from amo_dist.schedule.types import Schedule

logger = logging.getLogger(__name__)

Groups = Sequence[Mapping[str, Any]]
State = MutableMapping[Tensor, dict[str, Tensor]]


@dataclasses.dataclass(frozen=True, slots=True)
class Probe:
    """A measurement of some matrices, made once by a rank that has each of them whole."""

    names: frozenset[str]
    """The matrices to measure."""
    measure: Callable[[str, Tensor, Callable[[], Tensor]], None]
    """Called with a matrix's name, its momentum ``(m, n)`` in float32 at least, and what computes
    the result of Newton-Schulz for it, ``(m, n)``."""
    finish: Callable[[int], None]
    """Called after the step with its number, on all ranks, also where it was skipped and nothing
    was measured: brings together what ranks have found; a collective over the world."""


@dataclasses.dataclass(frozen=True, slots=True)
class Orders:
    """What the controller asks of one step."""

    step: int
    """Optimizer step, counted from 1."""
    schedules: Sequence[Schedule]
    """Of each matrix of this process; the same object for as long as none changes."""
    deal: Hashable
    """Matrices are dealt to owners anew when this changes."""
    intent: Sequence[str]
    """Lines that are alike on all ranks where they are about to do the same."""
    turn: int = 0
    """Counts residuals: the ranks that may own a matrix measure in turn."""
    probes: tuple[Probe, ...] = ()
    """All measurements."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Pieces:
    """Pieces of matrices on this rank, as parts of local tensors.

    Attributes:
        parts: Which.
        places: Where their momentum goes to or their results lie, ``(m, n)`` each.
        momenta: Of the momentum buffers.
        params: Of the parameters.
        by_group: Positions in these lists, by parameter group.
    """

    parts: Sequence[Part]
    places: list[Tensor]
    momenta: list[Tensor]
    params: list[Tensor]
    by_group: dict[int, list[int]]


@dataclasses.dataclass(frozen=True, slots=True)
class _Batch:
    """Matrices of one shape and schedule, or slabs of them, that are orthogonalized together."""

    wholes: list[Tensor]
    names: tuple[str, ...]
    shape: tuple[int, int]
    """Of each whole matrix."""
    schedule: Schedule
    team: TeamGroup | None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Laid:
    """A lane with all views of local tensors and batches that a step needs."""

    exchange: Exchange
    lane: Lane
    batches: list[_Batch]
    kept: _Pieces
    sent: _Pieces
    returned: _Pieces


class Engine:
    """Runs steps; made once per optimizer, and anew where a checkpoint is loaded.

    It is told a schedule for each matrix and which matrices to measure, and knows no phase.

    Args:
        parameters: Of this process.
        groups: Parameter groups of the optimizer, read at every step.
        state: Of the optimizer, by parameter.
        rule: What this optimizer does beside Newton-Schulz.
        config: Numerics and exchange.
        process_group: Of the user, for `Membership`.

    Raises:
        ValueError: The settings cannot run with this rule, or the process group is not one for
            these parameters.
    """

    # Of `world` and `verdict`, once `connect` has been called.
    _world: World
    _verdict: Verdict

    def __init__(
        self,
        parameters: Parameters,
        groups: Groups,
        state: State,
        rule: UpdateRule,
        config: MuonConfig,
        process_group: GroupLike = None,
    ) -> None:
        self.parameters, self.config = parameters, config
        self.membership = Membership((entry.param for entry in parameters.entries), process_group)
        self.world: World | None = None
        self.verdict: Verdict | None = None
        self.groups, self.state, self.rule = groups, state, rule
        self._dtype: torch.dtype = getattr(torch, config.ns_dtype)
        self._wire: torch.dtype = getattr(torch, config.wire)
        self._is_far = parameters.device.type != "cpu"
        self._compiles = config.compile_updates and parameters.device.type == "cuda"
        self.device = device_of_matrices(parameters.params, parameters.device)
        """Where matrices are gathered and orthogonalized."""
        self._library = library(config.ns_kernels, self.device, self._dtype)
        self._is_staged = self.device != parameters.device
        if config.max_team > 1 and (rule.prepares or rule.finishes):
            raise ValueError(
                f"max_team: found {config.max_team} with {type(rule).__name__}, which works on "
                "pieces of matrices that slabs cut otherwise, expected 1"
            )
        self._local = local = Locals(parameters, state)
        self._rounding = Rounding(parameters, local, config)
        self._sums = Sums(parameters, local, groups, rule, self.device)
        # Of outputs and inputs.
        dims = (parameters.entries[matrix.tensor].views[0].dim for matrix in parameters.matrices)
        shapes = [
            matrix.shape if dim == 0 else matrix.shape[::-1]
            for matrix, dim in zip(parameters.matrices, dims, strict=True)
        ]
        self._scales = [rule.scale(shape) for shape in shapes]
        self.sizes = [UpdateRule.scale(rule, shape) for shape in shapes]
        """Of each matrix, what its update is multiplied by beside the learning rate; rules that
        scale updates themselves give them the same norm."""
        self._exchanges: list[Exchange] = []
        self._deal: Hashable = None
        self.teams: dict[tuple[int, ...], TeamGroup] = {}
        """Teams of this rank by their ranks; planning adds what it needs."""
        self._laid: list[_Laid] = []
        self._laid_for: Sequence[Schedule] = ()
        self._sent: list[Mapping[tuple[int, int], int]] = []
        """Of each exchange of the last step, elements sent by peer and bytes of one."""
        # Of the step at hand.
        self._grads: Sequence[Tensor | None] = ()
        self._bad: Tensor | None = None
        self._momenta: list[tuple[float, bool]] = []
        self._outcomes: list[tuple[tuple[str, ...], Tensor]] = []
        """Names of matrices, and which of their results were NaN or inf."""
        self._norms: list[tuple[float, Tensor]] = []
        """Norms of results of the last step, and the least that the exact norm scales in full."""

    def make_state(self) -> None:
        """State for every parameter, zero, so that all ranks have the same keys."""
        for entry in self.parameters.entries:
            param = entry.param
            if entry.views:
                own = self.rule.state(param, entry.views[0].dim)
                dtype = torch.promote_types(param.dtype, torch.float32)
                state = {"momentum_buffer": torch.zeros_like(param, dtype=dtype), **own}
            else:
                state = make_state(param, torch.float32 if self._rounding.is_for(param) else None)
            state |= self._rounding.make_state(param)
            for value in state.values():
                value.requires_grad_(False)
            self.state[param] = state

    def connect(
        self, world: World, teams: Mapping[tuple[int, ...], TeamGroup] = MappingProxyType({})
    ) -> None:
        """Take the structure on which all ranks have agreed.

        Args:
            world: The structure.
            teams: Teams of an engine before this one.
        """
        self.teams.update(teams)
        self.world = self._world = world
        self.verdict = self._verdict = Verdict(world, self.parameters, self.config)

    # ---------------------------------------------------------------- one step

    def agree(self, orders: Orders) -> Agreement:
        """Agree on what a step is about to do and on its gradients; a collective over the world.

        Raises:
            As `Verdict.agree`.
        """
        deals = orders.deal != self._deal
        # What is measured of a step that may be none would have to be forgotten, and dealing is a
        # collective that reads.
        waits = not self._is_far or deals or bool(orders.probes)
        # Elsewhere, as between stages of a pipeline, ranks have groups of their own.
        groups = self.groups if self._world.shares_all else []
        lines = [*orders.intent, f"{'a new' if deals else 'the last'} exchange plan"]
        lines.append(f"{'waits' if waits else 'does not wait'} for the verdict")
        # A rank that measured alone, as with a tracker of its own, would leave the others waiting.
        lines += [
            f"measures {len(probe.names)} matrices: {_digest(probe)}" for probe in orders.probes
        ]
        for index, group in enumerate(groups):
            lines.append(f"group {index}: {describe_group(group, self.rule.defaults)}")
        self._momenta = [momentum_of(group, self.config) for group in self.groups]
        momentum, _ = max(self._momenta)
        return self._verdict.agree(orders.step, "\n".join(lines), momentum, waits=waits)

    def run(self, orders: Orders, agreed: Agreement) -> None:
        """Update every parameter; a collective over the ranks that share parameters.

        What fails on this rank alone stops no other one: this rank sends what it has, or NaN in
        place of momentum, for which nobody writes an update, and all raise at their next agreement.

        Args:
            orders: As all ranks have agreed on them.
            agreed: What `agree` returned.
        """
        self._rounding.step, self._bad = orders.step, agreed.bad
        deals = orders.deal != self._deal
        measuring = self._plan(orders) if deals or orders.probes else []
        self._sent = [exchange.sent for exchange in (*self._exchanges, *measuring)]
        self._outcomes, self._norms = [], []
        try:
            # All views and batches, where local tensors have moved or schedules have changed.
            has_moved = self._local.refresh()
            self._begin(agreed.grads)
            if has_moved or not self._laid or self._laid_for is not orders.schedules:
                self._laid_for = orders.schedules
                self._laid = [
                    self._lay(exchange, lane, orders.schedules)
                    for exchange in self._exchanges
                    for lane in exchange.lanes
                ]
            if measuring:
                self._measure(orders, measuring)
            self._pipeline()
            for number in range(self._sums.num_rounds):
                with record_function("amo::sums"):
                    totals = self._sums.add_up(number, self._world)
                with self._deferring("finishing updates"):
                    self._write(*self._sums.go_on(totals))
        except BaseException:
            # What is still under way must not arrive in the buffers of a later step.
            self._deal, self._exchanges, self._laid = None, [], []
            raise
        finally:
            # Gradients would live on, past the user's zero_grad().
            self._grads = ()
        self._verdict.report_updates(self._outcomes, agreed.bad)

    def _begin(self, grads: Sequence[Tensor | None]) -> None:
        """Take this rank's gradients into the momentum."""
        entries = self.parameters.entries
        self._grads = found = list(grads)
        if self.rule.prepares or self.rule.finishes:
            self._sums.begin(self._bad)
        with record_function("amo::momentum"), self._deferring("updating momentum"):
            for index in self.parameters.convolutions:
                if (grad := found[index]) is not None:
                    found[index] = flattened(grad.contiguous())
            moving: dict[float, list[int]] = defaultdict(list)
            for index, entry in enumerate(entries):
                if entry.views and found[index] is not None:
                    moving[self._momenta[entry.group][0]].append(index)
            for momentum, some in moving.items():
                buffers = [self._local.state[index]["momentum_buffer"] for index in some]
                of_some: Any = [found[index] for index in some]
                update_momentum(buffers, of_some, momentum, bad=self._bad, compiles=self._compiles)

    def _pipeline(self) -> None:
        """Run buckets to their end, some on their way while others are computed.

        AdamW and the buckets that need no exchange run while the first gathers are under way.
        """
        local, moving = list[Iterator[None]](), list[Iterator[None]]()
        for laid in self._laid:
            (moving if laid.lane.moves else local).append(self._bucket(laid))
        for bucket in moving[:BUCKETS_IN_FLIGHT]:
            next(bucket)
        with record_function("amo::adamw"), self._deferring("AdamW"):
            adamw_step(
                self.parameters, self._local, self.groups, self._rounding, self._grads, self._bad
            )
        for bucket in local:
            for _ in bucket:
                pass
        # One is computed, one gathered, and the results of the one before are taken.
        stages = itertools.zip_longest(moving, moving[BUCKETS_IN_FLIGHT:], [None, *moving])
        for each in itertools.chain(*stages):
            if each is not None:
                next(each, None)

    def _bucket(self, laid: _Laid) -> Iterator[None]:
        """One bucket, from momentum to updated parameters."""
        lane, start = laid.lane, laid.exchange.start
        with record_function("amo::gather"):
            self._read(laid.sent)
            gather = start(lane.sent, lane.arriving) if lane.moves else None
        yield
        with record_function("amo::gather"):
            self._read(laid.kept)
            if gather is not None:
                gather.wait()
                _copy(lane.arriving.views, lane.arrivals)
        with record_function("amo::orthogonalize"):
            for batch in laid.batches:
                self._orthogonalize(batch)
        with record_function("amo::scatter"):
            if gather is not None:
                _copy(lane.departures, lane.leaving.views)
                deliver = start(lane.leaving, lane.returned)
        self._update(laid.kept)
        yield
        if gather is not None:
            with record_function("amo::scatter"):
                deliver.wait()
            self._update(laid.returned)

    def _read(self, pieces: _Pieces) -> None:
        """Write the momentum to orthogonalize into its places, NaN where that fails.

        Zeros where a parameter has no gradient: what travels must not depend on which exist, for
        sizes were agreed before.
        """
        rule, matrices = self.rule, self.parameters.matrices
        with self._deferring("reading momentum"):
            places = on_host(pieces.places) if self._is_staged else pieces.places
            for group, positions in pieces.by_group.items():
                momentum, is_nesterov = self._momenta[group]
                momenta, grads, out, parts = [], [], [], []
                for position in positions:
                    part, place = pieces.parts[position], places[position]
                    grad = self._grads[matrices[part.matrix].tensor]
                    if grad is None:
                        place.zero_()
                        continue
                    momenta.append(pieces.momenta[position])
                    grads.append(cut(grad, part.piece.source))
                    out.append(place)
                    parts.append(part)
                found = out
                if rule.prepares:  # before anything is rounded to travel
                    dtypes = (wide_dtype(each.dtype) for each in momenta)
                    pairs = zip(out, dtypes, strict=True)
                    found = [torch.empty_like(each, dtype=dtype) for each, dtype in pairs]
                if is_nesterov:
                    nesterov(momenta, grads, momentum, out=found, compiles=self._compiles)
                else:
                    _copy(momenta, found)
                if rule.prepares:
                    for part, place, each in zip(parts, out, found, strict=True):
                        place.copy_(rule.prepare(each, self._sums.piece(part)))
            if self._is_staged:
                send_up(places, pieces.places)
            return
        for place in pieces.places:
            place.fill_(math.nan)

    def _orthogonalize(self, batch: _Batch) -> None:
        """Orthogonalize matrices in place; one whose result is NaN or inf gives zeros.

        Where that fails the results are zeros: this rank goes on to send them. Of shared matrices
        nothing can be sent: the team waits for sums, and the error is raised here.
        """
        team = batch.team
        size = len(batch.wholes) if team else batch_size(batch.shape, self._dtype, self.device)
        try:
            for start in range(0, len(batch.wholes), size):
                names = batch.names[start : start + size]
                wholes = batch.wholes[start : start + size]
                x = torch.stack(wholes) if len(wholes) > 1 else wholes[0]
                found = self._newton_schulz(x, batch.shape, batch.schedule, team)
                found = found if found.dim() == 3 else found.unsqueeze(0)
                bad = drop_nonfinite_slabs(found, team) if team else drop_nonfinite(found)
                self._outcomes.append((names, bad))
                if self.config.update_norm == "exact":
                    norms = scale_to_exact_norm(found, batch.shape, team.add if team else None)
                    self._norms.append((math.sqrt(min(batch.shape)) / EXACT_NORM_BOUND, norms))
                torch._foreach_copy_(wholes, found.unbind())
        except Exception as error:
            if team is not None:
                raise
            self._tell(f"orthogonalizing {batch.names[0]}", error)
            for whole in batch.wholes:
                whole.zero_()

    def _newton_schulz(
        self, x: Tensor, shape: tuple[int, int], schedule: Schedule, team: TeamGroup | None = None
    ) -> Tensor:
        """Of matrices ``(m, n)`` or ``(b, m, n)``, or of slabs of them."""
        steps = schedule.coefficients
        how: dict[str, Any] = {
            "norm_scale": schedule.norm_scale,
            "preconditioner": schedule.preconditioner,
            "dtype": self._dtype,
        }
        if team is None:
            return newton_schulz(x, steps, library=self._library, **how)
        return orthogonalize_slabs(x, steps, team=team, is_tall=shape[0] > shape[1], **how)

    def _update(self, pieces: _Pieces) -> None:
        """Take results into parameters, at once or when their sums are known."""
        with self._deferring("updating matrices"):
            places = bring_down(pieces.places) if self._is_staged else pieces.places
            if not self.rule.finishes:
                self._write(pieces.parts, places, pieces.params)
                return
            found = zip(pieces.parts, places, strict=True)
            some = [each for each in found if self._grads[self._tensor(each[0])] is not None]
            self._write(*self._sums.take(some))

    def _tensor(self, part: Part) -> int:
        return self.parameters.matrices[part.matrix].tensor

    def _write(
        self, parts: Sequence[Part], updates: Sequence[Tensor], params: Sequence[Tensor] = ()
    ) -> None:
        """Decay pieces of parameters, and subtract their scaled updates.

        Args:
            parts: Which pieces; those without a gradient stay as they are.
            updates: Of each.
            params: Views of them, where they are known.
        """
        matrices, entries = self.parameters.matrices, self.parameters.entries
        by_group: dict[int, list[int]] = defaultdict(list)
        for position, part in enumerate(parts):
            tensor = matrices[part.matrix].tensor
            if self._grads[tensor] is not None:
                by_group[entries[tensor].group].append(position)
        if not params:
            params = [
                cut(self._local.params[self._tensor(part)], part.piece.source) for part in parts
            ]
        with record_function("amo::update"):
            for index, positions in by_group.items():
                group = self.groups[index]
                # What is widened one by one: float32 copies of all would be a second model.
                for some in [[i] for i in positions] if self._rounding.is_wanted else [positions]:
                    with contextlib.ExitStack() as stack:
                        targets = [params[i] for i in some]
                        if self._rounding.is_wanted:
                            tensor, box = self._tensor(parts[some[0]]), parts[some[0]].piece.source
                            wide = self._rounding.widened(tensor, targets[0], box)
                            targets = [stack.enter_context(wide)]
                        apply_update(
                            targets,
                            [updates[i] for i in some],
                            lr=learning_rate(group),
                            weight_decay=float(group["weight_decay"]),
                            scale=[self._scales[parts[i].matrix] for i in some],
                            cautious=self.config.cautious_decay,
                            bad=self._bad,
                            compiles=self._compiles,
                        )

    @contextlib.contextmanager
    def _deferring(self, what: str) -> Iterator[None]:
        """Go on where the body, which must not communicate, fails here alone: others wait."""
        try:
            yield
        except Exception as error:
            self._tell(what, error)

    def _tell(self, what: str, error: Exception) -> None:
        if isinstance(error, torch.AcceleratorError):
            raise error  # the device is lost: each later call would fail and be logged in turn
        self._verdict.report_failure(f"step {self._rounding.step}: {what}", error)

    # ---------------------------------------------------------------- exchange

    def _plan(self, orders: Orders) -> list[Exchange]:
        """Deal matrices anew where that is due; a collective over the world, which may wait.

        Returns:
            Exchanges of the matrices that are measured, made for this step alone: what trains
            knows nothing of them. They travel in the dtype of momentum.
        """
        matrices, planned = self.parameters.matrices, self._exchanges
        new, measuring = list[Exchange](), list[Exchange]()
        if orders.deal != self._deal:
            # First, to free their buffers; and after a failure all plan anew.
            self._exchanges, self._laid, self._deal = [], [], None
            planned = new = self._exchanges_of(range(len(matrices)), orders, self._wire)
        if orders.probes:
            names = frozenset[str]().union(*(probe.names for probe in orders.probes))
            some = [i for i, matrix in enumerate(matrices) if matrix.name in names]
            measuring = self._exchanges_of(some, orders, torch.float32, measures=True)
        with self._deferring("allocating buffers"):
            for exchange in (*new, *measuring):
                exchange.allocate()
        self._verdict.agree_on_text(f"the exchange plan of step {orders.step}")
        self._exchanges, self._deal = planned, orders.deal
        return measuring

    def _exchanges_of(
        self, some: Sequence[int], orders: Orders, dtype: torch.dtype, *, measures: bool = False
    ) -> list[Exchange]:
        """One exchange for each set of ranks that shares some of these matrices with this one.

        Deals them to owners; a collective over the world.

        Args:
            some: Indices of matrices.
            orders: Have the schedules: the cost of a matrix is that of its Newton-Schulz steps.
            dtype: In which they travel.
            measures: Whether one rank gets each of them whole, and nothing goes back.

        Raises:
            RankMismatchError: On every rank, where ranks of a set plan differently.
        """
        world, config, matrices = self._world, self.config, self.parameters.matrices
        chosen = [matrices[index] for index in some]
        costs = [
            float(orders.schedules[index].num_steps * ns_step_flops(*matrices[index].shape))
            for index in some
        ]
        max_team = 1 if measures else config.max_team
        jobs = assign(
            chosen,
            costs,
            ownership=config.ownership,
            max_team=max_team,
            itemsize=self._dtype.itemsize,
            turn=orders.turn if measures else 0,
        )
        if measures:
            jobs = tuple(dataclasses.replace(j, matrix=some[j.matrix], targets=()) for j in jobs)
        if max_team > 1:
            own = {job.team for job in jobs if job.team and job.owner == world.rank}
            made = self.membership.groups(own - self.teams.keys(), world.group)
            self.teams.update({ranks: TeamGroup(group) for ranks, group in made.items() if group})
        exchanges: list[Exchange] = []
        digests: dict[tuple[int, ...], str] = {}
        for ranks, group in world.groups_by_ranks.items():
            here = [job for job in jobs if tuple(sorted(matrices[job.matrix].ranks)) == ranks]
            plan = plan_exchange(
                matrices,
                here,
                rank=world.rank,
                peers=ranks if group is None else dist.get_process_group_ranks(group),
                itemsize=dtype.itemsize,
                bucket_bytes=config.bucket_bytes,
            )
            digests[ranks] = plan.digest
            if here:
                exchanges.append(Exchange(plan, group=group, device=self.device, dtype=dtype))
        check_alike_by_ranks("exchange plan", digests, world.group)
        return exchanges

    def _lay(self, exchange: Exchange, lane: Lane, schedules: Sequence[Schedule]) -> _Laid:
        matrices = self.parameters.matrices
        # By whole shapes: slabs may be alike on one member of a team alone.
        alike: dict[Any, list[int]] = defaultdict(list)
        for position, job in enumerate(lane.jobs):
            alike[job.team, matrices[job.matrix].shape, schedules[job.matrix]].append(position)
        batches = [
            _Batch(
                [lane.wholes[position] for position in positions],
                tuple(matrices[lane.jobs[position].matrix].name for position in positions),
                shape,
                schedule,
                self.teams[team] if team else None,
            )
            for (team, shape, schedule), positions in alike.items()
        ]
        kept, sent, returned = (
            self._pieces(parts, places)
            for parts, places in (
                (lane.kept, lane.kept_views),
                (lane.sent.parts, lane.sent.views),
                (lane.returned.parts, lane.returned.views),
            )
        )
        return _Laid(exchange, lane, batches, kept, sent, returned)

    def _pieces(self, parts: Sequence[Part], places: Sequence[Tensor]) -> _Pieces:
        params, momenta = list[Tensor](), list[Tensor]()
        by_group: dict[int, list[int]] = defaultdict(list)
        for position, part in enumerate(parts):
            tensor, box = self._tensor(part), part.piece.source
            by_group[self.parameters.entries[tensor].group].append(position)
            params.append(cut(self._local.params[tensor], box))
            momenta.append(cut(self._local.state[tensor]["momentum_buffer"], box))
        return _Pieces(parts, list(map(as_matrix, places)), momenta, params, by_group)

    # ---------------------------------------------------------------- measurements

    def _measure(self, orders: Orders, exchanges: Sequence[Exchange]) -> None:
        """Gather the matrices that are measured, and measure each where it is whole."""
        for exchange in exchanges:
            for lane in exchange.lanes:
                laid = self._lay(exchange, lane, orders.schedules)
                self._read(laid.sent)
                self._read(laid.kept)
                if lane.moves:
                    exchange.start(lane.sent, lane.arriving).wait()
                    _copy(lane.arriving.views, lane.arrivals)
                for job, whole in zip(lane.jobs, lane.wholes, strict=True):
                    name = self.parameters.matrices[job.matrix].name
                    with self._deferring(f"measuring {name}"):
                        self._probe(orders, job.matrix, name, whole)

    def _probe(self, orders: Orders, index: int, name: str, momentum: Tensor) -> None:
        """Measure one whole matrix."""
        shape, schedule = self.parameters.matrices[index].shape, orders.schedules[index]

        def result() -> Tensor:
            return self._newton_schulz(momentum.to(self._wire), shape, schedule)

        for probe in orders.probes:
            if name in probe.names:
                probe.measure(name, momentum, result)

    def sent_bytes_by_peer(self) -> dict[int, int]:
        """Bytes of matrices that this rank sent in the last step, by global rank of the peer."""
        found = Counter[int]()
        for sent in self._sent:
            for (peer, itemsize), number in sent.items():
                found[peer] += number * itemsize
        return dict(found)

    def metrics(self) -> dict[str, float]:
        """Traffic and bounded updates of this rank in the last step; waits for the device."""
        bounded = sum(
            int(((norms > 0) & (norms < least)).sum().item()) for least, norms in self._norms
        )
        return {
            "newton_schulz/bounded": float(bounded),
            "exchange/sent_bytes": float(sum(self.sent_bytes_by_peer().values())),
            "exchange/sent_elements": float(sum(sum(sent.values()) for sent in self._sent)),
        }


def _digest(probe: Probe) -> str:
    """A short text that is alike on ranks whose probe measures the same matrices."""
    return hashlib.sha256("\n".join(sorted(probe.names)).encode()).hexdigest()[:16]


def _copy(sources: list[Tensor], places: list[Tensor]) -> None:
    """Copy each tensor to its place, if there are any."""
    if places:
        torch._foreach_copy_(places, sources)
