"""The report of ``amo preflight`` as text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from amo_dist.tools.command import pad
from torchtitan_ext.tools.preflight_memory import peak


def text(report: Mapping[str, Any]) -> str:
    """All sections, one below the other.

    Args:
        report: From :func:`torchtitan_ext.tools.preflight.build`, with ``memory_gb``.
    """
    sections: list[list[str]] = [_head(report), _parameters(report), _run(report)]
    if "step" in report:
        sections.append(_step(report))
    if "memory" in report:
        sections.append(_memory(report))
    return "\n\n".join("\n".join(lines) for lines in sections)


def _head(report: Mapping[str, Any]) -> list[str]:
    config, world = report["config"], report["world"]
    degrees = ", ".join(f"{name} {n}" for name, n in world["degrees"].items() if n > 1) or "1"
    lines = [
        f"{config['model']} with {config['optimizer']}: {config['file']} is in order",
        f"{world['ranks']} ranks on {_nodes(world)} ({degrees})",
    ]
    return lines + [f"note: {note}" for note in report["notes"]]


def _nodes(world: Mapping[str, Any]) -> str:
    most = min(world["ranks"], world["gpus_per_node"])
    return "one node" if world["nodes"] == 1 else f"{world['nodes']} nodes of {most}"


def _parameters(report: Mapping[str, Any]) -> list[str]:
    found = report["parameters"]
    optimizer = report["config"]["optimizer"]
    lines = [f"parameters  {found['total']:,}"]
    if found["num_matrices"]:
        share = found["muon"] / found["total"]
        lines.append(
            f"  {found['muon']:,} ({share:.2%}) in {found['num_matrices']} matrices: {optimizer}"
        )
    lines += [f"  {found['adamw']:,}: AdamW", ""]
    # One line for the same parameter of all blocks.
    same: Counter[tuple[str, str, str]] = Counter()
    for name, one in found["by_name"].items():
        kind = ", ".join(one["operator_types"]) or "AdamW"
        pattern = re.sub(r"\.\d+\.", ".*.", name)
        same[pattern, " x ".join(map(str, one["shape"])), kind] += 1
    lines += _table(
        ["parameter", "count", "shape", "goes to"],
        [[name, str(n), shape, kind] for (name, shape, kind), n in same.items()],
    )
    types = report["operator_types"]
    if types:
        rows = [
            [name, str(one["count"]), str(one["steps_before"]), str(one["steps_after"])]
            for name, one in types.items()
        ]
        when = "after the lock: " if optimizer == "AMO" else ""
        lines += ["", f"Newton-Schulz steps ({when}{report['plan_origin']})"]
        lines += _table(["operator type", "count", "before", "after"], rows)
    return lines


def _run(report: Mapping[str, Any]) -> list[str]:
    run = report["run"]
    size, kept, parts = run["checkpoint_bytes"], run["checkpoints_kept"], run["accumulation"]
    tokens, batch = f"{run['tokens']:,}", f"{run['global_batch']:,} sequences"
    if run["tokens"] >= 1e7:
        tokens = f"{run['tokens'] / 1e9:.2f} billion"
    lines = [
        f"run  {run['steps']:,} steps, {tokens} tokens; peak rate {run['peak_lr']:.4g}",
        f"  a step: {batch}, {run['tokens_per_step']:,} tokens"
        + (f", accumulated in {parts} parts" if parts > 1 else ""),
        f"  {run['checkpoints_saved']} checkpoints of {_gb(size)}, {kept} kept: {_gb(kept * size)}",
    ]
    lines += [f"  step {one['step']:>7,}  {one['event']}" for one in report["timeline"]]
    return lines + (_ladder(report["ladder"]) if report["ladder"] else [])


def _ladder(ladder: Mapping[str, Any]) -> list[str]:
    head = ["step", "rate / peak", *ladder["rows"][0]["steps"], "flops / uniform"]
    rows = []
    for row in ladder["rows"]:
        steps = map(str, row["steps"].values())
        rows.append([f"{row['step']:,}", f"{row['rate']:.3f}", *steps, f"{row['flops']:.3f}"])
    after, whole = f"{ladder['flops_after']:.3f}", f"{ladder['flops']:.3f}"
    return [
        "",
        f"ladder, tau {ladder['tau']:g}, for errors that are typical of small models",
        *_table(head, rows),
        f"  Newton-Schulz flops over uniform's: {after} after the lock, {whole} over the run",
    ]


def _step(report: Mapping[str, Any]) -> list[str]:
    step = report["step"]
    lines = [f"a rank in one optimizer step (owners: {step['ownership']})"]
    rows = []
    for phase in ("before", "after"):
        one = step[phase]
        for title, key, unit in (
            ("Newton-Schulz, GFLOP", "gflop", 1.0),
            ("sent within the node, MB", "sent_within", 1e6),
            ("sent to other nodes, MB", "sent_across", 1e6),
        ):
            spread = [f"{one[key][which] / unit:,.1f}" for which in ("least", "mean", "most")]
            rows.append([f"{phase} the lock: {title}", *spread])
    lines += _table(["", "least", "mean", "most"], rows)
    owners = " and ".join(str(step[phase]["owners"]) for phase in ("before", "after"))
    told = (f"{ratio:.3f} by {name}" for name, ratio in step["imbalance"].items())
    if found := report.get("observation"):
        lines.append(f"  an observation: {found['matrices']} matrices")
    return [
        *lines,
        f"  ranks that own a matrix, before and after: {owners}",
        f"  work of the busiest rank over the mean, locked: {', '.join(told)}",
    ]


def _memory(report: Mapping[str, Any]) -> list[str]:
    memory = report["memory"]
    lines = ["memory of the fullest rank, without activations and gathered parameters"]
    lines += [f"  {name.replace('_', ' '):<18}{_gb(size)}" for name, size in memory.items()]
    most = f"{_gb(peak(memory))} (logits and exchange are never held together)"
    lines.append(f"  {'at most':<18}{most}")
    if (device := report["world"]["memory_gb"]) is not None:
        lines.append(f"  {'left':<18}{_gb(device * 1e9 - peak(memory))} of {_gb(device * 1e9)}")
    return lines


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of aligned cells; the first column and those of text to the left."""
    cells = [head, *rows]
    left = [i for i, cell in enumerate(cells[-1]) if i == 0 or not re.fullmatch(r"[\d.,]+", cell)]
    return [f"  {'  '.join(row)}".rstrip() for row in pad(cells, left)]
