"""What a machine has to train on, and what its PyTorch allows."""

from __future__ import annotations

import os
import resource
import socket
import sys
from typing import Literal

import torch

IS_OLD = torch.__version__ < "2.14"
"""Whether PyTorch is older than what torchtitan 0.3.0 is written for."""


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
    return "partial_dtensor" if IS_OLD else "spmd_types"


def resident_peak() -> int:
    """Greatest resident size of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
