"""Every layout on the path for devices, under what NCCL refuses; no locked step waits."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from amo_dist import AMO, AMOConfig, param_groups
from tests import rehearsal
from tests.distributed import models
from tests.distributed import test_layouts_more as more
from tests.distributed.harness import Ranks
from tests.distributed.test_layouts_more import Shapes
from tests.oracle import Oracle

LR, STEPS = 3e-3, 20
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


def build(layout: str) -> nn.Module:
    """A layout of `models`, or a builder of `more`."""
    if layout.startswith("build_"):
        model: nn.Module = getattr(more, layout)()
        return model
    return models.make_model(layout, shapes_of(layout))


def shapes_of(layout: str) -> Shapes:
    if layout.startswith("build_"):
        return {"build_experts_0": more.EXPERTS}.get(layout, more.STAGES[0] | more.STAGES[1])
    is_even = layout in ("tp_fsdp", "hsdp_tp")  # torch pads nothing under tensor parallelism
    return models.shapes(models.EVEN_SHAPES if is_even else models.SHAPES)


CASES = [
    pytest.param("plain", (0,), id="one-process"),
    pytest.param("plain", (0, 0), id="ddp-2"),
    pytest.param("plain", (0, 0, 1, 1), id="ddp-4-on-two-nodes"),
    pytest.param("fsdp", (0, 0), id="fsdp-2"),
    pytest.param("fsdp", (0, 0, 0), id="fsdp-3"),
    pytest.param("hsdp", (0, 0, 0, 0), id="hsdp-2x2"),
    pytest.param("hsdp", (0, 1, 0, 1), id="hsdp-2x2-across-two-nodes"),
    pytest.param("tp", (0, 0, 0), id="tp-3"),
    pytest.param("tp_fsdp", (0, 0, 0, 0), id="tp-2-fsdp-2"),
    pytest.param("hsdp_tp", (0, 0, 0, 0), id="hsdp-2x1-tp-2"),
    pytest.param("build_experts_0", (0, 0), id="experts-2"),
    pytest.param("build_stage", (0, 0), id="stages-2"),
    pytest.param("build_sharded_stage", (0, 0, 0, 0), id="stages-2-fsdp-2"),
    pytest.param("fsdp in teams", (0, 0, 0, 0), id="fsdp-4-in-teams"),
    pytest.param("hsdp in teams", (0, 0, 0, 0), id="hsdp-2x2-in-teams"),
    pytest.param("hsdp in teams", (0, 1, 0, 1), id="hsdp-2x2-in-teams-across-two-nodes"),
]
"""Layout, and the node of each rank."""


def train(
    rank: int, world_size: int, layout: str, nodes: tuple[int, ...]
) -> tuple[dict[str, Tensor], list[int], str]:
    """Parameters, the number of operations of each locked step, and the last phase."""
    layout, _, has_teams = layout.partition(" in ")
    node = mock.patch.dict(os.environ, GROUP_RANK=str(nodes[rank]))
    # Small matrices are shared where sending takes no time.
    free = mock.patch("amo_dist.distributed.teams.FLOPS_PER_BYTE", 0)
    with free, rehearsal.on_devices(), rehearsal.nccl() as checks, node:
        model = build(layout)
        group = dist.group.WORLD if layout == "plain" and world_size > 1 else None
        config = AMOConfig(**FIELDS, max_team=2 if has_teams else 1)
        groups = param_groups(model, allow_unused=True)
        optimizer = AMO(groups, lr=LR, config=config, process_group=group)
        counts = []
        for step in range(1, STEPS + 1):
            for name, param in model.named_parameters():
                param.grad = models.place_like(more.gradient(step, name, tuple(param.shape)), param)
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


def make_twin(shapes: Shapes) -> Oracle:
    params: dict[str, Tensor] = {}
    types: dict[str, str] = {}
    for name, shape in shapes.items():
        params |= more.by_matrix(name, models.initial(name, shape))
        types |= {
            name + view.suffix: view.operator_type for view in more.views_of(name, shape) or ()
        }
    return Oracle(params, types, AMOConfig(**FIELDS), lr=LR, weight_decay=0.1)


@pytest.mark.parametrize(("layout", "nodes"), CASES)
def test_every_layout_trains_as_on_devices(
    run_on: Ranks, layout: str, nodes: tuple[int, ...]
) -> None:
    shapes = shapes_of(layout)
    twin = make_twin(shapes)
    for step in range(1, STEPS + 1):
        assert twin.adamw is not None
        twin.lr = twin.adamw.param_groups[0]["lr"] = LR * step / STEPS
        grads: dict[str, Tensor | None] = {}
        for name, shape in shapes.items():
            grads |= more.by_matrix(name, more.gradient(step, name, shape))
        twin.step(grads)
    seen = set()
    for params, counts, phase in run_on(len(nodes))(train, layout, nodes):
        assert phase == "locked"
        assert len(counts) == STEPS - LOCKED
        # What is kept from step to step is made by the first locked one.
        assert len(set(counts[1:])) == 1
        for name, param in params.items():
            for key, found in more.by_matrix(name, param).items():
                # float32 products in another order, and AdamW fused; an update is 1e-4 at least.
                torch.testing.assert_close(found, twin.params[key], rtol=1e-4, atol=2e-5)
                seen.add(key)
    assert seen == set(twin.params)


def test_pytorchs_own_checks_find_nothing(run_on: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """They compare shapes and order of all collectives, those of DTensor too."""
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    for _, counts, phase in run_on(2, fresh=True)(train, "fsdp", (0, 0)):
        assert (phase, len(counts)) == ("locked", STEPS - LOCKED)


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.tolist(),
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: float(x[0]),
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: torch.zeros(3, device="cpu"),
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

    def memory_in_use() -> None:
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        try:
            dist.all_reduce(x[1:])
        finally:
            work.wait()

    def elsewhere() -> None:
        with rehearsal.Steps():
            dist.all_reduce(torch.zeros(4))

    found = []
    for misuse in (
        *(unlike_sizes, unlike_order, unlike_splits, strided, objects, another_thread),
        *(unfinished, memory_in_use, elsewhere),
    ):
        with pytest.raises(rehearsal.NcclError) as raised, rehearsal.nccl():
            misuse()
        found.append(str(raised.value))
    return found


def test_what_nccl_refuses_is_refused(run_on: Ranks) -> None:
    expected = ("ranks differ", "ranks differ", "is sent", "not contiguous", "not on devices")
    others = ("two threads", "not waited for", "another collective uses", "not on the device")
    for found in run_on(2)(refused):
        for error, part in zip(found, (*expected, *others), strict=True):
            assert part in error
