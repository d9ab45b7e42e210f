"""The controller: it gives each matrix its schedule, and turns measurements into plans.

The engine moves tensors; the controller decides. A schedule that never changes is one whose policy
neither observes nor plans.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import chain, islice
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from amo_dist.config import MuonConfig
from amo_dist.distributed.layout import Matrix
from amo_dist.distributed.ranks import broadcast_text, check_alike, sum_over
from amo_dist.engine.ballot import Ballots
from amo_dist.engine.step import Orders, Probe
from amo_dist.engine.world import World
from amo_dist.kernels.geometry import ns_residual
from amo_dist.kernels.spectra import observe
from amo_dist.schedule.grouping import Groups
from amo_dist.schedule.observation import Observed
from amo_dist.schedule.policies import Control, Policy, State
from amo_dist.schedule.types import MatrixInfo, Schedule

GUARD_BOUND = 1.1
"""A residual ``||X X^T - I||_F / sqrt(min(m, n))`` above this is warned of: singular values below
``sqrt(2)`` leave at most 1."""

logger = logging.getLogger(__name__)


class _Decision(NamedTuple):
    """Schedules of a step, which hold for the steps up to the next change."""

    steps: range
    """Optimizer steps for which it holds."""
    state: State
    """State of the policy in which the step is taken."""
    schedules: Sequence[Schedule]
    """Schedule of each matrix of this process."""
    by_group: Mapping[str, Schedule]
    """Schedule of each group of matrices."""
    digest: str
    """Digest of the state and of the schedules of all matrices."""
    owner_epoch: Hashable
    """Value at whose change owners are assigned anew."""
    observed: Sequence[str]
    """Names of the matrices to observe."""


class Controller:
    """Decides what each step does, and holds what a checkpoint does beside tensors.

    Args:
        control: Counts, settings, policy and state to go on from.
    """

    # Set by `connect`.
    _world: World

    def __init__(self, control: Control) -> None:
        self.control = control
        """The value after the last step, as far as its verdict is known."""
        self.residual = 0.0
        """The last one measured."""
        self.observe_seconds = 0.0
        """Seconds of the last observation on this rank."""
        self.groups: Groups | None = None
        """The matrices that share schedules; None before the ranks know one another."""
        self._undone = control
        """The value to go on from if the verdict undoes the last step."""
        self._history: list[tuple[int, Mapping[str, Schedule]]] = []
        """First step of each set of schedules by group that this process has taken; of one step the
        last entry counts, as an undone step is taken again."""
        self._measured: dict[str, tuple[Tensor, Tensor]] = {}
        self._residuals: dict[str, Tensor] = {}
        self._decision: _Decision | None = None
        trials = control.policy.trials()
        self._num_trials = len(trials)
        self._trials = trial_tensor(trials)

    @property
    def policy(self) -> Policy:
        """Rule by which schedules follow from the state."""
        return self.control.policy

    @property
    def state(self) -> State:
        """Memory of the policy."""
        return self.control.state

    @property
    def config(self) -> MuonConfig:
        """Settings in force."""
        return self.control.config

    def _change(self, **changes: Any) -> None:
        self.control = dataclasses.replace(self.control, **changes)

    # ---------------------------------------------------------------- before steps

    def connect(self, world: World, *, is_new: bool) -> None:
        """Take the structure on which all ranks agreed, and plan if a plan is due.

        Args:
            world: The structure.
            is_new: Whether the ranks meet for the first time: a collective over the world then.

        Raises:
            RankMismatchError: On every rank, if only some of them have restored a state.
            ValueError: The policy cannot run these matrices.
        """
        if is_new:
            self._check_alike(world)
        self.groups = groups = self.policy.groups(world.registry)
        self._world = world
        # A state that was restored before the matrices were known may not fit them.
        self._change(state=self.policy.from_dict(self.policy.to_dict(self.state), groups))
        if is_new:
            self._plan_if_due()

    def plan_late(self, ballots: Ballots) -> None:
        """Plan if a state was loaded that lacks a plan by now; a collective over the world then.

        Raises:
            RankMismatchError: On every rank, if only some of them have loaded such a state.
        """
        is_known = self._decision is not None and self._decision.state is self.state
        if not is_known and self.policy.plan_due(self.state):
            ballots.vote_on_text("a plan before the next step")
            self._plan_if_due()

    def settle(self, ballots: Ballots | None) -> None:
        """Read the verdict of the last step, if nobody has read it.

        Raises:
            As `Ballots.read_verdict`, for that step, which then counts as not taken.
        """
        if ballots is None:
            return
        try:
            fault = ballots.read_verdict()
        except Exception:
            self.control = self._undone
            raise
        if fault:
            self.skipped(self.control.steps_taken, fault)

    def control_after(self, outcome: Literal["taken", "skipped", "undone"]) -> Control:
        """The value to save, if the last step has this outcome."""
        if outcome == "undone":
            return self._undone
        skipped = self.control.steps_skipped + (outcome == "skipped")
        return dataclasses.replace(self.control, steps_skipped=skipped)

    def skipped(self, step: int, fault: str) -> None:
        """Count a step that changed nothing."""
        self._change(steps_skipped=self.control.steps_skipped + 1)
        logger.warning("step %d skipped: %s", step, fault)

    def orders(self, matrices: Sequence[Matrix]) -> Orders:
        """The orders of the next step; nothing changes before `finish`.

        Args:
            matrices: Matrices of this process.
        """
        control, decision = self.control, self._decision
        step, every, probes = control.steps_taken + 1, control.config.ns_guard_every, list[Probe]()
        if not (
            decision is not None and step in decision.steps and decision.state is control.state
        ):
            decision = self._decision = self._decide(step, matrices, decision)
        observed = decision.observed
        turn = step // every if every and step % every == 0 else 0
        if observed:
            self.observe_seconds, record = 0.0, functools.partial(self._record, observed)
            probes.append(Probe(frozenset(observed), self._observe, record))
        if turn and (checked := matrix_to_check(self._world.registry, turn)) is not None:
            check = functools.partial(self._check_residual, checked)
            probes.append(Probe(frozenset([checked]), self._take_residual, check))
        lines = [f"step {step}", f"schedules and state {decision.digest}"]
        # Set here and not in `finish`, which a step that raises never reaches.
        self._undone = self.control
        return Orders(
            step,
            schedules=decision.schedules,
            owner_epoch=decision.owner_epoch,
            fingerprint=[*lines, f"observed {list(observed)}"],
            turn=turn,
            probes=tuple(probes),
        )

    def _decide(self, step: int, matrices: Sequence[Matrix], last: _Decision | None) -> _Decision:
        """The policy's answer for a step; the same schedules object as before if all are alike.

        Round robin looks at no cost.
        """
        policy, groups, state = self.policy, self.known_groups, self.state
        observed = policy.sample(state, groups, step)
        by_group = policy.schedules(state, groups, step)
        schedules: Sequence[Schedule] = [by_group[groups.group_of[m.name]] for m in matrices]
        if last is not None and schedules == last.schedules:
            schedules = last.schedules
        owner_epoch: Hashable = "round robin"
        if self.config.ownership != "round_robin":
            counts = tuple(by_group[group].num_steps for group in sorted(by_group))
            is_locked = policy.phase(state, step) in ("locked", "uniform")
            # The transition changes costs at each step, and a new assignment waits for all ranks.
            owner_epoch = (is_locked, counts if is_locked else ())
        change = step + 1 if observed else policy.next_change(state, step)
        return _Decision(
            range(step, sys.maxsize if math.isinf(change) else int(change)),
            state,
            schedules,
            by_group,
            policy.digest(state, groups, step),
            owner_epoch,
            observed,
        )

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
        """Count a step, and act on its measurements; a collective over the world if it has any."""
        assert self._decision is not None
        control = self.control
        self.control = dataclasses.replace(
            control, steps_taken=orders.step, state=self._decision.state
        )
        if not self._history or self._history[-1][1] != self._decision.by_group:
            self._history.append((orders.step, self._decision.by_group))
        for probe in orders.probes:
            probe.finish(orders.step)

    def schedules(self, step: int) -> Mapping[str, Schedule]:
        """The schedule of each group at a step, as it was if this process took the step."""
        groups, is_taken = self.known_groups, step <= self.control.steps_taken
        history = (by_group for first, by_group in reversed(self._history) if first <= step)
        taken = next(history, None) if is_taken else None
        return taken or self.policy.schedules(self.state, groups, step)

    def _observe(self, name: str, momentum: Tensor, result: Callable[[], Tensor]) -> None:
        start = time.perf_counter()
        with record_function("amo::observe"):
            is_exact = self.config.update_norm == "exact"
            self._measured[name] = observe(momentum, *self._trials, exact_norm=is_exact)
        self.observe_seconds += time.perf_counter() - start

    def _take_residual(self, name: str, momentum: Tensor, result: Callable[[], Tensor]) -> None:
        with record_function("amo::residual"):
            update = result()
            # A matrix without a gradient is zero, and its residual says nothing.
            is_zero = ~(update != 0).any()
            self._residuals[name] = ns_residual(update).masked_fill(is_zero, math.nan)

    def _record(self, names: Sequence[str], step: int) -> None:
        """Agree on the spectra of a step, and plan if a plan is due."""
        measured, self._measured = self._measured, {}
        count = self._num_trials
        flat = {name: torch.cat([ell.view(1), e.view(-1)]) for name, (ell, e) in measured.items()}
        with record_function("amo::observe"):
            values = agree_on_values(flat, names, self._world, 1 + 2 * count)
        observed = {
            name: Observed(ell, errors[:count], errors[count:])
            for name, (ell, *errors) in values.items()
        }
        self._change(state=self.policy.record(self.state, self.known_groups, step, observed))
        self._plan_if_due()

    def _plan_if_due(self) -> None:
        """One rank plans, all adopt; a collective over the world if a plan is due.

        Raises:
            ValueError: On every rank, if planning raised one.
            RuntimeError: On the other ranks, if planning failed otherwise.
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
            state = self.policy.adopt_plan(self.state, self.known_groups, payload)
            self._change(state=state)
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
        taken = {"optimizer steps taken": self.control.steps_taken}
        fields = {**taken, **self.policy.to_dict(self.state)}
        lines = [f"{field}: {_brief(value)}" for field, value in fields.items()]
        check_alike("the state before the first step", "\n".join(lines), world.group)


