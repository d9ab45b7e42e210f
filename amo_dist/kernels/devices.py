"""The one place that asks for the device: which kernels an engine, or a single call, gets."""

from __future__ import annotations

import importlib.util

import torch

from amo_dist.kernels.cpu.kernels import CpuKernels
from amo_dist.kernels.cuda.graphs import GraphCache
from amo_dist.kernels.cuda.kernels import CudaKernels
from amo_dist.kernels.interface import Kernels

BACKENDS = ("auto", "standard", "symmetric", "gram", "triton")
"""How Newton-Schulz may be run; see `amo_dist.kernels.cpu.backends`, and for ``triton``, which is
``symmetric`` by tiles in one kernel, `amo_dist.kernels.cuda.triton_symmetric`."""
TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def make_kernels(
    device: torch.device, *, ns_dtype: torch.dtype, ns_backend: str, cuda_graphs: bool
) -> Kernels:
    """The kernels of a device, to be made once and kept.

    Args:
        device: Of all tensors.
        ns_dtype: Of the products of Newton-Schulz and of its results.
        ns_backend: One of `BACKENDS`.
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
        return CudaKernels(ns_dtype, ns_backend, GraphCache() if cuda_graphs else None)
    return Kernels(ns_dtype, ns_backend)


def check_backend(field: str, requested: str, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse an unknown backend, and ``triton`` where it cannot run; the others run everywhere.

    Args:
        field: What the error names.
        requested: Should be one of `BACKENDS`.
        dtype: Of the products.
        device: Of the matrices.

    Raises:
        ValueError: Unknown; or ``triton``, and matrices are not on CUDA, or products are not in one
            of `TRITON_DTYPES`, or the package ``triton`` is not installed.
    """
    found = expected = ""
    if requested not in BACKENDS:
        raise ValueError(f"{field}: found {requested!r}, expected one of {BACKENDS}")
    if requested != "triton":
        return
    if device.type != "cuda":
        found, expected = f"matrices on {device.type}", "on cuda"
    elif dtype not in TRITON_DTYPES:
        names = ", ".join(str(each).removeprefix("torch.") for each in TRITON_DTYPES)
        found, expected = f"{str(dtype).removeprefix('torch.')} products", f"one of {names}"
    elif importlib.util.find_spec("triton") is None:
        found = "no package of this name"
        expected = "the one that comes with CUDA builds of torch"
    if found:
        raise ValueError(f"{field}: found 'triton' with {found}, expected {expected}")
