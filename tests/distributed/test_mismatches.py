"""Ranks that differ: every rank raises, and names what differs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from amo_dist import AMO, ROOT, AMOConfig, Muon, MuonConfig, param_groups, qk_clip_
from tests.distributed import models
from tests.distributed.harness import Ranks
from tests.distributed.test_ranks import raised

FIELDS: dict[str, Any] = {
    "observe_until": 2,
    "observe_every": 1,
    "sample_size": 1,
    "transition_steps": 1,
}
WQ, WK = "layers.0.attention.wq.weight", "layers.0.attention.wk.weight"


def tensors_of(rank: int, fault: str) -> dict[str, torch.Tensor]:
    tensors = {name: models.initial(name, shape) for name, shape in models.shapes().items()}
    if rank == 1:
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


def disagree(rank: int, world_size: int, fault: str) -> str:
    """The error of the first step of ranks of which one, rank 1, is at fault."""
    model: nn.Module = models.build(tensors_of(rank, fault))
    fields = dict(FIELDS)
    lr = 0.02 if rank == 1 and fault == "rate" else 0.01
    if rank == 1 and fault == "config":
        fields["seed"] = 43
    patterns = {WK: "attn_other"} if rank == 1 and fault == "type" else None
    groups = param_groups(model, patterns=patterns)
    world = None if rank == 1 and fault == "layout" else dist.group.WORLD
    if fault == "schedule":
        schedule = "you" if rank == 1 else "kj"
        optimizer = Muon(groups, schedule=schedule, config=MuonConfig(), process_group=world)
    else:
        optimizer = AMO(groups, lr, config=AMOConfig(**fields), process_group=world)
    models.set_gradients(model, 1, 1)
    named = dict(model.named_parameters())
    if fault == "gradient" and rank == 1:
        named[WK].grad = None
    if fault == "nan" and rank == 1:
        named[WK].grad[0, 0] = float("nan")  # type: ignore[index]
    before = {name: param.detach().clone() for name, param in named.items()}
    text = raised(optimizer.step)
    assert all(torch.equal(before[name], param) for name, param in named.items())
    return text


@pytest.mark.parametrize(
    ("fault", "error", "expected"),
    [
        ("config", "RankMismatchError", ["rank(s) 1", "seed = 42", "seed = 43"]),
        ("name", "RankMismatchError", [f"rank 0 has {WK}", "rank 1 has layers.9.attention.wk"]),
        ("missing", "RankMismatchError", [f"rank 0 has {WK}", "rank 1 has nothing"]),
        ("order", "RankMismatchError", [f"rank 0 has {WQ}", "rank 1 has "]),
        ("dtype", "RankMismatchError", ["torch.float32", f"rank 1 has {WK}", "torch.bfloat16"]),
        ("shape", "RankMismatchError", ["(3, 8)", f"rank 1 has {WK}", "(6, 8)"]),
        ("type", "RankMismatchError", ["attn_k", f"rank 1 has {WK}", "attn_other"]),
        ("layout", "RankMismatchError", [f"rank 0 has {WQ}", "rank 1 has nothing"]),
        ("schedule", "RankMismatchError", ["rank(s) 1 differ from rank 0"]),
        ("rate", "RankMismatchError", ["lr 0.01", "rank 1 has", "lr 0.02"]),
        # Ranks 0 and 2 have one; the greater is named.
        ("gradient", "MissingGradientError", [WK, "on rank 2 and none on rank 1"]),
        ("nan", "NonFiniteGradientError", [WK, "on rank 1"]),
    ],
)
def test_what_differs_on_one_rank_is_told_on_all(
    run_on: Ranks, fault: str, error: str, expected: list[str]
) -> None:
    found = run_on(3, timeout=60.0)(disagree, fault)
    assert len(set(found)) == 1
    assert found[0].startswith(error)
    for part in expected:
        assert part in found[0]


def step_beside_private_matrices(rank: int, world_size: int) -> list[dict[str, torch.Tensor]]:
    """A mesh shards what it is given; a plain matrix stays each rank's own."""
    found = []
    for ownership in ("round_robin", "balanced"):
        mesh = init_device_mesh("cpu", (world_size,))
        tensors: dict[str, torch.Tensor] = {
            name: models.initial(name, shape)
            if name in (WQ, WK)
            else nn.Parameter(distribute_tensor(models.initial(name, shape), mesh, [Shard(0)]))
            for name, shape in models.shapes().items()
        }
        model = models.build(tensors)
        optimizer = Muon(param_groups(model), config=MuonConfig(ownership=ownership))
        models.set_gradients(model, 1, 1)
        optimizer.step()
        found.append({name: models.whole(param) for name, param in model.named_parameters()})
    return found


def test_private_matrices_do_not_change_who_owns_the_shared_ones(run_on: Ranks) -> None:
    for dealt, balanced in run_on(2, timeout=60.0)(step_beside_private_matrices):
        assert all(torch.equal(dealt[name], balanced[name]) for name in dealt)


def change_rate_alone(rank: int, world_size: int) -> list[str]:
    """After the first step, rank 1 alone takes another learning rate or weight decay."""
    model = models.make_model("fsdp", models.shapes())
    optimizer = AMO(param_groups(model), 0.5, config=AMOConfig(**FIELDS))
    found = []
    for field, value in (("lr", 0.5), ("lr", 0.25), ("weight_decay", 0.2), ("weight_decay", 0.1)):
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = 0.5, 0.1
            group[field] = value if rank == 1 else group[field]
        models.set_gradients(model, 1, 1)
        found.append(raised(optimizer.step))
    return found


