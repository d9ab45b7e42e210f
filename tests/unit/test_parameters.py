"""What the optimizer accepts as parameter groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from amo_dist import Muon, param_groups
from amo_dist.parameters import gradient_is_foreign
from tests.distributed import models

WQ = "layers.0.attention.wq.weight"
PARAM = nn.Parameter(torch.ones(3, 4))


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
    ],
)
def test_other_groups_are_refused_by_name(params: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Muon(params)


def test_a_sparse_gradient_is_foreign() -> None:
    param = nn.Parameter(torch.ones(3, 4))
    assert not gradient_is_foreign(param)
    param.grad = torch.ones(3, 4)
    assert not gradient_is_foreign(param)
    param.grad = torch.ones(3, 4).to_sparse()
    assert gradient_is_foreign(param)
