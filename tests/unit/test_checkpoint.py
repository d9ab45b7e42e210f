"""Saving and loading on one process: exact resumption, all-or-nothing loads, foreign state."""

from __future__ import annotations

import copy
import json
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from amo_dist import AMO, ROOT, AMOConfig, Muon, MuonConfig, UpdateRule, param_groups
from amo_dist.optimizers.named import make_optimizer
from amo_dist.state import control as controls
from tests.distributed import models
from tests.unit.checkpoint_runs import (
    BAD_RATES,
    FIELDS,
    SHAPES,
    STEPS,
    WQ,
    everything,
    make,
    refusal,
    save,
    train,
)


@pytest.fixture(scope="module")
def saved() -> dict[str, Any]:
    return save()


# ---------------------------------------------------------------- resuming


# Before the first step, before an observation, at the plan, in the transition, after the lock.
@pytest.mark.parametrize("saved_at", [0, 1, 4, 5, 8])
@pytest.mark.parametrize(
    ("dtype", "fields"),
    [(torch.float32, {}), (torch.bfloat16, {"planner": "paper"})],
    ids=["measured", "paper in bfloat16"],
)
def test_resuming_continues_bit_for_bit(
    saved_at: int, dtype: torch.dtype, fields: dict[str, Any]
) -> None:
    model, optimizer = make(dtype, **fields)
    train(model, optimizer, 1, saved_at)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    read = models.through_a_file(state)
    train(model, optimizer, saved_at + 1, STEPS)
    ends = everything(model, optimizer)
    resumed, other = make(dtype, **fields)
    # Another optimizer, and the one that has gone on.
    for one, running in ((resumed, other), (model, optimizer)):
        running.load_state_dict(copy.deepcopy(read["optimizer"]))
        one.load_state_dict(read["model"])
        assert running.state[one.get_parameter(WQ)]["momentum_buffer"].dtype == torch.float32
        train(one, running, saved_at + 1, STEPS)
        assert all(map(torch.equal, everything(one, running), ends))
    assert other.control_state_dict() == optimizer.control_state_dict()


def test_a_state_from_before_a_fit_is_fitted_after_the_load() -> None:
    model = models.plain_model(SHAPES)
    optimizer = ROOT(param_groups(model))
    read = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer, 1, 2)
    ends = everything(model, optimizer)
    model.load_state_dict(read["model"])
    optimizer.load_state_dict(read["optimizer"])
    train(model, optimizer, 1, 2)
    assert all(map(torch.equal, everything(model, optimizer), ends))


@pytest.mark.parametrize("num_steps", [0, 3])
def test_a_step_without_gradients_counts_as_in_the_run_that_went_on(num_steps: int) -> None:
    """Only before the first gradient it does not count, whether that was before a load or not."""
    model, optimizer = make()
    train(model, optimizer, 1, num_steps)
    _, other = make()
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    copied = copy.deepcopy(optimizer)
    for running in (optimizer, other, copied):
        for group in running.param_groups:
            for param in group["params"]:
                param.grad = None
        running.step()
        assert running.num_steps_taken == (num_steps and num_steps + 1)


