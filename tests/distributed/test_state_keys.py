"""Keys of saved state do not depend on what a rank holds, or has had a gradient of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from amo_dist.distributed.layout import local_tensor
from tests import runs
from tests.distributed import models
from tests.distributed.harness import Ranks

SHAPES = models.shapes()
ONE_ROW = "layers.0.attention.wv.weight"


def save_and_load(rank: int, world_size: int, folder: str, steps: int) -> tuple[list[str], bool]:
    """Keys of this rank, and whether all it saved came back."""
    model, optimizer = runs.make("fsdp", shapes=SHAPES)
    # Never a gradient for a matrix of one row, of which two ranks hold nothing, and for a norm.
    runs.train(model, optimizer, 1, steps, missing=frozenset({ONE_ROW, "norm.weight"}))
    saved: dict[str, Any] = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(saved, checkpoint_id=folder)
    resumed, other = runs.make("fsdp", shapes=SHAPES)
    loaded: dict[str, Any] = {"optimizer": get_optimizer_state_dict(resumed, other)}
    dcp.load(loaded, checkpoint_id=folder)
    set_optimizer_state_dict(resumed, other, loaded["optimizer"])
    came_back = [
        torch.equal(local_tensor(value), local_tensor(optimizer.state[param][key]))
        for twin, param in zip(resumed.parameters(), model.parameters(), strict=True)
        for key, value in other.state[twin].items()
    ]
    assert local_tensor(model.get_parameter(ONE_ROW)).numel() == (8 if rank == 0 else 0)
    state: dict[str, Any] = saved["optimizer"]["state"]
    return sorted(f"{name}.{key}" for name, own in state.items() for key in own), all(came_back)


@pytest.mark.parametrize("steps", [0, 2])
def test_keys_do_not_depend_on_what_a_rank_holds_or_has_seen(
    run_on: Ranks, tmp_path: Path, steps: int
) -> None:
    """State that comes into being with its first gradient, or only where there are rows, gives
    ranks different keys, and a save in which all ranks take part then waits for ever."""
    keys = [f"{name}.momentum_buffer" for name in models.types()]
    for name in SHAPES.keys() - set(models.types()):
        keys += [f"{name}.{key}" for key in ("exp_avg", "exp_avg_sq", "step")]
    assert run_on(3)(save_and_load, str(tmp_path), steps) == [(sorted(keys), True)] * 3
