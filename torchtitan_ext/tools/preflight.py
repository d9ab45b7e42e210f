"""``amo preflight``: check a config for many ranks without starting them."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from amo_dist.config import require
from torchtitan_ext.tools.command import printable


def add_command(subparsers: Any) -> None:
    """Register ``preflight``."""
    parser = subparsers.add_parser(
        "preflight",
        help="check a config for N ranks without starting them",
        description="Check a config, and print what each optimizer trains, the lasting memory of a "
        "rank, the size of a checkpoint, and the steps at which the schedule changes. "
        "Mistakes are listed at the end, and the exit status is then 1. What this machine lacks is "
        "no mistake if it has fewer ranks than --world.",
        epilog="example: amo preflight configs/qwen3_1.7b.toml --world 32; torchtitan's options "
        "follow the file, e.g. --training.steps 200",
    )
    parser.add_argument("config", metavar="FILE", help="TOML file, such as those in configs")
    parser.add_argument("--world", type=int, default=32, help="number of ranks (default 32)")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="also train two steps as one of the ranks, with collectives that torchtitan fakes, "
        "and print its memory at the peak and the bytes that it sends; on a CPU with short "
        "sequences",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(run=run, overrides=[])


def run(args: argparse.Namespace) -> int:
    """Print the report, and mistakes of the config after it.

    Returns:
        0, or 1 where the config has mistakes.

    Raises:
        ValueError: The arguments or the file cannot be read.
    """
    require(args.world > 0, "--world", args.world, "1 or more")
    print("loading PyTorch and torchtitan ...", file=sys.stderr, flush=True)
    from torchtitan_ext.config import settings
    from torchtitan_ext.config.checks import collect, missing_on_this_machine, validate_config
    from torchtitan_ext.plugin import machine
    from torchtitan_ext.tools.dry_run import dry_run

    config, problems = settings.load([f"--{settings.FILE}", args.config, *args.overrides])
    is_elsewhere = args.world > machine.most_ranks()
    config, problems = validate_config(config, args.world, problems)
    report = predict(config, args.world, problems)
    if args.dry_run and not problems:
        print(f"training two steps as one of {args.world} ranks ...", file=sys.stderr, flush=True)
        report["dry run"] = collect(problems, lambda: dry_run(config, args.world))
    missing = missing_on_this_machine(config) if config.model_spec else []
    report["missing on this machine"] = missing
    if not is_elsewhere:
        problems += missing
    report["errors"] = list(dict.fromkeys(problems))
    print(json.dumps(report, indent=2) if args.json else "\n".join(lines_of(report)))
    return 1 if problems else 0


def predict(config: Any, world_size: int, problems: list[str]) -> dict[str, Any]:
    """Make the report as JSON values, without the parts that mistakes leave unknown.

    Args:
        config: A config from :func:`torchtitan_ext.config.checks.validate_config`.
        world_size: Number of ranks.
        problems: Mistakes of the config. An unknown matrix inside a block, and a schedule file that
            lacks an operator type are appended.

    Returns:
        Sections by title: fields by name, or rows.
    """
    from torchtitan_ext.config.checks import collect, degrees

    dims = collect(problems, lambda: degrees(config, world_size))
    report: dict[str, Any] = {"timeline": {event: step for step, event in _timeline(config)}}
    # An optimizer's own error of a mistake that is known would name it twice.
    is_known = any(line.startswith("optimizer") for line in problems)
    groups = None if is_known else collect(problems, lambda: groups_of(config))
    if groups is None:
        return report
    report["parameters"] = _parameters(groups)
    collect(problems, lambda: _check_schedule(config, groups))
    if problems:
        return report
    report["run"] = _run(config, groups, dims)
    if dims.tp == dims.pp == 1:  # no other layout is counted
        params, state = held_bytes(config, groups, dims.dp_shard * dims.cp)
        sizes = {"parameter_bytes": params, "gradient_bytes": params, "state_bytes": state}
        report["lasting memory of the fullest rank"] = sizes
    return report


def groups_of(config: Any) -> Sequence[Mapping[str, Any]]:
    """Parameter groups as the run makes them, without memory; all of them AdamW's under AdamW.

    Raises:
        ValueError: For a model that there is not, an unknown matrix inside a block, or an
            expression that matches no parameter.
    """
    import torch

    from amo_dist.operators.tree import read_tree
    from torchtitan_ext.plugin import models, optimizers

    with torch.device("meta"):
        model = models.spec(config.model).model.build()
    optimizers.require_used([model], config.optimizer)
    if config.optimizer.name == "AdamW":
        params = [(place.name, place.parameter) for place in read_tree([model])]
        return [{"params": params, "algorithm": "adamw"}]
    return optimizers.groups_of([model], config.optimizer)


def held_bytes(config: Any, groups: Any, shards: int) -> tuple[int, int]:
    """Bytes of the fullest rank: of parameters, and of optimizer state.

    FSDP cuts dim 0 as ``torch.chunk`` does: the first rank holds the ceiling.
    """
    import torch

    optimizer = config.optimizer
    itemsize = getattr(torch, config.training.dtype).itemsize
    params = state = 0
    for group in groups:
        bytes_per_entry = 2 * itemsize  # of AdamW
        if group["algorithm"] == "muon":
            bytes_per_entry = torch.float32.itemsize * (2 if optimizer.name == "AdaMuon" else 1)
        for _, parameter in group["params"]:
            held = -(-parameter.shape[0] // shards) * math.prod(parameter.shape[1:])
            params += held * itemsize
            state += held * bytes_per_entry
    return params, state


def _timeline(config: Any) -> list[tuple[int, str]]:
    steps, schedule = config.training.steps, config.lr_scheduler
    events = [(schedule.warmup_steps, "rate at its peak"), (steps, "end")]
    if config.optimizer.name == "AMO":
        amo = config.optimizer.amo
        events += [(amo.interval, "first observation"), (amo.lock_step, "locked")]
        events.append((amo.observe_until, "last observation, plan"))
    return sorted((step, event) for step, event in events if 0 < step <= steps)


def _parameters(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for the same parameter of all blocks."""
    sizes: dict[tuple[str, ...], list[int]] = {}
    for group in groups:
        for name, parameter in group["params"]:
            views = group.get("matrix_views", {}).get(name, ())
            types = ", ".join(sorted({view.operator_type for view in views})) or "AdamW"
            shape = " x ".join(map(str, parameter.shape))
            row = re.sub(r"\.\d+\.", ".*.", name), shape, types
            sizes.setdefault(row, []).append(parameter.numel())
    everything = [size for rows in sizes.values() for size in rows]
    fields = ("name", "shape", "operator type", "count", "elements")
    return [
        dict(zip(fields, (*row, len(counts), sum(counts)), strict=True))
        for row, counts in {**sizes, ("all", "", ""): everything}.items()
    ]


