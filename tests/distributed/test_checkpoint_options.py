"""PyTorch's checkpoint helpers with each of their options: the same bits, or a plain refusal."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from amo_dist import AMO, AMOConfig, param_groups
from tests import runs
from tests.distributed import models
from tests.distributed.harness import Ranks

CONFIG = AMOConfig(**runs.PHASES)
FLAGS = ("full_state_dict", "cpu_offload", "flatten_optimizer_state_dict", "broadcast_from_rank0")
BOTH = {"full_state_dict", "flatten_optimizer_state_dict"}


def make(layout: str, is_frozen: bool) -> tuple[nn.Module, nn.Module, AMO]:
    """What holds the model, the model, and its optimizer."""
    model = models.make_model("fsdp" if layout == "fsdp" else "plain", runs.SHAPES)
    if is_frozen:
        model.get_parameter(runs.W1).requires_grad_(False)
    holder = DistributedDataParallel(model) if layout == "ddp" else model
    group = dist.group.WORLD if layout == "ddp" else None
    return holder, model, AMO(param_groups(model), lr=1e-2, config=CONFIG, process_group=group)


def goes_on_alike(layout: str, flags: dict[str, bool], **options: bool) -> bool:
    """Whether an optimizer that was saved and loaded with these options takes the same steps."""
    is_frozen = bool(options)
    holder, model, optimizer = make(layout, is_frozen)
    runs.train(model, optimizer, 1, 4)
    read = StateDictOptions(**{**flags, "broadcast_from_rank0": False}, **options)
    state = copy.deepcopy(get_optimizer_state_dict(holder, optimizer, options=read))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if flags["full_state_dict"] and flags["cpu_offload"] and world_size > 1:
        assert bool(state) == (rank == 0)  # PyTorch leaves it to the first rank alone
        everywhere = [state]
        dist.broadcast_object_list(everywhere)
        state = everywhere[0]
    if flags["broadcast_from_rank0"] and rank:
        state = {}
    twin_holder, twin, other = make(layout, is_frozen)
    twin.load_state_dict(model.state_dict())
    write = StateDictOptions(**flags, **options)
    set_optimizer_state_dict(twin_holder, other, state, options=write)
    runs.train(model, optimizer, 5, 6)
    runs.train(twin, other, 5, 6)
    return runs.same(model, twin)


def every_option(rank: int, world_size: int, layout: str) -> dict[Any, bool]:
    """By what was chosen, whether it went on alike; nothing that PyTorch cannot do."""
    found = {}
    for chosen in itertools.product([False, True], repeat=len(FLAGS)):
        flags = dict(zip(FLAGS, chosen, strict=True))
        is_whole = flags["full_state_dict"]
        if is_whole and flags["flatten_optimizer_state_dict"]:
            continue
        if is_whole or not flags["broadcast_from_rank0"]:
            found[chosen] = goes_on_alike(layout, flags)
    for chosen in itertools.product([False, True], repeat=2):
        own = dict(zip(("ignore_frozen_params", "strict"), chosen, strict=True))
        found["frozen", chosen] = goes_on_alike(layout, dict.fromkeys(FLAGS, False), **own)
    return found


@pytest.mark.parametrize(("layout", "world_size"), [("fsdp", 2), ("ddp", 2)], ids=str)
def test_every_option_loads_to_the_last_bit(run_on: Ranks, layout: str, world_size: int) -> None:
    for found in run_on(world_size)(every_option, layout):
        assert len(found) == 8 + 4
        assert all(found.values()), found


def refusals(rank: int, world_size: int) -> list[str]:
    """What PyTorch, or the optimizer, says to what cannot be."""
    errors = []
    for flags in (
        {"broadcast_from_rank0": True},
        dict.fromkeys(BOTH, True),
        dict.fromkeys(BOTH | {"broadcast_from_rank0"}, True),
    ):
        _, model, optimizer = make("fsdp", is_frozen=False)
        read = StateDictOptions(**{**flags, "broadcast_from_rank0": False})
        state = get_optimizer_state_dict(model, optimizer, options=read)
        before = copy.deepcopy(optimizer.control_state_dict())
        options = StateDictOptions(**flags)
        with pytest.raises((ValueError, KeyError)) as caught:
            set_optimizer_state_dict(model, optimizer, state, options=options)
        errors.append(str(caught.value))
        assert optimizer.control_state_dict() == before
        runs.train(model, optimizer, 1, 1)
    return errors


def test_options_that_do_not_go_together_are_refused(run_on: Ranks) -> None:
    # On one rank: on several each fails elsewhere in PyTorch, before the optimizer is asked.
    ((broadcast, whole, sent),) = run_on(1)(refusals)
    assert broadcast == "full_state_dict must be True when broadcast_from_rank0 is True."
    assert "param_groups.0.params.0" in whole  # of any optimizer, AdamW too
    assert "found 'a flattened key'" in sent
    assert "leave one of the two out" in sent
