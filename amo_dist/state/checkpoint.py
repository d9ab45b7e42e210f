"""Saving and restoring the optimizer: the control state, and all-or-nothing loads.

Nothing here communicates: a rank that finds a fault raises alone. The ranks that found none fail
at their next step, where all compare what they are about to do.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from amo_dist.config import AMOConfig, MuonConfig
from amo_dist.distributed.agreement import world_group
from amo_dist.distributed.layout import local_tensor
from amo_dist.kernels.elementwise import exceed
from amo_dist.schedule import fields
from amo_dist.schedule.controller_state import ControllerState
from amo_dist.schedule.policies import AMOPolicy, Policy

if TYPE_CHECKING:
    from amo_dist.optimizers.muon import Muon

logger = logging.getLogger(__name__)

FORMAT = "amo_dist.control"
VERSION = 1

_FREE_FIELDS = frozenset(
    {
        "ownership",
        "owners",
        "bucket_bytes",
        "buckets_in_flight",
        "nonfinite",
        "observe_in_background",
        "ns_guard_every",
        "ns_guard_bound",
        "ns_guard_fallback",
        "adamw_implementation",
        "cuda_graphs",
        "on_config_change",
    }
)
"""Configuration that may change on resume: it says how the work is done, or what to do about a
fault, and nothing that a plan was made of."""


@dataclasses.dataclass(frozen=True, slots=True)
class Control:
    """A control state that has passed all checks but the policy's own.

    Attributes:
        steps_taken: Optimizer steps, skipped ones included.
        steps_skipped: Of those, the ones that changed nothing.
        config: In force from now on.
        policy_state: For the policy of this configuration.
    """

    steps_taken: int
    steps_skipped: int
    config: MuonConfig
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

    Where settings differ, ``config.on_config_change`` decides: ``error`` raises;
    ``keep_checkpoint`` goes on with all settings of the checkpoint (``momentum_dtype``, which is
    fixed at construction, must be the same); ``replan`` goes on with those of this run and, where
    one that AMO adds differs, drops the plan: the uniform schedule returns until the plan, which
    comes with the first observation due at or after ``observe_until`` of this run, at least one
    more being made. Earlier observations are kept, unless ``granularity`` differs.

    Raises:
        ValueError: Names the field, what was found and what was expected.
    """
    _check_fields(state)
    found_policy = state["policy"].get("policy")
    if found_policy != policy.name:
        raise ValueError(f"control.policy: found {found_policy!r}, expected {policy.name!r}")
    policy_state: Mapping[str, Any] = state["policy"]
    differing = _differing(state["config"], config.to_dict())
    if differing:
        config, policy_state = _resolve_change(state, differing, config)
    return Control(state["steps_taken"], state["steps_skipped"], config, policy_state)


def _check_fields(state: Mapping[str, Any]) -> None:
    if not isinstance(state, Mapping):
        raise ValueError(f"control: found {type(state).__name__}, expected a mapping")
    if state.get("format") != FORMAT:
        raise ValueError(f"control.format: found {state.get('format')!r}, expected {FORMAT!r}")
    if type(state.get("version")) is not int or state["version"] != VERSION:
        raise ValueError(
            f"control.version: found {state.get('version')!r}, expected {VERSION}; a newer version "
            "needs a newer amo_dist"
        )
    expected = {"format", "version", "steps_taken", "steps_skipped", "config", "policy"}
    if set(state) != expected:
        found = sorted(map(repr, state))
        raise ValueError(f"control: found fields {', '.join(found)}, expected {sorted(expected)}")
    for field in ("steps_taken", "steps_skipped"):
        if type(state[field]) is not int or state[field] < 0:
            raise ValueError(f"control.{field}: found {state[field]!r}, expected an integer >= 0")
    if state["steps_skipped"] > state["steps_taken"]:
        raise ValueError(
            f"control.steps_skipped: found {state['steps_skipped']}, expected at most steps_taken "
            f"= {state['steps_taken']}"
        )
    for field in ("config", "policy"):
        if not isinstance(state[field], Mapping):
            raise ValueError(f"control.{field}: found {state[field]!r}, expected an object")