def _check_schedule(config: Any, groups: Sequence[Mapping[str, Any]]) -> None:
    """Check that a fixed schedule has the operator types of the model.

    Raises:
        ValueError: For a schedule file that lacks one.
    """
    from amo_dist.schedule.source import as_source
    from amo_dist.schedule.types import MatrixInfo
    from torchtitan_ext.plugin.optimizers import fixed_schedule

    if config.optimizer.name in ("AdamW", "AMO", "ROOT"):
        return
    registry = [
        MatrixInfo(name + view.suffix, (1, 1), view.operator_type)
        for group in groups
        for name, views in group.get("matrix_views", {}).items()
        for view in views
    ]
    as_source(fixed_schedule(config.optimizer)).bind(registry)


def _run(config: Any, groups: Any, dims: Any) -> dict[str, Any]:
    from torchtitan_ext.plugin.hyperparameters import sequences_per_step

    training = config.training
    ranks = dims.dp_replicate * dims.dp_shard
    batch = sequences_per_step(training, dims)
    tokens = batch * training.seq_len
    return {
        "sharded over": dims.dp_shard,
        "sequences per step": batch,
        "accumulated batches": batch // (training.local_batch_size * ranks),
        "tokens per step": tokens,
        "tokens": tokens * training.steps,
        "checkpoint_bytes": sum(held_bytes(config, groups, 1)),
    }


# ------------------------------------------------------------------ text


def lines_of(report: Mapping[str, Any]) -> Iterator[str]:
    """The lines of a report: a title, then names and values or a table."""
    for title, section in report.items():
        if not section:
            continue
        yield from ("", title)
        first = next(iter(section.values())) if isinstance(section, dict) else section[0]
        if isinstance(first, str) and isinstance(section, list):
            yield from (f"  {_text(title, line)}" for line in section)
            continue
        if isinstance(section, dict):
            rows = [[name, _text(name, value)] for name, value in section.items()]
        else:
            rows = [list(section[0])]
            rows += [[_text(name, value) for name, value in row.items()] for row in section]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            yield "  ".join(["", *cells]).rstrip()


def _text(name: str, value: Any) -> str:
    if isinstance(value, (int, float)) and name.endswith("bytes"):
        return f"{value:,.0f}"
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return printable(text)
