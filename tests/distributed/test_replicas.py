"""Replicas hold the same state and parameters, and what differs between ranks is said once."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from amo_dist import OPTIMIZER_NAMES, AMOConfig, Muon, MuonConfig, make_optimizer, param_groups
from amo_dist.distributed.layout import layout_of, local_tensor
from tests import runs
from tests.distributed import models
from tests.distributed.harness import Ranks, raised
from tests.distributed.test_ballot import DEVICES, on
from tests.runs import NORM, W1, WQ

NARROW = {
    "layers.0.attention.wq.weight": (8, 1),
    "layers.0.attention.wk.weight": (1, 8),
    "layers.0.feed_forward.w1.weight": (5, 3),
    "layers.0.feed_forward.w2.weight": (3, 5),
    "norm.weight": (3,),
}
PLACEMENTS: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "rows": ((4,), (Shard(0),)),
    "columns": ((4,), (Shard(1),)),
    "replicas of columns": ((2, 2), (Replicate(), Shard(1))),
    "columns, then replicas": ((2, 2), (Shard(1), Replicate())),
    "rows and columns": ((2, 2), (Shard(0), Shard(1))),
}
"""Mesh and placements; each leaves ranks without any element of some matrix."""


def train_narrow(
    rank: int, world_size: int, name: str, placed: str | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Tensors by name, each with its intervals on this rank; and whole ones."""
    params: dict[str, nn.Parameter] = {}
    sizes, placements = PLACEMENTS[placed] if placed else ((1,), ())
    mesh = init_device_mesh("cpu", sizes) if placed else None
    for key, shape in NARROW.items():
        tensor = models.initial(key, shape)
        if mesh is not None:
            own = [Replicate() if p == Shard(1) and len(shape) < 2 else p for p in placements]
            tensor = distribute_tensor(tensor, mesh, own)
        params[key] = nn.Parameter(tensor)
    model = models.build(params)
    fields = {"ns_dtype": "float32", "ns_guard_every": 0}
    config = AMOConfig(**{**runs.PHASES, **fields}) if name == "AMO" else MuonConfig(**fields)
    optimizer = make_optimizer(name, param_groups(model), lr=0.1, config=config)
    for step in range(1, 5):
        models.set_gradients(model, 2, step)
        optimizer.step()
    held, whole = {}, {}
    for key, param in model.named_parameters():
        for field, value in {"": param, **optimizer.state[param]}.items():
            if placed is None or field != "step":
                whole[f"{key} {field}"] = models.whole(value)
            if placed is not None and hasattr(value, "placements"):
                cuts = layout_of(value, key, ()).intervals_by_rank[rank]
                held[f"{key} {field}"] = cuts, local_tensor(value)
    return held, whole


@pytest.mark.parametrize("placed", PLACEMENTS)
@pytest.mark.parametrize("name", [name for name in OPTIMIZER_NAMES if name != "AdamW"])
def test_replicas_hold_the_same_state_and_parameters(run_on: Ranks, name: str, placed: str) -> None:
    results = run_on(4)(train_narrow, name, placed)
    expected = train_narrow(0, 1, name, None)[1]
    seen: dict[Any, Tensor] = {}
    for held, whole in results:
        for key, (cuts, local) in held.items():
            assert torch.equal(local, seen.setdefault((key, cuts), local)), key
        for key, value in whole.items():
            assert torch.equal(value, expected[key]), key


# ---------------------------------------------------------------- replicas that nobody averages


def diverge(rank: int, world_size: int, device: str, apart: str) -> list[str]:
    """Errors of the first step, and of the first after a load."""
    errors = []
    with on(device):
        model, optimizer = runs.make("plain", Muon, device=device)
        for is_loaded in (False, True):
            if is_loaded:
                runs.train(model, optimizer, 1, 2)
                optimizer.load_state_dict(optimizer.state_dict())
            models.set_gradients(model, 1, 3)
            param = model.get_parameter(WQ)
            kept = param.detach().clone()
            state = optimizer.state[param]["momentum_buffer"]
            if rank == world_size - 1:
                if apart == "gradient":
                    param.grad = torch.flip(param.grad, (0, 1)) * 1.5
                tensor = {"parameter": param.data, "state": state}.get(apart)
                if tensor is not None:
                    tensor.view(-1)[0] += 1.0
            errors.append(raised(optimizer.step))
            with torch.no_grad():
                param.copy_(kept)
                if apart == "state" and rank == world_size - 1:
                    state.view(-1)[0] -= 1.0
    return errors


@DEVICES
@pytest.mark.parametrize("apart", ["gradient", "parameter", "state"])
def test_replicas_that_differ_are_named_on_all(run_on: Ranks, apart: str, device: str) -> None:
    first, *others = run_on(3)(diverge, device, apart)
    assert others == [first, first]
    kind = "gradient" if apart == "gradient" else "parameter or state"
    start = f"RankMismatchError: {WQ}: found another {kind} on rank 2 than on rank 0, its replica"
    assert all(error.startswith(start) for error in first), first


# ---------------------------------------------------------------- optimizers that cross


def cross(rank: int, world_size: int, device: str, is_late: bool) -> list[str]:
    """An actor and a critic of one shape, which the last rank steps in another order."""
    with on(device):
        pairs = [runs.make("fsdp", Muon, device=device) for _ in range(2)]
        for step in (1, 2) if is_late else ():
            for model, optimizer in pairs:
                runs.train(model, optimizer, step, step)
        errors = []
        for model, _ in pairs:
            models.set_gradients(model, 1, 3)
        order = pairs[::-1] if rank == world_size - 1 else pairs
        for _ in range(2):
            errors += [raised(optimizer.step) for _, optimizer in order]
        return [error for error in errors if error]


@DEVICES
@pytest.mark.parametrize("is_late", [False, True])
def test_optimizers_stepped_in_another_order_are_both_named(
    run_on: Ranks, is_late: bool, device: str
) -> None:
    for errors in run_on(2)(cross, device, is_late):
        assert errors
        for error in errors:
            assert len(set(re.findall(r"Muon number (\d+)", error))) == 2, error


# ---------------------------------------------------------------- one rank speaks for all


def speak(rank: int, world_size: int, case: str) -> list[str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("amo_dist")
    logger.addHandler(handler)
    try:
        if case == "plain tensors":
            model = models.plain_model(runs.SHAPES)
            optimizer = Muon(param_groups(model))
            runs.train(model, optimizer, 1, 1)
            return messages
        options = {"ns_guard_every": 1 if case == "residual" else 0}
        model, optimizer = runs.make("fsdp", Muon, nonfinite="skip_step", **options)
        for step in range(1, 3):
            missing = frozenset({W1, NORM}) if case == "unused" else frozenset()
            models.set_gradients(model, 1, step, missing=missing)
            if case == "skipped" and rank == 1:
                local_tensor(model.get_parameter(WQ).grad).view(-1)[0] = torch.nan
            if case == "idle" and step == 2:
                optimizer.zero_grad()
            optimizer.step()
    finally:
        logger.removeHandler(handler)
    return messages


@pytest.mark.parametrize("case", ["skipped", "unused", "idle", "plain tensors"])
def test_one_rank_says_what_all_have_agreed_on(run_on: Ranks, case: str) -> None:
    first, *others = run_on(3)(speak, case)
    assert first
    assert others == [[], []]
