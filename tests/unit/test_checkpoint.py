"""Saving and loading on one process: exact resumption, all-or-nothing loads, foreign state."""

from __future__ import annotations

import copy
import json
import logging
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from amo_dist import AMO, ROOT, AMOConfig, param_groups
from tests.distributed import models
from tests.unit.checkpoint_runs import (
    BAD_RATES,
    FIELDS,
    JUNK,
    PAPER,
    SHAPES,
    STEPS,
    WQ,
    everything,
    make,
    paths,
    refusal,
    save,
    train,
)


# Before the first step, before an observation, at it, between, at the plan, in the transition, at
# the lock, after it.
@pytest.mark.parametrize("saved_at", [0, 1, 3, 4, 5, 7, 8])
@pytest.mark.parametrize(
    ("dtype", "fields"),
    [(torch.float32, {}), (torch.bfloat16, PAPER)],
    ids=["measured", "projected in bfloat16"],
)
def test_resuming_continues_bit_for_bit(
    saved_at: int, dtype: torch.dtype, fields: dict[str, Any]
) -> None:
    model, optimizer = make(dtype, **fields)
    train(model, optimizer, 1, saved_at)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    saved = models.through_a_file(state)
    train(model, optimizer, saved_at + 1, STEPS)
    resumed, other = make(dtype, **fields)
    other.load_state_dict(saved["optimizer"])
    resumed.load_state_dict(saved["model"])
    assert other.state[resumed.get_parameter(WQ)]["momentum_buffer"].dtype == torch.float32
    train(resumed, other, saved_at + 1, STEPS)
    assert all(map(torch.equal, everything(resumed, other), everything(model, optimizer)))
    assert other.control_state_dict() == optimizer.control_state_dict()


@pytest.mark.parametrize("saved_at", [3, 6])
def test_a_running_optimizer_goes_back(saved_at: int) -> None:
    model, optimizer = make()
    train(model, optimizer, 1, saved_at)
    saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer, saved_at + 1, STEPS)
    ends = everything(model, optimizer)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    train(model, optimizer, saved_at + 1, STEPS)
    assert all(map(torch.equal, everything(model, optimizer), ends))


def test_a_state_from_before_a_fit_is_fitted_after_the_load() -> None:
    model = models.plain_model(SHAPES)
    optimizer = ROOT(param_groups(model))
    saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer, 1, 2)
    ends = everything(model, optimizer)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    train(model, optimizer, 1, 2)
    assert all(map(torch.equal, everything(model, optimizer), ends))


