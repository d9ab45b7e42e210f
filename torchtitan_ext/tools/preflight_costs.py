"""A model of what an optimizer step costs: load, traffic, memory, seconds.

Load and traffic are exact, by the same layout and ownership code that a run uses. Seconds come
from the figures of a :class:`Hardware`, assumed or measured by ``amo doctor``.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from amo_dist.config import MuonConfig
from amo_dist.distributed.layout import MatrixLayout
from amo_dist.distributed.ownership import Teams, assign, imbalance, load_by_rank
from amo_dist.distributed.plan import Bucket, Transfer, count_elements, plan_exchange
from amo_dist.distributed.relays import relay
from amo_dist.kernels.spectra import observation_flops
from amo_dist.schedule.schedule_file import read_toml
from amo_dist.schedule.types import MatrixInfo
from amo_dist.tools.command import read_json_file
from amo_dist.tools.ledger import reduced_by_rank, sent_by_rank
from amo_dist.tools.simulate import flops_by_matrix

HARDWARE_FILE = Path(__file__).with_name("hardware.toml")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Figures of one GPU, its node and the network; see ``hardware.toml`` for units."""

    memory_gb: float
    bf16_tflops: float
    ns_efficiency: float
    ns_half_dim: int
    hbm_tb_per_s: float
    hbm_efficiency: float
    nvlink_gb_per_s: float
    nvlink_efficiency: float
    network_gb_per_s: float
    network_efficiency: float
    collective_us: float
    observe_tflops: float
    training_mfu: float
    disk_gb_per_s: float

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            found = getattr(self, field.name)
            is_number = isinstance(found, (int, float)) and not isinstance(found, bool)
            if not is_number or not found > 0:
                raise ValueError(f"hardware: {field.name}: found {found!r}, expected a number > 0")

    def ns_flops_per_second(self, shape: tuple[int, int]) -> float:
        """Rate of a Newton-Schulz step on matrices of one shape."""
        short = min(shape)
        share = short / (short + self.ns_half_dim)
        return self.bf16_tflops * 1e12 * self.ns_efficiency * share

    @property
    def hbm_bytes_per_second(self) -> float:
        """Rate of elementwise kernels."""
        return self.hbm_tb_per_s * 1e12 * self.hbm_efficiency

    @property
    def network_bytes_per_second(self) -> float:
        """Rate at which a rank sends to other nodes."""
        return self.network_gb_per_s * 1e9 * self.network_efficiency


def read_hardware(path: Path, name: str) -> tuple[Hardware, list[str]]:
    """One table of a hardware file; or the project's, with what ``amo doctor --json`` measured.

    Returns:
        The figures, and the names of those that were measured.

    Raises:
        ValueError: If the file is no TOML (or, named ``.json``, not the doctor's), lacks the table,
            or a figure is missing or not > 0.
    """
    measured: dict[str, Any] = {}
    known = {field.name for field in dataclasses.fields(Hardware)}
    if path.suffix == ".json":
        # The doctor measures what nothing here is computed from, too.
        measured = {key: value for key, value in _read_doctor(path).items() if key in known}
        path = HARDWARE_FILE
    tables = read_toml("--hardware", path)
    if name not in tables:
        raise ValueError(f"--gpu: found {name!r}, expected one of {', '.join(tables)}")
    tables[name] |= measured
    for what, names in (
        ("missing", known - set(tables[name])),
        ("unknown", set(tables[name]) - known),
    ):
        if names:
            raise ValueError(f"hardware: {path}, [{name}]: {what} {', '.join(sorted(names))}")
    return Hardware(**tables[name]), sorted(measured)


