"""``amo preflight``: what a config will do on many ranks, in seconds, without any of them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from amo_dist.distributed.layout import MatrixLayout, matrix_layout, replicated_layout
from amo_dist.schedule.amo import AMOPolicy
from amo_dist.schedule.calendar import Calendar
from amo_dist.schedule.types import MatrixInfo
from amo_dist.tools.command import MOST_WORLD, Subparsers, whole
from amo_dist.tools.simulate import OWNERSHIPS, lay_out
from torchtitan_ext.batch import sequences_per_step
from torchtitan_ext.tools import preflight_costs as costs
from torchtitan_ext.tools import preflight_memory, preflight_report, preflight_schedule, runs


def add_command(subparsers: Subparsers) -> None:
    """Register ``preflight``."""
    parser = subparsers.add_parser(
        "preflight",
        help="check a config and predict its run, without starting it",
        description="Check a config (all mistakes at once) and tell what its run will do: which "
        "parameter goes to which optimizer, who owns how much, what travels, memory, predicted "
        "seconds, tokens, checkpoints, and when the schedule changes.",
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
        "--hardware",
        type=Path,
        help="figures: TOML, or `amo doctor`'s JSON (default: the project's)",
    )
    parser.add_argument("--gpu", default="h100", help="table of that file (default h100)")
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
    hardware, measured = costs.read_hardware(args.hardware or costs.HARDWARE_FILE, args.gpu)
    config, problems = preflight_checks.load(overrides)
    problems += preflight_checks.check(config, args.world, hardware)
    report: dict[str, Any] = {}
    if not problems:
        report = build(config, args.world, args.gpus_per_node, args.plan, hardware)
        lacks = preflight_here.lacks(config, report["run"])
        if args.elsewhere:
            report["notes"] += [f"on this machine: {one}" for one in lacks]
        else:
            problems += lacks
    if problems:
        problems = list(dict.fromkeys(problems))
        if args.json:
            print(json.dumps({"problems": problems}, indent=2))
        else:
            print("\n".join(f"error: {problem}" for problem in problems))
        return 2
    report["config"]["file"] = preflight_checks.config_file(overrides)
    report["assumptions"] = {"gpu": args.gpu, **dataclasses.asdict(hardware)}
    report["measured"] = measured
    print(json.dumps(report, indent=2) if args.json else preflight_report.text(report))
    return 0


def build(
    config: Any, world_size: int, ranks_per_node: int, plan: str, hardware: costs.Hardware
) -> dict[str, Any]:
    """The whole report as JSON values.

    Args:
        config: A checked config.
        world_size: Number of ranks.
        ranks_per_node: Consecutive ranks of one node.
        plan: Steps after the lock as ``TYPE=STEPS,...``; empty for the default.
        hardware: From :func:`torchtitan_ext.tools.preflight_costs.read_hardware`.

    Raises:
        ValueError: For a malformed plan, an unknown matrix inside a block, or a schedule file that
            lacks an operator type.
    """
    from torchtitan_ext.tools import preflight_checks

    degrees = preflight_checks.degrees(config, world_size)
    model = preflight_memory.meta_model(config)
    groups = preflight_memory.groups_of(model, config)
    registry = _registry(groups)
    before, after, origin = preflight_schedule.steps(config, registry, plan)
    report: dict[str, Any] = {
        "problems": [],
        "notes": [],
        "measured": [],
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
        "run": _run(config, degrees, groups),
        "timeline": _timeline(config),
    }
    num_flops = _flops_per_token(model, config.training.seq_len)
    _add_costs(report, config, degrees, groups, (before, after), num_flops, hardware)
    return report


# ------------------------------------------------------------------ the model


def _registry(groups: Sequence[Mapping[str, Any]]) -> list[MatrixInfo]:
    """Every matrix, in the order in which owners are dealt."""
    registry = []
    for group in groups:
        for name, parameter in group["params"]:
            layout = replicated_layout(parameter.shape, [0])
            for view in group.get("matrix_views", {}).get(name, ()):
                shape = matrix_layout("", layout, 0, view.boxes, view.dim).shape
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


def _flops_per_token(model: Any, seq_len: int) -> float:
    """Of forward and backward: six for each weight of a product, and the attention scores.

    The head counts, tied or not (torchtitan's own count leaves a tied one out).
    """
    config = model.config
    weights = sum(parameter.numel() for parameter in model.parameters())
    if not config.enable_weight_tying:
        weights -= model.tok_embeddings.weight.numel()
    heads = [layer.attention for layer in config.layers if layer.attention is not None]
    # Of all heads together; latent attention has no head_dim.
    widths = [a.n_heads * (getattr(a, "head_dim", None) or config.dim // a.n_heads) for a in heads]
    return float(6 * weights + 12 * sum(widths) * seq_len)


# ------------------------------------------------------------------ the schedule


def _samples(config: Any, registry: Sequence[MatrixInfo]) -> list[tuple[str, ...]]:
    """What AMO will draw at each observation of the first plan; those of later ones are alike."""
    if config.optimizer.name != "AMO":
        return []
    amo = config.optimizer.amo
    policy = AMOPolicy(amo)
    policy.bind(registry)
    steps = range(amo.observe_every, amo.observe_until + 1, amo.observe_every)
    return [policy.sample(step) for step in steps]


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
        events.append(
            (amo.observe_every, f"first observation, then every {amo.observe_every} steps")
        )
        events += _plans(amo)
    events.append((steps, "the run ends"))
    return [{"step": step, "event": event} for step, event in sorted(events) if 0 < step <= steps]


def _plans(amo: Any) -> list[tuple[int, str]]:
    """What follows the observations; of later plans the first stands for all."""
    if amo.observe_only:
        return [(amo.observe_until, "last observation; the uniform schedule stays")]
    events = [
        (amo.observe_until, "last observation, and the plan"),
        (amo.observe_until + 1, "transition starts"),
        (amo.lock_step, "locked"),
    ]
    if amo.replan_every:
        events[0] = (amo.observe_until, "last observation before the plan, and the plan")
        again = amo.observe_until + amo.replan_every
        events.append(
            (again, f"planned again from new observations, every {amo.replan_every} steps")
        )
    return events


def _num_observations(config: Any) -> int:
    """In the whole run, later plans' included."""
    calendar, plan_step, count = Calendar(config.optimizer.amo), None, 0
    for step in range(1, config.training.steps + 1):
        count += calendar.observes(step, plan_step)
        if step == calendar.next_plan(plan_step) and not config.optimizer.amo.observe_only:
            plan_step = step
    return count


# ------------------------------------------------------------------ the run


def _run(config: Any, degrees: Mapping[str, int], groups: Any) -> dict[str, Any]:
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
        **preflight_memory.checkpoint_sizes(config, groups),
    }


