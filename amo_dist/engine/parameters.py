"""From parameter groups to the matrices of this process: names, layouts and local tensors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from amo_dist.distributed.layout import MatrixLayout, TensorLayout, layout_of, matrix_layout
from amo_dist.operators.views import MatrixView

ALGORITHMS = ("muon", "adamw")


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
    """

    entries: tuple[Entry, ...]
    matrices: tuple[MatrixLayout, ...]
    operator_types: tuple[str, ...]

    @property
    def device(self) -> torch.device:
        """Where all of them lie."""
        return self.entries[0].param.device

    @property
    def matrix_names(self) -> list[str]:
        """Of each matrix."""
        return [matrix.name for matrix in self.matrices]


def gradient_is_foreign(param: Tensor) -> bool:
    """Whether the gradient is sparse, or plain where the parameter is a DTensor."""
    grad = param.grad
    if grad is None:
        return False
    return grad.is_sparse or (isinstance(param, DTensor) and not isinstance(grad, DTensor))


def gradient_is_misplaced(param: Tensor) -> bool:
    """Whether the gradient has other placements than the parameter.

    Under sequence parallelism the gradient of a norm is ``Partial``: its local tensor is one
    term of a sum, and training on it would be silently wrong.
    """
    grad = param.grad
    if not isinstance(grad, DTensor) or not isinstance(param, DTensor):
        return False
    return grad.placements != param.placements


def local_gradient(param: Tensor) -> Tensor | None:
    """This rank's part of the gradient, in the placements of the parameter.

    A misplaced one is brought there by a collective, so that all ranks must know beforehand which
    gradients exist.
    """
    grad = param.grad
    if isinstance(grad, DTensor):
        assert isinstance(param, DTensor)
        if gradient_is_misplaced(param):
            grad = grad.redistribute(placements=param.placements)
        local: Tensor = grad.to_local()
        return local.wait() if hasattr(local, "wait") else local
    return grad


def describe_group(group: Mapping[str, Any], own: Iterable[str] = ()) -> str:
    """The hyperparameters of a group, as text that is alike where they are.

    Without a learning rate that lies on a device: to read it would wait for the device.

    Args:
        group: A parameter group.
        own: Keys of an optimizer's own hyperparameters.
    """
    lr = group["lr"]
    is_far = isinstance(lr, Tensor) and lr.device.type != "cpu"
    numbers: dict[str, object] = {"lr": "of a tensor" if is_far else float(lr)}
    numbers |= {key: float(group[key]) for key in ("lr_scale", "weight_decay", "eps", *own)}
    numbers["betas"] = tuple(float(beta) for beta in group["betas"])
    return ", ".join(f"{key} {value}" for key, value in numbers.items())


def check_groups(groups: object) -> list[dict[str, Any]]:
    """Reject parameters that do not come from `amo_dist.param_groups`.

    Raises:
        ValueError: With the remedy.
    """
    remedy = "expected the groups that amo_dist.param_groups(model) returns, or splits of them"
    if not isinstance(groups, Sequence) or not groups:
        raise ValueError(f"params: found {type(groups).__name__}, {remedy}")
    for group in groups:
        if not isinstance(group, Mapping) or "algorithm" not in group:
            raise ValueError(f"params: found {type(group).__name__} without 'algorithm', {remedy}")
        if group["algorithm"] not in ALGORITHMS:
            raise ValueError(
                f"algorithm: found {group['algorithm']!r}, expected one of {ALGORITHMS}"
            )
        named = all(isinstance(item, tuple) and len(item) == 2 for item in group["params"])
        if not named or not group["params"]:
            raise ValueError(f"params: found a group without (name, parameter) pairs, {remedy}")
        _check_parameters(group)
    return [dict(group) for group in groups]


def _check_parameters(group: Mapping[str, Any]) -> None:
    for name, param in group["params"]:
        if param.is_meta:
            raise ValueError(
                f"{name}: found a meta tensor, expected one with storage: call "
                "model.to_empty(device=...) and initialise before the optimizer is built, since "
                "its state is made at once"
            )
        if not param.is_floating_point():
            raise ValueError(f"{name}: found dtype {param.dtype}, expected a floating dtype")
        if group["algorithm"] == "muon" and not group.get("matrix_views", {}).get(name):
            raise ValueError(f"{name}: found no matrix view, expected one in 'matrix_views'")


def resolve(
    groups: Sequence[Mapping[str, Any]],
    names: Sequence[Sequence[str]],
    views: Sequence[Mapping[str, tuple[MatrixView, ...]]],
    replica_ranks: Sequence[int],
) -> Parameters:
    """Lay out every parameter and matrix.

    Args:
        groups: Parameter groups of the optimizer, with ``params``.
        names: Of the parameters of each group.
        views: By name, for each group.
        replica_ranks: Global ranks over which plain tensors are replicated.

    Raises:
        ValueError: A name appears twice, a DTensor has an unknown placement, or the views of a
            parameter do not cover it exactly.
    """
    entries: list[Entry] = []
    for index, group in enumerate(groups):
        for name, param in zip(names[index], group["params"], strict=True):
            layout = layout_of(param, name, replica_ranks)
            entries.append(Entry(name, param, index, tuple(views[index].get(name, ())), layout))
    _check_unique([entry.name for entry in entries])
    for entry in entries:
        if entry.param.device != entries[0].param.device:
            raise ValueError(
                f"{entry.name}: found it on {entry.param.device}, expected all parameters on one "
                f"device: {entries[0].name} is on {entries[0].param.device}"
            )
    matrices: list[MatrixLayout] = []
    for tensor, entry in enumerate(entries):
        cut = [
            matrix_layout(entry.name + view.suffix, entry.layout, tensor, view.boxes, view.dim)
            for view in entry.views
        ]
        if cut and sum(matrix.num_elements for matrix in cut) != math.prod(entry.layout.shape):
            raise ValueError(
                f"{entry.name}: found views of {sum(m.num_elements for m in cut)} elements, "
                f"expected to cover all {math.prod(entry.layout.shape)}"
            )
        matrices += cut
    types = tuple(view.operator_type for entry in entries for view in entry.views)
    return Parameters(tuple(entries), tuple(matrices), types)


def _check_unique(names: Sequence[str]) -> None:
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(
            f"params: found {', '.join(repeated)} more than once, expected unique names"
        )
