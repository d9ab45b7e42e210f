"""Optimizers by name: what each is, the range of its scalar map, the state it keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from amo_dist import AMO, Muon, param_groups
from amo_dist.optimizers.named import make_optimizer
from amo_dist.optimizers.root import ROOT
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
