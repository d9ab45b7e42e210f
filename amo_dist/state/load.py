"""Loading a whole optimizer: everything is checked before anything changes."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from amo_dist.compat import load_hooks
from amo_dist.config import fail, require
from amo_dist.distributed.layout import local_tensor
from amo_dist.kernels.elementwise import ROUNDED_OFF


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """A state dict that fits an optimizer.

    Attributes:
        groups: Parameter groups that were saved.
        control: Record of the control state, which is not checked.
        copies: Pairs of a tensor of the optimizer and the saved tensor that replaces its values.
        notes: Entries of a wrapper in the state, by parameter.
    """

    groups: Sequence[Mapping[str, Any]]
    control: Any
    copies: Sequence[tuple[Tensor, Tensor]]
    notes: Mapping[Tensor, Mapping[str, Any]]

    def fill(self, optimizer: torch.optim.Optimizer) -> None:
        """Fill the optimizer's state tensors, in their own dtypes, and its groups; run its hooks.

        PyTorch's ``load_state_dict`` would cast momentum to the dtype of the parameter.
        """
        for target, source in self.copies:
            target.copy_(source)
        for param, notes in self.notes.items():
            optimizer.state[param] |= copy.deepcopy(dict(notes))
        for group, saved in zip(optimizer.param_groups, self.groups, strict=True):
            kept = {"params": group["params"], "control": group["control"]}
            # A copy, as in PyTorch: training must not change a tensor learning rate of the file.
            group.update({**copy.deepcopy(dict(saved)), **kept})
        _, hooks_after = load_hooks(optimizer)
        for hook in hooks_after:
            hook(optimizer)


def read(
    optimizer: torch.optim.Optimizer,
    params_by_name: Mapping[str, Tensor],
    names_by_group: Sequence[Sequence[str]],
    state_by_name: Mapping[str, Mapping[str, Tensor]],
    state_dict: Mapping[str, Any],
) -> Loaded:
    """Check what ``state_dict()`` of the optimizer returned, and change nothing.

    A checkpoint helper that reads in place changes the tensors before it calls this.

    Args:
        optimizer: Optimizer whose parameter groups hold its control state.
        params_by_name: Parameters of the optimizer, in the order of the groups.
        names_by_group: Names of the parameters in each group.
        state_by_name: State tensors of the optimizer itself, of each parameter.
        state_dict: State that ``state_dict()`` returned.

    Raises:
        ValueError: The state has another structure, belongs to another optimizer, or is damaged.
    """
    if not isinstance(state_dict, Mapping):
        fail("state_dict", state_dict, "the dict that state_dict() of an optimizer returns")
    loaded = dict(state_dict)
    hooks_before, _ = load_hooks(optimizer)
    for hook in hooks_before:
        replaced = hook(optimizer, loaded)
        loaded = loaded if replaced is None else replaced
    _check_form(loaded)
    frozen = [name for name, param in params_by_name.items() if not param.requires_grad]
    if frozen and loaded.get("param_names") is None:
        # PyTorch's helpers drop the state of frozen parameters: zeros would take its place.
        expected = "a parameter that requires a gradient: load the checkpoint first, then freeze it"
        fail(frozen[0], "a frozen parameter at a load by PyTorch's helpers", expected)
    groups = _check_groups(loaded.get("param_groups"), optimizer.param_groups)
    _order_by_name(groups, loaded.get("param_names"), names_by_group)
    copies, notes = _check_state(loaded.get("state"), groups, state_by_name)
    notes_by_param = {params_by_name[name]: values for name, values in notes.items()}
    return Loaded(groups, _read_control(groups[0]["control"]), copies, notes_by_param)


def _read_control(text: object) -> Any:
    try:
        return json.loads(text)  # type: ignore[arg-type]
    except (TypeError, ValueError, RecursionError):
        fail("control", text, "JSON text")


def _check_form(state_dict: Mapping[str, Any]) -> None:
    """Refuse the flattened form, which PyTorch's helper passes on if it cannot undo it."""
    flat_keys = (key for key in state_dict if str(key).startswith(("state.", "param_groups.")))
    flat = next(flat_keys, None)
    if flat is not None and "state" not in state_dict:
        raise ValueError(
            f"{flat}: found a flattened key, expected state and param_groups: "
            "set_optimizer_state_dict undoes flatten_optimizer_state_dict, but not together with "
            "full_state_dict; leave one of the two out"
        )


