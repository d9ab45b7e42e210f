"""The controller: which schedule each matrix gets, what a step measures, and what that leads to.

The engine moves tensors; the controller decides. A schedule that never changes is one whose policy
neither observes nor plans.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from amo_dist.config import MuonConfig
from amo_dist.distributed.agreement import broadcast_text, check_alike, sum_over
from amo_dist.distributed.layout import Matrix
from amo_dist.engine.step import Orders, Probe
from amo_dist.engine.verdict import Verdict
from amo_dist.engine.world import World
from amo_dist.kernels.geometry import ns_residual
from amo_dist.kernels.spectra import observe
from amo_dist.schedule.grouping import Groups
from amo_dist.schedule.policies import Policy
from amo_dist.schedule.types import MatrixInfo, Schedule

GUARD_BOUND = 1.1
"""A residual ``||X X^T - I||_F / sqrt(min(m, n))`` above this is warned of: singular values below
``sqrt(2)`` leave at most 1."""

logger = logging.getLogger(__name__)


class _Decided(NamedTuple):
    schedules: Sequence[Schedule]
    """Of each matrix of this process."""
    digest: str
    """Of the schedules of all."""
    deal: Hashable
    """Matrices are dealt to owners anew where it changes."""
    observed: Sequence[str]
    """Names of the matrices to observe."""


class Controller:
    """Decides what each step does, and is what a checkpoint holds beside tensors.

    Args:
        policy: Which schedule when.
        state: What the policy remembers; an immutable value.
        config: When to measure residuals, and what to do about them.
        steps_taken: Optimizer steps so far, skipped ones included.
        steps_skipped: Of those, the ones that changed nothing.
    """

    # Once `connect` has been called.
    _world: World

    def __init__(
        self,
        policy: Policy,
        state: Any,
        config: MuonConfig,
        steps_taken: int = 0,
        steps_skipped: int = 0,
    ) -> None:
        self.policy, self.state, self.config = policy, state, config
        self.steps_taken, self.steps_skipped = steps_taken, steps_skipped
        self.residual = 0.0
        """The last one measured."""
        self.observe_seconds = 0.0
        """What the last observation cost this rank."""
        self.groups: Groups | None = None
        """The matrices that share schedules; None before the ranks know one another."""
        self._measured: dict[str, Tensor] = {}
        self._residuals: dict[str, Tensor] = {}
        self._last: tuple[tuple[int, float, Any], _Decided] | None = None
        trials = policy.trials()
        self._num_values = 1 + 2 * len(trials)
        self._trials = trial_tensor(trials)

    # ---------------------------------------------------------------- before steps

    def connect(self, world: World, *, is_new: bool) -> None:
        """Take the structure on which all ranks agreed, and plan where that is due.

        Args:
            world: The structure.
            is_new: Whether the ranks meet for the first time: a collective over the world then.

        Raises:
            RankMismatchError: On every rank, where only some have restored a state.
            ValueError: The policy cannot run these matrices.
        """
        if is_new:
            self._check_alike(world)
        self.groups = groups = self.policy.groups(world.registry)
        self._world = world
        # Strict: a state that was restored before the matrices were known may not fit them.
        self.state = self.policy.from_dict(self.policy.to_dict(self.state), groups)
        if is_new:
            self._plan_where_due()

    def settle(self, verdict: Verdict | None) -> None:
        """Look at the verdict of the last step, where nobody waited for it.

        Raises:
            As `Verdict.settle`, of that step, which then counts as not taken.
        """
        if verdict is None:
            return
        try:
            fault = verdict.settle()
        except Exception:
            self.steps_taken -= 1
            raise
        if fault:
            self.skipped(self.steps_taken, fault)

    def skipped(self, step: int, fault: str) -> None:
        """Count a step that changed nothing."""
        self.steps_skipped += 1
        logger.warning("step %d skipped: %s", step, fault)

    def orders(self, matrices: Sequence[Matrix]) -> Orders:
        """What the next step does.

        Args:
            matrices: Those of this process.
        """
        step, config = self.steps_taken + 1, self.config
        schedules, digest, deal, observed = self._decide(step, matrices)
        every, probes = config.ns_guard_every, list[Probe]()
        turn = step // every if every and step % every == 0 else 0
        if observed:
            self.observe_seconds, record = 0.0, functools.partial(self._record, observed)
            probes.append(Probe(frozenset(observed), self._observe, record))
        if turn and (checked := matrix_to_check(self._world.registry, turn)) is not None:
            check = functools.partial(self._check_residual, checked)
            probes.append(Probe(frozenset([checked]), self._take_residual, check))
        return Orders(
            step,
            schedules=schedules,
            deal=deal,
            intent=[f"step {step}", f"schedules and state {digest}", f"observed {list(observed)}"],
            turn=turn,
            probes=tuple(probes),
        )

    def _decide(self, step: int, matrices: Sequence[Matrix]) -> _Decided:
        """What the policy says of a step, the same objects for as long as it says the same.

        Round robin looks at no cost. Who shares a matrix decides its bits: so teams follow from the
        schedules of the world alone, and a run that goes on from a checkpoint finds the same.
        """
        policy, state = self.policy, self.state
        if self._last is not None:
            (first, change, seen), decided = self._last
            if seen is state and first <= step < change:
                return decided
        groups = self.known_groups
        observed = policy.sample(state, groups, step)
        by_group = policy.schedules(state, groups, step)
        found: Sequence[Schedule] = [by_group[groups.group_of[m.name]] for m in matrices]
        if self._last is not None and found == self._last[1].schedules:
            found = self._last[1].schedules
        deal: Hashable = "round robin"
        if self.config.max_team > 1 or self.config.ownership != "round_robin":
            deal = policy.phase(state, step) in ("locked", "uniform")
        if self.config.max_team > 1:
            deal = deal, tuple(by_group[group].num_steps for group in sorted(by_group))
        decided = _Decided(found, policy.digest(state, groups, step), deal, observed)
        change = step + 1 if observed else policy.next_change(state, step)
        self._last = (step, change, state), decided
        return decided

    @property
    def known_groups(self) -> Groups:
        """The matrices that share schedules.

        Raises:
            ValueError: Before the first step.
        """
        if self.groups is None:
            raise ValueError(
                "groups: found none before the first step, expected a call after it: the ranks "
                "learn of all matrices then"
            )
        return self.groups

    # ---------------------------------------------------------------- after steps

    def finish(self, orders: Orders) -> None:
        """Count a step, and act on what was measured in it; a collective where something was."""
        self.steps_taken = orders.step
        for probe in orders.probes:
            probe.finish(orders.step)

    def _observe(self, name: str, momentum: Tensor, result: Callable[[], Tensor]) -> None:
        start = time.perf_counter()
        with record_function("amo::observe"):
            is_exact = self.config.update_norm == "exact"
            self._measured[name] = observe(momentum, *self._trials, exact_norm=is_exact)
        self.observe_seconds += time.perf_counter() - start

    def _take_residual(self, name: str, momentum: Tensor, result: Callable[[], Tensor]) -> None:
        with record_function("amo::residual"):
            found = result()
            # The residual of zeros, as without a gradient, says nothing.
            is_zero = ~(found != 0).any()
            self._residuals[name] = ns_residual(found).masked_fill(is_zero, math.nan)

    def _record(self, observed: Sequence[str], step: int) -> None:
        """Agree on what was observed, and plan where it is time to."""
        measured, self._measured = self._measured, {}
        with record_function("amo::observe"):
            values = agree_on_values(measured, observed, self._world, self._num_values)
        ells = {name: found[0] for name, found in values.items()}
        errors = {name: found[1:] for name, found in values.items()}
        self.state = self.policy.record(self.state, self.known_groups, step, ells, errors)
        self._plan_where_due()

    def _plan_where_due(self) -> None:
        """One rank plans, all adopt; a collective over the world where a plan is due.

        Raises:
            ValueError: On every rank, where planning failed so.
            RuntimeError: On the others, where it failed otherwise on the one that plans.
        """
        if not self.policy.plan_due(self.state):
            return
        text, failure = "", None
        if self._world.leads:
            try:
                text = "plan:" + self.policy.make_plan(self.state, self.known_groups)
            except Exception as error:
                failure = error
                text = f"{type(error).__name__}:{error}"
        kind, _, payload = broadcast_text(text, self._world.group).partition(":")
        if kind == "plan":
            self.state = self.policy.adopt_plan(self.state, self.known_groups, payload)
            return
        if failure is not None:
            raise failure
        if kind == "ValueError":
            raise ValueError(payload)
        raise RuntimeError(f"planning failed on the first rank: {kind}: {payload}")

    def _check_residual(self, name: str, step: int) -> None:
        """Warn of a residual above the bound."""
        ((residual,),) = agree_on_values(self._residuals, [name], self._world).values()
        self._residuals = {}
        self.residual = 0.0 if math.isnan(residual) else residual
        if not residual > GUARD_BOUND:
            return
        by_group = self.policy.schedules(self.state, self.known_groups, step)
        schedule = by_group[self.known_groups.group_of[name]]
        operator_type = next(m.operator_type for m in self._world.registry if m.name == name)
        triples = " ".join(f"({a:.4g}, {b:.4g}, {c:.4g})" for a, b, c in schedule.coefficients)
        logger.warning(
            "step %d: %s, of type %s, is left with a Newton-Schulz residual of %.4g, above "
            "%g, by the %d steps %s (preconditioner %s, norm_scale %g)",
            *(step, name, operator_type, residual, GUARD_BOUND),
            *(schedule.num_steps, triples, schedule.preconditioner, schedule.norm_scale),
        )

    def _check_alike(self, world: World) -> None:
        """Refuse a state that only some ranks have restored.

        Ranks of unlike state would part ways: some plan, and others wait for them elsewhere.
        """
        fields = {"optimizer steps taken": self.steps_taken, **self.policy.to_dict(self.state)}
        lines = [f"{field}: {_brief(value)}" for field, value in fields.items()]
        check_alike("the state before the first step", "\n".join(lines), world.group)


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
    nothing = [0.0] * width
    mine = {
        name: value.reshape(-1).tolist()
        for name, value in found.items()
        if world.rank in world.reporting_ranks[name]
    }
    sent = chain.from_iterable(mine.get(name, nothing) for name in names)
    agreed = iter(sum_over(list(sent), world.group))
    values = {name: list(islice(agreed, width)) for name in names}
    return {name: [first or math.nan, *rest] for name, (first, *rest) in values.items()}


def matrix_to_check(registry: Sequence[MatrixInfo], turn: int) -> str | None:
    """The matrix whose residual is measured at a turn, counted from 1: all take turns by name."""
    return registry[(turn - 1) % len(registry)].name if registry else None


def trial_tensor(trials: Sequence[Schedule]) -> tuple[Tensor, float]:
    """Schedules as `amo_dist.kernels.spectra.observe` takes them.

    Returns:
        Coefficients, float64 on the CPU, ``(trials, steps, 3)``, and the scale of their input.
    """
    most = max((schedule.num_steps for schedule in trials), default=0)
    stay = (1.0, 0.0, 0.0)
    rows = [[*one.coefficients, *[stay] * (most - one.num_steps)] for one in trials]
    coefficients = torch.tensor(rows, dtype=torch.float64, device="cpu").view(len(rows), most, 3)
    (scale,) = {schedule.norm_scale for schedule in trials} or {1.0}
    return coefficients, scale


def _brief(value: object) -> str:
    """JSON that is short enough to read, and unlike where values are."""
    text = json.dumps(value, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters, sha256 {digest})"
