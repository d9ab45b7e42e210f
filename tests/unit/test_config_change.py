"""Resuming with other settings: an error, those of the checkpoint, or another plan."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.unit.checkpoint_runs import STEPS, everything, make, refusal, save, train

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
    _, optimizer = make(bucket_bytes=512, ownership="balanced", nonfinite="skip_step")
    optimizer.load_state_dict(saved)
    assert optimizer.config.bucket_bytes == 512


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


def test_keep_checkpoint_cannot_change_the_dtype_of_momentum(saved: dict[str, Any]) -> None:
    message = refusal(saved, momentum_dtype="float64", on_config_change="keep_checkpoint")
    assert "control.config.momentum_dtype: found 'float32', expected 'float64'" in message


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


def test_replan_drops_observations_of_other_groups(saved: dict[str, Any]) -> None:
    model, optimizer = make(granularity="matrix", on_config_change="replan")
    optimizer.load_state_dict(saved)
    train(model, optimizer, 6, 9)
    (seen,) = optimizer.control_state_dict()["policy"]["observations"]
    assert seen["step"] == 6
    assert len(seen["ell"]) == 3
