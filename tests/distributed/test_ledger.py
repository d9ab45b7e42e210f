"""Bytes on the wire: what the optimizer reports is what its collectives send."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor

from amo_dist import AMO, AMOConfig, Muon, MuonConfig, param_groups
from tests.distributed import models
from tests.distributed.harness import Ranks
from tests.nccl import ALL_GATHER

SHAPES = models.shapes()
EVEN = models.shapes(models.EVEN_SHAPES)  # FSDP over TP needs even dims


def count(
    rank: int,
    world_size: int,
    layout: str,
    shapes: dict[str, tuple[int, ...]],
    bucket_bytes: int,
    observes: bool,
) -> tuple[float, int, int]:
    """Bytes that this rank sends in a step: reported, counted, and counted along replicas."""
    model = models.make_model(layout, shapes)
    group = dist.group.WORLD if layout == "plain" else None
    groups = param_groups(model)
    fields: dict[str, Any] = {"ns_dtype": "bfloat16", "bucket_bytes": bucket_bytes}
    if observes:
        phases = {"observe_until": 2, "observe_every": 1, "sample_size": 2}
        config = AMOConfig(**phases, **fields)
        optimizer: Muon = AMO(groups, config=config, process_group=group)
    else:
        optimizer = Muon(groups, config=MuonConfig(**fields), process_group=group)
    sent = {"there and back": 0, "along": 0}
    exchange, gather = dist.all_to_all_single, getattr(dist, ALL_GATHER)

    def counted_exchange(
        received: Tensor, own: Tensor, sizes: list[int], splits: list[int], **options: Any
    ) -> Any:
        place = dist.get_rank(options["group"])
        sent["there and back"] += (sum(splits) - splits[place]) * own.element_size()
        return exchange(received, own, sizes, splits, **options)

    def counted_gather(received: Tensor, own: Tensor, **options: Any) -> Any:
        sent["along"] += (
            (dist.get_world_size(options["group"]) - 1) * own.numel() * own.element_size()
        )
        return gather(received, own, **options)

    models.set_gradients(model, 1, 1)
    optimizer.step()
    models.set_gradients(model, 1, 2)
    assert bool(optimizer.source.sample(2)) == observes
    with (
        mock.patch.object(dist, "all_to_all_single", counted_exchange),
        mock.patch.object(dist, ALL_GATHER, counted_gather),
    ):
        optimizer.step()
    return optimizer.metrics()["exchange/sent_bytes"], sum(sent.values()), sent["along"]


@pytest.mark.parametrize(
    ("layout", "world_size", "shapes", "bucket_bytes", "observes"),
    [
        pytest.param("fsdp", 1, SHAPES, 2**20, False, id="one-process"),
        pytest.param("fsdp", 4, SHAPES, 64, False, id="fsdp-4-uneven-and-empty"),
        pytest.param("tp_fsdp", 4, EVEN, 2**20, False, id="tp-2-fsdp-2"),
        pytest.param("plain", 3, SHAPES, 64, False, id="ddp-3"),
        pytest.param("fsdp", 4, SHAPES, 2**20, True, id="fsdp-4-observed"),
        pytest.param("hsdp", 4, SHAPES, 2**20, True, id="hsdp-2x2-observed"),
    ],
)
def test_ranks_send_what_they_report(
    run_on: Ranks,
    layout: str,
    world_size: int,
    shapes: dict[str, tuple[int, ...]],
    bucket_bytes: int,
    observes: bool,
) -> None:
    results = run_on(world_size)(count, layout, shapes, bucket_bytes, observes)
    for reported, counted, along in results:
        assert reported == counted
        assert bool(along) == (layout in ("plain", "hsdp"))
    assert any(reported for reported, *_ in results) == (world_size > 1)
