"""AMO's controller: observe under the uniform schedule, plan once, glide to the plan, lock.

It holds the observations and the plan, and says for each optimizer step how many Newton-Schulz
steps each operator type takes and for which ``ell``. It never communicates: given the same
records it is in the same state on every rank.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

from amo_dist.config import AMOConfig
from amo_dist.operator_types import sort_operator_types
from amo_dist.schedule import fields
from amo_dist.schedule.plan import Plan, costs_by_type, frame, make_plan, targets
from amo_dist.schedule.polar_express import SAFETY
from amo_dist.schedule.types import MatrixInfo

logger = logging.getLogger(__name__)

PHASES = ("observation", "transition", "locked", "uniform")
"""The phases of AMO, in their order; ``uniform`` follows ``observation`` under ``observe_only``."""

_ELL_SLACK = 1e-6
"""How far rounding may take an ``ell`` above 1; farther is a mistake of the caller."""


def draw(
    seed: int, step: int, operator_type: str, names: Sequence[str], size: int
) -> tuple[str, ...]:
    """Draw names uniformly without replacement, alike on every rank, machine and Python version.

    Args:
        seed: Seed of the run.
        step: Optimizer step.
        operator_type: Operator type the names belong to.
        names: What to draw from, in a fixed order.
        size: How many to draw; all, where there are fewer.

    Returns:
        The names drawn, in the order of ``names``.
    """
    key = hashlib.sha256(f"{seed}/{step}/{operator_type}".encode()).digest()
    # Of the standard generator only random() is promised to stay the same for an integer seed,
    # so a Fisher-Yates shuffle is spelled out, as far as it is needed.
    generator = random.Random(int.from_bytes(key, "big"))
    indices = list(range(len(names)))
    size = min(size, len(names))
    for i in range(size):
        j = i + int(generator.random() * (len(names) - i))
        indices[i], indices[j] = indices[j], indices[i]
    return tuple(names[i] for i in sorted(indices[:size]))


@dataclasses.dataclass(frozen=True, slots=True)
class Observation:
    """What one observation recorded, by operator type."""

    step: int
    ell: Mapping[str, float | None]
    """Median effective ``ell`` of the valid matrices; ``None`` where none was valid."""
    num_sampled: Mapping[str, int]
    num_invalid: Mapping[str, int]
    """Matrices with a non-finite entry, or with zeros alone, which contribute nothing."""

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values, floats as ``float.hex()``."""
        texts = {t: None if e is None else fields.write_float(e) for t, e in self.ell.items()}
        return {
            "step": self.step,
            "ell": texts,
            "num_sampled": dict(self.num_sampled),
            "num_invalid": dict(self.num_invalid),
        }

    @classmethod
    def from_dict(cls, found: object, field: str) -> Observation:
        """Read and validate what ``to_dict`` wrote; ``field`` names it in errors.

        Raises:
            ValueError: A field is missing, unknown, malformed or at odds with another.
        """
        record = fields.read_record(field, found, [f.name for f in dataclasses.fields(cls)])
        step = fields.read_int(f"{field}.step", record["step"], 1)
        if not isinstance(record["ell"], Mapping):
            fields.fail(f"{field}.ell", record["ell"], "a mapping by operator type")
        names = sort_operator_types(fields.read_names(f"{field}.ell", list(record["ell"])))
        ell: dict[str, float | None] = {}
        counts: dict[str, dict[str, int]] = {"num_sampled": {}, "num_invalid": {}}
        for key, minimum in (("num_sampled", 1), ("num_invalid", 0)):
            by_type = fields.read_record(f"{field}.{key}", record[key], names)
            for name in names:
                place = f"{field}.{key}.{name}"
                counts[key][name] = fields.read_int(place, by_type[name], minimum)
        for name in names:
            text, place = record["ell"][name], f"{field}.ell.{name}"
            ell[name] = None if text is None else fields.read_ell(place, text)
            num_valid = counts["num_sampled"][name] - counts["num_invalid"][name]
            if num_valid < 0 or (num_valid == 0) != (text is None):
                fields.fail(place, text, f"the median of {num_valid} valid matrices (null: none)")
        return cls(step, ell, **counts)


