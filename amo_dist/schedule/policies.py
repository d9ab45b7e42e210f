"""Policies: which schedule each operator type uses at each optimizer step."""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from amo_dist.config import AMOConfig, sort_operator_types
from amo_dist.schedule import fields
from amo_dist.schedule.coefficients import named_schedule
from amo_dist.schedule.controller import PHASES, Controller
from amo_dist.schedule.controller_state import STATE_KEYS
from amo_dist.schedule.grouping import groups
from amo_dist.schedule.plan import Plan, composed
from amo_dist.schedule.types import MatrixInfo, Schedule

_VERSION = 1


class Policy(abc.ABC):
    """The schedule of each operator type as a function of the optimizer step.

    A policy knows no tensors and never communicates. Given the same registry, records and plan it
    is in the same state on every rank. Steps are counted from 1. Its floats, in JSON, are exact.
    """

    name: str
    """What the policy is called in saved state."""

    def __init__(self) -> None:
        self._registry: tuple[MatrixInfo, ...] | None = None
        self._operator_types: tuple[str, ...] = ()
        self._group_by_name: Mapping[str, str] = {}

    @property
    def operator_types(self) -> tuple[str, ...]:
        """The keys of ``schedules``, in the order of plans; empty before ``bind``.

        They are operator types, or what the policy groups matrices by instead.
        """
        return self._operator_types

    def group_of(self, name: str) -> str:
        """The key in ``schedules`` of a matrix of the registry; its operator type by default."""
        return self._group_by_name[name]

    observes_in_background = False

    @property
    def is_fixed(self) -> bool:
        """Whether it neither observes nor plans: neither `sample` nor `plan_due` is overridden."""
        kind = type(self)
        return kind.sample is Policy.sample and kind.plan_due is Policy.plan_due

    def bind(self, registry: Sequence[MatrixInfo]) -> None:
        """Take the matrices of the whole world, once, at the first step.

        Args:
            registry: Every matrix of every rank, the same list on each of them.

        Raises:
            ValueError: Names repeat, the policy is bound to another registry, or a restored state
                does not fit this one.
        """
        ordered = tuple(sorted(registry, key=lambda matrix: matrix.name))
        for one, other in pairwise(ordered):
            if one.name == other.name:
                fields.fail("registry", one.name, "distinct names, found it twice")
        if self._registry is not None:
            if ordered != self._registry:
                fields.fail("registry", ordered, "the registry this policy is bound to")
            return
        group_by_name = self._groups(ordered)
        grouped = [
            dataclasses.replace(matrix, operator_type=group_by_name[matrix.name])
            for matrix in ordered
        ]
        self._bind(grouped)
        self._registry = ordered
        self._group_by_name = MappingProxyType(dict(group_by_name))
        self._operator_types = sort_operator_types(group_by_name.values())

    @abc.abstractmethod
    def schedules(self, step: int) -> Mapping[str, Schedule]:
        """The schedule of each operator type at one optimizer step.

        Args:
            step: Optimizer step, counted from 1.

        Returns:
            A read-only mapping; the same object as long as nothing changes.

        Raises:
            ValueError: The policy is not bound, or the step has no schedule yet.
        """

    def phase(self, step: int) -> str:
        """``uniform``; for AMO see ``PHASES``."""
        _check_step(step)
        return "uniform"

    def sample(self, step: int) -> tuple[str, ...]:
        """Names of the matrices to observe at a step, sorted; ``()`` for none."""
        _check_step(step)
        return ()

    def record(self, step: int, ell_by_name: Mapping[str, float]) -> None:
        """Keep an observation.

        Args:
            step: Optimizer step.
            ell_by_name: ``sigma_min / ||M||_F`` of each matrix of ``sample(step)``, not divided
                by the safety factor; NaN for a matrix with a non-finite entry or zeros alone.

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
        """Run what shares the schedule of a matrix at the uniform one from the next step on.

        Args:
            step: The optimizer step just taken.
            name: Of a matrix of the registry.

        Returns:
            Whether that changes anything; never where a policy has no other schedule.
        """
        return False

    def digest(self, step: int) -> str:
        """A hexadecimal SHA-256 of the state and of the schedules applied at a step.

        Ranks with unequal digests would diverge.
        """
        applied = {name: schedule.digest() for name, schedule in self.schedules(step).items()}
        text = json.dumps([self.state_dict(), applied], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The state as JSON values, which restores the policy bit for bit."""

    @abc.abstractmethod
    def load_state_dict(
        self, state: Mapping[str, Any], *, allow_config_change: bool = False
    ) -> None:
        """Restore a state, before or after ``bind``; on an error nothing has changed.

        Args:
            state: What ``state_dict`` returned.
            allow_config_change: Accept a state that another configuration of the same policy
                made.

        Raises:
            ValueError: A field is missing, unknown or malformed, or at odds with another field,
                with this policy's configuration or with the registry; the message names it.
        """

    def check_progress(self, steps_taken: int) -> None:  # noqa: B027 (most have none)
        """Refuse a restored state that is not one of a run of ``steps_taken`` optimizer steps.

        Raises:
            ValueError: It is behind or ahead of that step; names the field.
        """

    def metrics(self, step: int) -> dict[str, float]:
        """Plain numbers for a logger: ``amo/ns_steps/<operator type>``."""
        return {
            f"amo/ns_steps/{name}": float(schedule.num_steps)
            for name, schedule in self.schedules(step).items()
        }

    def _groups(self, registry: Sequence[MatrixInfo]) -> Mapping[str, str]:
        """The group of each matrix by its name; matrices of a group share a schedule."""
        return groups(registry, "operator_type")

    @abc.abstractmethod
    def _bind(self, registry: Sequence[MatrixInfo]) -> None:
        """Take a registry that is sorted, free of duplicates, with groups as operator types."""

    def _require_bound(self, step: int) -> None:
        _check_step(step)
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
        self._require_bound(step)
        return self._schedules

    def state_dict(self) -> dict[str, Any]:
        """A digest of the table: there is nothing else to restore."""
        return {"version": _VERSION, "policy": self.name, "schedules": self._table_digest()}

    def load_state_dict(
        self, state: Mapping[str, Any], *, allow_config_change: bool = False
    ) -> None:
        """Check that the state is of this table."""
        record = _read_state(state, self.name, ["schedules"])
        found, expected = record["schedules"], self._table_digest()
        if not isinstance(found, str):
            fields.fail("state.schedules", found, "a digest of the schedules")
        if found != expected and not allow_config_change:
            fields.fail("state.schedules", found, f"{expected}: the coefficients have changed")

    def _bind(self, registry: Sequence[MatrixInfo]) -> None:
        schedules: dict[str, Schedule] = {}
        for operator_type in sort_operator_types(matrix.operator_type for matrix in registry):
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
        self.controller = Controller(config)
        self.observes_in_background = config.observe_in_background
        self._last: tuple[object, Mapping[str, Schedule]] | None = None

    @property
    def plan(self) -> Plan | None:
        """The adopted plan, if any."""
        return self.controller.plan

    def schedules(self, step: int) -> Mapping[str, Schedule]:
        """Uniform, interpolated or planned schedules, composed when first needed."""
        self._require_bound(step)
        # Within a phase of constant schedules every step is served from its first one.
        key = self.controller.progress(step)
        if self._last is None or self._last[0] != key:
            state = self.controller.state_at(step)
            fresh = {name: composed(ell, steps) for name, (steps, ell) in state.items()}
            same = self._last is not None and self._last[1] == fresh
            self._last = (key, self._last[1] if self._last and same else MappingProxyType(fresh))
        return self._last[1]

    def phase(self, step: int) -> str:
        """One of ``PHASES``."""
        _check_step(step)
        return self.controller.phase(step)

    def sample(self, step: int) -> tuple[str, ...]:
        """Names of the matrices to observe at a step, sorted; ``()`` at most steps."""
        self._require_bound(step)
        return self.controller.sample(step)

    def record(self, step: int, ell_by_name: Mapping[str, float]) -> None:
        """Keep the medians of one observation; see ``Policy.record``."""
        self._require_bound(step)
        self.controller.record(step, ell_by_name)

    def plan_due(self, step: int) -> bool:
        """Whether every observation toward the next plan is made, and it is not adopted yet."""
        return self.controller.plan_due(step)

    def make_plan(self) -> str:
        """Plan from the observations; a pure function of them and of the configuration."""
        return self.controller.make_plan().to_json()

    def adopt_plan(self, payload: str) -> None:
        """Commit to the plan that one rank made; see ``Policy.adopt_plan``."""
        self.controller.adopt(Plan.from_json(payload))

    def fall_back(self, step: int, name: str) -> bool:
        """Give up the plan for the group of a matrix; see ``Policy.fall_back``."""
        return self.config.ns_guard_fallback and self.controller.fall_back(
            step, self.group_of(name)
        )

    def state_dict(self) -> dict[str, Any]:
        """Observations, the plan, where its transition starts, and what fell back from it."""
        return {"version": _VERSION, "policy": self.name, **self.controller.to_dict()}

    def load_state_dict(
        self, state: Mapping[str, Any], *, allow_config_change: bool = False
    ) -> None:
        """Restore what ``state_dict`` gave; a plan made stays in force as it is."""
        record = _read_state(state, self.name, STATE_KEYS)
        self.controller.load_dict(
            {key: record[key] for key in STATE_KEYS}, allow_config_change=allow_config_change
        )
        self._last = None

    def check_progress(self, steps_taken: int) -> None:
        """See ``Policy.check_progress``."""
        self.controller.check_progress(steps_taken)

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
        observations = self.controller.observations
        for i, name in enumerate(self.operator_types):
            valid = [ell for o in observations if (ell := o.ell[name]) is not None]
            values[f"amo/ell/{name}"] = valid[-1] if valid else self.config.base_ell
            target = self.config.base_ell if self.plan is None else self.plan.ell_target[i]
            values[f"amo/ell_target/{name}"] = target
        values["amo/phase"] = float(PHASES.index(self.phase(step)))
        values["amo/observations"] = float(len(observations))
        values["amo/invalid_observations"] = float(
            sum(sum(observation.num_invalid.values()) for observation in observations)
        )
        values["amo/fallbacks"] = float(len(self.controller.fallen_back(step)))
        return values

    def _groups(self, registry: Sequence[MatrixInfo]) -> Mapping[str, str]:
        return groups(registry, self.config.granularity)

    def _bind(self, registry: Sequence[MatrixInfo]) -> None:
        self.controller.bind(registry)


def _check_step(step: int) -> None:
    if not isinstance(step, int) or isinstance(step, bool) or step < 1:
        fields.fail("step", step, "an integer >= 1")


def _read_state(state: object, policy: str, keys: Sequence[str]) -> Mapping[str, Any]:
    """A policy's state with exactly its keys, of this version and policy."""
    if not isinstance(state, Mapping):
        fields.fail("state", state, "a mapping")
    if state.get("policy", policy) != policy:
        fields.fail("state.policy", state["policy"], f"{policy!r}")
    record = fields.read_record("state", state, ["version", "policy", *keys])
    if type(record["version"]) is not int or record["version"] != _VERSION:
        fields.fail("state.version", record["version"], f"{_VERSION}")
    return record
