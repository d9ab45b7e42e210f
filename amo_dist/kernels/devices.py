"""Which backends of Newton-Schulz a device has."""

from __future__ import annotations

import importlib.util

import torch

from amo_dist.config import NS_BACKENDS

TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ON_CUDA = {
    "triton": "the one that comes with CUDA builds of torch",
    "gram_newton_schulz": "that of `pip install gram-newton-schulz`",
}
"""Backends that only CUDA has, each by a package of its name, and where that comes from."""


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
