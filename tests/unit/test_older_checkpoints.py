"""The checkpoints of every version so far load, and go on as that version did."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from amo_dist.schedule.types import Schedule
from tests.checkpoints.make import CASES, FIELDS, STEPS_AFTER, make, parameters, train, write
from tests.unit import test_checkpoint

FOLDER = Path(__file__).parents[1] / "checkpoints"
VERSIONS = sorted(path.name for path in FOLDER.iterdir() if (path / "locked.pt").exists())
SAVED = [(path.parent.name, path.stem) for path in sorted(FOLDER.glob("*/*.pt"))]
SINCE_THE_FIRST = {"measured_observation", "measured_transition", "measured_again"}
"""Cases that need what the first version had not."""
# A schedule composed for what was observed after the load: the last bits of a singular value are
# those of the machine's LAPACK, and a coefficient moves no more than the bound it is composed for.
OBSERVED = 1e-3
# Float32 Newton-Schulz of another machine rounds otherwise; each of six steps moves a parameter by
# no more than lr * 0.2 * sqrt(24) = 1e-2, of which rounding is far below one part in a hundred.
PARAMETERS = 1e-4
# What is accepted and ignored; the last one says in other words what three of them said.
GONE = {
    *("objective", "budget_unit", "observe_in_background", "ns_guard_fallback", "fallbacks"),
    *("adamw_implementation", "buckets_in_flight", "cuda_graphs", "momentum_dtype", "owners"),
    *("ns_guard_bound", "update_scale", "planner", "ns_backend"),
}


def read(version: str, name: str, folder: Path = FOLDER) -> tuple[dict[str, Any], dict[str, Any]]:
    told = json.loads((folder / version / f"{name}.json").read_text())
    return torch.load(folder / version / f"{name}.pt", weights_only=True), told


def holds(found: Any, before: Any) -> bool:
    """Whether all that a version wrote is there: later ones add fields, and change none."""
    if isinstance(before, Mapping):
        return before.keys() <= found.keys() and all(holds(found[k], before[k]) for k in before)
    if isinstance(before, list):
        return len(found) == len(before) and all(map(holds, found, before))
    return type(found) is type(before) and found == before


def as_schedule(found: dict[str, Any]) -> Schedule:
    coefficients = tuple((a, b, c) for a, b, c in found["coefficients"])
    return Schedule(coefficients, found["norm_scale"], found["preconditioner"])


def check_schedules(found: Mapping[str, Schedule], told: dict[str, Any], *, is_exact: bool) -> None:
    expected = {name: as_schedule(schedule) for name, schedule in told.items()}
    if is_exact:
        assert dict(found) == expected
        return
    assert found.keys() == expected.keys()
    for name, schedule in found.items():
        assert schedule.num_steps == expected[name].num_steps
        for triple, other in zip(schedule.coefficients, expected[name].coefficients, strict=True):
            assert triple == pytest.approx(other, rel=OBSERVED)


def test_there_is_the_first_version() -> None:
    assert "0.1.0" in VERSIONS
    for version in VERSIONS:
        sizes = [path.stat().st_size for path in (FOLDER / version).iterdir()]
        expected = CASES.keys() - SINCE_THE_FIRST if version == "0.1.0" else CASES.keys()
        assert {name for at, name in SAVED if at == version} == expected
        assert len(sizes) == 2 * len(expected)
        assert sum(sizes) < 300_000


def check_goes_on(saved: dict[str, Any], told: dict[str, Any], name: str, **fields: Any) -> None:
    """As the version did that saved it, with the case's settings or others that keep them."""
    case = dataclasses.replace(CASES[name], fields={**CASES[name].fields, **fields})
    model, optimizer = make(case)
    optimizer.load_state_dict(saved["optimizer"])
    model.load_state_dict(saved["model"])
    control, before = optimizer.control_state_dict(), told["control"]
    policy = {key: value for key, value in before["policy"].items() if key not in GONE}
    kept = {key: value for key, value in before.items() if key != "policy_digest"}
    assert holds({**control, "config": before["config"]}, {**kept, "policy": policy})
    if not fields:
        config = {key: value for key, value in before["config"].items() if key not in GONE}
        assert holds(control["config"], config)
    gave_up = bool(before["policy"].get("fallbacks"))
    assert gave_up == (name == "fallback" and "fallbacks" in before["policy"])
    plan, is_exact, schedules = control["policy"].get("plan"), True, {}
    assert len(told["then"]) == STEPS_AFTER
    for expected in told["then"]:
        step, schedules = expected["step"], expected["schedules"] or schedules
        (found,) = train(model, optimizer, step)
        for key in ("step", "phase", "num_observations", "allocation"):
            assert found[key] == expected[key], (step, key)
        if gave_up:  # which no type does any more
            continue
        check_schedules(optimizer.schedules_by_group(step), schedules, is_exact=is_exact)
        is_exact &= optimizer.control_state_dict()["policy"].get("plan") == plan
    for key, param in parameters(model).items() if not gave_up else ():
        assert torch.allclose(param, saved["model_after"][key], rtol=0, atol=PARAMETERS), key


