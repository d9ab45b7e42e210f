"""What owners measured of single matrices, agreed by all ranks, and what follows from it.

Everything here is a collective over the world, or a pure function of what one gave: all ranks come
to the same state.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from amo_dist.config import MuonConfig
from amo_dist.distributed.agreement import broadcast_text, check_alike, sum_over
from amo_dist.engine.world import World
from amo_dist.schedule.policies import Policy
from amo_dist.schedule.types import MatrixInfo

logger = logging.getLogger(__name__)


def agree_on_values(
    found: Mapping[str, Tensor], names: Sequence[str], world: World
) -> dict[str, float]:
    """The measured value of each matrix, on every rank; a collective over the world.

    Args:
        found: By matrix name, 0-dim: what this rank measured.
        names: Which values to agree on; the same on every rank.
        world: Says which rank's value of a matrix counts.

    Returns:
        By name; NaN where the value was NaN, zero, or not measured, as in a skipped step.
    """
    mine = {name: float(value) for name, value in found.items() if world.rank in world.homes[name]}
    agreed = sum_over([mine.get(name, 0.0) for name in names], world.group)
    return {
        name: value if value != 0.0 else math.nan for name, value in zip(names, agreed, strict=True)
    }


def check_state_alike(policy: Policy, step: int, world: World) -> None:
    """Refuse a state that only some ranks have restored; a collective over the world.

    Before the first step: ranks of unlike state would part ways in what follows, where some plan
    and others wait for them elsewhere.

    Args:
        policy: With the state it goes on from.
        step: Optimizer steps taken before.
        world: Whose ranks to compare.

    Raises:
        RankMismatchError: On every rank; names the ranks and the first field that differs.
    """
    fields = {"optimizer steps taken": step, **policy.state_dict()}
    lines = [f"{field}: {_brief(value)}" for field, value in fields.items()]
    check_alike("the state before the first step", "\n".join(lines), world.group)


def _brief(value: object) -> str:
    """JSON that is short enough to read, and unlike where values are."""
    text = json.dumps(value, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters, sha256 {digest})"


def plan_where_due(policy: Policy, step: int, world: World) -> None:
    """One rank plans, all adopt; a collective over the world where a plan is due.

    Args:
        policy: Says whether, and makes the plan.
        step: Optimizer step just taken.
        world: Its first rank plans.

    Raises:
        ValueError: On every rank, where planning failed so.
        RuntimeError: On the others, where it failed otherwise on the one that plans.
    """
    if not policy.plan_due(step):
        return
    text, failure = "", None
    if world.rank == 0:
        try:
            text = "plan:" + policy.make_plan()
        except Exception as error:
            failure = error
            text = f"{type(error).__name__}:{error}"
    kind, _, payload = broadcast_text(text, world.group).partition(":")
    if kind == "plan":
        policy.adopt_plan(payload)
        return
    if failure is not None:
        raise failure
    if kind == "ValueError":
        raise ValueError(payload)
    raise RuntimeError(f"planning failed on rank 0: {kind}: {payload}")


def guarded_matrix(registry: Sequence[MatrixInfo], step: int, every: int) -> str | None:
    """Name of the matrix whose residual is measured at a step, if any.

    All take turns in the order of names, in which the types of a layer follow one another.

    Args:
        registry: Every matrix of the world, sorted by name.
        step: Optimizer step, counted from 1.
        every: ``ns_guard_every``; 0 for never.
    """
    if not every or step % every or not registry:
        return None
    return registry[(step // every - 1) % len(registry)].name


def check_residual(
    step: int, name: str, residual: float, *, config: MuonConfig, policy: Policy, world: World
) -> None:
    """Warn of a residual above the bound, and fall back where the configuration says so.

    Args:
        step: Optimizer step just taken.
        name: Of the matrix.
        residual: Agreed; NaN for none.
        config: The bound.
        policy: Knows the schedule, and falls back where its settings say so.
        world: Its registry knows the operator type.
    """
    if not residual > config.ns_guard_bound:
        return
    operator_type = next(info.operator_type for info in world.registry if info.name == name)
    schedule = policy.schedules(step)[policy.group_of(name)]
    changed = policy.fall_back(step, name)
    triples = " ".join(f"({a:.4g}, {b:.4g}, {c:.4g})" for a, b, c in schedule.coefficients)
    logger.warning(
        "step %d: %s, of type %s, is left with a Newton-Schulz residual of %.4g, above "
        "ns_guard_bound = %g, by the %d steps %s (preconditioner %s, norm_scale %g)%s",
        *(step, name, operator_type, residual, config.ns_guard_bound, schedule.num_steps),
        *(triples, schedule.preconditioner, schedule.norm_scale),
        f"; {policy.group_of(name)} runs the uniform schedule from now on" if changed else "",
    )