def _check_groups(saved_groups: Any, expected: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    is_list = isinstance(saved_groups, Sequence)
    is_groups = is_list and all(isinstance(group, Mapping) for group in saved_groups)
    require(is_groups, "param_groups", type(saved_groups).__name__, "a list of groups")
    groups = [dict(group) for group in saved_groups]
    _check_origin(groups)
    if len(groups) != len(expected):
        fail("param_groups", len(groups), f"{len(expected)} groups")
    for index, (saved, group) in enumerate(zip(groups, expected, strict=True)):
        place, num_params = f"param_groups[{index}]", len(saved.get("params", ()))
        if num_params != len(group["params"]):
            fail(f"{place}.params", num_params, f"{len(group['params'])} parameters")
        if saved.get("algorithm") != group["algorithm"]:
            fail(f"{place}.algorithm", saved.get("algorithm"), repr(group["algorithm"]))
    return groups


def _order_by_name(
    groups: Sequence[dict[str, Any]], saved: object, names_by_group: Sequence[Sequence[str]]
) -> None:
    """Bring saved parameters to the order of this optimizer's names, if a state dict has names.

    Without names two parameters of one shape could silently take each other's state.

    Args:
        groups: Saved groups, whose ``params`` are put in order.
        saved: Names that were saved, by group; None for state dicts of PyTorch's helpers, which
            match names themselves.
        names_by_group: Names of this optimizer.

    Raises:
        ValueError: A group holds other names.
    """
    if saved is None:
        return
    expected = [sorted(names) for names in names_by_group]
    if not isinstance(saved, Sequence) or len(saved) != len(expected):
        fail("param_names", saved, f"names of the parameters of {len(expected)} groups")
    for index, (group, names) in enumerate(zip(groups, saved, strict=True)):
        if not isinstance(names, Sequence) or sorted(map(str, names)) != expected[index]:
            others = sorted({*map(str, names)} ^ {*expected[index]}) if names else expected[index]
            place = f"param_names[{index}]"
            fail(place, f"other names than here ({', '.join(others[:3])})", "those of this group")
        keys = dict(zip(names, group["params"], strict=True))
        group["params"] = [keys[name] for name in names_by_group[index]]


def _check_origin(groups: Sequence[Mapping[str, Any]]) -> None:
    """Every group carries the one text that amo_dist saves."""
    if not any(group.get("control") for group in groups):
        raise ValueError(
            "control: found none in the parameter groups, whose keys are "
            f"{sorted({str(key) for group in groups for key in group})}, expected a checkpoint of "
            "amo_dist; to start from the state of another optimizer copy it by name, as take_over "
            "in docs/checkpoints.md does"
        )
    texts = {repr(group.get("control")) for group in groups}
    if len(texts) != 1:
        raise ValueError(f"control: found {len(texts)} different texts, expected one in all groups")


def _check_state(
    state: Any,
    groups: Sequence[Mapping[str, Any]],
    own_by_name: Mapping[str, Mapping[str, Tensor]],
) -> tuple[list[tuple[Tensor, Tensor]], dict[str, dict[str, Any]]]:
    """Pairs of the optimizer's tensor and the saved one: same shape and placements, finite.

    Entries that only a wrapper can know come apart, by name of the parameter.
    """
    require(isinstance(state, Mapping), "state", type(state).__name__, "a mapping")
    keys = [key for group in groups for key in group["params"]]
    pairs: list[tuple[Tensor, Tensor]] = []
    notes: dict[str, dict[str, Any]] = {}
    for (name, own), key in zip(own_by_name.items(), keys, strict=True):
        record = _with_rounded_off(state.get(key, {}), own)
        if not isinstance(record, Mapping) or not set(record) >= set(own):
            entries = sorted(map(str, record)) if isinstance(record, Mapping) else record
            fail(f"state of {name}", entries, f"{sorted(own)}")
        for field, target in own.items():
            source = _check_source(f"state of {name}.{field}", record[field], target)
            pairs.append((target, source))
        if foreign := {field: record[field] for field in record if field not in own}:
            notes[name] = foreign
    return pairs, notes


def _with_rounded_off(saved: object, own: Mapping[str, Tensor]) -> object:
    """Add zeros for what rounding took off if only this optimizer keeps it; drop it if it does not.

    The check of the settings decides whether ``bfloat16_params`` may change.
    """
    if not isinstance(saved, Mapping) or (ROUNDED_OFF in saved) == (ROUNDED_OFF in own):
        return saved
    added = {ROUNDED_OFF: torch.zeros_like(own[ROUNDED_OFF])} if ROUNDED_OFF in own else {}
    return {key: value for key, value in saved.items() if key != ROUNDED_OFF} | added


def _check_source(place: str, value: Any, target: Tensor) -> Tensor:
    """The saved value as a tensor that can be copied to ``target``.

    Raises:
        ValueError: The value has another kind, shape or layout, or a NaN or inf on this rank; names
            ``place``.
    """
    is_number = isinstance(value, (Tensor, int, float)) and not isinstance(value, bool)
    require(is_number, place, type(value).__name__, "a tensor")
    source = value if isinstance(value, Tensor) else torch.tensor(value, device="cpu")
    shape, expected = tuple(source.shape), tuple(target.shape)
    require(shape == expected, place, f"shape {shape}", str(expected))
    if _placement(source) != _placement(target):
        raise ValueError(
            f"{place}: found {_placement(source)}, expected {_placement(target)}; "
            "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict distributes a whole "
            "state dict"
        )
    local = local_tensor(source)
    is_real = local.is_floating_point() and local.numel() > 0
    if is_real and not torch.linalg.vector_norm(local, math.inf).isfinite():
        raise ValueError(
            f"{place}: found NaN or inf, expected finite values: the checkpoint was damaged, or "
            "made after training had diverged; load an earlier one"
        )
    return source


def _placement(tensor: Tensor) -> str:
    if isinstance(tensor, DTensor):
        return f"a DTensor {tuple(tensor.placements)} on {tensor.device_mesh.mesh.tolist()}"
    return "a plain tensor"
