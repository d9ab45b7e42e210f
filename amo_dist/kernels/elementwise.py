"""Momentum, Nesterov and the decoupled update, on lists of local tensors.

Everything is elementwise, so a shard gets the same bits as the same region of the whole. That rules
out ``add(..., alpha=...)``: its vectorised body uses a fused multiply-add and its scalar tail need
not, so the bits of an element would depend on where a shard ends. Products and sums are therefore
rounded one by one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def update_scale(shape: Sequence[int], factor: float = 0.2) -> float:
    """``factor * sqrt(max(m, n))``, which gives an orthogonal update the RMS of an AdamW one.

    Args:
        shape: ``(..., m, n)``: the whole matrix, not a shard of it.
        factor: 0.2 in the AMO paper.

    Raises:
        ValueError: fewer than two dims.
    """
    if len(shape) < 2:
        raise ValueError(f"shape: found {tuple(shape)}, expected (..., m, n)")
    return factor * math.sqrt(max(shape[-2:]))


@torch.no_grad()
def update_momentum(buffers: Sequence[Tensor], grads: Sequence[Tensor], momentum: float) -> None:
    """``B <- momentum * B + G``, in place, in the dtype of each buffer.

    Args:
        buffers: Momentum buffers; modified.
        grads: Gradients of the same shapes, in any floating dtype (cast to the buffer's).
        momentum: Decay; no ``1 - momentum`` in front of the gradient.

    Raises:
        ValueError: lists of different lengths.
    """
    _check_lengths(buffers=buffers, grads=grads)
    if not buffers:
        return
    torch._foreach_mul_(list(buffers), momentum)
    torch._foreach_add_(list(buffers), _cast_like(grads, buffers))


@torch.no_grad()
def nesterov(buffers: Sequence[Tensor], grads: Sequence[Tensor], momentum: float) -> list[Tensor]:
    """``G + momentum * B`` as new tensors in the dtype of each buffer (already updated).

    Args:
        buffers: Momentum buffers after ``update_momentum``; not modified.
        grads: Gradients of the same shapes, in any floating dtype; not modified.
        momentum: Decay.

    Raises:
        ValueError: lists of different lengths.
    """
    _check_lengths(buffers=buffers, grads=grads)
    if not buffers:
        return []
    ahead = list(torch._foreach_mul(list(buffers), momentum))
    torch._foreach_add_(ahead, _cast_like(grads, buffers))
    return ahead


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

    The arithmetic is float32 (float64 for float64 parameters), and a bfloat16 or float16 parameter
    is rounded once, at the end.

    Args:
        params: Parameters or shards of them; modified.
        updates: Orthogonalized momentum of the same shapes, any floating dtype; not modified.
        lr: Learning rate, a number or a 0-dim tensor (which is never read on the host).
        weight_decay: Decoupled weight decay.
        scale: ``update_scale`` of the whole matrix: one for all, or one for each parameter.

    Raises:
        ValueError: lists of different lengths.
    """
    scales = [scale] * len(params) if isinstance(scale, (int, float)) else list(scale)
    _check_lengths(params=params, updates=updates, scale=scales)
    if not params:
        return
    # float64, so that a tensor learning rate takes the road of a Python float.
    rate = lr.to(torch.float64) if isinstance(lr, Tensor) else lr
    masters = [w if w.dtype in (torch.float32, torch.float64) else w.float() for w in params]
    if weight_decay != 0:
        torch._foreach_mul_(masters, 1 - rate * weight_decay)
    torch._foreach_sub_(masters, _scaled(_cast_like(updates, masters), rate, scales))
    rounded = [(w, master) for w, master in zip(params, masters, strict=True) if w is not master]
    if rounded:
        torch._foreach_copy_([w for w, _ in rounded], [master for _, master in rounded])


def _scaled(updates: list[Tensor], rate: float | Tensor, scales: list[float]) -> list[Tensor]:
    if isinstance(rate, Tensor):
        return list(torch._foreach_mul(updates, [rate * scale for scale in scales]))
    return list(torch._foreach_mul(updates, [rate * scale for scale in scales]))


def _cast_like(tensors: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    return [t.to(reference.dtype) for t, reference in zip(tensors, like, strict=True)]


def _check_lengths(**lists: Sequence[object]) -> None:
    lengths = {name: len(values) for name, values in lists.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"lists of different lengths: found {lengths}, expected equal ones")
