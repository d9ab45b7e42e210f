"""What AMO remembers of a run, and a checkpoint holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from amo_dist.schedule import fields
from amo_dist.schedule.observation import Observation
from amo_dist.schedule.plan import Plan
from amo_dist.schedule.trials import ErrorSums


@dataclasses.dataclass(frozen=True, slots=True)
class AMOState(fields.Stored):
    """Observations, the plan made of them, and what became of it."""

    observations: tuple[Observation, ...] = ()
    """Those the plan in force was made of; without a plan, those toward the first."""
    plan: Plan | None = None
    replanned_at: fields.CountOrZero | None = None
    """Where a changed configuration dropped a plan: observations up to this step may have been
    made by another configuration."""
    transition_from: Mapping[str, tuple[fields.Steps, fields.Ell]] | None = None
    """What the plan's transition starts from, by group: Newton-Schulz steps and effective ``ell``.
    The uniform schedule where None, as for every first plan."""
    observations_since_plan: tuple[Observation, ...] = ()
    """Those toward the next plan."""
    error_sums: ErrorSums | None = None
    """What trial schedules left of the spectra observed toward the next plan; None before the
    first of them."""

    @property
    def all_observations(self) -> tuple[Observation, ...]:
        """Those of the plan in force and those since, in the order of steps."""
        return self.observations + self.observations_since_plan

    @property
    def plan_step(self) -> int | None:
        """The step within which the plan in force was made."""
        return None if self.plan is None else self.observations[-1].step

    @property
    def pending(self) -> tuple[Observation, ...]:
        """The observations toward the next plan."""
        return self.observations if self.plan is None else self.observations_since_plan

    @property
    def latest_pending(self) -> int:
        """The step of the last observation toward the next plan; 0 before the first."""
        return self.pending[-1].step if self.pending else 0

    @property
    def latest_step(self) -> int:
        """The last step of which this knows; 0 for none."""
        made = [observation.step for observation in self.all_observations]
        return max([*made, self.replanned_at or 0])

    def observed(self, observation: Observation, error_sums: ErrorSums | None) -> AMOState:
        """The same with one more observation toward the next plan.

        Args:
            observation: The medians.
            error_sums: With those of this observation.
        """
        pending = (*self.pending, observation)
        if self.plan is None:
            return dataclasses.replace(self, observations=pending, error_sums=error_sums)
        return dataclasses.replace(self, observations_since_plan=pending, error_sums=error_sums)

    def check_groups(self, groups: tuple[str, ...], field: str) -> None:
        """Refuse a state of other groups of matrices than these.

        Args:
            groups: In the order of plans.
            field: Names the state in errors.

        Raises:
            ValueError: Names the part of the state.
        """
        found = [("observations", tuple(each.ell)) for each in self.all_observations]
        if self.plan is not None:
            found.append(("plan.operator_types", self.plan.operator_types))
        if self.transition_from is not None:
            found.append(("transition_from", tuple(self.transition_from)))
        if self.error_sums is not None:
            found.append(("error_sums.totals", tuple(self.error_sums.totals)))
        for part, names in found:
            if names != groups:
                expected = f"the operator types {list(groups)}: is this another model's state?"
                fields.fail(f"{field}.{part}", names, expected)

    def _check(self, field: str) -> None:
        if self.plan is not None and not self.observations:
            fields.fail(f"{field}.plan", "a plan", "null without observations")
        if self.plan is None and self.transition_from is not None:
            fields.fail(f"{field}.transition_from", self.transition_from, "null without a plan")
        if self.observations:
            self.check_groups(tuple(self.observations[0].ell), field)
