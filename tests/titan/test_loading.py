"""A checkpoint that does not fit is named, with what it lacks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from torchtitan_ext.plugin.loading import load


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_what_a_checkpoint_lacks_is_told(tmp_path: Path) -> None:
    save({"norm.weight": torch.arange(4.0)}, checkpoint_id=tmp_path)
    key = "optimizer.state.norm.weight.exp_avg"
    with pytest.raises(ValueError, match=rf"^checkpoint {tmp_path}: .*{key}.* holds weights alone"):
        load({"norm.weight": torch.zeros(4), key: torch.zeros(4)}, str(tmp_path))
