"""Layouts on the simulated device, under what NCCL refuses; no locked step waits.

Parameters in host memory, matrices on the device: the bits of all on the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from amo_dist import AMOConfig, Muon, MuonConfig, param_groups
from amo_dist.distributed.layout import local_tensor
from amo_dist.optimizers.named import make_optimizer
from tests import runs
from tests.distributed import models
from tests.distributed import test_layouts_more as more
from tests.distributed.harness import Ranks
from tests.distributed.twin import LR, Shapes, Twin, by_matrix, gradient
from tests.nccl import NcclError, nccl
from tests.simulated_device import NCCL, SimulatedTensor, simulated_device

STEPS = 11
OF_MUON = {"bucket_bytes": 256, "ns_dtype": "float32"}
FIELDS = runs.PHASES | OF_MUON | {"ns_guard_every": 8}
LOCKED = 8
"""From here on nothing is dealt anew or measured."""
BOTH = "cpu:gloo,cuda:nccl"


def config_of(name: str) -> MuonConfig:
    return AMOConfig(**FIELDS) if name == "AMO" else MuonConfig(**OF_MUON)


def shapes_of(layout: str) -> Shapes:
    if layout.startswith("build_"):
        return {"build_experts_0": more.EXPERTS}.get(layout, more.STAGES[0] | more.STAGES[1])
    is_even = layout in ("tp_fsdp", "hsdp_tp")  # torch pads nothing under tensor parallelism
    shapes = models.shapes(models.EVEN_SHAPES if is_even else models.SHAPES)
    # One layer: an operation on the simulated device takes long.
    return {
        name: shape
        for name, shape in shapes.items()
        if not name.startswith(("layers.1", "layers.2"))
    }


def on_host(tensor: Tensor) -> DTensor:
    """A DTensor of the same mesh whose local tensor lies in host memory, as FSDP2 makes them."""
    assert isinstance(tensor, DTensor)
    return DTensor(tensor.to_local().detach().cpu(), tensor._spec, requires_grad=False)


def whole(param: Tensor) -> Tensor:
    if isinstance(param, DTensor):
        # `from_local` takes what lies on the host to the mesh's device.
        sizes = {"shape": param.shape, "stride": param.stride()}
        param = DTensor.from_local(
            param.to_local(), param.device_mesh, param.placements, run_check=False, **sizes
        )
    return models.whole(param).cpu()


def build(layout: str, is_offloaded: bool) -> nn.Module:
    """A layout of `models`, or a builder of `more`."""
    if is_offloaded and layout in ("fsdp", "hsdp"):  # as users do it
        model = models.plain_model(shapes_of(layout), "cuda")
        if layout == "hsdp":
            mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard"))
        else:
            mesh = models.world_mesh("cuda")
        return models.shard(model, mesh, offload_policy=CPUOffloadPolicy())
    if layout.startswith("build_"):
        model = getattr(more, layout)("cuda")
    else:
        model = models.make_model(layout, shapes_of(layout), "cuda")
    if not is_offloaded:
        return model
    return models.build({name: nn.Parameter(on_host(p)) for name, p in model.named_parameters()})


class Run(NamedTuple):
    """What a run leaves on a rank, on the CPU.

    Attributes:
        params: Whole parameters.
        momenta: Whole momenta.
        waits: Waits of each quiet step.
        num_buckets: Buckets of the last step; the results of some may all go to other ranks.
    """

    params: dict[str, Tensor]
    momenta: dict[str, Tensor]
    waits: list[Counter[str]]
    num_buckets: int


def train(
    rank: int,
    world_size: int,
    layout: str,
    is_offloaded: bool = False,
    backends: str = NCCL,
    name: str = "AMO",
) -> Run:
    with simulated_device(backends) as device, nccl() as checks:
        model = build(layout, is_offloaded)
        group = dist.group.WORLD if layout == "plain" and world_size > 1 else None
        groups, config = param_groups(model, allow_unused=True), config_of(name)
        optimizer = make_optimizer(name, groups, lr=LR, config=config, process_group=group)
        assert isinstance(optimizer, Muon)
        waits = []
        for step in range(1, STEPS + 1):
            for each, param in model.named_parameters():
                grad = models.place_like(gradient(step, each, tuple(param.shape)), param)
                param.grad = on_host(grad) if is_offloaded else grad
            for own in optimizer.param_groups:
                own["lr"] = LR * step / STEPS  # a rate that changes costs no wait
            device.clear()
            checks.calls["all_to_all_single"] = 0
            optimizer.step()
            if step > LOCKED:
                waits.append(Counter(device.waits))
            checks.check_waited()
            state = [value for own in optimizer.state.values() for value in own.values()]
            params = [*model.parameters()]
            kept = [local_tensor(x) for x in (*params, *(p.grad for p in params), *state)]
            # Flags and norms of the step; the smallest bucket takes 256 bytes in each direction.
            if not is_offloaded:
                assert device.held_bytes(without=kept) < 512, step
        optimizer.check_last_update()
        # One ballot a step, and one sum an observation or residual.
        assert checks.calls["all_reduce"] <= 2 * STEPS or name != "AMO"
        assert all(isinstance(x, SimulatedTensor) != is_offloaded for x in map(local_tensor, state))
        named = dict(model.named_parameters())
        assert all((param.device.type == "cpu") == is_offloaded for param in named.values())
        states = {each: optimizer.state[param] for each, param in named.items()}
        buffers = {each: own.get("momentum_buffer") for each, own in states.items()}
        return Run(
            {each: whole(param) for each, param in named.items()},
            {each: whole(buffer) for each, buffer in buffers.items() if buffer is not None},
            waits,
            checks.calls["all_to_all_single"] // 2,
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout", "num_ranks"),
    [
        *(("AMO", "plain", 4), ("AMO", "fsdp", 3), ("AMO", "hsdp_tp", 4), ("AMO", "hsdp", 4)),
        *(("AMO", "build_experts_0", 2), ("AMO", "build_sharded_stage", 4)),
        *((name, "fsdp", 1) for name in ("Muon", "NorMuon", "AdaMuon")),
    ],
)
def test_every_layout_trains_on_devices(
    run_on: Ranks, name: str, layout: str, num_ranks: int
) -> None:
    twin = Twin(shapes_of(layout), config_of(name), name)
    oracle = twin.oracle
    for step in range(1, STEPS + 1):
        assert oracle.adamw is not None
        oracle.lr = oracle.adamw.param_groups[0]["lr"] = LR * step / STEPS
        twin.step(step)
    seen = set()
    for run in run_on(num_ranks)(train, layout, False, NCCL, name):
        assert run.waits == [{}] * (STEPS - LOCKED)
        for each, param in run.params.items():
            for key, matrix in by_matrix(each, param).items():
                # float32 products in another order, and AdamW fused; an update is 1e-4 at least.
                torch.testing.assert_close(matrix, oracle.params[key], rtol=1e-4, atol=2e-5)
                seen.add(key)
    assert seen == set(oracle.params)


@pytest.mark.parametrize(
    ("name", "layout", "world_size", "backends"),
    [
        *(("AMO", "fsdp", 1, NCCL), ("AMO", "fsdp", 2, NCCL), ("AMO", "fsdp", 3, BOTH)),
        *(("AMO", "tp", 2, NCCL), ("AMO", "hsdp", 4, NCCL)),
        *(("NorMuon", "fsdp", 2, NCCL), ("AdaMuon", "fsdp", 2, NCCL)),
    ],
)
def test_host_parameters_train_as_those_of_the_device(
    run_on: Ranks, name: str, layout: str, world_size: int, backends: str
) -> None:
    ranks = run_on(world_size)
    runs_by_place = (ranks(train, layout, place, backends, name) for place in (True, False))
    for run, expected in zip(*runs_by_place, strict=True):
        assert expected.waits == [{}] * (STEPS - LOCKED)
        assert run.momenta
        for own, others in ((run.momenta, expected.momenta), (run.params, expected.params)):
            assert own.keys() == others.keys()
            for each, value in own.items():
                # Fused on the device, and not on the host: some roundings of float32 a step.
                torch.testing.assert_close(value, others[each], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backends", [NCCL, BOTH])
def test_a_locked_step_waits_for_each_bucket_to_come_down(run_on: Ranks, backends: str) -> None:
    for run in run_on(2)(train, "fsdp", True, backends):
        # Results of a bucket, and of what a rank holds alone, are downloaded; no upload waits. On
        # NCCL the ballot uploads whether gradients are good, and downloads the maximum of all
        # ranks; on gloo it downloads whether updates were finite.
        most = run.num_buckets + 1 + (2 if backends == NCCL else 1)
        assert all(0 < waits.total() <= most for waits in run.waits), run.waits


# ---------------------------------------------------------------- NCCL


Misuse = Callable[[Tensor, int], object]


def in_another_thread(x: Tensor) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(dist.all_reduce, x).result()


def during(name: str, use: Callable[[Tensor], object]) -> Misuse:
    """Use what a collective receives while it is under way."""

    def misuse(x: Tensor, rank: int) -> None:
        received, sent = x.clone(), [] if name == "all_reduce" else [x]
        work = getattr(dist, name)(received, *sent, async_op=True)
        try:
            use(received)
        finally:
            work.wait()

    return misuse


MISUSES: list[tuple[Misuse, str]] = [
    (lambda x, rank: dist.all_reduce(x[: 2 + rank]), "ranks differ"),
    (lambda x, rank: dist.all_reduce(x) if rank else dist.broadcast(x, 0), "ranks differ"),
    (lambda x, rank: dist.all_reduce(x.repeat(4, 1)[:, 0]), "not contiguous"),
    (lambda x, rank: dist.all_gather_object([None, None], "text"), "not on devices"),
    (lambda x, rank: in_another_thread(x), "two threads"),
    (lambda x, rank: dist.all_reduce(x, async_op=True), "not waited for"),
    (lambda x, rank: dist.all_reduce(torch.ones(2)), "No backend type associated with device type"),
    (during("all_reduce", lambda x: dist.all_reduce(x[1:])), "another collective uses"),
    (
        during("all_reduce", lambda x: x[2:].mul_(2)),
        "mul_.Tensor: memory that all_reduce may",
    ),
    (
        during("all_to_all_single", lambda x: x.sum()),
        "sum.default: memory that all_to_all_sing",
    ),
]


def refused(rank: int, world_size: int) -> list[str]:
    """The error of each misuse."""
    errors = []
    for misuse, _ in MISUSES:
        with pytest.raises((NcclError, RuntimeError)) as raised, simulated_device(), nccl():
            misuse(torch.zeros(4, device="cuda"), rank)
        errors.append(str(raised.value))
    return errors


def test_what_nccl_refuses_is_refused(run_on: Ranks) -> None:
    for errors in run_on(2)(refused):
        for error, (_, part) in zip(errors, MISUSES, strict=True):
            assert part in error
