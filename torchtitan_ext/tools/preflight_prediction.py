"""What the run of a config will do on many ranks, from names, shapes and layouts alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from amo_dist.distributed.layout import Matrix, make_matrix, replicated_layout
from amo_dist.schedule.amo import AMOPolicy
from amo_dist.schedule.types import MatrixInfo
from torchtitan_ext.batch import sequences_per_step
from torchtitan_ext.config.checks import collect, degrees
from torchtitan_ext.tools import preflight_memory, preflight_schedule
from torchtitan_ext.tools.step_cost import OWNERSHIPS, StepCost, lay_out


def predict(
    config: Any, world_size: int, ranks_per_node: int, plan: str, problems: list[str]
) -> dict[str, Any]:
    """Make the report as JSON values, without the parts that mistakes leave unknown.

    Args:
        config: A config from :func:`torchtitan_ext.tools.preflight_here.examine`.
        world_size: Number of ranks.
        ranks_per_node: Consecutive ranks of one node.
        plan: Steps after the lock as ``TYPE=STEPS,...``; empty for the default.
        problems: Mistakes of the config. A malformed plan, an unknown matrix inside a block, and a
            schedule file that lacks an operator type are appended.
    """
    by_name = collect(problems, lambda: degrees(config, world_size))
    report: dict[str, Any] = {
        "problems": [],
        "notes": [],
        "config": {"model": config.model.flavor, "optimizer": config.optimizer.name},
        "world": {
            "ranks": world_size,
            "nodes": math.ceil(world_size / ranks_per_node),
            "gpus_per_node": ranks_per_node,
            "degrees": by_name or {},
        },
        "timeline": _timeline(config),
    }
    groups = collect(problems, lambda: preflight_memory.groups_of(config))
    if groups is None:
        return report
    registry = _registry(groups)
    report["parameters"] = {**_parameters(groups), "num_matrices": len(registry)}
    steps = collect(problems, lambda: preflight_schedule.steps(config, registry, plan))
    if steps is None:
        return report
    before, after, report["plan_origin"] = steps
    report["operator_types"] = _operator_types(registry, before, after)
    if by_name is not None and not problems:
        report["run"] = _run(config, by_name)
        report["notes"] += preflight_memory.timeout_notes(config)
        _add_costs(report, config, by_name, registry, (before, after))
    return report


# ------------------------------------------------------------------ the model


def _registry(groups: Sequence[Mapping[str, Any]]) -> list[MatrixInfo]:
    """Every matrix, in the order in which owners are dealt."""
    registry = []
    for group in groups:
        for name, parameter in group["params"]:
            layout = replicated_layout(parameter.shape, [0])
            for view in group.get("matrix_views", {}).get(name, ()):
                shape = make_matrix("", layout, 0, view.boxes, view.dim).shape
                registry.append(MatrixInfo(name + view.suffix, shape, view.operator_type))
    return registry


def _parameters(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    counts = {"muon": 0, "adamw": 0}
    by_name: dict[str, Any] = {}
    for group in groups:
        for name, parameter in group["params"]:
            views = group.get("matrix_views", {}).get(name, ())
            counts[group["algorithm"]] += parameter.numel()
            by_name[name] = {
                "shape": list(parameter.shape),
                "optimizer": group["algorithm"],
                "operator_types": sorted({view.operator_type for view in views}),
            }
    return {"total": sum(counts.values()), **counts, "by_name": by_name}


def _operator_types(
    registry: Sequence[MatrixInfo], before: Mapping[str, int], after: Mapping[str, int]
) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for name in before:
        shapes = [info.shape for info in registry if info.operator_type == name]
        rows[name] = {
            "count": len(shapes),
            "shapes": sorted({f"{m} x {n}" for m, n in shapes}),
            "steps_before": before[name],
            "steps_after": after[name],
        }
    return rows


# ------------------------------------------------------------------ the schedule


def _timeline(config: Any) -> list[dict[str, Any]]:
    steps, schedule = config.training.steps, config.lr_scheduler
    total = schedule.total_steps or steps
    events = [(schedule.warmup_steps, "the rate reaches its peak")]
    if schedule.decay_ratio is None:
        events.append((schedule.warmup_steps + 1, f"{schedule.decay_type} decay starts"))
    elif decay := round(total * schedule.decay_ratio):
        events.append((total + 2 - decay, f"{schedule.decay_type} decay starts"))
    if config.optimizer.name == "AMO":
        amo = config.optimizer.amo
        events.append((amo.interval, f"first observation, then every {amo.interval} steps"))
        events += _plans(amo)
    events.append((steps, "the run ends"))
    return [{"step": step, "event": event} for step, event in sorted(events) if 0 < step <= steps]


def _plans(amo: Any) -> list[tuple[int, str]]:
    """Events after the observations."""
    if amo.observe_only:
        return [(amo.observe_until, "last observation; the uniform schedule stays")]
    return [
        (amo.observe_until, "last observation, and the plan"),
        (amo.observe_until + 1, "transition starts"),
        (amo.lock_step, "locked"),
    ]


# ------------------------------------------------------------------ the run


def _run(config: Any, degrees: Mapping[str, int]) -> dict[str, Any]:
    training = config.training
    ranks = degrees["replicate"] * degrees["shard"]
    batch = sequences_per_step(training, ranks)
    tokens = batch * training.seq_len
    return {
        "peak_lr": config.optimizer.lr,
        "steps": training.steps,
        "global_batch": batch,
        "accumulation": batch // (training.local_batch_size * ranks),
        "tokens_per_step": tokens,
        "tokens": tokens * training.steps,
        **preflight_memory.checkpoint_sizes(config),
    }


# ------------------------------------------------------------------ costs


def _add_costs(
    report: dict[str, Any],
    config: Any,
    degrees: Mapping[str, int],
    registry: Sequence[MatrixInfo],
    steps: tuple[dict[str, int], dict[str, int]],
) -> None:
    if degrees["tp"] > 1 or degrees["pp"] > 1:
        report["notes"].append(
            "tensor and pipeline parallelism have no model of costs here: load, traffic and memory "
            "are left out"
        )
        return
    memory = report["memory"] = preflight_memory.memory_of(config, degrees)
    if not registry:
        return
    shards = degrees["shard"] * degrees["cp"]
    matrices = _layouts(registry, degrees, shards)
    num_ranks = 1 if shards == 1 else report["world"]["ranks"]
    muon = config.optimizer.amo if config.optimizer.name == "AMO" else config.optimizer.muon
    sizes: dict[str, Any] = {"ranks_per_node": report["world"]["gpus_per_node"]}
    before, after = (
        StepCost(registry, matrices, steps_by_type, num_ranks, config=muon, **sizes)
        for steps_by_type in steps
    )
    memory["exchange"] = max(before.memory(), after.memory())
    imbalance = {
        ownership: StepCost(
            registry,
            matrices,
            steps[1],
            num_ranks,
            config=dataclasses.replace(muon, ownership=ownership),
            **sizes,
        ).imbalance
        for ownership in OWNERSHIPS
    }
    report["step"] = {
        "ownership": muon.ownership,
        "before": before.summary(),
        "after": after.summary(),
        "imbalance": imbalance,
    }
    round_robin, balanced = imbalance["round_robin"], imbalance["balanced"]
    if muon.ownership == "round_robin" and round_robin > 1.05 * balanced:
        report["notes"].append(
            f"the busiest rank does {round_robin:.2f} times the mean of Newton-Schulz work, and "
            f"{balanced:.2f} times with optimizer.muon.ownership = 'balanced', which is recommended"
        )
    if config.optimizer.name == "AMO":
        amo = config.optimizer.amo
        policy = AMOPolicy(amo)
        drawn = policy.sample(policy.start(), policy.groups(registry), amo.interval)
        report["observation"] = {"matrices": len(drawn)}


def _layouts(
    registry: Sequence[MatrixInfo], degrees: Mapping[str, int], shards: int
) -> list[Matrix]:
    if shards == 1:  # plain tensors, private to each rank, which does everything itself
        return lay_out(registry, 1)
    if degrees["replicate"] == 1:
        return lay_out(registry, shards)
    ranks = degrees["replicate"] * shards
    return lay_out(registry, ranks, layout="hsdp", replica_size=shards)
