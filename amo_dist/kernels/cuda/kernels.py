"""What CUDA does faster: replays of CUDA graphs, symmetric products by Triton, others' kernels."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from amo_dist.kernels.cuda.graphs import GraphCache
from amo_dist.kernels.interface import Kernels, Orthogonalizer
from amo_dist.kernels.plain import Recipe, iterate


class CudaKernels(Kernels):
    """Kernels on CUDA devices.

    Args:
        ns_dtype: As for `Kernels`.
        ns_backend: As for `Kernels`.
        graphs: Keeps CUDA graphs from step to step; None runs without them.
    """

    def __init__(
        self, ns_dtype: torch.dtype, ns_backend: str = "auto", graphs: GraphCache | None = None
    ) -> None:
        super().__init__(ns_dtype, ns_backend)
        self.graphs = graphs
        # One is enough: what was fetched is read before the next is.
        self._landing: Tensor | None = None

    def begin_step(self, bad: Tensor | None = None) -> None:
        """Count a step: what repeats in a few of them is captured."""
        super().begin_step(bad)
        if self.graphs is not None:
            self.graphs.begin_step()

    def fetch(self, values: Tensor) -> Callable[[], list[int]]:
        """By a copy to pinned memory, behind what the stream holds by now; the host goes on."""
        if not values.is_cuda:
            return super().fetch(values)
        if self._landing is None or self._landing.shape != values.shape:
            self._landing = torch.empty_like(values, device="cpu", pin_memory=True)
        landing, event = self._landing, torch.cuda.Event()
        landing.copy_(values, non_blocking=True)
        event.record(torch.cuda.current_stream(values.device))

        def read() -> list[int]:
            event.synchronize()
            found: list[int] = landing.tolist()
            return found

        return read

    def _lay_out(self, shape: Sequence[int], recipe: Recipe, slot: int) -> Orthogonalizer:
        return CudaOrthogonalizer(recipe, self._keeper(slot), self.graphs)


class CudaOrthogonalizer(Orthogonalizer):
    """Newton-Schulz as batched products, replayed once it has come up in a few steps.

    Args:
        recipe: What is done to each matrix.
        keep: As for `Orthogonalizer`.
        graphs: As for `CudaKernels`.
    """

    def __init__(
        self, recipe: Recipe, keep: Callable[[Tensor], Tensor], graphs: GraphCache | None
    ) -> None:
        super().__init__(recipe, keep)
        self._graphs = graphs

    def _orthogonalize(self, x: Tensor) -> Tensor:
        run = super()._orthogonalize
        if self._graphs is None:
            return run(x)
        return self._graphs.run((self.recipe, x.shape, x.dtype, x.device), run, x)

    def _iterate(self, first: Tensor, gram: Tensor | None = None) -> Tensor:
        if self.recipe.backend.name == "gram_newton_schulz":
            return packaged(self.recipe)(first)
        if self.recipe.backend.name != "triton":
            return super()._iterate(first, gram)
        # Imported here: the package is not everywhere.
        from amo_dist.kernels.cuda.triton_symmetric import symmetric_product

        # The kernel reads rows of the short side; products of PyTorch take tall ones as they are.
        is_tall = first.shape[-2] > first.shape[-1]
        first = first.mT.contiguous() if is_tall else first
        result = iterate(first, self.recipe.coefficients, gram, symmetric_product)
        return result.mT.contiguous() if is_tall else result


@functools.lru_cache(maxsize=256)
def packaged(recipe: Recipe) -> Callable[[Tensor], Tensor]:
    """Newton-Schulz by the package gram-newton-schulz (Zhang, Amsel, Chen and Dao, 2026).

    Its products are in float16, by kernels for Hopper and Blackwell. It has been run on CPU, by its
    plain form; not yet on a GPU.

    Args:
        recipe: What is done to matrices that have been scaled to a Frobenius norm of
            ``1 / norm_scale``, or that are zero.

    Raises:
        ValueError: Another preconditioner.
    """
    if recipe.preconditioner != "frobenius":
        raise ValueError(
            f"ns_backend: found 'gram_newton_schulz' with the preconditioner "
            f"{recipe.preconditioner!r}, expected 'frobenius', the one that it knows"
        )
    # It scales matrices to norm one: its first step takes them back.
    shrink, (first, *rest) = 1 / recipe.norm_scale, recipe.coefficients
    scaled = [value * shrink**power for value, power in zip(first, (1, 3, 5), strict=True)]
    run = importlib.import_module("gram_newton_schulz").GramNewtonSchulz(
        ns_use_kernels=torch.cuda.is_available(),
        ns_coefficients=[scaled, *map(list, rest)],
        gram_newton_schulz_reset_iterations=list(range(2, len(rest) + 1, 2)),
        compile_kwargs=None,
    )
    # It scales float32 in place.
    return lambda x: run(x.clone() if x.dtype == torch.float32 else x).contiguous()
