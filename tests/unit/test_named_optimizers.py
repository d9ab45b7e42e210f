"""Optimizers by name: what each is, the range of its scalar map, the state it keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from amo_dist import AMO, AMOConfig, Muon, MuonConfig, NorMuon, param_groups
from amo_dist.kernels.newton_schulz import orthogonalize
from amo_dist.optimizers.adamuon import AdaMuon
from amo_dist.optimizers.named import MUON_SCHEDULES, OPTIMIZER_NAMES, make_optimizer
from amo_dist.optimizers.root import ROOT, fit
from amo_dist.schedule.coefficients import named_schedule
from amo_dist.schedule.types import MatrixInfo, Schedule
from tests.distributed import models

FAMILY = tuple(name for name in OPTIMIZER_NAMES if name != "AdamW")


def model() -> nn.Module:
    return models.plain_model(models.shapes())


def build(name: str, root: nn.Module, **kwargs: Any) -> Any:
    return make_optimizer(name, param_groups(root), lr=1e-2, **kwargs)


def schedule_of(name: str, shape: tuple[int, int]) -> Schedule:
    """What an optimizer applies to a matrix of a shape in its first step."""
    if name == "ROOT":
        return Schedule((fit(shape),) * 5, norm_scale=1.0)
    source = build(name, model()).source
    source.bind([MatrixInfo("w", shape, "attn_q")])
    return source.schedules(1)["attn_q"]


def test_the_names() -> None:
    muons = ("Muon", "Muon-KJ", "Muon-You", "Muon-PE", "Muon-CANS", "Muon-Turbo")
    assert tuple(MUON_SCHEDULES) == muons
    assert sorted(OPTIMIZER_NAMES) == sorted(["AdamW", *muons, "AdaMuon", "NorMuon", "ROOT", "AMO"])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("AdamW", torch.optim.AdamW),
        *((name, Muon) for name in MUON_SCHEDULES),
        ("AdaMuon", AdaMuon),
        ("NorMuon", NorMuon),
        ("ROOT", ROOT),
        ("AMO", AMO),
        ("adamw", torch.optim.AdamW),
        ("MUON-kj", Muon),
        ("Amo", AMO),
    ],
)
def test_a_name_makes_its_class(name: str, kind: type) -> None:
    assert type(build(name, model())) is kind


@pytest.mark.parametrize(
    ("name", "table"), [*MUON_SCHEDULES.items(), ("AdaMuon", "kj"), ("NorMuon", "kj")]
)
def test_a_name_stands_for_its_table(name: str, table: str) -> None:
    assert schedule_of(name, (8, 6)) == named_schedule(table).schedule


def test_an_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(ValueError, match="name: found None, expected one of"):
        build(None, model())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="name: found 'Muon-XY', expected one of 'AdamW', 'Muon'"):
        build("Muon-XY", model())


@pytest.mark.parametrize(
    ("name", "config"),
    [("AMO", MuonConfig()), ("Muon-PE", AMOConfig()), ("AdamW", MuonConfig())],
)
def test_the_config_of_another_optimizer_is_refused(name: str, config: MuonConfig) -> None:
    with pytest.raises(ValueError, match=rf"config: found \w+ for {name}, expected"):
        build(name, model(), config=config)


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_adamw_honours_multipliers_under_a_scheduler(tensor_lr: bool) -> None:
    root = model()
    groups = param_groups(root, lr_multipliers={r".*\.wq\.weight": 0.25})
    groups[-1]["lr"] = 0.5
    scales = [group.get("lr_multiplier") for group in groups]
    assert sorted(map(str, scales)) == ["0.25", "None", "None"]
    optimizer: Any = make_optimizer("AdamW", groups, torch.tensor(1.0) if tensor_lr else 1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    expected = [0.25 if scale else 1.0 for scale in scales[:-1]] + [0.5]
    assert [float(group["lr"]) for group in optimizer.param_groups] == expected
    optimizer.step()
    scheduler.step()
    halved = [rate / 2 for rate in expected]
    assert [float(group["lr"]) for group in optimizer.param_groups] == halved
    assert not any("lr_multiplier" in group for group in optimizer.param_groups)


def test_a_bad_rate_of_a_group_is_refused_by_adamw_too() -> None:
    groups = param_groups(model())
    groups[1]["lr_multiplier"] = -1.0
    with pytest.raises(ValueError, match=r"groups\[1\]\.lr_multiplier: found -1.0"):
        make_optimizer("AdamW", groups)


@pytest.mark.parametrize("name", OPTIMIZER_NAMES)
def test_state_is_that_of_its_class(name: str) -> None:
    """Two values a parameter for AdamW and AdaMuon, else one for each entry of a matrix.

    NorMuon keeps one more for each row.
    """
    root = model()
    optimizer = build(name, root)
    models.set_gradients(root, 0, 1)
    optimizer.step()
    sizes = {key: param.numel() for key, param in root.named_parameters()}
    total, matrices = sum(sizes.values()), sum(sizes[key] for key in models.types())
    expected = 2 * total if name in ("AdamW", "AdaMuon") else matrices + 2 * (total - matrices)
    if name == "NorMuon":
        expected += sum(root.get_parameter(key).shape[0] for key in models.types())
    found = sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if value.dim() > 0  # counters of steps aside
    )
    assert found == 4 * expected


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
    schedule = schedule_of(name, (8, 6))
    values = []
    num_points = 20000
    for i in range(num_points + 1):
        x = 0.003 ** (1 - i / num_points) / schedule.norm_scale  # log-spaced, 1 included
        for a, b, c in schedule.coefficients:
            x = a * x + b * x**3 + c * x**5
        values.append(x)
    digits = 3 if name == "Muon-You" else 2
    assert round(min(values), digits) == low
    assert round(max(values), digits) == high


@pytest.mark.parametrize("name", ["Muon-Turbo", *(n for n in FAMILY if n != "Muon-Turbo")])
@pytest.mark.parametrize("shape", [(32, 32), (24, 80), (80, 24)])
@pytest.mark.parametrize("noise", [0.0, 1e-3, 1e-2])
def test_the_dominant_direction_keeps_its_sign(
    name: str, shape: tuple[int, int], noise: float
) -> None:
    """A matrix close to rank one; a table used without its preconditioner turns it round."""
    generator = torch.Generator().manual_seed(1)
    u, v = (torch.randn(size, generator=generator) for size in shape)
    u, v = u / u.norm(), v / v.norm()
    x = torch.outer(u, v) + noise * torch.randn(shape, generator=generator) / shape[0] ** 0.5
    schedule = schedule_of(name, shape)
    for dtype in (torch.float32, torch.bfloat16):
        result = orthogonalize(
            x,
            schedule.coefficients,
            norm_scale=schedule.norm_scale,
            preconditioner=schedule.preconditioner,
            dtype=dtype,
        )
        # The tables keep singular values near one between 0.68 and 1.27; bf16 adds percents.
        assert 0.6 < (u @ result.float() @ v).item() < 1.4
