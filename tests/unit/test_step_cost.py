"""What a step costs on many ranks: known shapes, known volumes."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from amo_dist.config import OPERATOR_TYPES, MuonConfig
from amo_dist.kernels import newton_schulz
from amo_dist.schedule.allocate import ns_step_flops
from amo_dist.schedule.polar_express import schedule_for
from benchmarks.shapes import matrices as matrices_of
from benchmarks.step_cost import StepCost, lay_out, newton_schulz_bytes
from tests.examples import ROOT
from tests.memory import peak_bytes
from torchtitan_ext.tools.shapes import MODELS, DecoderShape

SPECS = json.loads((ROOT / "tests/golden/model_specs.json").read_text())
SMALL = DecoderShape(layers=4, dim=64, ffn_dim=128, heads=4, kv_heads=2)
UNIFORM = dict.fromkeys(OPERATOR_TYPES, 5)


@pytest.mark.parametrize("name", sorted(SPECS))
def test_shapes_are_the_papers(name: str) -> None:
    shape, spec = MODELS[name], SPECS[name]
    assert dataclasses.asdict(shape) == {key: spec[key] for key in dataclasses.asdict(shape)}
    elements = sum(info.shape[0] * info.shape[1] for info in matrices_of(shape))
    assert round(elements / 1e6, 2) == spec["muon_params_m"]


@pytest.mark.parametrize("ownership", ["round_robin", "balanced"])
@pytest.mark.parametrize(("ranks", "shard"), [(8, 8), (32, 32), (32, 8), (256, 2)])
def test_load_and_traffic_add_up(ranks: int, shard: int, ownership: Any) -> None:
    registry = matrices_of(SMALL)
    matrices = lay_out(registry, ranks, replica_size=shard)
    steps = {**UNIFORM, "attn_q": 7}
    cost = StepCost(registry, matrices, steps, ranks, config=MuonConfig(ownership=ownership))
    flops = sum(steps[info.operator_type] * ns_step_flops(*info.shape) for info in registry)
    assert cost.flops.sum().item() == pytest.approx(flops, rel=1e-12)
    # An owner gathers what it does not hold, and delivers to every replica but itself.
    moved = (1 - 1 / shard) + (ranks / shard - 1 / shard)
    elements = sum(math.prod(info.shape) for info in registry)
    assert cost.sent * ranks == pytest.approx(2 * elements * moved, rel=1e-12)


def test_bytes_follow_the_wire() -> None:
    registry = matrices_of(SMALL)
    matrices = lay_out(registry, 8)
    narrow, wide = (
        StepCost(registry, matrices, UNIFORM, 8, config=MuonConfig(wire_dtype=wire))
        for wire in (None, "float32")
    )
    assert wide.sent == 2 * narrow.sent
    assert sum(wide.memory()) > sum(narrow.memory())


# ------------------------------------------------------------------ memory

MARGIN = 0.01
"""Of the peak: vectors are not counted."""


@pytest.mark.parametrize("num_steps", [4, 5, 7])
@pytest.mark.parametrize("shape", [(256, 256), (256, 768), (768, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("backend", ["standard", "auto"])
def test_newton_schulz_takes_the_memory_that_is_counted(
    backend: str,
    dtype: torch.dtype,
    shape: tuple[int, int],
    num_steps: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As on devices: all of a batch at once.
    monkeypatch.setattr(newton_schulz, "on_cpu", lambda _: False)
    count, coefficients = 4, tuple(schedule_for(1e-3, num_steps).coefficients)
    matrices = [torch.randn(shape).to(dtype) for _ in range(count)]

    def run() -> Tensor:
        batch = torch.stack(matrices)
        return newton_schulz.orthogonalize(batch, coefficients, dtype=dtype, backend=backend)

    counted = newton_schulz_bytes(count, shape, dtype.itemsize)
    # An even number of steps in pairs alone holds less than a single step.
    most_less = 0.2 if backend == "auto" and num_steps == 4 else 0.0
    assert (1 - most_less - MARGIN) * counted <= peak_bytes(run) <= (1 + MARGIN) * counted
    batch = count * math.prod(shape) * dtype.itemsize
    assert 4 * batch < counted < 10 * batch
