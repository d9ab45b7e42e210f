"""Newton-Schulz orthogonalization of plain local matrices.

An odd quintic ``p(x) = a x + b x^3 + c x^5`` applied to a matrix acts on its singular values alone:
``p(X) = a X + (b A + c A A) X`` with ``A = X X^T``. Composed polynomials that send every singular
value in ``[ell, 1]`` close to one therefore send a matrix close to its polar factor, with matrix
products only. Source: the AMO paper; the quintic form goes back to Muon (Jordan et al., 2024).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from amo_dist.config import PRECONDITIONERS, Triple
from amo_dist.kernels.backends import Backend, batch_size, calls, choose_backend, iterate
from amo_dist.kernels.elementwise import largest_entry, wide_dtype
from amo_dist.kernels.products import Call, even_parts, short_side
from amo_dist.kernels.scratch import scratch, whereabouts

_LEAST_NORM = 2.0**-32
"""Squares of the entries behind a norm of this size, or its inverse, are in float32's range."""
_LEAST_SEEN = 2.0**-9
"""Of the spacing of a dtype at one: what is added to a divisor below that, rounding swallows."""


@torch.no_grad()
def orthogonalize(
    x: Tensor | Sequence[Tensor],
    coefficients: Sequence[Triple],
    *,
    norm_scale: float = 1.01,
    preconditioner: str = "frobenius",
    dtype: torch.dtype = torch.bfloat16,
    eps: float = 1e-7,
    backend: str = "auto",
    out: Tensor | None = None,
) -> Tensor:
    """Approximate the polar factor ``U V^T`` of each matrix ``U S V^T`` of a batch.

    Norms are taken in float32 (float64 where ``x`` or ``dtype`` is), of matrices scaled by their
    largest absolute entry wherever an entry that the input can hold would overflow or vanish, and
    the normalized matrix is rounded once to ``dtype`` for the products. Nothing here waits for the
    device.

    Args:
        x: Matrices, shape ``(..., m, n)``, any floating dtype; not modified. Any size may be 0. Or
            a sequence of matrices alike in shape, dtype and device, which need not lie together.
        coefficients: One ``(a, b, c)`` for each step, at least one.
        norm_scale: Safety factor ``s``: the first iterate is ``x / (s * ||x||_F + eps)``. Rounding
            in ``dtype`` may push the largest singular value above one, where steep quintics
            diverge; 1.01 prevents it. Has no part in ``"aol"``.
        preconditioner: ``"frobenius"`` divides by the Frobenius norm. ``"aol"`` scales row ``i`` of
            the short side by ``(sum_j |A_ij|)^-1/2`` with ``A = x x^T`` (almost-orthogonal layers,
            as in Turbo-Muon), which bounds the singular values by one more tightly; the scaled
            ``A`` serves the first step.
        dtype: Floating dtype of the products and of the result.
        eps: Added to the norm in units of the largest entry, hence relative.
        backend: How the steps are run: ``auto``, ``standard``, ``symmetric``, ``gram`` or
            ``triton``; see ``backends``. The choice depends on shape, coefficients, dtype and
            device type alone.
        out: Where the result goes, contiguous; a new tensor where None.

    Returns:
        Contiguous tensor of the shape of ``x`` (of ``b`` matrices in sequence: ``(b, m, n)``) in
        ``dtype``. An all-zero matrix gives zeros; one with a NaN or infinite entry gives NaN in
        every entry.

    Raises:
        ValueError: fewer than two dims, matrices in sequence that differ, a dtype that is not
            floating, no coefficients, an unknown preconditioner or backend, a backend that cannot
            run here, ``norm_scale`` that is not positive, or ``out`` unlike the result.

    On CPU a batch equals the loop over its matrices bit for bit; it is that loop, save that small
    matrices run a few at a time where that is faster. Elsewhere a batch runs as batched products.
    """
    matrices = [x] if isinstance(x, Tensor) else list(x)
    _validate(matrices, coefficients, norm_scale, preconditioner, dtype)
    one, device = matrices[0], matrices[0].device
    shape = one.shape if isinstance(x, Tensor) else torch.Size((len(matrices), *one.shape))
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=device)
    elif (out.shape, out.dtype, out.device) != (shape, dtype, device) or not out.is_contiguous():
        raise ValueError(
            f"out: found {_described(out)}, expected {tuple(shape)} in {dtype} on {device}, "
            "contiguous"
        )
    if shape.numel() == 0:
        return out
    run = Orthogonalizer(
        shape[:-2].numel(),
        shape[-2:],
        coefficients,
        norm_scale=norm_scale,
        preconditioner=preconditioner,
        dtype=dtype,
        device_type=device.type,
        eps=eps,
        backend=backend,
    )
    if isinstance(x, Tensor):
        run.on_batch(x, out=out)
    else:
        run(matrices, out=out)
    return out