@pytest.mark.parametrize(("version", "name"), SAVED)
def test_a_checkpoint_loads_and_goes_on(version: str, name: str) -> None:
    check_goes_on(*read(version, name), name)


def test_the_checkpoints_of_this_version_load_and_go_on(tmp_path: Path) -> None:
    write(tmp_path / "now")
    assert {path.stem for path in tmp_path.glob("now/*.pt")} == CASES.keys()
    for name in CASES:
        check_goes_on(*read("now", name, tmp_path), name)
    _, told = read("now", "measured_observation", tmp_path)
    assert told["control"]["policy"]["error_sums"]["counts"] == dict.fromkeys(
        ("attn_q", "attn_o", "mlp_down"), 1
    )


# ---------------------------------------------------------------- before there was an objective

DEFAULTS = {"planner": "measured"}
PLANNING = sorted(name for _, name in SAVED if CASES[name].optimizer == "AMO")


def test_a_checkpoint_before_objectives_is_one_of_projected_errors() -> None:
    """With today's defaults it is another run, which the user is told."""
    saved, _ = read("0.1.0", "observation")
    _, optimizer = make(dataclasses.replace(CASES["observation"], fields={**FIELDS, **DEFAULTS}))
    with pytest.raises(
        ValueError,
        match=r"control\.config: planner: the checkpoint has 'paper', this run has 'measured'; set "
        "on_config_change",
    ):
        optimizer.load_state_dict(saved["optimizer"])
    assert optimizer.num_steps_taken == 0


@pytest.mark.parametrize("name", PLANNING)
def test_keep_checkpoint_keeps_projected_errors(name: str) -> None:
    check_goes_on(*read("0.1.0", name), name, **DEFAULTS, on_config_change="keep_checkpoint")


@pytest.mark.parametrize("name", ["observation", "plan", "locked", "second_transition"])
def test_replan_makes_a_measured_plan(name: str) -> None:
    saved, _ = read("0.1.0", name)
    fields = {**CASES[name].fields, **DEFAULTS, "on_config_change": "replan"}
    model, optimizer = make(dataclasses.replace(CASES[name], fields=fields))
    optimizer.load_state_dict(saved["optimizer"])
    model.load_state_dict(saved["model"])
    assert optimizer.phase == "observation"
    # One more observation is made, whatever there was; it alone was measured.
    train(model, optimizer, max(4, (CASES[name].saved_at // 2 + 1) * 2))
    plan = optimizer.control_state_dict()["policy"]["plan"]
    assert plan["criterion"] == "update"
    assert len(plan["measured"]) == 3
    train(model, optimizer, optimizer.num_steps_taken + 3)
    assert optimizer.phase == "locked"


# ---------------------------------------------------------------- fields of other versions


@pytest.fixture(scope="module")
def saved() -> dict[str, Any]:
    return test_checkpoint.save()


def of_an_older_version(saved: dict[str, Any], *lacking: tuple[str, ...]) -> dict[str, Any]:
    """Without fields, and without the digest of what it has not written."""
    control = json.loads(saved["param_groups"][0]["control"])
    for *parents, last in [*lacking, ("policy_digest",)]:
        parent = control
        for key in parents:
            parent = parent[key]
        del parent[last]
    return test_checkpoint.with_control(saved, json.dumps(control))


def test_fields_that_a_checkpoint_lacks_take_their_defaults(saved: dict[str, Any]) -> None:
    older = of_an_older_version(saved, ("config", "seed"), ("policy", "transition_from"))
    _, optimizer = test_checkpoint.make()
    optimizer.load_state_dict(older)
    control = json.loads(saved["param_groups"][0]["control"])
    assert optimizer.control_state_dict() == control


def test_a_setting_that_a_checkpoint_lacks_had_its_default(saved: dict[str, Any]) -> None:
    older = of_an_older_version(saved, ("config", "seed"))
    assert "seed: the checkpoint has 42, this run has 7" in test_checkpoint.refusal(older, seed=7)


@pytest.mark.parametrize("path", [("policy", "plan", "costs"), ("steps_taken",), ("config",)])
def test_a_field_without_a_default_is_needed(saved: dict[str, Any], path: tuple[str, ...]) -> None:
    message = test_checkpoint.refusal(of_an_older_version(saved, path))
    assert f"{path[-1]}: found 'nothing', expected this key" in message
