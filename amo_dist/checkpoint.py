"""Saving and restoring the optimizer: the control state, and all-or-nothing loads."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from amo_dist.config import MuonConfig
from amo_dist.schedule.policies import Policy

if TYPE_CHECKING:
    from amo_dist.optimizer import Muon

FORMAT = "amo_dist.control"
VERSION = 1

_FREE_FIELDS = frozenset(
    {
        "ownership",
        "owners",
        "bucket_bytes",
        "buckets_in_flight",
        "nonfinite",
        "adamw_implementation",
    }
)
"""Configuration that may change on resume: it says how the work is done, not what comes out."""


@dataclasses.dataclass(frozen=True, slots=True)
class Control:
    """A control state that has passed all checks but the policy's own."""

    steps_taken: int
    steps_skipped: int
    policy_state: Mapping[str, Any]


def control_state(
    *, steps_taken: int, steps_skipped: int, config: MuonConfig, policy: Policy
) -> dict[str, Any]:
    """What a checkpoint must hold beside tensors, as JSON values."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "steps_taken": steps_taken,
        "steps_skipped": steps_skipped,
        "config": config.to_dict(),
        "policy": policy.state_dict(),
    }


def to_text(state: Mapping[str, Any]) -> str:
    """One line of JSON, the same for equal states."""
    return json.dumps(state, sort_keys=True, separators=(",", ":"), allow_nan=False)


def from_text(text: object) -> dict[str, Any]:
    """Parse the control state of a parameter group.

    Raises:
        ValueError: It is missing, truncated or not a JSON object.
    """
    if not isinstance(text, str) or not text:
        raise ValueError(
            f"control: found {text!r}, expected the JSON text that an optimizer of amo_dist saves; "
            "is this the checkpoint of another optimizer?"
        )
    try:
        state = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"control: found broken JSON ({error}), expected a whole text") from None
    except RecursionError:
        raise ValueError("control: found JSON nested too deeply, expected a flat text") from None
    if not isinstance(state, dict):
        raise ValueError(f"control: found {type(state).__name__}, expected a JSON object")
    return state


def check_control(state: Mapping[str, Any], *, config: MuonConfig, policy: Policy) -> Control:
    """Check everything but the policy's own state.

    Raises:
        ValueError: Names the field, what was found and what was expected.
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"control: found {type(state).__name__}, expected a mapping")
    if state.get("format") != FORMAT:
        raise ValueError(f"control.format: found {state.get('format')!r}, expected {FORMAT!r}")
    if state.get("version") != VERSION:
        raise ValueError(
            f"control.version: found {state.get('version')!r}, expected {VERSION}; a newer version "
            "needs a newer amo_dist"
        )
    expected = {"format", "version", "steps_taken", "steps_skipped", "config", "policy"}
    if set(state) != expected:
        raise ValueError(f"control: found fields {sorted(state)}, expected {sorted(expected)}")
    for field in ("steps_taken", "steps_skipped"):
        if type(state[field]) is not int or state[field] < 0:
            raise ValueError(f"control.{field}: found {state[field]!r}, expected an integer >= 0")
    for field in ("config", "policy"):
        if not isinstance(state[field], Mapping):
            raise ValueError(f"control.{field}: found {state[field]!r}, expected an object")
    found_policy = state["policy"].get("policy")
    if found_policy != policy.name:
        raise ValueError(f"control.policy: found {found_policy!r}, expected {policy.name!r}")
    _check_config(state["config"], config.to_dict())
    return Control(state["steps_taken"], state["steps_skipped"], state["policy"])


def _check_config(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    differences = [
        f"{field}: the checkpoint has {found.get(field)!r}, this run has {expected.get(field)!r}"
        for field in sorted({*found, *expected} - _FREE_FIELDS)
        if found.get(field) != expected.get(field) or (field in found) != (field in expected)
    ]
    if differences:
        raise ValueError(f"control.config: {'; '.join(differences)}")


def load_state_dict(optimizer: Muon, state_dict: Mapping[str, Any]) -> None:
    """Restore `Muon.state_dict`; checks everything before it changes anything.

    Raises:
        ValueError: The state is of another structure, optimizer or configuration.
    """
    loaded = dict(state_dict)
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        replaced = hook(optimizer, loaded)
        loaded = loaded if replaced is None else replaced
    groups = _check_groups(loaded.get("param_groups"), optimizer.param_groups)
    texts = {group.get("control") for group in groups}
    if len(texts) != 1:
        raise ValueError(
            f"control: found {len(texts)} different texts in the parameter groups, expected one"
        )
    copies = _check_state(loaded.get("state"), groups, optimizer)
    optimizer.load_control_state_dict(from_text(texts.pop()))
    with torch.no_grad():
        for target, source in copies:
            target.copy_(source)
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        kept = {"params": group["params"], "control": group["control"]}
        group.update({**saved, **kept})
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


def _check_groups(found: object, expected: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if not isinstance(found, Sequence) or len(found) != len(expected):
        number = len(found) if isinstance(found, Sequence) else found
        raise ValueError(f"param_groups: found {number}, expected {len(expected)} groups")
    for index, (saved, group) in enumerate(zip(found, expected, strict=True)):
        if len(saved["params"]) != len(group["params"]):
            raise ValueError(
                f"param_groups[{index}].params: found {len(saved['params'])}, expected "
                f"{len(group['params'])} parameters"
            )
        if saved.get("algorithm") != group["algorithm"]:
            raise ValueError(
                f"param_groups[{index}].algorithm: found {saved.get('algorithm')!r}, expected "
                f"{group['algorithm']!r}"
            )
    return [dict(saved) for saved in found]


def _check_state(
    state: object, groups: Sequence[Mapping[str, Any]], optimizer: Muon
) -> list[tuple[Tensor, Tensor]]:
    """Pairs of the optimizer's tensor and the saved one, of the same shape."""
    if not isinstance(state, Mapping):
        raise ValueError(f"state: found {type(state).__name__}, expected a mapping")
    pairs: list[tuple[Tensor, Tensor]] = []
    for group, saved_group in zip(optimizer.param_groups, groups, strict=True):
        for param, key in zip(group["params"], saved_group["params"], strict=True):
            own, saved = optimizer.state[param], state.get(key, {})
            if set(saved) != set(own):
                raise ValueError(f"state[{key!r}]: found {sorted(saved)}, expected {sorted(own)}")
            for field, target in own.items():
                source = torch.as_tensor(saved[field])
                if source.shape != target.shape:
                    raise ValueError(
                        f"state[{key!r}].{field}: found shape {tuple(source.shape)}, expected "
                        f"{tuple(target.shape)}"
                    )
                if source is not target:
                    pairs.append((target, source))
    return pairs
