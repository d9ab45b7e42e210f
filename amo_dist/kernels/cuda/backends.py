"""Newton-Schulz by kernels that only CUDA has: Triton's, and those of another package."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from amo_dist.config import Triple
from amo_dist.kernels.newton_schulz import standard

Steps = tuple[Triple, ...]


def run(
    backend: str, x: Tensor, coefficients: Steps, known: Tensor | None, norm_scale: float
) -> Tensor:
    """Run the steps.

    Args:
        backend: ``triton`` or ``gram_newton_schulz``.
        x: As for `standard`.
        coefficients: As for `standard`.
        known: As for `standard`.
        norm_scale: Matrices have a Frobenius norm of ``1 / norm_scale``, or are zero.

    Raises:
        ValueError: ``gram_newton_schulz`` with another preconditioner than ``"frobenius"``.
    """
    if backend == "gram_newton_schulz":
        if known is not None:
            raise ValueError(
                f"ns_backend: found {backend!r} with the preconditioner 'aol', expected "
                "'frobenius', the one that it knows"
            )
        return packaged(coefficients, norm_scale)(x)
    # Imported here: the package is not everywhere.
    from amo_dist.kernels.cuda.triton_symmetric import symmetric_product

    # The kernel reads rows of the short side; products of PyTorch take tall ones as they are.
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT.contiguous() if is_tall else x
    result = standard(x, coefficients, known, product=symmetric_product)
    return result.mT.contiguous() if is_tall else result


@functools.lru_cache(maxsize=256)
def packaged(coefficients: Steps, norm_scale: float) -> Callable[[Tensor], Tensor]:
    """Newton-Schulz by the package gram-newton-schulz (Zhang, Amsel, Chen and Dao, 2026).

    Its products are in float16, by kernels for Hopper and Blackwell. It has been run on CPU, by its
    plain form; not yet on a GPU. Arguments are those of `run`.
    """
    # It scales matrices to norm one: its first step takes them back.
    shrink, (first, *rest) = 1 / norm_scale, coefficients
    scaled = [value * shrink**power for value, power in zip(first, (1, 3, 5), strict=True)]
    run = importlib.import_module("gram_newton_schulz").GramNewtonSchulz(
        ns_use_kernels=torch.cuda.is_available(),
        ns_coefficients=[scaled, *map(list, rest)],
        gram_newton_schulz_reset_iterations=list(range(2, len(rest) + 1, 2)),
        compile_kwargs=None,
    )
    # It scales float32 in place.
    return lambda x: run(x.clone() if x.dtype == torch.float32 else x).contiguous()
