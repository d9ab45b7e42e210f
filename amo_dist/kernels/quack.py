"""Products by quack-kernels on CUDA: symmetric ones, which compute half, and a fused ``aX + BX``.

Not run on a GPU yet: the tests have a stand-in with the library's signatures and limits. The
library compiles each kernel at its first use, for a minute or so, hence `library` uses all of them
once: in the middle of a step other ranks would wait in a collective. With ``QUACK_CACHE_DIR`` set
they are compiled once a machine. Source: Dao-AILab, QuACK (github.com/Dao-AILab/quack).
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
from typing import Any

import torch
from torch import Tensor

from amo_dist.kernels.newton_schulz import TORCH, Library, run_steps

# Version of quack-kernels whose signatures these are.
VERSION = "0.6.5"

# Short side from which whole steps were published to gain (1.34 at 1536 x 7168, H100;
# pytorch/torchtitan#4781). Products of 1024 rows take longer than cuBLAS's.
_MIN_ROWS = 1536

logger = logging.getLogger(__name__)


@functools.cache
def library(name: str, device: torch.device, dtype: torch.dtype) -> Library:
    """Products for ``ns_kernels``; says once which they are, and compiles them.

    Args:
        name: ``torch``, ``quack``, or ``auto`` for quack where it can run.
        device: Device of the matrices.
        dtype: Dtype of the products.

    Raises:
        ValueError: ``quack`` cannot run here; the message has the cause.
    """
    if name == "torch" or (name == "auto" and device.type != "cuda"):
        return TORCH
    cause = _obstacle(device, dtype)
    if cause and name == "quack":
        raise ValueError(f"ns_kernels: found 'quack' with {cause}")
    logger.info("Newton-Schulz products by %s", f"PyTorch: {cause}" if cause else "quack-kernels")
    if cause:
        return TORCH
    interface = importlib.import_module("quack.gemm_interface")
    products = Library(
        functools.partial(_symmetric, interface), functools.partial(_apply, interface)
    )
    for shape in (1, 2), (2, 1):
        for batch in (), (2,):
            m, n = (_MIN_ROWS * size for size in shape)
            zeros = torch.zeros(*batch, m, n, dtype=dtype, device=device)
            run_steps(zeros, ((1.5, -0.5, 0.1),) * 3, (1, 2), library=products)
    return products


def _obstacle(device: torch.device, dtype: torch.dtype) -> str:
    """Cause for which quack cannot run, with what is expected; nothing where it can."""
    if device.type != "cuda":
        return f"matrices on {device.type}, expected a CUDA device"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"ns_dtype = {str(dtype)[6:]!r}, expected 'bfloat16' or 'float16'"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 9:
        return f"compute capability {major}.{minor}, expected 9.0 or newer"
    try:
        version = importlib.metadata.version("quack-kernels")
    except importlib.metadata.PackageNotFoundError:
        return "no quack-kernels installed, expected the extra amo-dist[quack]"
    return "" if version == VERSION else f"quack-kernels {version}, expected {VERSION}"


def _fits(rows: int, *tensors: Tensor | None) -> bool:
    """Whether the library takes tensors: sides that 8 divides, aligned, one side contiguous."""
    return rows >= _MIN_ROWS and all(
        not (x.shape[-1] % 8 or x.shape[-2] % 8 or x.data_ptr() % 16)
        and (x.is_contiguous() or x.mT.is_contiguous())
        for x in tensors
        if x is not None
    )


def _symmetric(
    interface: Any,
    x: Tensor,
    added: Tensor | None = None,
    beta: float = 1.0,
    alpha: float = 1.0,
    *,
    right: Tensor | None = None,
) -> Tensor:
    """`symmetric_product`, of which the library computes half."""
    right = x.mT if right is None else right
    if not _fits(x.shape[-2], x, right, added):
        return TORCH.product(x, added, beta, alpha, right=right)
    out = x.new_empty(*x.shape[:-1], x.shape[-2])
    interface.gemm_symmetric(x, right, C=added, out=out, alpha=float(alpha), beta=float(beta))
    return out


def _apply(interface: Any, factor: Tensor, x: Tensor, multiple: float, is_tall: bool) -> Tensor:
    """``multiple * X + factor X``, without a copy of X before it."""
    if not multiple or not _fits(factor.shape[-1], factor, x):
        return TORCH.apply(factor, x, multiple, is_tall)
    left, right = (x, factor) if is_tall else (factor, x)
    out = torch.empty_like(x)
    # Tuning keeps its trials' memory: microsoft/dion#100.
    interface.gemm_add(left, right, C=x, out=out, beta=float(multiple), tuned=False)
    return out
