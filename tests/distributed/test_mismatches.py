"""Ranks that differ before a step: every rank raises, and names what differs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from amo_dist import AMO, ROOT, AMOConfig, Muon, MuonConfig, param_groups
from tests import runs
from tests.distributed import models
from tests.distributed.harness import Ranks
from tests.distributed.test_ranks import raised

WQ, WK = "layers.0.attention.wq.weight", "layers.0.attention.wk.weight"


def tensors_of(fault: str) -> dict[str, Tensor]:
    tensors = {name: models.initial(name, shape) for name, shape in models.shapes().items()}
    if fault == "name":
        tensors["layers.9.attention.wk.weight"] = tensors.pop(WK)
    elif fault == "missing":
        del tensors[WK]
    elif fault == "order":
        tensors[WQ] = tensors.pop(WQ)
    elif fault == "dtype":
        tensors[WK] = tensors[WK].to(torch.bfloat16)
    elif fault == "shape":
        tensors[WK] = tensors[WK].repeat(2, 1)
    return tensors


MISMATCHES = {
    "config": ["momentum = 0.95", "momentum = 0.9"],
    "name": [f"rank 0 has {WK}", "rank 1 has layers.9.attention.wk"],
    "missing": [f"rank 0 has {WK}", "rank 1 has nothing"],
    "order": [f"rank 0 has {WQ}", "rank 1 has "],
    "dtype": ["torch.float32", f"rank 1 has {WK}", "torch.bfloat16"],
    "shape": ["(3, 8)", f"rank 1 has {WK}", "(6, 8)"],
    "type": ["attn_k", f"rank 1 has {WK}", "attn_other"],
    "layout": [f"rank 0 has {WQ}", "rank 1 has nothing"],
    "schedule": ["rank(s) 1 differ from rank 0"],
    "rate": ["lr 0.01", "rank 1 has", "lr 0.02"],
}
"""Parts of the error by what differs on the second rank."""


def disagree(rank: int, world_size: int) -> dict[str, str]:
    """Error of the first step of ranks of which the second one is at fault."""
    errors = {}
    for fault in MISMATCHES:
        own = fault if rank == 1 else ""
        model = models.build(tensors_of(own))
        groups = param_groups(model, patterns={WK: "attn_other"} if own == "type" else None)
        world, rate = None if own == "layout" else dist.group.WORLD, 0.02 if own == "rate" else 0.01
        config: Any = MuonConfig(momentum=0.9 if own == "config" else 0.95)
        optimizer = Muon(
            groups,
            rate,
            schedule="you" if own == "schedule" else "kj",
            config=config,
            process_group=world,
        )
        before = runs.weights(model)
        errors[fault] = raised(lambda m=model, o=optimizer: runs.train(m, o, 1, 1))  # type: ignore[misc]
        assert runs.equal(before, runs.weights(model))
    return errors


def test_what_differs_on_one_rank_is_named_on_all(run_on: Ranks) -> None:
    errors, *others = run_on(3)(disagree)
    assert others == [errors] * 2
    for fault, parts in MISMATCHES.items():
        assert errors[fault].startswith("RankMismatchError")
        assert [part for part in parts if part not in errors[fault]] == [], fault


def step_beside_private_matrices(rank: int, world_size: int) -> list[dict[str, Tensor]]:
    """A mesh shards some matrices; plain ones stay each rank's own."""
    results = []
    for ownership in ("round_robin", "balanced"):
        mesh = init_device_mesh("cpu", (world_size,))
        tensors: dict[str, Tensor] = tensors_of("")
        for name in tensors.keys() - {WQ, WK}:
            tensors[name] = nn.Parameter(distribute_tensor(tensors[name], mesh, [Shard(0)]))
        model = models.build(tensors)
        optimizer = Muon(param_groups(model), config=MuonConfig(ownership=ownership))
        results.append(runs.train(model, optimizer, 1, 1))
    return results


def test_private_matrices_do_not_change_who_owns_the_shared_ones(run_on: Ranks) -> None:
    for dealt, balanced in run_on(2)(step_beside_private_matrices):
        assert runs.equal(dealt, balanced)


def load_alone(rank: int, world_size: int) -> list[str]:
    """One rank goes back to an earlier state of the schedule; the other does not."""
    model, optimizer = runs.make("fsdp", AMO)
    runs.train(model, optimizer, 1, 1)
    early = optimizer.control_state_dict()
    runs.train(model, optimizer, 2, 5)
    late = optimizer.control_state_dict()
    errors = []
    # The last two are the same state; one rank alone would plan its exchange anew.
    for state, ranks in ((early, [1]), (late, [1]), (late, [0, 1])):
        if rank in ranks:
            optimizer.load_control_state_dict(state)
        errors.append(raised(optimizer.step))
    return errors


def test_a_load_on_one_rank_alone_is_an_error_not_a_hang(run_on: Ranks) -> None:
    errors, others = run_on(2)(load_alone)
    assert errors == others
    stale, anew, alike = errors
    assert stale.startswith("RankMismatchError")
    assert "rank 0 has step 6; rank 1 has step 2" in stale
    assert anew.startswith("RankMismatchError")
    assert "exchange plan" in anew
    assert alike == ""


def restore_alone(rank: int, world_size: int, kind: type[Muon], steps: int) -> list[str]:
    """One rank restores a state before its first step; then the other does, too."""
    config = {"config": AMOConfig(**runs.PHASES)} if kind is AMO else {}
    trained, model = (models.make_model("fsdp", runs.SHAPES) for _ in range(2))
    first, optimizer = (kind(param_groups(each), **config) for each in (trained, model))
    runs.train(trained, first, 1, steps)
    errors = []
    for loader in (1, 0):
        if rank == loader:
            optimizer.load_control_state_dict(first.control_state_dict())
        errors.append(raised(lambda: runs.train(model, optimizer, steps + 1, steps + 1)))
    return [*errors, str(optimizer.num_steps_taken)]


@pytest.mark.parametrize(("kind", "steps"), [(ROOT, 1), (AMO, 4)])
def test_a_state_restored_on_one_rank_alone_is_an_error_not_a_hang(
    run_on: Ranks, kind: type[Muon], steps: int
) -> None:
    (alone, *rest), others = run_on(2)(restore_alone, kind, steps)
    assert others == [alone, *rest]
    assert alone.startswith("RankMismatchError: ")
    assert rest == ["", str(steps + 1)]
