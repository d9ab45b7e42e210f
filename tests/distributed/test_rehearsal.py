"""Every layout on the path for devices, under what NCCL refuses; no locked step waits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from amo_dist import AMO, AMOConfig, param_groups
from tests import rehearsal
from tests.distributed import models
from tests.distributed.harness import Ranks
from tests.oracle import Oracle

LR, SEED, STEPS = 3e-3, 7, 20
FIELDS: dict[str, Any] = {
    "observe_until": 8,
    "observe_every": 4,
    "sample_size": 2,
    "transition_steps": 6,
    "bucket_bytes": 256,
    "ns_dtype": "float32",
}
LOCKED = FIELDS["observe_until"] + FIELDS["transition_steps"]
"""From here on schedules stay; in this very step matrices are dealt anew, which waits."""
CASES = [
    pytest.param("plain", 1, id="one-process"),
    pytest.param("plain", 2, id="ddp-2"),
    pytest.param("fsdp", 2, id="fsdp-2"),
    pytest.param("fsdp", 3, id="fsdp-3"),
    pytest.param("hsdp", 4, id="hsdp-2x2"),
    pytest.param("tp", 3, id="tp-3"),
    pytest.param("tp_fsdp", 4, id="tp-2-fsdp-2"),
    pytest.param("fsdp in teams", 4, id="fsdp-4-in-teams"),
    pytest.param("hsdp in teams", 4, id="hsdp-2x2-in-teams"),
]


def shapes_of(layout: str) -> dict[str, tuple[int, ...]]:
    return models.shapes(models.EVEN_SHAPES if layout == "tp_fsdp" else models.SHAPES)


def train(rank: int, world_size: int, layout: str) -> tuple[dict[str, Tensor], list[int], str]:
    """Parameters, the number of operations of each locked step, and the last phase."""
    layout, _, has_teams = layout.partition(" in ")
    # Small matrices are shared where sending takes no time.
    free = mock.patch("amo_dist.distributed.teams.FLOPS_PER_BYTE", 0)
    with free, rehearsal.on_devices(), rehearsal.nccl() as checks:
        model = models.make_model(layout, shapes_of(layout))
        group = dist.group.WORLD if layout == "plain" and world_size > 1 else None
        config = AMOConfig(**FIELDS, max_team=2 if has_teams else 1)
        groups = param_groups(model)
        optimizer = AMO(groups, lr=LR, config=config, process_group=group)
        counts = []
        for step in range(1, STEPS + 1):
            models.set_gradients(model, SEED, step)
            for each in optimizer.param_groups:
                each["lr"] = LR * step / STEPS  # a rate that changes costs no wait
            with rehearsal.Steps() if step > LOCKED else contextlib.nullcontext() as steps:
                optimizer.step()
            if steps is not None:
                counts.append(sum(steps.operations.values()))
            checks.check_waited()
        optimizer.check_last_update()
        # Of the exchange there are none: sums of Gram matrices, and one ballot a step.
        assert (checks.calls["all_reduce"] > 2 * STEPS) == bool(has_teams)
    params = {name: models.whole(param) for name, param in model.named_parameters()}
    return params, counts, optimizer.phase


@pytest.mark.parametrize(("layout", "world_size"), CASES)
def test_every_layout_trains_as_on_devices(run_on: Ranks, layout: str, world_size: int) -> None:
    shapes = shapes_of(layout)
    initial = {name: models.initial(name, shape) for name, shape in shapes.items()}
    twin = Oracle(initial, models.types(), AMOConfig(**FIELDS), lr=LR, weight_decay=0.1)
    for step in range(1, STEPS + 1):
        assert twin.adamw is not None
        twin.lr = twin.adamw.param_groups[0]["lr"] = LR * step / STEPS
        twin.step({n: models.gradient(SEED, step, n, shape) for n, shape in shapes.items()})
    for params, counts, phase in run_on(world_size)(train, layout):
        assert phase == "locked"
        assert len(counts) == STEPS - LOCKED
        # What is kept from step to step is made by the first locked one.
        assert len(set(counts[1:])) == 1
        for name, expected in twin.params.items():
            # float32 products in another order, and AdamW fused; an update is 1e-4 at least.
            torch.testing.assert_close(params[name], expected, rtol=1e-4, atol=2e-5)


def test_pytorchs_own_checks_find_nothing(run_on: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """They compare shapes and order of all collectives, those of DTensor too."""
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    for _, counts, phase in run_on(2, fresh=True)(train, "fsdp"):
        assert (phase, len(counts)) == ("locked", STEPS - LOCKED)


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.tolist(),
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: float(x[0]),
        lambda x: x.cpu(),
        lambda x: x.numpy(),
        lambda x: x[[0, 1]],
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.add_(torch.tensor(1.0)),
        lambda x: x.new_tensor([1.0]),
        lambda x: torch.where(x > 0, 1.0, 0.0),
    ],
)
def test_what_waits_for_a_device_is_found(wait: Callable[[Tensor], Any]) -> None:
    x = torch.ones(3)
    wait(x)
    with rehearsal.Steps(), pytest.raises(rehearsal.HostError):
        wait(x)


def test_what_does_not_wait_is_counted() -> None:
    x = torch.ones(3)
    with rehearsal.Steps() as steps:
        x.mul_(2.0).add_(x)
        x[1:].fill_(1.0)
    assert steps.operations == {"mul_": 1, "add_": 1, "slice": 1, "fill_": 1}


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

    def elsewhere() -> None:
        with rehearsal.Steps():
            dist.all_reduce(torch.zeros(4))

    found = []
    for misuse in (
        *(unlike_sizes, unlike_order, unlike_splits, strided, objects, another_thread),
        *(unfinished, elsewhere),
    ):
        with pytest.raises(rehearsal.NcclError) as raised, rehearsal.nccl():
            misuse()
        found.append(str(raised.value))
    return found


def test_what_nccl_refuses_is_refused(run_on: Ranks) -> None:
    expected = ("ranks differ", "ranks differ", "is sent", "not contiguous", "not on devices")
    others = ("two threads", "not waited for", "not on the device")
    for found in run_on(2)(refused):
        for error, part in zip(found, (*expected, *others), strict=True):
            assert part in error
