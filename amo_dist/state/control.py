"""The control state: the memory of an optimizer beside tensors, as a checkpoint holds it.

It is plain JSON under a SHA-256 digest. Nothing here communicates: a rank that finds a fault raises
alone, and the caller tells the others.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import logging
from collections.abc import Mapping
from typing import Any

from amo_dist.config import MuonConfig, fail
from amo_dist.schedule.source import Source

logger = logging.getLogger(__name__)

FORMAT = "amo_dist.control"
VERSION = 1

# Settings that may change on resume, as no result depends on them.
_FREE_FIELDS = {
    *("ownership", "bucket_bytes", "ns_kernels", "nonfinite", "ns_guard_every", "on_config_change")
}


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduleState:
    """The part of an optimizer beside tensors, from which it goes on.

    Attributes:
        config: Settings in force.
        source: Source of schedules.
        steps_taken: Optimizer steps, skipped ones included.
        steps_skipped: Steps that changed nothing.
    """

    config: MuonConfig
    source: Source
    steps_taken: int = 0
    steps_skipped: int = 0


def control_record(state: ScheduleState) -> dict[str, Any]:
    """The control state as JSON values, with a digest."""
    record = {
        "format": FORMAT,
        "version": VERSION,
        "steps_taken": state.steps_taken,
        "steps_skipped": state.steps_skipped,
        "config": state.config.to_dict(),
        # Plain lists and dicts: torch.load(weights_only=True) refuses a named tuple.
        "source": json.loads(to_text(state.source.state())),
    }
    return {**record, "digest": digest(record)}


def to_text(record: Mapping[str, Any]) -> str:
    """One line of JSON, the same for equal records."""
    return json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(record: Mapping[str, Any]) -> str:
    """A hexadecimal SHA-256 of a record, its digest left out."""
    kept = {key: value for key, value in record.items() if key != "digest"}
    return hashlib.sha256(to_text(kept).encode()).hexdigest()


def restore(record: Any, running: ScheduleState, dtypes: tuple[str, str | None]) -> ScheduleState:
    """A state that goes on from a record; ``on_config_change`` decides where settings differ.

    Args:
        record: Result of `control_record`.
        running: State of this run, which stays as it is.
        dtypes: ``ns_dtype`` and ``wire_dtype`` as the user wrote them. ``auto`` keeps the
            checkpoint's dtype, whatever this machine computes fast.

    Raises:
        ValueError: The record is damaged or of another run; names the field, what was found and
            what was expected.
    """
    if not isinstance(record, Mapping):
        fail("control", record, "a mapping")
    if (record.get("format"), record.get("version")) != (FORMAT, VERSION):
        expected = f"{FORMAT} of version {VERSION}; a newer version needs a newer amo_dist"
        fail("control.version", (record.get("format"), record.get("version")), expected)
    try:
        expected = digest(record)
    except (TypeError, ValueError, RecursionError):  # of values that JSON does not have
        expected = "one of JSON values"
    if record.get("digest") != expected:
        text = f"{expected}, that of the state: it is damaged or was edited"
        fail("control.digest", record.get("digest"), text)
    name, saved = record["source"]["name"], record["config"]
    if name != running.source.name:
        expected = f"{running.source.name!r}: resume with the optimizer that saved it (AMO for "
        expected += (
            "'amo', ROOT for 'root', Muon and the others for 'fixed'), or copy its momentum "
        )
        expected += "by name, as take_over in docs/checkpoints.md does"
        fail("control.source", name, expected)
    if set(saved) != set(running.config.to_dict()):
        fail("control.config", sorted(saved), f"the settings {sorted(running.config.to_dict())}")
    config, ns_dtype = running.config, saved["ns_dtype"]
    if dtypes[0] == "auto" and ns_dtype != config.ns_dtype:
        kept = "ns_dtype = 'auto' keeps the checkpoint's %s; by itself this machine takes %s"
        logger.warning(kept, ns_dtype, config.ns_dtype)
        config = dataclasses.replace(config, ns_dtype=ns_dtype, wire_dtype=dtypes[1])
        config = config.in_force(has_bfloat16=True)
    config = _settled(config, _changed(saved, config))
    source = copy.copy(running.source)
    source.load(record["source"], config, _changed(saved, config), record["steps_taken"])
    return ScheduleState(config, source, record["steps_taken"], record["steps_skipped"])


def _changed(saved: Mapping[str, Any], config: MuonConfig) -> dict[str, Any]:
    """The checkpoint's values of settings that differ, but for those that nothing depends on."""
    running, free = config.to_dict(), set(_FREE_FIELDS)
    if "measured" == saved.get("planner") == running.get("planner"):
        free.add("shrinkage")
    # JSON tells 5 from 5.0 and from true, and so does this.
    return {
        name: saved[name]
        for name, value in sorted(running.items())
        if name not in free and (type(saved[name]), saved[name]) != (type(value), value)
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
    is_kept = rule == "keep_checkpoint" and "bfloat16_params" not in changed
    if rule != "replan" and not is_kept:
        # The state has been made for the parameters of this run.
        ways = "'replan'" if "bfloat16_params" in changed else "'keep_checkpoint' or 'replan'"
        raise ValueError(
            f"control.config: {differences}; set on_config_change to {ways} to go on all the same"
        )
    owner = "the checkpoint stay" if is_kept else "this run are"
    logger.warning("settings have changed, and those of %s in force: %s", owner, differences)
    return dataclasses.replace(config, **{**running, **changed}) if is_kept else config