# ------------------------------------------------------------------ costs

PAPER = {"Qwen3-1.7B": {"optimizer_ms": 191.47, "observation_s": 9.47, "ranks": 32}}
"""Measured by the AMO paper for AMO (table of practical cost): optimizer update, and what an
observation adds to its step."""


def _add_costs(
    report: dict[str, Any],
    config: Any,
    degrees: Mapping[str, int],
    groups: Sequence[Mapping[str, Any]],
    steps: tuple[dict[str, int], dict[str, int]],
    flops_per_token: float,
    hardware: costs.Hardware,
) -> None:
    shards = degrees["shard"] * degrees["cp"]
    elementwise = preflight_memory.held_bytes(config, groups, shards)[2]
    memory = preflight_memory.memory_of(config, groups, degrees)
    report["memory"] = memory
    ranks = report["world"]["ranks"]
    training = flops_per_token * report["run"]["tokens_per_step"]
    model_seconds = training / (ranks * hardware.bf16_tflops * 1e12 * hardware.training_mfu)
    report["time"] = {"model_seconds": model_seconds}
    if degrees["tp"] > 1 or degrees["pp"] > 1:
        report["notes"].append(
            "tensor and pipeline parallelism have no model of costs here: load, traffic, memory "
            "and seconds are left out"
        )
        report.pop("memory")
        return
    registry = _registry(groups)
    if not registry:
        optimizer = elementwise / hardware.hbm_bytes_per_second
        report["time"].update(optimizer_before=optimizer, optimizer_after=optimizer)
        return
    world = costs.World(
        registry=registry,
        matrices=_layouts(registry, degrees, shards),
        num_ranks=1 if shards == 1 else ranks,
        ranks_per_node=report["world"]["gpus_per_node"],
        config=config.optimizer.amo if config.optimizer.name == "AMO" else config.optimizer.muon,
        elementwise_bytes=elementwise,
    )
    before, after = (costs.Step(world, one) for one in steps)
    memory["exchange"] = max(before.exchange_memory(), after.exchange_memory())
    _add_seconds(report, config, before, after, hardware)


def _layouts(
    registry: Sequence[MatrixInfo], degrees: Mapping[str, int], shards: int
) -> list[MatrixLayout]:
    if shards == 1:  # plain tensors, private to each rank, which does everything itself
        return lay_out(registry, 1)
    if degrees["replicate"] == 1:
        return lay_out(registry, shards)
    ranks = degrees["replicate"] * shards
    return lay_out(registry, ranks, layout="hsdp", replica_size=shards)


def _add_seconds(
    report: dict[str, Any],
    config: Any,
    before: costs.Step,
    after: costs.Step,
    hardware: costs.Hardware,
) -> None:
    world = after.world
    others = {one: dataclasses.replace(world.config, ownership=one) for one in OWNERSHIPS}
    worlds = {one: dataclasses.replace(world, config=config) for one, config in others.items()}
    found = report["step"] = {
        "ownership": world.config.ownership,
        "before": before.cost(hardware),
        "after": after.cost(hardware),
        "imbalance": {one: costs.Step(w, after.steps).imbalance() for one, w in worlds.items()},
    }
    for phase in ("before", "after"):
        parts = (found[phase][f"{part}_seconds"] for part in costs.PARTS)
        report["time"][f"optimizer_{phase}"] = sum(parts)
    samples = _samples(config, world.registry)
    if samples:
        report["observation"] = {
            "count": _num_observations(config),
            "matrices": max(map(len, samples)),
            "seconds": before.observation_seconds(samples, hardware),
        }
    paper = PAPER.get(config.model.flavor)
    if paper and config.optimizer.name == "AMO" and paper["ranks"] == report["world"]["ranks"]:
        report["paper"] = paper
