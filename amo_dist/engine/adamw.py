"""AdamW for what is not a matrix: PyTorch's functional form on local tensors."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from amo_dist.engine.parameters import Locals, Parameters, learning_rate
from amo_dist.engine.rounding import Rounding


def make_state(param: Tensor, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """``step`` (0-dim float32), ``exp_avg`` and ``exp_avg_sq`` (like the parameter), all zero.

    Args:
        param: The parameter.
        dtype: Of the moments; None for that of the parameter.
    """
    return {
        # Fused kernels, which devices run, count steps where the parameter lies.
        "step": torch.zeros((), dtype=torch.float32, device=param.device),
        "exp_avg": torch.zeros_like(param, dtype=dtype),
        "exp_avg_sq": torch.zeros_like(param, dtype=dtype),
    }


def adamw_step(
    parameters: Parameters,
    local: Locals,
    groups: Sequence[Mapping[str, Any]],
    rounding: Rounding,
    grads: Sequence[Tensor | None],
    bad: Tensor | None = None,
) -> None:
    """Update the parameters without matrices, in place; the bits are those of whole tensors.

    On CPU by PyTorch's foreach kernels: its fused one gives an element other bits in another
    shard. On devices by the fused ones, which leave out a step without the host.

    Args:
        parameters: Of this process.
        local: Parts of them and of their state, as `make_state` made it.
        groups: Parameter groups with ``lr``, ``lr_scale``, ``betas``, ``eps``, ``weight_decay``.
        rounding: How bfloat16 parameters take their updates.
        grads: Local gradients of all parameters; None for one to skip.
        bad: 0-dim, boolean, on the device: where true, nothing changes.
    """
    is_fused = parameters.device.type != "cpu"
    found_inf = None if bad is None else bad.to(torch.float32)
    by_group: dict[int, list[int]] = defaultdict(list)
    for index, entry in enumerate(parameters.entries):
        if not entry.views and grads[index] is not None:
            by_group[entry.group].append(index)
    batches = list(by_group.items())
    if rounding.is_wanted:
        # One by one: float32 copies of all at once would be a second model in memory.
        batches = [(group, [index]) for group, indices in batches for index in indices]
    for number, indices in batches:
        group = groups[number]
        beta1, beta2 = map(float, group["betas"])
        with contextlib.ExitStack() as stack:
            params, gradients = [], []
            for index in indices:
                param, gradient = local.params[index], grads[index]
                assert gradient is not None
                if rounding.is_wanted:
                    param = stack.enter_context(rounding.widened(index, param))
                params.append(param)
                gradients.append(gradient.to(param.dtype))
            state = [local.state[index] for index in indices]
            adamw(
                params,
                gradients,
                [own["exp_avg"] for own in state],
                [own["exp_avg_sq"] for own in state],
                [],
                [own["step"] for own in state],
                foreach=not is_fused,
                fused=is_fused,
                found_inf=found_inf,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=learning_rate(group),
                weight_decay=float(group["weight_decay"]),
                eps=float(group["eps"]),
                maximize=False,
            )
