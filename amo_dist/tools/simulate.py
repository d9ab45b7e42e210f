"""Load and traffic of an optimizer step on many ranks, from layouts and plans alone."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard

from amo_dist.config import OPERATOR_TYPES
from amo_dist.distributed.layout import MatrixLayout, matrix_layout, mesh_layout
from amo_dist.distributed.ownership import Teams, assign, load_by_rank
from amo_dist.distributed.relays import relay
from amo_dist.schedule.budget import ns_step_flops
from amo_dist.schedule.fields import read_int
from amo_dist.schedule.types import MatrixInfo
from amo_dist.tools.command import MOST_WORLD, Subparsers, pad, read_json_file, read_steps, whole
from amo_dist.tools.ledger import reduced_by_rank, sent_by_rank
from amo_dist.tools.shapes import MODELS, PLANS, DecoderShape

WIRE_BYTES = 2
"""Bytes of one element of bfloat16, the dtype in which matrices travel."""
BASE_STEPS = 5
"""Newton-Schulz steps of every operator type before the lock."""
OWNERSHIPS = ("round_robin", "balanced")

_STEPS_BY_MODEL = {**PLANS, "Llama-3.1-1.4B": PLANS["Llama-3.1-760M"]}
"""Steps by operator type after the lock, for each choice of ``--model``.

The AMO paper prints no plan of Llama-3.1-1.4B; that of its smaller sister stands in.
"""

Row = dict[str, Any]
"""Load and traffic for a number of ranks, a way of dealing matrices to them, and a schedule.

