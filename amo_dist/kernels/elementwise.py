"""Momentum, Nesterov, the decoupled update, master weights: local tensors on any device.

Everything is elementwise, so on a CPU a shard gets the same bits as the same region of the whole.
That rules out ``add(..., alpha=...)``: its vectorised body uses a fused multiply-add and its scalar
tail need not, so the bits of an element would depend on where a shard ends. Products and sums are
therefore rounded one by one, in float32 (float64 for float64 tensors); a bfloat16 or float16 tensor
is rounded once, when it is written. Half-precision arithmetic would not do either: on a CPU the
foreach product with a number rounds the number to bfloat16 first, and 0.95 becomes 0.9492.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate, repeat
from typing import Any

import torch
from torch import Tensor

Tensors = Sequence[Tensor]

# Name of an optimizer's state: float32, the remainder that rounding took off a parameter.
ROUNDED_OFF = "rounded_off"

# Elements, about, of the tensors that are computed together: float32 copies of narrow tensors take
# memory.
GROUP_ELEMENTS = 2**25
# The same on a CPU, whose caches then hold the copies.
_CACHED_ELEMENTS = 2**18


def on_cpu(x: Tensor) -> bool:
    """Whether a tensor lies on the CPU, where calls return when done and caches hold parts."""
    return x.is_cpu


def update_scale(
    shape: tuple[int, int], factor: float = 0.2, adjust_lr: str = "match_rms_adamw"
) -> float:
    """Scale of an orthogonal update, beside the learning rate.

    Args:
        shape: ``(m, n)``, outputs and inputs of the whole matrix, not of a shard.
        factor: Factor of each of the scales.
        adjust_lr: ``match_rms_adamw``, ``sqrt(max(m, n))``, which with a factor of 0.2 gives the
            update the RMS of an AdamW one (AMO paper); ``original``, ``sqrt(max(1, m/n))`` (Jordan
            et al., 2024); ``spectral``, ``sqrt(m/n)`` (Ahn et al., "Dion", 2025).
    """
    m, n = shape
    squares = {"match_rms_adamw": max(m, n), "original": max(1, m / n), "spectral": m / n}
    return factor * math.sqrt(squares[adjust_lr])


def wide_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Dtype of arithmetic on values of these dtypes: float64 beside a float64, else float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def real(tensors: Tensors) -> list[Tensor]:
    """Tensors as they are; complex ones as views ``(..., 2)`` of their real and imaginary parts."""
    return [torch.view_as_real(x) if x.is_complex() else x for x in tensors]


def largest_entry(x: Tensor) -> Tensor:
    """Greatest absolute entry of each matrix, without a host sync.

    On a CPU an infinity norm takes twenty times as long, and `torch.aminmax` over dims ten times.

    Args:
        x: Matrices, shape ``(..., m, n)``, neither size 0.

    Returns:
        Shape ``(..., 1, 1)``, dtype of ``x``; NaN where a matrix holds one.
    """
    if on_cpu(x):
        bounds = map(torch.aminmax, x.reshape(-1, *x.shape[-2:]))
        largest = [torch.maximum(high, low.neg()) for low, high in bounds]
        return torch.stack(largest).view(*x.shape[:-2], 1, 1)
    norm: Tensor = torch.linalg.vector_norm(x, math.inf, dim=(-2, -1), keepdim=True)
    return norm


def exceed(tensors: Tensors, bounds: Tensor) -> Tensor:
    """Whether each tensor holds a NaN, an inf or an entry beyond its bound, without a device sync.

    Args:
        tensors: Tensors of any shapes without a size 0, on one device; at least one.
        bounds: Greatest absolute value of a good entry, for each tensor: float64, on the device.

    Returns:
        Boolean, shape ``(len(tensors),)``.
    """
    if any(map(Tensor.is_complex, tensors)):
        tensors = real(tensors)
    if on_cpu(tensors[0]):
        largest = torch.cat([largest_entry(x.reshape(1, -1)).double().view(1) for x in tensors])
        return ~(largest <= bounds)
    # The 2-norm of finite 1e30 entries would be infinite.
    norms = torch._foreach_norm(list(tensors), ord=float("inf"))
    if len({norm.dtype for norm in norms}) > 1:
        norms = tuple(norm.to(torch.float64) for norm in norms)
    # Stacked first: a cast of each of hundreds would be a launch of its own.
    largest = torch.stack(norms).to(torch.float64)
    # A comparison with NaN is false.
    return ~(largest <= bounds)


def drop_nonfinite(updates: Tensor) -> Tensor:
    """Zero, in place, each matrix that holds NaN or inf: a parameter once NaN stays so.

    Args:
        updates: ``(b, m, n)``, not empty; modified.

    Returns:
        Flags of the matrices that were zeroed, boolean, ``(b, 1, 1)``.
    """
    bad = ~(largest_entry(updates) < math.inf)  # of NaN, too
    if not on_cpu(updates) or bad.any():
        updates.masked_fill_(bad, 0.0)
    return bad


def update_momentum(
    buffers: Tensors,
    grads: Tensors,
    momentum: float,
    *,
    skip_mask: Tensor | None = None,
) -> None:
    """``B <- momentum * B + G``, in place.

    Args:
        buffers: Momentum buffers; modified.
        grads: Gradients of the same shapes, in any floating dtype; not modified.
        momentum: Decay; no ``1 - momentum`` in front of the gradient.
        skip_mask: 0-dim, boolean, on their device: where true, no buffer changes, whatever the
            gradients hold.

    Raises:
        ValueError: Lists of different lengths.
    """
    for dtype, (buffers_part, grads_part) in _parts(buffers, grads):
        # Adding -0.0 leaves every buffer as it is; adding 0.0 would turn -0.0 into 0.0.
        added, wide = _widened(
            dtype,
            grads_part,
            buffers_part,
            copies=skip_mask is not None,
            skip_mask=skip_mask,
            fill=-0.0,
        )
        torch._foreach_mul_(wide, _unless_skipped(skip_mask, momentum, 1.0, dtype))
        torch._foreach_add_(wide, added)
        if wide is not buffers_part:
            torch._foreach_copy_(buffers_part, wide)


def look_ahead(buffers: Tensors, grads: Tensors, coefficient: float | None, out: Tensors) -> None:
    """``G + coefficient * B``, or ``B`` without a coefficient, rounded once into ``out``.

    Args:
        buffers: Momentum buffers after ``update_momentum``; not modified.
        grads: Gradients of the same shapes, in any floating dtype; not modified.
        coefficient: Factor of the buffers; the momentum in Nesterov's own form.
        out: Places of the results, of the same shapes, in any floating dtype and strides.

    Raises:
        ValueError: Lists of different lengths.
    """
    if coefficient is None:
        torch._foreach_copy_(list(out), list(buffers))
        return
    for dtype, (buffers_part, grads_part, out_part) in _parts(buffers, grads, out):
        added, wide = _widened(dtype, grads_part, buffers_part)
        ahead = torch._foreach_mul(wide, coefficient)
        torch._foreach_add_(ahead, added)
        torch._foreach_copy_(out_part, ahead)


def advance(
    buffers: Tensors,
    grads: Tensors,
    momentum: float,
    coefficient: float | None,
    out: Tensors,
    *,
    skip_mask: Tensor | None = None,
) -> None:
    """`update_momentum`, then `look_ahead`; on a device both in one pass where PyTorch has one.

    Args:
        buffers: Argument of `update_momentum`.
        grads: Argument of `update_momentum`.
        momentum: Argument of `update_momentum`.
        coefficient: Argument of `look_ahead`.
        out: Argument of `look_ahead`; anything where ``skip_mask`` is true.
        skip_mask: Argument of `update_momentum`.
    """
    for dtype, (buffers_part, grads_part, out_part) in _parts(buffers, grads, out):
        is_sgd = coefficient in (None, momentum) and momentum > 0  # its kernel refuses 0
        if on_cpu(buffers_part[0]) or not (is_sgd and _is_dense(buffers_part, grads_part)):
            update_momentum(buffers_part, grads_part, momentum, skip_mask=skip_mask)
            look_ahead(buffers_part, grads_part, coefficient, out_part)
            continue
        added, wide = _widened(dtype, grads_part, buffers_part)
        flat, (ahead,) = new_lists(wide, dtype, 1)
        flat.zero_()
        # While SGD updates the buffers, parameters of zero with a rate of -1 become its step.
        _fused_sgd(ahead, added, wide, momentum, coefficient is not None, -1.0, 0.0, skip_mask)
        torch._foreach_copy_(out_part, ahead)
        if wide is not buffers_part:
            torch._foreach_copy_(buffers_part, wide)


def apply_update(
    params: Tensors,
    updates: Tensors,
    *,
    lr: float | Tensor,
    weight_decay: float,
    scales: Sequence[float],
    cautious: bool = False,
    skip_mask: Tensor | None = None,
) -> None:
    """``W <- W * (1 - lr * weight_decay) - lr * scale * X``, in place.

    Args:
        params: Parameters or shards of them; modified.
        updates: Orthogonalized momentum of the same shapes, any floating dtype; not modified.
        lr: Learning rate, a number or a 0-dim tensor; both give the same bits.
        weight_decay: Decoupled weight decay.
        scales: ``update_scale`` of the whole matrix, for each parameter.
        cautious: Decay only entries whose update has the same sign.
        skip_mask: 0-dim, boolean, on their device: where true, no parameter changes.

    Raises:
        ValueError: Lists of different lengths.
    """
    # A tensor learning rate in float64 is rounded as a Python float is.
    rate: float | Tensor = lr.to(torch.float64) if isinstance(lr, Tensor) else lr
    for dtype, (params_part, updates_part, scales_part) in _parts(params, updates, scales):
        # Copies of a skipped step are zeros: what was orthogonalized may be NaN.
        steps, wide = _widened(dtype, updates_part, params_part, copies=True, skip_mask=skip_mask)
        by_scale: dict[float, list[int]] = defaultdict(list)
        for index, scale in enumerate(scales_part):
            by_scale[scale].append(index)
        # On a CPU the fused kernel would give an element other bits in another shard.
        is_fused = not (on_cpu(wide[0]) or cautious or 0 in by_scale) and _is_dense(wide, steps)
        for scale, indices in by_scale.items():
            alike, step_rate = [steps[index] for index in indices], rate * scale
            if is_fused:  # decoupled decay is that of SGD, over the scale of the gradient
                targets, decay = [wide[index] for index in indices], weight_decay / scale
                _fused_sgd(targets, alike, [], 0.0, False, step_rate, decay, skip_mask)
            else:
                # 0-dim float64 would promote 0-dim float32.
                if isinstance(step_rate, Tensor):
                    step_rate = step_rate.to(dtype)
                torch._foreach_mul_(alike, step_rate)
        if not is_fused:
            if weight_decay != 0:
                kept = _unless_skipped(skip_mask, 1 - rate * weight_decay, 1.0, dtype)
                factor = _cautious(wide, updates_part, kept) if cautious else kept
                torch._foreach_mul_(wide, factor)
            torch._foreach_sub_(wide, steps)
        if wide is not params_part:
            torch._foreach_copy_(params_part, wide)


def _is_dense(*lists: list[Tensor]) -> bool:
    """Whether PyTorch's fused SGD takes these tensors."""
    return all(map(Tensor.is_contiguous, itertools.chain(*lists)))


