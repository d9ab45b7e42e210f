"""What the optimizer accepts as parameter groups."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from amo_dist import Muon, param_groups
from tests.distributed import models
from tests.unit.checkpoint_runs import BAD_RATES

WQ = "layers.0.attention.wq.weight"
PARAM, WHOLE = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(12, 8))


def group(**changes: Any) -> dict[str, Any]:
    (found,) = param_groups(models.plain_model({WQ: (12, 8)}))
    return {**found, **changes}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([], "params: found list, expected the groups that amo_dist"),
        ([PARAM], "params: found Parameter without 'algorithm'"),
        ([{"params": [PARAM]}], "params: found dict without 'algorithm'"),
        ([group(algorithm="sgd")], "algorithm: found 'sgd'"),
        ([group(params=[PARAM])], r"without \(name, parameter\) pairs"),
        ([group(params=[])], r"without \(name, parameter\) pairs"),
        ([group(matrix_views={})], f"{WQ}: found no matrix view"),
        ([group(params=[(WQ, torch.ones(12, 8, device="meta"))])], f"{WQ}: found a meta tensor"),
        ([group(params=[(WQ, torch.ones(12, 8, dtype=torch.int32))])], "found dtype torch.int32"),
        ([group(), group()], f"params: found {WQ} more than once"),
        ([group()] * 2, "some parameters appear in more than one parameter group"),
        ([group(params=[(WQ, WHOLE * 1)])], "can't optimize a non-leaf Tensor"),
    ],
)
def test_other_groups_are_refused_by_name(params: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Muon(params)


@pytest.mark.parametrize(("field", "value", "told"), BAD_RATES)
def test_hyperparameters_of_one_group_are_checked(field: str, value: Any, told: str) -> None:
    other = {**group(), "params": [("norm.weight", PARAM)], "algorithm": "adamw"}
    message = rf"^groups\[1\]\.{field}: found {re.escape(told)}, expected "
    with pytest.raises(ValueError, match=message):
        Muon([group(), {**other, field: value}])


def test_good_hyperparameters_of_one_group_are_kept() -> None:
    changes = {"lr": torch.tensor(0.5), "lr_multiplier": 0, "weight_decay": 0.0, "betas": [0.5, 0]}
    (found,) = Muon([group(**changes)]).param_groups
    assert {key: found[key] for key in changes} == changes


def test_a_sparse_gradient_is_foreign() -> None:
    param = nn.Parameter(torch.ones(3, 4))
    optimizer = Muon(param_groups(models.build({WQ: param})))
    param.grad = torch.ones(3, 4)
    optimizer.step()
    before = param.detach().clone()
    param.grad = torch.ones(3, 4).to_sparse()
    with pytest.raises(ValueError, match=f"{WQ}: found a sparse gradient"):
        optimizer.step()
    assert torch.equal(param, before)
