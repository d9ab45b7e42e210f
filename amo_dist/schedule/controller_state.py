"""What AMO's controller remembers, and how it is written to and read from a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from amo_dist.config import sort_operator_types
from amo_dist.schedule import fields
from amo_dist.schedule.observation import Observation
from amo_dist.schedule.plan import Plan, State


@dataclasses.dataclass(frozen=True, slots=True)
class ControllerState:
    """All that a controller remembers, and a checkpoint holds."""

    observations: tuple[Observation, ...] = ()
    """Those the plan in force was made of; without a plan, those toward the first."""
    plan: Plan | None = None
    replanned_at: int | None = None
    """Where a changed configuration dropped a plan: observations up to this step may have been
    made by another configuration."""
    transition_from: State | None = None
    """What the plan's transition starts from, by operator type; the uniform schedule where None,
    as for every first plan."""
    observations_since_plan: tuple[Observation, ...] = ()
    """Those toward the next plan."""
    fallbacks: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Operator types that fell back to the uniform schedule, and after which step."""

    @property
    def plan_step(self) -> int | None:
        """The step within which the plan in force was made."""
        return self.observations[-1].step if self.plan is not None and self.observations else None

    @property
    def pending(self) -> tuple[Observation, ...]:
        """The observations toward the next plan."""
        return self.observations if self.plan is None else self.observations_since_plan

    def with_pending(self, pending: tuple[Observation, ...]) -> ControllerState:
        """The same with other observations toward the next plan."""
        if self.plan is None:
            return dataclasses.replace(self, observations=pending)
        return dataclasses.replace(self, observations_since_plan=pending)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values, floats as ``float.hex()``."""
        start = self.transition_from
        return {
            "observations": [each.to_dict() for each in self.observations],
            "plan": None if self.plan is None else self.plan.to_dict(),
            "replanned_at": self.replanned_at,
            "transition_from": None
            if start is None
            else {name: [steps, fields.write_float(ell)] for name, (steps, ell) in start.items()},
            "observations_since_plan": [each.to_dict() for each in self.observations_since_plan],
            "fallbacks": dict(self.fallbacks),
        }

    @classmethod
    def from_dict(cls, found: object) -> ControllerState:
        """Read what ``to_dict`` wrote.

        Raises:
            ValueError: A field is missing, unknown or malformed.
        """
        record = fields.read_record("state", found, STATE_KEYS)
        plan, replanned_at = record["plan"], record["replanned_at"]
        fallbacks = record["fallbacks"]
        if not isinstance(fallbacks, Mapping):
            fields.fail("fallbacks", fallbacks, "a mapping by operator type")
        return cls(
            observations=_read_observations("observations", record["observations"]),
            plan=None if plan is None else Plan.from_dict(plan),
            replanned_at=None
            if replanned_at is None
            else fields.read_int("replanned_at", replanned_at, 0),
            transition_from=_read_start(record["transition_from"]),
            observations_since_plan=_read_observations(
                "observations_since_plan", record["observations_since_plan"]
            ),
            fallbacks={
                name: fields.read_int(f"fallbacks.{name}", step, 1)
                for name, step in fallbacks.items()
            },
        )

    def check_plan_parts(self, names: tuple[str, ...]) -> None:
        """Refuse what belongs to a plan and is at odds with it, or stands there without one.

        Args:
            names: The operator types of the observations or the registry.

        Raises:
            ValueError: Names the field.
        """
        plan, start = self.plan, self.transition_from
        if plan is None:
            for field, nothing in (
                ("transition_from", None),
                ("observations_since_plan", ()),
                ("fallbacks", {}),
            ):
                if getattr(self, field) != nothing:
                    expected = f"{nothing!r} without a plan"
                    fields.fail(field, getattr(self, field), expected)
            return
        if plan.operator_types != names:
            fields.fail("plan.operator_types", plan.operator_types, f"{names}")
        if start is not None and tuple(start) != names:
            fields.fail("transition_from", list(start), f"the operator types {list(names)}")
        for name, step in self.fallbacks.items():
            if name not in names:
                fields.fail("fallbacks", name, f"one of the operator types {list(names)}")
            if step <= (self.plan_step or 0):
                expected = f"a step after the plan's, {self.plan_step}"
                fields.fail(f"fallbacks.{name}", step, expected)

    def check_start(self) -> None:
        """Refuse a start that no plan of the same configuration, or a fall back from it, has left.

        Raises:
            ValueError: Names the field.
        """
        plan, start = self.plan, self.transition_from
        if plan is None or start is None:
            return
        low, high, uniform = plan.min_steps, plan.max_steps, (plan.base_steps, plan.base_ell)
        for name, (steps, ell) in start.items():
            if not low <= steps <= high and (steps, ell) != uniform:
                expected = f"{low} to {high} steps, or the uniform schedule {list(uniform)}"
                fields.fail(f"transition_from.{name}", [steps, ell], expected)


STATE_KEYS = tuple(field.name for field in dataclasses.fields(ControllerState))


def _read_observations(field: str, found: object) -> tuple[Observation, ...]:
    listed = fields.read_list(field, found)
    return tuple(Observation.from_dict(each, f"{field}[{i}]") for i, each in enumerate(listed))


def _read_start(found: object) -> State | None:
    if found is None:
        return None
    if not isinstance(found, Mapping):
        fields.fail("transition_from", found, "a mapping by operator type, or null")
    start: dict[str, tuple[int, float]] = {}
    for name in sort_operator_types(fields.read_names("transition_from", list(found))):
        place = f"transition_from.{name}"
        listed = fields.read_list(place, found[name])
        if len(listed) != 2:
            fields.fail(place, listed, "Newton-Schulz steps and ell")
        start[name] = fields.read_int(place, listed[0], 1), fields.read_ell(place, listed[1])
    return start
