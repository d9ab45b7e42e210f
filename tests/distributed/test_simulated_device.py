"""Every layout on the simulated device, under what NCCL refuses; no locked step waits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from amo_dist import AMO, AMOConfig, param_groups
from tests import runs
from tests.distributed import models
from tests.distributed import test_layouts_more as more
from tests.distributed.harness import Ranks
from tests.distributed.test_layouts_more import Shapes
from tests.nccl import nccl
from tests.simulated_device import simulated_device

pytestmark = pytest.mark.slow

LR, STEPS = 3e-3, 10
FIELDS = runs.PHASES | {"bucket_bytes": 256, "ns_dtype": "float32"}
LOCKED = FIELDS["observe_until"] + FIELDS["transition_steps"]
"""From here on schedules stay; in this very step matrices are dealt anew, which waits."""


def build(layout: str) -> nn.Module:
    """A layout of `models`, or a builder of `more`."""
    if layout.startswith("build_"):
        model: nn.Module = getattr(more, layout)("cuda")
        return model
    return models.make_model(layout, shapes_of(layout), "cuda")


def shapes_of(layout: str) -> Shapes:
    if layout.startswith("build_"):
        return {"build_experts_0": more.EXPERTS}.get(layout, more.STAGES[0] | more.STAGES[1])
    is_even = layout in ("tp_fsdp", "hsdp_tp")  # torch pads nothing under tensor parallelism
    shapes = models.shapes(models.EVEN_SHAPES if is_even else models.SHAPES)
    # One layer: an operation on the simulated device takes long.
    return {
        name: shape
        for name, shape in shapes.items()
        if not name.startswith(("layers.1", "layers.2"))
    }


CASES = [
    *(("plain", 4), ("fsdp", 3), ("hsdp_tp", 4), ("build_experts_0", 2)),
    *(("build_sharded_stage", 4), ("hsdp", 4)),
]
"""Layout, and number of ranks."""


def train(rank: int, world_size: int, layout: str) -> tuple[dict[str, Tensor], list[int], str]:
    """Parameters, the number of operations of each locked step, and the last phase."""
    with simulated_device() as device, nccl() as checks:
        model = build(layout)
        group = dist.group.WORLD if layout == "plain" and world_size > 1 else None
        config = AMOConfig(**FIELDS)
        groups = param_groups(model, allow_unused=True)
        optimizer = AMO(groups, lr=LR, config=config, process_group=group)
        counts = []
        for step in range(1, STEPS + 1):
            more.set_gradients(model, step)
            for each in optimizer.param_groups:
                each["lr"] = LR * step / STEPS  # a rate that changes costs no wait
            device.clear()
            optimizer.step()
            if step > LOCKED:
                assert (step, device.waits) == (step, {})
                counts.append(device.operations.total())
            checks.check_waited()
            states = [value for state in optimizer.state.values() for value in state.values()]
            grads = [param.grad for param in model.parameters()]
            kept = [getattr(x, "_local_tensor", x) for x in (*model.parameters(), *grads, *states)]
            # Flags and norms of the step; the smallest bucket takes 256 bytes in each direction.
            assert device.held_bytes(without=kept) < 256, step
        optimizer.check_last_update()
        # One ballot a step, and one sum an observation or residual.
        assert checks.calls["all_reduce"] <= 2 * STEPS
        named = model.named_parameters()
        params = {name: models.whole(param).cpu() for name, param in named}
    return params, counts, optimizer.phase


@pytest.mark.parametrize(("layout", "num_ranks"), CASES)
def test_every_layout_trains_on_devices(run_on: Ranks, layout: str, num_ranks: int) -> None:
    shapes = shapes_of(layout)
    twin = more.make_twin(shapes, FIELDS)
    for step in range(1, STEPS + 1):
        assert twin.adamw is not None
        twin.lr = twin.adamw.param_groups[0]["lr"] = LR * step / STEPS
        twin.step(more.gradients(step, shapes))
    seen = set()
    for params, counts, phase in run_on(num_ranks)(train, layout):
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


@pytest.mark.skipif(torch.__version__ < "2.12", reason="its wrapper of gloo lacks what FSDP2 calls")
def test_pytorchs_own_checks_find_nothing(run_on: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """They compare shapes and order of all collectives, those of DTensor too."""
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    for _, counts, phase in run_on(2, fresh=True)(train, "fsdp"):
        assert (phase, len(counts)) == ("locked", STEPS - LOCKED)
