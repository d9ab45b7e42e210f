"""Sizes that runs have and other tests have not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from amo_dist import Muon, param_groups
from amo_dist.distributed.layout import Matrix, make_matrix, mesh_layout
from amo_dist.distributed.plan import assign, count_elements, load_by_rank, plan_exchange
from tests import runs
from torchtitan_ext.cli import main

LONG = "x" * 180
"""Part of a name of 200 characters."""
LLAMA_70B = {
    "wq": (8192, 8192),
    "wk": (1024, 8192),
    "wv": (1024, 8192),
    "wo": (8192, 8192),
    "w1": (28672, 8192),
    "w2": (8192, 28672),
    "w3": (28672, 8192),
}
NUM_LAYERS, NUM_RANKS, BUCKET_BYTES = 80, 64, 2**28


def make_wide() -> tuple[nn.Module, Muon]:
    """2,000 matrices of long names in 40 groups."""
    torch.manual_seed(0)
    model = nn.Module()
    for number in range(2000):
        model.register_parameter(f"{LONG}_{number:04}", nn.Parameter(torch.randn(3, 2)))
    rates = {rf".*_{number:02}\d\d": 1.0 + number for number in range(20)}
    spared = [r".*[02468]"]
    groups = param_groups(model, patterns={".*": "mlp_up"}, lr_multipliers=rates, no_decay=spared)
    assert len(groups) == 40
    return model, Muon(groups, lr=1e-3)


def test_thousands_of_parameters_in_many_groups_resume() -> None:
    model, optimizer = make_wide()

    def step(model: nn.Module, optimizer: Muon) -> None:
        for number, param in enumerate(model.parameters()):
            param.grad = torch.full((3, 2), 1.0 + number)
        optimizer.step()

    step(model, optimizer)
    twin, other = runs.resume(model, optimizer, make_wide)
    step(model, optimizer)
    step(twin, other)
    assert runs.same(model, twin)


def matrices_of_70b() -> tuple[Matrix, ...]:
    mesh = torch.arange(NUM_RANKS)
    tensors = [
        (f"layers.{layer}.{name}", mesh_layout(shape, mesh, (Shard(0),)))
        for layer in range(NUM_LAYERS)
        for name, shape in LLAMA_70B.items()
    ]
    return tuple(
        make_matrix(name, tensor, number, None, 0) for number, (name, tensor) in enumerate(tensors)
    )


def test_plans_of_64_ranks_for_a_70b_model() -> None:
    matrices = matrices_of_70b()
    costs = [float(matrix.num_elements) for matrix in matrices]
    jobs = assign(matrices, costs, ownership="balanced")
    loads = load_by_rank({job.matrix: job.owner for job in jobs}, costs)
    mean = sum(costs) / NUM_RANKS
    assert max(loads.values()) <= mean + max(costs)  # one matrix more than the mean, at most
    plans = [
        plan_exchange(
            matrices,
            jobs,
            rank=rank,
            peers=list(range(NUM_RANKS)),
            itemsize=2,
            bucket_bytes=BUCKET_BYTES,
        )
        for rank in (0, 1, NUM_RANKS - 1)
    ]
    for plan in plans:
        assert len(plan.buckets) > 1
        received = [sum(map(count_elements, bucket.from_holders)) for bucket in plan.buckets]
        # An owner's buffer: a bucket over all ranks, or the one matrix that is larger.
        most = max(BUCKET_BYTES // 2, max(matrix.num_elements for matrix in matrices))
        assert max(received) <= most
        sent = sum(count_elements(held) for bucket in plan.buckets for held in bucket.to_owners)
        assert sent <= mean


@pytest.mark.parametrize("steps", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_control_state_does_not_grow(steps: int) -> None:
    model, optimizer = runs.make(shapes={runs.WQ: (2, 2)}, ns_guard_every=10)
    runs.train(model, optimizer, 1, 20)
    early = len(json.dumps(optimizer.control_state_dict()))
    for _ in range(20, steps):
        optimizer.step()
    assert len(json.dumps(optimizer.control_state_dict())) <= early + 50  # longer numbers alone


@pytest.mark.slow
def test_a_run_log_of_100_megabytes_is_read(tmp_path: Path) -> None:
    record = {"training_steps": 200_000, "loss": 2.5, "phase": "locked", "lock_step": 14}
    record |= {"num_steps_by_type": {"attn_q": 5}, "seconds_per_step": 1.0, "lr": 1e-3}
    record |= {"tokens_per_second": 1e5, "grad_norm": 1.0, "note": "x" * 400}
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(1, 170_000):
            print(json.dumps({"step": step, **record}), file=file)
    assert (tmp_path / "metrics.jsonl").stat().st_size > 10**8
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "report.html")]) == 0