@pytest.mark.parametrize("flatten", [False, True])
def test_the_helpers_of_pytorch_round_trip(flatten: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, optimizer = make(torch.bfloat16)
    train(model, optimizer, 1, 5)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    resumed, other = make(torch.bfloat16)
    resumed.load_state_dict(model.state_dict())
    set_optimizer_state_dict(resumed, other, saved, options=options)
    assert other.num_steps_taken == 5
    assert all(map(torch.equal, everything(resumed, other), everything(model, optimizer)))


def test_learning_rate_and_extra_keys_are_restored_but_not_shared() -> None:
    _, optimizer = make()
    optimizer.param_groups[0]["lr"] = torch.tensor(0.125)
    optimizer.param_groups[1]["initial_lr"] = 0.5
    saved = optimizer.state_dict()
    _, other = make()
    other.load_state_dict(saved)
    assert other.param_groups[1]["initial_lr"] == 0.5
    other.param_groups[0]["lr"].fill_(3.0)
    assert float(saved["param_groups"][0]["lr"]) == 0.125


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


def test_a_load_under_another_default_device(saved: dict[str, Any]) -> None:
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


def test_hooks_run() -> None:
    _, optimizer = make()
    calls: list[str] = []
    optimizer.register_load_state_dict_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("after"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["before", "after"]


# ---------------------------------------------------------------- refused loads


@pytest.fixture(scope="module")
def saved() -> dict[str, Any]:
    return save()


def with_control(saved: dict[str, Any], text: Any) -> dict[str, Any]:
    return {**saved, "param_groups": [{**g, "control": text} for g in saved["param_groups"]]}


def edited(saved: dict[str, Any], *path: Any, value: Any) -> dict[str, Any]:
    control = json.loads(saved["param_groups"][0]["control"])
    parent = control
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return with_control(saved, json.dumps(control))


def test_a_truncated_control_state(saved: dict[str, Any]) -> None:
    text = saved["param_groups"][0]["control"]
    message = refusal(with_control(saved, text[:-7]))
    assert message.startswith('control: found \'{"config":')
    assert message.endswith("expected JSON text")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), "other", "control.format: found 'other'"),
        (("version",), 2, "control.version: found 2, expected 1; a newer version"),
        (("steps_taken",), -1, "control.steps_taken: found -1"),
        (("steps_taken",), 3, "steps_taken: found 3, expected at least 4"),
        (
            ("steps_skipped",),
            6,
            "control.steps_skipped: found 6, expected an integer >= 0 and <= 5",
        ),
        (("policy", "policy"), "uniform", "control.policy: found 'uniform', expected 'amo'"),
        (("policy", "plan"), {}, "plan"),
        (("policy", "observations"), [], "plan"),
        (("policy", "timeline", "begin"), "x", "timeline.begin: found 'x'"),
        (("policy", "timeline", "lock_step"), 9, "timeline: found Timeline(begin=0, observe_until"),
        (("config", "momentum"), 0.9, "momentum: the checkpoint has 0.9, this run has 0.95"),
        (("config", "seed"), True, "seed: the checkpoint has True, this run has 42"),
        (("config", "extra"), 1, "control.config.extra: found 'this key', expected only the keys"),
        (("policy", "extra"), 1, "state.extra: found 'this key', expected only the keys"),
        (("policy_digest",), None, "control.policy_digest: found None"),
        (("extra",), 1, "control.extra: found 'this key', expected only the keys"),
    ],
)
def test_a_control_state_that_does_not_fit(
    saved: dict[str, Any], path: tuple[Any, ...], value: Any, message: str
) -> None:
    assert message in refusal(edited(saved, *path, value=value))


def test_observations_missing_for_the_steps_taken(saved: dict[str, Any]) -> None:
    control = json.loads(saved["param_groups"][0]["control"])
    control["policy"]["plan"] = None
    control["policy"]["observations"].pop()
    message = refusal(with_control(saved, json.dumps(control)))
    assert "observations: found [2], expected the one of step 4 too" in message


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
            with pytest.raises(ValueError, match=r"operator types|ell: found"):
                loaded.load_control_state_dict(control) if steps else train(target, loaded, 1, 1)
            assert steps == 0 or loaded.control_state_dict() == before


@pytest.mark.parametrize(("field", "value", "told"), BAD_RATES)
def test_rates_that_mean_nothing(saved: dict[str, Any], field: str, value: Any, told: str) -> None:
    state = copy.deepcopy(saved)
    state["param_groups"][1][field] = value
    assert f"groups[1].{field}: found {told}, expected " in refusal(state)


def test_groups_that_disagree(saved: dict[str, Any]) -> None:
    groups = copy.deepcopy(saved["param_groups"])
    groups[1]["control"] = groups[1]["control"].replace('"steps_taken":5', '"steps_taken":4')
    assert "control: found 2 different texts" in refusal({**saved, "param_groups": groups})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("name", "key"), [(WQ, "momentum_buffer"), ("norm.weight", "exp_avg_sq")])
def test_damaged_tensors_are_named(
    saved: dict[str, Any], name: str, key: str, value: float
) -> None:
    state = copy.deepcopy(saved)
    _, optimizer = make()
    index = list(optimizer.params_by_name).index(name)
    state["state"][index][key].view(-1)[-1] = value
    message = refusal(state)
    assert message.startswith(f"state of {name}.{key}: found NaN or inf")
    assert "load an earlier one" in message


