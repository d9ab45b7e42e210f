"""Collectives that NCCL refuses, hangs on or mixes up are refused in tests."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.harness import Ranks
from tests.nccl import NcclError, nccl
from tests.simulated_device import simulated_device

Misuse = Callable[[Tensor, int], object]


def in_another_thread(x: Tensor) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(dist.all_reduce, x).result()


def during(name: str, use: Callable[[Tensor], object]) -> Misuse:
    """Use what a collective receives while it is under way."""

    def misuse(x: Tensor, rank: int) -> None:
        received, sent = x.clone(), [] if name == "all_reduce" else [x]
        work = getattr(dist, name)(received, *sent, async_op=True)
        try:
            use(received)
        finally:
            work.wait()

    return misuse


MISUSES: list[tuple[Misuse, str]] = [
    (lambda x, rank: dist.all_reduce(x[: 2 + rank]), "ranks differ"),
    (lambda x, rank: dist.all_reduce(x) if rank else dist.broadcast(x, 0), "ranks differ"),
    (lambda x, rank: dist.all_reduce(x.repeat(4, 1)[:, 0]), "not contiguous"),
    (lambda x, rank: dist.all_gather_object([None, None], "text"), "not on devices"),
    (lambda x, rank: in_another_thread(x), "two threads"),
    (lambda x, rank: dist.all_reduce(x, async_op=True), "not waited for"),
    (lambda x, rank: dist.all_reduce(torch.ones(2)), "No backend type associated with device type"),
    (during("all_reduce", lambda x: dist.all_reduce(x[1:])), "another collective uses"),
    (
        during("all_reduce", lambda x: x[2:].mul_(2)),
        "mul_.Tensor: memory that all_reduce may",
    ),
    (
        during("all_to_all_single", lambda x: x.sum()),
        "sum.default: memory that all_to_all_sing",
    ),
]


def refused(rank: int, world_size: int) -> list[str]:
    """The error of each misuse."""
    errors = []
    for misuse, _ in MISUSES:
        with pytest.raises((NcclError, RuntimeError)) as raised, simulated_device(), nccl():
            misuse(torch.zeros(4, device="cuda"), rank)
        errors.append(str(raised.value))
    return errors


def test_what_nccl_refuses_is_refused(run_on: Ranks) -> None:
    for errors in run_on(2)(refused):
        for error, (_, part) in zip(errors, MISUSES, strict=True):
            assert part in error