def _fused_sgd(
    params: list[Tensor],
    grads: list[Tensor],
    buffers: list[Tensor],
    momentum: float,
    nesterov: bool,
    rate: Any,
    weight_decay: float,
    skip_mask: Tensor | None,
) -> None:
    """One step of PyTorch's SGD on a device, in one pass; none where the mask is true."""
    torch._fused_sgd_(
        params,
        grads,
        buffers,
        weight_decay=weight_decay,
        momentum=momentum,
        lr=rate.to(torch.float32) if isinstance(rate, Tensor) else rate,
        dampening=0.0,
        nesterov=nesterov,
        maximize=False,
        is_first_step=False,
        found_inf=None if skip_mask is None else skip_mask.to(torch.float32),
    )


def set_weights(targets: Tensors, values: Tensors, *, skip_mask: Tensor | None = None) -> None:
    """``W <- V``, in place.

    Args:
        targets: Weights, or state of a rule; modified.
        values: New values of the same shapes, any floating dtype; may be the targets themselves.
        skip_mask: 0-dim, boolean, on their device: where true, no target changes.
    """
    for _, (targets_part, values_part) in _parts(targets, values):
        if skip_mask is not None:
            dtype = targets_part[0].dtype
            (flat, (old,)), (other, (new,)) = (new_lists(targets_part, dtype, 1) for _ in "ab")
            torch._foreach_copy_(old, targets_part)
            torch._foreach_copy_(new, values_part)
            torch.where(skip_mask, flat, other, out=other)
            values_part = new
        torch._foreach_copy_(targets_part, values_part)


