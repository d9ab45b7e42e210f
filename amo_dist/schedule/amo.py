"""AMO's policy: observe, plan, glide to the plan, lock; and again where it is asked to."""

from __future__ import annotations

import dataclasses
import logging
import statistics
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from amo_dist.config import AMOConfig, MuonConfig
from amo_dist.schedule.amo_state import AMOState
from amo_dist.schedule.calendar import Calendar
from amo_dist.schedule.fields import fail
from amo_dist.schedule.grouping import matrices_by_group
from amo_dist.schedule.observation import Observation, draw, effective_ell, robust_ells
from amo_dist.schedule.plan import Plan, StepsAndElls
from amo_dist.schedule.plan_table import plan_table, starved
from amo_dist.schedule.planning import (
    costs_by_group,
    plan_allocation,
    plan_inputs,
    plan_measured,
    targets,
)
from amo_dist.schedule.polar_express import composed
from amo_dist.schedule.policies import Policy
from amo_dist.schedule.trials import Errors, ErrorSums, Trials
from amo_dist.schedule.types import MatrixInfo, Schedule

logger = logging.getLogger(__name__)

PHASES = ("observation", "transition", "locked", "uniform")
"""The phases of AMO, in their order. ``uniform`` follows ``observation`` under ``observe_only``;
``transition`` comes after ``locked`` again where a later plan is made."""


