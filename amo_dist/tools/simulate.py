"""Load and traffic of an optimizer step on many ranks, from layouts and plans alone."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard

from amo_dist.config import OPERATOR_TYPES
from amo_dist.distributed.layout import MatrixLayout, matrix_layout, mesh_layout
from amo_dist.distributed.ownership import Job, assign, load_by_rank
from amo_dist.schedule.budget import ns_step_flops
from amo_dist.schedule.types import MatrixInfo
from amo_dist.tools.command import Subparsers, pad, read_steps
from amo_dist.tools.ledger import sent_by_rank
from amo_dist.tools.shapes import MODELS, PLANS, DecoderShape

WIRE_BYTES = 2
"""Bytes of one element of bfloat16, the dtype in which matrices travel."""
BASE_STEPS = 5
"""Newton-Schulz steps of every operator type before the lock."""
OWNERSHIPS = ("round_robin", "balanced")
LAYOUTS = ("fsdp", "hsdp")

_STEPS_BY_MODEL = {
    "qwen3-1.7b": PLANS["Qwen3-1.7B"],
    "llama-3.1-760m": PLANS["Llama-3.1-760M"],
    # The AMO paper prints no plan of this model; that of its smaller sister stands in.
    "llama-3.1-1.4b": PLANS["Llama-3.1-760M"],
}
"""Steps by operator type after the lock, for each choice of ``--model``."""


@dataclasses.dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that a rank sends in one step.

    Attributes:
        mean: To any other rank, averaged over all ranks.
        greatest: To any other rank, by the rank that sends the most.
        mean_across: To other nodes, averaged over all ranks.
        greatest_across: To other nodes, by the rank that sends the most across.
    """

    mean: float
    greatest: int
    mean_across: float
    greatest_across: int

    @property
    def mean_within(self) -> float:
        """Bytes to ranks of the same node, averaged over all ranks."""
        return self.mean - self.mean_across


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """Newton-Schulz flops of a rank in one step: the mean over all ranks and the greatest."""

    mean: float
    greatest: float

    @property
    def imbalance(self) -> float:
        """Greatest over mean: how much longer the step takes than with a perfect balance."""
        return self.greatest / self.mean


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """Load and traffic for a number of ranks, a way of dealing matrices to them, and a schedule."""

    ranks: int
    ownership: str
    schedule: str
    load: Load
    traffic: Traffic


def lay_out(
    registry: Sequence[MatrixInfo], ranks: int, *, layout: str = "fsdp", replica_size: int = 8
) -> list[MatrixLayout]:
    """The matrices as FSDP shards them: on dim 0, as `torch.chunk` does.

    Args:
        registry: Name and shape of each.
        ranks: Size of the world.
        layout: ``fsdp``, or ``hsdp``: sharded over ``replica_size`` consecutive ranks, and
            replicated over the others.
        replica_size: Ranks of a replica under ``hsdp``.

    Raises:
        ValueError: ``replica_size`` does not divide ``ranks``.
    """
    if layout == "hsdp":
        if replica_size < 1 or ranks % replica_size:
            raise ValueError(
                f"replica_size: found {replica_size}, expected a divisor of {ranks} ranks"
            )
        mesh = torch.arange(ranks).view(-1, replica_size)
        placements: list[Any] = [Replicate(), Shard(0)]
    else:
        mesh, placements = torch.arange(ranks), [Shard(0)]
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
) -> list[Result]:
    """Load and traffic before and after a lock, for each way of dealing matrices to ranks.

    Args:
        registry: Every matrix.
        steps: Newton-Schulz steps of each operator type after the lock.
        ranks: Size of the world.
        layout: See `lay_out`.
        replica_size: See `lay_out`.
        ranks_per_node: Consecutive ranks of one node.
        owners: See `amo_dist.distributed.ownership.assign`.

    Returns:
        A uniform and a locked row for each ownership.

    Raises:
        ValueError: A size is not positive or does not divide, or a type has no steps.
    """
    for field, found in (("ranks", ranks), ("ranks_per_node", ranks_per_node)):
        if found < 1:
            raise ValueError(f"{field}: found {found}, expected an integer >= 1")
    if missing := sorted({info.operator_type for info in registry} - set(steps)):
        raise ValueError(f"steps: found none for {', '.join(missing)}, expected one for each type")
    matrices = lay_out(registry, ranks, layout=layout, replica_size=replica_size)
    uniform = dict.fromkeys(steps, BASE_STEPS)
    results: list[Result] = []
    for ownership in OWNERSHIPS:
        for schedule, by_type in (("uniform", uniform), ("locked", steps)):
            costs = flops_by_matrix(registry, by_type)
            jobs = assign(matrices, costs, ownership=ownership, owners=owners)
            load = _load(jobs, costs, ranks)
            traffic = _traffic(matrices, jobs, ranks, ranks_per_node)
            results.append(Result(ranks, ownership, schedule, load, traffic))
    return results


