"""AdamW for what is not a matrix: PyTorch's functional form on local tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from amo_dist.distributed.layout import local_tensor
from amo_dist.engine.parameters import Entry


def make_state(param: Tensor, implementation: str) -> dict[str, Tensor]:
    """``step`` (0-dim float32), ``exp_avg`` and ``exp_avg_sq`` (like the parameter), all zero.

    Args:
        param: The parameter.
        implementation: ``fused`` counts steps on the device, the others on the host.
    """
    device = param.device if implementation == "fused" else torch.device("cpu")
    return {
        "step": torch.zeros((), dtype=torch.float32, device=device),
        "exp_avg": torch.zeros_like(param),
        "exp_avg_sq": torch.zeros_like(param),
    }


def step_adamw(
    entries: Sequence[Entry],
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    states: Mapping[Tensor, Mapping[str, Tensor]],
    groups: Sequence[Mapping[str, Any]],
    implementation: str,
    bad: Tensor | None = None,
) -> None:
    """Update the parameters without matrices, in place; the bits are those of whole tensors.

    Args:
        entries: All parameters of the process.
        params: Their local tensors.
        grads: Their local gradients; None for a parameter to skip.
        states: By parameter, what `make_state` made.
        groups: Parameter groups with ``lr``, ``lr_scale``, ``betas``, ``eps``, ``weight_decay``.
        implementation: ``foreach``, ``fused`` or ``for-loop``.
        bad: 0-dim, boolean, on the device: where true, nothing changes. Only for ``fused``.
    """
    by_group: dict[int, list[tuple[Entry, Tensor, Tensor]]] = defaultdict(list)
    for entry, param, grad in zip(entries, params, grads, strict=True):
        if not entry.views and grad is not None:
            by_group[entry.group].append((entry, param, grad))
    for index, members in by_group.items():
        group = groups[index]
        held = [states[entry.param] for entry, _, _ in members]
        beta1, beta2 = group["betas"]
        lr = group["lr"] * group["lr_scale"]
        if isinstance(lr, Tensor) and implementation == "foreach":
            # PyTorch refuses a tensor here. Reading it waits for the device only if it lies there.
            lr = lr.item()
        adamw(
            [param for _, param, _ in members],
            [grad.to(param.dtype) for _, param, grad in members],
            [local_tensor(state["exp_avg"]) for state in held],
            [local_tensor(state["exp_avg_sq"]) for state in held],
            [],
            [state["step"] for state in held],
            foreach=implementation == "foreach",
            fused=implementation == "fused",
            found_inf=None if bad is None else bad.to(torch.float32),
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
