"""Policies: which schedule each group of matrices uses at each optimizer step."""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import json
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

from amo_dist.config import MuonConfig, sort_operator_types
from amo_dist.schedule import fields
from amo_dist.schedule.coefficients import named_schedule
from amo_dist.schedule.grouping import Groups, group_matrices
from amo_dist.schedule.observation import Observed
from amo_dist.schedule.types import MatrixInfo, Schedule

logger = logging.getLogger(__name__)

_VERSION = 1

State: TypeAlias = Any
"""What a policy remembers of a run: a frozen value of the policy's own kind, None for a fixed one.
Its floats are exact in JSON."""


class Policy(abc.ABC):
    """The schedule of each group of matrices as a function of state and optimizer step.

    Matrices of one group share a schedule; by default a group is an operator type. A policy holds
    its configuration and nothing else; it knows no tensors and never communicates. What happens in
    a run makes a new state of the one before, the same on every rank that is told the same. Steps
    are counted from 1.
    """

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Name of the policy in saved state."""

    is_fixed: ClassVar[bool] = True
    """Whether it neither observes nor plans."""

    def groups(self, registry: Sequence[MatrixInfo]) -> Groups:
        """The matrices that share schedules.

        Args:
            registry: Every matrix of every rank, in any order; names are unique.

        Raises:
            ValueError: The policy cannot run these matrices.
        """
        return group_matrices(registry)

    def start(self) -> State:
        """The state before the first step."""
        return None

    @abc.abstractmethod
    def schedules(self, state: State, groups: Groups, step: int) -> Mapping[str, Schedule]:
        """The schedule of each group at one optimizer step.

        Raises:
            ValueError: The step has no schedule yet.
        """

    def next_change(self, state: State, step: int) -> float:
        """The first step after this one with other schedules, or with a sample.

        As long as the state stays; ``inf`` for never.
        """
        return math.inf

    def phase(self, state: State, step: int) -> str:
        """``uniform``; for AMO see ``PHASES``."""
        return "uniform"

    def sample(self, state: State, groups: Groups, step: int) -> tuple[str, ...]:
        """Names of the matrices to observe at a step, sorted; ``()`` for none."""
        return ()

    def trials(self) -> tuple[Schedule, ...]:
        """The schedules whose errors an observation measures; ``()`` for none."""
        return ()

    def record(
        self,
        state: State,
        groups: Groups,
        step: int,
        observed_by_name: Mapping[str, Observed],
    ) -> State:
        """The state with one more observation.

        Args:
            state: State before it.
            groups: Result of `groups`.
            step: Optimizer step.
            observed_by_name: Spectrum of each matrix of `sample`.

        Raises:
            ValueError: No observation is due at this step, or the names are not those sampled.
        """
        fields.fail("step", step, "no observation: this policy makes none")

    def plan_due(self, state: State) -> bool:
        """Whether a plan must be made and adopted before the next step."""
        return False

    def make_plan(self, state: State, groups: Groups) -> str:
        """The plan as JSON, for every rank's `adopt_plan`; called on one rank.

        Raises:
            ValueError: No plan is due.
        """
        fields.fail("plan", "a request", "none: this policy makes no plan")

    def adopt_plan(self, state: State, groups: Groups, payload: str) -> State:
        """The state committed to the plan that one rank made.

        Raises:
            ValueError: The payload is malformed, or not a plan of what this rank recorded.
        """
        fields.fail("plan", payload, "none: this policy adopts no plan")

    def to_dict(self, state: State) -> dict[str, Any]:
        """A state as JSON values, from which `from_dict` restores it bit for bit."""
        return {"version": _VERSION, "policy": self.name, **self._fields(state)}

    def from_dict(self, saved: object, groups: Groups | None = None) -> State:
        """Read and check what `to_dict` wrote.

        Args:
            saved: JSON values.
            groups: Groups that the state must fit, if they are known.

        Raises:
            ValueError: A field is unknown or malformed, or at odds with another or with the
                groups; the message names it.
        """
        if not isinstance(saved, Mapping):
            fields.fail("state", saved, "a mapping")
        for key, expected in (("policy", self.name), ("version", _VERSION)):
            fields.read_choice(f"state.{key}", saved.get(key, "nothing"), expected)
        entries = {key: value for key, value in saved.items() if key not in ("policy", "version")}
        return self._read(entries, groups)

    def resumed(
        self,
        saved: object,
        groups: Groups | None,
        *,
        steps_taken: int,
        config: MuonConfig,
        changed: Collection[str] = (),
    ) -> tuple[Policy, State]:
        """The policy and the state that go on from a saved state.

        Args:
            saved: Result of `to_dict`.
            groups: Argument of `from_dict`.
            steps_taken: Optimizer steps of the saved run.
            config: Settings to go on with.
            changed: Names of the settings that the saved run had otherwise.

        Raises:
            ValueError: The state is malformed, or not one of a run of so many steps.
        """
        return self, self.from_dict(saved, groups)

    def digest(self, state: State, groups: Groups, step: int) -> str:
        """A hexadecimal SHA-256 of the state and of the schedules applied at a step.

        Ranks with unequal digests would diverge.
        """
        schedules = self.schedules(state, groups, step)
        applied = {name: schedule.digest() for name, schedule in schedules.items()}
        text = json.dumps([self.to_dict(state), applied], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def metrics(self, state: State, groups: Groups, step: int) -> dict[str, float]:
        """Plain numbers for a logger: ``amo/ns_steps/<operator type>``."""
        schedules = self.schedules(state, groups, step)
        return {
            f"amo/ns_steps/{name}": float(schedule.num_steps)
            for name, schedule in schedules.items()
        }

    @abc.abstractmethod
    def _fields(self, state: State) -> dict[str, Any]:
        """Fields of `to_dict` beside version and policy."""

    @abc.abstractmethod
    def _read(self, saved: Mapping[str, Any], groups: Groups | None) -> State:
        """The state of which `_fields` gave these."""


@dataclasses.dataclass(frozen=True, slots=True)
class Control:
    """The part of an optimizer beside tensors, from which it goes on; an immutable value.

    Attributes:
        steps_taken: Optimizer steps, skipped ones included.
        steps_skipped: Steps that changed nothing.
        config: Settings in force.
        policy: Rule by which schedules follow from the state.
        state: Memory of the policy.
    """

    steps_taken: int
    steps_skipped: int
    config: MuonConfig
    policy: Policy
    state: State


@dataclasses.dataclass(frozen=True)
class TablePolicy(Policy):
    """A fixed schedule for each operator type, or one for all."""

    by_type: Mapping[str, Schedule]
    """Schedule of each operator type."""
    default: Schedule | None = None
    """Schedule of the types not in ``by_type``; without it they are an error in `groups`."""

    @property
    def name(self) -> str:
        """``table``, or ``uniform`` where it is one schedule for all."""
        return "table" if self.by_type else "uniform"

    def groups(self, registry: Sequence[MatrixInfo]) -> Groups:
        """See `Policy.groups`."""
        groups = group_matrices(registry)
        self.schedules(None, groups, 1)
        return groups

    def schedules(self, state: State, groups: Groups, step: int) -> Mapping[str, Schedule]:
        """The table, whatever the step."""
        return {operator_type: self._schedule(operator_type) for operator_type in groups.members}

    def resumed(
        self,
        saved: object,
        groups: Groups | None,
        *,
        steps_taken: int,
        config: MuonConfig,
        changed: Collection[str] = (),
    ) -> tuple[Policy, State]:
        """See `Policy.resumed`; ``on_config_change = "replan"`` lets the table change, too."""
        own, may_change = self._fields(None)["schedules"], config.on_config_change == "replan"
        if may_change and isinstance(saved, Mapping) and saved.get("schedules", own) != own:
            logger.warning("the coefficients have changed, and those of this run are in force")
            saved = {**saved, "schedules": own}
        return self, self.from_dict(saved, groups)

    def _schedule(self, operator_type: str) -> Schedule:
        schedule = self.by_type.get(operator_type, self.default)
        if schedule is None:
            known = ", ".join(sort_operator_types(self.by_type))
            fields.fail("operator_type", operator_type, f"one with a schedule: {known}")
        return schedule

    def _fields(self, state: State) -> dict[str, Any]:
        # A digest of the table: there is nothing else to restore.
        table = {name: schedule.digest() for name, schedule in self.by_type.items()}
        default = None if self.default is None else self.default.digest()
        text = json.dumps([table, default], sort_keys=True)
        return {"schedules": hashlib.sha256(text.encode()).hexdigest()}

    def _read(self, saved: Mapping[str, Any], groups: Groups | None) -> State:
        digest = fields.read_record("state", saved, ["schedules"])["schedules"]
        own = self._fields(None)["schedules"]
        if digest != own:
            raise ValueError(
                f"state.schedules: found {fields.show(digest)}, expected {own}: the coefficients "
                "have changed; set on_config_change to 'replan' to go on with those of this run"
            )


def as_policy(schedule: str | Schedule | Mapping[str, Schedule] | Policy) -> Policy:
    """The policy that a name, one schedule, or one for each operator type stands for.

    Raises:
        ValueError: There is no schedule of this name.
    """
    if isinstance(schedule, Policy):
        return schedule
    if isinstance(schedule, str):
        named = named_schedule(schedule)
        return TablePolicy(named.by_type, named.schedule)
    return TablePolicy({}, schedule) if isinstance(schedule, Schedule) else TablePolicy(schedule)
