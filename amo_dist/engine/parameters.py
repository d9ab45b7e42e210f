"""From parameter groups to the matrices of this process: names, layouts and local tensors."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from amo_dist.distributed.layout import (
    MatrixLayout,
    TensorLayout,
    layout_of,
    local_tensor,
    matrix_layout,
)
from amo_dist.operators.views import MatrixView, require

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
    def convolutions(self) -> list[int]:
        """Indices of the entries whose four dims are one matrix."""
        return [i for i, e in enumerate(self.entries) if e.views and e.param.dim() == 4]

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
    if isinstance(param, DTensor) and isinstance(param.grad, DTensor):
        return param.grad.placements != param.placements
    return False


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
        return raw_gradient(grad)
    return grad


def raw_gradient(grad: Tensor) -> Tensor:
    """This rank's part of a gradient as it is; of a misplaced one that is no part of the sum."""
    if not isinstance(grad, DTensor):
        return grad
    local: Tensor = grad._local_tensor
    return local.wait() if hasattr(local, "wait") else local


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


def learning_rate(group: Mapping[str, Any]) -> float | Tensor:
    """That of a group, with its factor: a tensor only where it lies on a device."""
    rate: float | Tensor = group["lr"] * group["lr_scale"]
    is_near = isinstance(rate, Tensor) and rate.device.type == "cpu"
    return float(rate) if is_near else rate


def check_groups(groups: Any) -> list[dict[str, Any]]:
    """Reject parameters that do not come from `amo_dist.param_groups`.

    Raises:
        ValueError: With the remedy.
    """
    remedy = "the groups that amo_dist.param_groups(model) returns, or splits of them"
    storage = (
        "one with storage: call model.to_empty(device=...) and initialise before the optimizer is "
        "built, since its state is made at once"
    )
    is_list = isinstance(groups, Sequence) and len(groups) > 0
    require(is_list, "params", type(groups).__name__, remedy)
    for group in groups:
        is_group = isinstance(group, Mapping) and "algorithm" in group
        require(is_group, "params", f"{type(group).__name__} without 'algorithm'", remedy)
        algorithm = group["algorithm"]
        require(algorithm in ALGORITHMS, "algorithm", repr(algorithm), f"one of {ALGORITHMS}")
        params = group["params"]
        is_named = all(isinstance(item, tuple) and len(item) == 2 for item in params)
        found = "a group without (name, parameter) pairs"
        require(is_named and len(params) > 0, "params", found, remedy)
        for name, param in params:
            require(not param.is_meta, name, "a meta tensor", storage)
            found = f"dtype {param.dtype}"
            require(param.is_floating_point(), name, found, "a floating dtype")
            has_views = algorithm == "adamw" or bool(group.get("matrix_views", {}).get(name))
            require(has_views, name, "no matrix view", "one in 'matrix_views'")
    return [dict(group) for group in groups]


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
            parameter do not cover it exactly, or the memory of a convolution has another order.
    """
    entries: list[Entry] = []
    for index, group in enumerate(groups):
        for name, param in zip(names[index], group["params"], strict=True):
            layout = layout_of(param, name, replica_ranks)
            entries.append(Entry(name, param, index, tuple(views[index].get(name, ())), layout))
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
    return Parameters(tuple(entries), tuple(matrices), types)
