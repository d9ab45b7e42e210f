"""AMO's policy: observe, plan, glide to the plan, lock."""

from __future__ import annotations

import dataclasses
import logging
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from typing import Any

from amo_dist.config import AMOConfig, MuonConfig
from amo_dist.schedule.amo_state import AMOState, Timeline
from amo_dist.schedule.fields import fail
from amo_dist.schedule.grouping import Groups, group_matrices
from amo_dist.schedule.observation import (
    Observation,
    Observed,
    draw,
    effective_ell,
    robust_ells,
)
from amo_dist.schedule.plan import Plan, StepsAndElls, starved
from amo_dist.schedule.planning import (
    costs_of,
    plan_allocation,
    plan_inputs,
    plan_measured,
    shares_of,
    steps_to_try,
    targets,
)
from amo_dist.schedule.polar_express import composed
from amo_dist.schedule.policies import Policy
from amo_dist.schedule.trials import ErrorSums, Trials
from amo_dist.schedule.types import MatrixInfo, Schedule

logger = logging.getLogger(__name__)

PHASES = ("observation", "transition", "locked", "uniform")
"""The phases of AMO, in their order; ``uniform`` follows ``observation`` under ``observe_only``."""

_WEIGHTS = {"update_norm", "adjust_lr"}
"""Settings of every optimizer of the family by which errors are measured and weighted."""


