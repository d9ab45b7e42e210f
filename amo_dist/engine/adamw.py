"""AdamW for parameters without matrices: PyTorch's functional form on local tensors."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from amo_dist.engine.hyperparameters import learning_rate
from amo_dist.engine.parameters import LocalParam
from amo_dist.kernels.rounding import ROUNDED_OFF, master_weight


def make_state(param: Tensor, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """``step`` (0-dim float32), ``exp_avg`` and ``exp_avg_sq`` (like the parameter), all zero.

    Args:
        param: The parameter.
        dtype: Dtype of the moments; that of the parameter by default.
    """
    return {
        # Fused kernels, which devices run, count steps on the device of the parameter.
        "step": torch.zeros((), dtype=torch.float32, device=param.device),
        "exp_avg": torch.zeros_like(param, dtype=dtype),
        "exp_avg_sq": torch.zeros_like(param, dtype=dtype),
    }


def adamw_step(
    params: Sequence[LocalParam], groups: Sequence[Mapping[str, Any]], bad: Tensor | None = None
) -> None:
    """Update the parameters without matrices, in place; a shard gets the bits of the whole.

    On a CPU it runs PyTorch's foreach kernels: the fused one gives an element other bits in another
    shard. On a device it runs the fused ones, which skip a bad step without the host.

    Args:
        params: Parameters of this process, with state as `make_state` made it.
        groups: Parameter groups with ``lr``, ``lr_multiplier``, ``betas``, ``eps`` and
            ``weight_decay``.
        bad: Verdict, 0-dim, boolean, on the device: if true, nothing changes.
    """
    batches: dict[Hashable, list[tuple[LocalParam, Tensor]]] = defaultdict(list)
    for local in params:
        if not local.param.views and local.grad is not None:
            # A master weight is lent alone: those of all would be a second model in memory.
            key = local if ROUNDED_OFF in local.state else local.param.group
            batches[key].append((local, local.grad))
    for batch in batches.values():
        states = [local.state for local, _ in batch]
        group = groups[batch[0][0].param.group]
        beta1, beta2 = map(float, group["betas"])
        with contextlib.ExitStack() as stack:
            weights = [local.weight for local, _ in batch]
            if ROUNDED_OFF in states[0]:
                lent = master_weight(weights[0], states[0][ROUNDED_OFF])
                weights = [stack.enter_context(lent)]
            is_fused = not weights[0].is_cpu
            adamw(
                weights,
                [grad.to(weight.dtype) for (_, grad), weight in zip(batch, weights, strict=True)],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                foreach=not is_fused,
                fused=is_fused,
                found_inf=None if bad is None else bad.to(torch.float32),
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=learning_rate(group),
                weight_decay=float(group["weight_decay"]),
                eps=float(group["eps"]),
                maximize=False,
            )
