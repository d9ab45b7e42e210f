"""What a machine or an older PyTorch lacks of what torchtitan asks for.

Without an accelerator torchtitan falls back to "cuda", and dies at start; :func:`install` names the
CPU instead. It changes nothing where there is an accelerator and PyTorch is 2.14 or later.
"""

from __future__ import annotations

import importlib
import os
import platform
import resource
import socket
import sys
import types
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_IS_OLD = torch.__version__ < "2.14"


def cpu_is_needed() -> bool:
    """Whether training here has to run on CPU.

    True without an accelerator, with one that has no collectives (Apple's MPS), and where the
    environment variable ``AMO_DEVICE`` is ``cpu``.
    """
    return device_type() == "cpu"


def device_type() -> str:
    """What training runs on here: ``cpu``, or a kind of accelerator such as ``cuda``.

    Raises:
        ValueError: Where ``AMO_DEVICE`` names a kind that is not there: one rank on CPU would hold
            up all the others.
    """
    wanted = os.environ.get("AMO_DEVICE", "")
    found = torch._utils._get_available_device_type()
    if wanted == "cpu" or (found in (None, "mps") and not wanted):
        return "cpu"
    if wanted not in ("", found):
        raise ValueError(
            f"AMO_DEVICE: found {found or 'no accelerator'} on {socket.gethostname()}, expected "
            f"{wanted!r}; AMO_DEVICE=cpu trains on CPUs"
        )
    return str(found)


def spmd_backend() -> Literal["partial_dtensor", "spmd_types"]:
    """The default for ``[parallelism] spmd_backend``: torchtitan's, where PyTorch allows it.

    Before 2.14 ``fully_shard`` takes no plain tensors that are annotated with how they are spread.
    """
    return "partial_dtensor" if _IS_OLD else "spmd_types"


def install() -> None:
    """Add what is missing here; a no-op when repeated."""
    if _IS_OLD and not hasattr(dist, "set_timeout"):
        # torchtitan calls it by this name after the first step; its name before PyTorch 2.14.
        dist.set_timeout = distributed_c10d._set_pg_timeout  # type: ignore[attr-defined]
    if not cpu_is_needed():
        return
    importlib.import_module("torchtitan.tools.utils")

    # No setting of torchtitan names the device: it is a global, which modules loaded later take
    # from there, and those loaded before (by torchtitan's own entry point) hold as their own.
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


def resident_peak() -> int:
    """Greatest resident size of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