class Controller:
    """Phases, observations and plan of one run.

    Args:
        config: When to observe, how to plan, how long to glide.
    """

    def __init__(self, config: AMOConfig) -> None:
        self._config = config
        self._observations: tuple[Observation, ...] = ()
        self._plan: Plan | None = None
        self._names_by_type: dict[str, tuple[str, ...]] = {}
        self._costs: dict[str, int] = {}
        self._config_may_differ = False
        self._replanned_at: int | None = None

    @property
    def observations(self) -> tuple[Observation, ...]:
        """What was recorded so far, in the order of steps."""
        return self._observations

    @property
    def plan(self) -> Plan | None:
        """The adopted plan, if any."""
        return self._plan

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
        self._check_state(self._observations, self._plan, costs)
        names = {t: sorted(m.name for m in registry if m.operator_type == t) for t in costs}
        self._names_by_type = {t: tuple(ordered) for t, ordered in names.items()}
        self._costs = costs

    def phase(self, step: int) -> str:
        """One of ``PHASES``, for an optimizer step counted from 1."""
        done = step - self._horizon
        if done <= 0:
            return "observation"
        if self._stays_uniform:
            return "uniform"
        return "transition" if done < self._config.transition_steps else "locked"

    def sample(self, step: int) -> tuple[str, ...]:
        """Names of the matrices to observe at a step, sorted; none at most steps.

        Args:
            step: Optimizer step, counted from 1.
        """
        if step > self._horizon or step % self._config.observe_every:
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
            values = {n: _effective(n, ell_by_name[n]) for n in names if n in ell_by_name}
            valid = [value for value in values.values() if value is not None]
            ell[operator_type] = statistics.median(valid) if valid else None
            num_sampled[operator_type] = len(values)
            num_invalid[operator_type] = len(values) - len(valid)
            if len(valid) < len(values):
                invalid = ", ".join(name for name, value in values.items() if value is None)
                logger.warning("step %d: no valid ell for %s: left out", step, invalid)
        self._observations += (Observation(step, ell, num_sampled, num_invalid),)

    def plan_due(self, step: int) -> bool:
        """Whether every observation is made and no plan adopted yet."""
        is_open = self._plan is None and not self._config.observe_only
        return is_open and step >= self._horizon and self._is_complete()

    def make_plan(self) -> Plan:
        """Plan from the observations; a pure function of them and of the configuration.

        Raises:
            ValueError: Observations are missing, or the budget is infeasible.
        """
        self._require_complete()
        robust = robust_ells(self._observations)
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
            ValueError: Another plan is in force, observations are missing, or the plan is not one
                of these observations and this configuration.
        """
        if self._config.observe_only:
            fields.fail("plan", plan, "none: observe_only never commits to one")
        if self._plan is not None and plan != self._plan:
            fields.fail("plan", plan, "the plan already adopted")
        self._require_complete()
        self._check_state(self._observations, plan, self._costs)
        self._plan = plan

    def state_at(self, step: int) -> dict[str, tuple[int, float]]:
        """Newton-Schulz steps and effective ``ell`` of each operator type at an optimizer step.

        Args:
            step: Optimizer step, counted from 1.

        Raises:
            ValueError: The step lies beyond the observation phase and there is no plan.
        """
        phase = self.phase(step)
        if phase in ("observation", "uniform"):
            uniform = (self._config.base_steps, self._config.base_ell)
            return dict.fromkeys(self._names_by_type, uniform)
        if self._plan is None:
            fields.fail("step", step, f"at most {self._horizon} while no plan is adopted")
        if phase == "locked":
            return self._plan.state_at(Fraction(1))
        done = step - self._horizon
        return self._plan.state_at(Fraction(done, self._config.transition_steps))

    def to_dict(self) -> dict[str, Any]:
        """Observations and plan as JSON values."""
        return {
            "observations": [observation.to_dict() for observation in self._observations],
            "plan": None if self._plan is None else self._plan.to_dict(),
            "replanned_at": self._replanned_at,
        }

    def load_dict(
        self,
        observations: object,
        plan: object,
        replanned_at: object = None,
        *,
        allow_config_change: bool = False,
    ) -> None:
        """Restore what ``to_dict`` wrote; on an error nothing has changed.

        Args:
            observations: Its entry ``observations``.
            plan: Its entry ``plan``.
            replanned_at: Its entry ``replanned_at``: observations up to this step may have been
                made by another configuration, and the plan needs at least one made after it.
            allow_config_change: Accept a state that another configuration made. A plan made
                stays in force as it is.

        Raises:
            ValueError: A field is missing, unknown, malformed, or at odds with another, with the
                configuration, or with the registry.
        """
        listed = fields.read_list("observations", observations)
        parsed = tuple(
            Observation.from_dict(found, f"observations[{i}]") for i, found in enumerate(listed)
        )
        parsed_plan = None if plan is None else Plan.from_dict(plan)
        if replanned_at is not None:
            replanned_at = fields.read_int("replanned_at", replanned_at, 0)
        before = self._config_may_differ, self._replanned_at
        self._config_may_differ, self._replanned_at = allow_config_change, replanned_at
        try:
            self._check_state(parsed, parsed_plan, self._costs)
        except ValueError:
            self._config_may_differ, self._replanned_at = before
            raise
        self._observations, self._plan = parsed, parsed_plan

    def check_progress(self, steps_taken: int) -> None:
        """Refuse a restored state that is not one of a run of ``steps_taken`` optimizer steps.

        Raises:
            ValueError: Observations or the plan are missing for that step, or ahead of it.
        """
        last = self._observations[-1].step if self._observations else 0
        latest = max(last, self._replanned_at or 0)
        if latest > steps_taken:
            fields.fail("steps_taken", steps_taken, f"at least {latest}, as in the observations")
        due = self._next_observation()
        if self._plan is None and due <= min(steps_taken, self._horizon):
            expected = f"the one of step {due} too, after {steps_taken} steps"
            fields.fail("observations", [o.step for o in self._observations], expected)
        if self.plan_due(steps_taken):
            fields.fail("plan", None, f"a plan after {steps_taken} steps")

    @property
    def _stays_uniform(self) -> bool:
        return self._config.observe_only and self._plan is None

    @property
    def _horizon(self) -> int:
        """The step of the last observation. Once planned, it is the one the plan came at."""
        return self._observations[-1].step if self._plan is not None else self._planned_horizon

    @property
    def _planned_horizon(self) -> int:
        """The step at which this configuration plans."""
        until = self._config.observe_until
        if self._replanned_at is None:
            return until
        return max(until, self._following(self._replanned_at))

    def _following(self, step: int) -> int:
        """The first step for an observation after ``step``."""
        every = self._config.observe_every
        return (step // every + 1) * every

    def _is_complete(self) -> bool:
        last = self._observations[-1].step if self._observations else 0
        return last >= self._planned_horizon

    def _require_complete(self) -> None:
        if not self._is_complete():
            expected = f"observations up to step {self._planned_horizon}"
            fields.fail("observations", [o.step for o in self._observations], expected)

    def _next_observation(self) -> int:
        last = self._observations[-1].step if self._observations else 0
        return self._following(max(last, self._replanned_at or 0))

    def _with_fallback(self, robust: Mapping[str, float | None]) -> tuple[float, ...]:
        return tuple(self._config.base_ell if ell is None else ell for ell in robust.values())

    def _check_state(
        self,
        observations: Sequence[Observation],
        plan: Plan | None,
        costs: Mapping[str, int],
    ) -> None:
        """Refuse a state at odds with itself, the configuration or the registry (``costs``).

        Before ``bind`` there is no registry: ``bind`` calls this again.
        """
        names = tuple(costs) or (tuple(observations[0].ell) if observations else ())
        for i, observation in enumerate(observations):
            if tuple(observation.ell) != names:
                field = f"observations[{i}].ell"
                fields.fail(field, list(observation.ell), f"the operator types {list(names)}")
        self._check_steps([observation.step for observation in observations], plan)
        if plan is None:
            return
        if plan.operator_types != names:
            fields.fail("plan.operator_types", plan.operator_types, f"{names}")
        robust = robust_ells(observations)
        for name, found, expected in zip(names, plan.ell_robust, robust.values(), strict=True):
            if expected is not None and found != expected:
                fields.fail(f"plan.ell_robust.{name}", found, f"{expected!r}, as observed")
        if costs and not self._config_may_differ:
            self._check_plan(plan, robust, costs)

    def _check_steps(self, steps: Sequence[int], plan: Plan | None) -> None:
        """Refuse observations that this configuration would not have made."""
        if plan is not None and not steps:
            fields.fail("plan", "a plan", "null without observations")
        if self._config_may_differ:
            if any(later <= earlier for earlier, later in pairwise(steps)):
                fields.fail("observations", list(steps), "rising steps")
            return
        every, until = self._config.observe_every, self._planned_horizon
        earlier, foreign_until = 0, self._replanned_at or 0
        for i, step in enumerate(steps):
            due = self._following(max(earlier, foreign_until))
            is_foreign = earlier < step <= foreign_until
            if not is_foreign and (step != due or step > until):
                fields.fail(
                    f"observations[{i}].step",
                    step,
                    f"{due}, with observe_every = {every} and observe_until = {until}",
                )
            earlier = step
        if plan is not None and steps[-1] != until:
            fields.fail("plan", "a plan", f"null before the observation at step {until}")

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


def robust_ells(observations: Sequence[Observation]) -> dict[str, float | None]:
    """The median over observations of their medians, by type; ``None`` where none was valid."""
    robust: dict[str, float | None] = {}
    for operator_type in observations[0].ell:
        medians = [ell for o in observations if (ell := o.ell[operator_type]) is not None]
        robust[operator_type] = statistics.median(medians) if medians else None
    return robust


def _effective(name: str, ell_raw: float) -> float | None:
    """``ell_raw / SAFETY``, or ``None`` for a matrix without a valid ``ell``."""
    is_real = isinstance(ell_raw, (int, float)) and not isinstance(ell_raw, bool)
    if not is_real or ell_raw < 0 or 1 + _ELL_SLACK < ell_raw < math.inf:
        fields.fail(f"ell_by_name.{name}", ell_raw, "a number in (0, 1], or NaN")
    if not math.isfinite(ell_raw) or ell_raw == 0:
        return None
    return min(float(ell_raw), 1.0) / SAFETY
