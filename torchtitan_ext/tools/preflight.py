"""``amo preflight``: what a config will do on many ranks, in seconds, without any of them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from amo_dist.distributed.layout import Matrix, make_matrix, replicated_layout
from amo_dist.schedule.amo import AMOPolicy
from amo_dist.schedule.types import MatrixInfo
from amo_dist.tools.command import MOST_WORLD, Subparsers, positive, print_text, whole
from amo_dist.tools.step_cost import OWNERSHIPS, StepCost, lay_out
from torchtitan_ext.batch import sequences_per_step
from torchtitan_ext.plugin import machine
from torchtitan_ext.runs import folder as runs
from torchtitan_ext.tools import preflight_memory, preflight_report, preflight_schedule


def add_command(subparsers: Subparsers) -> None:
    """Register ``preflight``."""
    parser = subparsers.add_parser(
        "preflight",
        help="check a config and predict its run, without starting it",
        description="Check a config (all mistakes at once) and tell what its run will do: which "
        "parameter goes to which optimizer, who owns how much, what travels, memory, tokens, "
        "checkpoints, and when the schedule changes. It does not predict run time.",
        usage="%(prog)s FILE [options]",
        epilog="example: amo preflight configs/qwen3_1.7b.toml --world 32; torchtitan's options "
        "follow the file, e.g. --training.steps 200",
    )
    size = whole(1, MOST_WORLD)
    parser.add_argument("--world", type=size, default=32, help="number of ranks (default 32)")
    parser.add_argument("--gpus-per-node", type=size, default=8, help="ranks of a node (default 8)")
    parser.add_argument(
        "--plan",
        metavar="TYPE=STEPS,...",
        default="",
        help="Newton-Schulz steps after the lock, e.g. attn_q=6,mlp_down=4 (default: the paper's "
        "plan where the config plans as it does and it prints one for the model, else uniform)",
    )
    parser.add_argument(
        "--memory-gb",
        type=positive(1e6),
        help="memory of a rank's device, in 1e9 bytes (default: that of this machine's; 80 with "
        "--elsewhere; not compared where this machine has no accelerator)",
    )
    parser.add_argument(
        "--elsewhere",
        action="store_true",
        help="the run starts on other machines: tokenizer, data, network and disk that this one "
        "lacks are noted, and no mistakes",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(run=run, overrides=[])


def run(args: argparse.Namespace) -> int:
    """Print the report.

    Returns:
        0, or 2 where the config has mistakes, which are printed instead.

    Raises:
        ValueError: For arguments that cannot work.
    """
    from torchtitan_ext.tools import preflight_checks, preflight_here

    overrides = runs.with_file(args.overrides)
    config = preflight_checks.load(overrides)
    memory_gb = args.memory_gb or _memory_gb(args.elsewhere)
    problems = preflight_checks.check(config, args.world, memory_gb)
    report: dict[str, Any] = {}
    if not problems:
        report = build(config, args.world, args.gpus_per_node, args.plan)
        report["notes"] += preflight_checks.timeout_notes(config)
        lacks = preflight_here.lacks(config)
        if args.elsewhere:
            report["notes"] += [f"on this machine: {one}" for one in lacks]
        else:
            problems += lacks
    if problems:
        problems = list(dict.fromkeys(problems))
        if args.json:
            print(json.dumps({"problems": problems}, indent=2))
        else:
            print_text("\n".join(f"error: {problem}" for problem in problems))
        return 2
    report["config"]["file"] = preflight_checks.config_file(overrides)
    report["world"]["memory_gb"] = memory_gb if math.isfinite(memory_gb) else None
    print_text(json.dumps(report, indent=2) if args.json else preflight_report.text(report))
    return 0


def _memory_gb(elsewhere: bool) -> float:
    """Of the device that a rank is expected to have; infinite where that is a CPU."""
    if elsewhere:
        return 80.0
    if machine.cpu_is_needed():
        return math.inf
    return torch.cuda.get_device_properties(0).total_memory / 1e9


def build(config: Any, world_size: int, ranks_per_node: int, plan: str) -> dict[str, Any]:
    """The whole report as JSON values.

    Args:
        config: A checked config.
        world_size: Number of ranks.
        ranks_per_node: Consecutive ranks of one node.
        plan: Steps after the lock as ``TYPE=STEPS,...``; empty for the default.

    Raises:
        ValueError: For a malformed plan, an unknown matrix inside a block, or a schedule file that
            lacks an operator type.
    """
    from torchtitan_ext.tools import preflight_checks

    degrees = preflight_checks.degrees(config, world_size)
    groups = preflight_memory.groups_of(config)
    registry = _registry(groups)
    before, after, origin = preflight_schedule.steps(config, registry, plan)
    report: dict[str, Any] = {
        "problems": [],
        "notes": [],
        "config": {
            "model": config.model.flavor,
            "optimizer": config.optimizer.name,
        },
        "world": {
            "ranks": world_size,
            "nodes": math.ceil(world_size / ranks_per_node),
            "gpus_per_node": ranks_per_node,
            "degrees": degrees,
        },
        "parameters": {**_parameters(groups), "num_matrices": len(registry)},
        "operator_types": _operator_types(registry, before, after),
        "plan_origin": origin,
        "run": _run(config, degrees),
        "timeline": _timeline(config),
        "ladder": preflight_schedule.ladder(config, registry),
    }
    _add_costs(report, config, degrees, registry, (before, after))
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
    found: dict[str, Any] = {}
    for name in before:
        shapes = [info.shape for info in registry if info.operator_type == name]
        found[name] = {
            "count": len(shapes),
            "shapes": sorted({f"{m} x {n}" for m, n in shapes}),
            "steps_before": before[name],
            "steps_after": after[name],
        }
    return found


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
    """The events after the observations."""
    if amo.observe_only:
        return [(amo.observe_until, "last observation; the uniform schedule stays")]
    ladder = "; steps fall with the rate from here on" if amo.has_ladder else ""
    return [
        (amo.observe_until, "last observation, and the plan"),
        (amo.observe_until + 1, "transition starts"),
        (amo.lock_step, f"locked{ladder}"),
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
        StepCost(registry, matrices, one, num_ranks, config=muon, **sizes) for one in steps
    )
    memory["exchange"] = max(before.memory(), after.memory())
    others = {one: dataclasses.replace(muon, ownership=one) for one in OWNERSHIPS}
    report["step"] = {
        "ownership": muon.ownership,
        "before": before.summary(),
        "after": after.summary(),
        "imbalance": {
            one: StepCost(registry, matrices, steps[1], num_ranks, config=other, **sizes).imbalance
            for one, other in others.items()
        },
    }
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
