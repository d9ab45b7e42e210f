"""The engine: momentum in, orthogonalized by its owners, scaled update out."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from amo_dist.config import NS_BACKENDS, MuonConfig
from amo_dist.distributed.agreement import gather_json
from amo_dist.distributed.exchange import Exchange
from amo_dist.distributed.groups import Given, Membership
from amo_dist.distributed.layout import flattened
from amo_dist.distributed.plan import Part, Task
from amo_dist.distributed.spans import span
from amo_dist.engine import adamw
from amo_dist.engine.batches import Batches
from amo_dist.engine.exchange_planning import plan_exchanges, tell_balance
from amo_dist.engine.gradients import Agreement, GradientCheck
from amo_dist.engine.orders import Orders
from amo_dist.engine.parameters import Parameters, describe_group, momentum_of
from amo_dist.engine.pieces import Cuts, Locals, as_matrix, cut
from amo_dist.engine.rounding import Rounding
from amo_dist.engine.rule import UpdateRule
from amo_dist.engine.updates import Updates
from amo_dist.engine.world import World
from amo_dist.kernels import choice
from amo_dist.kernels.devices import make_kernels
from amo_dist.kernels.elementwise import wide_dtype
from amo_dist.schedule.types import Schedule

Groups = Sequence[Mapping[str, Any]]
State = MutableMapping[Tensor, dict[str, Tensor]]


class Engine:
    """Runs steps; made once per optimizer, and anew where a checkpoint brings other settings.

    It is told a schedule for each matrix and which matrices to measure, and knows no phase.

    Args:
        parameters: Of this process.
        groups: Parameter groups of the optimizer, read at every step.
        state: Of the optimizer, by parameter.
        rule: What this optimizer does beside Newton-Schulz.
        config: Numerics and exchange.
        process_group: Of the user, for `Membership`.

    Raises:
        ValueError: The settings cannot run on the parameters' device, or the process group is not
            one for these parameters.
    """

    def __init__(
        self,
        parameters: Parameters,
        groups: Groups,
        state: State,
        rule: UpdateRule,
        config: MuonConfig,
        process_group: Given = None,
    ) -> None:
        self.parameters = parameters
        self.membership = Membership((entry.param for entry in parameters.entries), process_group)
        self.world: World | None = None
        self.check: GradientCheck | None = None
        self.exchanges: list[Exchange] = []
        self._groups, self._state, self._rule, self._config = groups, state, rule, config
        if config.max_team > 1:
            _check_rule_for_teams(rule, config.max_team)
        self.kernels = make_kernels(
            parameters.device,
            ns_dtype=getattr(torch, config.ns_dtype),
            ns_backend=config.ns_backend,
            cuda_graphs=config.cuda_graphs,
        )
        how = config.adamw_implementation
        if how == "auto":
            how = "fused" if self.kernels.is_asynchronous else "foreach"
        self._adamw = adamw.AdamW(parameters.entries, state, groups, how)
        self._batches = Batches(parameters, self.kernels)
        self._rounding = Rounding(parameters, config)
        self._updates = Updates(parameters, groups, state, rule, self.kernels, self._rounding)
        self._momenta: list[tuple[float, bool]] = []
        self._orders: Orders | None = None
        self._grads: Sequence[Tensor | None] = ()
        self._convolutions = parameters.convolutions
        self._local_params = Locals(self._convolutions)
        self._local_buffers = Locals(self._convolutions)
        self._params: Sequence[Tensor] = ()
        self._buffers: Sequence[Tensor] = ()
        self._cuts = Cuts(parameters)
        self._exchange_key: object = None
        self._wide_dtype = wide_dtype(getattr(torch, config.momentum_dtype))
        self._prepares = type(rule).prepare is not UpdateRule.prepare

    def is_over(self, groups: Groups, state: State) -> bool:
        """Whether it reads these very objects."""
        return groups is self._groups and state is self._state

    def make_state(self) -> None:
        """State for every parameter, zero, so that all ranks have the same keys."""
        for entry in self.parameters.entries:
            if entry.views:
                dtype = getattr(torch, self._config.momentum_dtype)
                own = self._rule.state(entry.param, entry.views[0].dim)
                state = {"momentum_buffer": torch.zeros_like(entry.param, dtype=dtype), **own}
            else:
                moments = torch.float32 if self._rounding.is_for(entry.param) else None
                state = adamw.make_state(entry.param, self._adamw.implementation, moments)
            state |= self._rounding.make_state(entry.param)
            for value in state.values():
                value.requires_grad_(False)
            self._state[entry.param] = state

    def connect(self, world: World) -> None:
        """Take the structure on which all ranks have agreed."""
        self.world = world
        self.check = GradientCheck(world, self.parameters, self._config, self.kernels)

    def agree(self, orders: Orders, intent: Sequence[str]) -> Agreement:
        """Agree on what a step is about to do and on its gradients; a collective over the world.

        Whether this rank plans an exchange is part of it: planning is a collective.

        Args:
            orders: Of the step.
            intent: Lines that must be alike on all ranks.

        Raises:
            As `GradientCheck.agree`.
        """
        assert self.world is not None
        assert self.check is not None
        plans = self._key(orders) != self._exchange_key
        # What is measured of a step that may be none would have to be forgotten, planning is a
        # collective that reads, and not every AdamW of PyTorch's leaves out a step by itself.
        goes_on = self.kernels.is_asynchronous and not plans and not orders.probes
        waits = not (goes_on and self._adamw.can_leave_out)
        # Elsewhere, as between stages of a pipeline, ranks have groups of their own.
        groups = self._groups if self.world.shares_all else []
        lines = [*intent, f"{'a new' if plans else 'the last'} exchange plan"]
        lines.append(f"kernels {self.chosen}")
        lines.append(f"{'waits' if waits else 'does not wait'} for the verdict")
        for index, group in enumerate(groups):
            lines.append(f"group {index}: {describe_group(group, self._rule.defaults)}")
        self._momenta = [momentum_of(group, self._config) for group in self._groups]
        momentum, _ = max(self._momenta)
        return self.check.agree(orders.step, "\n".join(lines), momentum, waits=waits)

    def run(self, orders: Orders, agreed: Agreement) -> None:
        """Update every parameter; a collective over the ranks that share parameters.

        What fails on this rank alone stops no other one: this rank sends what it has, or NaN in
        place of momentum, for which nobody writes an update, and all raise at their next agreement.

        Args:
            orders: As all ranks have agreed on them.
            agreed: What `agree` returned.
        """
        assert self.world is not None
        assert self.check is not None
        self._orders = orders
        self._plan_exchanges(orders)
        self._begin(orders, agreed)
        try:
            for index, exchange in enumerate(self.exchanges):
                meanwhile = self._step_adamw if index == 0 else None
                exchange.run(self._read, self._compute, self._write, meanwhile)
            if not self.exchanges:
                self._step_adamw()
            self._updates.finish(
                self.world, functools.partial(self._deferring, "finishing updates")
            )
        finally:
            # Gradients would live on, past the user's zero_grad().
            self._grads = ()
            self._updates.end()
        self.check.report_updates(self._batches.take_nonfinite(), agreed.bad)

    def _begin(self, orders: Orders, agreed: Agreement) -> None:
        """Take this rank's gradients into the momentum."""
        assert self.world is not None
        entries, state = self.parameters.entries, self._state
        self._params = self._local_params.take([entry.param for entry in entries])
        # Of a parameter without momentum, which nobody asks for, the parameter.
        self._buffers = self._local_buffers.take(
            [state[e.param]["momentum_buffer"] if e.views else e.param for e in entries]
        )
        grads = list(agreed.grads)
        self.kernels.begin_step(agreed.bad)
        with span("amo::momentum"), self._deferring("updating momentum"):
            for index in self._convolutions:
                if (grad := grads[index]) is not None:
                    grads[index] = flattened(grad.contiguous())
            moving = [i for i, entry in enumerate(entries) if entry.views and grads[i] is not None]
            for (momentum, _), some in self._by_momentum(moving).items():
                buffers = [self._buffers[moving[place]] for place in some]
                found = [grads[moving[place]] for place in some]
                self.kernels.update_momentum(buffers, found, momentum)  # type: ignore[arg-type]
        self._rounding.begin(orders.step, self.world.rank, state)
        self._grads = grads
        self._batches.begin_step(orders.schedules)
        self._updates.begin(self._params, grads, agreed.bad)

    def _read(self, parts: Sequence[Part], places: Sequence[Tensor]) -> None:
        """Write the momentum to orthogonalize, NaN where that fails."""
        with self._deferring("reading momentum"):
            self._fill(parts, places)
            return
        for place in places:
            place.fill_(math.nan)

    def _write(self, parts: Sequence[Part], values: Sequence[Tensor]) -> None:
        with self._deferring("updating matrices"):
            self._updates.take(parts, values)

    def _fill(self, parts: Sequence[Part], places: Sequence[Tensor]) -> None:
        """Write the momentum to orthogonalize; zeros where a parameter has no gradient.

        What travels must not depend on which gradients exist: sizes were agreed before.
        """
        buffers, grads, found, held = [], [], [], []
        matrices, of_parts = self.parameters.matrices, self._cuts.take(self._buffers, parts)
        for part, place, buffer in zip(parts, places, of_parts, strict=True):
            tensor = matrices[part.matrix].tensor
            grad = self._grads[tensor]
            if grad is None:
                place.zero_()
                continue
            buffers.append(buffer)
            is_whole = buffer is self._buffers[tensor]
            grads.append(grad if is_whole else cut(grad, part.piece.source))
            found.append(as_matrix(place))
            held.append(part)
        if not self._prepares:
            self._momentum(held, buffers, grads, found)
            return
        # Before anything is rounded to travel.
        wide = [torch.empty_like(each, dtype=self._wide_dtype) for each in found]
        self._momentum(held, buffers, grads, wide)
        for part, place, momentum in zip(held, found, wide, strict=True):
            place.copy_(self._rule.prepare(momentum, self._updates.piece(part)))

    def _momentum(
        self, parts: list[Part], buffers: list[Tensor], grads: list[Tensor], out: list[Tensor]
    ) -> None:
        tensors = [self.parameters.matrices[part.matrix].tensor for part in parts]
        for (momentum, is_nesterov), some in self._by_momentum(tensors).items():
            read, write = [buffers[place] for place in some], [out[place] for place in some]
            if is_nesterov:
                found = [grads[place] for place in some]
                self.kernels.nesterov(read, found, momentum, out=write)
            else:
                torch._foreach_copy_(write, read)

    def _by_momentum(self, tensors: Iterable[int]) -> dict[tuple[float, bool], list[int]]:
        """Places in a list of parameters, by the momentum of their groups, and whether Nesterov's.

        Args:
            tensors: Indices of parameters.
        """
        entries = self.parameters.entries
        places: dict[tuple[float, bool], list[int]] = defaultdict(list)
        for place, tensor in enumerate(tensors):
            places[self._momenta[entries[tensor].group]].append(place)
        return places

    def _compute(self, task: Task, matrices: Sequence[Tensor]) -> list[Tensor]:
        """Orthogonalize the owned matrices of a task, and measure those that are asked for.

        Where that fails the results are zeros: this rank goes on to send them. Of shared matrices
        nothing can be sent: the team waits for sums, and the error is raised here.
        """
        assert self.world is not None
        known, team = self.parameters.matrices, self.world.teams[task.team] if task.team else None
        with span("amo::orthogonalize"):
            try:
                results = self._batches.run(task.owned, matrices, team)
            except Exception as error:
                if team is not None:
                    raise
                self._tell(f"orthogonalizing {known[task.owned[0]].name}", error)
                return [matrix.zero_().to(self.kernels.ns_dtype) for matrix in matrices]
        for index, matrix, result in zip(task.owned, matrices, results, strict=True):
            if index in task.reported:
                name = known[index].name
                with self._deferring(f"measuring {name}"):
                    self._measure(name, matrix, result)
        return results

    def _measure(self, name: str, matrix: Tensor, result: Tensor) -> None:
        assert self._orders is not None
        for probe in self._orders.probes:
            if name in probe.names:
                probe.measure(name, matrix, result)

    @contextlib.contextmanager
    def _deferring(self, what: str) -> Iterator[None]:
        """Go on where the body, which must not communicate, fails here alone: others wait."""
        try:
            yield
        except Exception as error:
            self._tell(what, error)

    def _tell(self, what: str, error: Exception) -> None:
        assert self._orders is not None
        assert self.check is not None
        self.check.report_failure(f"step {self._orders.step}: {what}", error)

    def _step_adamw(self) -> None:
        with span("amo::adamw"), self._deferring("AdamW"), contextlib.ExitStack() as stack:
            params = self._widened(stack) if self._rounding.is_wanted else self._params
            self._adamw.step(params, self._grads, self.kernels.bad)

    def _widened(self, stack: contextlib.ExitStack) -> list[Tensor]:
        """The parameters, those of AdamW in float32 where they must be; until the stack closes."""
        params = list(self._params)
        for index, entry in enumerate(self.parameters.entries):
            has_gradient = self._grads[index] is not None
            if not entry.views and has_gradient and self._rounding.is_for(params[index]):
                wide = self._rounding.widened(index, params[index])
                params[index] = stack.enter_context(wide)
        return params

    # ---------------------------------------------------------------- exchange

    def _key(self, orders: Orders) -> object:
        """Exchanges are kept until the wide matrices change, or schedules settle.

        Who shares a matrix decides its bits. So teams follow from the step alone, and a run that
        goes on from a checkpoint finds the same; and what is measured belongs to one rank.
        """
        if self._config.max_team == 1:
            return orders.wide, orders.is_settled
        return orders.wide, orders.is_settled, orders.measured, orders.num_steps

    def _plan_exchanges(self, orders: Orders) -> None:
        """Deal matrices anew where that is due; a collective over the world, which may wait."""
        assert self.world is not None
        assert self.check is not None
        if self._key(orders) == self._exchange_key:
            return
        if self._exchange_key is None:
            tell_balance(self.parameters, orders.schedules, world=self.world, config=self._config)
        # First, to free their buffers; and after a failure all plan anew.
        self.exchanges, self._exchange_key = [], ()
        if orders.is_settled and self._config.ns_backend == "auto":
            self._choose_kernels(orders.schedules)
        planned = plan_exchanges(
            self.parameters,
            orders.schedules,
            orders.wide,
            orders.measured,
            world=self.world,
            membership=self.membership,
            config=self._config,
            kernels=self.kernels,
        )
        with self._deferring("allocating buffers"):
            for exchange in planned:
                exchange.allocate()
        self.check.agree_on_text(f"the exchange plan of step {orders.step}")
        self.exchanges, self._exchange_key = planned, self._key(orders)

    def _choose_kernels(self, schedules: Sequence[Schedule]) -> None:
        """Measure what runs the locked schedules fastest, where nothing is chosen yet."""
        assert self.world is not None
        works = [work for work in self._batches.works(schedules) if work.key not in self.chosen]
        found: choice.Measured = {}
        with self._deferring("measuring kernels"):
            found = choice.measure(self.kernels, works, self.parameters.device)
        chosen = choice.choose(gather_json(found, self.world.group))
        if chosen:
            self.chosen.update(chosen)
            self._batches.forget()

    @property
    def chosen(self) -> dict[str, str]:
        """Which kernels were found to be fastest, by `kernels.interface.backend_key`."""
        return self.kernels.chosen

    def take_chosen(self, chosen: Mapping[str, str]) -> None:
        """Take the choice of a checkpoint, as far as these kernels run here."""
        known = {key: name for key, name in chosen.items() if name in self.kernels.candidates}
        self.kernels.chosen = known if self._config.ns_backend == "auto" else {}

    def sent_bytes_by_peer(self) -> dict[int, int]:
        """Bytes of matrices that this rank sent in the last step, by global rank of the peer."""
        return dict(sum((exchange.sent_bytes for exchange in self.exchanges), Counter[int]()))

    def metrics(self, schedules: Sequence[Schedule]) -> dict[str, float]:
        """What this rank sent in the last step, and how many matrices each backend runs.

        Args:
            schedules: Of each matrix.
        """
        backends = Counter(
            self.kernels.backend_name(matrix.shape, schedule.coefficients)
            for matrix, schedule in zip(self.parameters.matrices, schedules, strict=True)
        )
        counts = {
            f"newton_schulz/{name}_matrices": float(backends[name]) for name in NS_BACKENDS[1:]
        }
        num_bytes = sum(exchange.sent_bytes.total() for exchange in self.exchanges)
        elements = sum(exchange.sent_elements.total() for exchange in self.exchanges)
        sent = {"exchange/sent_bytes": float(num_bytes), "exchange/sent_elements": float(elements)}
        return {**counts, **sent}


def _check_rule_for_teams(rule: UpdateRule, max_team: int) -> None:
    """Refuse teams where a rule works on pieces of matrices: slabs cut them otherwise."""
    own = [
        name
        for name in ("prepare", "finish", "sums")
        if getattr(type(rule), name) is not getattr(UpdateRule, name)
    ]
    if own:
        raise ValueError(
            f"max_team: found {max_team} with {type(rule).__name__}, which has {', '.join(own)} of "
            "its own, expected 1"
        )