def test_a_step_count_may_be_a_whole_number(saved: dict[str, Any]) -> None:
    state = copy.deepcopy(saved)
    _, optimizer = make()
    index = list(optimizer.params_by_name).index("norm.weight")
    state["state"][index]["step"] = 7
    optimizer.load_state_dict(state)
    assert optimizer.state[optimizer.params_by_name["norm.weight"]]["step"].item() == 7.0


def test_structures_that_differ(saved: dict[str, Any]) -> None:
    lost = copy.deepcopy(saved)
    del lost["state"][0]["momentum_buffer"]
    shaped = copy.deepcopy(saved)
    shaped["state"][0]["momentum_buffer"] = torch.zeros(8, 12)
    strange = copy.deepcopy(saved)
    strange["state"][0]["momentum_buffer"] = "zeros"
    fewer = {**saved, "param_groups": saved["param_groups"][:1]}
    shorter = copy.deepcopy(saved)
    shorter["param_groups"][0]["params"].pop()
    for state, message in (
        (lost, "momentum_buffer: found 'nothing', expected this key"),
        (shaped, "found shape (8, 12), expected (12, 8)"),
        (strange, "momentum_buffer: found str, expected a tensor"),
        (fewer, "param_groups: found 1, expected 2 groups"),
        (shorter, "param_groups[0].params: found 2, expected 3 parameters"),
        ({**saved, "param_groups": 3}, "param_groups: found int, expected a list"),
        ({**saved, "state": None}, "state: found NoneType, expected a mapping"),
    ):
        assert message in refusal(state)


@settings(deadline=None, max_examples=60)
@given(
    data=st.data(),
    rule=st.sampled_from(["error", "keep_checkpoint", "replan"]),
)
def test_a_corrupted_control_state_is_refused_or_in_force(
    saved: dict[str, Any],
    data: st.DataObject,
    rule: str,
) -> None:
    control = json.loads(saved["param_groups"][0]["control"])
    path = data.draw(st.sampled_from(paths(control)))
    parent = control
    for key in path[:-1]:
        parent = parent[key]
    if data.draw(st.booleans()):
        parent[path[-1]] = data.draw(JUNK)
    else:
        del parent[path[-1]]
    model, optimizer = make(on_config_change=rule)
    train(model, optimizer, 1, 1)
    before, tensors = optimizer.control_state_dict(), everything(model, optimizer)
    policy, config = optimizer.policy, optimizer.config
    logging.disable(logging.WARNING)
    failure = ""
    try:
        optimizer.load_state_dict(with_control(saved, json.dumps(control)))
    except ValueError as error:
        failure = str(error)
    finally:
        logging.disable(logging.NOTSET)
    if failure:
        assert ": " in failure
        assert optimizer.control_state_dict() == before
        assert optimizer.policy is policy
        assert optimizer.config is config
        assert all(map(torch.equal, everything(model, optimizer), tensors))
    else:
        # What is accepted is in force, and training goes on.
        train(model, optimizer, 6, 8)
        assert optimizer.num_steps_taken == control["steps_taken"] + 3


# ---------------------------------------------------------------- other optimizers


def matrices_of(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, param) for name, param in model.named_parameters() if "layers" in name]


@pytest.mark.parametrize("origin", ["Muon", "AdamW", "SGD"])
def test_a_foreign_state_is_named(origin: str) -> None:
    model = models.plain_model(SHAPES)
    params = [param for _, param in matrices_of(model)]
    foreign = getattr(torch.optim, origin)(params, lr=1e-3)
    message = refusal(foreign.state_dict())
    assert f"look like those of torch.optim.{origin}" in message
    assert "docs/checkpoints.md" in message
