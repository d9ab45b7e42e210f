"""Sources of schedules: which schedule each operator type uses at each optimizer step."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import operator
import random
import statistics
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeVar

from amo_dist.config import AMOConfig, MuonConfig, fail, sort_operator_types
from amo_dist.schedule.allocate import ns_step_flops
from amo_dist.schedule.coefficients import named_schedule
from amo_dist.schedule.plan import (
    ErrorCurve,
    Plan,
    StepsAndElls,
    best_curve,
    budget_of,
    candidate_settings,
    make_plan,
    plan_paper,
    remarks,
    shrunk,
)
from amo_dist.schedule.polar_express import SAFETY, schedule_for
from amo_dist.schedule.types import MatrixInfo, Measurement, Schedule

logger = logging.getLogger(__name__)

_Item = TypeVar("_Item")

# The phases of AMO, in their order.
PHASES = ("observation", "transition", "locked")

# Settings whose change keeps the plan, and the errors that were measured.
_PLAN_SURVIVES = {"seed", *(field.name for field in dataclasses.fields(MuonConfig))}
_PLAN_SURVIVES -= {"update_norm", "adjust_lr"}


class Source:
    """Schedules as a function of what was recorded and of the optimizer step, counted from 1.

    It knows no tensors and never communicates: what happens in a run changes it on every rank
    alike. Attributes are rebound and never changed in place, so that a shallow copy is a copy.
    """

    # Name in saved state.
    name = ""

    def key(self, matrix: MatrixInfo) -> str:
        """Key of a matrix in `schedules`."""
        return matrix.operator_type

    def bind(self, registry: Sequence[MatrixInfo]) -> None:
        """Take the matrices of all ranks, in any order; names are unique.

        Raises:
            ValueError: The source cannot run these matrices, or was loaded for others.
        """

    def version(self, step: int) -> int:
        """A number that is another one wherever schedules or `state` have changed."""
        return 0

    def schedules(self, step: int) -> Mapping[str, Schedule]:
        """The schedule of each key at an optimizer step."""
        raise NotImplementedError

    def phase(self, step: int) -> str:
        """``uniform``; for AMO see ``PHASES``. Once it is ``locked``, owners may be new ones."""
        return "uniform"

    def candidates(self) -> Sequence[Schedule]:
        """The schedules whose errors an observation measures."""
        return ()

    def sample(self, step: int) -> Sequence[str]:
        """Names of the matrices to observe at a step, sorted; none at most steps."""
        return ()

    def record(self, step: int, observed: Mapping[str, Measurement]) -> list[str]:
        """Take in an observation, the same numbers on every rank.

        Args:
            step: Optimizer step.
            observed: Measurements by name; matrices of `sample` that are missing are invalid.

        Returns:
            Remarks for the log, which one rank writes.
        """
        return []

    def metrics(self, step: int) -> dict[str, float]:
        """Plain numbers for a logger: ``amo/ns_steps/<operator type>``."""
        schedules = self.schedules(step)
        return {f"amo/ns_steps/{key}": float(s.num_steps) for key, s in schedules.items()}

    def state(self) -> dict[str, Any]:
        """JSON values from which `load` restores the source bit for bit."""
        return {"name": self.name}

    def load(
        self, state: Mapping[str, Any], config: MuonConfig, changed: Collection[str], step: int
    ) -> None:
        """Go on from a saved state, whose digest was right.

        Args:
            state: Result of `state`.
            config: Settings to go on with.
            changed: Names of the settings that the saved run had otherwise.
            step: Optimizer steps that the saved run had taken.

        Raises:
            ValueError: It is the state of another model.
        """


class Fixed(Source):
    """A fixed schedule for each operator type.

    Args:
        by_type: Schedule of each operator type.
        default: Schedule of the other types; without it they are an error.
    """

    name = "fixed"

    def __init__(self, by_type: Mapping[str, Schedule], default: Schedule | None = None) -> None:
        self._by_type, self._default = by_type, default
        self._schedules: Mapping[str, Schedule] = {}

    def bind(self, registry: Sequence[MatrixInfo]) -> None:
        """See `Source.bind`."""
        schedules = {}
        for name in sort_operator_types(matrix.operator_type for matrix in registry):
            schedule = self._by_type.get(name, self._default)
            if schedule is None:
                known = ", ".join(sort_operator_types(self._by_type))
                fail("operator_type", name, f"one with a schedule: {known}")
            schedules[name] = schedule
        self._schedules = schedules

    def schedules(self, step: int) -> Mapping[str, Schedule]:
        """The table, whatever the step."""
        return self._schedules

    def state(self) -> dict[str, Any]:
        """A digest of the table: there is nothing else to restore."""
        table = {name: schedule.digest() for name, schedule in self._by_type.items()}
        default = None if self._default is None else self._default.digest()
        text = json.dumps([table, default], sort_keys=True)
        return {"name": self.name, "schedules": hashlib.sha256(text.encode()).hexdigest()}

    def load(
        self, state: Mapping[str, Any], config: MuonConfig, changed: Collection[str], step: int
    ) -> None:
        """See `Source.load`; ``on_config_change = "replan"`` lets the table change, too."""
        if state == self.state():
            return
        if config.on_config_change != "replan":
            expected = f"{self.state()['schedules']}: the coefficients have changed; set "
            expected += "on_config_change to 'replan' to go on with those of this run"
            fail("control.source.schedules", state.get("schedules"), expected)
        logger.warning("the coefficients have changed, and those of this run are in force")


def as_source(schedule: str | Schedule | Mapping[str, Schedule] | Source) -> Source:
    """The source that a name, one schedule, or one for each operator type stands for.

    Raises:
        ValueError: There is no schedule of this name.
    """
    if isinstance(schedule, Source):
        return schedule
    if isinstance(schedule, str):
        named = named_schedule(schedule)
        return Fixed(named.by_type, named.schedule)
    return Fixed({}, schedule) if isinstance(schedule, Schedule) else Fixed(schedule)


# ---------------------------------------------------------------- AMO


@dataclasses.dataclass(frozen=True, slots=True)
class Observation:
    """Record of one observation, by operator type.

    Attributes:
        step: Optimizer step.
        ell: Median effective ``ell`` of the valid matrices: the measured one over ``SAFETY``, by
            which `schedule_for` multiplies again. None where none was valid. Only ``planner =
            "paper"`` plans by its value.
        num_sampled: Number of matrices that were drawn.
        num_invalid: Matrices with a non-finite entry, or with zeros alone, which contribute
            nothing.
    """

    step: int
    ell: dict[str, float | None]
    num_sampled: dict[str, int]
    num_invalid: dict[str, int]


class Amo(Source):
    """Adaptive Muon Orthogonalization: observe, plan, glide to the plan, lock.

    Optimizer steps 1 to ``observe_until`` run the uniform schedule, and every ``interval``-th of
    them is observed; the plan is made at the end of the last. The next ``transition_steps``
    interpolate; the last of these runs the plan itself, and is the first that is locked.

    Args:
        config: When to observe, how to plan, how long to glide.
    """

    name = "amo"

    def __init__(self, config: AMOConfig) -> None:
        self.config = config
        # Step of the last observation, and steps between two of them.
        self.last_observation = self._interval = 0
        # Observations of the plan, or those toward it.
        self.observations: tuple[Observation, ...] = ()
        self.plan: Plan | None = None
        # Step at which changed settings dropped the plan and the errors; 0 if none have changed.
        self._errors_since = 0
        # Errors of all candidates by type: means over the valid matrices of an observation, summed
        # over observations. Empty before the first one, and under a plan.
        self._error_sums: Mapping[str, Sequence[float]] = {}
        # Matrices of each operator type, sorted by name; types in their declared order.
        self._members: Mapping[str, Sequence[MatrixInfo]] = {}
        self._warns_of_tau = config.planner == "paper"
        self._set_last_observation()

    def _set_last_observation(self) -> None:
        """Find the step of the last observation; at least one is made after a plan was dropped."""
        self._interval = self.config.interval
        following = (self._errors_since // self._interval + 1) * self._interval
        self.last_observation = max(self.config.observe_until, following)

    def bind(self, registry: Sequence[MatrixInfo]) -> None:
        """See `Source.bind`.

        A budget that cannot be met is refused now: it must not come to light at the last
        observation, hours into a run.
        """
        types = sort_operator_types(matrix.operator_type for matrix in registry)
        ordered = sorted(registry, key=lambda matrix: matrix.name)
        self._members = {t: [m for m in ordered if m.operator_type == t] for t in types}
        self._check_types()
        if types:
            budget_of(self.config, self._costs())

    def _check_types(self) -> None:
        types = {name for observation in self.observations for name in observation.ell}
        if self.plan is not None:
            types.update(self.plan.operator_types)
        if types and self._members and types != self._members.keys():
            expected = f"the operator types {[*self._members]}: is this another model's state?"
            fail("control.source", sort_operator_types(types), expected)

    # ---------------------------------------------------------------- schedules

    def version(self, step: int) -> int:
        """The number of observations, and of steps of the transition, that are taken."""
        since = 0 if self.plan is None else max(step - self.last_observation, 0)
        return len(self.observations) + min(since, self.config.transition_steps)

    def phase(self, step: int) -> str:
        """One of ``PHASES``."""
        if step <= self.last_observation:
            return "observation"
        is_locked = step >= self.last_observation + self.config.transition_steps
        return "locked" if is_locked else "transition"

    def schedules(self, step: int) -> Mapping[str, Schedule]:
        """Uniform, interpolated or planned schedules."""
        steps_and_ells = self.steps_and_ells_at(step)
        return {name: schedule_for(ell, steps) for name, (steps, ell) in steps_and_ells.items()}

    def steps_and_ells_at(self, step: int) -> StepsAndElls:
        """Newton-Schulz steps and effective ``ell`` of each type at an optimizer step."""
        if self.phase(step) == "observation" or not self._members:
            return dict.fromkeys(self._members, (self.config.base_steps, self.config.base_ell))
        if self.plan is None:
            fail("step", step, f"at most {self.last_observation} before the plan is made")
        taken, steps = step - self.last_observation, self.config.transition_steps
        return self.plan.steps_and_ells_at(Fraction(min(taken, steps), steps))

    # ---------------------------------------------------------------- observations

    def candidates(self) -> Sequence[Schedule]:
        """Every number of steps that a plan may give, with every ``ell`` of a grid."""
        return [schedule_for(ell, steps) for steps, ell in candidate_settings(self.config)]

    def sample(self, step: int) -> Sequence[str]:
        """Names of the matrices to observe at a step, sorted; none at most steps."""
        if self.plan is not None or step > self.last_observation or step % self._interval:
            return ()
        return sorted(matrix.name for drawn in self._drawn(step).values() for matrix in drawn)

    def _drawn(self, step: int) -> dict[str, list[MatrixInfo]]:
        """Matrices of each type for an observation at a step."""
        seed, size = self.config.seed, self.config.sample_size
        return {kind: draw(seed, step, kind, own, size) for kind, own in self._members.items()}

    def record(self, step: int, observed: Mapping[str, Measurement]) -> list[str]:
        """Keep the medians of one observation, add up the errors, and plan at the last one."""
        ell: dict[str, float | None] = {}
        num_sampled, num_invalid = dict[str, int](), dict[str, int]()
        sums, lines = dict(self._error_sums), list[str]()
        for kind, drawn in self._drawn(step).items():
            valid = [matrix for matrix in drawn if matrix.name in observed]
            invalid = [matrix.name for matrix in drawn if matrix.name not in observed]
            ells = [min(observed[matrix.name].ell, 1.0) / SAFETY for matrix in valid]
            ell[kind] = statistics.median(ells) if ells else None
            num_sampled[kind], num_invalid[kind] = len(drawn), len(invalid)
            if valid:
                rows = [observed[matrix.name].errors for matrix in valid]
                means = _means(rows, [matrix.weight for matrix in valid])
                totals = sums.get(kind, [0.0] * len(means))
                sums[kind] = [total + mean for total, mean in zip(totals, means, strict=True)]
            if invalid:
                lines.append(f"step {step}: no valid ell for {', '.join(invalid)}: left out")
        if self._warns_of_tau:
            lines += self._remarks_on_tau(step, observed)
        observations = (*self.observations, Observation(step, ell, num_sampled, num_invalid))
        if self._members and step >= self.last_observation:
            self.plan, remarks_on_plan = self._make_plan(observations, sums)
            lines += remarks_on_plan
            sums = {}
        self.observations, self._error_sums = observations, sums
        return lines

    def _remarks_on_tau(self, step: int, observed: Mapping[str, Measurement]) -> list[str]:
        clamped = sorted(name for name, measured in observed.items() if measured.is_clamped)
        if not clamped:
            return []
        self._warns_of_tau = False
        line = f"step {step}: the least singular value of {', '.join(clamped[:3])} is below 1e-10, "
        line += "the absolute tau of the AMO paper, which counts in its place: ell is too large"
        return [line]

    def _make_plan(
        self, observations: Sequence[Observation], sums: Mapping[str, Sequence[float]]
    ) -> tuple[Plan, list[str]]:
        """The plan, a pure function of agreed numbers and of the settings; and remarks on it."""
        config, costs = self.config, self._costs()
        ell_by_step_by_type = {
            kind: {o.step: ell for o in observations if (ell := o.ell[kind]) is not None}
            for kind in self._members
        }
        fallback = f"has no valid observation; it falls back to base_ell = {config.base_ell:g}"
        by_errors = config.planner != "paper"
        known = sums if by_errors else {kind for kind, own in ell_by_step_by_type.items() if own}
        lines = [f"{kind} {fallback}" for kind in self._members if kind not in known]
        if config.planner == "paper":
            target = {
                kind: shrunk(config, statistics.median(own.values()) if own else config.base_ell)
                for kind, own in ell_by_step_by_type.items()
            }
            plan = plan_paper(config, target, costs)
        else:
            curves: dict[str, ErrorCurve] = {}
            for kind, ell_by_step in ell_by_step_by_type.items():
                # Errors are summed over the valid observations since settings have changed.
                num_summed = sum(step > self._errors_since for step in ell_by_step)
                means = [total / num_summed for total in sums.get(kind, ())]
                curves[kind] = best_curve(config, means)
            plan = make_plan(config, curves, self._weights(), costs)
        return plan, [*lines, *remarks(plan, config)]

    def _costs(self) -> list[int]:
        """Flops of one Newton-Schulz step of all matrices of each type."""
        return [
            sum(ns_step_flops(*matrix.shape) for matrix in members)
            for members in self._members.values()
        ]

    def _weights(self) -> list[float]:
        """Share of each type in the whole update's squared norm: see `MatrixInfo.weight`."""
        weights = [math.fsum(m.weight for m in members) for members in self._members.values()]
        whole = math.fsum(weights)
        return [weight / whole if whole else 1 / len(weights) for weight in weights]

    # ---------------------------------------------------------------- state

    def state(self) -> dict[str, Any]:
        """See `Source.state`."""
        return {
            "name": self.name,
            "begin": self._errors_since,
            "observations": [dataclasses.asdict(observation) for observation in self.observations],
            "errors": {name: {"totals": totals} for name, totals in self._error_sums.items()},
            "plan": None if self.plan is None else dataclasses.asdict(self.plan),
        }

    def load(
        self, state: Mapping[str, Any], config: MuonConfig, changed: Collection[str], step: int
    ) -> None:
        """See `Source.load`; where a setting has changed that plans depend on, one is dropped.

        The uniform schedule returns until the next plan, which comes with the first observation due
        at or after ``observe_until`` of this run, at least one more being made. Earlier
        observations of ``ell`` are kept; measured errors are of the later ones.
        """
        assert isinstance(config, AMOConfig)
        self.config, self._errors_since = config, state["begin"]
        self.observations = tuple(Observation(**record) for record in state["observations"])
        self._error_sums = {name: errors["totals"] for name, errors in state["errors"].items()}
        self.plan = None if state["plan"] is None else Plan.from_dict(state["plan"])
        if set(changed) - _PLAN_SURVIVES:
            self._errors_since, self._error_sums, self.plan = step, {}, None
        self._set_last_observation()
        self._check_types()

    def metrics(self, step: int) -> dict[str, float]:
        """Plain numbers for a logger, the same keys at every step.

        ``amo/phase`` is 0 in observation, 1 in transition, 2 when locked. By type,
        ``amo/ns_steps`` is the number of Newton-Schulz steps, ``amo/ell`` the latest observed
        effective ``ell`` and ``amo/ell_target`` the plan's; both are ``base_ell`` where there is
        none yet. ``amo/observations`` counts observations, ``amo/invalid_observations`` the
        matrices left out of their medians.
        """
        values, base = super().metrics(step), self.config.base_ell
        targets = (base,) * len(self._members) if self.plan is None else self.plan.ell_target
        for name, target in zip(self._members, targets, strict=True):
            valid = [ell for o in self.observations if (ell := o.ell[name]) is not None]
            values[f"amo/ell/{name}"] = valid[-1] if valid else base
            values[f"amo/ell_target/{name}"] = target
        num_invalid = sum(sum(o.num_invalid.values()) for o in self.observations)
        return {
            **values,
            "amo/phase": float(PHASES.index(self.phase(step))),
            "amo/observations": float(len(self.observations)),
            "amo/invalid_observations": float(num_invalid),
        }


