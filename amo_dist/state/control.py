"""The control state: what an optimizer remembers of its run beside tensors.

Nothing here communicates: a rank that finds a fault raises alone, and who loads tells the others.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Mapping
from typing import Any

from amo_dist.config import MuonConfig
from amo_dist.schedule import fields
from amo_dist.schedule.grouping import Groups
from amo_dist.schedule.policies import Policy, State

logger = logging.getLogger(__name__)

FORMAT = "amo_dist.control"
VERSION = 1

_FREE_FIELDS = frozenset(
    {
        "ownership",
        "max_team",
        "bucket_bytes",
        "ns_kernels",
        "compile_updates",
        "nonfinite",
        "ns_guard_every",
        "on_config_change",
    }
)
"""Configuration that may change on resume: it says how the work is done, or what to do about a
fault, and nothing that a plan was made of."""

_GONE = frozenset(
    {
        *("objective", "budget_unit", "observe_in_background", "ns_guard_fallback"),
        *("adamw_implementation", "buckets_in_flight", "cuda_graphs", "momentum_dtype"),
        *("ns_backend", "ns_guard_bound", "owners", "update_scale"),
    }
)
"""Configuration of earlier versions, which says nothing any more; but see `_as_today`."""

_REQUIRED = ("format", "version", "steps_taken", "steps_skipped", "config", "policy")


@dataclasses.dataclass(frozen=True, slots=True)
class Control:
    """What decides how an optimizer goes on, beside its tensors.

    Attributes:
        steps_taken: Optimizer steps, skipped ones included.
        steps_skipped: Of those, the ones that changed nothing.
        config: The settings in force.
        policy: Which schedules are run.
        state: What the policy remembers.
    """

    steps_taken: int
    steps_skipped: int
    config: MuonConfig
    policy: Policy
    state: State


def control_record(control: Control) -> dict[str, Any]:
    """What a checkpoint must hold beside tensors, as JSON values."""
    state = control.policy.to_dict(control.state)
    return {
        "format": FORMAT,
        "version": VERSION,
        "steps_taken": control.steps_taken,
        "steps_skipped": control.steps_skipped,
        "config": control.config.to_dict(),
        "policy": state,
        "policy_digest": _digest(state),
    }


def to_text(record: Mapping[str, Any]) -> str:
    """One line of JSON, the same for equal records."""
    return json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False)


def restore(
    record: object, running: MuonConfig, policy: Policy, groups: Groups | None = None
) -> Control:
    """A control that goes on from a record.

    Fields that an older version did not write take their defaults, or stand for what was done
    before there was a choice. Where settings differ, ``on_config_change`` of this run decides.

    Args:
        record: What `control_record` returned.
        running: Settings of this run.
        policy: Of this run; stays as it is.
        groups: Of all matrices of the world, where they are known; the first step compares them
            else.

    Raises:
        ValueError: A field is missing, unknown, malformed, damaged or of another run; names the
            field, what was found and what was expected.
    """
    found = _check_record(record)
    state = found["policy"]
    fields.read_choice("control.policy", state.get("policy"), policy.name)
    known = type(running)().to_dict()
    fields.read_record("control.config", found["config"], [], {*known, *_GONE})
    defaults = {name: value for name, value in known.items() if name not in _FREE_FIELDS}
    saved = {**defaults, **_as_today(found["config"])}
    config = _settled(running, _changed(saved, running))
    resumed, restored = policy.resumed(
        state,
        groups,
        steps_taken=found["steps_taken"],
        config=config,
        changed=_changed(saved, config),
    )
    # Last: what is malformed has been named by then.
    if "policy_digest" in found and found["policy_digest"] != _digest(state):
        expected = f"{_digest(state)}, that of the policy's state: it is damaged or was edited"
        fields.fail("control.policy_digest", found["policy_digest"], expected)
    counts = found["steps_taken"], found["steps_skipped"]
    return Control(*counts, config, resumed, restored)


def _check_record(record: object) -> Mapping[str, Any]:
    """The record with fields of the right kinds; what is in ``config`` and ``policy`` is not."""
    if not isinstance(record, Mapping):
        fields.fail("control", record, "a mapping")
    fields.read_choice("control.format", record.get("format"), FORMAT)
    if type(record.get("version")) is not int or record["version"] != VERSION:
        expected = f"{VERSION}; a newer version needs a newer amo_dist"
        fields.fail("control.version", record.get("version"), expected)
    fields.read_record("control", record, _REQUIRED, ["policy_digest"])
    taken = fields.read_int("control.steps_taken", record["steps_taken"], 0)
    fields.read_int("control.steps_skipped", record["steps_skipped"], 0, taken)
    if not isinstance(record["policy"], Mapping):
        fields.fail("control.policy", record["policy"], "an object")
    return record


def _as_today(config: Mapping[str, Any]) -> dict[str, Any]:
    """Saved settings in today's words: one says how to plan where there were three."""
    kept = {name: value for name, value in config.items() if name not in _GONE}
    kept.setdefault("update_norm", "as_is")  # before there was a choice
    if "objective" in config or config.get("planner") in ("exact", "greedy"):
        objective = config.get("objective", "projected")
        fields.read_choice("control.config.objective", objective, "measured", "projected")
        kept["planner"] = "measured" if objective == "measured" else "paper"
    return kept


def _changed(saved: Mapping[str, Any], config: MuonConfig) -> dict[str, Any]:
    """The checkpoint's values of settings that differ."""
    # JSON tells 5 from 5.0 and from true, and so does this.
    return {
        name: saved[name]
        for name, value in sorted(config.to_dict().items())
        if name not in _FREE_FIELDS and (type(saved[name]), saved[name]) != (type(value), value)
    }


def _settled(config: MuonConfig, changed: Mapping[str, Any]) -> MuonConfig:
    """The settings to go on with, where the checkpoint has others, as ``on_config_change`` says.

    Args:
        config: Of this run.
        changed: The checkpoint's values of those that differ.
    """
    if not changed:
        return config
    running, rule = config.to_dict(), config.on_config_change
    told = "; ".join(
        f"{field}: the checkpoint has {saved!r}, this run has {running[field]!r}"
        for field, saved in changed.items()
    )
    if rule == "error":
        raise ValueError(
            f"control.config: {told}; set on_config_change to 'keep_checkpoint' or 'replan' to go "
            "on all the same"
        )
    if rule == "replan":
        logger.warning("settings have changed, and those of this run are in force: %s", told)
        return config
    if "bfloat16_params" in changed:
        made = running["bfloat16_params"]
        expected = f"{made!r}: state has been made, keep_checkpoint cannot change it"
        fields.fail("control.config.bfloat16_params", changed["bfloat16_params"], expected)
    try:
        kept = dataclasses.replace(config, **{**running, **changed})
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"control.config.{error}") from None
    logger.warning("settings have changed, and those of the checkpoint stay in force: %s", told)
    return kept


def _digest(state: Mapping[str, Any]) -> str:
    return hashlib.sha256(to_text(state).encode()).hexdigest()
