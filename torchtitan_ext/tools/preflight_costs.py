"""A model of what an optimizer step costs: load, traffic, memory, seconds.

Load and traffic are exact, by the same layout and ownership code that a run uses. Seconds come
from the figures of a :class:`Hardware`, assumed or measured by ``amo doctor``.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from amo_dist.config import MuonConfig
from amo_dist.distributed.layout import MatrixLayout
from amo_dist.distributed.ownership import Job, Teams, assign, imbalance, load_by_rank
from amo_dist.distributed.plan import Bucket, Transfer, count_elements, plan_exchange
from amo_dist.distributed.relays import relay
from amo_dist.kernels.sigma_min import SMALL
from amo_dist.kernels.spectra import ell_and_spectrum
from amo_dist.schedule.schedule_file import read_toml
from amo_dist.schedule.types import MatrixInfo
from amo_dist.tools.command import read_json_file
from amo_dist.tools.ledger import reduced_by_rank, sent_by_rank
from amo_dist.tools.simulate import OWNERSHIPS, flops_by_matrix

HARDWARE_FILE = Path(__file__).with_name("hardware.toml")

SVD, EIGENVALUES = "float64 SVD", "float64 eigenvalues of the Gram matrix"


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
    fp64_tflops: float
    fp64_qr_efficiency: float
    fp64_svd_efficiency: float
    triangular_solve_us_per_row: float
    lanczos_steps: int
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

    def observe_seconds(self, shape: tuple[int, int], method: str) -> float:
        """Time to find the singular values of one matrix.

        By eigenvalues: of the Gram matrix, and then the smallest by factors, as on a very
        ill-conditioned matrix: LU or Cholesky with a Lanczos process that fails, and QR with one
        that does not. Most matrices need only the eigenvalues.
        """
        short, long = min(shape), max(shape)
        if method == SVD or short <= SMALL:
            flops = 60.0 * long * short * short
            return flops / (self.fp64_tflops * 1e12 * self.fp64_svd_efficiency)
        # Each column of the reduction reads what is left of the matrix, 8 bytes an element.
        read = 8 / 3 * short**3 / (self.hbm_tb_per_s * 1e12 * self.hbm_efficiency)
        # Products, LU and Cholesky run at no less than the rate of QR.
        gram = 1.0 * short * short * long
        quick = short * short * (2 / 3 * short if short == long else long + short / 3)
        qr = 2.0 * short * short * (long - short / 3)
        solves = 2 * short * self.triangular_solve_us_per_row
        lanczos = 2 * self.lanczos_steps * solves * 1e-6
        rate = self.fp64_tflops * 1e12 * self.fp64_qr_efficiency
        return (gram + quick + qr) / rate + read + lanczos


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


class _Recorder(TorchDispatchMode):
    """Names of the operators that are called within."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.called: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append(str(func))
        return func(*args, **(kwargs or {}))


def observation_method() -> str:
    """How the kernels find singular values: what they call for a matrix."""
    with _Recorder() as recorder:
        ell_and_spectrum(torch.eye(SMALL + 2, SMALL + 9))
    return SVD if any("svd" in name for name in recorder.called) else EIGENVALUES


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """A quantity of the ranks."""

    least: float
    mean: float
    most: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """The spread of the values of all ranks."""
        return Spread(min(values), math.fsum(values) / len(values), max(values))


@dataclasses.dataclass(frozen=True, slots=True)
class StepCost:
    """One optimizer step, on a world of ranks.

    Attributes:
        num_owners: Ranks that own a matrix.
        gflop: Newton-Schulz work of a rank, in 1e9 flops.
        sent_within: Bytes that a rank sends to ranks of its node.
        sent_across: Bytes that a rank sends to other nodes.
        orthogonalize_seconds: Of the slowest rank.
        exchange_seconds: Of the slowest rank, with the latency of each collective.
        elementwise_seconds: Momentum, update and AdamW.
    """

    num_owners: int
    gflop: Spread
    sent_within: Spread
    sent_across: Spread
    orthogonalize_seconds: float
    exchange_seconds: float
    elementwise_seconds: float

    @property
    def seconds(self) -> float:
        """The sum: no part is taken to hide behind another."""
        return self.orthogonalize_seconds + self.exchange_seconds + self.elementwise_seconds


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


