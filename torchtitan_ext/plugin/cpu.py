"""Lets torchtitan run on a machine without an accelerator.

torchtitan 0.2.2 asks PyTorch for an accelerator while ``torchtitan.tools.utils`` is imported, falls
back to "cuda" where there is none, and dies at start. :func:`install` answers "cpu" for the time of
that one import. It changes nothing where there is an accelerator.
"""

from __future__ import annotations

import importlib
import os
import platform
import resource
import sys
import types
from typing import Any

import torch
import torch._utils

_UTILS = "torchtitan.tools.utils"


def cpu_is_needed() -> bool:
    """Whether training here has to run on CPU.

    True without an accelerator, with one that has no collectives (Apple's MPS), and where the
    environment variable ``AMO_DEVICE`` is ``cpu``.
    """
    device_type = torch._utils._get_available_device_type()
    return device_type in (None, "mps") or os.environ.get("AMO_DEVICE") == "cpu"


def install() -> None:
    """Make torchtitan use the CPU where :func:`cpu_is_needed`; a no-op otherwise and when repeated.

    Raises:
        ValueError: If torchtitan was imported before, and has chosen a device that is not there.
    """
    if not cpu_is_needed():
        return
    if _UTILS in sys.modules:
        found = sys.modules[_UTILS].device_type
        if found != "cpu":
            raise ValueError(
                f"torchtitan: found device type {found!r}, expected 'cpu' on this machine; "
                "torchtitan was imported first: start training with `-m torchtitan_ext.train`"
            )
        return
    module = _cpu_module()
    saved = torch._utils._get_available_device_type, torch._utils._get_device_module
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda _device_type: module  # type: ignore[assignment]
    try:
        importlib.import_module(_UTILS)
    finally:
        torch._utils._get_available_device_type, torch._utils._get_device_module = saved


def _cpu_module() -> types.ModuleType:
    """``torch.cpu`` with what torchtitan further asks of a device module."""
    module = types.ModuleType("torchtitan_ext.plugin.cpu_device")
    for name in dir(torch.cpu):
        if not name.startswith("__"):
            setattr(module, name, getattr(torch.cpu, name))
    extra: dict[str, Any] = {
        "current_device": lambda: 0,
        "empty_cache": lambda: None,
        "get_device_name": lambda _device=None: platform.processor() or platform.machine(),
        "get_device_properties": lambda _device=None: types.SimpleNamespace(
            total_memory=_total_memory()
        ),
        "memory_stats": lambda _device=None: dict.fromkeys(
            ("active_bytes.all.peak", "reserved_bytes.all.peak"), resident_peak()
        ),
        "reset_peak_memory_stats": lambda _device=None: None,
    }
    for name, value in extra.items():
        setattr(module, name, value)
    return module


def _total_memory() -> int:
    """Memory of the machine, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def resident_peak() -> int:
    """Greatest resident size of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
