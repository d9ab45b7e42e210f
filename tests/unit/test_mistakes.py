"""Mistakes of users: the error names the field, says what to write, and nothing has changed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

from amo_dist import AMO, AMOConfig, Muon, MuonConfig, UpdateRule, make_optimizer, param_groups
from amo_dist.engine import step as one_step
from amo_dist.engine.ballot import Ballots
from tests import runs
from tests.distributed import models
from tests.memory import peak_bytes

WQ = runs.WQ


def groups() -> list[dict[str, Any]]:
    return param_groups(models.plain_model(runs.SHAPES))


def ones(*shape: int, **options: Any) -> nn.Parameter:
    return nn.Parameter(torch.ones(*shape, **options), requires_grad=False)


def adamw(param: Any) -> list[dict[str, Any]]:
    return [{"params": [("a", param)], "algorithm": "adamw"}]


def lone(**changes: Any) -> dict[str, Any]:
    """The one group of a matrix."""
    (group,) = param_groups(models.plain_model({WQ: (12, 8)}))
    return {**group, **changes}


class OwnScaleRule(UpdateRule):
    def scale(self, shape: tuple[int, int]) -> float:
        return 1.0


PARAM = nn.Parameter(torch.ones(12, 8))
CONFIG: Any = {"observe_until": 8}
CONV = models.plain_model({"layers.0.conv.weight": (8, 4, 3, 2)}).to(
    memory_format=torch.channels_last
)
BAD: dict[str, Any] = {"adjust_lr": "adamw", "cautious_decay": 1, "bfloat16_params": "kahan"}
NO_CONFIG = "config: found MuonConfig for AdamW, expected"
NEGATIVE = r"groups\[0\]\.muon_lr_factor: found -1.0"
SMALL_EPS = "eps: found 1e-08, .* float16, the dtype of tok"
SCALES = "adjust_lr: found 'original' with .*Rule, which scales"


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: AMO(groups(), config=MuonConfig()), "config: .*config=AMOConfig"),
        (lambda: Muon(groups(), config=CONFIG), "config: found a dict, .*MuonConfig"),
        (lambda: AMO(groups(), momentum=0.9), r"'momentum'.*config=AMOConfig"),
        *((partial(MuonConfig, **{name: value}), f"{name}: found") for name, value in BAD.items()),
        (lambda: OwnScaleRule(MuonConfig(adjust_lr="original")), SCALES),
        (partial(AMOConfig, observe_untill=8), "AMOConfig.*'observe_untill'"),
        (lambda: make_optimizer("Muon", groups(), schedule="pe"), "schedule"),
        (lambda: make_optimizer("Muon-XY", groups()), "name: found 'Muon-XY', .* 'AdamW', 'Muon'"),
        (lambda: make_optimizer("AdamW", groups(), config=MuonConfig()), NO_CONFIG),
        (lambda: make_optimizer("AdamW", [lone(muon_lr_factor=-1.0)]), NEGATIVE),
        (lambda: AMO(groups(), schedule="kj"), "schedule"),
        (lambda: Muon(param_groups(nn.Linear(8, 8))), "params: .*allow_no_matrices"),
        (lambda: Muon([]), "params: .*param_groups"),
        (lambda: Muon([PARAM]), "params: .*param_groups"),
        (lambda: Muon([{"params": [PARAM]}]), "params: found dict without 'algorithm'"),
        (lambda: Muon([lone(algorithm="sgd")]), "algorithm: found 'sgd'"),
        (lambda: Muon([lone(params=[PARAM])]), "params: .*pairs"),
        (lambda: Muon([lone(matrix_views={})]), f"{WQ}: found no matrix view"),
        (lambda: Muon([lone(), lone()]), f"params: found {WQ} more than once"),
        (lambda: Muon([{**adamw(PARAM)[0], "params": [("a", PARAM), ("b", PARAM)]}]), "a and as b"),
        (lambda: Muon([lone(params=[(WQ, PARAM * 1)])]), "non-leaf"),
        (lambda: Muon([lone(params=[(WQ, nn.Parameter(PARAM.to_sparse()))])]), "of layout"),
        (lambda: Muon(adamw(ones(3, 3, dtype=torch.int32))), "a: found"),
        (lambda: Muon(adamw(ones(3, device="meta"))), "a: found a meta"),
        (lambda: Muon(adamw([1.0])), "a: found list"),
        (lambda: Muon(param_groups(models.plain_model(runs.SHAPES).half())), SMALL_EPS),
        (
            lambda: Muon(param_groups(CONV, flatten_conv=True)),
            "conv.weight: .* memory has another order",
        ),
    ],
)
def test_a_mistake_at_construction_is_named(call: Callable[[], object], field: str) -> None:
    with pytest.raises((ValueError, TypeError), match=field):
        call()


def becomes(param: nn.Parameter, data: Tensor) -> None:
    param.grad = None  # that of before has another shape or dtype
    param.data = data


SPARSE = torch.ones(12, 8).to_sparse()
ON_META = r"found torch.float32 \(12, 8\) on meta, expected .* on cpu"


@pytest.mark.parametrize(
    ("mistake", "field"),
    [
        (lambda _, own: own.state.clear(), r"^state of .*\.momentum_buffer: found"),
        (lambda _, own: own.param_groups[0].pop("lr"), r"^groups\[0\].lr: found none"),
        (lambda _, own: own.param_groups[0].update(lr=10**400), r"^groups\[0\].lr: found 1000"),
        (lambda _, own: own.load_state_dict(None), "^state_dict: found None"),
        (lambda _, own: own.load_state_dict({}), "^param_groups: found NoneType, expected a list"),
        (lambda one, _: setattr(one, "grad", SPARSE), f"^{WQ}: found a sparse gradient"),
        (lambda one, _: swap_tensors(one, ones(12, 8, device="meta")), f"^{WQ}: {ON_META}"),
        (
            lambda one, _: becomes(one, one.data.double()),
            f"^{WQ}: found torch.float64",
        ),
        (lambda one, _: becomes(one, one.data[:-1]), rf"^{WQ}: found .*\(11, 8\)"),
    ],
)
def test_a_mistake_in_use_is_named_and_changes_nothing(
    mistake: Callable[[nn.Parameter, Muon], object], field: str
) -> None:
    model, optimizer = runs.make("plain", Muon)
    runs.train(model, optimizer, 1, 2)
    models.set_gradients(model, 1, 3)
    others = {name: param for name, param in model.named_parameters() if name != WQ}
    before = {name: param.detach().clone() for name, param in others.items()}
    with pytest.raises(ValueError, match=field):
        (mistake(model.get_parameter(WQ), optimizer), optimizer.step())
    assert runs.equal(others, before)
    assert optimizer.num_steps_taken == 2


def test_groups_and_state_may_be_other_objects_of_the_same_values() -> None:
    (model, optimizer), twin = runs.make(kind=Muon), runs.make(kind=Muon)
    runs.train(model, optimizer, 1, 2)
    optimizer.param_groups = [dict(group) for group in optimizer.param_groups]
    optimizer.state = {param: dict(own) for param, own in optimizer.state.items()}
    runs.train(*twin, 1, 2)
    for own in (optimizer, twin[1]):
        own.param_groups[0]["lr"] = 0.5
    assert runs.equal(runs.train(model, optimizer, 3, 4), runs.train(*twin, 3, 4))


@pytest.mark.parametrize("kind", [torch.AcceleratorError, MemoryError])
def test_a_lost_device_is_raised_at_once_and_kept_for_no_ballot(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = runs.make("plain", Muon)
    kept: list[object] = []
    monkeypatch.setattr(Ballots, "report_failure", lambda *arguments: kept.append(arguments))
    monkeypatch.setattr(one_step, "advance", mock.Mock(side_effect=kind("lost")))
    is_lost = kind is torch.AcceleratorError
    with pytest.raises(kind) if is_lost else contextlib.nullcontext():
        runs.train(model, optimizer, 1, 1)
    assert len(kept) == (not is_lost)


def test_momentum_of_float64_parameters_is_float64() -> None:
    model, optimizer = runs.make("plain", Muon, dtype=torch.float64, ns_dtype="float64")
    param = model.get_parameter(WQ)
    for each in model.parameters():
        each.grad = torch.ones_like(each) / 3
    optimizer.step()
    # One third in float32 is another number.
    assert torch.equal(optimizer.state[param]["momentum_buffer"], torch.ones_like(param) / 3)


def test_master_weights_are_lent_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 copies of all embeddings and their gradients were a second model in memory."""
    monkeypatch.setattr("amo_dist.engine.step.GROUP_ELEMENTS", 64_000)
    model = nn.ModuleList(nn.Embedding(1000, 64, dtype=torch.bfloat16) for _ in range(8))
    config = MuonConfig(bfloat16_params="master")
    optimizer = Muon(param_groups(model), config=config, allow_no_matrices=True)
    for embedding in model:
        embedding.weight.grad = torch.ones_like(embedding.weight)
    optimizer.step()
    in_float32 = 4 * sum(embedding.weight.numel() for embedding in model)
    # All widened at once took thrice.
    assert peak_bytes(optimizer.step) < in_float32


@pytest.mark.parametrize(
    ("until", "interval"), [(1200, 150), (100, 10), (8, 1), (5, 1), (18, 2), (90, 10)]
)
def test_observations_fit_the_horizon(until: int, interval: int) -> None:
    config = AMOConfig(observe_until=until)
    assert config.interval == config.to_dict()["observe_every"] == interval
