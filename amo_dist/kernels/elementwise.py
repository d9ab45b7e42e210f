"""Momentum, Nesterov and the decoupled update, on lists of local tensors.

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
from typing import Any

import torch
from torch import Tensor

from amo_dist.kernels.scratch import scratch

_WIDE = (torch.float32, torch.float64)
_CHUNK = 2**18
"""Elements that go through all passes of a formula together on CPU: some stay in its caches."""


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


def wide_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """In which values of these dtypes are computed: float64 where one of them is, else float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def largest_entry(x: Tensor) -> Tensor:
    """The greatest absolute entry of each matrix, without a host sync.

    On CPU the infinity norm takes twenty times as long as this.

    Args:
        x: Matrices, shape ``(..., m, n)``, neither size 0.

    Returns:
        Shape ``(..., 1, 1)``, dtype of ``x``; NaN where a matrix holds one.
    """
    if x.dim() > 2:
        return x.abs().amax(dim=(-2, -1), keepdim=True)
    return _largest(x).view(1, 1)


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
    _check_lengths(tensors=tensors, bounds=bounds)
    if _lie_on_cpu(tensors):
        found_on_cpu = [_exceeds_on_cpu(x, b) for x, b in zip(tensors, bounds, strict=True)]
        return torch.tensor(found_on_cpu, device=tensors[0].device)
    # The largest entry, not the 2-norm: that of finite 1e30 entries is infinite.
    found = _widen(torch._foreach_norm(list(tensors), ord=float("inf")))
    if len({each.dtype for each in found}) > 1:
        found = [each.to(torch.float64) for each in found]
    # One cast of all, not one launch for each of hundreds.
    largest = torch.stack(found).to(torch.float64)
    # A comparison with NaN is false.
    return ~(largest <= torch.tensor(bounds, dtype=torch.float64, device=largest.device))


def _exceeds_on_cpu(x: Tensor, bound: float) -> bool:
    # No entry is beyond the 2-norm (a factor of two for its rounding), which is the faster one.
    return not (torch.linalg.vector_norm(x).item() <= bound / 2 or _largest(x).item() <= bound)


def _largest(x: Tensor) -> Tensor:
    least, greatest = torch.aminmax(x)
    return torch.maximum(greatest, least.neg())


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
    _check_lengths(buffers=buffers, grads=grads)
    if _lie_on_cpu(buffers):
        for buffer, grad in _chunks(buffers, grads):
            wide = _wide_copy("buffer", buffer)
            wide.mul_(momentum).add_(_wide_copy("grad", grad, wide.dtype))
            if wide is not buffer:
                buffer.copy_(wide)
        return
    wide_buffers = _widen(buffers)
    torch._foreach_mul_(wide_buffers, momentum)
    torch._foreach_add_(wide_buffers, _cast_like(grads, wide_buffers))
    _write_back(buffers, wide_buffers)


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
    if out is None:
        out = [torch.empty_like(buffer, dtype=wide_dtype(buffer.dtype)) for buffer in buffers]
    _check_lengths(buffers=buffers, grads=grads, out=out)
    if _lie_on_cpu(buffers):
        for buffer, grad, place in _chunks(buffers, grads, out):
            wide = _wide_copy("buffer", buffer)
            same = place.dtype == wide.dtype
            ahead = place if same else scratch("ahead", wide.shape, wide.dtype, wide.device)
            torch.mul(wide, momentum, out=ahead)
            ahead.add_(_wide_copy("grad", grad, wide.dtype))
            if not same:
                place.copy_(ahead)
        return out
    aheads = list(torch._foreach_mul(_widen(buffers), momentum))
    torch._foreach_add_(aheads, _cast_like(grads, aheads))
    if aheads:
        torch._foreach_copy_(list(out), aheads)
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
        lr: Learning rate, a number or a 0-dim tensor (which is read on the host for parameters
            on CPU alone).
        weight_decay: Decoupled weight decay.
        scale: ``update_scale`` of the whole matrix: one for all, or one for each parameter.

    Raises:
        ValueError: lists of different lengths.
    """
    scales = [scale] * len(params) if isinstance(scale, (int, float)) else list(scale)
    _check_lengths(params=params, updates=updates, scale=scales)
    if _lie_on_cpu(params):
        rate = float(lr)
        decay = 1 - rate * weight_decay
        for param, update, each in zip(params, updates, scales, strict=True):
            for part, step in _chunks([param], [update]):
                _apply_on_cpu(part, step, decay if weight_decay != 0 else None, rate * each)
        return
    # float64, so that a tensor learning rate takes the road of a Python float.
    wide_rate = lr.to(torch.float64) if isinstance(lr, Tensor) else lr
    wide = _widen(params)
    if weight_decay != 0:
        torch._foreach_mul_(wide, _factors([1 - wide_rate * weight_decay] * len(wide), wide))
    steps = _factors([wide_rate * each for each in scales], wide)
    torch._foreach_sub_(wide, _scaled(_cast_like(updates, wide), updates, steps))
    _write_back(params, wide)


def _apply_on_cpu(param: Tensor, update: Tensor, decay: float | None, factor: float) -> None:
    wide = _wide_copy("param", param)
    if decay is not None:
        wide.mul_(decay)
    step = scratch("step", wide.shape, wide.dtype, wide.device)
    if update.dtype == wide.dtype:
        torch.mul(update, factor, out=step)
    else:
        step.copy_(update).mul_(factor)
    wide.sub_(step)
    if wide is not param:
        param.copy_(wide)


def _lie_on_cpu(tensors: Sequence[Tensor]) -> bool:
    """Where a kernel launch costs little and fresh memory much; devices get one call for all."""
    return all(tensor.device.type == "cpu" for tensor in tensors)


def _chunks(*lists: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of the same place in each list, the large ones in parts."""
    for tensors in zip(*lists, strict=True):
        first = tensors[0]
        if first.numel() <= _CHUNK:
            yield tensors
        elif all(tensor.is_contiguous() for tensor in tensors):
            yield from zip(*(tensor.view(-1).split(_CHUNK) for tensor in tensors), strict=True)
        else:
            rows = max(_CHUNK * first.shape[0] // first.numel(), 1)
            yield from zip(*(tensor.split(rows) for tensor in tensors), strict=True)


def _wide_copy(use: str, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor itself where it has the wide dtype, else a copy that the next call overwrites."""
    if tensor.dtype == dtype or (dtype is None and tensor.dtype in _WIDE):
        return tensor
    dtype = dtype or wide_dtype(tensor.dtype)
    return scratch(use, tensor.shape, dtype, tensor.device).copy_(tensor)


def _scaled(casts: list[Tensor], originals: Sequence[Tensor], factors: list[Any]) -> list[Tensor]:
    """The products, in place where a cast has made a copy."""
    if any(cast is original for cast, original in zip(casts, originals, strict=True)):
        return list(torch._foreach_mul(casts, factors))
    torch._foreach_mul_(casts, factors)
    return casts


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


def _check_lengths(**lists: Sequence[object]) -> None:
    lengths = {name: len(values) for name, values in lists.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"lists of different lengths: found {lengths}, expected equal ones")
