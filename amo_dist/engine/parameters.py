"""From parameter groups to the matrices of this process: names, layouts and local tensors."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from amo_dist.config import MathConfig
from amo_dist.distributed.layout import (
    MatrixLayout,
    TensorLayout,
    flattened,
    layout_of,
    local_tensor,
    matrix_layout,
)
from amo_dist.engine.rule import UpdateRule
from amo_dist.operators.views import MatrixView, require

ALGORITHMS = ("muon", "adamw")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """What parameter groups hold beside tensors and hyperparameters; stays for the whole run.

    Attributes:
        names: Of the parameters of each group.
        views: The matrices of a parameter, by its name, for each group.
        replica_ranks: Global ranks over which plain tensors are replicas.
    """

    names: tuple[tuple[str, ...], ...]
    views: tuple[Mapping[str, tuple[MatrixView, ...]], ...]
    replica_ranks: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One parameter of the optimizer.

    Attributes:
        name: Cleaned name, unique in the process.
        param: The parameter.
        group: Index of its parameter group.
        views: Its matrices; empty for AdamW.
        layout: Where its elements lie.
    """

    name: str
    param: Tensor
    group: int
    views: tuple[MatrixView, ...]
    layout: TensorLayout


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Parameters:
    """All parameters of the process, and the matrices in them.

    Attributes:
        entries: In the order of the groups.
        matrices: Layouts; `MatrixLayout.tensor` indexes ``entries``.
        operator_types: Of each matrix.
        params: Those of the entries.
        kinds: The dtype and the device of each, when they were laid out; all on one device.
        device: That one.
        convolutions: Indices of the entries whose four dims are one matrix.
    """

    entries: tuple[Entry, ...]
    matrices: tuple[MatrixLayout, ...]
    operator_types: tuple[str, ...]
    params: tuple[Tensor, ...]
    kinds: tuple[tuple[torch.dtype, torch.device], ...]
    device: torch.device
    convolutions: tuple[int, ...]

    def are_in(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Whether these very tensors are those of the groups, in the same order.

        Raises:
            ValueError: They are, but were cast or moved in place; names a parameter, what was found
                and what was expected.
        """
        held = list[Tensor]()
        for group in groups:
            held += group["params"]
        if len(held) != len(self.params) or not all(map(operator.is_, held, self.params)):
            return False
        kinds = tuple(map(_kind, self.params))
        if kinds != self.kinds:
            for entry, found, expected in zip(self.entries, kinds, self.kinds, strict=True):
                (dtype, device), (was, place) = found, expected
                remedy = "cast or move the model before the optimizer is built"
                told = f"{was} on {place.type}, as at construction: {remedy}"
                require(found == expected, entry.name, f"{dtype} on {device.type}", told)
        return True


_kind = operator.attrgetter("dtype", "device")


class Locals:
    """This rank's parts of parameters and state, the same tensors for as long as they stay.

    To make a view takes the host as long as to launch a kernel, and a step has hundreds. They share
    the memory of the whole ones; those of convolutions come as `flattened`.

    Args:
        parameters: Of this process.
        state: Of the optimizer, by parameter.

    Attributes:
        params: Of each entry, its parameter.
        state: Of each entry, the tensors of its state by name.
    """

    def __init__(
        self, parameters: Parameters, state: Mapping[Tensor, Mapping[str, Tensor]]
    ) -> None:
        self._parameters, self._state = parameters, state
        self._places: list[int] = []
        self.params: list[Tensor] = []
        self.state: list[dict[str, Tensor]] = []

    def refresh(self) -> bool:
        """Look where all of them lie now; whether any does so elsewhere than before."""
        params = self._parameters.params
        held = [each for param in params for each in (param, *self._state[param].values())]
        places = [
            (each._local_tensor if isinstance(each, DTensor) else each).data_ptr() for each in held
        ]
        if places == self._places:
            return False
        self._places = places
        self.params, self.state = list(map(local_tensor, params)), []
        for param in params:
            own = {name: local_tensor(value) for name, value in self._state[param].items()}
            self.state.append(own)
        for index in self._parameters.convolutions:
            own = self.state[index]
            self.params[index] = flattened(self.params[index])
            self.state[index] = {name: flattened(value) for name, value in own.items()}
        return True


def raw_gradient(grad: Tensor) -> Tensor:
    """This rank's part of a gradient as it is; of a misplaced one that is no part of the sum."""
    if not isinstance(grad, DTensor):
        return grad
    local: Tensor = grad._local_tensor
    return local.wait() if hasattr(local, "wait") else local


_READ = frozenset(
    {
        *("params", "algorithm", "control", "lr", "lr_scale", "weight_decay"),
        *("betas", "eps", "momentum", "nesterov"),
    }
)
"""Keys of a parameter group that every optimizer reads."""
_NOTED = frozenset(
    {
        *("name", "param_names", "matrix_views", "initial_lr", "max_lr", "min_lr", "swa_lr"),
        *("base_momentum", "max_momentum"),
    }
)
"""Keys in which users, PyTorch's schedulers and checkpoint helpers keep notes of their own."""
_NEEDED = ("params", "algorithm", "lr", "lr_scale", "weight_decay", "betas", "eps")
"""Keys that every parameter group must have."""
_BELOW_ZERO = -1e-12
"""What a rate may be at least: PyTorch's ``LinearLR`` ends at -1e-18 instead of 0, by rounding."""


def check_groups(groups: Sequence[Mapping[str, Any]], rule: UpdateRule | None) -> None:
    """Refuse groups with which no step can be taken; for each step, as schedulers write to them.

    A tensor on a device is not read: the host would wait.

    Args:
        groups: Parameter groups.
        rule: Knows and checks hyperparameters of its own; None for none.

    Raises:
        ValueError: A key that nothing reads, such as a misspelt one, or a value that means nothing;
            names the group and the field, what was found and what was expected.
    """
    own = rule.defaults if rule else {}
    for index, group in enumerate(groups):
        place = f"groups[{index}]."
        if unknown := sorted(group.keys() - _READ - _NOTED - own.keys(), key=str):
            known = ", ".join(sorted((_READ - {"params", "algorithm", "control"}) | own.keys()))
            raise ValueError(
                f"{place}{unknown[0]}: found a key that nothing reads, expected one of {known}"
            )
        if rule and (missing := [key for key in _NEEDED if key not in group]):
            raise ValueError(f"{place}{missing[0]}: found none, expected its value")
        check_hyperparameters(group, place)
        if rule and own:
            try:
                rule.check(group)
            except ValueError as error:
                raise ValueError(f"{place}{error}") from None


def check_hyperparameters(values: Mapping[str, Any], place: str = "") -> None:
    """Refuse what no training can mean.

    Args:
        values: Any of ``lr``, ``lr_scale``, ``weight_decay``, ``eps``, ``betas``, ``momentum`` and
            ``nesterov``.
        place: Goes before the field in the message, such as ``groups[1].``.

    Raises:
        ValueError: Names the field, what was found and what was expected.
    """
    for field in ("lr", "lr_scale", "weight_decay", "eps"):
        if field in values and not is_between(values[field], math.inf):
            found = f"{place}{field}: found {values[field]!r}"
            raise ValueError(f"{found}, expected a finite number >= 0")
    betas = values.get("betas", (0.0, 0.0))
    is_pair = isinstance(betas, Sequence) and len(betas) == 2
    if not is_pair or not all(is_between(beta, 1.0) for beta in betas):
        raise ValueError(f"{place}betas: found {betas!r}, expected two numbers in [0, 1)")
    momentum, nesterov = values.get("momentum", 0.0), values.get("nesterov", True)
    if not is_between(momentum, 1.0):
        raise ValueError(f"{place}momentum: found {momentum!r}, expected a number in [0, 1)")
    if not isinstance(nesterov, bool):
        raise ValueError(f"{place}nesterov: found {nesterov!r}, expected True or False")


def check_half(parameters: Parameters, groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuse float16 parameters of AdamW whose ``eps`` is 0 in their dtype.

    Their squared gradients are 0 too where gradients are small, and the update 0 / 0.

    Raises:
        ValueError: Names a parameter and the remedy.
    """
    for entry in parameters.entries:
        eps = float(groups[entry.group]["eps"])
        is_half = not entry.views and entry.param.dtype == torch.float16
        if is_half and not torch.tensor(eps, dtype=torch.float16, device="cpu"):
            raise ValueError(
                f"eps: found {eps}, which is 0 in float16, the dtype of {entry.name}, so that "
                "AdamW divides by zero; expected parameters of float32 or bfloat16 (autocast "
                "computes in float16), or a larger eps such as 1e-4"
            )


def is_between(found: object, end: float) -> bool:
    """Whether this is a number from 0 up to and without ``end``, as far as the host knows."""
    if isinstance(found, Tensor):
        is_number = found.numel() == 1 and not found.is_complex()
        is_elsewhere = found.device.type != "cpu"
        return is_number and (is_elsewhere or is_between(found.item(), end))
    try:
        return isinstance(found, Real) and _BELOW_ZERO <= float(found) < end
    except OverflowError:  # an int that is greater than any float
        return False


def describe_group(group: Mapping[str, Any], own: Iterable[str] = ()) -> str:
    """The hyperparameters of a group, as text that is alike where they are.

    Without a learning rate that lies on a device: to read it would wait for the device.

    Args:
        group: A parameter group.
        own: Keys of an optimizer's own hyperparameters.
    """
    lr = group["lr"]
    is_far = isinstance(lr, Tensor) and lr.device.type != "cpu"
    told = [f"lr {'of a tensor' if is_far else float(lr)}"]
    for key in ("lr_scale", "weight_decay", "eps", *own, "momentum", "nesterov"):
        if key in group:
            told.append(f"{key} {float(group[key])}")
    beta1, beta2 = group["betas"]
    told.append(f"betas {(float(beta1), float(beta2))}")
    return ", ".join(told)


def learning_rate(group: Mapping[str, Any]) -> float | Tensor:
    """That of a group, with its factor: a tensor only where it lies on a device."""
    rate: float | Tensor = group["lr"] * group["lr_scale"]
    is_near = isinstance(rate, Tensor) and rate.device.type == "cpu"
    return float(rate) if is_near else rate


def momentum_of(group: Mapping[str, Any], config: MathConfig) -> tuple[float, bool]:
    """Momentum of a group, and whether it is Nesterov's: the settings' where it names none."""
    momentum = group.get("momentum", config.momentum)
    return float(momentum), bool(group.get("nesterov", config.nesterov))


def take_apart(groups: Any, replica_ranks: Sequence[int]) -> tuple[list[dict[str, Any]], Structure]:
    """Groups as PyTorch knows them, and what else is in those of `amo_dist.param_groups`.

    Args:
        groups: Of the user; not modified.
        replica_ranks: As in `Structure`.

    Raises:
        ValueError: They do not come from `amo_dist.param_groups`; with the remedy.
    """
    remedy = "the groups that amo_dist.param_groups(model) returns, or splits of them"
    is_list = isinstance(groups, Sequence) and len(groups) > 0
    require(is_list, "params", type(groups).__name__, remedy)
    plain: list[dict[str, Any]] = []
    names: list[tuple[str, ...]] = []
    views: list[Mapping[str, tuple[MatrixView, ...]]] = []
    for group in groups:
        is_group = isinstance(group, Mapping) and "algorithm" in group
        require(is_group, "params", f"{type(group).__name__} without 'algorithm'", remedy)
        algorithm = group["algorithm"]
        require(algorithm in ALGORITHMS, "algorithm", repr(algorithm), f"one of {ALGORITHMS}")
        pairs, own = list(group["params"]), group.get("matrix_views", {})
        is_named = all(isinstance(item, tuple) and len(item) == 2 for item in pairs)
        found = "a group without (name, parameter) pairs"
        require(is_named and len(pairs) > 0, "params", found, remedy)
        for name, param in pairs:
            _check_parameter(name, param)
            has_views = algorithm == "adamw" or bool(own.get(name))
            require(has_views, name, "no matrix view", "one in 'matrix_views'")
        kept = {key: value for key, value in group.items() if key != "matrix_views"}
        plain.append({**kept, "params": [param for _, param in pairs]})
        names.append(tuple(name for name, _ in pairs))
        # A parameter without elements goes to AdamW: there is no matrix in it.
        views.append({name: own[name] for name, param in pairs if name in own and param.numel()})
    return plain, Structure(tuple(names), tuple(views), tuple(replica_ranks))


def _check_parameter(name: str, param: Any) -> None:
    """Refuse what has no state that could be made, or cannot be orthogonalized."""
    require(isinstance(param, Tensor), name, type(param).__name__, "a tensor")
    storage = (
        "one with storage: call model.to_empty(device=...) and initialise before the optimizer is "
        "built, since its state is made at once"
    )
    require(not param.is_meta, name, "a meta tensor", storage)
    require(param.is_floating_point(), name, f"dtype {param.dtype}", "a floating dtype")
    wide = "one of 16 bits or more: give the optimizer the main weights, not their float8 copies"
    require(param.element_size() > 1, name, f"dtype {param.dtype}", wide)
    is_dense = param.layout == torch.strided
    require(is_dense, name, f"a tensor of layout {param.layout}", "a dense one")


def resolve(groups: Sequence[Mapping[str, Any]], structure: Structure) -> Parameters:
    """Lay out every parameter and matrix.

    Args:
        groups: Parameter groups of the optimizer, with ``params``.
        structure: Of these groups.

    Raises:
        ValueError: A name appears twice, a DTensor has an unknown placement, or the views of a
            parameter do not cover it exactly, or the memory of a convolution has another order.
    """
    entries: list[Entry] = []
    for index, (group, names) in enumerate(zip(groups, structure.names, strict=True)):
        for name, param in zip(names, group["params"], strict=True):
            layout = layout_of(param, name, structure.replica_ranks)
            views = structure.views[index].get(name, ())
            entries.append(Entry(name, param, index, tuple(views), layout))
    for name, count in Counter(entry.name for entry in entries).items():
        require(count == 1, "params", f"{name} more than once", "unique names")
    first = entries[0]
    matrices: list[MatrixLayout] = []
    for tensor, entry in enumerate(entries):
        expected = f"that of {first.name}, {first.param.device}"
        is_there = entry.param.device == first.param.device
        require(is_there, entry.name, f"device {entry.param.device}", expected)
        if entry.views and entry.param.dim() == 4:
            is_flat = local_tensor(entry.param).is_contiguous()
            expected = "that of its dims: model.to(memory_format=torch.contiguous_format)"
            require(is_flat, entry.name, "a convolution whose memory has another order", expected)
        cut = [
            matrix_layout(entry.name + view.suffix, entry.layout, tensor, view.boxes, view.dim)
            for view in entry.views
        ]
        size, covered = math.prod(entry.layout.shape), sum(each.num_elements for each in cut)
        found = f"views of {covered} elements"
        require(not cut or covered == size, entry.name, found, f"to cover all {size}")
        matrices += cut
    types = tuple(view.operator_type for entry in entries for view in entry.views)
    params = tuple(entry.param for entry in entries)
    return Parameters(
        tuple(entries),
        tuple(matrices),
        types,
        params,
        tuple(map(_kind, params)),
        first.param.device,
        tuple(i for i, e in enumerate(entries) if e.views and e.param.dim() == 4),
    )


def check_swap(before: Parameters, groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuse parameters that cannot take the place of those an optimizer was built with.

    Args:
        before: Those it was built with.
        groups: Of the optimizer, with other tensors in them.

    Raises:
        ValueError: Names a parameter, what was found and what was expected.
    """
    counts = Counter(entry.group for entry in before.entries)
    found, expected = f"{len(groups)} groups", f"{len(counts)}, as at construction"
    require(len(groups) == len(counts), "param_groups", found, expected)
    for index, group in enumerate(groups):
        found = f"{len(group['params'])} parameters"
        is_whole = len(group["params"]) == counts[index]
        require(is_whole, f"param_groups[{index}]", found, f"{counts[index]}, as at construction")
    swapped = [param for group in groups for param in group["params"]]
    for entry, param in zip(before.entries, swapped, strict=True):
        _check_parameter(entry.name, param)
        found, shape = f"shape {tuple(param.shape)}", entry.layout.shape
        expected = f"{shape}, that of the parameter in whose place it was put"
        require(tuple(param.shape) == shape, entry.name, found, expected)
