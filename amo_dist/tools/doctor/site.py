"""Where checks run: the ranks, their nodes, the device of each."""

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

MEETING_SECONDS = 60.0
"""For all ranks to be there."""


class Fault(RuntimeError):
    """What a check measured is wrong; raised where no collective is under way."""


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """What checks are told of the ranks.

    Attributes:
        rank: This process.
        nodes: The ranks of each node.
        device: Of this rank: ``cuda`` with its index, or ``cpu``.
        control: Group of all ranks on the CPU that checks leave alone; None on one rank.
        store: Of all ranks, used by nothing else; None on one rank.
    """

    rank: int
    nodes: tuple[tuple[int, ...], ...]
    device: torch.device
    control: dist.ProcessGroup | None = None
    store: Any = None

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(map(len, self.nodes))

    @property
    def nodes_are_replicas(self) -> bool:
        """Whether there are nodes of one size, of consecutive ranks."""
        ranks = [rank for node in self.nodes for rank in node]
        return len(self.nodes) > 1 and len({*map(len, self.nodes)}) == 1 and ranks == sorted(ranks)

    @property
    def is_cuda(self) -> bool:
        """Whether the ranks have a CUDA device each."""
        return self.device.type == "cuda"

    def sign(self, key: str, seconds: float, text: str = "") -> list[str]:
        """Meet the other ranks; a key serves once.

        Returns:
            The text that each rank has left.

        Raises:
            Fault: Names the ranks that have not come within so many seconds.
        """
        if self.store is None:
            return [text]
        keys = [f"doctor/{key}/{rank}" for rank in range(self.world_size)]
        self.store.set(keys[self.rank], text)
        try:
            self.store.wait(keys, datetime.timedelta(seconds=seconds))
        except RuntimeError:
            missing = [rank for rank, name in enumerate(keys) if not self.store.check([name])]
            raise Fault(f"no answer from {name_ranks(missing)}") from None
        return [self.store.get(name).decode() for name in keys]

    def gather(self, value: Any) -> list[Any]:
        """What each rank passes, in their order."""
        found: list[Any] = [value] * self.world_size
        if self.control is not None:
            dist.all_gather_object(found, value, self.control)
        return found

    def __str__(self) -> str:
        ranks = f"{self.world_size} rank{'s' * (self.world_size > 1)}"
        where = f"on {len(self.nodes)} node{'s' * (len(self.nodes) > 1)}"
        backend = ("nccl" if self.is_cuda else "gloo") if self.world_size > 1 else "no group"
        return f"{ranks} {where}, {self.device.type}, {backend}"


def join(seconds: float) -> Site:
    """Meet the other ranks and start the process groups; one rank needs neither.

    What a launcher such as torchrun sets is read from the environment.

    Args:
        seconds: After which a collective between devices fails; none should ever come to it.

    Raises:
        Fault: A rank has no device, another than rank 0, or is not there.
    """
    device, problem = _take_device()
    rank, world_size, store = 0, int(os.environ.get("WORLD_SIZE", 1)), None
    if world_size > 1:
        try:
            meeting = datetime.timedelta(seconds=MEETING_SECONDS)
            store, rank, world_size = next(rendezvous("env://", timeout=meeting))
        except RuntimeError as error:
            raise Fault(f"the ranks did not meet: {error}") from error
    site = Site(rank, (tuple(range(world_size)),), device, None, store)
    # Before any group is made that could wait for one of them.
    call_roll(site, problem)
    if store is None:
        return site
    backend, slow = "nccl" if site.is_cuda else "gloo", datetime.timedelta(seconds=seconds)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=slow)
    node = os.environ.get("GROUP_RANK", socket.gethostname())
    # A copy: a thread that waits in the store holds back all others that use the same object.
    return make_site(dataclasses.replace(site, store=store.clone()), node)


def make_site(site: Site, node: str) -> Site:
    """The site of the default process group, by its nodes; a collective over it.

    Args:
        site: Without a control group.
        node: A name that ranks of one node share.
    """
    timeout = datetime.timedelta(seconds=MEETING_SECONDS)
    site = dataclasses.replace(site, control=dist.new_group(backend="gloo", timeout=timeout))
    ranks_by_node: dict[str, list[int]] = {}
    for rank, name in enumerate(site.gather(node)):
        ranks_by_node.setdefault(name, []).append(rank)
    return dataclasses.replace(site, nodes=tuple(map(tuple, ranks_by_node.values())))


def _take_device() -> tuple[torch.device, str]:
    """The device of this rank, and what is wrong with it."""
    if not torch.cuda.is_available():
        return torch.device("cpu"), ""
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    try:
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    except RuntimeError as error:
        return device, " ".join(str(error).split())
    return device, ""


def call_roll(site: Site, problem: str) -> None:
    """Have every rank tell its device, and what is wrong with it.

    Raises:
        Fault: Something is, or ranks have unlike devices.
    """
    found = site.sign("device", MEETING_SECONDS, json.dumps([site.device.type, problem]))
    devices, problems = zip(*map(json.loads, found), strict=True)
    for rank, (device, one) in enumerate(zip(devices, problems, strict=True)):
        if one:
            raise Fault(f"{name_ranks([rank])}: {one}")
        if device != devices[0]:
            raise Fault(f"device: rank 0 has {devices[0]}, rank {rank} {device}")


def name_ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 1, 3``."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
