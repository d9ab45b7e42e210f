"""Parameter groups laid out as the tensors and matrices of this process."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from amo_dist.compat import local_of
from amo_dist.config import Box, require
from amo_dist.distributed.layout import (
    Matrix,
    Region,
    TensorLayout,
    flattened,
    layout_of,
    local_tensor,
    make_matrix,
)
from amo_dist.distributed.ranks import this_rank
from amo_dist.operators.views import MatrixView

# Shape, dtype and device of a tensor.
Form: TypeAlias = tuple[torch.Size, torch.dtype, torch.device]
form_of = operator.attrgetter("shape", "dtype", "device")

ALGORITHMS = ("muon", "adamw")
# Name of the momentum in the state of a parameter with matrices.
MOMENTUM = "momentum_buffer"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """The parts of parameter groups beside tensors and hyperparameters; fixed for the whole run.

    Attributes:
        names: Names of the parameters of each group.
        views: Matrices of a parameter by its name.
        replica_ranks: Global ranks over which plain tensors are replicas.
    """

    names: tuple[tuple[str, ...], ...]
    views: Mapping[str, tuple[MatrixView, ...]]
    replica_ranks: tuple[int, ...]


@dataclasses.dataclass(slots=True, eq=False)
class Param:
    """A tensor of the model on this rank.

    Attributes:
        name: Cleaned name, unique in the process.
        tensor: The model's parameter.
        group: Index of its parameter group.
        views: Its matrices; empty for a parameter that AdamW trains.
        layout: Ranks that hold its elements.
        index: Position among all parameters of this process.
        is_convolution: Whether its three to five dims are one matrix.
        form: Shape, dtype and device of the tensor at construction.
        state_forms: Form of this rank's part of each tensor of its state, by name. A wrapper may
            keep other entries beside them.
    """

    name: str
    tensor: Tensor
    group: int
    views: tuple[MatrixView, ...]
    layout: TensorLayout
    index: int
    is_convolution: bool = dataclasses.field(init=False)
    form: Form = dataclasses.field(init=False)
    state_forms: dict[str, Form] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.form = form_of(self.tensor)
        self.is_convolution = self.tensor.dim() > 2 and any(v.boxes is None for v in self.views)


class Piece:
    """A box of one matrix on this rank; made once, and owns no tensor.

    Args:
        matrix: The whole matrix: name, shape, which rank holds what.
        region: Region of it in the local parameter.
        scale: Factor on the update beside the learning rate.
        param: The parameter.
        groups: Parameter groups of the optimizer.

    Attributes:
        weight: This box of the parameter before the step, during `UpdateRule.post`; read only.
        state: This box of each state tensor of the rule, by name, during `UpdateRule.post`. A rule
            replaces values in this dict, never in place.
    """

    __slots__ = ("_groups", "_slices", "matrix", "param", "region", "scale", "state", "weight")

    weight: Tensor
    state: dict[str, Tensor]

    def __init__(
        self,
        matrix: Matrix,
        region: Region,
        scale: float,
        param: Param,
        groups: Sequence[Mapping[str, Any]],
    ) -> None:
        self.matrix, self.region, self.scale, self.param = matrix, region, scale, param
        self._groups = groups
        shape = param.layout.local_shape(this_rank())
        if param.is_convolution:
            shape = (shape[0], math.prod(shape[1:]))
        is_whole = region.source_shape == shape
        self._slices = None if is_whole else tuple(slice(*edge) for edge in region.source)

    def view(self, local: Tensor) -> Tensor:
        """This box of a local tensor in the parameter's shape, ``(m, n)``; shares memory."""
        box = local if self._slices is None else local[self._slices]
        return box if box.dim() == 2 else box.view(box.shape[-2:])

    @property
    def box(self) -> Box:
        """Box ``((first row, end), (first column, end))`` in the matrix."""
        return self.region.target

    @property
    def dim(self) -> int:
        """Dim of the matrix that counts outputs: 0, or 1 for a parameter fused by columns."""
        return self.matrix.dim

    @property
    def group(self) -> Mapping[str, Any]:
        """Parameter group, with the rule's own hyperparameters."""
        return self._groups[self.param.group]

    @property
    def lr(self) -> float | Tensor:
        """Learning rate times the group's multiplier: a number, or a 0-dim tensor."""
        rate: float | Tensor = self.group["lr"] * self.group["muon_lr_factor"]
        return rate


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Parameters:
    """All parameters of the process, and the matrices in them.

    Attributes:
        params: Parameters in the order of the groups.
        matrices: Matrices; `Matrix.param` indexes ``params``.
        operator_types: Operator type of each matrix.
        device: Device of all parameters at construction.
        matrix_device: Device on which matrices are gathered, orthogonalized and measured. It is
            that of the parameters. For parameters in host memory it is the current accelerator if
            one of their meshes is of its kind; with a mesh of CPUs, or none, all runs on the CPU,
            whatever else the machine has.
    """

    params: tuple[Param, ...]
    matrices: tuple[Matrix, ...]
    operator_types: tuple[str, ...]
    device: torch.device
    matrix_device: torch.device

    def tensors(
        self, state: Mapping[Tensor, Mapping[str, Tensor]]
    ) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        """This rank's part of each parameter, and of its state by name, for one step.

        Nobody keeps them longer: trainers offload and replace parameters and state between steps.
        Those of a convolution are `flattened` to two dims.

        Raises:
            ValueError: A parameter was cast, moved or reshaped in place, or a tensor of its state
                is gone, lies elsewhere or has another form; names it, found and expected.
        """
        whole = [param.tensor for param in self.params]
        weights = [local_of(x) if isinstance(x, DTensor) else x for x in whole]
        states = list[dict[str, Tensor]]()
        try:
            for param in self.params:
                own = state[param.tensor]
                values = ((name, own[name]) for name in param.state_forms)
                states.append({n: local_of(x) if isinstance(x, DTensor) else x for n, x in values})
            # Lists of all are compared at once: this runs in every step, for hundreds of tensors.
            own_forms = [form_of(x) for own in states for x in own.values()]
        except (KeyError, AttributeError):  # of state that is gone, or no tensor
            self._refuse(state)
        forms = [form for param in self.params for form in param.state_forms.values()]
        if own_forms != forms or [*map(form_of, whole)] != [param.form for param in self.params]:
            self._refuse(state)
        for param in self.params:
            if param.is_convolution:
                index, own = param.index, states[param.index]
                check_memory_order(param.name, [weights[index], *own.values()])
                weights[index] = flattened(weights[index])
                states[index] = {name: flattened(value) for name, value in own.items()}
        return weights, states

    def _refuse(self, state: Mapping[Tensor, Mapping[str, Tensor]]) -> NoReturn:
        """Raise for the first tensor that has another form than at construction."""
        remedy = "cast or move the model before the optimizer is built, or back again"
        for param in self.params:
            own = state.get(param.tensor, {})
            rows: list[tuple[str, object, Form, str]] = [
                (param.name, param.tensor, param.form, f": {remedy}"),
                *(
                    (f"state of {param.name}.{name}", own.get(name), form, ", on this rank")
                    for name, form in param.state_forms.items()
                ),
            ]
            for place, value, form, hint in rows:
                kind, is_same = "none" if value is None else type(value).__name__, False
                if isinstance(value, Tensor):
                    own_form = form_of(value if value is param.tensor else local_tensor(value))
                    kind, is_same = _describe(own_form), own_form == form
                require(is_same, place, kind, f"{_describe(form)}, as at construction{hint}")
        raise AssertionError

    def note_state(self, state: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
        """Take the form of all state as the one that every step expects."""
        for param in self.params:
            own = state[param.tensor].items()
            param.state_forms = {name: form_of(local_tensor(value)) for name, value in own}


def _describe(form: Form) -> str:
    shape, dtype, device = form
    return f"{dtype} {tuple(shape)} on {device}"


def check_memory_order(name: str, tensors: Sequence[Tensor]) -> None:
    """Refuse a convolution whose memory has another order than its dims, which cannot be flattened.

    Raises:
        ValueError: Names the parameter and the remedy.
    """
    is_flat = all(tensor.is_contiguous() for tensor in tensors)
    expected = "that of its dims: model.to(memory_format=torch.contiguous_format)"
    require(is_flat, name, "a convolution whose memory has another order", expected)


def check_float16(
    parameters: Parameters, groups: Sequence[Mapping[str, Any]], bfloat16_params: str
) -> None:
    """Refuse float16 parameters beside master weights, and those of AdamW whose ``eps`` is 0 there.

    Small squared gradients are 0 in float16, too, and the update would be 0 / 0.

    Raises:
        ValueError: Names a parameter and the remedy.
    """
    for param in parameters.params:
        if param.tensor.dtype != torch.float16:
            continue
        expected = "parameters of bfloat16 (or float32, which are written as they are)"
        own = f"'master' with {param.name} of float16"
        require(bfloat16_params != "master", "bfloat16_params", own, expected)
        eps = float(groups[param.group]["eps"])
        if not param.views and not torch.tensor(eps, dtype=torch.float16, device="cpu"):
            raise ValueError(
                f"eps: found {eps}, which is 0 in float16, the dtype of {param.name}, so that "
                "AdamW divides by zero; expected parameters of float32 or bfloat16 (autocast "
                "computes in float16), or a larger eps such as 1e-4"
            )


def split_groups(
    groups: Any, replica_ranks: Sequence[int]
) -> tuple[list[dict[str, Any]], Structure]:
    """Split groups of `amo_dist.param_groups` into groups as PyTorch knows them, and the rest.

    Args:
        groups: Groups of the user; not modified.
        replica_ranks: Global ranks over which plain tensors are replicas.

    Raises:
        ValueError: They do not come from `amo_dist.param_groups`; with the remedy.
    """
    remedy = "the model, or the groups that amo_dist.param_groups(model) returns, or splits of them"
    is_list = isinstance(groups, Sequence) and len(groups) > 0
    require(is_list, "params", type(groups).__name__, remedy)
    plain: list[dict[str, Any]] = []
    name_by_tensor: dict[int, str] = {}
    names: list[tuple[str, ...]] = []
    views: dict[str, tuple[MatrixView, ...]] = {}
    for group in groups:
        is_group = isinstance(group, Mapping) and "algorithm" in group
        require(is_group, "params", f"{type(group).__name__} without 'algorithm'", remedy)
        algorithm = group["algorithm"]
        require(algorithm in ALGORITHMS, "algorithm", repr(algorithm), f"one of {ALGORITHMS}")
        pairs, own = list(group["params"]), group.get("matrix_views", {})
        is_named = all(isinstance(item, tuple) and len(item) == 2 for item in pairs)
        is_pairs = is_named and len(pairs) > 0
        require(is_pairs, "params", "a group without (name, parameter) pairs", remedy)
        for name, param in pairs:
            _check_parameter(name, param, algorithm)
            other = name_by_tensor.setdefault(id(param), name)
            expected = "each tensor once, as param_groups lists tied ones"
            require(other is name, "params", f"one tensor as {other} and as {name}", expected)
            has_views = algorithm == "adamw" or bool(own.get(name))
            require(has_views, name, "no matrix view", "one in 'matrix_views'")
        kept = {key: value for key, value in group.items() if key != "matrix_views"}
        plain.append({**kept, "params": [param for _, param in pairs]})
        names.append(tuple(name for name, _ in pairs))
        # A parameter without elements goes to AdamW: it has no matrix.
        views |= {name: own[name] for name, param in pairs if name in own and param.numel()}
    return plain, Structure(tuple(names), views, tuple(replica_ranks))


def _check_parameter(name: str, param: Any, algorithm: str) -> None:
    """Refuse a parameter whose state cannot be made, or that cannot be orthogonalized."""
    require(isinstance(param, Tensor), name, type(param).__name__, "a tensor")
    storage = (
        "one with storage: call model.to_empty(device=...) and initialise before the optimizer is "
        "built, since its state is made at once"
    )
    require(not param.is_meta, name, "a meta tensor", storage)
    is_trained = param.is_floating_point() or (param.is_complex() and algorithm == "adamw")
    require(is_trained, name, f"dtype {param.dtype}", "a floating dtype (or complex under AdamW)")
    wide = "one of 16 bits or more: give the optimizer the main weights, not their float8 copies"
    require(param.element_size() > 1, name, f"dtype {param.dtype}", wide)
    is_dense = param.layout == torch.strided
    require(is_dense, name, f"a tensor of layout {param.layout}", "a dense one")


def lay_out(groups: Sequence[Mapping[str, Any]], structure: Structure) -> Parameters:
    """Lay out every parameter and matrix.

    Args:
        groups: Parameter groups of the optimizer, with ``params``.
        structure: Structure of these groups.

    Raises:
        ValueError: A name appears twice, a DTensor has an unknown placement, the views of a
            parameter do not cover it exactly, or the memory of a convolution has another order.
    """
    params: list[Param] = []
    for index, (group, names) in enumerate(zip(groups, structure.names, strict=True)):
        for name, tensor in zip(names, group["params"], strict=True):
            layout = layout_of(tensor, name, structure.replica_ranks)
            views = tuple(structure.views.get(name, ()))
            params.append(Param(name, tensor, index, views, layout, len(params)))
    for name, count in Counter(param.name for param in params).items():
        require(count == 1, "params", f"{name} more than once", "unique names")
    first = params[0]
    matrices: list[Matrix] = []
    for index, param in enumerate(params):
        device = param.tensor.device
        expected = f"that of {first.name}, {first.tensor.device}"
        require(device == first.tensor.device, param.name, f"device {device}", expected)
        if param.is_convolution:
            check_memory_order(param.name, [local_tensor(param.tensor)])
        own = [
            make_matrix(param.name + view.suffix, param.layout, index, view.boxes, view.dim)
            for view in param.views
        ]
        size, covered = math.prod(param.layout.shape), sum(matrix.num_elements for matrix in own)
        is_covered = not own or covered == size
        require(is_covered, param.name, f"views of {covered} elements", f"to cover all {size}")
        matrices += own
    device, tensors = first.tensor.device, [param.tensor for param in params]
    kinds = {tensor.device_mesh.device_type for tensor in tensors if isinstance(tensor, DTensor)}
    if device.type == "cpu" and kinds:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is not None and accelerator.type in kinds:
            device = torch.device(accelerator.type, torch.accelerator.current_device_index())
    return Parameters(
        params=tuple(params),
        matrices=tuple(matrices),
        operator_types=tuple(view.operator_type for param in params for view in param.views),
        device=first.tensor.device,
        matrix_device=device,
    )


def check_swap(before: Parameters, groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuse tensors that cannot take the place of those an optimizer was built with.

    Args:
        before: Parameters that the optimizer was built with.
        groups: Parameter groups of the optimizer, with other tensors in them.

    Raises:
        ValueError: Names a parameter, what was found and what was expected.
    """
    counts = [len(group["params"]) for group in groups]
    expected = [*Counter(param.group for param in before.params).values()]
    is_same = counts == expected
    require(is_same, "param_groups", f"{counts} parameters", f"{expected}, as at construction")
    tensors = [tensor for group in groups for tensor in group["params"]]
    for param, tensor in zip(before.params, tensors, strict=True):
        _check_parameter(param.name, tensor, groups[param.group]["algorithm"])
        shape, place = tuple(tensor.shape), "that of the parameter in whose place it was put"
        is_same = shape == param.layout.shape
        require(is_same, param.name, f"shape {shape}", f"{param.layout.shape}, {place}")
