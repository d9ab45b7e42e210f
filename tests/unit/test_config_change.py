"""Resuming with other settings: an error, those of the checkpoint, or another plan."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from amo_dist import Muon, MuonConfig, param_groups
from amo_dist.optimizers.named import make_optimizer
from amo_dist.state import control as controls
from tests.distributed import models
from tests.unit.checkpoint_runs import SHAPES, STEPS, everything, make, refusal, save, train

NEW = {"observe_until": 6, "observe_every": 3, "transition_steps": 2}


@pytest.fixture(scope="module")
def saved() -> dict[str, Any]:
    return save()


def test_a_change_is_an_error_that_names_every_field(saved: dict[str, Any]) -> None:
    message = refusal(saved, **NEW)
    for part in (
        "observe_every: the checkpoint has 2, this run has 3",
        "observe_until: the checkpoint has 4, this run has 6",
        "transition_steps: the checkpoint has 3, this run has 2",
        "'keep_checkpoint' or 'replan'",
    ):
        assert part in message


def test_what_only_says_how_may_change(saved: dict[str, Any]) -> None:
    free = {"bucket_bytes": 512, "ownership": "balanced", "nonfinite": "skip_step"}
    _, optimizer = make(**free)
    optimizer.load_state_dict(saved)
    assert (optimizer.config.bucket_bytes, optimizer.config.ownership) == (512, "balanced")


def test_keep_checkpoint_goes_on_as_if_nothing_had_changed(
    saved: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = make()
    train(model, optimizer, 1, 5)
    resumed, other = make(**NEW, momentum=0.8, on_config_change="keep_checkpoint")
    other.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(model.state_dict())
    assert "those of the checkpoint stay in force" in caplog.text
    assert (other.config.observe_until, other.config.momentum) == (4, 0.95)
    train(model, optimizer, 6, STEPS)
    train(resumed, other, 6, STEPS)
    assert all(map(torch.equal, everything(resumed, other), everything(model, optimizer)))
    assert other.control_state_dict()["policy"] == optimizer.control_state_dict()["policy"]


@pytest.mark.parametrize("saved_at", [0, 1, 2, 3, 4, 5, 6, 7, 9])
def test_replan_observes_once_more_and_plans_with_the_new_settings(
    saved_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = make()
    train(model, optimizer, 1, saved_at)
    old = [seen["step"] for seen in optimizer.control_state_dict()["policy"]["observations"]]
    resumed, other = make(**NEW, on_config_change="replan")
    other.load_state_dict(optimizer.state_dict())
    assert "those of this run are in force" in caplog.text
    # At or after step 6, the new observe_until, and after one more observation.
    plan_at = max(6, (saved_at // 3 + 1) * 3)
    phases = []
    for step in range(saved_at + 1, plan_at + 3):
        # Saved and loaded at every step, the phases are the same.
        other.load_state_dict(copy.deepcopy(other.state_dict()))
        train(resumed, other, step, step)
        phases.append(other.phase)
    assert phases == ["observation"] * (plan_at - saved_at) + ["transition", "locked"]
    seen = [found["step"] for found in other.control_state_dict()["policy"]["observations"]]
    assert seen == [*old, *range((saved_at // 3 + 1) * 3, plan_at + 1, 3)]


# ---------------------------------------------------------------- the rest of the family

FAMILY = ("Muon", "Muon-CANS", "AdaMuon", "NorMuon", "ROOT")
OTHER = {"momentum": 0.8, "ns_guard_every": 7}


def make_named(name: str, **fields: Any) -> tuple[nn.Module, Muon]:
    model = models.plain_model(SHAPES)
    config = MuonConfig(**{"ns_dtype": "float32", **fields})
    return model, make_optimizer(name, param_groups(model), lr=1e-2, config=config)  # type: ignore[return-value]


@pytest.mark.parametrize("rule", ["keep_checkpoint", "replan"])
@pytest.mark.parametrize("name", FAMILY)
def test_every_optimizer_goes_on_with_other_settings(
    name: str, rule: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = make_named(name)
    train(model, optimizer, 1, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    _, other = make_named(name, **OTHER)
    with pytest.raises(
        ValueError, match=r"momentum: the checkpoint has 0\.95, this run has 0\.8; "
    ):
        other.load_state_dict(saved)
    assert other.num_steps_taken == 0
    resumed, other = make_named(name, **OTHER, on_config_change=rule)
    other.load_state_dict(saved)
    assert "settings have changed" in caplog.text
    resumed.load_state_dict(model.state_dict())
    # The twin never stopped: it has the settings that stay in force, and loads without a change.
    free = {"ns_guard_every": 7, "on_config_change": rule}
    fields = free if rule == "keep_checkpoint" else {**OTHER, **free}
    twin, expected = make_named(name, **fields)
    assert other.config.to_dict() == expected.config.to_dict()
    record = optimizer.control_state_dict()
    saved["param_groups"] = [
        {**group, "control": controls.to_text({**record, "config": expected.config.to_dict()})}
        for group in saved["param_groups"]
    ]
    expected.load_state_dict(saved)
    twin.load_state_dict(model.state_dict())
    train(resumed, other, 4, 6)
    train(twin, expected, 4, 6)
    assert all(map(torch.equal, everything(resumed, other), everything(twin, expected)))


def test_keep_checkpoint_cannot_change_what_shapes_state() -> None:
    _, optimizer = make_named("NorMuon")
    fields = {"bfloat16_params": "master", "on_config_change": "keep_checkpoint"}
    _, other = make_named("NorMuon", **fields)
    found = r"control\.config\.bfloat16_params: found .*state has been made"
    with pytest.raises(ValueError, match=found):
        other.load_state_dict(optimizer.state_dict())


def test_replan_takes_other_coefficients() -> None:
    _, optimizer = make_named("Muon")
    saved = optimizer.state_dict()
    for rule in ("error", "keep_checkpoint"):
        _, other = make_named("Muon-PE", on_config_change=rule)
        with pytest.raises(ValueError, match="coefficients have changed; set on_config_change to"):
            other.load_state_dict(saved)
    _, other = make_named("Muon-PE", on_config_change="replan")
    other.load_state_dict(saved)
    found = other.control_state_dict()["policy"]
    assert found == make_named("Muon-PE")[1].control_state_dict()["policy"]
