"""Updates of bfloat16 parameters, computed in float32 and rounded: ``config.bfloat16_params``."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from amo_dist.config import Box, MathConfig
from amo_dist.distributed.groups import this_rank
from amo_dist.distributed.layout import cut, flattened_layout
from amo_dist.engine.parameters import Param
from amo_dist.kernels.rounding import (
    ROUNDED_OFF,
    random_bits,
    round_stochastically,
    split_into,
)

_TOGETHER = 2**20
"""Entries, about, whose random bits are computed at once, in several int64 copies."""


class Rounding:
    """Lends float32 values of bfloat16 parameters, and rounds them back.

    Args:
        params: Parameters of this process.
        config: Way to round, and seed.

    Raises:
        ValueError: A parameter is float16, and ``config.bfloat16_params`` asks for more than
            rounding to nearest.
    """

    def __init__(self, params: Sequence[Param], config: MathConfig) -> None:
        self._mode, self._seed = config.bfloat16_params, config.seed
        self.is_wanted = self._mode != "nearest"
        """Whether anything but rounding to nearest is asked for."""
        for param in params:
            if self.is_wanted and param.tensor.dtype == torch.float16:
                raise ValueError(
                    f"bfloat16_params: found {self._mode!r} with {param.name} of float16, expected "
                    "parameters of bfloat16 (or float32, which are written as they are)"
                )

    def is_for(self, param: Tensor) -> bool:
        """Whether a parameter, or a box of one, must be widened."""
        return self.is_wanted and param.dtype == torch.bfloat16

    def make_state(self, param: Tensor) -> dict[str, Tensor]:
        """State of a parameter beside that of its algorithm, in its shape and placements."""
        if self._mode != "master" or not self.is_for(param):
            return {}
        return {ROUNDED_OFF: torch.zeros_like(param, dtype=torch.float32)}

    def wide(self, param: Param, local: Tensor, box: Box | None = None) -> Tensor:
        """Float32 values of a bfloat16 tensor; any other tensor itself.

        Args:
            param: The parameter.
            local: Its local tensor, or a box of that without leading dims of size 1.
            box: The box; None for the whole local tensor.
        """
        if not self.is_for(local):
            return local
        if self._mode != "master":
            return local.float()
        remainder = param.state[ROUNDED_OFF]
        return local + (remainder if box is None else cut(remainder, box))

    @contextlib.contextmanager
    def widened(
        self, param: Param, local: Tensor, step: int, box: Box | None = None
    ) -> Iterator[Tensor]:
        """`wide` values, which are rounded into the tensor at the end.

        Args:
            param: The parameter.
            local: Its local tensor, or a box of that without leading dims of size 1.
            step: Optimizer step, counted from 1; random bits differ from step to step.
            box: The box; None for the whole local tensor.
        """
        values = self.wide(param, local, box)
        yield values
        if values is local:
            return
        if self._mode == "master":
            remainder = param.state[ROUNDED_OFF]
            split_into(values, local, remainder if box is None else cut(remainder, box))
        else:
            whole = tuple((0, size) for size in local.shape)
            local.copy_(self._rounded(param, whole if box is None else box, values, step))

    def _rounded(self, param: Param, box: Box, values: Tensor, step: int) -> Tensor:
        rows, columns = _global_indices(param, box)
        flat = values.reshape(len(rows), len(columns))
        out = torch.empty_like(flat, dtype=torch.bfloat16)
        text = f"{self._seed}/{step}/{param.name}"
        key = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        num_rows = max(_TOGETHER // max(len(columns), 1), 1)
        parts = zip(flat.split(num_rows), rows.split(num_rows), out.split(num_rows), strict=True)
        for part, part_rows, part_out in parts:
            round_stochastically(part, random_bits(key, part_rows, columns), part_out)
        return out.view(values.shape)


def _global_indices(param: Param, box: Box) -> tuple[Tensor, Tensor]:
    """Rows and columns of a box in the whole parameter, however it is cut over ranks."""
    layout, device = param.layout, param.local.device
    if param.is_convolution:
        layout = flattened_layout(layout)
    rows, columns = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
    dims = zip(layout.shape, layout.intervals_by_rank[this_rank()], box, strict=True)
    for dim, (size, intervals, (start, stop)) in enumerate(dims):
        ranges = [torch.arange(low, high, device=device) for low, high in ((0, 0), *intervals)]
        indices = torch.cat(ranges)[start:stop]
        if dim + 1 < len(layout.shape):
            rows = (rows.unsqueeze(1) * size + indices).flatten()
        else:
            columns = indices
    return rows, columns