@pytest.mark.parametrize("flatten", [False, True])
def test_the_helpers_of_pytorch_round_trip(flatten: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, optimizer = make(torch.bfloat16)
    train(model, optimizer, 1, 5)
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    resumed, other = make(torch.bfloat16)
    resumed.load_state_dict(model.state_dict())
    set_optimizer_state_dict(resumed, other, state, options=options)
    assert other.num_steps_taken == 5
    assert all(map(torch.equal, everything(resumed, other), everything(model, optimizer)))


def test_parameters_frozen_before_a_load_by_a_helper_are_named() -> None:
    model, optimizer = make(torch.float32)
    train(model, optimizer, 1, 2)
    options = StateDictOptions(full_state_dict=True)
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    resumed, other = make(torch.float32)
    resumed.get_parameter(WQ).requires_grad_(False)
    # The helper leaves its state out, and zeros would stay in silence.
    with pytest.raises(ValueError, match=f"{WQ}: .*frozen"):
        set_optimizer_state_dict(resumed, other, saved, options=options)
    other.load_state_dict(optimizer.state_dict())  # names its parameters, and holds all state
    momentum = other.state[resumed.get_parameter(WQ)]["momentum_buffer"]
    assert torch.equal(momentum, optimizer.state[model.get_parameter(WQ)]["momentum_buffer"])


def test_learning_rate_and_extra_keys_are_restored_but_not_shared() -> None:
    _, optimizer = make()
    optimizer.param_groups[0]["lr"] = torch.tensor(0.125)
    optimizer.param_groups[1]["initial_lr"] = 0.5
    state = optimizer.state_dict()
    _, other = make()
    other.load_state_dict(state)
    assert other.param_groups[1]["initial_lr"] == 0.5
    other.param_groups[0]["lr"].fill_(3.0)
    assert float(state["param_groups"][0]["lr"]) == 0.125


@pytest.mark.parametrize("steps", [0, 3])
def test_a_load_under_inference_mode_leaves_an_optimizer_that_steps(
    saved: dict[str, Any], steps: int
) -> None:
    model, optimizer = make()
    train(model, optimizer, 1, steps)
    with torch.inference_mode():
        # What is read from a file here is made under inference mode, too.
        read = copy.deepcopy(saved)
        read["param_groups"][0]["lr"] = torch.tensor(0.125)
        optimizer.load_state_dict(read)
        optimizer.load_control_state_dict(optimizer.control_state_dict())
    assert not any(tensor.is_inference() for tensor in everything(model, optimizer))
    assert not optimizer.param_groups[0]["lr"].is_inference()
    train(model, optimizer, 6, 7)
    assert optimizer.num_steps_taken == 7


def test_a_number_and_another_default_device(saved: dict[str, Any]) -> None:
    state = copy.deepcopy(saved)
    model, optimizer = make()
    names = list(optimizer.params_by_name)
    state["state"][names.index("norm.weight")]["step"] = 5  # a number, which becomes a tensor
    with torch.device("meta"):
        optimizer.load_state_dict(state)
    other, expected = make()
    expected.load_state_dict(saved)
    train(model, optimizer, 6, 7)
    train(other, expected, 6, 7)
    assert all(map(torch.equal, everything(model, optimizer), everything(other, expected)))


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


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("format", "other", "control.version"),
        ("version", 2, "control.version"),
        ("source.name", "fixed", "control.source"),
        ("config.momentum", 0.9, "control.config: momentum"),
        ("config.seed", True, "control.config: seed"),
        ("config.extra", 1, "control.config"),
    ],
)
def test_a_control_state_of_another_run(
    saved: dict[str, Any], path: str, value: Any, field: str
) -> None:
    assert field in refusal(edited(saved, path, value))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("steps_taken", 3),
        ("steps_skipped", -1),
        ("source.plan.budget", 7),
        ("source.observations", []),
        ("digest", None),
        ("extra", 1),
        ("source", None),
    ],
)
def test_an_edited_control_state_fails_by_its_digest(
    saved: dict[str, Any], path: str, value: Any
) -> None:
    assert "control.digest" in refusal(edited(saved, path, value, seals=False))


def test_other_operator_types() -> None:
    # Fewer and more than the model has, before and after the world has met.
    for name in (WQ, "layers.0.feed_forward.w2.weight"):
        other = {**SHAPES, name: (8, 13)} if name != WQ else {"norm.weight": (8,), WQ: (12, 8)}
        model = models.plain_model(other)
        optimizer = AMO(param_groups(model), config=AMOConfig(**FIELDS))
        train(model, optimizer, 1, 5)
        control = optimizer.control_state_dict()
        for steps in (0, 3):
            target, loaded = make()
            train(target, loaded, 1, steps)
            before = loaded.control_state_dict()
            if steps == 0:  # until the world has met, this rank may not know all types
                loaded.load_control_state_dict(control)
            with pytest.raises(ValueError, match="operator types"):
                loaded.load_control_state_dict(control) if steps else train(target, loaded, 1, 1)
            assert steps == 0 or loaded.control_state_dict() == before


@pytest.mark.parametrize(("field", "value", "told"), BAD_RATES)
def test_rates_that_mean_nothing(saved: dict[str, Any], field: str, value: Any, told: str) -> None:
    state = copy.deepcopy(saved)
    state["param_groups"][1][field] = value
    assert f"groups[1].{field}: found {told}, expected " in refusal(state)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("name", "key"), [(WQ, "momentum_buffer"), ("norm.weight", "exp_avg_sq")])
