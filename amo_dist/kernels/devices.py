"""The one place that asks for the device: which kernels an engine, or a single call, gets."""

from __future__ import annotations

import importlib.util

import torch

from amo_dist.config import NS_BACKENDS
from amo_dist.kernels.cpu.kernels import CpuKernels
from amo_dist.kernels.cuda.graphs import GraphCache
from amo_dist.kernels.cuda.kernels import CudaKernels
from amo_dist.kernels.interface import Kernels

TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ON_CUDA = {
    "triton": "the one that comes with CUDA builds of torch",
    "gram_newton_schulz": "that of `pip install gram-newton-schulz`",
}
"""Backends that only CUDA has, each by a package of its name, and where that comes from."""


def make_kernels(
    device: torch.device, *, ns_dtype: torch.dtype, ns_backend: str, cuda_graphs: bool
) -> Kernels:
    """The kernels of a device, to be made once and kept.

    Args:
        device: Of all tensors.
        ns_dtype: Of the products of Newton-Schulz and of its results.
        ns_backend: One of `NS_BACKENDS`.
        cuda_graphs: Whether to replay Newton-Schulz that repeats from step to step.

    Raises:
        ValueError: The device cannot run what is asked for.
    """
    check_backend("ns_backend", ns_backend, ns_dtype, device)
    if cuda_graphs and device.type != "cuda":
        raise ValueError(
            f"cuda_graphs: found True with parameters on {device.type}, expected them on cuda"
        )
    if device.type == "cpu":
        return CpuKernels(ns_dtype, ns_backend)
    if device.type == "cuda":
        kernels: Kernels = CudaKernels(ns_dtype, ns_backend, GraphCache() if cuda_graphs else None)
    else:
        kernels = Kernels(ns_dtype, ns_backend)
    kernels.candidates = [name for name in NS_BACKENDS[1:] if not _lacks(name, ns_dtype, device)]
    return kernels


def check_backend(field: str, requested: str, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse an unknown backend, and one that cannot run here; most run everywhere.

    Args:
        field: What the error names.
        requested: Should be one of `NS_BACKENDS`.
        dtype: Of the products.
        device: Of the matrices.

    Raises:
        ValueError: Unknown; or one of CUDA's, and matrices are not there, its package is not
            installed, or, for ``triton``, products are not in one of `TRITON_DTYPES`.
    """
    if requested not in NS_BACKENDS:
        raise ValueError(f"{field}: found {requested!r}, expected one of {NS_BACKENDS}")
    if lacks := _lacks(requested, dtype, device):
        found, expected = lacks
        raise ValueError(f"{field}: found {requested!r} with {found}, expected {expected}")


def _lacks(backend: str, dtype: torch.dtype, device: torch.device) -> tuple[str, str] | None:
    """Why a backend cannot run: what was found, and what it needs."""
    if backend not in _ON_CUDA:
        return None
    if device.type != "cuda":
        return f"matrices on {device.type}", "on cuda"
    if backend == "triton" and dtype not in TRITON_DTYPES:
        names = ", ".join(str(each).removeprefix("torch.") for each in TRITON_DTYPES)
        return f"{str(dtype).removeprefix('torch.')} products", f"one of {names}"
    if importlib.util.find_spec(backend) is None:
        return "no package of this name", _ON_CUDA[backend]
    return None
