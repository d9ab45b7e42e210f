"""The exchange on real ranks."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.harness import Ranks
from tests.distributed.negation import Negation
from tests.layouts import build

SHAPES_2D = [(7, 5), (1, 6), (3, 2), (8, 8), (6, 1)]
SHAPES_3D = [(3, 4, 5), (5, 2, 3)]
MESHES = {
    "fsdp": (4,),
    "hsdp": (2, 2),
    "tp_rows": (4,),
    "fsdp_tp_columns": (2, 2),
    "fsdp_tp_rows": (2, 2),
    "experts_0": (4,),
    "experts_2": (4,),
    "ep_fsdp": (2, 2),
    "ddp": (4,),
}


def exchange(rank: int, world_size: int, kind: str) -> None:
    """Step after step, over the same buffers."""
    is_3d = kind.startswith(("experts", "ep"))
    mesh = torch.arange(world_size).view(MESHES[kind])
    model = build(kind, mesh, list(SHAPES_3D if is_3d else SHAPES_2D))
    negation = Negation(model, rank, torch.bfloat16, 100)
    for factor in (1, -1, 2):
        negation.hold(factor)
        negation.negate()
        assert negation.events.count("meanwhile") == 1
        negation.events.clear()
        negation.check()


@pytest.mark.parametrize("kind", sorted(MESHES))
def test_every_rank_gets_its_part_of_every_result_once(run_on: Ranks, kind: str) -> None:
    run_on(4)(exchange, kind)
