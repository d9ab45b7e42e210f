"""The memory of AMO over a run, which a checkpoint holds."""

from __future__ import annotations

import dataclasses

from amo_dist.schedule import fields
from amo_dist.schedule.observation import Observation
from amo_dist.schedule.plan import Plan
from amo_dist.schedule.trials import ErrorSums


@dataclasses.dataclass(frozen=True, slots=True)
class Timeline(fields.Stored):
    """The steps at which the phases of a run begin and end."""

    begin: fields.CountOrZero
    """Step after which observations count: 0, or that at which changed settings dropped a plan."""
    observe_until: fields.Count
    """Step of the last observation."""
    plan_step: fields.Count | None
    """Step within which the plan is made and adopted; None: no plan is made."""
    lock_step: fields.Count | None
    """First step of the plan itself, which locks the schedules."""

    def phase(self, step: int) -> str:
        """``observation``, ``transition``, ``locked``; ``uniform`` after observations alone."""
        if step <= self.observe_until:
            return "observation"
        if self.lock_step is None:
            return "uniform"
        return "transition" if step < self.lock_step else "locked"


@dataclasses.dataclass(frozen=True, slots=True)
class AMOState(fields.Stored):
    """Timeline, observations, and the plan made of them."""

    timeline: Timeline
    observations: tuple[Observation, ...] = ()
    """Observations of the plan, or those toward it."""
    error_sums: ErrorSums | None = None
    """Errors of trial schedules on the observed spectra; None before the first observation, and
    once there is a plan."""
    plan: Plan | None = None

    @property
    def latest_step(self) -> int:
        """The last step that the observations name; 0 for none."""
        return self.observations[-1].step if self.observations else 0

    def check_groups(self, groups: tuple[str, ...], field: str) -> None:
        """Refuse a state of other groups of matrices than these.

        Args:
            groups: Names in the order of plans.
            field: Name of the state in errors.

        Raises:
            ValueError: Names the part of the state.
        """
        parts = [("observations", tuple(observation.ell)) for observation in self.observations]
        if self.plan is not None:
            parts.append(("plan.operator_types", self.plan.operator_types))
        if self.error_sums is not None:
            parts.append(("error_sums.totals", tuple(self.error_sums.totals)))
        for part, names in parts:
            if names != groups:
                expected = f"the operator types {list(groups)}: is this another model's state?"
                fields.fail(f"{field}.{part}", names, expected)

    def _check(self, field: str) -> None:
        if self.plan is not None and not self.observations:
            fields.fail(f"{field}.plan", "a plan", "null without observations")
        if self.observations:
            self.check_groups(tuple(self.observations[0].ell), field)