class AMOPolicy(Policy):
    """Adaptive Muon Orthogonalization: observe, plan, glide to the plan, lock.

    Optimizer steps 1 to ``observe_until`` run the uniform schedule and are observed; the plan is
    adopted within the last of them. The next ``transition_steps`` interpolate; from the last of
    these on (``lock_step``) the plan itself is in force. With ``observe_only`` no plan is made: the
    uniform schedule stays, and its phase after the last observation is ``uniform``. With
    ``replan_every`` the locked run is observed too, and glides from plan to plan.

    Args:
        config: When to observe, how to plan, how long to glide.
    """

    name = "amo"

    def __init__(self, config: AMOConfig) -> None:
        super().__init__()
        self.config = config
        self.observes_in_background = config.observe_in_background
        self._memory = AMOState()
        self._costs: dict[str, int] = {}
        self._applied: Mapping[str, Schedule] = MappingProxyType({})
        self._applied_key: object = None

    @property
    def observations(self) -> tuple[Observation, ...]:
        """Those of the plan in force and those since, in the order of steps."""
        return self._memory.all_observations

    @property
    def plan(self) -> Plan | None:
        """The adopted plan, if any."""
        return self._memory.plan

    # ---------------------------------------------------------------- schedules

    def schedules(self, step: int) -> Mapping[str, Schedule]:
        """Uniform, interpolated or planned schedules, composed when first needed."""
        self._require_bound()
        # Steps of one key have the same schedules: those of a phase are composed once.
        key = self._horizon, self._steps_of_transition(step), self.fallen_back(step)
        if self._applied_key != key:
            state = self.state_at(step)
            fresh = {group: composed(ell, steps) for group, (steps, ell) in state.items()}
            if fresh != self._applied:
                self._applied = MappingProxyType(fresh)
            self._applied_key = key
        return self._applied

    def phase(self, step: int) -> str:
        """One of ``PHASES``."""
        done = step - self._horizon
        if done <= 0:
            # A later plan is made while the one before is locked.
            return "observation" if self._memory.transition_from is None else "locked"
        if self.config.observe_only and self.plan is None:
            return "uniform"
        return "transition" if done < self.config.transition_steps else "locked"

    def state_at(self, step: int) -> StepsAndElls:
        """Newton-Schulz steps and effective ``ell`` of each group at an optimizer step.

        Args:
            step: Optimizer step, counted from 1.

        Raises:
            ValueError: The step lies beyond the observation phase and there is no plan.
        """
        if self.phase(step) in ("observation", "uniform"):
            return dict.fromkeys(self._costs, (self.config.base_steps, self.config.base_ell))
        plan = self.plan
        if plan is None:
            fail("step", step, f"at most {self._horizon} while no plan is adopted")
        progress = Fraction(self._steps_of_transition(step), self.config.transition_steps)
        planned = plan.state_at(progress, self._memory.transition_from)
        fallen = dict.fromkeys(self.fallen_back(step), (plan.base_steps, plan.base_ell))
        return {**planned, **fallen}

    # ---------------------------------------------------------------- observation

    def sample(self, step: int) -> tuple[str, ...]:
        """Names of the matrices to observe at a step, sorted; ``()`` at most steps.

        Of the steps up to the plan in force nothing is told.
        """
        self._require_bound()
        if not self._calendar.observes(step, self._memory.plan_step):
            return ()
        drawn: list[str] = []
        for group, members in self._members.items():
            names = [matrix.name for matrix in members]
            drawn += draw(self.config.seed, step, group, names, self.config.sample_size)
        return tuple(sorted(drawn))

    def trials(self) -> tuple[Schedule, ...]:
        """Every number of steps that a plan may give, with every ``ell`` of a grid."""
        return self._trials.schedules()

    def record(
        self,
        step: int,
        ell_by_name: Mapping[str, float],
        errors_by_name: Mapping[str, Errors] | None = None,
    ) -> None:
        """Keep the medians of one observation, and add up the errors; see ``Policy.record``."""
        self._require_bound()
        due = self._next_observation()
        if step != due:
            fail("step", step, f"{due}, the next observation")
        if set(ell_by_name) != set(self.sample(step)):
            fail("ell_by_name", sorted(ell_by_name), f"the names {self.sample(step)}")
        if errors_by_name is None and self.config.objective == "measured":
            fail("errors_by_name", None, "the errors of all trials, for a measured objective")
        ell, num_sampled, num_invalid = {}, {}, {}
        errors: dict[str, list[Errors]] = {}
        for group, members in self._members.items():
            names = [matrix.name for matrix in members if matrix.name in ell_by_name]
            values = {name: effective_ell(name, ell_by_name[name]) for name in names}
            valid = {name: value for name, value in values.items() if value is not None}
            ell[group] = statistics.median(valid.values()) if valid else None
            num_sampled[group] = len(values)
            num_invalid[group] = len(values) - len(valid)
            errors[group] = [] if errors_by_name is None else [errors_by_name[n] for n in valid]
            if len(valid) < len(values):
                invalid = ", ".join(name for name in values if name not in valid)
                logger.warning("step %d: no valid ell for %s: left out", step, invalid)
        observation = Observation(step, ell, num_sampled, num_invalid)
        sums = self._memory.error_sums
        if errors_by_name is not None:
            sums = (sums or ErrorSums.empty(self._members, self._trials)).plus(errors)
        self._memory = self._memory.observed(observation, sums)

    # ---------------------------------------------------------------- plan

    def plan_due(self, step: int) -> bool:
        """Whether every observation toward the next plan is made, and it is not adopted yet."""
        return self._is_complete() and not self.config.observe_only

    def make_plan(self) -> str:
        """Plan from the observations; a pure function of them and of the configuration."""
        for group, ell in robust_ells(self._memory.pending).items():
            if ell is None:
                logger.warning(
                    "%s has no valid observation; it falls back to base_ell = %g",
                    *(group, self.config.base_ell),
                )
        seen = self._evidence()
        names, costs = tuple(self._costs), self._costs
        if self.config.objective == "measured":
            plan = plan_measured(
                self.config,
                dict(zip(names, seen["measured"], strict=True)),
                num_matrices=dict(zip(names, seen["num_matrices"], strict=True)),
                ell_robust=seen["ell_robust"],
                costs=costs,
            )
        else:
            targeted = dict(zip(names, seen.pop("ell_target"), strict=True))
            plan = plan_allocation(self.config, targeted, costs=costs, **seen)
        logger.info("the plan, beside the uniform schedule:\n%s", plan_table(plan))
        for line in starved(plan):
            logger.warning("%s", line)
        return plan.to_json()

    def adopt_plan(self, payload: str) -> None:
        """Commit to the plan that one rank made; see ``Policy.adopt_plan``."""
        plan, before = Plan.from_json(payload), self._memory
        if self.config.observe_only:
            fail("plan", plan, "none: observe_only never commits to one")
        if before.plan is not None and not self._is_complete():
            if plan != before.plan:
                fail("plan", plan, "the plan already adopted")
            return
        expected = {
            **self._evidence(),
            **plan_inputs(self.config, tuple(self._costs), self._costs),
        }
        for key, value in expected.items():
            if getattr(plan, key) != value:
                fail(f"plan.{key}", getattr(plan, key), f"{value!r}, as this rank has recorded")
        start = None if before.plan is None else self.state_at(before.pending[-1].step + 1)
        self._memory = AMOState(before.pending, plan, before.replanned_at, start)

    def fall_back(self, step: int, name: str) -> bool:
        """Give up the plan for the group of a matrix; see ``Policy.fall_back``."""
        group = self.group_of(name)
        is_planned = self.plan is not None and step > self._horizon
        wants = self.config.ns_guard_fallback and is_planned
        if not wants or group in self._memory.fallbacks:
            return False
        fallbacks = {**self._memory.fallbacks, group: step}
        self._memory = dataclasses.replace(self._memory, fallbacks=fallbacks)
        return True

    def fallen_back(self, step: int) -> tuple[str, ...]:
        """The groups that run at the uniform schedule against the plan, sorted."""
        return tuple(sorted(g for g, since in self._memory.fallbacks.items() if step > since))

    # ---------------------------------------------------------------- saved state

    def resumed(
        self,
        state: Mapping[str, Any],
        *,
        steps_taken: int,
        config: MuonConfig,
        changed: Collection[str] = (),
    ) -> Policy:
        """See ``Policy.resumed``; where a setting that AMO adds has changed, the plan is dropped.

        The uniform schedule returns until the next plan, which comes with the first observation due
        at or after ``observe_until`` of this run, at least one more being made. Earlier
        observations of ``ell`` are kept, unless ``granularity`` has changed; measured residuals
        are of the later ones.
        """
        memory = AMOState.from_dict(self._read(state), "state")
        if set(changed) - {field.name for field in dataclasses.fields(MuonConfig)}:
            # What was observed of other groups says nothing of these.
            kept = () if "granularity" in changed else memory.all_observations
            memory = AMOState(kept, replanned_at=steps_taken)
        policy = type(self)(config if isinstance(config, AMOConfig) else self.config)
        policy._memory = memory
        if self._registry is not None:
            policy.bind(self._registry)
        policy._check_progress(steps_taken)
        return policy

    def check_operator_types(self, operator_types: Collection[str], *, is_alone: bool) -> None:
        """See ``Policy.check_operator_types``; only where they are what matrices are grouped by."""
        if self.config.granularity != "operator_type" or not self.observations:
            return
        found, here = set(self.observations[0].ell), set(operator_types)
        if here - found or (is_alone and found - here):
            expected = (
                f"the operator types {sorted(here)}: this is the checkpoint of another model, or "
                "of one whose parameters were classified otherwise"
            )
            fail("control.policy.observations", sorted(found), expected)

    def _state(self) -> dict[str, Any]:
        return self._memory.to_dict()

    def _restore(self, state: Mapping[str, Any]) -> None:
        memory = AMOState.from_dict(state, "state")
        if self._registry is not None:
            memory.check_fits(tuple(self._costs), self._trials, "state")
        self._memory, self._applied_key = memory, None

    def _check_progress(self, steps_taken: int) -> None:
        """Refuse a restored state that is not one of a run of ``steps_taken`` optimizer steps."""
        latest = self._memory.latest_step
        if latest > steps_taken:
            fail("steps_taken", steps_taken, f"at least {latest}, as in the observations")
        due = self._next_observation()
        if due is not None and due <= steps_taken:
            made = [observation.step for observation in self.observations]
            fail("observations", made, f"the one of step {due} too, after {steps_taken} steps")
        if self.plan_due(steps_taken):
            fail("plan", self.plan, f"a newer plan after {steps_taken} steps")

    def metrics(self, step: int) -> dict[str, float]:
        """Plain numbers for a logger, the same keys at every step.

        ``amo/phase`` is 0 in observation, 1 in transition, 2 when locked, 3 when uniform. By group,
        ``amo/ns_steps`` is the number of Newton-Schulz steps, ``amo/ell`` the latest observed
        effective ``ell`` and ``amo/ell_target`` the plan's; both are ``base_ell`` where there is
        none yet. ``amo/observations`` and ``amo/invalid_observations``, the matrices left out of
        their medians, count those of the plan in force and those since. ``amo/fallbacks`` is the
        number of groups that gave up the plan for the uniform schedule.
        """
        values = super().metrics(step)
        for i, name in enumerate(self._costs):
            valid = [ell for o in self.observations if (ell := o.ell[name]) is not None]
            values[f"amo/ell/{name}"] = valid[-1] if valid else self.config.base_ell
            target = self.config.base_ell if self.plan is None else self.plan.ell_target[i]
            values[f"amo/ell_target/{name}"] = target
        values["amo/phase"] = float(PHASES.index(self.phase(step)))
        values["amo/observations"] = float(len(self.observations))
        num_invalid = sum(sum(one.num_invalid.values()) for one in self.observations)
        values["amo/invalid_observations"] = float(num_invalid)
        values["amo/fallbacks"] = float(len(self.fallen_back(step)))
        return values

    # ---------------------------------------------------------------- what these rest on

    def _group(self, registry: Sequence[MatrixInfo]) -> Mapping[str, Sequence[MatrixInfo]]:
        return matrices_by_group(registry, self.config.granularity)

    def _bind(self, matrices_by_group: Mapping[str, Sequence[MatrixInfo]]) -> None:
        if not matrices_by_group:
            fail("registry", [], "at least one matrix")
        costs = costs_by_group(matrices_by_group)
        # An infeasible budget must not come to light at the last observation, hours into a run.
        inputs = plan_inputs(self.config, tuple(costs), costs)
        steps = range(inputs["min_steps"], inputs["max_steps"] + 1)
        trials = Trials(steps, self.config.base_steps, self.config.base_ell)
        self._memory.check_fits(tuple(costs), trials, "state")
        self._costs, self._trials = costs, trials

    @property
    def _calendar(self) -> Calendar:
        return Calendar(self.config, self._memory.replanned_at or 0)

    @property
    def _horizon(self) -> int:
        """The step after which the plan in force, or the first to come, begins to count."""
        planned = self._memory.plan_step
        return self._calendar.first_plan if planned is None else planned

    def _steps_of_transition(self, step: int) -> int:
        """How many of its steps the transition has taken at ``step``."""
        return min(max(step - self._horizon, 0), self.config.transition_steps)

    def _next_observation(self) -> int | None:
        pending = self._memory.pending
        last = pending[-1].step if pending else None
        return self._calendar.next_observation(self._memory.plan_step, last)

    def _is_complete(self) -> bool:
        """Whether every observation toward the next plan is made."""
        pending, until = self._memory.pending, self._calendar.next_plan(self._memory.plan_step)
        return bool(pending) and until is not None and pending[-1].step >= until

    def _evidence(self) -> dict[str, Any]:
        """What the observations say: fields of the plan that is to be made of them."""
        pending, sums = self._memory.pending, self._memory.error_sums
        if not self._is_complete():
            until = self._calendar.next_plan(self._memory.plan_step)
            found = [observation.step for observation in pending]
            fail("observations", found, f"observations up to step {until}")
        robust = robust_ells(pending)
        ells = tuple(self.config.base_ell if ell is None else ell for ell in robust.values())
        seen: dict[str, Any] = {
            "ell_robust": ells,
            "num_matrices": tuple(map(len, self._members.values())),
        }
        means = {group: None if sums is None else sums.mean(group) for group in self._costs}
        if self.config.objective == "measured":
            return seen | {"measured": tuple(map(self._trials.best, means.values()))}
        seen["ell_target"] = targets(self.config, ells)
        if sums is None:
            return seen | {"measured": None}
        pairs = zip(means.values(), seen["ell_target"], strict=True)
        return seen | {"measured": tuple(self._trials.at(errors, ell) for errors, ell in pairs)}