def _read_doctor(path: Path) -> dict[str, Any]:
    try:
        return dict(read_json_file(path)["hardware"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--hardware: found {path} ({error!r}), expected the JSON of `amo doctor --json`"
        ) from None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What stays the same over the run.

    Attributes:
        registry: Every matrix.
        matrices: Their layouts, in the same order.
        num_ranks: Ranks that the layouts speak of.
        ranks_per_node: Consecutive ranks of one node.
        config: Of the optimizer.
        elementwise_bytes: What momentum, update and AdamW read and write on the fullest rank.
    """

    registry: Sequence[MatrixInfo]
    matrices: Sequence[MatrixLayout]
    num_ranks: int
    ranks_per_node: int
    config: MuonConfig
    elementwise_bytes: float

    @property
    def wire_bytes(self) -> int:
        """Size of an element on the wire."""
        return int(getattr(torch, self.config.ns_dtype).itemsize)


PARTS = ("orthogonalize", "exchange", "elementwise")
"""Of a step; no part is taken to hide behind another."""


class Step:
    """One optimizer step under a schedule, dealt to ranks as the optimizer does.

    Args:
        world: The matrices and where they lie.
        steps: Newton-Schulz steps of each operator type.
    """

    def __init__(self, world: World, steps: Mapping[str, int]) -> None:
        self.world, self.steps = world, steps
        self.flops = flops_by_matrix(world.registry, steps)
        config = world.config
        jobs = assign(
            world.matrices,
            self.flops,
            ownership=config.ownership,
            owners=config.owners,
            teams=Teams(config.max_team, world.wire_bytes),
        )
        nodes = {rank: rank // world.ranks_per_node for rank in range(world.num_ranks)}
        self.jobs = relay(world.matrices, jobs, nodes)
        self.loads = load_by_rank(self.jobs, self.flops)

    def cost(self, hardware: Hardware) -> dict[str, Any]:
        """What the step takes without an observation.

        Returns:
            ``num_owners``: ranks that own a matrix. Of a rank, the least, the mean and the most:
            ``gflop`` of Newton-Schulz in 1e9 flops, and bytes that it sends, ``sent_within`` its
            node and ``sent_across`` nodes. Of the slowest rank ``orthogonalize_seconds``,
            ``exchange_seconds`` and ``elementwise_seconds`` (momentum, update and AdamW).
        """
        world = self.world
        seconds = [
            flops / hardware.ns_flops_per_second(info.shape)
            for flops, info in zip(self.flops, world.registry, strict=True)
        ]
        orthogonalize = load_by_rank(self.jobs, seconds)
        sizes = world.num_ranks, world.ranks_per_node
        num_steps = [self.steps[info.operator_type] for info in world.registry]
        sent = sent_by_rank(world.matrices, self.jobs, *sizes)
        reduced = reduced_by_rank(world.matrices, self.jobs, num_steps, *sizes)
        within, across = (
            [float(world.wire_bytes * each) for each in (one + other).tolist()]
            for one, other in zip(sent, reduced, strict=True)
        )
        wires = [
            near / (hardware.nvlink_gb_per_s * 1e9 * hardware.nvlink_efficiency)
            + far / hardware.network_bytes_per_second
            for near, far in zip(within, across, strict=True)
        ]
        latency = self._num_collectives() * hardware.collective_us * 1e-6
        return {
            "num_owners": len(self.loads),
            "gflop": _spread([self.loads.get(rank, 0.0) / 1e9 for rank in range(world.num_ranks)]),
            "sent_within": _spread(within),
            "sent_across": _spread(across),
            "orthogonalize_seconds": max(orthogonalize.values(), default=0.0),
            "exchange_seconds": max(wires) + latency,
            "elementwise_seconds": world.elementwise_bytes / hardware.hbm_bytes_per_second,
        }

    def imbalance(self) -> float:
        """Greatest load of a rank over the mean of all."""
        return imbalance(self.jobs, self.flops, self.world.num_ranks)

    def _num_collectives(self) -> int:
        """Of one rank in a step, one after the other."""
        if self.world.num_ranks == 1:
            return 0
        count, registry = 1, self.world.registry  # the agreement of the ranks
        for bucket in self._buckets():
            batches = {
                (registry[index].shape, registry[index].operator_type, task.team)
                for task in bucket.tasks
                for index in task.owned
            }
            # One each way, what relays forward, and of a team: a Gram matrix a step, the greatest
            # entry, the norm, and what is not finite.
            count += 2 + (bucket.forward is not None)
            count += sum(self.steps[kind] + 3 for _, kind, team in batches if team)
        return count

    def _buckets(self) -> tuple[Bucket, ...]:
        """Buckets of the rank with the most work; those of one rank need no exchange."""
        world = self.world
        plan = plan_exchange(
            world.matrices,
            self.jobs,
            rank=min(self.loads, key=lambda rank: (-self.loads[rank], rank), default=0),
            peers=range(world.num_ranks),
            bytes_by_matrix=[matrix.num_elements * world.wire_bytes for matrix in world.matrices],
            bucket_bytes=world.config.bucket_bytes,
        )
        return plan.buckets or plan.local

    def exchange_memory(self) -> int:
        """Bytes that the busiest rank holds for the exchange at its worst moment.

        Gathers in flight (sent and received), the bucket at hand whole, stacked, and in two
        iterates with two Gram matrices, its delivery and the one before, which relays forward.
        """
        gathers, wholes, deliveries, forwards = [], [], [], [0]
        for bucket in self._buckets():
            gathers.append(_both_ways(bucket.gather))
            deliveries.append(_both_ways(bucket.deliver))
            forwards.append(_both_ways(bucket.forward) if bucket.forward else 0)
            shapes = [shape for task in bucket.tasks for shape in task.shapes]
            batches = Counter(shapes)
            iterates = max((3 * n * math.prod(s) for s, n in batches.items()), default=0)
            grams = max((2 * n * min(s) ** 2 for s, n in batches.items()), default=0)
            wholes.append(2 * sum(map(math.prod, shapes)) + iterates + grams)
        ahead = 1 + self.world.config.buckets_in_flight
        moments = (
            sum(gathers[index : index + ahead]) + sum(at_hand)
            for index, at_hand in enumerate(
                zip(wholes, deliveries, [0, *deliveries], forwards, strict=False)
            )
        )
        return max(moments, default=0) * self.world.wire_bytes

    def observation_seconds(self, samples: Sequence[Sequence[str]], hardware: Hardware) -> float:
        """Time that the slowest observation adds to its step.

        Args:
            samples: Names of the matrices drawn at each observation; at least one.
            hardware: Stated figures.
        """
        world = self.world
        owners = {world.registry[job.matrix].name: job.owner for job in self.jobs if job.reports}
        shapes = {info.name: info.shape for info in world.registry}
        # Wide buckets carry the momentum in float32 instead of the wire's dtype.
        wide = getattr(torch, world.config.momentum_dtype).itemsize if world.num_ranks > 1 else 0
        slowest = 0.0
        for names in samples:
            seconds: dict[int, float] = defaultdict(float)
            for name in names:
                gather = wide * math.prod(shapes[name]) / hardware.network_bytes_per_second
                observe = observation_flops(*shapes[name]) / (hardware.observe_tflops * 1e12)
                seconds[owners[name]] += observe + gather
            slowest = max(slowest, *seconds.values())
        return slowest + hardware.collective_us * 1e-6


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"least": min(values), "mean": math.fsum(values) / len(values), "most": max(values)}


def _both_ways(transfer: Transfer) -> int:
    return sum(count_elements(parts) for parts in (*transfer.send, *transfer.receive))
