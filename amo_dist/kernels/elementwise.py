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
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate, repeat
from typing import Any

import torch
from torch import Tensor

Tensors = Sequence[Tensor]

_TOGETHER = 2**25
"""Elements, about, of the tensors that are computed together: what is wide of them takes memory."""
_CHUNK = 2**18
"""Elements that go through all passes of a formula together on a CPU, in its caches."""


def on_cpu(x: Tensor) -> bool:
    """Whether work on a tensor is done when its call returns, and caches hold parts of it."""
    return x.is_cpu


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

    On CPU neither an infinity norm, which takes twenty times as long, nor a copy of one matrix.

    Args:
        x: Matrices, shape ``(..., m, n)``, neither size 0.

    Returns:
        Shape ``(..., 1, 1)``, dtype of ``x``; NaN where a matrix holds one.
    """
    if x.dim() > 2 or not on_cpu(x):
        return x.abs().amax(dim=(-2, -1), keepdim=True)
    least, greatest = torch.aminmax(x)
    return torch.maximum(greatest, least.neg()).view(1, 1)


def exceed(tensors: Tensors, bounds: Tensor) -> Tensor:
    """Whether each tensor holds a NaN, an inf or an entry beyond its bound, without a device sync.

    Args:
        tensors: Of any shapes without a size 0, on one device; at least one.
        bounds: Greatest absolute value of a good entry, for each tensor: float64, on the device.

    Returns:
        Boolean, shape ``(len(tensors),)``.
    """
    if on_cpu(tensors[0]):
        found = []
        for each, bound in zip(tensors, bounds.tolist(), strict=True):
            # There a 2-norm takes half as long as the largest entry, and no entry is beyond it
            # (a factor of two for its rounding).
            is_good = torch.linalg.vector_norm(each).item() <= bound / 2
            found.append(not (is_good or largest_entry(each.reshape(1, -1)).item() <= bound))
        return torch.tensor(found, device="cpu")
    # The largest entry, not the 2-norm: that of finite 1e30 entries is infinite.
    norms = torch._foreach_norm(list(tensors), ord=float("inf"))
    if len({each.dtype for each in norms}) > 1:
        norms = tuple(each.to(torch.float64) for each in norms)
    # One cast of all, not one launch for each of hundreds.
    largest = torch.stack(norms).to(torch.float64)
    # A comparison with NaN is false.
    return ~(largest <= bounds)


def drop_nonfinite(updates: Tensor) -> Tensor:
    """Zero, in place, each matrix that holds NaN or inf: a parameter once NaN stays so.

    Args:
        updates: ``(b, m, n)``, not empty; modified.

    Returns:
        Which were zeroed, boolean, ``(b, 1, 1)``.
    """
    # A sum is finite only where all entries are; it costs half of what the largest entry does.
    total = updates.sum(dim=(-2, -1), keepdim=True, dtype=torch.float64)
    bad = total.sub_(total) != 0  # NaN where the sum is not finite
    if not (on_cpu(updates) and not bad.any()):  # there, reading takes less than writing
        updates.masked_fill_(bad, 0.0)
    return bad


@torch.no_grad()
def update_momentum(
    buffers: Tensors, grads: Tensors, momentum: float, *, bad: Tensor | None = None
) -> None:
    """``B <- momentum * B + G``, in place.

    Args:
        buffers: Momentum buffers; modified.
        grads: Gradients of the same shapes, in any floating dtype; not modified.
        momentum: Decay; no ``1 - momentum`` in front of the gradient.
        bad: 0-dim, boolean, on their device: where true, no buffer changes, whatever the gradients
            hold.

    Raises:
        ValueError: lists of different lengths.
    """
    for dtype, (some, found) in _parts(buffers, grads):
        # The one number that changes no other, not even 0.0.
        moved, wide = _widened(dtype, found, some, copies=bad is not None, bad=bad, instead=-0.0)
        torch._foreach_mul_(wide, _unless(bad, momentum, 1.0, dtype))
        torch._foreach_add_(wide, moved)
        if wide is not some:
            torch._foreach_copy_(some, wide)


@torch.no_grad()
def nesterov(
    buffers: Tensors, grads: Tensors, momentum: float, out: Tensors | None = None
) -> Tensors:
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
        out = [torch.empty_like(each, dtype=wide_dtype(each.dtype)) for each in buffers]
    for dtype, (some, found, places) in _parts(buffers, grads, out):
        moved, wide = _widened(dtype, found, some)
        ahead = torch._foreach_mul(wide, momentum)
        torch._foreach_add_(ahead, moved)
        torch._foreach_copy_(places, ahead)
    return out


@torch.no_grad()
def apply_update(
    params: Tensors,
    updates: Tensors,
    *,
    lr: float | Tensor,
    weight_decay: float,
    scale: float | Sequence[float],
    cautious: bool = False,
    bad: Tensor | None = None,
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

    Raises:
        ValueError: lists of different lengths.
    """
    scales = [scale] * len(params) if isinstance(scale, (int, float)) else list(scale)
    # float64, so that a tensor learning rate takes the road of a Python float.
    rate = lr.to(torch.float64) if isinstance(lr, Tensor) else lr
    for dtype, (some, found, each) in _parts(params, updates, scales):
        steps, wide = _widened(dtype, found, some, copies=True, bad=bad)
        for value in dict.fromkeys(each):
            alike = [step for step, own in zip(steps, each, strict=True) if own == value]
            torch._foreach_mul_(alike, _unless(None, rate * value, 0.0, dtype))
        kept = _unless(bad, 1 - rate * weight_decay, 1.0, dtype)
        if weight_decay != 0 and cautious:
            torch._foreach_mul_(wide, list(map(_cautious, wide, found, repeat(kept))))
        elif weight_decay != 0:
            torch._foreach_mul_(wide, kept)
        torch._foreach_sub_(wide, steps)
        if wide is not some:
            torch._foreach_copy_(some, wide)