def test_damaged_tensors_are_named(
    saved: dict[str, Any], name: str, key: str, value: float
) -> None:
    state = copy.deepcopy(saved)
    _, optimizer = make()
    index = list(optimizer.params_by_name).index(name)
    state["state"][index][key].view(-1)[-1] = value
    assert refusal(state).startswith(f"state of {name}.{key}: found NaN or inf")


def test_structures_that_differ(saved: dict[str, Any]) -> None:
    lost, shaped, strange, shorter, unlike = (copy.deepcopy(saved) for _ in range(5))
    del lost["state"][0]["momentum_buffer"]
    shaped["state"][0]["momentum_buffer"] = torch.zeros(8, 12)
    strange["state"][0]["momentum_buffer"] = "zeros"
    shorter["param_groups"][0]["params"].pop()
    unlike["param_groups"][1]["control"] += " "
    text = saved["param_groups"][0]["control"]
    for state, field in (
        (lost, f"state of {WQ}"),
        (shaped, "momentum_buffer: found shape (8, 12)"),
        (strange, "momentum_buffer: found str"),
        ({**saved, "param_groups": saved["param_groups"][:1]}, "param_groups"),
        (shorter, "param_groups[0].params"),
        ({**saved, "param_groups": 3}, "param_groups"),
        ({**saved, "state": None}, "state"),
        (unlike, "control: found 2 different texts"),
        (with_control(saved, text[:-7]), "control"),
        (with_control(saved, "3"), "control"),
    ):
        assert field in refusal(state)


@pytest.mark.parametrize("origin", ["Muon", "AdamW", "SGD"])
def test_a_foreign_state_is_named(origin: str) -> None:
    model = models.plain_model(SHAPES)
    params = [param for name, param in model.named_parameters() if "layers" in name]
    foreign = getattr(torch.optim, origin)(params, lr=1e-3)
    message = refusal(foreign.state_dict())
    assert f"look like those of torch.optim.{origin}" in message
    assert "docs/checkpoints.md" in message


# ---------------------------------------------------------------- other settings

NEW = {"observe_until": 6, "observe_every": 3, "transition_steps": 2}


def test_a_change_is_an_error_that_names_every_field(saved: dict[str, Any]) -> None:
    message = refusal(saved, **NEW)
    for part in (*NEW, "'keep_checkpoint' or 'replan'"):
        assert part in message


@pytest.mark.parametrize(
    "fields",
    [
        {"bucket_bytes": 512, "ownership": "balanced", "nonfinite": "skip_step"},
        {"shrinkage": 0.5},  # which the measured planner never reads
    ],
)
def test_what_changes_no_result_may_change(saved: dict[str, Any], fields: dict[str, Any]) -> None:
    _, optimizer = make(**fields)
    optimizer.load_state_dict(saved)
    assert optimizer.plan is not None
    assert {name: getattr(optimizer.config, name) for name in fields} == fields


def test_keep_checkpoint_goes_on_as_if_nothing_had_changed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, optimizer = make()
    train(model, optimizer, 1, 5)
    resumed, other = make(**NEW, momentum=0.8, on_config_change="keep_checkpoint")
    other.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(model.state_dict())
    assert caplog.records
    assert (other.config.observe_until, other.config.momentum) == (4, 0.95)
    train(model, optimizer, 6, STEPS)
    train(resumed, other, 6, STEPS)
    assert all(map(torch.equal, everything(resumed, other), everything(model, optimizer)))
    assert other.control_state_dict()["source"] == optimizer.control_state_dict()["source"]


