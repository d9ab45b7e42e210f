"""The ranks that checks run on, their nodes, and the device of each."""

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
"""Seconds for all ranks to arrive."""


class Fault(RuntimeError):
    """A check measured something wrong; raised while no collective is under way."""


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """The ranks of an examination, as this rank sees them.

    Attributes:
        rank: Rank of this process.
        nodes: Ranks of each node.
        device: Device of this rank: ``cuda`` with its index, or ``cpu``.
        hosts: Host of each node, where there are several.
        control: Group of all ranks on the CPU that no check uses; None on one rank.
        store: Store of all ranks that nothing else uses; None on one rank.
    """

    rank: int
    nodes: tuple[tuple[int, ...], ...]
    device: torch.device
    hosts: tuple[str, ...] = ()
    control: dist.ProcessGroup | None = None
    store: Any = None

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(map(len, self.nodes))

    @property
    def nodes_are_replicas(self) -> bool:
        """Whether there are several nodes of one size and of consecutive ranks."""
        ranks = [rank for node in self.nodes for rank in node]
        return len(self.nodes) > 1 and len({*map(len, self.nodes)}) == 1 and ranks == sorted(ranks)

    @property
    def is_cuda(self) -> bool:
        """Whether the ranks have a CUDA device each."""
        return self.device.type == "cuda"

    def sign(self, key: str, seconds: float, text: str = "") -> list[str]:
        """Leave a text for the other ranks and wait for theirs.

        Args:
            key: Name of the meeting, different each time.
            seconds: Seconds to wait.
            text: Text of this rank.

        Returns:
            The texts of all ranks.

        Raises:
            Fault: Some ranks, which the message names, left no text in time.
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
        """Gather a value of each rank, in their order; a collective."""
        values: list[Any] = [value] * self.world_size
        if self.control is not None:
            dist.all_gather_object(values, value, self.control)
        return values

    def __str__(self) -> str:
        ranks = f"{self.world_size} rank{'s' * (self.world_size > 1)}"
        nodes = f"{len(self.nodes)} node{'s' * (len(self.nodes) > 1)}"
        backend = ("nccl" if self.is_cuda else "gloo") if self.world_size > 1 else "no group"
        return f"{ranks} on {nodes}, {self.device.type}, {backend}"


def join(seconds: float) -> Site:
    """Meet the other ranks and start the process groups; a single rank needs neither.

    The environment holds the variables that a launcher such as torchrun sets.

    Args:
        seconds: Timeout of collectives between devices, beyond the time of any check.

    Raises:
        Fault: A rank is missing, has no device, or another type of device than rank 0.
    """
    device, problem = _take_device()
    rank, world_size, store = 0, int(os.environ.get("WORLD_SIZE", 1)), None
    if world_size > 1:
        try:
            meeting = datetime.timedelta(seconds=MEETING_SECONDS)
            store, rank, world_size = next(rendezvous("env://", timeout=meeting))
        except RuntimeError as error:
            raise Fault(f"the ranks did not meet: {error}") from error
    site = Site(rank, (tuple(range(world_size)),), device, store=store)
    # A group with a missing or unlike rank could wait for good; hence the roll call comes first.
    call_roll(site, problem)
    if store is None:
        return site
    backend, timeout = "nccl" if site.is_cuda else "gloo", datetime.timedelta(seconds=seconds)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    node = os.environ.get("GROUP_RANK", socket.gethostname())
    # A thread that waits in a store blocks the other users of the same object; hence the clone.
    return make_site(dataclasses.replace(site, store=store.clone()), node)


def make_site(site: Site, node: str) -> Site:
    """Add the control group and the nodes to a site; a collective over the default group.

    Args:
        site: Site without a control group.
        node: Name that the ranks of one node share.
    """
    timeout = datetime.timedelta(seconds=MEETING_SECONDS)
    site = dataclasses.replace(site, control=dist.new_group(backend="gloo", timeout=timeout))
    ranks_by_node: dict[tuple[str, str], list[int]] = {}
    for rank, (name, host) in enumerate(site.gather((node, socket.gethostname()))):
        ranks_by_node.setdefault((name, host), []).append(rank)
    nodes = tuple(map(tuple, ranks_by_node.values()))
    hosts = tuple(host for _, host in ranks_by_node) if len(nodes) > 1 else ()
    return dataclasses.replace(site, nodes=nodes, hosts=hosts)


def _take_device() -> tuple[torch.device, str]:
    """Take the device of this rank; the text is its problem, empty for none."""
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
    """Exchange the devices of all ranks and their problems.

    Raises:
        Fault: A device has a problem, or ranks have unlike devices.
    """
    texts = site.sign("device", MEETING_SECONDS, json.dumps([site.device.type, problem]))
    devices, problems = zip(*map(json.loads, texts), strict=True)
    for rank, (device, text) in enumerate(zip(devices, problems, strict=True)):
        if text:
            raise Fault(f"{name_ranks([rank])}: {text}")
        if device != devices[0]:
            raise Fault(f"device: rank 0 has {devices[0]}, rank {rank} {device}")


def name_ranks(ranks: Sequence[int]) -> str:
    """Format ranks as ``rank 3`` or ``ranks 1, 3``."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
