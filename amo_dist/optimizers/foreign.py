"""Import of another optimizer's state."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from amo_dist.kernels.rounding import ROUNDED_OFF
from amo_dist.operators.patterns import clean_name
from amo_dist.optimizers.muon import Muon
from amo_dist.state.load import check_source, describe_origin


@dataclasses.dataclass(frozen=True, slots=True)
class ImportReport:
    """Result of `import_state`.

    Attributes:
        mapped: Source of each parameter's state, by name.
        untouched: Parameters of the optimizer without foreign state.
        unused: Names in the foreign state that the optimizer does not have, or whose state has
            no counterpart here.
    """

    mapped: Mapping[str, str]
    untouched: tuple[str, ...]
    unused: tuple[str, ...]


def import_state(
    optimizer: Muon, state_dict: Mapping[str, Any], *, names: Sequence[str] | None = None
) -> ImportReport:
    """Fill momentum and AdamW state from another optimizer's; the schedule starts from step 1.

    A collective over the world of the optimizer.

    A momentum buffer here is a sum, ``sum_k momentum^k G_(t-k)``; torch.optim.Muon and AdamW keep
    a mean, ``(1 - momentum)`` times such a sum. A mean is divided by ``1 - momentum`` of this
    optimizer, which is exact for equal momenta and otherwise keeps the mean gradient. The imported
    state by origin:

    - torch.optim.Muon: ``momentum_buffer / (1 - momentum)``.
    - SGD with momentum and without dampening, a sum: ``momentum_buffer * (1 - its momentum) /
      (1 - momentum)``.
    - Adam, AdamW: ``exp_avg / (1 - beta1^step) / (1 - momentum)`` for matrices; unchanged ``step``,
      ``exp_avg`` and ``exp_avg_sq`` for other parameters.
    - This package: unchanged.

    If matrices and other parameters have two foreign optimizers, call this once for each.

    Args:
        optimizer: Optimizer to fill; an error leaves it unchanged.
        state_dict: Foreign state from ``state_dict()`` or PyTorch's ``get_optimizer_state_dict``.
            Whole tensors are cut to the shards of this rank.
        names: Names of the parameters in the foreign groups, in their order, for a state dict
            with numbers instead of names and without ``param_names``.

    Raises:
        ValueError: Raised on every rank. On one of them the names are unknown, a shape or layout
            differs, or a value is NaN or inf.
    """
    with optimizer.together("import_state"):
        copies, report = _plan(optimizer, state_dict, names)
    with torch.no_grad():
        for own_tensor, value, factor in copies:
            own_tensor.copy_(value).mul_(factor)
    return report


def _plan(
    optimizer: Muon, state_dict: Mapping[str, Any], names: Sequence[str] | None
) -> tuple[list[tuple[Tensor, Tensor, float]], ImportReport]:
    """List the tensors of the optimizer to fill, each with its source and the factor on it."""
    groups = state_dict.get("param_groups") if isinstance(state_dict, Mapping) else None
    if not isinstance(groups, Sequence) or not groups:
        raise ValueError(
            f"param_groups: found none in a {type(state_dict).__name__}, expected those of the "
            "dict that state_dict() of an optimizer returns"
        )
    origin = describe_origin(groups)
    params = optimizer.params_by_name
    momenta = {
        param: float(own_group.get("momentum", optimizer.config.momentum))
        for own_group in optimizer.param_groups
        for param in own_group["params"]
    }
    copies: list[tuple[Tensor, Tensor, float]] = []
    mapped: dict[str, str] = {}
    unused: list[str] = []
    for name, group, foreign in _foreign_entries(state_dict, groups, names):
        own = optimizer.state[params[name]] if name in params else {}
        momentum = momenta.get(params.get(name), optimizer.config.momentum)
        factors = _factors(foreign, own, group, origin, momentum)
        if not factors:
            unused.append(name)
            continue
        for target, (source, factor) in factors.items():
            place = f"state of {name}.{source}"
            value = check_source(place, _like(foreign[source], own[target]), own[target])
            copies.append((own[target], value, factor))
        mapped[name] = f"{origin}: {', '.join(source for source, _ in factors.values())}"
    untouched = tuple(name for name in params if name not in mapped)
    return copies, ImportReport(mapped, untouched, tuple(unused))


def _foreign_entries(
    state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], names: Sequence[str] | None
) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """Yield name, group and state of each parameter of the foreign optimizer."""
    entries = [(key, group) for group in groups for key in group["params"]]
    by_group = state_dict.get("param_names") or [group.get("param_names", ()) for group in groups]
    listed = [name for group_names in by_group for name in group_names]
    names = names or listed or [key for key, _ in entries if isinstance(key, str)]
    if len(names) != len(entries):
        raise ValueError(
            f"names: found {len(names)} for {len(entries)} parameters of the foreign state dict, "
            "expected one per parameter in the order of its groups, because it holds no names: "
            "import_state(optimizer, state_dict, names=[name for name, _ in "
            "model.named_parameters()]) if it had all parameters of the model"
        )
    for name, (key, group) in zip(names, entries, strict=True):
        yield clean_name(name), group, state_dict["state"].get(key, {})


def _factors(
    foreign: Mapping[str, Any],
    own: Mapping[str, Tensor],
    group: Mapping[str, Any],
    origin: str,
    momentum: float,
) -> dict[str, tuple[str, float]]:
    """Foreign key and factor by key of this optimizer's state; empty if nothing can be imported."""
    if set(foreign) >= set(own) and ("momentum_buffer" not in own or origin == "amo_dist"):
        return {key: (key, 1.0) for key in own}
    # A foreign optimizer has no rounding residuals; ours stay 0.
    if set(own) - {ROUNDED_OFF} != {"momentum_buffer"}:
        return {}
    if "exp_avg" in foreign and float(foreign["step"]) > 0:
        corrected = 1.0 - group["betas"][0] ** float(foreign["step"])
        return {"momentum_buffer": ("exp_avg", 1.0 / corrected / (1.0 - momentum))}
    if foreign.get("momentum_buffer") is None:
        return {}
    if origin == "torch.optim.Muon":
        return {"momentum_buffer": ("momentum_buffer", 1.0 / (1.0 - momentum))}
    if origin == "torch.optim.SGD" and group["dampening"] == 0:
        factor = (1.0 - group["momentum"]) / (1.0 - momentum)
        return {"momentum_buffer": ("momentum_buffer", factor)}
    return {}


def _like(value: object, target: Tensor) -> object:
    """Cut a whole tensor to this rank's shard of ``target``; return anything else unchanged."""
    if not isinstance(target, DTensor) or not isinstance(value, Tensor):
        return value
    if isinstance(value, DTensor) or value.shape != target.shape:
        return value
    # No communication, because every rank holds the whole tensor.
    whole = value.to(target.device)
    return distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
