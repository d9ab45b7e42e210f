"""Parameters in host memory, matrices on the device: the bits of all on the device."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from amo_dist import AMOConfig, Muon, MuonConfig, param_groups
from amo_dist.optimizers.named import make_optimizer
from tests.distributed import models
from tests.distributed import test_layouts_more as more
from tests.distributed import test_simulated_device as on_device
from tests.distributed.harness import Ranks
from tests.nccl import nccl
from tests.simulated_device import NCCL, SimulatedTensor, simulated_device

LR, STEPS = on_device.LR, on_device.STEPS
FIELDS = on_device.FIELDS | {"ns_guard_every": 8}
LOCKED = on_device.LOCKED + 1
"""From here on, but for the step that measures a residual, nothing is measured or dealt anew."""
BOTH = "cpu:gloo,cuda:nccl"


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
    if not is_offloaded:
        return on_device.build(layout)
    if layout in ("fsdp", "hsdp"):  # as users do it
        model = models.plain_model(on_device.shapes_of(layout), "cuda")
        if layout == "hsdp":
            mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard"))
        else:
            mesh = more.world_mesh("cuda")
        return models.shard(model, mesh, offload_policy=CPUOffloadPolicy())
    made = on_device.build(layout).named_parameters()
    return models.build({name: nn.Parameter(on_host(param)) for name, param in made})


@dataclasses.dataclass
class Run:
    """What a run leaves on a rank, on the CPU."""

    params: dict[str, Tensor]
    momenta: dict[str, Tensor]
    control: dict[str, Any]
    waits: list[Counter[str]]
    """Of each quiet step."""
    num_buckets: int
    """Buckets whose results come to this rank."""


def train(
    rank: int,
    world_size: int,
    layout: str,
    is_offloaded: bool,
    backends: str = NCCL,
    name: str = "AMO",
    fields: dict[str, Any] = FIELDS,
) -> Run:
    with simulated_device(backends) as device, nccl() as checks:
        model = build(layout, is_offloaded)
        config = (AMOConfig if name == "AMO" else MuonConfig)(**fields)
        groups = param_groups(model, allow_unused=True)
        optimizer = make_optimizer(name, groups, lr=LR, config=config)
        assert isinstance(optimizer, Muon)
        waits = []
        for step in range(1, STEPS + 1):
            for each, param in model.named_parameters():
                grad = models.place_like(more.gradient(step, each, tuple(param.shape)), param)
                param.grad = on_host(grad) if is_offloaded else grad
            device.clear()
            optimizer.step()
            if step > LOCKED:
                waits.append(Counter(device.waits))
            checks.check_waited()
        optimizer.check_last_update()
        named = dict(model.named_parameters())
        state = {each: optimizer.state[param] for each, param in named.items()}
        for values in state.values():
            for value in values.values():
                local = value.to_local() if isinstance(value, DTensor) else value
                assert isinstance(local, SimulatedTensor) != is_offloaded
        assert all((param.device.type == "cpu") == is_offloaded for param in named.values())
        return Run(
            {each: whole(param) for each, param in named.items()},
            {
                each: whole(values["momentum_buffer"])
                for each, values in state.items()
                if "momentum_buffer" in values
            },
            optimizer.control_state_dict(),
            waits,
            sum(
                bool(bucket.incoming)
                for exchange in optimizer._engine._exchanges
                for bucket in exchange.buckets
            ),
        )


def check(results: list[Run], expected: list[Run]) -> None:
    for found, there in zip(results, expected, strict=True):
        assert found.control == there.control
        assert found.momenta.keys() == there.momenta.keys() != set()
        for name, momentum in found.momenta.items():
            assert torch.equal(momentum, there.momenta[name]), name
            assert torch.equal(found.params[name], there.params[name]), name
        for name, param in found.params.items():
            # AdamW, on the device fused: a rounding of float32 a step.
            torch.testing.assert_close(param, there.params[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("layout", "world_size", "backends"),
    [
        pytest.param("fsdp", 1, NCCL, id="fsdp-1"),
        pytest.param("fsdp", 2, NCCL, id="fsdp-2"),
        pytest.param("fsdp", 3, BOTH, id="fsdp-3-gloo-too"),
        pytest.param("tp", 2, NCCL, id="tp-2"),
        pytest.param("hsdp", 4, NCCL, id="hsdp-2x2"),
    ],
)
def test_host_parameters_train_as_those_of_the_device(
    run_on: Ranks, layout: str, world_size: int, backends: str
) -> None:
    ranks = run_on(world_size)
    results, expected = (ranks(train, layout, there, backends) for there in (True, False))
    check(results, expected)


@pytest.mark.parametrize("name", ["NorMuon", "AdaMuon"])
def test_each_optimizer_takes_host_parameters(run_on: Ranks, name: str) -> None:
    fields = {key: FIELDS[key] for key in ("bucket_bytes", "ns_dtype")}
    ranks = run_on(2)
    results, expected = (ranks(train, "fsdp", there, NCCL, name, fields) for there in (True, False))
    check(results, expected)


@pytest.mark.parametrize("backends", [NCCL, BOTH])
def test_a_locked_step_waits_for_each_bucket_to_come_down(run_on: Ranks, backends: str) -> None:
    for run in run_on(2)(train, "fsdp", True, backends):
        for waits in run.waits:
            by_file = Counter[str]()
            for what, count in waits.items():
                by_file[what.partition(":")[0]] += count
            # The results of a bucket are downloaded; no upload waits. On NCCL the ballot uploads
            # whether gradients are good, and downloads the maximum of all ranks; on gloo it
            # downloads whether updates were finite.
            expected = Counter({"synchronize at distributed/bucket.py": run.num_buckets})
            expected["_to_copy at engine/ballot.py"] = 2 if backends == NCCL else 1
            assert by_file == expected
