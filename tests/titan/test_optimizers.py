"""The optimizers container: names, groups, refusals, what a resume names anew."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchtitan.components.optimizer import LRSchedulersContainer

from amo_dist import AMOConfig
from amo_dist.optimizers.named import OPTIMIZER_NAMES
from torchtitan_ext.plugin import hyperparameters, models, optimizers
from torchtitan_ext.plugin.optimizers import MuonSection, OptimizersContainer
from torchtitan_ext.runs import run_log

AMO_FIELDS = AMOConfig(observe_every=1, observe_until=2, transition_steps=2)
NAMES = ["AMO", "Muon", "AdamW"]
FLOAT32 = MuonSection(ns_dtype="float32")


def config(name: str = "AMO", **fields: Any) -> OptimizersContainer.Config:
    # Fused AdamW would differ between a whole model and its parts by its vector lanes.
    values = {"lr": 1e-2, "implementation": "foreach", "amo": AMO_FIELDS, "muon": FLOAT32}
    values |= fields
    return OptimizersContainer.Config(name=name, **values)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Module()
        self.attention.wq = nn.Linear(6, 4)
        self.norm = nn.LayerNorm(6)


def model() -> nn.Module:
    torch.manual_seed(0)
    root = nn.Module()
    root.tok_embeddings = nn.Embedding(5, 6)
    root.layers = nn.ModuleDict({str(i): Block() for i in range(2)})
    return root


def parts(whole: nn.Module) -> list[nn.Module]:
    """The model as two pipeline stages, names kept."""
    first, second = copy.deepcopy(whole), copy.deepcopy(whole)
    del first.layers["1"], second.layers["0"], second.tok_embeddings
    return [first, second]


def build(model_parts: list[nn.Module], section: Any = None) -> Any:
    return (section or config()).build(model_parts=model_parts)


def train(container: Any, num_steps: int, first: int = 0) -> None:
    """Steps with gradients that depend on the step and the parameter's name alone."""
    for step in range(first, first + num_steps):
        for part in container.model_parts:
            for name, parameter in part.named_parameters():
                seed = sum(name.encode()) * 1000 + step
                generator = torch.Generator().manual_seed(seed)
                parameter.grad = torch.randn(parameter.shape, generator=generator)
        container.step()


@pytest.mark.parametrize("name", ["AMO", "AdamW"])
def test_parts_of_a_model_share_one_optimizer(name: str) -> None:
    whole, split = (build(some, config(name)) for some in ([model()], parts(model())))
    assert len(split.optimizers) == 1
    for container in (whole, split):
        train(container, 4)
    assert split.state_dict().keys() == whole.state_dict().keys()
    weights = {name: p for part in split.model_parts for name, p in part.named_parameters()}
    for key, weight in whole.model_parts[0].named_parameters():
        assert torch.equal(weights[key], weight), key


def test_a_state_that_lacks_an_entry_is_refused() -> None:
    container = build([model()])
    train(container, 1)
    state = container.state_dict()
    momentum = "state.layers.1.attention.wq.weight.momentum_buffer"
    with pytest.raises(ValueError, match=r"layers\.1\.attention\.wq\.weight"):
        container.load_state_dict({k: v for k, v in state.items() if k != momentum})
    container.load_state_dict(state)


@pytest.mark.parametrize("name", [name for name in OPTIMIZER_NAMES if name != "AdamW"])
def test_every_name_steps_and_reports(name: str) -> None:
    container = build([model()], config(name))
    train(container, 1)
    fields = run_log.optimizer_fields(container.optimizer)
    assert fields["phase"]
    assert all(steps >= 4 for steps in fields["num_steps_by_type"].values())


def test_adamw_is_pytorchs() -> None:
    container = build([model()], config("AdamW"))
    assert type(container.optimizer) is torch.optim.AdamW
    train(container, 1)
    assert not any(run_log.optimizer_fields(container.optimizer).values())
    assert container.clock.take() > 0
    assert container.clock.take() == 0


@pytest.mark.parametrize("name", ["Muon", "AMO"])
def test_one_line_makes_a_matrix_of_each_head(name: str) -> None:
    section = config(name, muon=MuonSection(per_head=True))
    optimizers.validate(section)
    fused = models.spec(models.Model(flavor="tiny", fuse_qkv=True)).model.build()
    counts = Counter(build([fused], section).optimizer.operator_types)
    assert (counts["attn_q"], counts["attn_k"], counts["attn_v"]) == (12, 4, 4)  # in two layers


A2 = str(Path(__file__).parents[2] / "configs" / "schedules" / "a2.toml")


def test_a_schedule_file_sets_the_steps_of_each_type() -> None:
    section = config("Muon", muon=MuonSection(schedule_file=A2))
    container = build([model()], section)
    train(container, 1)
    fields = run_log.optimizer_fields(container.optimizer)
    assert fields["num_steps_by_type"] == {"attn_q": 6}


# ------------------------------------------------------------------ what a resumed run names anew

LONG = AMOConfig(observe_until=8, observe_every=4)
OLD: dict[str, Any] = {"lr": 4e-3}
NEW: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.5, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6}
FACTORS = [0.25, 0.5, 0.75, 1.0]  # of a warmup over four steps


class Run:
    """A model, its optimizers and schedulers, as torchtitan builds them, in the midst of warmup."""

    def __init__(self, name: str, steps: int = 0, **fields: Any) -> None:
        section = config(name, amo=LONG, **OLD | fields)
        schedule = LRSchedulersContainer.Config(warmup_steps=4)
        self.optimizers = build([model()], section)
        self.schedulers: Any = schedule.build(optimizers=self.optimizers, training_steps=9)
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        train(self.optimizers, 1)
        self.schedulers.step()

    def resume(self, other: Run) -> None:
        # In the order in which distributed checkpoints load them.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a rate that torchtitan asks a schedule for
            self.schedulers.load_state_dict(copy.deepcopy(other.schedulers.state_dict()))
        self.optimizers.load_state_dict(copy.deepcopy(other.optimizers.state_dict()))
        hyperparameters.follow(self.schedulers)

    def rates(self) -> set[float]:
        return self.values("lr") | {*self.schedulers.schedulers[0].get_last_lr()}

    def values(self, key: str) -> set[Any]:
        return {group[key] for group in self.optimizers.optimizer.param_groups if key in group}


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
    message = rf"optimizer\.{field}\b.*: found .* checkpoint, expected .*{NEW[field]!r}.* as in"
    with pytest.raises(ValueError, match=message):
        run.resume(Run(name, steps=2))


@pytest.mark.parametrize("rule", ["use_config", "keep_checkpoint"])
@pytest.mark.parametrize("name", NAMES)
def test_a_rule_decides_all_values(name: str, rule: str, caplog: pytest.LogCaptureFixture) -> None:
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
    saved, section = Run(name, steps=2), MuonSection(momentum=0.5, ns_dtype="float32")
    with pytest.raises(ValueError, match=r"momentum: the checkpoint has 0\.95, this run has 0\.5"):
        Run(name, muon=section).resume(saved)
    expected = {"use_config": (0.5, NEW["lr"]), "keep_checkpoint": (0.95, OLD["lr"])}
    for rule, (momentum, lr) in expected.items():
        run = Run(name, muon=section, **NEW, on_config_change=rule)
        run.resume(saved)
        assert run.optimizers.optimizer.config.momentum == momentum
        assert run.values("initial_lr") == {lr}
