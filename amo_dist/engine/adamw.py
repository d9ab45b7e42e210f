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


class AdamW:
    """Updates the parameters without matrices, in place; the bits are those of whole tensors.

    On CPU by PyTorch's foreach kernels: its fused one gives an element other bits in another
    shard. On devices by the fused ones, which leave out a step without the host.

    Args:
        parameters: Of this process.
        state: By parameter, what `make_state` made.
        groups: Parameter groups with ``lr``, ``lr_scale``, ``betas``, ``eps``, ``weight_decay``;
            read at every step.
        rounding: How bfloat16 parameters take their updates.
    """

    def __init__(
        self,
        parameters: Parameters,
        state: Mapping[Tensor, Mapping[str, Tensor]],
        groups: Sequence[Mapping[str, Any]],
        rounding: Rounding,
    ) -> None:
        self._state, self._groups, self._rounding = state, groups, rounding
        self._is_fused = parameters.device.type != "cpu"
        self._own = [(i, entry) for i, entry in enumerate(parameters.entries) if not entry.views]
        self._means, self._squares = Locals(), Locals()

    def step(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        bad: Tensor | None = None,
    ) -> None:
        """Take a step.

        Args:
            params: Local tensors of all parameters of the process.
            grads: Their local gradients; None for a parameter to skip.
            bad: 0-dim, boolean, on the device: where true, nothing changes.
        """
        held = [self._state[entry.param] for _, entry in self._own]
        means = self._means.take([state["exp_avg"] for state in held])
        squares = self._squares.take([state["exp_avg_sq"] for state in held])
        found_inf = None if bad is None else bad.to(torch.float32)
        by_group: dict[int, list[tuple[Tensor, ...]]] = defaultdict(list)
        with contextlib.ExitStack() as stack:
            for (index, entry), own, *moments in zip(self._own, held, means, squares, strict=True):
                param, grad = params[index], grads[index]
                if grad is None:
                    continue
                if self._rounding.is_wanted and self._rounding.is_for(param):
                    param = stack.enter_context(self._rounding.widened(index, param))
                by_group[entry.group].append((param, grad.to(param.dtype), *moments, own["step"]))
            for index, members in by_group.items():
                group = self._groups[index]
                beta1, beta2 = map(float, group["betas"])
                some, found, exp_avgs, exp_avg_sqs, steps = map(list, zip(*members, strict=True))
                adamw(
                    some,
                    found,
                    exp_avgs,
                    exp_avg_sqs,
                    [],
                    steps,
                    foreach=not self._is_fused,
                    fused=self._is_fused,
                    found_inf=found_inf,
                    amsgrad=False,
                    beta1=beta1,
                    beta2=beta2,
                    lr=learning_rate(group),
                    weight_decay=float(group["weight_decay"]),
                    eps=float(group["eps"]),
                    maximize=False,
                )