def _differing(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Compared fields that differ; JSON tells 5 from 5.0 and from true, and so does this."""
    missing = object()
    pairs = {
        field: (found.get(field, missing), expected.get(field, missing))
        for field in {*found, *expected} - _FREE_FIELDS
    }
    return sorted(f for f, (a, b) in pairs.items() if type(a) is not type(b) or a != b)


def _resolve_change(
    state: Mapping[str, Any], differing: Sequence[str], config: MuonConfig
) -> tuple[MuonConfig, Mapping[str, Any]]:
    """Settings and policy state to go on with, where the checkpoint has other settings."""
    found, expected = state["config"], config.to_dict()
    changes = "; ".join(
        f"{field}: the checkpoint has {found.get(field)!r}, this run has {expected.get(field)!r}"
        for field in differing
    )
    rule = config.on_config_change if isinstance(config, AMOConfig) else "error"
    if rule == "error":
        remedy = (
            "; set on_config_change to 'keep_checkpoint' or 'replan' to go on all the same"
            if isinstance(config, AMOConfig)
            else ""
        )
        raise ValueError(f"control.config: {changes}{remedy}")
    if set(found) - _FREE_FIELDS != set(expected) - _FREE_FIELDS:
        raise ValueError(f"control.config: {changes}; fields are missing or unknown")
    if rule == "keep_checkpoint":
        return _checkpoint_config(found, differing, config), state["policy"]
    logger.warning("settings have changed, and those of this run are in force: %s", changes)
    own = {field.name for field in dataclasses.fields(MuonConfig)}
    if set(differing) <= own:
        return config, state["policy"]
    kept: list[Any] = []
    if "granularity" not in differing:
        for field in ("observations", "observations_since_plan"):
            kept += fields.read_list(f"control.policy.{field}", state["policy"].get(field))
    fresh = ControllerState(replanned_at=state["steps_taken"]).to_dict()
    return config, {**state["policy"], **fresh, "observations": kept}


def _checkpoint_config(
    found: Mapping[str, Any], differing: Sequence[str], config: MuonConfig
) -> MuonConfig:
    if "momentum_dtype" in differing:
        raise ValueError(
            f"control.config.momentum_dtype: found {found['momentum_dtype']!r}, expected "
            f"{config.momentum_dtype!r}: momentum has been made, keep_checkpoint cannot change it"
        )
    try:
        kept = dataclasses.replace(config, **{field: found[field] for field in differing})
    except ValueError as error:
        raise ValueError(f"control.config.{error}") from None
    logger.warning(
        "settings have changed, and those of the checkpoint stay in force: %s",
        "; ".join(f"{field} = {found[field]!r}" for field in differing),
    )
    return kept


def restore_policy(control: Control, optimizer: Muon) -> Policy:
    """The policy with its restored state; on an error nothing has changed.

    Raises:
        ValueError: The state is damaged, at odds with the steps taken, or of a model with other
            operator types.
    """
    policy = optimizer.policy
    if control.config != optimizer.config:
        assert isinstance(control.config, AMOConfig)
        policy = AMOPolicy(control.config)
        if optimizer.world is not None:
            policy.bind(optimizer.world.registry)
    before = policy.state_dict()
    try:
        policy.load_state_dict(control.policy_state)
        policy.check_progress(control.steps_taken)
        _check_operator_types(control, optimizer)
    except ValueError:
        policy.load_state_dict(before)
        raise
    return policy


def _check_operator_types(control: Control, optimizer: Muon) -> None:
    """Refuse a model's checkpoint by its operator types, before the world's registry is known.

    A pipeline stage knows its own types only; the rest is compared at the first step.
    """
    config, observations = control.config, control.policy_state.get("observations")
    if not isinstance(config, AMOConfig) or config.granularity != "operator_type":
        return
    if not observations:
        return
    found, here = set(observations[0]["ell"]), set(optimizer.operator_types)
    unknown = found - here if world_group() is None else set()
    if here - found or unknown:
        raise ValueError(
            f"control.policy.observations: found operator types {sorted(found)}, expected "
            f"{sorted(here)}: this is the checkpoint of another model, or of one whose parameters "
            "were classified otherwise"
        )


def load_state_dict(optimizer: Muon, state_dict: Mapping[str, Any]) -> None:
    """Restore `Muon.state_dict`; checks everything before it changes anything.

    Checkpoint helpers that read in place have changed the tensors before this is called.

    Raises:
        ValueError: The state is of another structure, optimizer or configuration, or damaged.
    """
    loaded = dict(state_dict)
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        replaced = hook(optimizer, loaded)
        loaded = loaded if replaced is None else replaced
    groups = _check_groups(loaded.get("param_groups"), optimizer.param_groups)
    copies = _check_state(loaded.get("state"), groups, optimizer)
    optimizer.load_control_state_dict(from_text(groups[0]["control"]))
    with torch.no_grad():
        for target, source in copies:
            if source is not target:
                target.copy_(source)
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        kept = {"params": group["params"], "control": group["control"]}
        # Copied, as PyTorch does: a tensor learning rate must not be shared with the checkpoint.
        group.update({**copy.deepcopy(saved), **kept})
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


def _check_groups(found: object, expected: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    is_list = isinstance(found, Sequence) and not isinstance(found, str)
    if not is_list or not all(isinstance(group, Mapping) for group in found):  # type: ignore[attr-defined]
        raise ValueError(f"param_groups: found {type(found).__name__}, expected a list of groups")
    groups = [dict(group) for group in found]  # type: ignore[attr-defined]
    _check_origin(groups)
    if len(groups) != len(expected):
        raise ValueError(f"param_groups: found {len(groups)}, expected {len(expected)} groups")
    for index, (saved, group) in enumerate(zip(groups, expected, strict=True)):
        num_params = len(saved.get("params", ()))
        if num_params != len(group["params"]):
            raise ValueError(
                f"param_groups[{index}].params: found {num_params}, expected "
                f"{len(group['params'])} parameters"
            )
        if saved.get("algorithm") != group["algorithm"]:
            raise ValueError(
                f"param_groups[{index}].algorithm: found {saved.get('algorithm')!r}, expected "
                f"{group['algorithm']!r}"
            )
    return groups


def _check_origin(groups: Sequence[Mapping[str, Any]]) -> None:
    """Every group carries the one text that amo_dist saves."""
    if not any(group.get("control") for group in groups):
        raise ValueError(
            f"control: found none in the parameter groups, which look like those of "
            f"{describe_origin(groups)}; to start from the state of another optimizer use "
            "amo_dist.import_state(optimizer, state_dict)"
        )
    texts = {repr(group.get("control")) for group in groups}
    if len(texts) != 1:
        raise ValueError(
            f"control: found {len(texts)} different texts in the parameter groups, expected one"
        )


def describe_origin(groups: Sequence[Mapping[str, Any]]) -> str:
    """Which optimizer made these parameter groups, by their keys."""
    keys = {key for group in groups for key in group}
    if "control" in keys:
        return "amo_dist"
    for key, origin in (
        ("ns_coefficients", "torch.optim.Muon"),
        ("dampening", "torch.optim.SGD"),
        ("amsgrad", "torch.optim.AdamW or Adam"),
    ):
        if key in keys:
            return origin
    return f"an unknown optimizer (keys {sorted(map(str, keys))})"


def _check_state(
    state: object, groups: Sequence[Mapping[str, Any]], optimizer: Muon
) -> list[tuple[Tensor, Tensor]]:
    """Pairs of the optimizer's tensor and the saved one: same shape and placements, finite."""
    if not isinstance(state, Mapping):
        raise ValueError(f"state: found {type(state).__name__}, expected a mapping")
    names = {id(param): name for name, param in optimizer.params_by_name.items()}
    pairs: list[tuple[Tensor, Tensor]] = []
    places: list[str] = []
    for group, saved_group in zip(optimizer.param_groups, groups, strict=True):
        for param, key in zip(group["params"], saved_group["params"], strict=True):
            own, saved = optimizer.state[param], state.get(key, {})
            name = names[id(param)]
            if not isinstance(saved, Mapping) or set(saved) != set(own):
                found = sorted(map(str, saved)) if isinstance(saved, Mapping) else saved
                raise ValueError(f"state of {name}: found {found!r}, expected {sorted(own)}")
            for field, target in own.items():
                place = f"state of {name}.{field}"
                pairs.append((target, check_source(place, saved[field], target)))
                places.append(place)
    check_finite(places, [source for _, source in pairs])
    return pairs


def check_source(place: str, found: object, target: Tensor) -> Tensor:
    """The saved value as a tensor that can be copied to ``target``.

    Raises:
        ValueError: Of another kind, shape or layout; names ``place``.
    """
    if not isinstance(found, (Tensor, int, float)) or isinstance(found, bool):
        raise ValueError(f"{place}: found {type(found).__name__}, expected a tensor")
    source = torch.as_tensor(found)
    if source.shape != target.shape:
        raise ValueError(
            f"{place}: found shape {tuple(source.shape)}, expected {tuple(target.shape)}"
        )
    if _placement(source) != _placement(target):
        raise ValueError(
            f"{place}: found {_placement(source)}, expected {_placement(target)}; "
            "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict distributes a whole "
            "state dict"
        )
    return source


def _placement(tensor: Tensor) -> str:
    if isinstance(tensor, DTensor):
        return f"a DTensor {tuple(tensor.placements)} on {tensor.device_mesh.mesh.tolist()}"
    return "a plain tensor"


def check_finite(places: Sequence[str], tensors: Sequence[Tensor]) -> None:
    """Refuse NaN and inf on this rank; one wait for each device.

    Raises:
        ValueError: Names the first place, and the remedy.
    """
    by_device: dict[torch.device, list[tuple[str, Tensor]]] = defaultdict(list)
    for place, tensor in zip(places, tensors, strict=True):
        local = local_tensor(tensor)
        if local.numel() > 0 and local.is_floating_point():
            by_device[local.device].append((place, local))
    for held in by_device.values():
        bounds = [torch.finfo(local.dtype).max for _, local in held]
        is_bad = exceed([local for _, local in held], bounds).tolist()
        for (place, _), bad in zip(held, is_bad, strict=True):
            if bad:
                raise ValueError(
                    f"{place}: found NaN or inf, expected finite values: the checkpoint was "
                    "damaged, or made after training had diverged; load an earlier one"
                )
