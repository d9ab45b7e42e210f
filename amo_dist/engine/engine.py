"""The engine: momentum in, orthogonalized by its owners, scaled update out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from amo_dist.config import MuonConfig
from amo_dist.distributed.exchange import Exchange
from amo_dist.distributed.layout import local_tensor
from amo_dist.distributed.plan import Part, Task
from amo_dist.distributed.spans import span
from amo_dist.engine import adamw
from amo_dist.engine.batches import Batches
from amo_dist.engine.exchange_planning import plan_exchanges
from amo_dist.engine.gradients import GradientCheck
from amo_dist.engine.orders import Orders
from amo_dist.engine.parameters import Parameters, describe_group
from amo_dist.engine.rule import UpdateRule
from amo_dist.engine.updates import Updates, as_matrix, cut
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
        self._batches = Batches(parameters, self.kernels)
        self._updates = Updates(parameters, groups, state, rule, self.kernels)
        self._orders: Orders | None = None
        self._grads: Sequence[Tensor | None] = ()
        self._buffers: Mapping[int, Tensor] = {}
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
                state = adamw.make_state(entry.param, self._config.adamw_implementation)
            for value in state.values():
                value.requires_grad_(False)
            self._state[entry.param] = state

    def connect(self, world: World) -> None:
        """Take the structure on which all ranks have agreed."""
        self.world = world
        self.check = GradientCheck(world, self.parameters, self._config, self.kernels)

    def agree(self, orders: Orders, intent: Sequence[str]) -> tuple[str, list[Tensor | None]]:
        """Agree on what a step is about to do and on its gradients; a collective over the world.

        Whether this rank plans an exchange is part of it: planning is a collective.

        Args:
            orders: Of the step.
            intent: Lines that must be alike on all ranks.

        Returns:
            As `GradientCheck.agree`.

        Raises:
            As `GradientCheck.agree`.
        """
        assert self.world is not None
        assert self.check is not None
        plans = self._key(orders) != self._exchange_key
        # Elsewhere, as between stages of a pipeline, ranks have groups of their own.
        groups = self._groups if self.world.shares_all else []
        lines = [*intent, f"{'a new' if plans else 'the last'} exchange plan"]
        for index, group in enumerate(groups):
            lines.append(f"group {index}: {describe_group(group, self._rule.defaults)}")
        return self.check.agree("\n".join(lines), skips=self._config.nonfinite == "skip_step")

    def run(self, orders: Orders, grads: Sequence[Tensor | None]) -> None:
        """Update every parameter; a collective over the ranks that share parameters.

        Args:
            orders: As all ranks have agreed on them.
            grads: This rank's part of each gradient; None where no rank has one.
        """
        assert self.world is not None
        assert self.check is not None
        self._begin(orders, grads)
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
            self._grads, self._buffers = (), {}
            self._updates.end()
        self.check.report_updates(self._batches.take_nonfinite())

    def _begin(self, orders: Orders, grads: Sequence[Tensor | None]) -> None:
        """Take this rank's gradients into the momentum."""
        entries = self.parameters.entries
        moving = [i for i, entry in enumerate(entries) if entry.views and grads[i] is not None]
        buffers = [local_tensor(self._state[entries[i].param]["momentum_buffer"]) for i in moving]
        with span("amo::momentum"):
            found = [grads[i] for i in moving]
            self.kernels.update_momentum(buffers, found, self._config.momentum)  # type: ignore[arg-type]
        self._orders, self._grads = orders, grads
        self._buffers = dict(zip(moving, buffers, strict=True))
        self.kernels.begin_step()
        self._batches.begin_step(orders.schedules)
        self._updates.begin(grads)

    def _read(self, parts: Sequence[Part], places: Sequence[Tensor]) -> None:
        """Write the momentum to orthogonalize; zeros where a parameter has no gradient.

        What travels must not depend on which gradients exist: sizes were agreed before.
        """
        buffers, grads, found, held = [], [], [], []
        for part, place in zip(parts, places, strict=True):
            tensor = self.parameters.matrices[part.matrix].tensor
            grad = self._grads[tensor]
            if grad is None:
                place.zero_()
                continue
            buffers.append(cut(self._buffers[tensor], part.piece.source))
            grads.append(cut(grad, part.piece.source))
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
        entries, how = self.parameters.entries, self._config.adamw_implementation
        with span("amo::adamw"):
            adamw.step_adamw(entries, self._grads, self._state, self._groups, how)

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
