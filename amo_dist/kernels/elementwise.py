"""Momentum, Nesterov and the decoupled update, on lists of local tensors, on any device.

Everything is elementwise, so a shard gets the same bits as the same region of the whole. That rules
out ``add(..., alpha=...)``: its vectorised body uses a fused multiply-add and its scalar tail need
not, so the bits of an element would depend on where a shard ends. Products and sums are therefore
rounded one by one, in float32 (float64 for float64 tensors); a bfloat16 or float16 tensor is
rounded once, when it is written. Nor would half-precision arithmetic do: on CPU the foreach product
with a number rounds the number to bfloat16 first, and 0.95 becomes 0.9492.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, repeat
from typing import Any

import torch
from torch import Tensor

from amo_dist.kernels.scratch import Scratch

_TOGETHER = 2**25
"""Elements, about, of the tensors that are computed together: what is wide of them takes memory."""


def update_scale(
    shape: tuple[int, int], factor: float = 0.2, adjust_lr: str = "match_rms_adamw"
) -> float:
    """What an orthogonal update is multiplied by, beside the learning rate.

    Args:
        shape: ``(m, n)``, outputs and inputs of the whole matrix, not of a shard.
        factor: Multiplies each of the scales.
        adjust_lr: ``match_rms_adamw``, ``sqrt(max(m, n))``, which with a factor of 0.2 gives the
            update the RMS of an AdamW one (AMO paper); ``original``, ``sqrt(max(1, m/n))`` (Jordan
            et al., 2024); ``spectral``, ``sqrt(m/n)`` (Ahn et al., "Dion", 2025).
    """
    m, n = shape
    squares = {"match_rms_adamw": max(m, n), "original": max(1, m / n), "spectral": m / n}
    return factor * math.sqrt(squares[adjust_lr])


def wide_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """In which values of these dtypes are computed: float64 where one of them is, else float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def largest_entry(x: Tensor) -> Tensor:
    """The greatest absolute entry of each matrix, without a host sync.

    PyTorch's infinity norm takes twenty times as long on CPU.

    Args:
        x: Matrices, shape ``(..., m, n)``, neither size 0.

    Returns:
        Shape ``(..., 1, 1)``, dtype of ``x``; NaN where a matrix holds one.
    """
    if x.dim() > 2:
        return x.abs().amax(dim=(-2, -1), keepdim=True)
    least, greatest = torch.aminmax(x)
    return torch.maximum(greatest, least.neg()).view(1, 1)


def exceed(tensors: Sequence[Tensor], bounds: Sequence[float] | Tensor) -> Tensor:
    """Whether each tensor holds a NaN, an inf or an entry beyond its bound, without a device sync.

    Args:
        tensors: Of any shapes without a size 0, on one device; at least one.
        bounds: Greatest absolute value of a good entry, for each tensor; a list, which is copied to
            the device, or a float64 tensor there.

    Returns:
        Boolean, shape ``(len(tensors),)``.

    Raises:
        ValueError: lists of different lengths.
    """
    if len(tensors) != len(bounds):
        raise ValueError(f"bounds: found {len(bounds)}, expected one for each of {len(tensors)}")
    # The largest entry, not the 2-norm: that of finite 1e30 entries is infinite.
    found = torch._foreach_norm(list(tensors), ord=float("inf"))
    if len({each.dtype for each in found}) > 1:
        found = tuple(each.to(torch.float64) for each in found)
    # One cast of all, not one launch for each of hundreds.
    largest = torch.stack(found).to(torch.float64)
    if not isinstance(bounds, Tensor):
        bounds = torch.tensor(bounds, dtype=torch.float64, device=largest.device)
    # A comparison with NaN is false.
    return ~(largest <= bounds)


@torch.no_grad()
def update_momentum(
    buffers: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum: float,
    *,
    bad: Tensor | None = None,
    scratch: Scratch | None = None,
) -> None:
    """``B <- momentum * B + G``, in place.

    Args:
        buffers: Momentum buffers; modified.
        grads: Gradients of the same shapes, in any floating dtype; not modified.
        momentum: Decay; no ``1 - momentum`` in front of the gradient.
        bad: 0-dim, boolean, on their device: where true, no buffer changes, whatever the gradients
            hold.
        scratch: Memory to work in, kept by the caller.

    Raises:
        ValueError: lists of different lengths.
    """
    scratch = scratch or Scratch()
    for dtype, (some, found) in _alike(buffers, grads):
        if bad is not None or found[0].dtype != dtype:
            flat, cast = scratch.take("second", some, dtype)
            torch._foreach_copy_(cast, found)
            if bad is not None:
                flat.masked_fill_(bad, -0.0)  # the one number that changes no other, not even 0.0
            found = cast
        factor = _unless(bad, momentum, 1.0, dtype)
        wide = _widen(some, dtype, scratch)
        torch._foreach_mul_(wide, factor)
        torch._foreach_add_(wide, found)
        _write_back(some, wide)