@contextlib.contextmanager
def master_weights(weights: list[Tensor], remainders: list[Tensor]) -> Iterator[Tensors]:
    """Lend the float32 master weights of bfloat16 values, and round them off at the end.

    Rounded to nearest, an update below half the spacing of a parameter (2^-9 of it, relatively) is
    lost whole, step after step. The remainder that rounding took off is therefore kept as state:
    parameter and remainder add up to the master weight, exactly. The remainder begins as zeros,
    whatever the parameter; a parameter that the user overwrites keeps its old one, which is at most
    half of the spacing of its old value.

    Args:
        weights: Rounded weights, or parts of them; bfloat16, at least one.
        remainders: Remainders, float32, of the same shapes.
    """
    (masters,) = _widened(torch.float32, weights)
    torch._foreach_add_(masters, remainders)
    yield masters
    torch._foreach_copy_(weights, masters)
    (rounded,) = _widened(torch.float32, weights)
    torch._foreach_copy_(remainders, masters)
    torch._foreach_sub_(remainders, rounded)


def _cautious(values: list[Tensor], updates: list[Tensor], kept: float | Tensor) -> list[Tensor]:
    """``kept`` where a value and its update have one sign, else one; in the dtype of values."""
    (flat, (own,)), (other, (others,)) = (new_lists(values, values[0].dtype, 1) for _ in "ab")
    torch._foreach_copy_(own, values)
    torch._foreach_copy_(others, updates)
    is_alike = flat.sign() == other.sign()
    flat.fill_(1.0)
    if isinstance(kept, Tensor):
        torch.where(is_alike, kept, flat, out=flat)
    else:
        flat.masked_fill_(is_alike, kept)
    return own


