"""The engine: momentum in, orthogonalized by its owners, scaled update out."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from amo_dist.config import MuonConfig
from amo_dist.distributed.exchange import Exchange
from amo_dist.distributed.plan import Part, Task
from amo_dist.distributed.spans import span
from amo_dist.engine import adamw
from amo_dist.engine.batches import Batches
from amo_dist.engine.exchange_planning import plan_exchanges
from amo_dist.engine.gradients import Agreement, GradientCheck
from amo_dist.engine.orders import Orders
from amo_dist.engine.parameters import Parameters, describe_group
from amo_dist.engine.pieces import Cuts, Locals, as_matrix, cut
from amo_dist.engine.rounding import Rounding
from amo_dist.engine.rule import UpdateRule
from amo_dist.engine.updates import Updates
from amo_dist.engine.world import World
from amo_dist.kernels.devices import BACKENDS, make_kernels
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

    Raises:
        ValueError: The settings cannot run on the parameters' device.
    """

    def __init__(
        self,
        parameters: Parameters,
        groups: Groups,
        state: State,
        rule: UpdateRule,
        config: MuonConfig,
    ) -> None:
        self.parameters = parameters
        self.world: World | None = None
        self.check: GradientCheck | None = None
        self.exchanges: list[Exchange] = []
        self._groups, self._state, self._rule, self._config = groups, state, rule, config
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
        self._orders: Orders | None = None
        self._grads: Sequence[Tensor | None] = ()
        self._local_params, self._local_buffers = Locals(), Locals()
        self._params: Sequence[Tensor] = ()
        self._buffers: Sequence[Tensor] = ()
        self._cuts = Cuts(parameters)
        self._exchange_key: object = None
        self._wide_dtype = wide_dtype(getattr(torch, config.momentum_dtype))
        self._prepares = type(rule).prepare is not UpdateRule.prepare

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
        lines.append(f"{'waits' if waits else 'does not wait'} for the verdict")
        for index, group in enumerate(groups):
            lines.append(f"group {index}: {describe_group(group, self._rule.defaults)}")
        return self.check.agree(orders.step, "\n".join(lines), waits=waits)

    def run(self, orders: Orders, agreed: Agreement) -> None:
        """Update every parameter; a collective over the ranks that share parameters.

        Args:
            orders: As all ranks have agreed on them.
            agreed: What `agree` returned.
        """
        assert self.world is not None
        assert self.check is not None
        self._begin(orders, agreed)
        try:
            self._plan_exchanges(orders)
            for index, exchange in enumerate(self.exchanges):
                meanwhile = self._step_adamw if index == 0 else None
                exchange.run(self._read, self._compute, self._updates.take, meanwhile)
            if not self.exchanges:
                self._step_adamw()
            self._updates.finish(self.world)
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
        grads = agreed.grads
        moving = [i for i, entry in enumerate(entries) if entry.views and grads[i] is not None]
        self.kernels.begin_step(agreed.bad)
        with span("amo::momentum"):
            buffers, found = [self._buffers[i] for i in moving], [grads[i] for i in moving]
            self.kernels.update_momentum(buffers, found, self._config.momentum)  # type: ignore[arg-type]
        self._rounding.begin(orders.step, self.world.rank, state)
        self._orders, self._grads = orders, grads
        self._batches.begin_step(orders.schedules)
        self._updates.begin(self._params, grads, agreed.bad)

    def _read(self, parts: Sequence[Part], places: Sequence[Tensor]) -> None:
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
            self._momentum(buffers, grads, found)
            return
        # Before anything is rounded to travel.
        wide = [torch.empty_like(each, dtype=self._wide_dtype) for each in found]
        self._momentum(buffers, grads, wide)
        for part, place, momentum in zip(held, found, wide, strict=True):
            place.copy_(self._rule.prepare(momentum, self._updates.piece(part)))

    def _momentum(self, buffers: list[Tensor], grads: list[Tensor], out: list[Tensor]) -> None:
        if self._config.nesterov:
            self.kernels.nesterov(buffers, grads, self._config.momentum, out=out)
        elif out:
            torch._foreach_copy_(out, buffers)

    def _compute(self, task: Task, matrices: Sequence[Tensor]) -> list[Tensor]:
        """Orthogonalize the owned matrices of a task, and measure those that are asked for."""
        with span("amo::orthogonalize"):
            results = self._batches.run(task.owned, matrices)
        assert self._orders is not None
        for index, matrix, result in zip(task.owned, matrices, results, strict=True):
            if index in task.reported:
                name = self.parameters.matrices[index].name
                for probe in self._orders.probes:
                    if name in probe.names:
                        probe.measure(name, matrix, result)
        return results

    def _step_adamw(self) -> None:
        params, entries = list(self._params), self.parameters.entries
        with span("amo::adamw"), contextlib.ExitStack() as stack:
            for index, (entry, grad) in enumerate(zip(entries, self._grads, strict=True)):
                if not entry.views and grad is not None and self._rounding.is_for(params[index]):
                    wide = self._rounding.widened(index, params[index])
                    params[index] = stack.enter_context(wide)
            self._adamw.step(params, self._grads, self.kernels.bad)

    # ---------------------------------------------------------------- exchange

    def _key(self, orders: Orders) -> object:
        """Exchanges are kept until the wide matrices change, or schedules settle."""
        return orders.wide, orders.is_settled

    def _plan_exchanges(self, orders: Orders) -> None:
        assert self.world is not None
        if self._key(orders) != self._exchange_key:
            self.exchanges = plan_exchanges(
                self.parameters,
                orders.schedules,
                orders.wide,
                world=self.world,
                config=self._config,
                kernels=self.kernels,
            )
            self._exchange_key = self._key(orders)

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
        counts = {f"newton_schulz/{name}_matrices": float(backends[name]) for name in BACKENDS[1:]}
        num_bytes = sum(exchange.sent_bytes.total() for exchange in self.exchanges)
        elements = sum(exchange.sent_elements.total() for exchange in self.exchanges)
        sent = {"exchange/sent_bytes": float(num_bytes), "exchange/sent_elements": float(elements)}
        return {**counts, **sent}
