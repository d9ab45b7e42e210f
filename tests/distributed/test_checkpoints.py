"""Checkpoints of ranks: to the same world and to others, with each option of PyTorch's helpers."""

from __future__ import annotations

import copy
import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from amo_dist import AMO, AMOConfig, Fused, Muon, MuonConfig, NorMuon, param_groups
from amo_dist.distributed.layout import local_tensor
from tests import runs
from tests.distributed import models
from tests.distributed.harness import Ranks, raised
from tests.examples import examples
from tests.faults.worker import load, state_of

# ---------------------------------------------------------------- from world to world

STEPS = 9
# Before an observation, between two, at the plan, in the transition, at the lock, after it.
SAVED = (1, 3, 4, 5, 7, 8)
# FSDP over TP needs even dims, torch.optim.Muon as many rows as ranks.
SHAPES = models.shapes(models.EVEN_SHAPES)
# A matrix for each head, of interleaved rows: pieces are parts of a local tensor.
PATTERNS = {
    r".*wq\.weight": Fused((("attn_q", 16),), heads={"attn_q": 4}),
    r".*w1\.weight": Fused((("mlp_gate", 12), ("mlp_up", 12)), groups=3),
}
KINDS: dict[str, dict[str, Any]] = {
    "measured": {},
    "paper": {"planner": "paper", "update_norm": "as_is"},
    "NorMuon": {"kind": NorMuon},  # whose moments have not the parameters' shape
    "master": {
        "kind": Muon,
        "dtype": torch.bfloat16,
        "groups": {"patterns": PATTERNS},
        "bfloat16_params": "master",
        "adjust_lr": "original",
        "cautious_decay": True,
    },
}
"""Arguments of `runs.make`."""


def make(layout: str, kind: str, **fields: Any) -> tuple[nn.Module, Muon]:
    return runs.make(layout, shapes=SHAPES, **{"bucket_bytes": 256, **KINDS[kind], **fields})


def go_on(model: nn.Module, optimizer: Muon, folder: str = "", flatten: bool = False) -> Any:
    """Train to the end, saving on the way where a folder is given.

    Returns the state of the schedule by step, and all parameters and state at the end.
    """
    schedules = {}
    for step in range(optimizer.num_steps_taken + 1, STEPS + 1):
        runs.train(model, optimizer, step, step)
        schedules[step] = copy.deepcopy(optimizer.control_state_dict()["source"])
        if folder and step in SAVED:
            path = str(Path(folder, f"step-{step}"))
            dcp.save(state_of(model, optimizer, flatten), checkpoint_id=path)
    ends = {
        f"{name}.{key}": models.whole(value)
        for name, param in model.named_parameters()
        for key, value in (("", param), *optimizer.state[param].items())
    }
    return schedules, ends


def save(rank: int, world_size: int, layout: str, kind: str, folder: str, flatten: bool) -> Any:
    return go_on(*make(layout, kind), folder, flatten)


def resume(
    rank: int, world_size: int, layout: str, kind: str, folder: str, flatten: bool, step: int
) -> Any:
    """With owners of another kind, too, at every other step."""
    ownership = "round_robin" if step % 2 else "balanced"
    model, optimizer = make(layout, kind, ownership=ownership)
    load(Path(folder, f"step-{step}"), model, optimizer, flatten)
    return go_on(model, optimizer)