@dataclasses.dataclass(frozen=True)
class AMOPolicy(Policy):
    """Adaptive Muon Orthogonalization: observe, plan, glide to the plan, lock.

    Optimizer steps 1 to ``observe_until`` run the uniform schedule and are observed; the plan
    is adopted within the last of them. The next ``transition_steps`` interpolate; from the last
    of these on (``lock_step``) the plan itself is in force. With ``observe_only`` no plan is
    made: the uniform schedule stays, and its phase after the last observation is ``uniform``.
    """

    name = "amo"
    is_fixed = False

    config: AMOConfig
    """When to observe, how to plan, how long to glide."""

    def groups(self, registry: Sequence[MatrixInfo]) -> Groups:
        """See `Policy.groups`; refuses a budget that cannot be met.

        It must not come to light at the last observation, hours into a run.
        """
        if not registry:
            fail("registry", [], "at least one matrix")
        groups = group_matrices(registry)
        plan_inputs(self.config, groups.members, costs_of(groups))
        return groups

    def start(self) -> AMOState:
        """The state without any observation."""
        return AMOState(self._timeline(0))

    # ---------------------------------------------------------------- schedules

    def schedules(self, state: AMOState, groups: Groups, step: int) -> Mapping[str, Schedule]:
        """Uniform, interpolated or planned schedules."""
        state_by_group = self.state_at(state, groups, step)
        return {group: composed(ell, steps) for group, (steps, ell) in state_by_group.items()}

    def next_change(self, state: AMOState, step: int) -> float:
        """The next observation, the end of this phase, or the next step of the transition."""
        timeline, due = state.timeline, self._next_observation(state, step)
        if step <= timeline.observe_until:
            return timeline.observe_until + 1 if due is None else due
        if timeline.lock_step is None or state.plan is None:
            return math.inf
        return step + 1 if step < timeline.lock_step else math.inf

    def phase(self, state: AMOState, step: int) -> str:
        """One of ``PHASES``."""
        return state.timeline.phase(step)

    def state_at(self, state: AMOState, groups: Groups, step: int) -> StepsAndElls:
        """Newton-Schulz steps and effective ``ell`` of each group at an optimizer step.

        Raises:
            ValueError: The step lies beyond the observation phase and there is no plan.
        """
        plan, timeline = state.plan, state.timeline
        if timeline.phase(step) in ("observation", "uniform"):
            return dict.fromkeys(groups.members, (self.config.base_steps, self.config.base_ell))
        if plan is None:
            fail("step", step, f"at most {timeline.plan_step} while no plan is adopted")
        assert timeline.plan_step is not None
        assert timeline.lock_step is not None
        length = timeline.lock_step - timeline.plan_step
        return plan.state_at(Fraction(min(step - timeline.plan_step, length), length))

    # ---------------------------------------------------------------- observation

    def sample(self, state: AMOState, groups: Groups, step: int) -> tuple[str, ...]:
        """Names of the matrices to observe at a step, sorted; ``()`` at most steps."""
        if step != self._next_observation(state, step - 1):
            return ()
        drawn: list[str] = []
        for group, members in groups.members.items():
            names = [matrix.name for matrix in members]
            drawn += draw(self.config.seed, step, group, names, self.config.sample_size)
        return tuple(sorted(drawn))

    def trials(self) -> tuple[Schedule, ...]:
        """Every number of steps that a plan may give, with every ``ell`` of a grid."""
        return self._trials.schedules()

    def record(
        self,
        state: AMOState,
        groups: Groups,
        step: int,
        observed_by_name: Mapping[str, Observed],
    ) -> AMOState:
        """Keep the medians of one observation, and add up the errors; see `Policy.record`."""
        due = self._next_observation(state, state.latest_step)
        if step != due:
            fail("step", step, f"{due}, the next observation")
        sample = self.sample(state, groups, step)
        if set(observed_by_name) != set(sample):
            fail("observed_by_name", sorted(observed_by_name), f"the names {sample}")
        ell, num_sampled, num_invalid = {}, {}, {}
        valid_by_group: dict[str, list[tuple[float, Observed]]] = {}
        for group, members in groups.members.items():
            observed = {m.name: observed_by_name[m.name] for m in members if m.name in sample}
            ells = {name: effective_ell(name, matrix.ell) for name, matrix in observed.items()}
            valid = [value for value in ells.values() if value is not None]
            ell[group] = statistics.median(valid) if valid else None
            num_sampled[group] = len(ells)
            num_invalid[group] = len(ells) - len(valid)
            valid_by_group[group] = [
                (matrix.weight, observed[matrix.name])
                for matrix in members
                if ells.get(matrix.name) is not None
            ]
            if len(valid) < len(ells):
                invalid = ", ".join(name for name, value in ells.items() if value is None)
                logger.warning("step %d: no valid ell for %s: left out", step, invalid)
        observation = Observation(step, ell, num_sampled, num_invalid)
        sums = state.error_sums or ErrorSums.empty(groups.members, self._trials)
        return dataclasses.replace(
            state,
            observations=(*state.observations, observation),
            error_sums=sums.plus(valid_by_group),
        )

    # ---------------------------------------------------------------- plan

    def plan_due(self, state: AMOState) -> bool:
        """Whether every observation is made, and the plan is not adopted yet."""
        return self._is_complete(state) and not self.config.observe_only

    def make_plan(self, state: AMOState, groups: Groups) -> str:
        """Plan from the observations; a pure function of them and of the configuration."""
        evidence, config = self._evidence(state, groups), self.config
        for group, ell in robust_ells(state.observations).items():
            if ell is None:
                logger.warning(
                    "%s has no valid observation; it falls back to base_ell = %g",
                    *(group, config.base_ell),
                )
        is_measured = config.planner == "measured"
        values = evidence.pop("measured" if is_measured else "ell_target")
        by_group = dict(zip(groups.members, values, strict=True))
        make: Any = plan_measured if is_measured else plan_allocation
        plan: Plan = make(config, by_group, costs=costs_of(groups), **evidence)
        logger.info("the plan, beside the uniform schedule:\n%s", plan)
        for line in starved(plan):
            logger.warning("%s", line)
        return plan.to_json()

    def adopt_plan(self, state: AMOState, groups: Groups, payload: str) -> AMOState:
        """Commit to the plan that one rank made; see `Policy.adopt_plan`."""
        plan = Plan.from_json(payload)
        if self.config.observe_only:
            fail("plan", plan, "none: observe_only never commits to one")
        expected = self._evidence(state, groups) | plan_inputs(
            self.config, groups.members, costs_of(groups)
        )
        for key, value in expected.items():
            if getattr(plan, key) != value:
                fail(f"plan.{key}", getattr(plan, key), f"{value!r}, as this rank has recorded")
        return dataclasses.replace(state, error_sums=None, plan=plan)

    # ---------------------------------------------------------------- saved state

    def resumed(
        self,
        saved: object,
        groups: Groups | None,
        *,
        steps_taken: int,
        config: MuonConfig,
        changed: Collection[str] = (),
    ) -> tuple[AMOPolicy, AMOState]:
        """See `Policy.resumed`; where a setting has changed that plans depend on, one is dropped.

        The uniform schedule returns until the next plan, which comes with the first observation due
        at or after ``observe_until`` of this run, at least one more being made. Earlier
        observations of ``ell`` are kept; measured errors are of
        the later ones.
        """
        state: AMOState = self.from_dict(saved)
        policy = AMOPolicy(config) if isinstance(config, AMOConfig) else self
        shared = {field.name for field in dataclasses.fields(MuonConfig)} - _WEIGHTS
        if set(changed) - shared:
            state = AMOState(policy._timeline(steps_taken), state.observations)
        policy._check_fits(state, None if groups is None else policy.groups(groups.matrices))
        policy._check_progress(state, steps_taken)
        return policy, state

    def _fields(self, state: AMOState) -> dict[str, Any]:
        return state.to_dict()

    def _read(self, saved: Mapping[str, Any], groups: Groups | None) -> AMOState:
        state = AMOState.from_dict(saved, "state")
        self._check_fits(state, groups)
        return state

    def _check_fits(self, state: AMOState, groups: Groups | None) -> None:
        if groups is not None:
            state.check_groups(tuple(groups.members), "state")
            if state.error_sums is not None:
                state.error_sums.check_trials(self._trials, "state.error_sums")

    def _check_progress(self, state: AMOState, steps_taken: int) -> None:
        """Refuse a restored state that is not one of a run of ``steps_taken`` optimizer steps."""
        timeline = self._timeline(state.timeline.begin)
        if state.timeline != timeline:
            fail("timeline", state.timeline, f"{timeline}, as the settings have it")
        latest = max(timeline.begin, state.latest_step)
        if latest > steps_taken:
            fail("steps_taken", steps_taken, f"at least {latest}, as in the observations")
        due = self._next_observation(state, state.latest_step)
        if due is not None and due <= steps_taken:
            made = [observation.step for observation in state.observations]
            fail("observations", made, f"the one of step {due} too, after {steps_taken} steps")
        if self.plan_due(state):
            fail("plan", state.plan, f"a plan after {steps_taken} steps")

    def metrics(self, state: AMOState, groups: Groups, step: int) -> dict[str, float]:
        """Plain numbers for a logger, the same keys at every step.

        ``amo/phase`` is 0 in observation, 1 in transition, 2 when locked, 3 when uniform. By group,
        ``amo/ns_steps`` is the number of Newton-Schulz steps, ``amo/ell`` the latest observed
        effective ``ell`` and ``amo/ell_target`` the plan's; both are ``base_ell`` where there is
        none yet. ``amo/observations`` counts observations, ``amo/invalid_observations`` the
        matrices left out of their medians.
        """
        values = super().metrics(state, groups, step)
        plan, observations = state.plan, state.observations
        for i, name in enumerate(groups.members):
            valid = [ell for o in observations if (ell := o.ell[name]) is not None]
            values[f"amo/ell/{name}"] = valid[-1] if valid else self.config.base_ell
            target = self.config.base_ell if plan is None else plan.ell_target[i]
            values[f"amo/ell_target/{name}"] = target
        values["amo/phase"] = float(PHASES.index(self.phase(state, step)))
        values["amo/observations"] = float(len(observations))
        num_invalid = sum(sum(observation.num_invalid.values()) for observation in observations)
        values["amo/invalid_observations"] = float(num_invalid)
        return values

    # ---------------------------------------------------------------- what these rest on

    @property
    def _trials(self) -> Trials:
        config = self.config
        return Trials(steps_to_try(config), config.base_steps, config.base_ell)

    def _timeline(self, begin: int) -> Timeline:
        """The timeline from a step on; at least one observation is made after that."""
        last = max(self.config.observe_until, self._following(begin))
        if self.config.observe_only:
            return Timeline(begin, last, plan_step=None, lock_step=None)
        return Timeline(begin, last, plan_step=last, lock_step=last + self.config.transition_steps)

    def _following(self, step: int) -> int:
        """The first multiple of ``observe_every`` after a step."""
        return (step // self.config.interval + 1) * self.config.interval

    def _next_observation(self, state: AMOState, last: int) -> int | None:
        """The step of the first observation after a step; None once all are made."""
        due = self._following(max(state.timeline.begin, last))
        return due if state.plan is None and due <= state.timeline.observe_until else None

    def _is_complete(self, state: AMOState) -> bool:
        """Whether every observation toward a plan is made."""
        return state.plan is None and state.latest_step >= state.timeline.observe_until

    def _evidence(self, state: AMOState, groups: Groups) -> dict[str, Any]:
        """Fields of the plan that follow from the observations."""
        if not self._is_complete(state):
            steps = [observation.step for observation in state.observations]
            fail("observations", steps, f"observations up to step {state.timeline.observe_until}")
        robust, base = robust_ells(state.observations), self.config.base_ell
        ells = tuple(base if ell is None else ell for ell in robust.values())
        evidence: dict[str, Any] = {
            "ell_robust": ells,
            "num_matrices": tuple(map(len, groups.members.values())),
        }
        sums, trials = state.error_sums, self._trials
        means = [None if sums is None else sums.mean(group) for group in groups.members]
        if self.config.planner == "measured":
            weights = shares_of(groups)
            return evidence | {"weights": weights, "measured": tuple(map(trials.best, means))}
        evidence["ell_target"] = targets(self.config, ells)
        inputs = plan_inputs(self.config, groups.members, costs_of(groups))
        # The paper's budget may need numbers of steps outside of the settings' range.
        if sums is None or trials.steps != range(inputs["min_steps"], inputs["max_steps"] + 1):
            return evidence | {"measured": None}
        pairs = zip(means, evidence["ell_target"], strict=True)
        return evidence | {"measured": tuple(trials.at(errors, ell) for errors, ell in pairs)}
