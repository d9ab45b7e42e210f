"""How bfloat16 parameters take updates that are computed in float32: ``config.bfloat16_params``."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from amo_dist.config import Box, MathConfig
from amo_dist.distributed.groups import this_rank
from amo_dist.distributed.layout import cut, flattened_layout
from amo_dist.engine.parameters import Locals, Parameters
from amo_dist.kernels.rounding import (
    ROUNDED_OFF,
    random_bits,
    round_stochastically,
    split_into,
)

_TOGETHER = 2**20
"""Entries, about, whose random bits are computed together: int64 in several copies."""


class Rounding:
    """Lends float32 values of bfloat16 parameters, and takes them back.

    Args:
        parameters: Of this process.
        local: Parts of them and of their state.
        config: Rounding and seed.

    Raises:
        ValueError: A parameter is float16, and ``config.bfloat16_params`` asks for more than
            rounding to nearest.
    """

    def __init__(self, parameters: Parameters, local: Locals, config: MathConfig) -> None:
        self._entries, self._local = parameters.entries, local
        self._how, self._seed = config.bfloat16_params, config.seed
        self.is_wanted = self._how != "nearest"
        """Whether anything is asked for beside rounding to nearest."""
        for entry in parameters.entries:
            if self.is_wanted and entry.param.dtype == torch.float16:
                raise ValueError(
                    f"bfloat16_params: found {self._how!r} with {entry.name} of float16, expected "
                    "parameters of bfloat16 (or float32, which are written as they are)"
                )
        self._convolutions = parameters.convolutions
        self.step = 0
        """Optimizer step, counted from 1; set for each."""

    def is_for(self, param: Tensor) -> bool:
        """Whether a parameter, or a piece of one, must be widened."""
        return self.is_wanted and param.dtype == torch.bfloat16

    def make_state(self, param: Tensor) -> dict[str, Tensor]:
        """Of a parameter beside that of its algorithm, in its shape and placements."""
        if self._how != "master" or not self.is_for(param):
            return {}
        return {ROUNDED_OFF: torch.zeros_like(param, dtype=torch.float32)}

    @contextlib.contextmanager
    def widened(self, tensor: int, piece: Tensor, box: Box | None = None) -> Iterator[Tensor]:
        """Float32 values of a bfloat16 piece, written to it in the end; any other piece itself.

        Args:
            tensor: Index of the parameter.
            piece: Its local tensor, or a box of that, without leading dims of size 1.
            box: Which box; None for the whole.
        """
        if not self.is_for(piece):
            yield piece
        elif self._how == "master":
            rest = self._local.state[tensor][ROUNDED_OFF]
            rest = rest if box is None else cut(rest, box)
            wide = piece + rest
            yield wide
            split_into(wide, piece, rest)
        else:
            wide = piece.float()
            yield wide
            whole = tuple((0, size) for size in piece.shape)
            piece.copy_(self._rounded(tensor, whole if box is None else box, wide))

    def _rounded(self, tensor: int, box: Box, wide: Tensor) -> Tensor:
        rows, columns = self._places(tensor, box)
        flat = wide.reshape(len(rows), len(columns))
        out = torch.empty_like(flat, dtype=torch.bfloat16)
        text = f"{self._seed}/{self.step}/{self._entries[tensor].name}"
        key = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        count = max(_TOGETHER // max(len(columns), 1), 1)
        for part in zip(*(each.split(count) for each in (flat, rows, out)), strict=True):
            values, some, place = part
            round_stochastically(values, random_bits(key, some, columns), place)
        return out.view(wide.shape)

    def _places(self, tensor: int, box: Box) -> tuple[Tensor, Tensor]:
        """Where the rows and columns of a box lie in the whole parameter, however it is cut."""
        layout, device = self._entries[tensor].layout, self._entries[tensor].param.device
        if tensor in self._convolutions:
            layout = flattened_layout(layout)
        rows, columns = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
        dims = zip(layout.shape, layout.intervals_by_rank[this_rank()], box, strict=True)
        for dim, (size, intervals, (start, stop)) in enumerate(dims):
            parts = [torch.arange(*each, device=device) for each in ((0, 0), *intervals)]
            indices = torch.cat(parts)[start:stop]
            if dim + 1 < len(layout.shape):
                rows = (rows.unsqueeze(1) * size + indices).flatten()
            else:
                columns = indices
        return rows, columns
