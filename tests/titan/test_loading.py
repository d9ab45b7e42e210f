"""What is told of a checkpoint that does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from torchtitan_ext.plugin.loading import load

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

LAYER = "layers.0.attention."


def saved(folder: Path, *keys: str) -> str:
    save({key: torch.arange(4.0) for key in keys}, checkpoint_id=folder)
    return str(folder)


@pytest.mark.parametrize(
    ("then", "now", "told"),
    [
        (
            f"optimizer.state.{LAYER}wq.weight.momentum_buffer",
            f"optimizer.state.{LAYER}qkv_linear.wqkv.weight.momentum_buffer",
            "model.fuse_qkv = false",
        ),
        ("norm.weight", "optimizer.state.norm.weight.exp_avg", "it holds weights alone"),
        (
            "optimizer.state.norm.weight.momentum_buffer",
            "optimizer.state.norm.weight.exp_avg",
            "another model, optimizer",
        ),
    ],
)
def test_what_a_checkpoint_lacks_is_told(tmp_path: Path, then: str, now: str, told: str) -> None:
    path = saved(tmp_path, then)
    with pytest.raises(ValueError, match=told) as error:
        load({now: torch.zeros(4)}, path)
    assert now in str(error.value)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    ("steps", "remedy"),
    [
        ((3, 6), r"--checkpoint\.load_step 6 goes on from the one before it"),
        ((), "expected another dump_folder, with these weights as checkpoint.initial_load_path"),
    ],
)
def test_weights_of_a_finished_run_name_the_option_that_goes_on(
    tmp_path: Path, steps: tuple[int, ...], remedy: str
) -> None:
    for step in steps:
        saved(tmp_path / f"step-{step}", "norm.weight", "optimizer.state.norm.weight.exp_avg")
    path = saved(tmp_path / "step-9", "norm.weight")
    with pytest.raises(ValueError, match=remedy):
        load({"optimizer.state.norm.weight.exp_avg": torch.zeros(4)}, path)