def agree_on_values(
    measured: Mapping[str, Tensor], names: Sequence[str], world: World, width: int = 1
) -> dict[str, list[float]]:
    """The measurements of all ranks, on every rank; a collective over the world.

    Args:
        measured: Measurements of this rank by matrix name, `width` values each.
        names: Names of the matrices to agree on; the same on every rank.
        world: Knows the rank whose values of a matrix count.
        width: Number of values of a matrix, on every rank.

    Returns:
        By name; the first value is NaN where it was NaN, zero, or not measured, as in a skipped
        step.
    """
    nothing = [0.0] * width
    own = {
        name: value.reshape(-1).tolist()
        for name, value in measured.items()
        if world.rank in world.reporting_ranks[name]
    }
    sent = chain.from_iterable(own.get(name, nothing) for name in names)
    agreed = iter(sum_over(list(sent), world.group))
    values = {name: list(islice(agreed, width)) for name in names}
    return {name: [first or math.nan, *others] for name, (first, *others) in values.items()}


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
    rows = [[*schedule.coefficients, *[stay] * (most - schedule.num_steps)] for schedule in trials]
    coefficients = torch.tensor(rows, dtype=torch.float64, device="cpu").view(len(rows), most, 3)
    (scale,) = {schedule.norm_scale for schedule in trials} or {1.0}
    return coefficients, scale


def _brief(value: object) -> str:
    """JSON that is short enough to read, and unlike where values are."""
    text = json.dumps(value, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters, sha256 {digest})"
