"""AMO's policy: observe, plan, glide to the plan, lock; and again where it is asked to."""

from __future__ import annotations

import dataclasses
import logging
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from typing import Any

from amo_dist.config import AMOConfig, MuonConfig
from amo_dist.schedule.amo_state import AMOState
from amo_dist.schedule.fields import fail
from amo_dist.schedule.grouping import Groups, group_matrices
from amo_dist.schedule.observation import Observation, draw, effective_ell, robust_ells
from amo_dist.schedule.plan import Plan, StepsAndElls
from amo_dist.schedule.plan_table import plan_table, starved
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
from amo_dist.schedule.trials import REFERENCES, Errors, ErrorSums, Trials
from amo_dist.schedule.types import MatrixInfo, Schedule

logger = logging.getLogger(__name__)

PHASES = ("observation", "transition", "locked", "uniform")
"""The phases of AMO, in their order. ``uniform`` follows ``observation`` under ``observe_only``;
``transition`` comes after ``locked`` again where a later plan is made."""


_WEIGHTS = {"update_norm", "adjust_lr"}
"""Settings of every optimizer of the family by which errors are measured and weighted."""


@dataclasses.dataclass(frozen=True)
class AMOPolicy(Policy):
    """Adaptive Muon Orthogonalization: observe, plan, glide to the plan, lock.

    Optimizer steps 1 to ``observe_until`` run the uniform schedule and are observed; the plan is
    adopted within the last of them. The next ``transition_steps`` interpolate; from the last of
    these on (``lock_step``) the plan itself is in force. With ``observe_only`` no plan is made: the
    uniform schedule stays, and its phase after the last observation is ``uniform``. With
    ``replan_every`` the locked run is observed too, and glides from plan to plan.
    """

    name = "amo"
    is_fixed = False

    config: AMOConfig
    """When to observe, how to plan, how long to glide."""

    def __post_init__(self) -> None:
        known = ("uniform", *REFERENCES)
        if self.config.as_good_as not in (None, *known):
            fail("as_good_as", self.config.as_good_as, f"one of {', '.join(known)}")

    def groups(self, registry: Sequence[MatrixInfo]) -> Groups:
        """See `Policy.groups`; refuses a budget that cannot be met.

        It must not come to light at the last observation, hours into a run.
        """
        if not registry:
            fail("registry", [], "at least one matrix")
        groups = group_matrices(registry, self.config.granularity)
        plan_inputs(self.config, groups.members, costs_of(groups))
        return groups

    def start(self) -> AMOState:
        """Nothing observed."""
        return AMOState()

    # ---------------------------------------------------------------- schedules

    def schedules(self, state: AMOState, groups: Groups, step: int) -> Mapping[str, Schedule]:
        """Uniform, interpolated or planned schedules."""
        found = self.state_at(state, groups, step)
        return {group: composed(ell, steps) for group, (steps, ell) in found.items()}

    def next_change(self, state: AMOState, step: int) -> float:
        """The next observation, the end of this phase, or the next step of the transition."""
        horizon, due = self._horizon(state), self._next_observation(state, step)
        change: float = math.inf if due is None else due
        if step <= horizon:
            return min(change, horizon + 1)
        if state.plan is not None and step < horizon + self.config.transition_steps:
            return step + 1
        return change

    def phase(self, state: AMOState, step: int) -> str:
        """One of ``PHASES``."""
        done = step - self._horizon(state)
        if done <= 0:
            # A later plan is made while the one before is locked.
            return "observation" if state.transition_from is None else "locked"
        if self.config.observe_only and state.plan is None:
            return "uniform"
        return "transition" if done < self.config.transition_steps else "locked"

    def state_at(self, state: AMOState, groups: Groups, step: int) -> StepsAndElls:
        """Newton-Schulz steps and effective ``ell`` of each group at an optimizer step.

        Raises:
            ValueError: The step lies beyond the observation phase and there is no plan.
        """
        if self.phase(state, step) in ("observation", "uniform"):
            return dict.fromkeys(groups.members, (self.config.base_steps, self.config.base_ell))
        if state.plan is None:
            fail("step", step, f"at most {self._horizon(state)} while no plan is adopted")
        done = self._steps_of_transition(state, step)
        progress = Fraction(done, self.config.transition_steps)
        return state.plan.state_at(progress, state.transition_from)

    # ---------------------------------------------------------------- observation

    def sample(self, state: AMOState, groups: Groups, step: int) -> tuple[str, ...]:
        """Names of the matrices to observe at a step, sorted; ``()`` at most steps.

        Of the steps up to the plan in force nothing is told.
        """
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
        ell_by_name: Mapping[str, float],
        errors_by_name: Mapping[str, Errors],
    ) -> AMOState:
        """Keep the medians of one observation, and add up the errors; see `Policy.record`."""
        due = self._next_observation(state, state.latest_pending)
        if step != due:
            fail("step", step, f"{due}, the next observation")
        sample = self.sample(state, groups, step)
        if set(ell_by_name) != set(sample):
            fail("ell_by_name", sorted(ell_by_name), f"the names {sample}")
        ell, num_sampled, num_invalid = {}, {}, {}
        errors: dict[str, list[tuple[float, Errors]]] = {}
        for group, members in groups.members.items():
            names = [matrix.name for matrix in members if matrix.name in ell_by_name]
            values = {name: effective_ell(name, ell_by_name[name]) for name in names}
            valid = {name: value for name, value in values.items() if value is not None}
            ell[group] = statistics.median(valid.values()) if valid else None
            num_sampled[group] = len(values)
            num_invalid[group] = len(values) - len(valid)
            errors[group] = [
                (matrix.weight, self._trials.errors_of(matrix, errors_by_name[matrix.name]))
                for matrix in members
                if matrix.name in valid
            ]
            if len(valid) < len(values):
                invalid = ", ".join(name for name in values if name not in valid)
                logger.warning("step %d: no valid ell for %s: left out", step, invalid)
        observation = Observation(step, ell, num_sampled, num_invalid)
        sums = state.error_sums or ErrorSums.empty(groups.members, self._trials)
        return state.observed(observation, sums.plus(errors))

    # ---------------------------------------------------------------- plan

    def plan_due(self, state: AMOState) -> bool:
        """Whether every observation toward the next plan is made, and it is not adopted yet."""
        return self._is_complete(state) and not self.config.observe_only

    def make_plan(self, state: AMOState, groups: Groups) -> str:
        """Plan from the observations; a pure function of them and of the configuration."""
        seen, config = self._evidence(state, groups), self.config
        for group, ell in robust_ells(state.pending).items():
            if ell is None:
                logger.warning(
                    "%s has no valid observation; it falls back to base_ell = %g",
                    *(group, config.base_ell),
                )
        is_measured = config.planner == "measured"
        found = seen.pop("measured" if is_measured else "ell_target")
        by_group = dict(zip(groups.members, found, strict=True))
        make: Any = plan_measured if is_measured else plan_allocation
        plan: Plan = make(config, by_group, costs=costs_of(groups), **seen)
        logger.info("the plan, beside the uniform schedule:\n%s", plan_table(plan))
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
        start = None
        if state.plan is not None:
            start = self.state_at(state, groups, state.pending[-1].step + 1)
        return AMOState(state.pending, plan, state.replanned_at, start)

    # ---------------------------------------------------------------- saved state

    def resumed(
        self,
        found: object,
        groups: Groups | None,
        *,
        steps_taken: int,
        config: MuonConfig,
        changed: Collection[str] = (),
    ) -> tuple[AMOPolicy, AMOState]:
        """See `Policy.resumed`; where a setting has changed that plans depend on, one is dropped.

        The uniform schedule returns until the next plan, which comes with the first observation due
        at or after ``observe_until`` of this run, at least one more being made. Earlier
        observations of ``ell`` are kept, unless ``granularity`` has changed; measured errors are of
        the later ones.
        """
        state: AMOState = self.from_dict(found)
        shared = {field.name for field in dataclasses.fields(MuonConfig)} - _WEIGHTS
        if set(changed) - shared:
            # What was observed of other groups says nothing of these.
            kept = () if "granularity" in changed else state.all_observations
            state = AMOState(kept, replanned_at=steps_taken)
        policy = AMOPolicy(config) if isinstance(config, AMOConfig) else self
        policy._check_fits(state, None if groups is None else policy.groups(groups.matrices))
        policy._check_progress(state, steps_taken)
        return policy, state

    def _fields(self, state: AMOState) -> dict[str, Any]:
        return state.to_dict()

    def _read(self, found: Mapping[str, Any], groups: Groups | None) -> AMOState:
        # Files of version 0.1.0 tell which groups gave up their plan, which none does any more.
        kept = {key: value for key, value in found.items() if key != "fallbacks"}
        state = AMOState.from_dict(kept, "state")
        self._check_fits(state, groups)
        return state

    def _check_fits(self, state: AMOState, groups: Groups | None) -> None:
        if groups is not None:
            state.check_groups(tuple(groups.members), "state")
            if state.error_sums is not None:
                state.error_sums.check_trials(self._trials, "state.error_sums")

    def _check_progress(self, state: AMOState, steps_taken: int) -> None:
        """Refuse a restored state that is not one of a run of ``steps_taken`` optimizer steps."""
        latest = state.latest_step
        if latest > steps_taken:
            fail("steps_taken", steps_taken, f"at least {latest}, as in the observations")
        due = self._next_observation(state, state.latest_pending)
        if due is not None and due <= steps_taken:
            made = [observation.step for observation in state.all_observations]
            fail("observations", made, f"the one of step {due} too, after {steps_taken} steps")
        if self.plan_due(state):
            fail("plan", state.plan, f"a newer plan after {steps_taken} steps")

    def metrics(self, state: AMOState, groups: Groups, step: int) -> dict[str, float]:
        """Plain numbers for a logger, the same keys at every step.

        ``amo/phase`` is 0 in observation, 1 in transition, 2 when locked, 3 when uniform. By group,
        ``amo/ns_steps`` is the number of Newton-Schulz steps, ``amo/ell`` the latest observed
        effective ``ell`` and ``amo/ell_target`` the plan's; both are ``base_ell`` where there is
        none yet. ``amo/observations`` and ``amo/invalid_observations``, the matrices left out of
        their medians, count those of the plan in force and those since.
        """
        values = super().metrics(state, groups, step)
        plan, observations = state.plan, state.all_observations
        for i, name in enumerate(groups.members):
            valid = [ell for o in observations if (ell := o.ell[name]) is not None]
            values[f"amo/ell/{name}"] = valid[-1] if valid else self.config.base_ell
            target = self.config.base_ell if plan is None else plan.ell_target[i]
            values[f"amo/ell_target/{name}"] = target
        values["amo/phase"] = float(PHASES.index(self.phase(state, step)))
        values["amo/observations"] = float(len(observations))
        num_invalid = sum(sum(one.num_invalid.values()) for one in observations)
        values["amo/invalid_observations"] = float(num_invalid)
        return values

    # ---------------------------------------------------------------- what these rest on

    @property
    def _trials(self) -> Trials:
        config = self.config
        return Trials(steps_to_try(config), config.base_steps, config.base_ell)

    def _following(self, step: int) -> int:
        """The first multiple of ``observe_every`` after a step."""
        return (step // self.config.interval + 1) * self.config.interval

    def _horizon(self, state: AMOState) -> int:
        """The step of the plan in force, or of the first to come: it begins to count after it."""
        if state.plan_step is not None:
            return state.plan_step
        # Where a changed configuration dropped a plan, at least one observation is made after that.
        return max(self.config.observe_until, self._following(state.replanned_at or 0))

    def _next_plan(self, state: AMOState) -> int | None:
        """The step within which the next plan is made; None for never."""
        if state.plan_step is None:
            return self._horizon(state)
        again = self.config.replan_every
        return self._following(state.plan_step + again - 1) if again else None

    def _steps_of_transition(self, state: AMOState, step: int) -> int:
        """How many of its steps the transition has taken at ``step``."""
        return min(max(step - self._horizon(state), 0), self.config.transition_steps)

    def _next_observation(self, state: AMOState, last: int) -> int | None:
        """The step of the first observation after a step; None where none is due before a plan.

        Those toward a later plan begin at the lock of the plan before.
        """
        until, done = self._next_plan(state), state.replanned_at or 0
        if until is None:
            return None
        if state.plan_step is not None:
            done = state.plan_step + self.config.transition_steps - 1
        due = self._following(max(done, last))
        return due if due <= until else None

    def _is_complete(self, state: AMOState) -> bool:
        """Whether every observation toward the next plan is made."""
        until = self._next_plan(state)
        return until is not None and state.latest_pending >= until

    def _evidence(self, state: AMOState, groups: Groups) -> dict[str, Any]:
        """What the observations say: fields of the plan that is to be made of them."""
        if not self._is_complete(state):
            until = self._next_plan(state)
            found = [observation.step for observation in state.pending]
            fail("observations", found, f"observations up to step {until}")
        robust, base = robust_ells(state.pending), self.config.base_ell
        ells = tuple(base if ell is None else ell for ell in robust.values())
        seen: dict[str, Any] = {
            "ell_robust": ells,
            "num_matrices": tuple(map(len, groups.members.values())),
        }
        sums, trials = state.error_sums, self._trials
        means = [None if sums is None else sums.mean(group) for group in groups.members]
        if self.config.planner == "measured":
            weights = shares_of(groups)
            return seen | {"weights": weights, "measured": tuple(map(trials.best, means))}
        seen["ell_target"] = targets(self.config, ells)
        inputs = plan_inputs(self.config, groups.members, costs_of(groups))
        is_tried = trials.steps == range(inputs["min_steps"], inputs["max_steps"] + 1)
        # The paper's budget may need steps that nobody asked for, and version 0.1.0 tried none.
        if sums is None or not is_tried:
            return seen | {"measured": None}
        pairs = zip(means, seen["ell_target"], strict=True)
        return seen | {"measured": tuple(trials.at(errors, ell) for errors, ell in pairs)}
