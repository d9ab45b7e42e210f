"""Copies of matrix pieces between parameters in host memory and the device that computes.

FSDP2's ``CPUOffloadPolicy`` keeps parameters, gradients and state in host memory. The host computes
momentum and updates, and the accelerator everything between them: pieces are uploaded before the
gather, so that matrices travel by the same collectives as those of device parameters, and results
are downloaded after the scatter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def device_of_matrices(params: Iterable[Tensor], device: torch.device) -> torch.device:
    """The device on which matrices are gathered, orthogonalized and measured.

    It is the device of the parameters. For parameters in host memory it is the current accelerator
    if one of their meshes is of its kind; with a mesh of CPUs, or none, all runs on the CPU,
    whatever else the machine has.

    Args:
        params: Parameters of this process.
        device: Device of all of them.
    """
    if device.type == "cpu":
        kinds = {p.device_mesh.device_type for p in params if isinstance(p, DTensor)}
        accelerator = torch.accelerator.current_accelerator(check_available=True) if kinds else None
        if accelerator is not None and accelerator.type in kinds:
            return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return device


def on_host(places: Sequence[Tensor]) -> list[Tensor]:
    """New pinned host memory with the shapes of some places on a device.

    PyTorch keeps pinned memory for the next call, and reuses none that a copy still reads.

    Args:
        places: Places of one dtype.
    """
    if not places:
        return []
    sizes = [math.prod(place.shape) for place in places]
    memory = torch.empty(sum(sizes), dtype=places[0].dtype, device="cpu", pin_memory=True)
    pairs = zip(memory.split(sizes), places, strict=True)
    return [flat.view(place.shape) for flat, place in pairs]


def send_up(pieces: list[Tensor], places: list[Tensor]) -> None:
    """Upload pieces of `on_host` to their places; asynchronous.

    Args:
        pieces: Pieces on the host; not to be written again.
        places: Places on the device.
    """
    if places:
        torch._foreach_copy_(places, pieces, non_blocking=True)


def bring_down(places: list[Tensor]) -> list[Tensor]:
    """Download places of a device to the host; waits once, for all of them."""
    if not places:
        return []
    pieces = on_host(places)
    torch._foreach_copy_(pieces, places, non_blocking=True)
    torch.accelerator.current_stream(places[0].device).synchronize()
    return pieces