def _cautious(values: Tensor, updates: Tensor, kept: float | Tensor) -> Tensor:
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


def _parts(
    tensors: Tensors, *others: Sequence[Any]
) -> Iterator[tuple[torch.dtype, list[list[Any]]]]:
    """Parts of lists that are computed together, in bounded memory, and the dtype in which.

    Raises:
        ValueError: lists of different lengths.
    """
    lists = list(map(list, (tensors, *others)))
    lengths = set(map(len, lists))
    if len(lengths) > 1:
        raise ValueError(f"tensors: found lists of {sorted(lengths)}, expected as many in each")
    if tensors and on_cpu(tensors[0]):
        for one in zip(*lists, strict=True):
            whole, dtype = one[0], wide_dtype(one[0].dtype)
            if whole.numel() <= _CHUNK:
                yield dtype, [[each] for each in one]
                continue
            rows = max(_CHUNK * len(whole) // whole.numel(), 1)
            # Numbers are repeated without end.
            cut = (each.split(rows) if isinstance(each, Tensor) else repeat(each) for each in one)
            for some in zip(*cut, strict=False):
                yield dtype, [[each] for each in some]
        return
    parts: dict[object, list[int]] = {}
    for index, size in enumerate(accumulate(map(Tensor.numel, tensors))):
        key = (size // _TOGETHER, tensors[index].dtype, others[0][index].dtype)
        parts.setdefault(key, []).append(index)
    for indices in parts.values():
        dtype = wide_dtype(tensors[indices[0]].dtype)
        yield dtype, [[each[index] for index in indices] for each in lists]


def _widened(
    dtype: torch.dtype,
    *lists: list[Tensor],
    copies: bool = False,
    bad: Tensor | None = None,
    instead: float = 0.0,
) -> list[list[Tensor]]:
    """Lists of tensors in a dtype: themselves where they have it, else contiguous copies.

    The copies lie in one tensor, those of one shape together: so neither views nor fills are one
    for each of hundreds.

    Args:
        dtype: Of the results.
        lists: Of the same shapes.
        copies: Whether the first list is copied in any case.
        bad: 0-dim, boolean, on the device: where true, the copy of the first is all ``instead``.
        instead: A number.
    """
    found = list(lists)
    narrow = [i for i, each in enumerate(lists) if each[0].dtype != dtype or (copies and not i)]
    if not narrow:
        return found
    places: dict[torch.Size, list[int]] = defaultdict(list)
    for index, each in enumerate(lists[0]):
        places[each.shape].append(index)
    counts = [len(narrow) * len(indices) for indices in places.values()]
    sizes = [count * shape.numel() for count, shape in zip(counts, places, strict=True)]
    flat = torch.empty(sum(sizes), dtype=dtype, device=lists[0][0].device)
    for number in narrow:
        found[number] = [*lists[number]]
    parts = zip(places.items(), counts, flat.split(sizes), strict=True)
    for (shape, indices), count, part in parts:
        views = part.view(count, *shape).unbind() if count > 1 else [part.view(shape)]
        where = ((number, index) for number in narrow for index in indices)
        for (number, index), view in zip(where, views, strict=True):
            found[number][index] = view
    for number in narrow:
        torch._foreach_copy_(found[number], lists[number])
        if number == 0 and bad is not None:
            flat.masked_fill_(bad, instead)  # before the others are written
    return found