def _unless_skipped(
    skip_mask: Tensor | None, value: float | Tensor, otherwise: float, dtype: torch.dtype
) -> float | Tensor:
    """The value, or ``otherwise`` where the mask is true, which only the device may know by now.

    A tensor comes in the dtype: 0-dim float64 would promote 0-dim float32.
    """
    if skip_mask is None:
        return value.to(dtype) if isinstance(value, Tensor) else value
    if not isinstance(value, Tensor):
        # A kernel fills it: a copy to the device would wait for the device.
        value = torch.full((), value, dtype=dtype, device=skip_mask.device)
    return value.to(dtype).masked_fill(skip_mask, otherwise)


def _parts(
    tensors: Tensors, *others: Sequence[Any]
) -> Iterator[tuple[torch.dtype, list[list[Any]]]]:
    """Parts of lists that are computed together, in bounded memory, and the dtype of arithmetic.

    One tensor with gaps between its rows, such as a piece of some columns, would send a whole list
    to one launch for each tensor: such tensors have lists of their own.

    Raises:
        ValueError: Lists of different lengths.
    """
    lists = list(map(list, (tensors, *others)))
    lengths = set(map(len, lists))
    if len(lengths) > 1:
        raise ValueError(f"tensors: found lists of {sorted(lengths)}, expected as many in each")
    if not lists[0]:
        return
    most = GROUP_ELEMENTS
    if on_cpu(lists[0][0]):
        most = _CACHED_ELEMENTS
        rows = [row for values in zip(*lists, strict=True) for row in _cut(values)]
        lists = list(map(list, zip(*rows, strict=True)))
    first, second = lists[:2]
    dtypes = {(x.dtype, y.dtype) for x, y in zip(first, second, strict=True)}
    is_dense = all(map(Tensor.is_contiguous, first)) and all(map(Tensor.is_contiguous, second))
    if is_dense and len(dtypes) == 1 and sum(map(Tensor.numel, first)) < most:
        yield wide_dtype(first[0].dtype), lists  # nearly always, in a step of few launches
        return
    parts: dict[object, list[int]] = {}
    for index, size in enumerate(accumulate(map(Tensor.numel, first))):
        pair = first[index], second[index]
        is_dense = all(tensor.is_contiguous() for tensor in pair)
        key = (size // most, is_dense, *(tensor.dtype for tensor in pair))
        parts.setdefault(key, []).append(index)
    for indices in parts.values():
        dtype = wide_dtype(first[indices[0]].dtype)
        yield dtype, [[values[index] for index in indices] for values in lists]


def _cut(values: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Tensors of one shape in rows, as many as a cache holds; numbers are repeated."""
    whole = values[0]
    if whole.numel() <= _CACHED_ELEMENTS:
        yield tuple(values)
        return
    num_rows = max(_CACHED_ELEMENTS * len(whole) // whole.numel(), 1)
    columns = [v.split(num_rows) if isinstance(v, Tensor) else repeat(v) for v in values]
    yield from zip(*columns, strict=False)  # repeated numbers have no end


def _widened(
    dtype: torch.dtype,
    *lists: list[Tensor],
    copies: bool = False,
    skip_mask: Tensor | None = None,
    fill: float = 0.0,
) -> list[list[Tensor]]:
    """Lists of tensors in a dtype: themselves where they have it, else contiguous copies.

    Args:
        dtype: Dtype of the results.
        lists: Tensors, each list of the same shapes.
        copies: Whether the first list is copied in any case.
        skip_mask: 0-dim, boolean, on the device: where true, the copy of the first list is all
            ``fill``.
        fill: Number that stands in for skipped values.
    """
    results = list(lists)
    dtypes = [tensors[0].dtype for tensors in lists]
    copied = [i for i in range(len(lists)) if dtypes[i] != dtype or (copies and i == 0)]
    if not copied:
        return results
    flat, new = new_lists(lists[0], dtype, len(copied))
    for number, views in zip(copied, new, strict=True):
        results[number] = views
    for number in copied:
        torch._foreach_copy_(results[number], lists[number])
        if number == 0 and skip_mask is not None:
            flat.masked_fill_(skip_mask, fill)  # before the other lists are written
    return results


def new_lists(
    tensors: Tensors, dtype: torch.dtype, num_lists: int
) -> tuple[Tensor, list[list[Tensor]]]:
    """New contiguous tensors in the shapes of a list, and the one tensor of which they are views.

    Those of one shape stand side by side: a view or a fill for each of hundreds of tensors would
    cost a call or a launch each.
    """
    indices_by_shape: dict[torch.Size, list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        indices_by_shape[tensor.shape].append(index)
    counts = [num_lists * len(indices) for indices in indices_by_shape.values()]
    sizes = [c * shape.numel() for c, shape in zip(counts, indices_by_shape, strict=True)]
    flat = torch.empty(sum(sizes), dtype=dtype, device=tensors[0].device)
    lists = [[*tensors] for _ in range(num_lists)]
    parts = zip(indices_by_shape.items(), counts, flat.split(sizes), strict=True)
    for (shape, indices), count, part in parts:
        views = iter(part.view(count, *shape).unbind() if count > 1 else [part.view(shape)])
        for own in lists:
            for index in indices:
                own[index] = next(views)
    return flat, lists
