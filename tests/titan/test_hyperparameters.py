"""Learning rate, weight decay, betas and eps that a resumed run names anew."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torchtitan.components.optimizer import LRSchedulersContainer

from amo_dist import AMOConfig
from tests.titan.test_optimizers import model
from torchtitan_ext.plugin import hyperparameters
from torchtitan_ext.plugin.optimizers import MuonSection, OptimizersContainer

NAMES = ["AMO", "Muon", "AdamW"]
OLD: dict[str, Any] = {"lr": 4e-3}
NEW: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.5, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6}
FACTORS = [0.25, 0.5, 0.75, 1.0]  # of a warmup over four steps


class Run:
    """A model, its optimizers and schedulers, as torchtitan builds them, in the midst of warmup."""

    def __init__(self, name: str, steps: int = 0, **fields: Any) -> None:
        section = AMOConfig(observe_until=8, observe_every=4)
        values = {"implementation": "foreach", "amo": section, **OLD, **fields}
        config = OptimizersContainer.Config(name=name, **values)
        schedule = LRSchedulersContainer.Config(warmup_steps=4)
        self.model = model()
        self.optimizers: Any = config.build(model_parts=[self.model])
        self.schedulers: Any = schedule.build(optimizers=self.optimizers, training_steps=9)
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizers.step()
        self.schedulers.step()

    def resume(self, other: Run) -> None:
        # In the order in which distributed checkpoints load them.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a rate that torchtitan asks a schedule for
            self.schedulers.load_state_dict(copy.deepcopy(other.schedulers.state_dict()))
        self.optimizers.load_state_dict(copy.deepcopy(other.optimizers.state_dict()))
        hyperparameters.follow(self.schedulers)

    def rates(self) -> set[float]:
        groups = self.optimizers.optimizers[0].param_groups
        return {group["lr"] for group in groups} | {*self.schedulers.schedulers[0].get_last_lr()}

    def values(self, key: str) -> set[Any]:
        groups = self.optimizers.optimizers[0].param_groups
        return {group[key] for group in groups if key in group}


@pytest.mark.parametrize("name", NAMES)
def test_an_unchanged_config_resumes(name: str) -> None:
    run, saved = Run(name), Run(name, steps=2)
    run.resume(saved)
    assert run.rates() == saved.rates() == {OLD["lr"] * FACTORS[2]}
    for one in (run, saved):
        one.step()
    assert run.rates() == saved.rates() == {OLD["lr"]}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("field", NEW)
def test_a_changed_value_is_refused_and_named(name: str, field: str) -> None:
    run = Run(name, **{field: NEW[field]})
    message = rf"optimizer\.{field}: found .* in the checkpoint, expected {NEW[field]!r} as in"
    with pytest.raises(ValueError, match=message):
        run.resume(Run(name, steps=2))


@pytest.mark.parametrize("rule", ["use_config", "keep_checkpoint"])
@pytest.mark.parametrize("name", NAMES)
def test_one_rule_decides_about_all_values(
    name: str, rule: str, caplog: pytest.LogCaptureFixture
) -> None:
    run, saved = Run(name, **NEW, on_config_change=rule), Run(name, steps=2)
    expected = Run(name, **NEW) if rule == "use_config" else saved
    run.resume(saved)
    assert "are in force: optimizer.lr" in caplog.text
    for key in ("initial_lr", "weight_decay", "betas", "eps"):
        assert run.values(key) == expected.values(key)
    (peak,) = expected.values("initial_lr")
    assert sorted(run.rates()) == pytest.approx([peak * FACTORS[2]])
    run.step()
    assert run.rates() == {peak}


@pytest.mark.parametrize("name", ["AMO", "Muon", "NorMuon"])
def test_one_word_decides_about_settings_too(name: str) -> None:
    saved, section = Run(name, steps=2), MuonSection(momentum=0.5)
    with pytest.raises(ValueError, match=r"momentum: the checkpoint has 0\.95, this run has 0\.5"):
        Run(name, muon=section).resume(saved)
    expected = {"use_config": (0.5, NEW["lr"]), "keep_checkpoint": (0.95, OLD["lr"])}
    for rule, (momentum, lr) in expected.items():
        run = Run(name, muon=section, **NEW, on_config_change=rule)
        run.resume(saved)
        assert run.optimizers.optimizer.config.momentum == momentum
        assert run.values("initial_lr") == {lr}
