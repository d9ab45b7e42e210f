"""The page's table of optimizer state: bytes per parameter, computed from the state itself."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from amo_dist import AdaMuon, Muon, MuonConfig, NorMuon, param_groups
from tests.examples import ROOT

PAGE = (ROOT / "docs" / "questions.md").read_text()
ROWS = re.findall(r"^\| (matrix|other) \| (.+?) \| (\d+) \| (\d+) \|$", PAGE, re.MULTILINE)
CLASSES: dict[str, type[Muon]] = {"Muon": Muon, "NorMuon": NorMuon, "AdaMuon": AdaMuon}


def bytes_per_parameter(kind: str, title: str, dtype: torch.dtype) -> float:
    """Bytes of state that the optimizer of a row holds per parameter of a matrix, or of AdamW."""
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False, dtype=dtype) for _ in range(2)))
    groups = param_groups(model, patterns={r"0\.weight": "mlp_up", r"1\.weight": "adamw"})
    option = re.search(r'bfloat16_params="(\w+)"', title)
    config: Any = MuonConfig(bfloat16_params=option[1]) if option else MuonConfig()  # type: ignore[arg-type]
    name = next((name for name in CLASSES if f"`{name}" in title), "Muon")
    optimizer = CLASSES[name](groups, config=config)
    weight = model[0 if kind == "matrix" else 1].weight
    state = optimizer.state[weight].values()
    return sum(value.numel() * value.element_size() for value in state) / weight.numel()


@pytest.mark.parametrize("row", ROWS, ids=[f"{kind}: {title}" for kind, title, _, _ in ROWS])
def test_the_table_is_what_the_state_takes(row: tuple[str, str, str, str]) -> None:
    kind, title, *cells = row
    for dtype, cell in zip((torch.float32, torch.bfloat16), cells, strict=True):
        # One number per output of NorMuon and one counter of AdamW stand below the table.
        assert bytes_per_parameter(kind, title, dtype) == pytest.approx(int(cell), abs=0.02)


def test_the_table_has_all_rows() -> None:
    assert len(ROWS) == 8
