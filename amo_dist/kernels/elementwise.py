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
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_WIDE = (torch.float32, torch.float64)


def update_scale(shape: tuple[int, int], factor: float = 0.2) -> float:
    """``factor * sqrt(max(m, n))``, which gives an orthogonal update the RMS of an AdamW one.

    Args:
        shape: ``(m, n)`` of the whole matrix, not of a shard.
        factor: 0.2 in the AMO paper.
    """
    return factor * math.sqrt(max(shape))


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


def exceed(tensors: Sequence[Tensor], bounds: Sequence[float]) -> Tensor:
    """Whether each tensor holds a NaN, an inf or an entry beyond its bound, without a device sync.

    Args:
        tensors: Of any shapes without a size 0, on one device; at least one.
        bounds: Greatest absolute value of a good entry, for each tensor.

    Returns:
        Boolean, shape ``(len(tensors),)``.

    Raises:
        ValueError: lists of different lengths.
    """
    if len(tensors) != len(bounds):
        raise ValueError(f"bounds: found {len(bounds)}, expected one for each of {len(tensors)}")
    # The largest entry, not the 2-norm: that of finite 1e30 entries is infinite.
    found = _widen(torch._foreach_norm(list(tensors), ord=float("inf")))
    if len({each.dtype for each in found}) > 1:
        found = [each.to(torch.float64) for each in found]
    # One cast of all, not one launch for each of hundreds.
    largest = torch.stack(found).to(torch.float64)
    # A comparison with NaN is false.
    return ~(largest <= torch.tensor(bounds, dtype=torch.float64, device=largest.device))


@torch.no_grad()
def update_momentum(buffers: Sequence[Tensor], grads: Sequence[Tensor], momentum: float) -> None:
    """``B <- momentum * B + G``, in place.

    Args:
        buffers: Momentum buffers; modified.
        grads: Gradients of the same shapes, in any floating dtype; not modified.
        momentum: Decay; no ``1 - momentum`` in front of the gradient.

    Raises:
        ValueError: lists of different lengths.
    """
    wide = _widen(buffers)
    wide_grads = _cast_like(grads, wide)
    if not wide:
        return
    torch._foreach_mul_(wide, momentum)
    torch._foreach_add_(wide, wide_grads)
    _write_back(buffers, wide)


@torch.no_grad()
def nesterov(
    buffers: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum: float,
    out: Sequence[Tensor] | None = None,
) -> Sequence[Tensor]:
    """``G + momentum * B`` in float32 (float64 for float64 buffers), rounded once into ``out``.

    Args:
        buffers: Momentum buffers after ``update_momentum``; not modified.
        grads: Gradients of the same shapes, in any floating dtype; not modified.
        momentum: Decay.
        out: Where the results go, of the same shapes, in any floating dtype and strides; new
            tensors where None.

    Returns:
        ``out``.

    Raises:
        ValueError: lists of different lengths.
    """
    wide = _widen(buffers)
    wide_grads = _cast_like(grads, wide)
    if not wide:
        return []
    ahead = list(torch._foreach_mul(wide, momentum))
    torch._foreach_add_(ahead, wide_grads)
    if out is None:
        return ahead
    torch._foreach_copy_(list(out), ahead)
    return out


@torch.no_grad()
def apply_update(
    params: Sequence[Tensor],
    updates: Sequence[Tensor],
    *,
    lr: float | Tensor,
    weight_decay: float,
    scale: float | Sequence[float],
) -> None:
    """``W <- W * (1 - lr * weight_decay) - lr * scale * X``, in place.

    Args:
        params: Parameters or shards of them; modified.
        updates: Orthogonalized momentum of the same shapes, any floating dtype; not modified.
        lr: Learning rate, a number or a 0-dim tensor; both give the same bits.
        weight_decay: Decoupled weight decay.
        scale: ``update_scale`` of the whole matrix: one for all, or one for each parameter.

    Raises:
        ValueError: lists of different lengths.
    """
    scales = [scale] * len(params) if isinstance(scale, (int, float)) else list(scale)
    # float64, so that a tensor learning rate takes the road of a Python float.
    rate = lr.to(torch.float64) if isinstance(lr, Tensor) else lr
    wide = _widen(params)
    factors = _factors([rate * each for each in scales], wide)
    steps = _cast_like(updates, wide)
    if not wide:
        return
    if weight_decay != 0:
        torch._foreach_mul_(wide, _factors([1 - rate * weight_decay] * len(wide), wide))
    torch._foreach_sub_(wide, torch._foreach_mul(steps, factors))
    _write_back(params, wide)


def _factors(values: Sequence[float | Tensor], like: Sequence[Tensor]) -> list[Any]:
    """The values, those that are tensors cast: float64 would promote a 0-dim float32 tensor."""
    pairs = zip(values, like, strict=True)
    return [value.to(t.dtype) if isinstance(value, Tensor) else value for value, t in pairs]


def _widen(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors themselves where they are float32 or float64, else float32 copies."""
    return [t if t.dtype in _WIDE else t.float() for t in tensors]


def _write_back(tensors: Sequence[Tensor], wide: Sequence[Tensor]) -> None:
    copies = [(t, w) for t, w in zip(tensors, wide, strict=True) if t is not w]
    if copies:
        torch._foreach_copy_([t for t, _ in copies], [w for _, w in copies])


def _cast_like(tensors: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    return [t.to(reference.dtype) for t, reference in zip(tensors, like, strict=True)]