def deal(world: World, steps: Mapping[str, int]) -> tuple[Job, ...]:
    """Owners and relays under a schedule, as the optimizer finds them."""
    costs = flops_by_matrix(world.registry, steps)
    config = world.config
    jobs = assign(
        world.matrices,
        costs,
        ownership=config.ownership,
        owners=config.owners,
        teams=Teams(config.max_team, world.wire_bytes),
    )
    nodes = {rank: rank // world.ranks_per_node for rank in range(world.num_ranks)}
    return relay(world.matrices, jobs, nodes)


def step_cost(world: World, steps: Mapping[str, int], hardware: Hardware) -> StepCost:
    """Cost of one step without observation.

    Args:
        world: The matrices and where they lie.
        steps: Newton-Schulz steps of each operator type.
        hardware: Stated figures.
    """
    costs = flops_by_matrix(world.registry, steps)
    jobs = deal(world, steps)
    loads = load_by_rank(jobs, costs)
    seconds = [
        flops / hardware.ns_flops_per_second(info.shape)
        for flops, info in zip(costs, world.registry, strict=True)
    ]
    orthogonalize = load_by_rank(jobs, seconds)
    sizes = world.num_ranks, world.ranks_per_node
    num_steps = [steps[info.operator_type] for info in world.registry]
    sent = sent_by_rank(world.matrices, jobs, *sizes)
    reduced = reduced_by_rank(world.matrices, jobs, num_steps, *sizes)
    within, across = (
        [float(world.wire_bytes * each) for each in (one + other).tolist()]
        for one, other in zip(sent, reduced, strict=True)
    )
    wires = [
        near / (hardware.nvlink_gb_per_s * 1e9 * hardware.nvlink_efficiency)
        + far / (hardware.network_gb_per_s * 1e9 * hardware.network_efficiency)
        for near, far in zip(within, across, strict=True)
    ]
    collectives = _num_collectives(world, steps)
    return StepCost(
        num_owners=len(loads),
        gflop=Spread.of([loads.get(rank, 0.0) / 1e9 for rank in range(world.num_ranks)]),
        sent_within=Spread.of(within),
        sent_across=Spread.of(across),
        orthogonalize_seconds=max(orthogonalize.values(), default=0.0),
        exchange_seconds=max(wires) + collectives * hardware.collective_us * 1e-6,
        elementwise_seconds=world.elementwise_bytes
        / (hardware.hbm_tb_per_s * 1e12 * hardware.hbm_efficiency),
    )


def imbalance_by_ownership(world: World, steps: Mapping[str, int]) -> dict[str, float]:
    """Greatest load of a rank over the mean of all, for each way of dealing matrices."""
    costs = flops_by_matrix(world.registry, steps)
    found: dict[str, float] = {}
    for ownership in OWNERSHIPS:
        config = dataclasses.replace(world.config, ownership=ownership)
        jobs = deal(dataclasses.replace(world, config=config), steps)
        found[ownership] = imbalance(jobs, costs, world.num_ranks)
    return found


def _num_collectives(world: World, steps: Mapping[str, int]) -> int:
    """Of one rank in a step, one after the other."""
    if world.num_ranks == 1:
        return 0
    count = 1  # the agreement of the ranks
    for bucket in _buckets(world, steps):
        batches = {
            (world.registry[index].shape, world.registry[index].operator_type, task.team)
            for task in bucket.tasks
            for index in task.owned
        }
        # One each way, what relays forward, and of a team: a Gram matrix a step, the greatest
        # entry, the norm, and what is not finite.
        count += 2 + (bucket.forward is not None)
        count += sum(steps[operator_type] + 3 for _, operator_type, team in batches if team)
    return count


def busiest_rank(world: World, steps: Mapping[str, int]) -> int:
    """The rank with the most Newton-Schulz work."""
    loads = load_by_rank(deal(world, steps), flops_by_matrix(world.registry, steps))
    return min(loads, key=lambda rank: (-loads[rank], rank), default=0)


def _buckets(world: World, steps: Mapping[str, int]) -> tuple[Bucket, ...]:
    """Buckets of the busiest rank; those of one rank need no exchange."""
    wire = world.wire_bytes
    plan = plan_exchange(
        world.matrices,
        deal(world, steps),
        rank=busiest_rank(world, steps),
        peers=range(world.num_ranks),
        bytes_by_matrix=[matrix.num_elements * wire for matrix in world.matrices],
        bucket_bytes=world.config.bucket_bytes,
    )
    return plan.buckets or plan.local


def exchange_memory(world: World, steps: Mapping[str, int]) -> int:
    """Bytes that the busiest rank holds for the exchange at its worst moment.

    Gathers in flight (sent and received), the bucket at hand whole, stacked, and in two iterates
    with two Gram matrices, its delivery and the one before, which relays forward.
    """
    wire, ahead = world.wire_bytes, world.config.buckets_in_flight
    gathers, wholes, deliveries, forwards = [], [], [], []
    for bucket in _buckets(world, steps):
        gathers.append(_both_ways(bucket.gather))
        deliveries.append(_both_ways(bucket.deliver))
        forwards.append(_both_ways(bucket.forward) if bucket.forward else 0)
        shapes = [shape for task in bucket.tasks for shape in task.shapes]
        batches = Counter(shapes)
        iterates = max((3 * n * math.prod(s) for s, n in batches.items()), default=0)
        grams = max((2 * n * min(s) ** 2 for s, n in batches.items()), default=0)
        wholes.append(2 * sum(map(math.prod, shapes)) + iterates + grams)
    peak = 0
    for index, whole in enumerate(wholes):
        landing = deliveries[index] + (deliveries[index - 1] + forwards[index - 1] if index else 0)
        peak = max(peak, sum(gathers[index : index + 1 + ahead]) + whole + landing)
    return peak * wire


def _both_ways(transfer: Transfer) -> int:
    return sum(count_elements(parts) for parts in (*transfer.send, *transfer.receive))


def observation_seconds(
    world: World,
    steps: Mapping[str, int],
    samples: Sequence[Sequence[str]],
    hardware: Hardware,
    method: str,
) -> float:
    """Time that the slowest observation adds to its step.

    Args:
        world: The matrices and where they lie.
        steps: Newton-Schulz steps of each operator type meanwhile.
        samples: Names of the matrices drawn at each observation.
        hardware: Stated figures.
        method: From :func:`observation_method`.
    """
    if not samples:
        return 0.0
    jobs = [job for job in deal(world, steps) if job.reports]
    owner_by_name = {world.registry[job.matrix].name: job.owner for job in jobs}
    shape_by_name = {info.name: info.shape for info in world.registry}
    # Wide buckets carry the momentum in float32 instead of the wire's dtype.
    wide = getattr(torch, world.config.momentum_dtype).itemsize
    rate = hardware.network_gb_per_s * 1e9 * hardware.network_efficiency
    slowest = 0.0
    for names in samples:
        seconds: Counter[int] = Counter()
        for name in names:
            shape = shape_by_name[name]
            gather = wide * math.prod(shape) / rate if world.num_ranks > 1 else 0.0
            seconds[owner_by_name[name]] += hardware.observe_seconds(shape, method) + gather  # type: ignore[assignment]
        slowest = max(slowest, *seconds.values())
    return slowest + hardware.collective_us * 1e-6
