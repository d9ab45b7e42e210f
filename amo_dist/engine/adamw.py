"""AdamW for what is not a matrix: PyTorch's functional form on local tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from amo_dist.engine.parameters import Entry
from amo_dist.engine.pieces import Locals


def make_state(
    param: Tensor, implementation: str, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """``step`` (0-dim float32), ``exp_avg`` and ``exp_avg_sq`` (like the parameter), all zero.

    Args:
        param: The parameter.
        dtype: Of the moments; None for that of the parameter.
        implementation: ``fused`` counts steps on the device, the others on the host.
    """
    device = param.device if implementation == "fused" else torch.device("cpu")
    return {
        "step": torch.zeros((), dtype=torch.float32, device=device),
        "exp_avg": torch.zeros_like(param, dtype=dtype),
        "exp_avg_sq": torch.zeros_like(param, dtype=dtype),
    }


class AdamW:
    """Updates the parameters without matrices, in place; the bits are those of whole tensors.

    Args:
        entries: All parameters of the process.
        states: By parameter, what `make_state` made.
        groups: Parameter groups with ``lr``, ``lr_scale``, ``betas``, ``eps``, ``weight_decay``;
            read at every step.
        implementation: ``foreach``, ``fused`` or ``for-loop``.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        states: Mapping[Tensor, Mapping[str, Tensor]],
        groups: Sequence[Mapping[str, Any]],
        implementation: str,
    ) -> None:
        self.implementation = implementation
        self._states, self._groups = states, groups
        self._own = [(index, e) for index, e in enumerate(entries) if not e.views]
        self._means, self._squares = Locals(), Locals()

    @property
    def can_leave_out(self) -> bool:
        """Whether `step` takes ``bad``."""
        return self.implementation == "fused" or not self._own

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
        held = [self._states[entry.param] for _, entry in self._own]
        means = self._means.take([state["exp_avg"] for state in held])
        squares = self._squares.take([state["exp_avg_sq"] for state in held])
        by_group: dict[int, list[tuple[Tensor, ...]]] = defaultdict(list)
        for (index, entry), state, *moments in zip(self._own, held, means, squares, strict=True):
            param, grad = params[index], grads[index]
            if grad is not None:
                by_group[entry.group].append((param, grad.to(param.dtype), *moments, state["step"]))
        found_inf = None if bad is None else bad.to(torch.float32)
        for index, members in by_group.items():
            self._step(self._groups[index], members, found_inf)

    def _step(
        self,
        group: Mapping[str, Any],
        members: Sequence[tuple[Tensor, ...]],
        found_inf: Tensor | None,
    ) -> None:
        beta1, beta2 = map(float, group["betas"])
        lr = group["lr"] * group["lr_scale"]
        if isinstance(lr, Tensor) and self.implementation == "foreach":
            # PyTorch refuses a tensor here. Reading it waits for the device only if it lies there.
            lr = lr.item()
        params, grads, means, squares, steps = map(list, zip(*members, strict=True))
        adamw(
            params,
            grads,
            means,
            squares,
            [],
            steps,
            foreach=self.implementation == "foreach",
            fused=self.implementation == "fused",
            found_inf=found_inf,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=float(group["weight_decay"]),
            eps=float(group["eps"]),
            maximize=False,
        )