As ``--json`` prints it: ``ranks``, ``ownership``, ``schedule``, and under ``teams`` how many
matrices are shared by how many ranks; under ``load`` the Newton-Schulz flops of a rank in one step,
their ``mean`` over all ranks, the ``greatest``, and the ``mean_whole`` without teams; under
``traffic`` the bytes that a rank sends in one step, to its teams too, ``mean`` and ``greatest`` to
any other rank, ``mean_across`` and ``greatest_across`` to other nodes, and ``mean_direct`` and
``greatest_direct`` what these would be if owners sent each holder its own copy.
"""


def lay_out(
    registry: Sequence[MatrixInfo], ranks: int, *, layout: str = "fsdp", replica_size: int = 8
) -> list[MatrixLayout]:
    """The matrices as FSDP shards them, on dim 0 as `torch.chunk` does, or as DDP repeats them.

    Args:
        registry: Name and shape of each.
        ranks: Size of the world.
        layout: ``fsdp``; ``hsdp``: sharded over ``replica_size`` consecutive ranks, and
            replicated over the others; or ``ddp``: whole on every rank.
        replica_size: Ranks of a replica under ``hsdp``.

    Raises:
        ValueError: ``replica_size`` does not divide ``ranks``.
    """
    mesh = torch.arange(ranks)
    placements: list[Any] = [Replicate() if layout == "ddp" else Shard(0)]
    if layout == "hsdp":
        if replica_size < 1 or ranks % replica_size:
            raise ValueError(
                f"replica_size: found {replica_size}, expected a divisor of {ranks} ranks"
            )
        mesh, placements = mesh.view(-1, replica_size), [Replicate(), Shard(0)]
    return [
        matrix_layout(info.name, mesh_layout(info.shape, mesh, placements), index)
        for index, info in enumerate(registry)
    ]


def simulate(
    registry: Sequence[MatrixInfo],
    steps: Mapping[str, int],
    ranks: int,
    *,
    layout: str = "fsdp",
    replica_size: int = 8,
    ranks_per_node: int = 8,
    owners: str = "mesh",
    max_team: int = 1,
) -> list[Row]:
    """Load and traffic before and after a lock, for each way of dealing matrices to ranks.

    Args:
        registry: Every matrix.
        steps: Newton-Schulz steps after the lock, of each operator type of the registry.
        ranks: Size of the world.
        layout: See `lay_out`.
        replica_size: See `lay_out`.
        ranks_per_node: Consecutive ranks of one node.
        owners: See `amo_dist.distributed.ownership.assign`.
        max_team: Most ranks that share one matrix.

    Returns:
        A uniform and a locked row for each ownership; with teams after those without.

    Raises:
        ValueError: A size is not positive or does not divide.
    """
    read_int("ranks", ranks, 1)
    read_int("ranks_per_node", ranks_per_node, 1)
    read_int("max_team", max_team, 1)
    matrices = lay_out(registry, ranks, layout=layout, replica_size=replica_size)
    node_by_rank = {rank: rank // ranks_per_node for rank in range(ranks)}
    uniform = dict.fromkeys(steps, BASE_STEPS)
    rows: list[Row] = []
    schedules = (("uniform", uniform), ("locked", steps))
    for most, ownership, (schedule, by_type) in itertools.product(
        sorted({1, max_team}), OWNERSHIPS, schedules
    ):
        costs, teams = flops_by_matrix(registry, by_type), Teams(most, WIRE_BYTES)
        jobs = assign(matrices, costs, ownership=ownership, owners=owners, teams=teams)
        loads = load_by_rank(jobs, costs).values()
        num_steps = [by_type[info.operator_type] for info in registry]
        reduced = reduced_by_rank(matrices, jobs, num_steps, ranks, ranks_per_node)
        _, direct = map(torch.add, sent_by_rank(matrices, jobs, ranks, ranks_per_node), reduced)
        relayed = relay(matrices, jobs, node_by_rank)
        sent = sent_by_rank(matrices, relayed, ranks, ranks_per_node)
        within, across = map(torch.add, sent, reduced)
        load = {"mean": sum(loads) / ranks, "greatest": max(loads, default=0.0)}
        load["mean_whole"] = sum(costs) / ranks if most > 1 else load["mean"]
        traffic = {
            "mean": WIRE_BYTES * int((within + across).sum()) / ranks,
            "greatest": WIRE_BYTES * int((within + across).max()),
            "mean_across": WIRE_BYTES * int(across.sum()) / ranks,
            "greatest_across": WIRE_BYTES * int(across.max()),
            "mean_direct": WIRE_BYTES * int(direct.sum()) / ranks,
            "greatest_direct": WIRE_BYTES * int(direct.max()),
        }
        names = {"ranks": ranks, "ownership": ownership, "schedule": schedule}
        shared = Counter(len(job.team) for job in jobs if job.team)
        counts = {str(size): count // size for size, count in sorted(shared.items())}
        rows.append({**names, "teams": counts, "load": load, "traffic": traffic})
    return rows


def flops_by_matrix(registry: Sequence[MatrixInfo], steps: Mapping[str, int]) -> list[float]:
    """Newton-Schulz flops of each matrix, for so many steps of each operator type."""
    return [float(steps[info.operator_type] * ns_step_flops(*info.shape)) for info in registry]


# -------------------------------------------------------------------- the command


def add_simulate_command(subparsers: Subparsers) -> None:
    """Register ``simulate``: load and traffic of a model on many ranks."""
    parser = subparsers.add_parser(
        "simulate",
        help="load and traffic of an optimizer step on many ranks, without them",
        description="Newton-Schulz flops and bytes sent by a rank in one optimizer step, before "
        "and after the lock, for each way of dealing matrices to ranks.",
        epilog="example: amo_dist simulate --model qwen3-1.7b --ranks 32 256 1024 --layout hsdp",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--model", choices=sorted(map(str.lower, _STEPS_BY_MODEL)), help="a model of the AMO paper"
    )
    source.add_argument(
        "--shapes",
        type=Path,
        metavar="FILE",
        help="a JSON object with layers, dim, ffn_dim, heads, kv_heads and q_ratio",
    )
    size = whole(1, MOST_WORLD)
    parser.add_argument(
        "--ranks", type=size, nargs="+", default=[32, 256, 1024], help="world sizes"
    )
    parser.add_argument("--layout", choices=("fsdp", "hsdp", "ddp"), default="fsdp")
    parser.add_argument("--replica-size", type=size, default=8, help="ranks that hold one replica")
    parser.add_argument("--ranks-per-node", type=size, default=8)
    parser.add_argument(
        "--max-team", type=size, default=1, help="most ranks that share one matrix; adds rows"
    )
    parser.add_argument(
        "--owners",
        choices=("mesh", "replica"),
        default="mesh",
        help="any rank owns, or one in each replica, so that nothing crosses replicas",
    )
    parser.add_argument(
        "--steps",
        action="append",
        default=[],
        metavar="TYPE=STEPS",
        help="steps of an operator type after the lock; those of the paper's table by default",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run_simulate)


def run_simulate(args: argparse.Namespace) -> int:
    """Print the simulation for parsed arguments.

    Raises:
        ValueError: A shape, a number of steps or a size of the world is malformed.
    """
    if args.model:
        name = next(name for name in _STEPS_BY_MODEL if name.lower() == args.model)
        shape = MODELS[name]
        steps = dict(zip(OPERATOR_TYPES, _STEPS_BY_MODEL[name], strict=True))
    else:
        shape, steps = _read_shape(args.shapes), dict.fromkeys(OPERATOR_TYPES, BASE_STEPS)
    steps |= read_steps("--steps", args.steps, OPERATOR_TYPES)
    options = {
        name: getattr(args, name)
        for name in ("layout", "owners", "replica_size", "ranks_per_node", "max_team")
    }
    rows = [
        row for ranks in args.ranks for row in simulate(shape.matrices(), steps, ranks, **options)
    ]
    if args.layout != "hsdp":
        options["replica_size"] = None
    record = {
        "model": args.model or str(args.shapes),
        "shape": dataclasses.asdict(shape),
        "steps": steps,
        **options,
        "wire_bytes": WIRE_BYTES,
        "rows": rows,
    }
    print(json.dumps(record, indent=2) if args.json else _table(record))
    return 0


def _read_shape(path: Path) -> DecoderShape:
    try:
        found = read_json_file(path)
    except ValueError as error:
        raise ValueError(f"--shapes: found {error}") from None
    try:
        return DecoderShape(**found)
    except TypeError as error:
        names = ", ".join(field.name for field in dataclasses.fields(DecoderShape))
        raise ValueError(
            f"--shapes: found {path} ({error}), expected a JSON object with {names}"
        ) from None


_COLUMNS: Sequence[tuple[str, Callable[[Row], str]]] = (
    ("ranks", lambda row: str(row["ranks"])),
    ("ownership", lambda row: row["ownership"]),
    ("schedule", lambda row: row["schedule"]),
    ("teams", lambda row: " + ".join(f"{n} of {t}" for t, n in row["teams"].items()) or "none"),
    ("GF mean", lambda row: f"{row['load']['mean'] / 1e9:.1f}"),
    ("GF max", lambda row: f"{row['load']['greatest'] / 1e9:.1f}"),
    ("max/mean", lambda row: f"{row['load']['greatest'] / row['load']['mean']:.2f}"),
    (
        "max/whole",
        lambda row: f"{row['load']['greatest'] / row['load']['mean_whole']:.2f}",
    ),
    ("MB mean", lambda row: f"{row['traffic']['mean'] / 1e6:.1f}"),
    ("MB max", lambda row: f"{row['traffic']['greatest'] / 1e6:.1f}"),
    (
        "within nodes",
        lambda row: f"{(row['traffic']['mean'] - row['traffic']['mean_across']) / 1e6:.1f}",
    ),
    ("across, mean", lambda row: f"{row['traffic']['mean_across'] / 1e6:.1f}"),
    ("across, max", lambda row: f"{row['traffic']['greatest_across'] / 1e6:.1f}"),
    ("direct, mean", lambda row: f"{row['traffic']['mean_direct'] / 1e6:.1f}"),
    ("direct, max", lambda row: f"{row['traffic']['greatest_direct'] / 1e6:.1f}"),
)


def _table(record: Mapping[str, Any]) -> str:
    layout = record["layout"]
    if layout == "hsdp":
        layout += f", replicas of {record['replica_size']}"
    steps = ", ".join(f"{name} {count}" for name, count in record["steps"].items())
    owners, node = record["owners"], record["ranks_per_node"]
    note = ""
    if record["max_team"] > 1:
        owners += f", teams of at most {record['max_team']}"
        note = "; max/whole: GF max over the mean without teams"
    lines = [
        f"{record['model']}, {layout}, owners: {owners}, nodes of {node}",
        f"locked steps: {steps} (uniform: {BASE_STEPS})",
        f"a rank in one step: Newton-Schulz GFLOP, and MB sent in bf16{note};",
        "direct: across nodes, if owners sent each holder its own copy",
        "",
    ]
    hidden = () if record["max_team"] > 1 else ("teams", "max/whole")
    columns = [column for column in _COLUMNS if column[0] not in hidden]
    cells = [[title for title, _ in columns]]
    cells += [[show(row) for _, show in columns] for row in record["rows"]]
    return "\n".join([*lines, *map("  ".join, pad(cells))])
