"""The driver of a policy that plans: it observes, agrees on the values, and broadcasts the plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from amo_dist.config import MuonConfig
from amo_dist.distributed.agreement import broadcast_text
from amo_dist.distributed.spans import span
from amo_dist.engine.driver import Driver, agree_on_values
from amo_dist.engine.gradients import GradientCheck
from amo_dist.engine.observer import Observer
from amo_dist.engine.orders import Orders, Probe
from amo_dist.engine.world import World
from amo_dist.schedule.policies import Policy


class AdaptiveDriver(Driver):
    """A `Driver` whose schedules follow from a plan, and that from observations, if any.

    In the background an observation is finished before the next step, or before state is saved.
    Arguments as for `Driver`.
    """

    def __init__(self, policy: Policy, config: MuonConfig, *counts: int) -> None:
        super().__init__(policy, config, *counts)
        self._observer = Observer(in_background=policy.observes_in_background)
        self._under_way: Orders | None = None

    def connect(self, world: World) -> None:
        """As `Driver.connect`; then plans where that is due, as before the first step of ROOT."""
        super().connect(world)
        self._plan_where_due(self.steps_taken)

    def resume(self, world: World) -> None:
        """As `Driver.resume`."""
        super().resume(world)
        policy = self.policy
        self._observer = Observer(
            in_background=policy.observes_in_background, trials=policy.trials()
        )

    def begin(self, check: GradientCheck | None, *, saving: bool = False) -> None:
        """Agree on what was observed, and plan where it is time to; a collective if there is one.

        Raises:
            RuntimeError: On every rank, where an observation in the background failed on one.
        """
        super().begin(check, saving=saving)
        if self._under_way is not None:
            assert check is not None
            orders, self._under_way = self._under_way, None
            what, found = f"observation of step {orders.step}", {}
            check.agree_on_text(what)  # a rank may know of none
            try:
                found = self._observer.collect()
            except Exception as error:
                check.report_failure(what, error)
            self._take_in(orders, found)
            check.agree_on_text(f"{what}, taken in")

    def _take_in(self, orders: Orders, found: Mapping[str, Tensor]) -> None:
        self.observe_seconds = self._observer.reset_seconds()
        with span("amo::observe"):
            width = self._observer.num_values
            values = agree_on_values(found, orders.observed, self.world, width)
        ells = {name: found[0] for name, found in values.items()}
        self.policy.record(orders.step, ells, {name: found[1:] for name, found in values.items()})
        self._plan_where_due(orders.step)

    def orders(self, matrices: Sequence[str]) -> Orders:
        """As `Driver.orders`, with the matrices to observe."""
        orders = super().orders(matrices)
        observed = self.policy.sample(orders.step)
        if not observed:
            return orders
        probe = Probe(frozenset(observed), self._observer.measure, is_wide=True)
        return dataclasses.replace(orders, observed=observed, probes=(probe, *orders.probes))

    def finish(self, orders: Orders, *, skipped: bool) -> None:
        """As `Driver.finish`; takes the observation in, unless it goes on in the background."""
        super().finish(orders, skipped=skipped)
        if orders.observed and self._observer.in_background:
            self._under_way = orders
        elif orders.observed:
            self._take_in(orders, self._observer.collect())

    def discard(self) -> None:
        """Give up what is under way: another driver takes over."""
        self._observer.discard()

    def _plan_where_due(self, step: int) -> None:
        """One rank plans, all adopt; a collective over the world where a plan is due.

        Raises:
            ValueError: On every rank, where planning failed so.
            RuntimeError: On the others, where it failed otherwise on the one that plans.
        """
        if not self.policy.plan_due(step):
            return
        text, failure = "", None
        if self.world.leads:
            try:
                text = "plan:" + self.policy.make_plan()
            except Exception as error:
                failure = error
                text = f"{type(error).__name__}:{error}"
        kind, _, payload = broadcast_text(text, self.world.group).partition(":")
        if kind == "plan":
            self.policy.adopt_plan(payload)
            return
        if failure is not None:
            raise failure
        if kind == "ValueError":
            raise ValueError(payload)
        raise RuntimeError(f"planning failed on the first rank: {kind}: {payload}")


def make_driver(policy: Policy, config: MuonConfig, *counts: Any) -> Driver:
    """The driver that a policy needs.

    Args:
        policy: Fixed, or one that plans.
        config: Of the optimizer.
        counts: Steps taken and skipped.
    """
    kind = Driver if policy.is_fixed else AdaptiveDriver
    return kind(policy, config, *counts)
