"""Saving and loading on one process: exact resumption, all-or-nothing loads, foreign state."""

from __future__ import annotations

import copy
import functools
import gc
import io
import itertools
import json
import operator
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed.checkpoint.state_dict as dcp
from torch import nn

from amo_dist import AMO, ROOT, Muon, MuonConfig, NorMuon, UpdateRule, param_groups
from amo_dist.state import control as controls
from tests import runs
from tests.distributed import models
from tests.runs import NORM, WQ

STEPS = 10


@pytest.fixture(scope="module")
def saved() -> dict[str, Any]:
    """The state of AMO after five steps."""
    model, optimizer = runs.make()
    runs.train(model, optimizer, 1, 5)
    return copy.deepcopy(optimizer.state_dict())


def refusal(state: dict[str, Any], **fields: Any) -> str:
    """The error of a load, after which nothing has changed."""
    model, optimizer = runs.make(**fields)
    runs.train(model, optimizer, 1, 3)
    before, groups = runs.everything(model, optimizer), optimizer.state_dict()["param_groups"]
    source, config = optimizer.source, optimizer.config
    with pytest.raises(ValueError, match=": ") as caught:
        optimizer.load_state_dict(state)
    assert all(map(torch.equal, runs.everything(model, optimizer), before))
    assert optimizer.source is source
    assert optimizer.config is config
    assert optimizer.state_dict()["param_groups"] == groups  # the control state is in them
    # It still works.
    runs.train(model, optimizer, 4, 5)
    return str(caught.value)


# ---------------------------------------------------------------- resuming


# Before the first step, before an observation, at the plan, in the transition, after the lock.
@pytest.mark.parametrize("saved_at", [0, 1, 4, 5, 8])
@pytest.mark.parametrize(
    "options",
    [{}, {"planner": "paper", "dtype": torch.bfloat16}, {"kind": ROOT}],
    ids=["measured", "paper in bfloat16", "ROOT, which fits before its first step"],
)
def test_resuming_continues_bit_for_bit(saved_at: int, options: dict[str, Any]) -> None:
    model, optimizer = runs.make(**options)
    runs.train(model, optimizer, 1, saved_at)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    read = torch.load(file, weights_only=True)
    runs.train(model, optimizer, saved_at + 1, STEPS)
    ends = runs.everything(model, optimizer)
    resumed, other = runs.make(**options)
    # Another optimizer, and the one that has gone on.
    for one, running in ((resumed, other), (model, optimizer)):
        running.load_state_dict(copy.deepcopy(read["optimizer"]))
        one.load_state_dict(read["model"])
        assert running.state[one.get_parameter(WQ)]["momentum_buffer"].dtype == torch.float32
        runs.train(one, running, saved_at + 1, STEPS)
        assert all(map(torch.equal, runs.everything(one, running), ends))
    assert other.control_state_dict() == optimizer.control_state_dict()


def test_parameters_frozen_before_a_load_by_a_helper_are_named() -> None:
    model, optimizer = runs.make()
    runs.train(model, optimizer, 1, 2)
    options = dcp.StateDictOptions(full_state_dict=True)
    saved = dcp.get_optimizer_state_dict(model, optimizer, options=options)
    resumed, other = runs.make()
    resumed.get_parameter(WQ).requires_grad_(False)
    # The helper leaves its state out, and zeros would stay in silence.
    with pytest.raises(ValueError, match=f"{WQ}: .*frozen"):
        dcp.set_optimizer_state_dict(resumed, other, saved, options=options)
    other.load_state_dict(optimizer.state_dict())  # names its parameters, and holds all state
    momentum = other.state[resumed.get_parameter(WQ)]["momentum_buffer"]
    assert torch.equal(momentum, optimizer.state[model.get_parameter(WQ)]["momentum_buffer"])


