"""The report of ``amo preflight`` in a terminal."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeAlias

from torchtitan_ext.tools.command import Table
from torchtitan_ext.tools.preflight_memory import peak

Part: TypeAlias = str | Table


def parts_of(report: Mapping[str, Any]) -> list[Part]:
    """Lines and tables of what is known, and the mistakes last.

    Args:
        report: Report of ``preflight_prediction.predict``, with ``memory_gb``.
    """
    sections = [_head(report), _parameters(report), _run(report), _step(report), _memory(report)]
    sections.append([f"error: {problem}" for problem in report["problems"]])
    parts: list[Part] = []
    for section in filter(None, sections):
        parts += ["", *section] if parts else section
    return parts


def _head(report: Mapping[str, Any]) -> list[Part]:
    config, world, problems = report["config"], report["world"], report["problems"]
    degrees = ", ".join(f"{name} {n}" for name, n in world["degrees"].items() if n > 1) or "1"
    state = "is in order"
    if problems:
        state = f"has {len(problems)} mistake{'s' * (len(problems) > 1)}, listed at the end"
    nodes = "one node"
    if world["nodes"] > 1:
        nodes = f"{world['nodes']} nodes of {min(world['ranks'], world['gpus_per_node'])}"
    lines: list[Part] = [
        f"{config['model']} with {config['optimizer']}: {config['file']} {state}",
        f"{world['ranks']} ranks on {nodes} ({degrees})",
    ]
    return lines + [f"note: {note}" for note in report["notes"]]


def _parameters(report: Mapping[str, Any]) -> list[Part]:
    if "parameters" not in report:
        return []
    counts, optimizer = report["parameters"], report["config"]["optimizer"]
    parts: list[Part] = [f"parameters  {counts['total']:,}"]
    if counts["num_matrices"]:
        share = counts["muon"] / counts["total"]
        parts.append(
            f"  {counts['muon']:,} ({share:.2%}) in {counts['num_matrices']} matrices: {optimizer}"
        )
    parts += [f"  {counts['adamw']:,}: AdamW", ""]
    # One line for the same parameter of all blocks.
    same: Counter[tuple[str, str, str]] = Counter()
    for name, parameter in counts["by_name"].items():
        kind = ", ".join(parameter["operator_types"]) or "AdamW"
        pattern = re.sub(r"\.\d+\.", ".*.", name)
        same[pattern, " x ".join(map(str, parameter["shape"])), kind] += 1
    rows = [[name, str(n), shape, kind] for (name, shape, kind), n in same.items()]
    parts.append(Table(["parameter", "count", "shape", "optimizer or type"], rows))
    if types := report.get("operator_types"):
        rows = [
            [name, str(row["count"]), str(row["steps_before"]), str(row["steps_after"])]
            for name, row in types.items()
        ]
        when = "after the lock: " if optimizer == "AMO" else ""
        parts += ["", f"Newton-Schulz steps ({when}{report['plan_origin']})"]
        parts.append(Table(["operator type", "count", "before", "after"], rows))
    return parts


def _run(report: Mapping[str, Any]) -> list[Part]:
    if "run" not in report:
        return []
    run = report["run"]
    size, kept, num_parts = run["checkpoint_bytes"], run["checkpoints_kept"], run["accumulation"]
    tokens, batch = f"{run['tokens']:,}", f"{run['global_batch']:,} sequences"
    if run["tokens"] >= 1e7:
        tokens = f"{run['tokens'] / 1e9:.2f} billion"
    parts: list[Part] = [
        f"run  {run['steps']:,} steps, {tokens} tokens; peak rate {run['peak_lr']:.4g}",
        f"  per step: {batch}, {run['tokens_per_step']:,} tokens"
        + (f", accumulated in {num_parts} parts" if num_parts > 1 else ""),
        f"  {run['checkpoints_saved']} checkpoints of {_gb(size)}, {kept} kept: {_gb(kept * size)}",
    ]
    parts += [f"  step {row['step']:>7,}  {row['event']}" for row in report["timeline"]]
    return parts


def _step(report: Mapping[str, Any]) -> list[Part]:
    if "step" not in report:
        return []
    step = report["step"]
    rows = []
    for phase in ("before", "after"):
        costs = step[phase]
        for title, key, unit in (
            ("Newton-Schulz, GFLOP", "gflop", 1.0),
            ("sent within the node, MB", "sent_within", 1e6),
            ("sent to other nodes, MB", "sent_across", 1e6),
        ):
            spread = [f"{costs[key][which] / unit:,.1f}" for which in ("least", "mean", "most")]
            rows.append([f"{phase} the lock: {title}", *spread])
    owners = " and ".join(str(step[phase]["owners"]) for phase in ("before", "after"))
    ratios = (f"{ratio:.3f} by {name}" for name, ratio in step["imbalance"].items())
    parts: list[Part] = [f"per rank and optimizer step (owners: {step['ownership']})"]
    parts.append(Table(["", "least", "mean", "most"], rows))
    if observation := report.get("observation"):
        parts.append(f"  an observation: {observation['matrices']} matrices")
    return [
        *parts,
        f"  ranks that own a matrix, before and after: {owners}",
        f"  work of the busiest rank over the mean, locked: {', '.join(ratios)}",
    ]


def _memory(report: Mapping[str, Any]) -> list[Part]:
    if "memory" not in report:
        return []
    memory = report["memory"]
    parts: list[Part] = ["memory of the fullest rank, without activations and gathered parameters"]
    parts += [f"  {name.replace('_', ' '):<18}{_gb(size)}" for name, size in memory.items()]
    most = f"{_gb(peak(memory))} (logits and exchange are never held together)"
    parts.append(f"  {'at most':<18}{most}")
    if (device := report["world"]["memory_gb"]) is not None:
        parts.append(f"  {'left':<18}{_gb(device * 1e9 - peak(memory))} of {_gb(device * 1e9)}")
    return parts


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
