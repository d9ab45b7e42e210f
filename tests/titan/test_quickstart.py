from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from amo_dist import AMOConfig
from amo_dist.schedule.planning import plan_allocation
from torchtitan_ext.config import values
from torchtitan_ext.config.files import fields
from torchtitan_ext.plugin.trainer import Trainer
from torchtitan_ext.runs import folder as runs
from torchtitan_ext.tools import quickstart


@pytest.mark.parametrize(
    ("steps", "expected"), [(7, "The plan"), (8, "The plan, locked at step 8")]
)
def test_a_plan_is_said_to_be_locked_once_it_is(steps: int, expected: str) -> None:
    amo = AMOConfig(observe_until=4, observe_every=2, transition_steps=4)
    config = SimpleNamespace(
        optimizer=SimpleNamespace(amo=amo), training=SimpleNamespace(steps=steps)
    )
    assert quickstart._plan_title(config) == expected


def test_the_summary_shows_what_the_plan_gains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_allocation(AMOConfig.paper(), {"attn_q": 3e-4, "attn_k": 1e-2})
    (tmp_path / "plan.json").write_text(plan.to_json())
    amo = AMOConfig(observe_until=4, observe_every=2, transition_steps=4)
    config = SimpleNamespace(
        dump_folder=str(tmp_path),
        metrics=SimpleNamespace(enable_tensorboard=False),
        optimizer=SimpleNamespace(amo=amo),
        training=SimpleNamespace(steps=9),
    )
    quickstart._summarize(config, tmp_path / "checkpoint")
    shown = capsys.readouterr().out
    assert f"The plan, locked at step 8:\n{plan!s}\n" in shown
    assert f"projected error {plan.objective:.5f} (uniform: {plan.uniform_objective:.5f}," in shown


def test_a_run_goes_on_with_the_config_that_it_had() -> None:
    config = {
        "dump_folder": "a",
        "dataloader": {"dataset": "stdlib", "seed": 42},
        "model_spec": {"at": "0x1"},
        "training": {"steps": 5},
    }
    moved = {**config, "dump_folder": "b", "model_spec": {"at": "0x2"}}
    assert runs.changes(config, moved) == []
    longer = {**config, "training": {"steps": 6}}
    assert runs.changes(config, longer) == ["training.steps: was 5, is 6"]


def test_fields_that_may_change_are_fields_of_a_config() -> None:
    """A name that nothing has any more would leave the field to stop every resume."""
    names = [f"{name}." for name, _ in fields(values.plain(Trainer.Config()))]
    names += [f"{field.name}." for field in dataclasses.fields(Trainer.Config)]
    unknown = [
        free
        for free in runs._NOT_COMPARED
        if not any(name.startswith(f"{free}.") for name in names)
    ]
    assert unknown == []