@pytest.mark.parametrize("steps", [0, 3])
def test_a_load_under_inference_mode_leaves_an_optimizer_that_steps(
    saved: dict[str, Any], steps: int
) -> None:
    model, optimizer = runs.make()
    runs.train(model, optimizer, 1, steps)
    with torch.inference_mode():
        # What is read from a file here is made under inference mode, too.
        read = copy.deepcopy(saved)
        read["param_groups"][0]["lr"] = torch.tensor(0.125)
        optimizer.load_state_dict(read)
        optimizer.load_control_state_dict(optimizer.control_state_dict())
    assert not any(tensor.is_inference() for tensor in runs.everything(model, optimizer))
    assert not optimizer.param_groups[0]["lr"].is_inference()
    optimizer.param_groups[0]["lr"].fill_(3.0)
    assert float(read["param_groups"][0]["lr"]) == 0.125
    runs.train(model, optimizer, 6, 7)
    assert optimizer.num_steps_taken == 7


# ---------------------------------------------------------------- refused loads


def with_control(saved: dict[str, Any], text: Any) -> dict[str, Any]:
    return {**saved, "param_groups": [{**g, "control": text} for g in saved["param_groups"]]}


def edited(saved: dict[str, Any], path: str, value: Any, seals: bool = True) -> dict[str, Any]:
    """The state with another value in the control state, and the digest that belongs to it."""
    record = json.loads(saved["param_groups"][0]["control"])
    *parents, last = path.split(".")
    parent = record
    for key in parents:
        parent = parent[key]
    parent[last] = value
    if seals:
        record["digest"] = controls.digest(record)
    return with_control(saved, controls.to_text(record))