def test_a_learning_rate_changed_on_one_rank_alone_is_an_error(run_on: Ranks) -> None:
    found = run_on(2, timeout=60.0)(change_rate_alone)
    assert found[0] == found[1]
    before, rate, decay, after = found[0]
    assert (before, after) == ("", "")
    for part in ("rank 0 has group 0: lr 0.5, ", "rank 1 has group 0: lr 0.25, "):
        assert part in rate
    for part in ("weight_decay 0.1", "weight_decay 0.2"):
        assert part in decay


def load_alone(rank: int, world_size: int) -> list[str]:
    """One rank goes back to an earlier state of the schedule; the other does not."""
    model = models.make_model("fsdp", models.shapes())
    optimizer = AMO(param_groups(model), config=AMOConfig(**FIELDS))
    models.set_gradients(model, 1, 1)
    optimizer.step()
    early = optimizer.control_state_dict()
    for step in (2, 3, 4, 5):
        models.set_gradients(model, 1, step)
        optimizer.step()
    late = optimizer.control_state_dict()
    if rank == 1:
        optimizer.load_control_state_dict(early)
    found = [raised(optimizer.step)]
    if rank == 1:
        # The same state as the other rank's, but this one would plan its exchange anew.
        optimizer.load_control_state_dict(late)
    found.append(raised(optimizer.step))
    optimizer.load_control_state_dict(late)
    found.append(raised(optimizer.step))
    return found


def test_a_load_on_one_rank_alone_is_an_error_not_a_hang(run_on: Ranks) -> None:
    found = run_on(2, timeout=60.0)(load_alone)
    assert found[0] == found[1]
    stale, anew, together = found[0]
    assert stale.startswith("RankMismatchError")
    assert "rank 0 has step 6; rank 1 has step 2" in stale
    assert anew.startswith("RankMismatchError")
    assert "exchange plan" in anew
    assert together == ""


def restore_alone(rank: int, world_size: int, kind: type[Muon], steps: int, told: int) -> list[str]:
    """One rank restores a state before its first step; then the other does, too."""
    config = {"config": AMOConfig(**FIELDS)} if kind is AMO else {}
    trained, fresh = (models.make_model("fsdp", models.shapes()) for _ in range(2))
    optimizer = kind(param_groups(trained), **config)
    for step in range(1, steps + 1):
        models.set_gradients(trained, 1, step)
        optimizer.step()
    state = {**optimizer.control_state_dict(), "steps_taken": told}
    optimizer = kind(param_groups(fresh), **config)
    found = []
    for loader in (1, 0):
        if rank == loader:
            optimizer.load_control_state_dict(state)
        models.set_gradients(fresh, 1, told + 1)
        found.append(raised(optimizer.step))
    return [*found, str(optimizer.num_steps_taken)]


@pytest.mark.parametrize(
    ("kind", "steps", "told", "expected"),
    [
        (ROOT, 1, 1, "rank 0 has optimizer steps taken: 0; rank 1 has optimizer steps taken: 1"),
        (ROOT, 1, 0, 'rank 0 has fits: null; rank 1 has fits: {"12x8": {"calibration": "'),
        (AMO, 4, 4, "rank 0 has optimizer steps taken: 0; rank 1 has optimizer steps taken: 4"),
    ],
)
def test_a_state_restored_on_one_rank_alone_is_an_error_not_a_hang(
    run_on: Ranks, kind: type[Muon], steps: int, told: int, expected: str
) -> None:
    found = run_on(2, timeout=60.0)(restore_alone, kind, steps, told)
    assert found[0] == found[1]
    alone, together, taken = found[0]
    start = "RankMismatchError: the state before the first step: rank(s) 1 differ from rank 0; "
    assert alone.startswith(start + expected)
    assert (together, taken) == ("", str(told + 1))


def clip_in_other_orders(rank: int, world_size: int) -> dict[str, float]:
    """Two attentions on two meshes, named in another order on each rank."""
    model, logits = nn.Module(), {}
    model.layers = nn.ModuleList()
    for index, name in enumerate(("first", "second")):
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=(name,))
        attention = nn.Module()
        for part in ("q_proj", "k_proj"):
            weight = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
            module = nn.Module()
            module.weight = nn.Parameter(weight)
            setattr(attention, part, module)
        attention.num_heads, attention.head_dim = 2, 2
        block = nn.Module()
        block.attn = attention
        model.layers.append(block)
        logits[f"layers.{index}.attn"] = (index + 1) * torch.tensor([1.0 + rank, 4.0 - rank])
    names = sorted(logits, reverse=rank == 1)
    gammas = qk_clip_(model, {name: logits[name] for name in names}, 1.0, per_head=2)
    return {name: gamma.tolist() for name, gamma in sorted(gammas.items())}


def test_logits_of_several_meshes_are_compared_in_one_order(run_on: Ranks) -> None:
    """The logits of one attention clipped the other: both meshes have the group of the job."""
    first, second = run_on(2)(clip_in_other_orders)
    assert first == second == {"layers.0.attn": [0.5, 0.25], "layers.1.attn": [0.25, 0.125]}