@pytest.mark.parametrize(
    ("kind", "flatten", "layout", "world_size", "others"),
    [
        ("measured", False, "fsdp", 2, [("fsdp", 2, step) for step in SAVED]),
        ("paper", True, "fsdp", 2, [("fsdp", 2, step) for step in SAVED]),
        ("measured", False, "tp_fsdp", 4, [("fsdp", 2, 5)]),
        ("master", False, "fsdp", 2, [("tp_fsdp", 4, 3), ("hsdp", 4, 3)]),
        ("NorMuon", False, "tp_fsdp", 4, [("fsdp", 3, 3), ("tp_fsdp", 4, 3)]),
        pytest.param(
            *("measured", False, "fsdp", 2),
            [
                *(("plain", 1, 3), ("plain", 1, 5), ("fsdp", 3, 3), ("fsdp", 3, 4)),
                *(("hsdp", 4, 5), ("tp", 2, 3), ("tp_fsdp", 4, 4), ("plain", 2, 3)),
            ],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_checkpoint_goes_on_bit_for_bit_in_any_world(
    run_on: Ranks,
    tmp_path: Path,
    kind: str,
    flatten: bool,
    layout: str,
    world_size: int,
    others: list[tuple[str, int, int]],
) -> None:
    schedules, ends = run_on(world_size)(save, layout, kind, str(tmp_path), flatten)[0]
    # Gradients are injected, and nothing else reduces over ranks: the same bits in every world.
    _, alone = go_on(*make("plain", kind))
    assert runs.equal(ends, alone)
    for other, ranks, step in others:
        later = {number: schedule for number, schedule in schedules.items() if number > step}
        results = run_on(ranks)(resume, other, kind, str(tmp_path), flatten, step)
        for resumed, resumed_ends in results:
            assert resumed == later, (other, step)
            assert runs.equal(resumed_ends, ends), (other, step)


def refused(rank: int, world_size: int) -> list[str]:
    """A whole tensor for a shard, and NaN in one shard."""
    model, optimizer = make("fsdp", "measured")
    runs.train(model, optimizer, 1, 1)
    whole, damaged = (copy.deepcopy(optimizer.state_dict()) for _ in range(2))
    momentum = whole["state"][0]["momentum_buffer"]
    whole["state"][0]["momentum_buffer"] = models.whole(momentum)
    local_tensor(damaged["state"][0]["momentum_buffer"]).view(-1)[0] = torch.nan
    loads = [functools.partial(optimizer.load_state_dict, state) for state in (whole, damaged)]
    return [raised(load) for load in loads]


def test_what_does_not_fit_a_shard_is_refused(run_on: Ranks) -> None:
    for plain, damaged in run_on(2)(refused):
        assert "found a plain tensor, expected a DTensor (Shard(dim=0),)" in plain
        assert "momentum_buffer: found NaN or inf" in damaged


UNEVEN = models.shapes()
ONE_ROW = "layers.0.attention.wv.weight"


def keys(rank: int, world_size: int) -> list[list[str]]:
    """Keys of the state before the first step, and after two."""
    model, optimizer = runs.make("fsdp", shapes=UNEVEN)
    results = []
    for steps in (0, 2):
        # Never a gradient for a matrix of one row, of which two ranks hold nothing, and a norm.
        runs.train(model, optimizer, 1, steps, missing=frozenset({ONE_ROW, "norm.weight"}))
        state: dict[str, Any] = get_optimizer_state_dict(model, optimizer)["state"]
        results.append(sorted(f"{name}.{key}" for name, own in state.items() for key in own))
    return results


def test_keys_do_not_depend_on_what_a_rank_holds_or_has_seen(run_on: Ranks) -> None:
    """State that comes into being with its first gradient, or only where there are rows, gives
    ranks different keys, and a save in which all ranks take part then waits for ever."""
    expected = [f"{name}.momentum_buffer" for name in models.types()]
    for name in UNEVEN.keys() - set(models.types()):
        expected += [f"{name}.{key}" for key in ("exp_avg", "exp_avg_sq", "step")]
    assert run_on(3)(keys) == [[sorted(expected)] * 2] * 3


# ---------------------------------------------------------------- options of PyTorch's helpers

FLAGS = ("full_state_dict", "cpu_offload", "flatten_optimizer_state_dict", "broadcast_from_rank0")


def make_held(layout: str, is_frozen: bool) -> tuple[nn.Module, nn.Module, Muon]:
    """What holds the model, the model, and its optimizer."""
    model = models.make_model("fsdp" if layout == "fsdp" else "plain", runs.SHAPES)
    model.get_parameter(runs.W1).requires_grad_(not is_frozen)
    holder = DistributedDataParallel(model) if layout == "ddp" else model
    group = dist.group.WORLD if layout == "ddp" else None
    config = AMOConfig(**runs.PHASES)
    return holder, model, AMO(param_groups(model), config=config, process_group=group)


def goes_on_alike(layout: str, flags: dict[str, bool], **options: bool) -> bool:
    """Whether an optimizer that was saved and loaded with these options takes the same steps.

    With ``options`` of their own a parameter is frozen.
    """
    holder, model, optimizer = make_held(layout, bool(options))
    runs.train(model, optimizer, 1, 4)
    read = StateDictOptions(**{**flags, "broadcast_from_rank0": False}, **options)
    state = copy.deepcopy(get_optimizer_state_dict(holder, optimizer, options=read))
    rank = dist.get_rank()
    if flags["full_state_dict"] and flags["cpu_offload"]:
        assert bool(state) == (rank == 0)  # PyTorch leaves it to the first rank alone
        everywhere = [state]
        dist.broadcast_object_list(everywhere)
        state = everywhere[0]
    if flags["broadcast_from_rank0"] and rank:
        state = {}
    twin_holder, twin, other = make_held(layout, bool(options))
    twin.load_state_dict(model.state_dict())
    write = StateDictOptions(**flags, **options)
    set_optimizer_state_dict(twin_holder, other, state, options=write)
    runs.train(model, optimizer, 5, 6)
    runs.train(twin, other, 5, 6)
    return runs.same(model, twin)


def every_option(rank: int, world_size: int, layout: str) -> dict[Any, bool]:
    """By what was chosen, whether it went on alike; nothing that PyTorch cannot do."""
    results = {}
    for chosen in itertools.product([False, True], repeat=len(FLAGS)):
        flags = dict(zip(FLAGS, chosen, strict=True))
        is_whole, _, is_flat, is_sent = chosen
        if not (is_flat if is_whole else is_sent):
            results[chosen] = goes_on_alike(layout, flags)
    for ignored, strict in itertools.product([False, True], repeat=2):
        flags, options = dict.fromkeys(FLAGS, False), {"ignore_frozen_params": ignored}
        results[ignored, strict] = goes_on_alike(layout, flags, strict=strict, **options)
    return results


@pytest.mark.parametrize("layout", ["fsdp", "ddp"])
def test_every_option_loads_to_the_last_bit(run_on: Ranks, layout: str) -> None:
    for results in run_on(2)(every_option, layout):
        assert len(results) == 8 + 4
        assert all(results.values()), results


# ---------------------------------------------------------------- state of other optimizers


NUM_BEFORE = 3
"""Steps that the other optimizer takes."""


def recipe() -> Any:
    """The function as printed."""
    _, text = examples(["docs/checkpoints.md"])["take_over.py"]
    names: dict[str, Any] = {}
    exec(text[: text.index("model = ")], names)
    return names["take_over"]


def foreign(model: torch.nn.Module, origin: str) -> dict[str, Any]:
    """State of other optimizers after some steps."""
    matrices, rest = (group["params"] for group in param_groups(model))
    adamw = torch.optim.AdamW(rest, lr=0.0, betas=(0.9, 0.95))
    optimizers = [adamw, torch.optim.Muon(matrices, lr=0.0, momentum=0.9)]
    if origin == "AdamW":
        optimizers = [torch.optim.AdamW([*matrices, *rest], lr=0.0, betas=(0.9, 0.95))]
    for step in range(1, NUM_BEFORE + 1):
        models.set_gradients(model, 0, 1 if origin == "AdamW" else step)
        for optimizer in optimizers:
            optimizer.step()
    found: dict[str, Any] = get_optimizer_state_dict(model, optimizers)
    if origin == "Dion":  # its names; a sum, where torch.optim.Muon keeps a mean of weight 0.1
        for group in found["param_groups"]:
            group["step"] = NUM_BEFORE
        for name, state in found["state"].items():
            mean = state.pop("momentum_buffer", None)
            renamed = {"momentum": state.get("exp_avg") if mean is None else 10 * mean}
            if mean is None:
                renamed["variance"] = state["exp_avg_sq"]
            found["state"][name] = renamed
    return found


def differences(rank: int, world_size: int, origin: str, bfloat16_params: str) -> list[str]:
    """Names whose state is not that of a run from the start with this package."""
    dtype = torch.bfloat16 if bfloat16_params == "master" else torch.float32
    config = MuonConfig(momentum=0.9, bfloat16_params=bfloat16_params)
    model, twin = (models.make_model("fsdp", SHAPES).to(dtype) for _ in range(2))
    new, expected = (
        Muon(param_groups(each), lr=0.0, betas=(0.9, 0.95), config=config) for each in (model, twin)
    )
    for step in range(1, NUM_BEFORE + 1):
        models.set_gradients(twin, 0, 1 if origin == "AdamW" else step)
        expected.step()
    recipe()(new, foreign(model, origin))
    # PyTorch keeps bfloat16 moments of bfloat16 parameters.
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-5
    wrong = []
    for name, param in new.params_by_name.items():
        for key, value in expected.state[expected.params_by_name[name]].items():
            if origin == "AdamW" and key == "momentum_buffer":
                # AdamW's mean of one gradient is that gradient, and the sum of all its powers.
                value = 10 * twin.get_parameter(name).grad.float()  # type: ignore[union-attr]
            pair = models.whole(new.state[param][key]), models.whole(value)
            if not torch.allclose(*pair, rtol=tolerance, atol=tolerance * pair[1].abs().max()):
                wrong.append(f"{name}.{key}")
    models.set_gradients(model, 0, NUM_BEFORE + 1)
    new.step()
    return wrong


@pytest.mark.parametrize("bfloat16_params", ["nearest", "master"])
@pytest.mark.parametrize("origin", ["torch", "Dion", "AdamW"])
def test_state_is_taken_over_by_name(run_on: Ranks, origin: str, bfloat16_params: str) -> None:
    assert run_on(2)(differences, origin, bfloat16_params) == [[], []]
