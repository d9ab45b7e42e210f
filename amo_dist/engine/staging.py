"""Pieces of matrices between host memory, where parameters lie, and the device that computes.

FSDP2's ``CPUOffloadPolicy`` keeps parameters, gradients and state in host memory. Momentum and
updates are computed there, and all between them on the accelerator: pieces go up before they are
gathered, so that whole matrices travel as those of device parameters do, by the same collectives,
and come down when their results have arrived.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def device_of_matrices(params: Iterable[Tensor], device: torch.device) -> torch.device:
    """Where matrices are gathered, orthogonalized and measured.

    The device of the parameters; for those in host memory the current accelerator, where a mesh of
    theirs is of its kind. A mesh of CPUs, or none, says that all is computed on the CPU, whatever
    else the machine has.

    Args:
        params: Of this process.
        device: On which all of them lie.
    """
    if device.type == "cpu":
        kinds = {each.device_mesh.device_type for each in params if isinstance(each, DTensor)}
        found = torch.accelerator.current_accelerator(check_available=True) if kinds else None
        if found is not None and found.type in kinds:
            return torch.device(found.type, torch.accelerator.current_device_index())
    return device


def on_host(places: Sequence[Tensor]) -> list[Tensor]:
    """New pinned memory for what goes up to places on a device, or comes down from them.

    PyTorch keeps such memory for the next call, and lends none that a copy still uses.

    Args:
        places: Of one dtype.
    """
    if not places:
        return []
    sizes = [math.prod(place.shape) for place in places]
    memory = torch.empty(sum(sizes), dtype=places[0].dtype, device="cpu", pin_memory=True)
    pairs = zip(memory.split(sizes), places, strict=True)
    return [flat.view(place.shape) for flat, place in pairs]


def send_up(pieces: list[Tensor], places: list[Tensor]) -> None:
    """Copy pieces of `on_host` to their places; waits for nothing.

    Args:
        pieces: On the host; not to be written again.
        places: On the device.
    """
    if places:
        torch._foreach_copy_(places, pieces, non_blocking=True)


def bring_down(places: list[Tensor]) -> list[Tensor]:
    """What lies in places on a device, on the host; waits once, for all of them."""
    if not places:
        return []
    pieces = on_host(places)
    torch._foreach_copy_(pieces, places, non_blocking=True)
    torch.accelerator.current_stream(places[0].device).synchronize()
    return pieces
