"""The driver: what each step does, for schedules that never change."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from itertools import chain, islice

from torch import Tensor

from amo_dist.config import MuonConfig
from amo_dist.distributed.agreement import check_alike, sum_over
from amo_dist.distributed.spans import span
from amo_dist.engine.gradients import GradientCheck
from amo_dist.engine.orders import Orders, Probe
from amo_dist.engine.world import World
from amo_dist.kernels.geometry import ns_residual
from amo_dist.schedule.policies import Policy
from amo_dist.schedule.types import MatrixInfo, Schedule

logger = logging.getLogger(__name__)


class Driver:
    """Decides what a step does; the engine does it. This one runs a fixed schedule.

    It says which schedule each matrix gets, measures the residual of one matrix now and then,
    counts steps, and is what a checkpoint holds beside tensors.

    Args:
        policy: Which schedule when.
        config: When to measure residuals, and what to do about them.
        steps_taken: Optimizer steps so far, skipped ones included.
        steps_skipped: Of those, the ones that changed nothing.
    """

    def __init__(
        self, policy: Policy, config: MuonConfig, steps_taken: int = 0, steps_skipped: int = 0
    ) -> None:
        self.policy, self.config = policy, config
        self.steps_taken, self.steps_skipped = steps_taken, steps_skipped
        self.residual = 0.0
        """The last one measured."""
        self.observe_seconds = 0.0
        """What the last observation cost the training thread."""
        self._residuals: dict[str, Tensor] = {}
        self._world: World | None = None
        self._digested: tuple[Mapping[str, Schedule], str] | None = None

    @property
    def world(self) -> World:
        """What all ranks agreed on; `connect` comes first."""
        assert self._world is not None
        return self._world

    def connect(self, world: World) -> None:
        """Take the structure on which all ranks agreed; a collective over the world.

        Raises:
            RankMismatchError: On every rank, where only some have restored a state.
            ValueError: The policy cannot run these matrices.
        """
        _check_state_alike(self.policy, self.steps_taken, world)
        self.policy.bind(world.registry)
        self.resume(world)

    def resume(self, world: World) -> None:
        """Go on in a world that is known, with a policy that is bound; communicates nothing."""
        self._world = world

    def settle(self, check: GradientCheck | None, *, saving: bool = False) -> None:
        """Look at the verdict of the last step, where nobody waited for it.

        Args:
            check: Which knows it; None before the first step.
            saving: As for `GradientCheck.settle`.

        Raises:
            As `GradientCheck.agree`, of that step, which then counts as not taken.
        """
        if check is None or not check.is_pending:
            return
        try:
            fault = check.settle(saving=saving)
        except Exception:
            self.steps_taken -= not check.is_pending
            raise
        if fault:
            self.steps_skipped += 1
            logger.warning("step %d skipped: %s", self.steps_taken, fault)

    def begin(self, check: GradientCheck | None, *, saving: bool = False) -> None:
        """What must be done before the next step, or before state is saved; see `settle`."""
        self.settle(check, saving=saving)

    def orders(self, matrices: Sequence[str]) -> Orders:
        """What the next step does.

        Args:
            matrices: Names of those of this process.
        """
        step = self.steps_taken + 1
        checked = _matrix_to_check(self.world.registry, step, self.config.ns_guard_every)
        probes = () if checked is None else (Probe(frozenset([checked]), self._measure_residual),)
        return Orders(
            step,
            schedules=self.schedules_of(matrices, step),
            is_settled=self.policy.phase(step) in ("locked", "uniform"),
            checked=checked,
            probes=probes,
            num_steps=self._num_steps(step) if self.config.max_team > 1 else (),
        )

    def _num_steps(self, step: int) -> tuple[int, ...]:
        by_group = self.policy.schedules(step)
        return tuple(by_group[group].num_steps for group in sorted(by_group))

    def schedules_of(self, matrices: Sequence[str], step: int) -> list[Schedule]:
        """The schedule of each matrix, by name, at a step."""
        schedules = self.policy.schedules(step)
        return [schedules[self.policy.group_of(name)] for name in matrices]

    def describe(self, orders: Orders) -> list[str]:
        """Lines that are alike on all ranks where they are about to do the same."""
        schedules = self.policy.schedules(orders.step)
        # By value: which object it is depends on what else was asked for, as by one rank's logger.
        if self._digested is None or self._digested[0] != schedules:
            self._digested = schedules, self.policy.digest(orders.step)
        return [
            f"step {orders.step}",
            f"schedules and state {self._digested[1]}",
            f"observed matrices {list(orders.observed)}",
        ]

    def finish(self, orders: Orders, *, skipped: bool) -> None:
        """Count a step, and act on what was measured in it; a collective where something was."""
        if skipped:
            self.steps_skipped += 1
        self.steps_taken = orders.step
        if orders.checked is not None:
            self._check_residual(orders.step, orders.checked)

    def discard(self) -> None:
        """Give up what is under way: another driver takes over."""

    def _measure_residual(self, name: str, momentum: Tensor, result: Tensor) -> None:
        with span("amo::residual"):
            # The residual of zeros, as without a gradient, says nothing.
            is_zero = ~(result != 0).any()
            self._residuals[name] = ns_residual(result).masked_fill(is_zero, math.nan)

    def _check_residual(self, step: int, name: str) -> None:
        """Warn of a residual above the bound, and fall back where the policy does."""
        ((residual,),) = agree_on_values(self._residuals, [name], self.world).values()
        self._residuals = {}
        self.residual = 0.0 if math.isnan(residual) else residual
        if not residual > self.config.ns_guard_bound:
            return
        schedule = self.policy.schedules(step)[self.policy.group_of(name)]
        falls_back = self.policy.fall_back(step, name)
        operator_type = next(m.operator_type for m in self.world.registry if m.name == name)
        triples = " ".join(f"({a:.4g}, {b:.4g}, {c:.4g})" for a, b, c in schedule.coefficients)
        logger.warning(
            "step %d: %s, of type %s, is left with a Newton-Schulz residual of %.4g, above "
            "ns_guard_bound = %g, by the %d steps %s (preconditioner %s, norm_scale %g)%s",
            *(step, name, operator_type, residual, self.config.ns_guard_bound),
            *(schedule.num_steps, triples, schedule.preconditioner, schedule.norm_scale),
            f"; {self.policy.group_of(name)} runs the uniform schedule from now on"
            if falls_back
            else "",
        )


def agree_on_values(
    found: Mapping[str, Tensor], names: Sequence[str], world: World, width: int = 1
) -> dict[str, list[float]]:
    """What was measured of each matrix, on every rank; a collective over the world.

    Args:
        found: By matrix name, `width` values: what this rank measured.
        names: Of which matrices; the same on every rank.
        world: Says which rank's values of a matrix count.
        width: How many values there are of a matrix, on every rank.

    Returns:
        By name; the first value is NaN where it was NaN, zero, or not measured, as in a skipped
        step.
    """
    homes, nothing = world.homes, [0.0] * width
    mine = {
        name: value.reshape(-1).tolist()
        for name, value in found.items()
        if world.rank in homes[name]
    }
    sent = chain.from_iterable(mine.get(name, nothing) for name in names)
    agreed = iter(sum_over(list(sent), world.group))
    values = {name: list(islice(agreed, width)) for name in names}
    return {name: [first or math.nan, *rest] for name, (first, *rest) in values.items()}


def _matrix_to_check(registry: Sequence[MatrixInfo], step: int, every: int) -> str | None:
    """The matrix whose residual is measured at a step, if any: all take turns by name."""
    if not every or step % every or not registry:
        return None
    return registry[(step // every - 1) % len(registry)].name


def _check_state_alike(policy: Policy, step: int, world: World) -> None:
    """Refuse a state that only some ranks have restored.

    Ranks of unlike state would part ways: some plan, and others wait for them elsewhere.
    """
    fields = {"optimizer steps taken": step, **policy.state_dict()}
    lines = [f"{field}: {_brief(value)}" for field, value in fields.items()]
    check_alike("the state before the first step", "\n".join(lines), world.group)


def _brief(value: object) -> str:
    """JSON that is short enough to read, and unlike where values are."""
    text = json.dumps(value, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters, sha256 {digest})"
