"""What updates may be made of, on sharded models: the bits of one process, saved and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    set_model_state_dict,
    set_optimizer_state_dict,
)

from amo_dist import Fused, Muon, MuonConfig, NorMuon, param_groups
from tests import runs
from tests.distributed import models
from tests.distributed.harness import Ranks
from tests.distributed.test_checkpoint_dcp import state_of

SHAPES = models.shapes(models.EVEN_SHAPES)  # FSDP over TP needs even dims
STEPS, SAVED, SEED = 5, 3, 5
OPTIONS: dict[str, Any] = {"adjust_lr": "original", "cautious_decay": True, "bucket_bytes": 256}
# A matrix for each head, of interleaved rows: pieces are parts of a local tensor.
PATTERNS = {
    r".*wq\.weight": Fused((("attn_q", 16),), heads={"attn_q": 4}),
    r".*w1\.weight": Fused((("mlp_gate", 12), ("mlp_up", 12)), groups=3),
}


def make(layout: str, how: str) -> tuple[nn.Module, Muon]:
    model = models.make_model(layout, SHAPES)
    if how == "NorMuon":  # whose moments have not the parameters' shape
        return model, NorMuon(param_groups(model), lr=1e-2)
    model = model.bfloat16()
    group = dist.group.WORLD if layout == "plain" and dist.is_initialized() else None
    config = MuonConfig(bfloat16_params=how, **OPTIONS)
    groups = param_groups(model, patterns=PATTERNS)
    return model, Muon(groups, lr=3e-3, config=config, process_group=group)


def train(model: nn.Module, optimizer: Muon, first: int, last: int) -> dict[str, Tensor]:
    weights = runs.train(model, optimizer, first, last, seed=SEED)
    rests = {
        f"what is rounded off {name}": models.whole(optimizer.state[param]["rounded_off"])
        for name, param in optimizer.params_by_name.items()
        if "rounded_off" in optimizer.state[param]
    }
    return weights | rests


def run(rank: int, world_size: int, layout: str, how: str) -> dict[str, Tensor]:
    return train(*make(layout, how), 1, STEPS)


def check(results: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    for found in results:
        assert runs.equal(found, expected)


@pytest.mark.parametrize(
    ("layout", "world_size", "how"),
    [("fsdp", 3, "nearest"), ("tp_fsdp", 4, "master"), ("hsdp", 4, "master")],
)
def test_layouts_have_the_bits_of_one_process(
    run_on: Ranks, layout: str, world_size: int, how: str
) -> None:
    expected = train(*make("plain", how), 1, STEPS)
    check(run_on(world_size)(run, layout, how), expected)


def save(rank: int, world_size: int, layout: str, how: str, folder: str) -> dict[str, Tensor]:
    model, optimizer = make(layout, how)
    train(model, optimizer, 1, SAVED)
    dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    return train(model, optimizer, SAVED + 1, STEPS)


def resume(rank: int, world_size: int, layout: str, how: str, folder: str) -> dict[str, Tensor]:
    model, optimizer = make(layout, how)
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return train(model, optimizer, SAVED + 1, STEPS)


@pytest.mark.parametrize(
    ("how", "layout", "ranks", "other", "others"),
    [
        *((how, "fsdp", 2, "tp_fsdp", 4) for how in ("master", "NorMuon")),
        ("NorMuon", "tp_fsdp", 4, "fsdp", 3),
    ],
)
def test_a_checkpoint_goes_on_in_another_layout(
    run_on: Ranks, tmp_path: Path, how: str, layout: str, ranks: int, other: str, others: int
) -> None:
    folder = str(tmp_path / "checkpoint")
    expected = run_on(ranks)(save, layout, how, folder)[0]
    check(run_on(others)(resume, other, how, folder), expected)