def draw(seed: int, step: int, kind: str, members: Sequence[_Item], size: int) -> list[_Item]:
    """Draw uniformly without replacement, alike on every rank, machine and Python version.

    Args:
        seed: Seed of the run.
        step: Optimizer step.
        kind: Operator type of the members.
        members: Items to draw from, in a fixed order.
        size: Number to draw; all, if there are fewer.

    Returns:
        The items drawn, in the order of ``members``.
    """
    key = hashlib.sha256(f"{seed}/{step}/{kind}".encode()).digest()
    # Python promises only for random() that an integer seed always gives the same numbers: so the
    # part of a Fisher-Yates shuffle that is needed is spelled out.
    generator = random.Random(int.from_bytes(key, "big"))
    indices = list(range(len(members)))
    size = min(size, len(members))
    for i in range(size):
        j = i + int(generator.random() * (len(members) - i))
        indices[i], indices[j] = indices[j], indices[i]
    return [members[i] for i in sorted(indices[:size])]


def _means(rows: Sequence[Sequence[float]], weights: Sequence[float]) -> list[float]:
    """Mean errors of the candidates over matrices, each of which counts by its weight."""
    most = max(weights)
    # Matrices of weight zero alone count alike: nothing is divided by zero.
    shares = [weight / most if most else 1.0 for weight in weights]
    whole = math.fsum(shares)
    return [
        math.fsum(map(operator.mul, shares, errors)) / whole for errors in zip(*rows, strict=True)
    ]
