"""AMO's controller: observe, plan, glide to the plan, lock; and again where it is asked to.

It holds the observations and the plan, and says for each optimizer step how many Newton-Schulz
steps each operator type takes and for which ``ell``. It never communicates: given the same
records it is in the same state on every rank.
"""

from __future__ import annotations

import dataclasses
import logging
import statistics
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

from amo_dist.config import AMOConfig
from amo_dist.schedule import fields
from amo_dist.schedule.calendar import Calendar
from amo_dist.schedule.controller_state import ControllerState
from amo_dist.schedule.observation import Observation, draw, effective_ell, robust_ells
from amo_dist.schedule.plan import Plan, costs_by_type, frame, make_plan, targets
from amo_dist.schedule.types import MatrixInfo

logger = logging.getLogger(__name__)

PHASES = ("observation", "transition", "locked", "uniform")
"""The phases of AMO, in their order. ``uniform`` follows ``observation`` under ``observe_only``;
``transition`` comes after ``locked`` again where a later plan is made."""


class Controller:
    """Phases, observations and plan of one run.

    Args:
        config: When to observe, how to plan, how long to glide.
    """

    def __init__(self, config: AMOConfig) -> None:
        self._config = config
        self._state = ControllerState()
        self._names_by_type: dict[str, tuple[str, ...]] = {}
        self._costs: dict[str, int] = {}
        self._config_may_differ = False

    @property
    def observations(self) -> tuple[Observation, ...]:
        """Those of the plan in force and those since, in the order of steps."""
        return self._state.observations + self._state.observations_since_plan

    @property
    def plan(self) -> Plan | None:
        """The adopted plan, if any."""
        return self._state.plan

    def bind(self, registry: Sequence[MatrixInfo]) -> None:
        """Take the world's matrices, and check a restored state against them.

        Args:
            registry: Every matrix of the world, the same on every rank.

        Raises:
            ValueError: It is empty, the budget is infeasible for it, or the restored state belongs
                to other operator types.
        """
        if not registry:
            fields.fail("registry", [], "at least one matrix")
        costs = costs_by_type(registry)
        # An infeasible budget must not come to light at the last observation, hours into a run.
        frame(self._config, dict.fromkeys(costs, self._config.base_ell), costs)
        self._check_state(self._state, costs, self._config_may_differ)
        names = {t: sorted(m.name for m in registry if m.operator_type == t) for t in costs}
        self._names_by_type = {t: tuple(ordered) for t, ordered in names.items()}
        self._costs = costs

    def phase(self, step: int) -> str:
        """One of ``PHASES``, for an optimizer step counted from 1."""
        done = step - self._horizon
        if done <= 0:
            # A later plan is made while the one before is locked.
            return "observation" if self._state.transition_from is None else "locked"
        if self._config.observe_only and self.plan is None:
            return "uniform"
        return "transition" if done < self._config.transition_steps else "locked"

    def progress(self, step: int) -> tuple[object, ...]:
        """A value that is the same for two steps only where ``state_at`` is."""
        return self._horizon, self._steps_of_transition(step), self.fallen_back(step)

    def sample(self, step: int) -> tuple[str, ...]:
        """Names of the matrices to observe at a step, sorted; none at most steps.

        Args:
            step: Optimizer step, counted from 1. Between the first plan and the one in force
                nothing is told.
        """
        planned = self._state.plan_step
        since = planned if planned is not None and step > planned else None
        if not self._calendar().observes(step, since):
            return ()
        drawn = [
            name
            for operator_type, names in self._names_by_type.items()
            for name in draw(
                *(self._config.seed, step, operator_type, names, self._config.sample_size)
            )
        ]
        return tuple(sorted(drawn))

    def record(self, step: int, ell_by_name: Mapping[str, float]) -> None:
        """Keep the medians of one observation.

        Args:
            step: Optimizer step, the next one due for observation.
            ell_by_name: Raw ``ell`` of each matrix of ``sample(step)``; NaN for a matrix with a
                non-finite entry or with zeros alone.

        Raises:
            ValueError: The step is not due, the names are not those sampled, or a value is
                no ``ell``.
        """
        due = self._next_observation()
        if step != due:
            fields.fail("step", step, f"{due}, the next observation")
        if set(ell_by_name) != set(self.sample(step)):
            fields.fail("ell_by_name", sorted(ell_by_name), f"the names {self.sample(step)}")
        ell, num_sampled, num_invalid = {}, {}, {}
        for operator_type, names in self._names_by_type.items():
            values = {n: effective_ell(n, ell_by_name[n]) for n in names if n in ell_by_name}
            valid = [value for value in values.values() if value is not None]
            ell[operator_type] = statistics.median(valid) if valid else None
            num_sampled[operator_type] = len(values)
            num_invalid[operator_type] = len(values) - len(valid)
            if len(valid) < len(values):
                invalid = ", ".join(name for name, value in values.items() if value is None)
                logger.warning("step %d: no valid ell for %s: left out", step, invalid)
        observation = Observation(step, ell, num_sampled, num_invalid)
        self._state = self._state.with_pending((*self._state.pending, observation))

    def plan_due(self, step: int) -> bool:
        """Whether every observation toward the next plan is made, and the plan not adopted yet."""
        until = self._calendar().next_plan(self._state.plan_step)
        if until is None or self._config.observe_only:
            return False
        return step >= until and self._is_complete()

    def make_plan(self) -> Plan:
        """Plan from the observations; a pure function of them and of the configuration.

        Raises:
            ValueError: Observations are missing, or the budget is infeasible.
        """
        self._require_complete()
        robust = robust_ells(self._state.pending)
        for operator_type, ell in robust.items():
            if ell is None:
                logger.warning(
                    "%s has no valid observation; it falls back to base_ell = %g",
                    *(operator_type, self._config.base_ell),
                )
        ells = self._with_fallback(robust)
        by_type = dict(zip(robust, targets(self._config, ells), strict=True))
        return make_plan(self._config, by_type, ell_robust=ells, costs=self._costs)

    def adopt(self, plan: Plan) -> None:
        """Commit to a plan.

        Raises:
            ValueError: Another plan is in force and none is due, observations are missing, or the
                plan is not one of these observations and this configuration.
        """
        if self._config.observe_only:
            fields.fail("plan", plan, "none: observe_only never commits to one")
        before = self._state
        if before.plan is not None and not self._is_complete():
            if plan != before.plan:
                fields.fail("plan", plan, "the plan already adopted")
            return
        self._require_complete()
        adopted = ControllerState(
            observations=before.pending,
            plan=plan,
            replanned_at=before.replanned_at,
            transition_from=None
            if before.plan is None
            else self.state_at(before.pending[-1].step + 1),
        )
        self._check_state(adopted, self._costs, self._config_may_differ)
        self._state = adopted

    def fall_back(self, step: int, operator_type: str) -> bool:
        """Run an operator type at the uniform schedule after ``step``, until the next plan.

        Args:
            step: The optimizer step just taken.
            operator_type: One of the registry.

        Returns:
            Whether that changes anything: not while the type runs that schedule already.
        """
        assert operator_type in self._names_by_type, operator_type
        is_planned = self.plan is not None and step > self._horizon
        if not is_planned or operator_type in self._state.fallbacks:
            return False
        fallbacks = {**self._state.fallbacks, operator_type: step}
        self._state = dataclasses.replace(self._state, fallbacks=fallbacks)
        return True

    def fallen_back(self, step: int) -> tuple[str, ...]:
        """The operator types that run at the uniform schedule against the plan, sorted."""
        return tuple(sorted(t for t, since in self._state.fallbacks.items() if step > since))

    def state_at(self, step: int) -> dict[str, tuple[int, float]]:
        """Newton-Schulz steps and effective ``ell`` of each operator type at an optimizer step.

        Args:
            step: Optimizer step, counted from 1.

        Raises:
            ValueError: The step lies beyond the observation phase and there is no plan.
        """
        if self.phase(step) in ("observation", "uniform"):
            uniform = (self._config.base_steps, self._config.base_ell)
            return dict.fromkeys(self._names_by_type, uniform)
        plan = self.plan
        if plan is None:
            fields.fail("step", step, f"at most {self._horizon} while no plan is adopted")
        progress = Fraction(self._steps_of_transition(step), self._config.transition_steps)
        planned = plan.state_at(progress, self._state.transition_from)
        fallen = dict.fromkeys(self.fallen_back(step), (plan.base_steps, plan.base_ell))
        return {**planned, **fallen}

    def to_dict(self) -> dict[str, Any]:
        """The state as JSON values."""
        return self._state.to_dict()

    def load_dict(self, state: object, *, allow_config_change: bool = False) -> None:
        """Restore what ``to_dict`` wrote; on an error nothing has changed.

        Args:
            state: What ``to_dict`` returned.
            allow_config_change: Accept a state that another configuration made. A plan made
                stays in force as it is.

        Raises:
            ValueError: A field is missing, unknown, malformed, or at odds with another, with the
                configuration, or with the registry.
        """
        parsed = ControllerState.from_dict(state)
        self._check_state(parsed, self._costs, allow_config_change)
        self._state, self._config_may_differ = parsed, allow_config_change

    def check_progress(self, steps_taken: int) -> None:
        """Refuse a restored state that is not one of a run of ``steps_taken`` optimizer steps.

        Raises:
            ValueError: Observations or the plan are missing for that step, or ahead of it.
        """
        made = [observation.step for observation in self.observations]
        latest = max([*made, *self._state.fallbacks.values(), self._state.replanned_at or 0])
        if latest > steps_taken:
            fields.fail("steps_taken", steps_taken, f"at least {latest}, as in the observations")
        due = self._next_observation()
        if due is not None and due <= steps_taken:
            expected = f"the one of step {due} too, after {steps_taken} steps"
            fields.fail("observations", made, expected)
        if self.plan_due(steps_taken):
            fields.fail("plan", self.plan, f"a newer plan after {steps_taken} steps")

    def _calendar(self) -> Calendar:
        return Calendar(self._config, self._state.replanned_at)

    @property
    def _horizon(self) -> int:
        """The step after which the plan in force, or the first to come, begins to count."""
        planned = self._state.plan_step
        return self._calendar().first_plan if planned is None else planned

    def _steps_of_transition(self, step: int) -> int:
        """How many of its steps the transition has taken at ``step``."""
        return min(max(step - self._horizon, 0), self._config.transition_steps)

    def _next_observation(self) -> int | None:
        pending = self._state.pending
        last = pending[-1].step if pending else None
        return self._calendar().next_observation(self._state.plan_step, last)

    def _is_complete(self) -> bool:
        pending, until = self._state.pending, self._calendar().next_plan(self._state.plan_step)
        return bool(pending) and until is not None and pending[-1].step >= until

    def _require_complete(self) -> None:
        if not self._is_complete():
            until = self._calendar().next_plan(self._state.plan_step)
            found = [observation.step for observation in self._state.pending]
            fields.fail("observations", found, f"observations up to step {until}")

    def _with_fallback(self, robust: Mapping[str, float | None]) -> tuple[float, ...]:
        return tuple(self._config.base_ell if ell is None else ell for ell in robust.values())

    def _check_state(
        self, state: ControllerState, costs: Mapping[str, int], config_may_differ: bool
    ) -> None:
        """Refuse a state at odds with itself, the configuration or the registry (``costs``).

        Before ``bind`` there is no registry: ``bind`` calls this again.
        """
        observations, plan = state.observations, state.plan
        names = tuple(costs) or (tuple(observations[0].ell) if observations else ())
        for field in ("observations", "observations_since_plan"):
            for i, observation in enumerate(getattr(state, field)):
                if tuple(observation.ell) != names:
                    expected = f"the operator types {list(names)}"
                    fields.fail(f"{field}[{i}].ell", list(observation.ell), expected)
        if plan is not None and not observations:
            fields.fail("plan", "a plan", "null without observations")
        self._check_steps(state, config_may_differ)
        state.check_plan_parts(names)
        if not config_may_differ:
            state.check_start()
        if plan is None:
            return
        robust = robust_ells(observations)
        for name, found, ell in zip(names, plan.ell_robust, robust.values(), strict=True):
            if ell is not None and found != ell:
                fields.fail(f"plan.ell_robust.{name}", found, f"{ell!r}, as observed")
        if costs and not config_may_differ:
            self._check_plan(plan, robust, costs)

    def _check_steps(self, state: ControllerState, config_may_differ: bool) -> None:
        """Refuse observations that this configuration would not have made."""
        steps = [o.step for o in (*state.observations, *state.observations_since_plan)]
        if config_may_differ:
            if any(later <= earlier for earlier, later in pairwise(steps)):
                fields.fail("observations", steps, "rising steps")
            return
        calendar = Calendar(self._config, state.replanned_at)
        before = None
        if state.transition_from is not None and state.plan_step is not None:
            before = self._plan_step_before(state.plan_step, calendar)
        last = _check_pending("observations", state.observations, before, calendar)
        if state.plan is None:
            return
        until = calendar.next_plan(before)
        if last != until:
            fields.fail("plan", "a plan", f"null before the observation at step {until}")
        since = state.observations_since_plan
        _check_pending("observations_since_plan", since, state.plan_step, calendar)

    def _plan_step_before(self, plan_step: int, calendar: Calendar) -> int:
        """The step of the plan before that of ``plan_step``, which is not the first."""
        every, since = self._config.replan_every, plan_step - calendar.first_plan
        if not every or since <= 0 or since % every:
            expected = f"null for a plan made at step {plan_step} with replan_every = {every}"
            fields.fail("transition_from", "schedules", expected)
        return plan_step - every

    def _check_plan(
        self, plan: Plan, robust: Mapping[str, float | None], costs: Mapping[str, int]
    ) -> None:
        """Refuse a plan that this configuration would not have made of these observations."""
        ells = self._with_fallback(robust)
        by_type = dict(zip(robust, targets(self._config, ells), strict=True))
        expected = {**frame(self._config, by_type, costs), "ell_robust": ells}
        for key, value in expected.items():
            if getattr(plan, key) != value:
                fields.fail(f"plan.{key}", getattr(plan, key), f"{value!r}")


def _check_pending(
    field: str, observations: Sequence[Observation], plan_step: int | None, calendar: Calendar
) -> int | None:
    """Check the steps of observations toward one plan; the last of them."""
    foreign_until, last = calendar.replanned_at or 0, None
    for i, observation in enumerate(observations):
        step, due = observation.step, calendar.next_observation(plan_step, last)
        is_foreign = (last or 0) < step <= foreign_until and plan_step is None
        if not is_foreign and step != due:
            config = calendar.config
            fields.fail(
                f"{field}[{i}].step",
                step,
                f"{due}, with observe_every = {config.observe_every} and observe_until = "
                f"{config.observe_until} and replan_every = {config.replan_every}",
            )
        last = step
    return last
