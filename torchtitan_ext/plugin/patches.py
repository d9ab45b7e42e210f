"""What is changed in torchtitan and PyTorch themselves, where no setting or subclass serves.

Both changes were checked on torchtitan 0.3.0 (``tests/titan/test_patches.py``). With an accelerator
and PyTorch 2.14 nothing is changed.
"""

from __future__ import annotations

import importlib
import os
import platform
import sys
import types
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from torchtitan_ext.plugin.machine import IS_OLD, cpu_is_needed, resident_peak


def install() -> None:
    """Change what this machine needs; a no-op when repeated."""
    if IS_OLD and not hasattr(dist, "set_timeout"):
        # Torchtitan calls it by this name after the first step; its name before PyTorch 2.14.
        dist.set_timeout = distributed_c10d._set_pg_timeout  # type: ignore[attr-defined]
    if cpu_is_needed():
        _name_the_cpu()


def _name_the_cpu() -> None:
    """Without an accelerator torchtitan falls back to "cuda", and dies at start.

    No setting of torchtitan names the device: it is a global, which modules loaded later take from
    there, and those loaded before (by torchtitan's own entry point) hold as their own.
    """
    importlib.import_module("torchtitan.tools.utils")
    device = {"device_type": "cpu", "device_module": _cpu_module()}
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan."):
            vars(module).update({key: device[key] for key in device.keys() & vars(module).keys()})


def _cpu_module() -> types.SimpleNamespace:
    """``torch.cpu`` with what torchtitan further asks of a device module."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    extra: dict[str, Any] = {
        "current_device": lambda: 0,
        "empty_cache": lambda: None,
        "get_device_name": lambda _device=None: platform.processor() or platform.machine(),
        "get_device_properties": lambda _device=None: types.SimpleNamespace(total_memory=memory),
        "memory_stats": lambda _device=None: dict.fromkeys(
            ("active_bytes.all.peak", "reserved_bytes.all.peak"), resident_peak()
        ),
        "reset_peak_memory_stats": lambda _device=None: None,
    }
    return types.SimpleNamespace(**{**vars(torch.cpu), **extra})
