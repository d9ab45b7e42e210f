"""The ranks that checks run on, their hosts, and the device of each."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import socket
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

# Seconds for all ranks to arrive: first imports from a shared disk take minutes.
MEETING_SECONDS = 300.0


class Fault(RuntimeError):
    """A check measured something wrong; raised while no collective is under way."""


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """The ranks of an examination, as this rank sees them.

    Attributes:
        rank: Rank of this process.
        world_size: Number of ranks.
        device: Device of this rank: ``cuda`` with its index, or ``cpu``.
        store: Store of all ranks that nothing else uses.
        hosts: Host of each rank, once they have met.
    """

    rank: int
    world_size: int
    device: torch.device
    store: Any = dataclasses.field(default_factory=dist.HashStore)  # type: ignore[attr-defined]
    hosts: Sequence[str] = ()

    @property
    def is_cuda(self) -> bool:
        """Whether the ranks have a CUDA device each."""
        return self.device.type == "cuda"

    def exchange(self, key: str, value: Any, seconds: float) -> list[Any]:
        """Leave a value for the other ranks, and wait for theirs, without a collective.

        Args:
            key: Name of the meeting, different each time.
            value: JSON value of this rank.
            seconds: Seconds to wait.

        Returns:
            The values of all ranks, in their order.

        Raises:
            Fault: Some ranks, which the message names, left no value in time.
        """
        keys = [f"doctor/{key}/{rank}" for rank in range(self.world_size)]
        self.store.set(keys[self.rank], json.dumps(value))
        try:
            self.store.wait(keys, datetime.timedelta(seconds=seconds))
        except RuntimeError:
            missing = [rank for rank, name in enumerate(keys) if not self.store.check([name])]
            raise Fault(f"no answer from {name_ranks(missing)}") from None
        return [json.loads(self.store.get(name)) for name in keys]

    def __str__(self) -> str:
        backend = ("nccl" if self.is_cuda else "gloo") if self.world_size > 1 else "no group"
        lines = [f"{self.world_size} x {self.device.type}, {backend}"]
        for host in dict.fromkeys(self.hosts):
            ranks = [rank for rank, other in enumerate(self.hosts) if other == host]
            lines.append(f"host {host}: {name_ranks(ranks)}")
        return "\n".join(lines)


def join(seconds: float) -> Site:
    """Meet the other ranks and start the process group; a single rank needs none.

    The environment holds the variables that a launcher such as torchrun sets.

    Args:
        seconds: Timeout of collectives between devices, beyond the time of any check.

    Raises:
        Fault: A rank is missing, or has another type of device than rank 0.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return call_roll(Site(0, 1, device))
    try:
        meeting = datetime.timedelta(seconds=MEETING_SECONDS)
        store, rank, world_size = next(rendezvous("env://", timeout=meeting))
    except RuntimeError as error:
        raise Fault(f"the ranks did not meet: {error}") from error
    # A group with a missing or unlike rank could wait for good; hence the roll call comes first.
    site = call_roll(Site(rank, world_size, device, store))
    # GPUs get NCCL by default, and gloo beside it for tensors of the CPU.
    backend, timeout = None if site.is_cuda else "gloo", datetime.timedelta(seconds=seconds)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    # A thread that waits in a store blocks the other users of the same object; hence the clone.
    return dataclasses.replace(site, store=store.clone())


def call_roll(site: Site) -> Site:
    """Exchange the devices and hosts of all ranks, and add the hosts.

    Raises:
        Fault: A rank is missing, or ranks have unlike devices.
    """
    roll = site.exchange("roll", [site.device.type, socket.gethostname()], MEETING_SECONDS)
    devices, hosts = zip(*roll, strict=True)
    for rank, device in enumerate(devices):
        if device != devices[0]:
            raise Fault(f"device: rank 0 has {devices[0]}, rank {rank} {device}")
    return dataclasses.replace(site, hosts=hosts)


def name_ranks(ranks: Sequence[int]) -> str:
    """Format ranks as ``rank 3`` or ``ranks 1, 3``."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
