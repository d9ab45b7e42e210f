"""Device of a machine, and what its PyTorch allows."""

from __future__ import annotations

import os
import resource
import socket
import sys
from typing import Literal

import torch

from amo_dist.config import require
from amo_dist.doctor.machine import require_usable_driver


def is_old(version: str) -> bool:
    """Whether a PyTorch is older than 2.14, for which torchtitan 0.3.0 is written.

    NVIDIA's images have versions such as ``2.14.0a0+ecf3bae40a``, which count as 2.14 here.
    """
    major, minor, *_ = version.split(".")
    return (int(major), int(minor)) < (2, 14)


IS_OLD = is_old(torch.__version__)


def cpu_is_needed() -> bool:
    """Whether training here has to run on CPU.

    True without an accelerator, with one that has no collectives (Apple's MPS), and where the
    environment variable ``AMO_DEVICE`` is ``cpu``.
    """
    return device_type() == "cpu"


def device_type() -> str:
    """Kind of the device that trains: ``cpu``, or an accelerator such as ``cuda``.

    Raises:
        ValueError: ``AMO_DEVICE`` names a kind that this machine lacks: one rank on CPU would slow
            down all others. Or PyTorch does not see the GPUs of a machine with NVIDIA's driver.
    """
    wanted = os.environ.get("AMO_DEVICE", "")
    available = torch._utils._get_available_device_type()
    if not wanted:
        require_usable_driver()
    if wanted == "cpu" or (available in (None, "mps") and not wanted):
        return "cpu"
    if wanted not in ("", available):
        raise ValueError(
            f"AMO_DEVICE: found {available or 'no accelerator'} on {socket.gethostname()}, "
            f"expected {wanted!r}; AMO_DEVICE=cpu trains on CPUs"
        )
    return str(available)


def spmd_backend() -> Literal["partial_dtensor", "spmd_types"]:
    """The default for ``[parallelism] spmd_backend``: torchtitan's, where PyTorch allows it.

    Before 2.14 ``fully_shard`` takes no plain tensors that are annotated with how they are spread.
    """
    return "partial_dtensor" if IS_OLD else "spmd_types"


def check_backend(backend: str) -> None:
    """Check that the PyTorch at hand can train under ``[parallelism] spmd_backend``.

    Raises:
        ValueError: It cannot.
    """
    expected = "--parallelism.spmd_backend partial_dtensor with a PyTorch before 2.14"
    is_right = not IS_OLD or backend != "spmd_types"
    require(is_right, "parallelism.spmd_backend", backend, expected)


def num_gpus() -> int:
    """GPUs to train on; 0 for training on CPU."""
    return 0 if cpu_is_needed() else torch.cuda.device_count()


def most_ranks() -> int:
    """Ranks that this machine trains with, unless asked otherwise: one per GPU, else two on CPU."""
    return num_gpus() or 2


def resident_peak() -> int:
    """Greatest resident size of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
