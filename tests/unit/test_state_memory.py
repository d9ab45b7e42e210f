"""The page's table of optimizer state: bytes per parameter, computed from the state itself."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from amo_dist import AMO, ROOT, AdaMuon, AMOConfig, Muon, MuonConfig, NorMuon, param_groups
from tests.examples import ROOT as FOLDER

PAGE = (FOLDER / "docs" / "questions.md").read_text()
ROWS = re.findall(r"^\| (matrix|other) \| (.+?) \| (\d+) \| (\d+) \|$", PAGE, re.MULTILINE)
CLASSES: dict[str, type[Muon]] = {cls.__name__: cls for cls in (Muon, AMO, ROOT, NorMuon, AdaMuon)}


@pytest.mark.parametrize("row", ROWS, ids=[f"{kind}: {title}" for kind, title, _, _ in ROWS])
def test_the_table_is_what_the_state_takes(row: tuple[str, str, str, str]) -> None:
    kind, title, *cells = row
    option = re.search(r'bfloat16_params="(\w+)"', title)
    fields: Any = {"bfloat16_params": option[1]} if option else {}
    for cls in [cls for name, cls in CLASSES.items() if f"`{name}" in title] or [Muon]:
        for dtype, cell in zip((torch.float32, torch.bfloat16), cells, strict=True):
            model = nn.Sequential(*(nn.Linear(256, 256, bias=False, dtype=dtype) for _ in range(2)))
            groups = param_groups(model, patterns={r"0\.weight": "mlp_up", r"1\.weight": "adamw"})
            config = AMOConfig(**fields) if cls is AMO else MuonConfig(**fields)
            optimizer = cls(groups, config=config)
            weight = model[0 if kind == "matrix" else 1].weight
            state = optimizer.state[weight].values()
            num_bytes = sum(value.numel() * value.element_size() for value in state)
            # One number per output of NorMuon and one counter of AdamW stand below the table.
            expected = pytest.approx(int(cell), abs=0.02)
            assert num_bytes / weight.numel() == expected, cls.__name__


def test_the_table_has_all_rows() -> None:
    assert len(ROWS) == 6