def at(*path: Any, value: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Another value at a place of the state; a function makes it of what is there."""

    def changed(saved: dict[str, Any]) -> dict[str, Any]:
        *parents, last = path
        parent: Any = functools.reduce(operator.getitem, parents, saved)
        parent[last] = value(parent[last]) if callable(value) else value
        return saved

    return changed


MOMENTUM = ("state", 0, "momentum_buffer")


def unlike(saved: dict[str, Any]) -> dict[str, Any]:
    """Groups that do not say the same."""
    first, second = saved["param_groups"]
    return {**saved, "param_groups": [first, {**second, "control": second["control"] + " "}]}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda saved: edited(saved, "version", 2), "control.version"),
        (lambda saved: edited(saved, "source.name", "fixed"), "control.source"),
        (lambda saved: edited(saved, "config.momentum", 0.9), "control.config: momentum"),
        (lambda saved: edited(saved, "config.seed", True), "control.config: seed"),
        (lambda saved: edited(saved, "config.extra", 1), "control.config"),
        (lambda saved: edited(saved, "source.observations", [], False), "control.digest"),
        (lambda saved: edited(saved, "digest", None, False), "control.digest"),
        (lambda saved: edited(saved, "source", None, False), "control.digest"),
        (lambda saved: with_control(saved, '{"format'), "control"),
        (lambda saved: with_control(saved, "3"), "control"),
        (unlike, "control: found 2 different texts"),
        (at("param_groups", value=3), "param_groups: found int"),
        (at("param_groups", value=lambda groups: groups[:1]), "param_groups"),
        (at("param_groups", 0, "params", value=[0]), "param_groups[0].params: found 1"),
        (at("param_groups", 0, "algorithm", value="sgd"), "param_groups[0].algorithm: found 'sgd'"),
        (at("state", value=None), "state"),
        (at("state", 0, value=[1.0]), "found [1.0]"),
        (at("state", 0, value={}), f"state of {WQ}"),
        (at(*MOMENTUM, value=lambda x: x.T), "momentum_buffer: found shape (8, 12)"),
        (at(*MOMENTUM, value="zeros"), "momentum_buffer: found str"),
        (at(*MOMENTUM, value=lambda x: x / 0), f"state of {WQ}.momentum_buffer: found NaN"),
        (at("state", 4, "exp_avg", value=lambda x: x / 0), f"state of {NORM}.exp_avg: found NaN"),
        (lambda saved: edited(saved, "config.seed", 7), "'keep_checkpoint' or 'replan'"),
    ],
)
def test_a_damaged_state_or_that_of_another_run_is_refused(
    saved: dict[str, Any], change: Callable[[dict[str, Any]], dict[str, Any]], field: str
) -> None:
    assert field in refusal(change(copy.deepcopy(saved)))


def test_other_operator_types(saved: dict[str, Any]) -> None:
    # Fewer and more than the model has, before and after the world has met.
    more = {**runs.SHAPES, "layers.0.feed_forward.w2.weight": (8, 13)}
    for shapes in ({NORM: (8,), WQ: (12, 8)}, more):
        model, optimizer = runs.make(shapes=shapes)
        runs.train(model, optimizer, 1, 5)
        control = optimizer.control_state_dict()
        target, loaded = runs.make()
        loaded.load_control_state_dict(control)  # until then this rank may not know all types
        with pytest.raises(ValueError, match="operator types"):
            runs.train(target, loaded, 1, 1)
        assert "operator types" in refusal(with_control(saved, controls.to_text(control)))


@pytest.mark.parametrize("origin", ["Muon", "AdamW", "SGD"])
def test_a_foreign_state_is_named(origin: str) -> None:
    model = models.plain_model(runs.SHAPES)
    params = [param for param in model.parameters() if param.dim() == 2]
    foreign = getattr(torch.optim, origin)(params, lr=1e-3)
    message = refusal(foreign.state_dict())
    assert message.startswith("control: found none")
    assert "docs/checkpoints.md" in message


# ---------------------------------------------------------------- names

A, B, OTHER = (f"layers.{layer}.attention.wq.weight" for layer in range(3))


def trained(*names: str) -> tuple[nn.Module, Muon]:
    """Matrices of one shape, after a step."""
    model, optimizer = runs.make(kind=Muon, shapes=dict.fromkeys(names, (6, 4)))
    runs.train(model, optimizer, 1, 1)
    return model, optimizer


@pytest.mark.parametrize("has_names", [True, False])
def test_names_decide_which_matrix_gets_which_momentum(has_names: bool) -> None:
    """Without names, their places do."""
    model, saved = trained(A, B)
    state, twin = saved.state_dict(), copy.deepcopy(model)
    groups = param_groups(twin)
    if has_names:
        groups[0]["params"].reverse()
    else:
        del state["param_names"]
    optimizer = Muon(groups, lr=1e-2)
    optimizer.load_state_dict(state)
    assert runs.equal(runs.train(twin, optimizer, 2, 2), runs.train(model, saved, 2, 2))


def test_state_of_other_names_is_refused() -> None:
    _, saved = trained(A, B)
    message = rf"^param_names\[0\]: found .*{B}, layers\.2\.attention\.wq\.weight"
    with pytest.raises(ValueError, match=message):
        trained(A, OTHER)[1].load_state_dict(saved.state_dict())
    with pytest.raises(ValueError, match=r"^param_names: found \[\], expected .* of 1 groups"):
        saved.load_state_dict({**saved.state_dict(), "param_names": []})


# ---------------------------------------------------------------- other settings

NEW = {"observe_until": 6, "observe_every": 3, "transition_steps": 2}


def test_what_changes_no_result_may_change(saved: dict[str, Any]) -> None:
    fields = {"bucket_bytes": 512, "ownership": "round_robin", "nonfinite": "skip_step"}
    fields["shrinkage"] = 0.5  # which the measured planner never reads
    _, optimizer = runs.make(**fields)
    optimizer.load_state_dict(saved)
    assert optimizer.plan is not None
    assert {name: getattr(optimizer.config, name) for name in fields} == fields


@pytest.mark.parametrize("saved_at", [0, 2, 4, 5, 7, 9])
def test_replan_observes_once_more_and_plans_with_the_new_settings(
    saved_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = runs.make()
    runs.train(model, optimizer, 1, saved_at)
    old = [one.step for one in optimizer.source.observations]
    resumed, other = runs.make(**NEW, on_config_change="replan")
    other.load_state_dict(optimizer.state_dict())
    assert "settings have changed, and those of this run are in force: " in caplog.text
    # At or after step 6, the new observe_until, and after one more observation.
    plan_at = max(6, (saved_at // 3 + 1) * 3)
    phases = []
    for step in range(saved_at + 1, plan_at + 3):
        # Saved and loaded at every step, the phases are the same.
        other.load_state_dict(copy.deepcopy(other.state_dict()))
        runs.train(resumed, other, step, step)
        phases.append(other.phase)
    assert phases == ["observation"] * (plan_at - saved_at) + ["transition", "locked"]
    seen = [one.step for one in other.source.observations]
    assert seen == [*old, *range((saved_at // 3 + 1) * 3, plan_at + 1, 3)]


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        (AMO, "keep_checkpoint"),
        *itertools.product((Muon, NorMuon, ROOT), ("keep_checkpoint", "replan")),
    ],
)
def test_every_optimizer_goes_on_with_other_settings(
    kind: type[Muon], rule: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = runs.make(kind=kind)
    runs.train(model, optimizer, 1, 3)
    state = copy.deepcopy(optimizer.state_dict())
    other = {"momentum": 0.8, "ns_guard_every": 7, **(NEW if kind is AMO else {})}
    with pytest.raises(ValueError, match="momentum"):
        runs.make(kind=kind, **other)[1].load_state_dict(state)
    resumed, running = runs.make(kind=kind, **other, on_config_change=rule)
    running.load_state_dict(state)
    assert caplog.records
    resumed.load_state_dict(model.state_dict())
    # The twin never stopped: it has the settings that stay in force, and loads without a change.
    free = {"ns_guard_every": 7, "on_config_change": rule}
    in_force = free if rule == "keep_checkpoint" else {**other, **free}
    twin, expected = runs.make(kind=kind, **in_force)
    assert running.config == expected.config
    edited_state = edited(state, "config", expected.config.to_dict())
    for group in edited_state["param_groups"]:
        group["momentum"] = expected.config.momentum
    expected.load_state_dict(edited_state)
    twin.load_state_dict(model.state_dict())
    runs.train(resumed, running, 4, STEPS)
    runs.train(twin, expected, 4, STEPS)
    assert all(map(torch.equal, runs.everything(resumed, running), runs.everything(twin, expected)))
    assert running.control_state_dict()["source"] == expected.control_state_dict()["source"]


def test_replan_takes_other_coefficients() -> None:
    def make(schedule: str, rule: str = "error") -> Muon:
        groups = param_groups(models.plain_model(runs.SHAPES))
        return Muon(groups, schedule=schedule, config=MuonConfig(on_config_change=rule))

    state = make("kj").state_dict()
    for rule in ("error", "keep_checkpoint"):
        with pytest.raises(ValueError, match="coefficients have changed; set on_config_change to"):
            make("pe", rule).load_state_dict(state)
    other = make("pe", "replan")
    other.load_state_dict(state)
    assert other.control_state_dict()["source"] == make("pe").control_state_dict()["source"]


# ---------------------------------------------------------------- arguments


def test_a_rules_defaults_hold_under_amo_and_root() -> None:
    class Undecayed(UpdateRule):
        defaults: ClassVar = {"weight_decay": 0.0}

    for base in (AMO, ROOT):
        kind = type("Kind", (base,), {"rule_class": Undecayed})
        optimizer = kind(param_groups(models.plain_model(runs.SHAPES)))
        assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0}
        assert optimizer.defaults["lr"] == 1e-3


@pytest.mark.parametrize("steps", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_control_state_does_not_grow(steps: int) -> None:
    model, optimizer = runs.make(shapes={runs.WQ: (2, 2)}, ns_guard_every=10)
    runs.train(model, optimizer, 1, 20)
    early = len(json.dumps(optimizer.control_state_dict()))
    num_objects = len(gc.get_objects())
    for _ in range(20, steps):
        optimizer.step()
    assert len(gc.get_objects()) < num_objects + steps // 2  # no history in memory
    assert len(json.dumps(optimizer.control_state_dict())) <= early + 50  # longer numbers alone