@torch.no_grad()
def nesterov(
    buffers: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum: float,
    out: Sequence[Tensor] | None = None,
    *,
    scratch: Scratch | None = None,
) -> Sequence[Tensor]:
    """``G + momentum * B`` in float32 (float64 for float64 buffers), rounded once into ``out``.

    Args:
        buffers: Momentum buffers after ``update_momentum``; not modified.
        grads: Gradients of the same shapes, in any floating dtype; not modified.
        momentum: Decay.
        out: Where the results go, of the same shapes, in any floating dtype and strides; new
            tensors where None.
        scratch: Memory to work in, kept by the caller.

    Returns:
        ``out``.

    Raises:
        ValueError: lists of different lengths.
    """
    scratch = scratch or Scratch()
    if out is None:
        out = [torch.empty_like(each, dtype=wide_dtype(each.dtype)) for each in buffers]
    for dtype, (some, found, places) in _alike(buffers, grads, out):
        flat, ahead = scratch.take("first", some, dtype)
        torch._foreach_copy_(ahead, some)
        flat.mul_(momentum)
        if found[0].dtype != dtype:
            _, cast = scratch.take("second", some, dtype)
            torch._foreach_copy_(cast, found)
            found = cast
        torch._foreach_add_(ahead, found)
        torch._foreach_copy_(places, ahead)
    return out


@torch.no_grad()
def apply_update(
    params: Sequence[Tensor],
    updates: Sequence[Tensor],
    *,
    lr: float | Tensor,
    weight_decay: float,
    scale: float | Sequence[float],
    cautious: bool = False,
    bad: Tensor | None = None,
    scratch: Scratch | None = None,
) -> None:
    """``W <- W * (1 - lr * weight_decay) - lr * scale * X``, in place.

    Args:
        params: Parameters or shards of them; modified.
        updates: Orthogonalized momentum of the same shapes, any floating dtype; not modified.
        lr: Learning rate, a number or a 0-dim tensor; both give the same bits.
        weight_decay: Decoupled weight decay.
        scale: ``update_scale`` of the whole matrix: one for all, or one for each parameter.
        cautious: Decay only entries whose update has the same sign.
        bad: 0-dim, boolean, on their device: where true, no parameter changes.
        scratch: Memory to work in, kept by the caller.

    Raises:
        ValueError: lists of different lengths.
    """
    scratch = scratch or Scratch()
    scales = [scale] * len(params) if isinstance(scale, (int, float)) else list(scale)
    # float64, so that a tensor learning rate takes the road of a Python float.
    rate = lr.to(torch.float64) if isinstance(lr, Tensor) else lr
    for dtype, (some, found, each) in _alike(params, updates, scales):
        flat, steps = scratch.take("second", some, dtype)
        torch._foreach_copy_(steps, found)
        for value in dict.fromkeys(each):
            alike = [step for step, own in zip(steps, each, strict=True) if own == value]
            torch._foreach_mul_(alike, _unless(None, rate * value, 0.0, dtype))
        if bad is not None:
            flat.masked_fill_(bad, 0.0)
        wide = _widen(some, dtype, scratch)
        kept = _unless(bad, 1 - rate * weight_decay, 1.0, dtype)
        if weight_decay != 0 and cautious:
            torch._foreach_mul_(wide, list(map(cautious_factor, wide, found, repeat(kept))))
        elif weight_decay != 0:
            torch._foreach_mul_(wide, kept)
        torch._foreach_sub_(wide, steps)
        _write_back(some, wide)


def cautious_factor(values: Tensor, updates: Tensor, kept: float | Tensor) -> Tensor:
    """``kept`` where a value and its update have one sign, else one; in the dtype of values."""
    return torch.where(values.sign() == updates.sign(), kept, torch.ones_like(values))


def _unless(
    bad: Tensor | None, value: float | Tensor, otherwise: float, dtype: torch.dtype
) -> float | Tensor:
    """The value; another one where something is bad, which only the device may know by now."""
    if bad is None:
        # float64 would promote a 0-dim float32 tensor.
        return value.to(dtype) if isinstance(value, Tensor) else value
    if not isinstance(value, Tensor):
        # Filled by a kernel: a copy to the device would wait for it.
        value = torch.full((), value, dtype=dtype, device=bad.device)
    return value.to(dtype).masked_fill(bad, otherwise)


def _alike(
    tensors: Sequence[Tensor], *others: Sequence[Any]
) -> Iterator[tuple[torch.dtype, list[list[Any]]]]:
    """Parts of lists that are computed together, in bounded memory, and the dtype in which.

    Raises:
        ValueError: lists of different lengths.
    """
    lists = [list(each) for each in (tensors, *others)]
    lengths = {len(each) for each in lists}
    if len(lengths) > 1:
        raise ValueError(f"tensors: found lists of {sorted(lengths)}, expected as many in each")
    dtypes = [(each.dtype, other.dtype) for each, other in zip(*lists[:2], strict=True)]
    filled = list(accumulate([each.numel() for each in tensors]))
    if len(set(dtypes)) == 1 and filled[-1] <= _TOGETHER:
        yield wide_dtype(dtypes[0][0]), lists
        return
    parts: dict[object, list[int]] = {}
    for index, size in enumerate(filled):
        parts.setdefault((size // _TOGETHER, dtypes[index]), []).append(index)
    for indices in parts.values():
        dtype = wide_dtype(dtypes[indices[0]][0])
        yield dtype, [[each[index] for index in indices] for each in lists]


def _widen(tensors: list[Tensor], dtype: torch.dtype, scratch: Scratch) -> list[Tensor]:
    """The tensors themselves where they have the dtype, else copies."""
    if tensors[0].dtype == dtype:
        return tensors
    _, wide = scratch.take("first", tensors, dtype)
    torch._foreach_copy_(wide, tensors)
    return wide


def _write_back(tensors: list[Tensor], wide: list[Tensor]) -> None:
    if wide is not tensors:
        torch._foreach_copy_(tensors, wide)
