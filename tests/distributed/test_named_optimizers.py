"""Every optimizer by name, sharded and whole, against the single-process twin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from amo_dist import AMOConfig, Muon, MuonConfig, param_groups
from amo_dist.optimizers.named import MUON_SCHEDULES, OPTIMIZER_NAMES, make_optimizer
from amo_dist.optimizers.root import fit
from amo_dist.schedule.coefficients import named_schedule
from amo_dist.schedule.source import Fixed
from amo_dist.schedule.types import MatrixInfo, Schedule
from tests import runs
from tests.distributed import models
from tests.distributed.harness import Ranks
from tests.distributed.test_ranks import raised
from tests.oracle import AdaMuonOracle, NorMuonOracle, Oracle

LR, WEIGHT_DECAY, STEPS, SEED = 3e-3, 0.1, 6, 11
SHAPES = models.shapes()
AMO_FIELDS: dict[str, Any] = {
    "observe_until": 2,
    "observe_every": 1,
    "sample_size": 2,
    "transition_steps": 2,
}


def config(name: str) -> MuonConfig | None:
    if name == "AdamW":
        return None
    # Small buckets: the tiny matrices of these tests fill several.
    fields: dict[str, Any] = {"bucket_bytes": 256}
    return AMOConfig(**AMO_FIELDS, **fields) if name == "AMO" else MuonConfig(**fields)


def train(rank: int, world_size: int, layout: str, name: str) -> dict[str, Tensor]:
    model = models.make_model(layout, SHAPES)
    groups = param_groups(model)
    replicas = dist.group.WORLD if layout == "plain" and world_size > 1 else None
    optimizer = make_optimizer(
        name, groups, LR, WEIGHT_DECAY, config=config(name), process_group=replicas
    )
    return runs.train(model, optimizer, 1, STEPS, seed=SEED)


def twin(name: str) -> dict[str, Tensor]:
    params = {key: models.initial(key, shape) for key, shape in SHAPES.items()}
    settings = config(name) or MuonConfig()
    fixed: dict[str, Schedule] = {}
    if name == "ROOT":
        for key in models.types():
            rows, columns = SHAPES[key]
            fixed[key] = Schedule((fit((rows, columns)),) * 5, norm_scale=1.0)
    elif name not in ("AMO", "AdamW"):
        schedule = named_schedule(MUON_SCHEDULES.get(name, "kj")).schedule
        fixed = dict.fromkeys(models.types(), schedule)
    types = {} if name == "AdamW" else models.types()
    kind = {"AdaMuon": AdaMuonOracle, "NorMuon": NorMuonOracle}.get(name, Oracle)
    oracle = kind(params, types, settings, lr=LR, weight_decay=WEIGHT_DECAY, schedules=fixed)
    for step in range(1, STEPS + 1):
        oracle.step({k: models.gradient(SEED, step, k, shape) for k, shape in SHAPES.items()})
    return oracle.params


@pytest.mark.parametrize("name", OPTIMIZER_NAMES)
def test_one_process_and_shards_equal_the_twin(run_on: Ranks, name: str) -> None:
    expected = twin(name)
    for params in (train(0, 1, "plain", name), run_on(3)(train, "fsdp", name)[-1]):
        for key, value in expected.items():
            if name in ("AdaMuon", "NorMuon", "AdamW"):
                # The factor to a norm may differ in its last bit in each step. AdamW: PyTorch's
                # foreach kernel rounds a fused multiply-add differently at the end of a shard.
                tolerance = STEPS * 2.0**-23 * float(value.abs().max())
                assert (params[key] - value).abs().max() <= tolerance, key
            else:
                assert torch.equal(params[key], value), key


@pytest.mark.parametrize(
    ("name", "layout", "ranks"),
    [
        *(("AdaMuon", "plain", 2), ("AdaMuon", "fsdp", 3), ("AdaMuon", "tp_fsdp", 4)),
        *(("NorMuon", "tp", 3), ("NorMuon", "hsdp", 4), ("NorMuon", "tp_fsdp", 4)),
    ],
)
def test_sums_over_whole_matrices_are_the_same_bits_on_shards(
    run_on: Ranks, name: str, layout: str, ranks: int
) -> None:
    whole = train(0, 1, "plain", name)
    for params in run_on(ranks)(train, layout, name):
        assert runs.equal(params, whole)


class FailingSource(Fixed):
    """It cannot run on one rank."""

    def bind(self, registry: Sequence[MatrixInfo]) -> None:
        if dist.get_rank() == 1:
            raise ZeroDivisionError("no fit")
        super().bind(registry)


def fail_to_bind(rank: int, world_size: int) -> str:
    model = models.make_model("fsdp", SHAPES)
    source = FailingSource({}, named_schedule("kj").schedule)
    optimizer = Muon(param_groups(model), LR, schedule=source)
    return raised(lambda: runs.train(model, optimizer, 1, 1))


def test_a_source_that_fails_on_one_rank_fails_on_all(run_on: Ranks) -> None:
    errors = run_on(3)(fail_to_bind)
    assert errors[0].startswith("RuntimeError: ")
    assert "failed on rank 1: ZeroDivisionError: no fit" in errors[0]
    assert errors == errors[:1] * 3
