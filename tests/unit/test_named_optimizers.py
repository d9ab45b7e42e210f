"""Optimizers by name: what each is, the range of its scalar map, the state it keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from amo_dist import AMO, Muon, param_groups
from amo_dist.optimizers.named import make_optimizer
from amo_dist.optimizers.root import ROOT
from amo_dist.schedule.types import MatrixInfo
from tests import runs
from tests.distributed import models


def build(name: str, **kwargs: Any) -> Any:
    return make_optimizer(name, param_groups(models.plain_model(runs.SHAPES)), lr=1e-2, **kwargs)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("adamw", torch.optim.AdamW), ("MUON-kj", Muon), ("Amo", AMO), ("ROOT", ROOT)],
)
def test_a_name_makes_its_class(name: str, kind: type) -> None:
    assert type(build(name)) is kind


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_adamw_honours_multipliers_under_a_scheduler(tensor_lr: bool) -> None:
    groups = param_groups(models.plain_model(runs.SHAPES), lr_multipliers={r".*\.wq\.weight": 0.25})
    groups[-1]["lr"] = 0.5
    scales = [group.get("muon_lr_factor") for group in groups]
    assert sorted(map(str, scales)) == ["0.25", "None", "None"]
    optimizer: Any = make_optimizer("AdamW", groups, torch.tensor(1.0) if tensor_lr else 1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    expected = [0.25 if scale else 1.0 for scale in scales[:-1]] + [0.5]
    assert [float(group["lr"]) for group in optimizer.param_groups] == expected
    optimizer.step()
    scheduler.step()
    halved = [rate / 2 for rate in expected]
    assert [float(group["lr"]) for group in optimizer.param_groups] == halved
    assert not any("muon_lr_factor" in group for group in optimizer.param_groups)


# --- the scalar maps

# Least and greatest value of the five polynomials over [0.003, 1], as their authors state them;
# without its guard Muon-CANS has (0.88, 1.12).
RANGES = {
    "Muon-KJ": (0.68, 1.20),
    "Muon-You": (0.978, 1.145),
    "Muon-PE": (0.87, 1.13),
    "Muon-CANS": (0.84, 1.11),
}


@pytest.mark.parametrize(("name", "low", "high"), [(n, *r) for n, r in RANGES.items()])
def test_scalar_maps(name: str, low: float, high: float) -> None:
    source = build(name).source
    source.bind([MatrixInfo("w", (8, 6), "attn_q")])
    schedule = source.schedules(1)["attn_q"]
    points = [0.003 ** (1 - i / 20000) for i in range(20001)]  # log-spaced, 1 included
    values = [schedule.image(x / schedule.norm_scale) for x in points]
    digits = 3 if name == "Muon-You" else 2
    assert round(min(values), digits) == low
    assert round(max(values), digits) == high
