"""Which backends of Newton-Schulz a device has."""

from __future__ import annotations

import importlib.util

import torch

from amo_dist.config import NS_BACKENDS

TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_backend(field: str, requested: str, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse an unknown backend, and one that cannot run here; most run everywhere.

    Args:
        field: What the error names.
        requested: Should be one of `NS_BACKENDS`.
        dtype: Of the products.
        device: Of the matrices.

    Raises:
        ValueError: Unknown; or ``triton``, and matrices are not on CUDA, its package is not
            installed, or products are not in one of `TRITON_DTYPES`.
    """
    if requested not in NS_BACKENDS:
        raise ValueError(f"{field}: found {requested!r}, expected one of {NS_BACKENDS}")
    if requested != "triton":
        return
    if device.type != "cuda":
        found, expected = f"matrices on {device.type}", "on cuda"
    elif dtype not in TRITON_DTYPES:
        known = ", ".join(str(each).removeprefix("torch.") for each in TRITON_DTYPES)
        found, expected = f"{str(dtype).removeprefix('torch.')} products", f"one of {known}"
    elif importlib.util.find_spec("triton") is None:
        found, expected = "no package of this name", "the one that comes with CUDA builds of torch"
    else:
        return
    raise ValueError(f"{field}: found {requested!r} with {found}, expected {expected}")
