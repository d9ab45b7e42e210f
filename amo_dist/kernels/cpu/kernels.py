"""What a CPU does faster: passes over what its caches hold, and Newton-Schulz on fixed memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from amo_dist.kernels.cpu.backends import batch_size
from amo_dist.kernels.cpu.program import Program, even_parts
from amo_dist.kernels.cpu.workspace import Workspace
from amo_dist.kernels.elementwise import cautious_factor, largest_entry, wide_dtype
from amo_dist.kernels.interface import Kernels, Orthogonalizer, Tensors
from amo_dist.kernels.plain import Recipe, first_iterate
from amo_dist.kernels.team import Team

_CHUNK = 2**18
"""Elements that go through all passes of a formula together: some stay in the caches."""
_LEAST_NORM = 2.0**-32
"""Squares of the entries behind a norm of this size, or its inverse, are in float32's range."""
_LEAST_SEEN = 2.0**-9
"""Of the spacing of a dtype at one: what is added to a divisor below that, rounding swallows."""


class CpuKernels(Kernels):
    """Kernels on CPU; one engine on one thread owns them, and with them their memory.

    Batches equal the loop over their matrices bit for bit. Arguments as for `Kernels`.
    """

    is_asynchronous = False
    task_elements = 2**21
    _auto = "auto"

    def __init__(self, ns_dtype: torch.dtype, ns_backend: str = "auto") -> None:
        super().__init__(ns_dtype, ns_backend)
        self._workspace = Workspace(torch.device("cpu"))

    @torch.no_grad()
    def update_momentum(self, buffers: Tensors, grads: Tensors, momentum: float) -> None:
        """A chunk at a time."""
        for buffer, grad in _chunks(buffers, grads):
            dtype = wide_dtype(buffer.dtype)
            wide = self._wide("buffer", buffer, dtype)
            wide.mul_(momentum).add_(self._wide("grad", grad, dtype))
            if wide is not buffer:
                buffer.copy_(wide)

    @torch.no_grad()
    def nesterov(self, buffers: Tensors, grads: Tensors, momentum: float, out: Tensors) -> None:
        """A chunk at a time."""
        for buffer, grad, place in _chunks(buffers, grads, out):
            dtype = wide_dtype(buffer.dtype)
            is_wide = place.dtype == dtype
            ahead = place if is_wide else self._workspace.take("ahead", place.shape, dtype)
            torch.mul(self._wide("buffer", buffer, dtype), momentum, out=ahead)
            ahead.add_(self._wide("grad", grad, dtype))
            if not is_wide:
                place.copy_(ahead)

    @torch.no_grad()
    def apply_update(
        self,
        params: Tensors,
        updates: Tensors,
        *,
        lr: float | Tensor,
        weight_decay: float,
        scale: Sequence[float],
        cautious: bool = False,
    ) -> None:
        """A chunk at a time."""
        rate = float(lr)
        for param, update, each in zip(params, updates, scale, strict=True):
            for part, step in _chunks([param], [update]):
                dtype = wide_dtype(part.dtype)
                wide = self._wide("param", part, dtype)
                if weight_decay != 0:
                    kept = 1 - rate * weight_decay
                    wide.mul_(cautious_factor(wide, step, kept) if cautious else kept)
                scaled = self._workspace.take("step", part.shape, dtype)
                wide.sub_(scaled.copy_(step).mul_(rate * each))
                if wide is not part:
                    part.copy_(wide)

    def exceed(self, tensors: Tensors, bounds: Sequence[float] | Tensor) -> Tensor:
        """By 2-norms first, which are faster than largest entries."""
        numbers = bounds.tolist() if isinstance(bounds, Tensor) else bounds
        found = [_exceeds(x, bound) for x, bound in zip(tensors, numbers, strict=True)]
        return torch.tensor(found, device="cpu")

    def drop_nonfinite(self, updates: Tensor, team: Team | None = None) -> Tensor | None:
        """Looks first, which costs less than to write; a team has to tell one another."""
        # A sum is finite only where all entries are, and costs half of what the largest one does.
        if team is None and math.isfinite(updates.sum()):
            return None
        return super().drop_nonfinite(updates, team)

    def _wide(self, use: str, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The tensor itself where it has the dtype, else a copy that the next one overwrites."""
        return x if x.dtype == dtype else self._workspace.take(use, x.shape, dtype).copy_(x)

    def _lay_out(self, shape: Sequence[int], recipe: Recipe, slot: int) -> Orthogonalizer:
        results = self._workspace.take(f"result {slot}", shape, recipe.dtype)
        return CpuOrthogonalizer(recipe, results, self._workspace)


def _chunks(*lists: Tensors) -> Iterator[Tensors]:
    """One tensor of each list at a time, large ones in flat parts, or in rows where strided."""
    for tensors in zip(*lists, strict=True):
        size = tensors[0].numel()
        if size <= _CHUNK:
            yield tensors
        elif all(each.is_contiguous() for each in tensors):
            yield from zip(*(each.view(-1).split(_CHUNK) for each in tensors), strict=True)
        else:
            rows = max(_CHUNK * len(tensors[0]) // size, 1)
            yield from zip(*(each.split(rows) for each in tensors), strict=True)


def _exceeds(x: Tensor, bound: float) -> bool:
    # No entry is beyond the 2-norm (a factor of two for its rounding).
    if torch.linalg.vector_norm(x).item() <= bound / 2:
        return False
    return not largest_entry(x.reshape(1, -1)).item() <= bound


class CpuOrthogonalizer(Orthogonalizer):
    """Newton-Schulz on fixed memory: small matrices a few at a time, larger ones one by one.

    Args:
        recipe: What is done to each matrix.
        results: Where the results go, ``(count, m, n)``, contiguous.
        workspace: Memory for all that lies between.
    """

    def __init__(self, recipe: Recipe, results: Tensor, workspace: Workspace) -> None:
        super().__init__(recipe)
        self._results = results
        self._workspace = workspace
        # Less than that is lost in rounding, and the largest entry of a matrix takes a pass.
        is_seen = recipe.eps > _LEAST_SEEN * torch.finfo(recipe.dtype).eps
        self._eps = recipe.eps if is_seen else 0.0
        num_parts = -(-len(results) // batch_size(recipe.backend, results.shape[1:], recipe.dtype))
        self._parts = [
            (slice(start, stop), *self._program(results[start:stop]))
            for start, stop in even_parts(len(results), num_parts)
        ]

    def _program(self, out: Tensor) -> tuple[list[tuple[Tensor, Tensor]], Program]:
        """For each matrix of a batch, where first iterate and Gram matrix go; what follows."""
        first = self._workspace.take("first", out.shape, out.dtype)
        # A product of two matrices takes less to call than one of two batches.
        batch = (first[0], out[0]) if len(out) == 1 else (first, out)
        steps, backend = self.recipe.coefficients, self.recipe.backend
        has_gram = self.recipe.preconditioner == "aol"
        program = Program(*batch, steps, backend, self._workspace, has_gram=has_gram)
        grams = program.gram.view(len(out), *program.gram.shape[-2:])
        return list(zip(first, grams, strict=True)), program

    def run(self, matrices: Tensors) -> Tensor:
        """See `Orthogonalizer.run`."""
        wide = wide_dtype(matrices[0].dtype, self.recipe.dtype)
        unit = self._workspace.take("unit", matrices[0].shape, wide)
        for part, places, program in self._parts:
            for x, place in zip(matrices[part], places, strict=True):
                if self.recipe.preconditioner == "frobenius":
                    self._normalize(x, unit, place[0])
                else:
                    found = first_iterate(x, self.recipe, unit)
                    torch._foreach_copy_(place, found)
            program.run()
        return self._results

    def _normalize(self, x: Tensor, unit: Tensor, out: Tensor) -> None:
        """One matrix, whose largest entry is not scaled to one unless its squares need it.

        Powers of two scale it then, which change no bit of the result. Passes over a matrix count:
        it has left the caches since the last one. ``unit`` is wide memory in the shape of ``x``.
        """
        if not x.is_contiguous():  # bits of a sum depend on the strides
            x = self._workspace.take("contiguous", x.shape, x.dtype).copy_(x)
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
        divisor = norm * self.recipe.norm_scale
        if self._eps:
            divisor += self._eps * largest_entry(x).item()
        divisor = divisor or 1.0
        if x.dtype == out.dtype:  # divides wide, even where x is narrow, and rounds once
            torch.div(x, divisor, out=out)
        else:
            out.copy_(torch.div(widened, divisor, out=unit))
