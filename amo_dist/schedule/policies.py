"""Policies: which schedule each group of matrices uses at each optimizer step."""

from __future__ import annotations

import abc
import copy
import hashlib
import json
import logging
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from amo_dist.config import MuonConfig, sort_operator_types
from amo_dist.schedule import fields
from amo_dist.schedule.coefficients import named_schedule
from amo_dist.schedule.grouping import matrices_by_group
from amo_dist.schedule.types import MatrixInfo, Schedule

logger = logging.getLogger(__name__)

_VERSION = 1


class _Frozen(dict[str, Any]):
    """Stands for a read-only mapping in a copy."""


class Policy(abc.ABC):
    """The schedule of each group of matrices as a function of the optimizer step.

    Matrices of one group share a schedule; by default a group is an operator type. A policy knows
    no tensors and never communicates. Given the same registry, records and plan it is in the same
    state on every rank. Steps are counted from 1. Its floats, in JSON, are exact.
    """

    name: str
    """What the policy is called in saved state."""
    observes_in_background = False
    """Whether samples are measured on a thread while training goes on."""

    def __init__(self) -> None:
        self._registry: tuple[MatrixInfo, ...] | None = None
        self._members: Mapping[str, Sequence[MatrixInfo]] = {}
        self._group_by_name: Mapping[str, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Python neither copies nor pickles a read-only view of a mapping.
        return {
            key: _Frozen(dict(value)) if isinstance(value, MappingProxyType) else value
            for key, value in vars(self).items()
        }

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        for key, value in state.items():
            setattr(self, key, MappingProxyType(value) if isinstance(value, _Frozen) else value)

    @property
    def is_fixed(self) -> bool:
        """Whether it neither observes nor plans: neither `sample` nor `plan_due` is overridden."""
        kind = type(self)
        return kind.sample is Policy.sample and kind.plan_due is Policy.plan_due

    def group_of(self, name: str) -> str:
        """The group of a matrix of the registry: its key in ``schedules``."""
        return self._group_by_name[name]

    def bind(self, registry: Sequence[MatrixInfo]) -> None:
        """Take the matrices of the whole world, once, at the first step.

        Args:
            registry: Every matrix of every rank, the same list on each of them; names are unique.

        Raises:
            ValueError: The policy is bound to another registry, or a restored state does not fit
                this one.
        """
        ordered = tuple(sorted(registry, key=lambda matrix: matrix.name))
        if self._registry is not None:
            if ordered != self._registry:
                fields.fail("registry", ordered, "the registry this policy is bound to")
            return
        members = self._group(ordered)
        self._bind(members)
        self._registry, self._members = ordered, members
        self._group_by_name = {m.name: group for group, found in members.items() for m in found}

    @abc.abstractmethod
    def schedules(self, step: int) -> Mapping[str, Schedule]:
        """The schedule of each group at one optimizer step.

        Args:
            step: Optimizer step, counted from 1.

        Returns:
            A read-only mapping; the same object as long as nothing changes.

        Raises:
            ValueError: The policy is not bound, or the step has no schedule yet.
        """

    def phase(self, step: int) -> str:
        """``uniform``; for AMO see ``PHASES``."""
        return "uniform"

    def sample(self, step: int) -> tuple[str, ...]:
        """Names of the matrices to observe at a step, sorted; ``()`` for none."""
        return ()

    def trials(self) -> tuple[Schedule, ...]:
        """The schedules whose errors an observation measures; ``()`` for none."""
        return ()

    def record(
        self,
        step: int,
        ell_by_name: Mapping[str, float],
        errors_by_name: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        """Keep an observation.

        Args:
            step: Optimizer step.
            ell_by_name: ``sigma_min / ||M||_F`` of each matrix of ``sample(step)``, not divided
                by the safety factor; NaN for a matrix with a non-finite entry or zeros alone.
            errors_by_name: Of each of them the mean squared residual that each of ``trials()``
                leaves, then the mean squared distances to the polar factor. Not looked at for a
                matrix whose ``ell`` is NaN.

        Raises:
            ValueError: No observation is due at this step, or the names are not those sampled.
        """
        fields.fail("step", step, "no observation: this policy makes none")

    def plan_due(self, step: int) -> bool:
        """Whether a plan must be made and adopted before the next step."""
        return False

    def make_plan(self) -> str:
        """The plan as JSON, for every rank's ``adopt_plan``; called on one rank.

        Raises:
            ValueError: No plan is due.
        """
        fields.fail("plan", "a request", "none: this policy makes no plan")

    def adopt_plan(self, payload: str) -> None:
        """Commit to the plan that one rank made.

        Raises:
            ValueError: The payload is malformed, or not a plan of what this rank recorded.
        """
        fields.fail("plan", payload, "none: this policy adopts no plan")

    def fall_back(self, step: int, name: str) -> bool:
        """Run the group of a matrix at the uniform schedule from the next step on.

        Args:
            step: The optimizer step just taken.
            name: Of a matrix of the registry.

        Returns:
            Whether that changes anything; never where the settings do not ask for it.
        """
        return False

    def digest(self, step: int) -> str:
        """A hexadecimal SHA-256 of the state and of the schedules applied at a step.

        Ranks with unequal digests would diverge.
        """
        applied = {name: schedule.digest() for name, schedule in self.schedules(step).items()}
        text = json.dumps([self.state_dict(), applied], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON values, which restores the policy bit for bit."""
        return {"version": _VERSION, "policy": self.name, **self._state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned, before or after ``bind``.

        Raises:
            ValueError: A field is unknown or malformed, or at odds with another or with the
                registry; the message names it. Nothing has changed then.
        """
        self._restore(self._read(state))

    def resumed(
        self,
        state: Mapping[str, Any],
        *,
        steps_taken: int,
        config: MuonConfig,
        changed: Collection[str] = (),
    ) -> Policy:
        """A new policy that goes on from a saved state, bound as this one, which stays as it is.

        Args:
            state: What ``state_dict`` returned.
            steps_taken: Optimizer steps of the saved run.
            config: Settings to go on with.
            changed: Names of those that the saved run had otherwise.

        Raises:
            ValueError: The state is malformed, or not one of a run of so many steps.
        """
        policy = copy.copy(self)
        policy.load_state_dict(state)
        return policy

    def check_operator_types(self, operator_types: Collection[str], *, is_alone: bool) -> None:  # noqa: B027 (most have none)
        """Refuse a restored state of other operator types, before the registry is known.

        Args:
            operator_types: Those that this rank knows of.
            is_alone: Whether no other rank may have further ones.

        Raises:
            ValueError: With both.
        """

    def metrics(self, step: int) -> dict[str, float]:
        """Plain numbers for a logger: ``amo/ns_steps/<operator type>``."""
        return {
            f"amo/ns_steps/{name}": float(schedule.num_steps)
            for name, schedule in self.schedules(step).items()
        }

    def _group(self, registry: Sequence[MatrixInfo]) -> Mapping[str, Sequence[MatrixInfo]]:
        """The matrices of each group, groups in the order of plans."""
        return matrices_by_group(registry)

    @abc.abstractmethod
    def _bind(self, matrices_by_group: Mapping[str, Sequence[MatrixInfo]]) -> None:
        """Take the matrices of each group, sorted by name, groups in the order of plans."""

    @abc.abstractmethod
    def _state(self) -> dict[str, Any]:
        """What ``state_dict`` holds beside version and policy."""

    @abc.abstractmethod
    def _restore(self, state: Mapping[str, Any]) -> None:
        """Take what ``_state`` gave, into new objects: a copy may share the old ones."""

    def _read(self, state: object) -> dict[str, Any]:
        """What a saved state holds beside version and policy, once these are checked."""
        if not isinstance(state, Mapping):
            fields.fail("state", state, "a mapping")
        for key, expected in (("policy", self.name), ("version", _VERSION)):
            fields.read_choice(f"state.{key}", state.get(key, "nothing"), expected)
        return {key: value for key, value in state.items() if key not in ("policy", "version")}

    def _require_bound(self) -> None:
        if self._registry is None:
            fields.fail("registry", "none", "a call of bind() before schedules are asked for")


class TablePolicy(Policy):
    """A fixed schedule for each operator type.

    Args:
        by_type: Schedule of each operator type.
        default: Schedule of the types not in ``by_type``; without it they are an error in
            ``bind``.
    """

    name = "table"

    def __init__(self, by_type: Mapping[str, Schedule], default: Schedule | None = None) -> None:
        super().__init__()
        self._by_type = dict(by_type)
        self._default = default
        self._schedules: Mapping[str, Schedule] = MappingProxyType({})

    def schedules(self, step: int) -> Mapping[str, Schedule]:
        """The table, whatever the step."""
        self._require_bound()
        return self._schedules

    def resumed(
        self,
        state: Mapping[str, Any],
        *,
        steps_taken: int,
        config: MuonConfig,
        changed: Collection[str] = (),
    ) -> Policy:
        """As `Policy.resumed`; ``on_config_change = "replan"`` lets the table change, too."""
        saved = fields.read_record("state", self._read(state), ["schedules"])["schedules"]
        if config.on_config_change != "replan" or saved == self._table_digest():
            return super().resumed(state, steps_taken=steps_taken, config=config)
        logger.warning("the coefficients have changed, and those of this run are in force")
        return copy.copy(self)

    def _state(self) -> dict[str, Any]:
        # A digest of the table: there is nothing else to restore.
        return {"schedules": self._table_digest()}

    def _restore(self, state: Mapping[str, Any]) -> None:
        found = fields.read_record("state", state, ["schedules"])["schedules"]
        if found != self._table_digest():
            expected = (
                f"{self._table_digest()}: the coefficients have changed; set on_config_change to "
                "'replan' to go on with those of this run"
            )
            fields.fail("state.schedules", found, expected)

    def _bind(self, matrices_by_group: Mapping[str, Sequence[MatrixInfo]]) -> None:
        schedules: dict[str, Schedule] = {}
        for operator_type in matrices_by_group:
            schedule = self._by_type.get(operator_type, self._default)
            if schedule is None:
                known = ", ".join(sort_operator_types(self._by_type))
                fields.fail("operator_type", operator_type, f"one with a schedule: {known}")
            schedules[operator_type] = schedule
        self._schedules = MappingProxyType(schedules)

    def _table_digest(self) -> str:
        table = {name: schedule.digest() for name, schedule in self._by_type.items()}
        default = None if self._default is None else self._default.digest()
        text = json.dumps([table, default], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


class UniformPolicy(TablePolicy):
    """One fixed schedule for every operator type, whichever there are.

    Args:
        schedule: The schedule.
    """

    name = "uniform"

    def __init__(self, schedule: Schedule) -> None:
        super().__init__({}, default=schedule)


def named_policy(name: str) -> Policy:
    """The policy of a schedule known by name, e.g. ``kj`` or ``a2``.

    Raises:
        ValueError: There is no schedule of this name; the message lists those there are.
    """
    found = named_schedule(name)
    if found.by_type:
        return TablePolicy(found.by_type, default=found.schedule)
    return UniformPolicy(found.schedule)
