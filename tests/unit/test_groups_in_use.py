"""Parameter groups in use: hyperparameters that move, keys that nothing reads, no matrices.

Whatever changes there is followed, or refused before the next step; nothing is passed over.
"""

from __future__ import annotations

import copy
import logging
import re
from typing import Any

import pytest
import torch
from torch import nn

from amo_dist import (
    AMO,
    OPTIMIZER_NAMES,
    AdaMuon,
    AMOConfig,
    Muon,
    NorMuon,
    make_optimizer,
    param_groups,
)
from amo_dist.optimizers.root import ROOT
from tests import runs
from tests.distributed import models
from tests.runs import NORM, SHAPES, W1, WQ

BAD_RATES = [
    ("lr", float("nan"), "nan"),
    ("lr", torch.tensor(torch.nan), "tensor(nan)"),
    ("lr", torch.ones(2), "tensor([1., 1.])"),
    ("muon_lr_factor", -0.5, "-0.5"),
    ("muon_lr_factor", "0.1", "'0.1'"),
    ("weight_decay", float("inf"), "inf"),
    ("betas", (0.9, 1.0), "(0.9, 1.0)"),
    ("betas", 0.9, "0.9"),
    ("momentum", 1.0, "1.0"),
    ("momentum", None, "None"),
    ("nesterov", 10.5, "10.5"),
    ("beta2", 1.0, "1.0"),
]
"""A field of a parameter group, what no training can mean, and how the error shows it."""

# ---------------------------------------------------------------- no matrices


@pytest.mark.parametrize("name", ["Muon", "AMO", "NorMuon"])
def test_with_leave_adamw_trains_all(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    twin = copy.deepcopy(model)
    options = {"lr": 1e-2, "weight_decay": 0.1}
    optimizer = make_optimizer(name, param_groups(model), **options, allow_no_matrices=True)
    expected = torch.optim.AdamW(twin.parameters(), betas=(0.9, 0.95), **options)
    runs.train(model, optimizer, 1, 5)
    optimizer.load_state_dict(optimizer.state_dict())
    assert runs.equal(runs.train(model, optimizer, 6, 9), runs.train(twin, expected, 1, 9))


# ---------------------------------------------------------------- keys


def test_an_unknown_key_is_refused() -> None:
    groups, message = param_groups(models.plain_model(SHAPES)), r"^groups\[1\]\.momentm: found "
    for name in OPTIMIZER_NAMES:
        with pytest.raises(ValueError, match=message):
            make_optimizer(name, [groups[0], {**groups[1], "momentm": 0.5}])
    model, optimizer = runs.make(kind=Muon)
    runs.train(model, optimizer)
    optimizer.param_groups[1]["momentm"] = 0.5  # a note of a wrapper
    runs.train(model, optimizer)
    off = {"foreach": None, "fused": None, "capturable": False, "maximize": False}
    groups = param_groups(model)
    Muon([groups[0], groups[1] | off])
    with pytest.raises(ValueError, match=r"^groups\[1\]\.maximize: found True, expected false"):
        Muon([groups[0], groups[1] | {"maximize": True}])


@pytest.mark.parametrize(("field", "value", "shown"), BAD_RATES)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_rate_that_means_nothing_is_refused_before_anything_changes(
    steps: int, field: str, value: Any, shown: str
) -> None:
    model, optimizer = runs.make(kind=NorMuon)
    runs.train(model, optimizer, 1, steps)
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0][field] = value
    group, rest = param_groups(model)
    good = dict(optimizer.param_groups[0])
    before = runs.everything(model, optimizer)

    def step() -> None:
        optimizer.param_groups[0][field] = value
        runs.train(model, optimizer)

    for use in (
        lambda: NorMuon([{**group, field: value}, rest]),
        lambda: optimizer.load_state_dict(state),
        step,
    ):
        message = rf"groups\[0\]\.{field}: found {re.escape(shown)}, expected "
        with pytest.raises(ValueError, match=message):
            use()
        assert all(map(torch.equal, runs.everything(model, optimizer), before))
    del optimizer.param_groups[0][field]
    optimizer.param_groups[0].update(good)
    runs.train(model, optimizer)


def test_a_rate_on_a_device_is_not_read() -> None:
    """The host would wait at each step; on ``meta`` a read raises."""
    model = models.plain_model(SHAPES)
    groups = [{**group, "lr": torch.tensor(1e-3, device="meta")} for group in param_groups(model)]
    Muon(groups)
    with pytest.raises(ValueError, match=r"^groups\[0\]\.lr: found "):
        Muon([{**groups[0], "lr": torch.ones(2, device="meta")}, groups[1]])


@pytest.mark.parametrize("kind", [AdaMuon, AMO])
@pytest.mark.parametrize("changes", [{"momentum": 0.5}, {"nesterov": 2.0}])
def test_momentum_of_a_group_is_that_of_the_settings(
    kind: type[Muon], changes: dict[str, Any]
) -> None:
    (model, optimizer), twin = runs.make(kind=kind), runs.make(kind=kind, **changes)
    for group in optimizer.param_groups:
        group.update(changes)
    assert runs.equal(runs.train(model, optimizer), runs.train(*twin))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lr", 3e-2),
        ("lr", torch.tensor(2.0**-5)),
        ("muon_lr_factor", 0.5),
        ("weight_decay", 0.5),
        ("weight_decay", torch.tensor(0.5)),
        ("betas", (0.5, 0.75)),
        ("eps", 1e-2),
        ("momentum", 0.5),
        ("nesterov", False),
    ],
)
def test_what_moves_in_a_group_moves_the_step(key: str, value: Any) -> None:
    model, optimizer = runs.make(kind=Muon)
    runs.train(model, optimizer)
    still, unmoved = copy.deepcopy((model, optimizer))
    runs.train(still, unmoved, 4, 4)
    for group in optimizer.param_groups:
        group[key] = value
    runs.train(model, optimizer, 4, 4)
    moves_matrices = key not in ("betas", "eps")
    moves_rest = key not in ("momentum", "nesterov")
    assert torch.equal(model.get_parameter(WQ), still.get_parameter(WQ)) == (not moves_matrices)
    assert torch.equal(model.get_parameter(NORM), still.get_parameter(NORM)) == (not moves_rest)


def test_notes_of_schedulers_and_users_are_no_unknown_keys(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = models.plain_model(SHAPES)
    first, second = param_groups(model)
    groups = [{**first, "name": "matrices"}, {**second, "name": "rest"}]
    optimizer = AMO(groups, config=AMOConfig(**runs.PHASES))
    optimizer.param_groups[0]["param_names"] = [WQ, W1]
    torch.optim.swa_utils.SWALR(optimizer, swa_lr=1e-3)
    with caplog.at_level(logging.WARNING):
        runs.train(model, optimizer, 1, 8)
    assert optimizer.phase == "locked"
    assert not caplog.records


# ---------------------------------------------------------------- optimizers by name


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
