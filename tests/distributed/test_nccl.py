"""Collectives that NCCL refuses, hangs on or mixes up are refused in tests."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from tests.distributed.harness import Ranks
from tests.nccl import NcclError, nccl
from tests.simulated_device import simulated_device


def refused(rank: int, world_size: int) -> list[str]:
    """What each misuse of NCCL is told."""
    x = torch.zeros(4)

    def unlike_sizes() -> None:
        dist.all_reduce(x[: 2 + rank])

    def unlike_order() -> None:
        (dist.all_reduce if rank else dist.broadcast)(x, **({} if rank else {"group_src": 0}))

    def unlike_splits() -> None:
        dist.all_to_all_single(x, x.clone(), [2, 2], [1 + rank, 3 - rank])

    def strided() -> None:
        dist.all_reduce(torch.zeros(4, 4)[:, 0])

    def objects() -> None:
        dist.all_gather_object([None] * world_size, "text")

    def another_thread() -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(dist.all_reduce, x).result()

    def unfinished() -> None:
        dist.all_reduce(x, async_op=True)

    def memory_in_use() -> None:
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        try:
            dist.all_reduce(x[1:])
        finally:
            work.wait()

    def kernel_on_memory_in_use() -> None:
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        try:
            x[2:].mul_(2)
        finally:
            work.wait()

    def result_read_too_early() -> None:
        received = torch.zeros(4)
        work = dist.all_to_all_single(received, x, async_op=True)
        assert work is not None
        try:
            received.sum()
        finally:
            work.wait()

    found = []
    for misuse in (
        *(unlike_sizes, unlike_order, unlike_splits, strided, objects, another_thread),
        *(unfinished, memory_in_use, kernel_on_memory_in_use, result_read_too_early),
    ):
        with pytest.raises(NcclError) as raised, nccl():
            misuse()
        found.append(str(raised.value))
    return found


def test_what_nccl_refuses_is_refused(run_on: Ranks) -> None:
    expected = ("ranks differ", "ranks differ", "is sent", "not contiguous", "not on devices")
    others = ["two threads", "not waited for", "another collective uses"]
    others += [
        "mul_.Tensor: memory that all_reduce may",
        "sum.default: memory that all_to_all_sing",
    ]
    for found in run_on(2)(refused):
        for error, part in zip(found, (*expected, *others), strict=True):
            assert part in error


def on_the_cpu(rank: int, world_size: int) -> list[str]:
    found = []
    for backends in ("cuda:nccl", "cpu:gloo,cuda:nccl"):
        with simulated_device(backends) as device:
            x, error = torch.ones(2, device="cuda"), ""
            dist.all_reduce(x)
            try:
                dist.all_reduce(torch.ones(2))
            except RuntimeError as raised:
                error = str(raised)
            found += [error, str(x.tolist()), str(device.collectives["allreduce_"])]
    return found


def test_nccl_takes_no_tensor_of_the_cpu(run_on: Ranks) -> None:
    for found in run_on(2)(on_the_cpu):
        text = "allreduce_: No backend type associated with device type cpu"
        assert found == [text, "[2.0, 2.0]", "2", "", "[2.0, 2.0]", "2"]
