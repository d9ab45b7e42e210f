"""The control state: the memory of an optimizer beside tensors, as a checkpoint holds it.

Nothing here communicates: a rank that finds a fault raises alone, and the caller tells the others.
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
from amo_dist.schedule.policies import Control, Policy

logger = logging.getLogger(__name__)

FORMAT = "amo_dist.control"
VERSION = 1

_FREE_FIELDS = frozenset(
    {
        "ownership",
        "bucket_bytes",
        "ns_kernels",
        "nonfinite",
        "ns_guard_every",
        "on_config_change",
    }
)
"""Settings that may change on resume, as no plan depends on them."""

_KEYS = (
    *("format", "version", "steps_taken", "steps_skipped", "config", "policy", "policy_digest"),
)


def control_record(control: Control) -> dict[str, Any]:
    """The part of a checkpoint beside tensors, as JSON values."""
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

    Where settings differ, ``on_config_change`` of this run decides.

    Args:
        record: Result of `control_record`.
        running: Settings of this run.
        policy: Policy of this run; stays as it is.
        groups: Groups of all matrices of the world, if they are known; else the first step
            compares them.

    Raises:
        ValueError: A field is missing, unknown, malformed, damaged or of another run; names the
            field, what was found and what was expected.
    """
    checked = _check_record(record)
    state = checked["policy"]
    fields.read_choice("control.policy", state.get("policy"), policy.name)
    saved = fields.read_record("control.config", checked["config"], running.to_dict())
    config = _settled(running, _changed(saved, running))
    resumed, restored = policy.resumed(
        state,
        groups,
        steps_taken=checked["steps_taken"],
        config=config,
        changed=_changed(saved, config),
    )
    # The digest comes last: the errors above name a malformed field.
    if checked["policy_digest"] != _digest(state):
        expected = f"{_digest(state)}, that of the policy's state: it is damaged or was edited"
        fields.fail("control.policy_digest", checked["policy_digest"], expected)
    counts = checked["steps_taken"], checked["steps_skipped"]
    return Control(*counts, config, resumed, restored)


def _check_record(record: object) -> Mapping[str, Any]:
    """The record, whose fields have the right kinds, but for those of ``config`` and ``policy``."""
    if not isinstance(record, Mapping):
        fields.fail("control", record, "a mapping")
    fields.read_choice("control.format", record.get("format"), FORMAT)
    if type(record.get("version")) is not int or record["version"] != VERSION:
        expected = f"{VERSION}; a newer version needs a newer amo_dist"
        fields.fail("control.version", record.get("version"), expected)
    fields.read_record("control", record, _KEYS)
    taken = fields.read_int("control.steps_taken", record["steps_taken"], 0)
    fields.read_int("control.steps_skipped", record["steps_skipped"], 0, taken)
    if not isinstance(record["policy"], Mapping):
        fields.fail("control.policy", record["policy"], "an object")
    return record


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
        config: Settings of this run.
        changed: Values of the checkpoint for the settings that differ.
    """
    if not changed:
        return config
    running, rule = config.to_dict(), config.on_config_change
    differences = "; ".join(
        f"{field}: the checkpoint has {saved!r}, this run has {running[field]!r}"
        for field, saved in changed.items()
    )
    if rule == "error":
        raise ValueError(
            f"control.config: {differences}; set on_config_change to 'keep_checkpoint' or "
            "'replan' to go on all the same"
        )
    if rule == "replan":
        logger.warning("settings have changed, and those of this run are in force: %s", differences)
        return config
    if "bfloat16_params" in changed:
        made = running["bfloat16_params"]
        expected = f"{made!r}: state has been made, keep_checkpoint cannot change it"
        fields.fail("control.config.bfloat16_params", changed["bfloat16_params"], expected)
    try:
        kept = dataclasses.replace(config, **{**running, **changed})
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"control.config.{error}") from None
    logger.warning(
        "settings have changed, and those of the checkpoint stay in force: %s", differences
    )
    return kept


def _digest(state: Mapping[str, Any]) -> str:
    return hashlib.sha256(to_text(state).encode()).hexdigest()