class Orthogonalizer:
    """`orthogonalize` for so many matrices of one shape, laid out once and run over and over.

    Arguments are those of `orthogonalize`, and are not checked.

    Args:
        count: Of matrices.
        shape: ``(m, n)`` of each, neither 0.
        coefficients: One ``(a, b, c)`` for each step.
        norm_scale: Safety factor.
        preconditioner: ``"frobenius"`` or ``"aol"``.
        dtype: Of the products and of the result.
        device_type: Of the matrices, such as ``cpu``.
        eps: Added to the norm.
        backend: How the steps are run.
    """

    def __init__(
        self,
        count: int,
        shape: Sequence[int],
        coefficients: Sequence[Triple],
        *,
        norm_scale: float,
        preconditioner: str,
        dtype: torch.dtype,
        device_type: str,
        eps: float = 1e-7,
        backend: str = "auto",
    ) -> None:
        self._dtype = dtype
        # Less than that is lost in rounding, and the largest entry of a matrix takes a pass.
        is_seen = eps > _LEAST_SEEN * torch.finfo(dtype).eps
        self._scaling = norm_scale, eps if is_seen else 0.0
        how = choose_backend(
            shape, coefficients, dtype=dtype, device_type=device_type, requested=backend
        )
        self._steps = coefficients, how
        self._args = coefficients, norm_scale, preconditioner, dtype, eps, how
        self._is_on_cpu = device_type == "cpu"
        self._is_laid_out = self._is_on_cpu and preconditioner == "frobenius"
        most = batch_size(how, shape, dtype=dtype, device_type=device_type) or count
        self._parts = list(even_parts(count, -(-count // most)))
        self._programs: list[_Program] = []
        self._laid_out_for: tuple[object, object] | None = None

    def __call__(self, matrices: Sequence[Tensor], *, out: Tensor) -> None:
        """Run them into ``out``, ``(count, m, n)``, contiguous.

        Args:
            matrices: ``count`` matrices of the shape, alike in dtype and device; not modified.
            out: Where the results go, in the dtype. The same object as last time saves time.
        """
        if not self._is_on_cpu:
            self.on_batch(matrices[0] if len(matrices) == 1 else torch.stack(list(matrices)), out)
        elif not self._is_laid_out:
            for matrix, result in zip(matrices, out.unbind(), strict=True):
                _orthogonalize(matrix, *self._args, out=result)
        else:
            self._run_programs(matrices, out)

    def on_batch(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """The same for matrices that lie together.

        Args:
            x: ``(..., m, n)``, of ``count`` matrices; not modified.
            out: Contiguous, in the shape of ``x``; a new tensor where None.
        """
        *_, m, n = x.shape
        out = torch.empty(x.shape, dtype=self._dtype, device=x.device) if out is None else out
        if self._is_on_cpu:
            self(x.reshape(-1, m, n).unbind(), out=out.view(-1, m, n))
        else:
            flat = x if x.dim() == 2 else x.reshape(-1, m, n)
            _orthogonalize(flat, *self._args, out=out.view(flat.shape))
        return out

    def _run_programs(self, matrices: Sequence[Tensor], out: Tensor) -> None:
        self._lay_out(out)
        scale, eps = self._scaling
        one = matrices[0]
        unit = scratch("unit", one.shape, wide_dtype(one.dtype, out.dtype), one.device)
        for (start, stop), program in zip(self._parts, self._programs, strict=True):
            for x, first in zip(matrices[start:stop], program.firsts, strict=True):
                _normalize_on_cpu(x, scale, eps, unit=unit, out=first)
            for call in program.calls:
                call()

    def _lay_out(self, out: Tensor) -> None:
        """Programs for this output, on the memory that this thread shares."""
        wanted = out, whereabouts()
        while self._laid_out_for is None or any(
            a is not b for a, b in zip(self._laid_out_for, wanted, strict=True)
        ):
            self._programs = [self._program(out[start:stop]) for start, stop in self._parts]
            # Where that took more memory than there was, the first ones lie in what was left.
            self._laid_out_for, wanted = wanted, (out, whereabouts())

    def _program(self, results: Tensor) -> _Program:
        batch = scratch("first", results.shape, results.dtype, results.device)
        firsts = batch.unbind()
        if len(firsts) == 1:  # a product of two matrices takes less to call
            batch, results = batch[0], results[0]
        return _Program(firsts, tuple(calls(batch, *self._steps, out=results)))


@dataclasses.dataclass(frozen=True, slots=True)
class _Program:
    """Where the first iterates of a batch go, and the calls that take them to its results."""

    firsts: Sequence[Tensor]
    calls: Sequence[Call]


def _validate(
    matrices: Sequence[Tensor],
    coefficients: Sequence[Triple],
    norm_scale: float,
    preconditioner: str,
    dtype: torch.dtype,
) -> None:
    if not matrices:
        raise ValueError("x: found no matrix, expected at least one")
    x, *others = matrices
    if x.dim() < 2 or (others and x.dim() > 2):
        raise ValueError(f"x: found shape {tuple(x.shape)}, expected (..., m, n)")
    for other in others:
        if (other.shape, other.dtype, other.device) != (x.shape, x.dtype, x.device):
            raise ValueError(
                f"x: found {_described(other)} beside {_described(x)}, expected all alike"
            )
    for field, found in (("x.dtype", x.dtype), ("dtype", dtype)):
        if not found.is_floating_point:
            raise ValueError(f"{field}: found {found}, expected a floating dtype")
    if len(coefficients) == 0:
        raise ValueError("coefficients: found none, expected one (a, b, c) for each step")
    if not norm_scale > 0:
        raise ValueError(f"norm_scale: found {norm_scale!r}, expected a number > 0")
    if preconditioner not in PRECONDITIONERS:
        raise ValueError(
            f"preconditioner: found {preconditioner!r}, expected one of {PRECONDITIONERS}"
        )


def _described(x: Tensor) -> str:
    return f"{tuple(x.shape)} in {x.dtype} on {x.device}"


def _orthogonalize(
    x: Tensor,
    coefficients: Sequence[Triple],
    norm_scale: float,
    preconditioner: str,
    dtype: torch.dtype,
    eps: float,
    backend: Backend,
    *,
    out: Tensor,
) -> None:
    """One matrix ``(m, n)`` or one batch ``(b, m, n)``, not empty, on any device."""
    # The kernel reads rows of the short side; products of PyTorch take tall matrices as they are.
    is_turned = backend.name == "triton" and x.shape[-2] > x.shape[-1]
    x = x.mT if is_turned else x
    gram: Tensor | None = None
    if preconditioner == "aol":
        first, gram = _precondition_aol(_scale_largest_entry_to_one(x, dtype), dtype)
    else:
        first = _normalized(_scale_largest_entry_to_one(x, dtype), norm_scale, dtype, eps)
    if is_turned:
        out.copy_(iterate(first, coefficients, backend, gram).mT)
    else:
        iterate(first, coefficients, backend, gram, out=out)


def _normalized(unit: Tensor, norm_scale: float, dtype: torch.dtype, eps: float) -> Tensor:
    """``unit / (norm_scale * ||unit||_F + eps)``, each matrix, in ``dtype``."""
    # The norm is at least one save for zero matrices: the clamp turns 0 / 0 into 0 / 1.
    norm = torch.linalg.vector_norm(unit, dim=(-2, -1), keepdim=True).clamp_(min=1.0)
    unit.div_(norm.mul_(norm_scale).add_(eps))  # wide, and rounded once by the cast
    return _cast(unit, dtype)


def _normalize_on_cpu(x: Tensor, scale: float, eps: float, *, unit: Tensor, out: Tensor) -> None:
    """The same of one matrix, whose largest entry is not scaled to one unless squares need it.

    Powers of two scale it then, which change no bit of the result. Passes over a matrix count: it
    has left the caches since the last one. ``unit`` is wide memory in the shape of ``x``.
    """
    dtype = out.dtype
    if not x.is_contiguous():  # bits of a sum depend on the strides
        x = scratch("contiguous", x.shape, x.dtype, x.device).copy_(x)
    widened = x if x.dtype == unit.dtype else unit.copy_(x)
    norm = torch.linalg.vector_norm(widened).item()
    if not _LEAST_NORM <= norm <= 1 / _LEAST_NORM:
        largest = largest_entry(x).item()
        if not math.isfinite(largest):
            out.fill_(math.nan)
            return
        exponent = -math.frexp(largest)[1]
        x = widened = unit.copy_(x)
        # In two, since the float that scales a denormal to one is infinite.
        x.mul_(2.0 ** (exponent // 2)).mul_(2.0 ** (exponent - exponent // 2))
        norm = torch.linalg.vector_norm(x).item()
    divisor = norm * scale
    if eps:
        divisor += eps * largest_entry(x).item()
    divisor = divisor or 1.0
    if x.dtype == dtype:  # divides wide, even where x is narrow, and rounds once
        torch.div(x, divisor, out=out)
    else:
        out.copy_(torch.div(widened, divisor, out=unit))


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else scratch("first", x.shape, dtype, x.device).copy_(x)


def _scale_largest_entry_to_one(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous float32 or float64 copy of ``x``, each matrix over its largest |entry|.

    On CPU it lives in memory that the next call overwrites.
    """
    wide = wide_dtype(x.dtype, dtype)
    # In the dtype of x, which may be half as long to read; a maximum is the same in any order.
    largest = largest_entry(x).to(wide)
    # Contiguous before any sum or product: their bits depend on the strides.
    unit = scratch("unit", x.shape, wide, x.device).copy_(x)
    # A true division: the reciprocal of a denormal is infinite.
    return unit.div_(largest.masked_fill_(largest == 0, 1.0))


def _precondition_aol(unit: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``diag(d) X`` and ``diag(d) X X^T diag(d)`` with ``d_i = (sum_j |X X^T|_ij)^-1/2``.

    X is ``unit`` or, where that is tall, its transpose.
    """
    cast = short_side(unit.to(dtype))
    gram = (cast @ cast.mT).to(unit.dtype)
    row_sums = gram.abs().sum(dim=-1, keepdim=True)
    # A row of zeros (or one whose squares vanish in dtype) has nothing to scale.
    d = row_sums.rsqrt().masked_fill_(row_sums == 0, 1.0)
    scaled_gram = gram.mul_(d).mul_(d.mT)
    short_side(unit).mul_(d)
    return _cast(unit, dtype), scaled_gram.to(dtype)