@pytest.mark.parametrize("saved_at", [0, 2, 4, 5, 7, 9])
def test_replan_observes_once_more_and_plans_with_the_new_settings(saved_at: int) -> None:
    model, optimizer = make()
    train(model, optimizer, 1, saved_at)
    old = [one.step for one in optimizer.observations]
    resumed, other = make(**NEW, on_config_change="replan")
    other.load_state_dict(optimizer.state_dict())
    # At or after step 6, the new observe_until, and after one more observation.
    plan_at = max(6, (saved_at // 3 + 1) * 3)
    phases = []
    for step in range(saved_at + 1, plan_at + 3):
        # Saved and loaded at every step, the phases are the same.
        other.load_state_dict(copy.deepcopy(other.state_dict()))
        train(resumed, other, step, step)
        phases.append(other.phase)
    assert phases == ["observation"] * (plan_at - saved_at) + ["transition", "locked"]
    seen = [one.step for one in other.observations]
    assert seen == [*old, *range((saved_at // 3 + 1) * 3, plan_at + 1, 3)]


def make_named(name: str, **fields: Any) -> tuple[nn.Module, Muon]:
    model = models.plain_model(SHAPES)
    config = MuonConfig(**{"ns_dtype": "float32", **fields})
    return model, make_optimizer(name, param_groups(model), lr=1e-2, config=config)  # type: ignore[return-value]


@pytest.mark.parametrize("rule", ["keep_checkpoint", "replan"])
@pytest.mark.parametrize("name", ["Muon", "NorMuon", "ROOT"])
def test_every_optimizer_goes_on_with_other_settings(name: str, rule: str) -> None:
    model, optimizer = make_named(name)
    train(model, optimizer, 1, 3)
    state = copy.deepcopy(optimizer.state_dict())
    other = {"momentum": 0.8, "ns_guard_every": 7}
    with pytest.raises(ValueError, match="momentum"):
        make_named(name, **other)[1].load_state_dict(state)
    resumed, running = make_named(name, **other, on_config_change=rule)
    running.load_state_dict(state)
    resumed.load_state_dict(model.state_dict())
    # The twin never stopped: it has the settings that stay in force, and loads without a change.
    free = {"ns_guard_every": 7, "on_config_change": rule}
    twin, expected = make_named(name, **(free if rule == "keep_checkpoint" else {**other, **free}))
    assert running.config == expected.config
    expected.load_state_dict(edited(state, "config", expected.config.to_dict()))
    twin.load_state_dict(model.state_dict())
    train(resumed, running, 4, 6)
    train(twin, expected, 4, 6)
    assert all(map(torch.equal, everything(resumed, running), everything(twin, expected)))


def test_no_advice_leads_nowhere() -> None:
    """Nothing recommends keep_checkpoint for what shapes the state."""
    _, optimizer = make_named("NorMuon")
    for rule in ("error", "keep_checkpoint"):
        _, other = make_named("NorMuon", bfloat16_params="master", on_config_change=rule)
        with pytest.raises(ValueError, match="bfloat16_params") as caught:
            other.load_state_dict(optimizer.state_dict())
        assert "'keep_checkpoint'" not in str(caught.value)
        assert "'replan'" in str(caught.value)
    _, other = make_named("NorMuon", bfloat16_params="master", on_config_change="replan")
    other.load_state_dict(optimizer.state_dict())


def test_replan_takes_other_coefficients() -> None:
    _, optimizer = make_named("Muon")
    state = optimizer.state_dict()
    for rule in ("error", "keep_checkpoint"):
        _, other = make_named("Muon-PE", on_config_change=rule)
        with pytest.raises(ValueError, match="coefficients have changed; set on_config_change to"):
            other.load_state_dict(state)
    _, other = make_named("Muon-PE", on_config_change="replan")
    other.load_state_dict(state)
    found = other.control_state_dict()["source"]
    assert found == make_named("Muon-PE")[1].control_state_dict()["source"]


# ---------------------------------------------------------------- arguments


def test_a_rules_defaults_hold_under_amo_and_root() -> None:
    class Undecayed(UpdateRule):
        defaults: ClassVar = {"weight_decay": 0.0}

    for base in (AMO, ROOT):
        kind = type("Kind", (base,), {"rule_class": Undecayed})
        optimizer = kind(param_groups(models.plain_model(SHAPES)))
        assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0}
        assert optimizer.defaults["lr"] == 1e-3


@pytest.mark.parametrize("kind", [AMO, ROOT])
def test_schedules_of_their_own_leave_no_room_for_another(kind: type[Muon]) -> None:
    with pytest.raises(TypeError, match="schedule"):
        kind(param_groups(models.plain_model(SHAPES)), schedule="kj")
