"""Checkpoints of torchtitan 0.2.2: their names, and what cannot be taken on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from torchtitan_ext.plugin.old_checkpoints import load, old_name

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

LAYER = "layers.0.attention."


@pytest.mark.parametrize(
    ("now", "then"),
    [
        ("lm_head.weight", "output.weight"),
        (f"{LAYER}qkv_linear.wq.weight", f"{LAYER}wq.weight"),
        ("optimizer.state.lm_head.weight.exp_avg", "optimizer.state.output.weight.exp_avg"),
        (
            f"optimizer.param_groups.{LAYER}qkv_linear.wk.weight.lr",
            f"optimizer.param_groups.{LAYER}wk.weight.lr",
        ),
        (f"{LAYER}wo.weight", f"{LAYER}wo.weight"),
        (f"{LAYER}q_norm.weight", f"{LAYER}q_norm.weight"),
        ("dataloader.stream_0", "dataloader.stream_0"),
    ],
)
def test_names(now: str, then: str) -> None:
    assert old_name(now) == then


def saved(folder: Path, *keys: str) -> str:
    save({key: torch.arange(4.0) for key in keys}, checkpoint_id=folder)
    return str(folder)


def test_both_names_are_found(tmp_path: Path) -> None:
    path = saved(tmp_path, "output.weight", f"{LAYER}qkv_linear.wq.weight", "norm.weight")
    found = {key: torch.zeros(4) for key in ("lm_head.weight", f"{LAYER}qkv_linear.wq.weight")}
    load(found, path)
    for value in found.values():
        assert torch.equal(value, torch.arange(4.0))


@pytest.mark.parametrize(
    ("then", "now", "told"),
    [
        (
            f"optimizer.state.{LAYER}wq.weight.momentum_buffer",
            f"optimizer.state.{LAYER}qkv_linear.wqkv.weight.momentum_buffer",
            "model.fuse_qkv = false",
        ),
        (
            "layers.1.moe.experts.w1",
            "layers.1.moe.routed_experts.inner_experts.w1_EFD",
            "mixtures of experts of torchtitan 0.2.2",
        ),
        ("norm.weight", "optimizer.state.norm.weight.exp_avg", "it holds weights alone"),
        (
            "optimizer.state.norm.weight.momentum_buffer",
            "optimizer.state.norm.weight.exp_avg",
            "another model, optimizer",
        ),
    ],
)
def test_what_cannot_be_taken_on_is_told(tmp_path: Path, then: str, now: str, told: str) -> None:
    path = saved(tmp_path, then)
    with pytest.raises(ValueError, match=told) as error:
        load({now: torch.zeros(4)}, path)
    assert now in str(error.value)
    assert str(tmp_path) in str(error.value)
