"""What people get wrong in the first hour, and the line that the error tells them to write."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from amo_dist import AMO, AMOConfig, Fused, Muon, MuonConfig, param_groups
from tests.distributed import models
from tests.unit.in_use import SHAPES, muon, train


def groups() -> list[dict[str, Any]]:
    return param_groups(models.plain_model(SHAPES))


@pytest.mark.parametrize("config", [MuonConfig(), {"observe_until": 8}, "amo"])
def test_a_config_of_another_kind_is_named(config: Any) -> None:
    expected = rf"config: found a {type(config).__name__}, expected an AMOConfig: config=AMOConfig"
    with pytest.raises(ValueError, match=expected):
        AMO(groups(), config=config)
    if not isinstance(config, MuonConfig):
        with pytest.raises(ValueError, match=r"config: found a .*, expected an MuonConfig"):
            Muon(groups(), config=config)


def test_a_setting_given_as_an_argument_points_to_the_config() -> None:
    found = r"\['momentum', 'ns_steps'\].*: config=AMOConfig\(momentum=0\.9, base_steps=6\)"
    with pytest.raises(TypeError, match=found):
        AMO(groups(), momentum=0.9, ns_steps=6)
    with pytest.raises(TypeError, match=r"\['nesterov'\].*: config=MuonConfig\(nesterov=False\)"):
        Muon(groups(), nesterov=False)
    with pytest.raises(TypeError, match=r"\['ns_steps'\]; the schedule says how many steps"):
        Muon(groups(), ns_steps=5)


@pytest.mark.parametrize(
    ("until", "interval"), [(1200, 150), (100, 10), (8, 1), (5, 1), (97, 97), (18, 2), (90, 10)]
)
def test_observations_fit_the_horizon(until: int, interval: int) -> None:
    config = AMOConfig(observe_until=until)
    assert config.interval == config.to_dict()["observe_every"] == interval
    assert AMOConfig(**config.to_dict()).interval == interval
    with pytest.raises(
        ValueError, match=rf"observe_every: found 7, expected a divisor of .* {until}"
    ):
        AMOConfig(observe_until=until, observe_every=7)


def test_float16_under_adamw_blames_eps() -> None:
    model = models.plain_model(SHAPES).half()
    with pytest.raises(
        ValueError, match=r"eps: found 1e-08, which is 0 in float16, the dtype of tok"
    ):
        Muon(param_groups(model))
    train(model, muon(model, eps=1e-4))
    assert all(param.isfinite().all() for param in model.parameters())


def test_fused_queries_keys_and_values_are_suggested_as_such() -> None:
    shapes = {"blocks.0.qkv.weight": (96, 32), "blocks.0.to_qkv.weight": (48, 32)}
    shapes["blocks.0.proj.weight"] = (32, 32)
    model = models.plain_model(shapes)
    with pytest.raises(ValueError, match=r"found 3 matrices .* blocks\.0\.qkv\.weight") as at:
        param_groups(model)
    pasted = patterns_of(str(at.value))
    third, grouped = (
        Fused((("attn_q", 32), ("attn_k", size), ("attn_v", size))) for size in (32, 8)
    )
    assert [*pasted.values()] == [third, grouped, "blocks_proj"]
    assert Muon(param_groups(model, patterns=pasted)).operator_types[:3] == (
        *("attn_q", "attn_k", "attn_v"),
    )


@pytest.mark.parametrize(
    ("model", "types"),
    [
        (nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), {"matrix"}),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)), {"matrix"}),
        (
            nn.ModuleDict(
                {"rnn": nn.LSTM(8, 8), "embed": nn.Embedding(9, 8), "head": nn.Linear(8, 9)}
            ),
            {"rnn_weight_ih_l0", "rnn_weight_hh_l0"},
        ),
    ],
    ids=["mlp", "convolutions", "lstm"],
)
def test_a_model_without_blocks_gets_patterns_to_paste(model: nn.Module, types: set[str]) -> None:
    with pytest.raises(ValueError, match=r"found no matrix among .* To paste and to edit:") as at:
        Muon(param_groups(model))
    assert (
        set(Muon(param_groups(model, patterns=patterns_of(str(at.value)))).operator_types) == types
    )


def patterns_of(error: str) -> dict[str, Any]:
    """The patterns that an error has to paste."""
    text = error[error.index("from amo_dist") :]
    variables: dict[str, Any] = {}
    exec(text[: text.index("\n}") + 2], variables)
    patterns: dict[str, Any] = variables["patterns"]
    return patterns