def flops_by_matrix(registry: Sequence[MatrixInfo], steps: Mapping[str, int]) -> list[float]:
    """Newton-Schulz flops of each matrix, for so many steps of each operator type."""
    return [float(steps[info.operator_type] * ns_step_flops(*info.shape)) for info in registry]


def _load(jobs: Sequence[Job], costs: Sequence[float], ranks: int) -> Load:
    loads = load_by_rank(jobs, costs)
    return Load(mean=sum(loads.values()) / ranks, greatest=max(loads.values(), default=0.0))


def _traffic(
    matrices: Sequence[MatrixLayout], jobs: Sequence[Job], ranks: int, ranks_per_node: int
) -> Traffic:
    within, across = sent_by_rank(matrices, jobs, ranks, ranks_per_node)
    total, across = WIRE_BYTES * (within + across), WIRE_BYTES * across
    return Traffic(
        mean=int(total.sum()) / ranks,
        greatest=int(total.max()),
        mean_across=int(across.sum()) / ranks,
        greatest_across=int(across.max()),
    )


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
    source.add_argument("--model", choices=sorted(_STEPS_BY_MODEL), help="a model of the AMO paper")
    source.add_argument(
        "--shapes",
        type=Path,
        metavar="FILE",
        help="a JSON object with layers, dim, ffn_dim, heads, kv_heads and q_ratio",
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[32, 256, 1024], help="world sizes")
    parser.add_argument("--layout", choices=LAYOUTS, default="fsdp")
    parser.add_argument("--replica-size", type=int, default=8, help="ranks that hold one replica")
    parser.add_argument("--ranks-per-node", type=int, default=8)
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
        shape = next(shape for name, shape in MODELS.items() if name.lower() == args.model)
        steps = dict(zip(OPERATOR_TYPES, _STEPS_BY_MODEL[args.model], strict=True))
    else:
        shape, steps = _read_shape(args.shapes), dict.fromkeys(OPERATOR_TYPES, BASE_STEPS)
    steps |= read_steps("--steps", args.steps, OPERATOR_TYPES)
    options = {
        name: getattr(args, name) for name in ("layout", "owners", "replica_size", "ranks_per_node")
    }
    rows = [
        row for ranks in args.ranks for row in simulate(shape.matrices(), steps, ranks, **options)
    ]
    if args.layout == "fsdp":
        options["replica_size"] = None
    settings = {
        "model": args.model or str(args.shapes),
        "shape": dataclasses.asdict(shape),
        "steps": steps,
        **options,
        "wire_bytes": WIRE_BYTES,
    }
    if args.json:
        print(json.dumps({**settings, "rows": [dataclasses.asdict(row) for row in rows]}, indent=2))
    else:
        print(_table(settings, rows))
    return 0


def _read_shape(path: Path) -> DecoderShape:
    try:
        found = json.loads(path.read_text())
        return DecoderShape(**found)
    except OSError as error:
        raise ValueError(f"--shapes: found no readable {path} ({error.strerror})") from None
    except (json.JSONDecodeError, TypeError) as error:
        names = ", ".join(field.name for field in dataclasses.fields(DecoderShape))
        raise ValueError(
            f"--shapes: found {path} ({error}), expected a JSON object with {names}"
        ) from None


_COLUMNS: Sequence[tuple[str, Callable[[Result], str]]] = (
    ("ranks", lambda row: str(row.ranks)),
    ("ownership", lambda row: row.ownership),
    ("schedule", lambda row: row.schedule),
    ("GF mean", lambda row: f"{row.load.mean / 1e9:.1f}"),
    ("GF max", lambda row: f"{row.load.greatest / 1e9:.1f}"),
    ("max/mean", lambda row: f"{row.load.imbalance:.2f}"),
    ("MB mean", lambda row: f"{row.traffic.mean / 1e6:.1f}"),
    ("MB max", lambda row: f"{row.traffic.greatest / 1e6:.1f}"),
    ("within nodes", lambda row: f"{row.traffic.mean_within / 1e6:.1f}"),
    ("across, mean", lambda row: f"{row.traffic.mean_across / 1e6:.1f}"),
    ("across, max", lambda row: f"{row.traffic.greatest_across / 1e6:.1f}"),
)


def _table(settings: Mapping[str, Any], rows: Sequence[Result]) -> str:
    layout = settings["layout"]
    if layout == "hsdp":
        layout += f", replicas of {settings['replica_size']}"
    steps = ", ".join(f"{name} {count}" for name, count in settings["steps"].items())
    owners, node = settings["owners"], settings["ranks_per_node"]
    lines = [
        f"{settings['model']}, {layout}, owners: {owners}, nodes of {node}",
        f"locked steps: {steps} (uniform: {BASE_STEPS})",
        "a rank in one step: Newton-Schulz GFLOP, and MB sent in bf16",
        "",
    ]
    cells = [[title for title, _ in _COLUMNS]]
    cells += [[show(row) for _, show in _COLUMNS] for row in rows]
    return "\n".join([*lines, *map("  ".join, pad(cells))])
