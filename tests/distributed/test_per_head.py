"""QK-clip on every layout, with the bits of one process and the rows of each head."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from amo_dist import qk_clip_
from tests import runs
from tests.distributed import models
from tests.distributed.harness import Ranks

# Three ranks cut every projection between heads, two do not. By layer: grouped queries, latent
# attention, one fused parameter.
HEADS = [
    {"head_dim": 4},
    {"qk_nope_head_dim": 2, "qk_rope_head_dim": 2, "v_head_dim": 3},
    {"head_dim": 4},
]
SHAPES = {
    "layers.0.attention.wq.weight": (24, 8),
    "layers.0.attention.wk.weight": (12, 8),
    "layers.0.attention.wv.weight": (12, 8),
    "layers.1.attention.wq_b.weight": (12, 8),
    "layers.1.attention.wkv_b.weight": (15, 8),
    "layers.2.attention.qkv.weight": (36, 12),
}


def make(layout: str) -> nn.Module:
    model = models.make_model(layout, SHAPES)
    for layer, sizes in zip(model.get_submodule("layers").children(), HEADS, strict=True):
        for field, size in sizes.items():
            setattr(layer.get_submodule("attention"), field, size)
    return model


LAYOUTS = pytest.mark.parametrize(
    ("layout", "world_size"),
    [("plain", 1), ("plain", 2), ("fsdp", 2), ("fsdp", 3), ("tp", 2), ("hsdp", 4)],
)
# Of each head: one far above the threshold of 10, one just, one below, one that is not finite.
LOGITS = {
    "layers.0.attention": [40.0, 3.0, 11.0, -2.0, float("inf"), 20.0],
    "layers.1.attention": [90.0, 10.0, 12.5],
    "layers.2.attention": [1.0, 30.0, 10.5],
}


def clip(rank: int, world_size: int, layout: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = make(layout)
    group = dist.group.WORLD if layout == "plain" and world_size > 1 else None
    # Each rank saw the greatest logit of other heads, and some none at all of the rest.
    seen = {name: torch.tensor(values) for name, values in LOGITS.items()}
    for values in seen.values():
        hidden = [head for head in range(len(values)) if head % world_size != rank]
        values[hidden] = float("-inf") if rank else values[hidden] - 1e3
    order = sorted(seen, reverse=bool(rank))
    gammas = qk_clip_(model, {name: seen[name] for name in order}, 10.0, process_group=group)
    return runs.weights(model), gammas


def clipped_by_the_report() -> dict[str, Tensor]:
    """The formulas of arXiv:2507.20534, row by row."""
    whole = {name: models.initial(name, shape) for name, shape in SHAPES.items()}
    for layer, values in enumerate(LOGITS.values()):
        for head, logit in enumerate(values):
            if not 10.0 < logit < float("inf"):
                continue
            gamma = torch.tensor(10.0) / torch.tensor(logit)
            root, at = gamma.sqrt(), f"layers.{layer}.attention"
            if layer == 0:  # keys are shared by two heads: the queries take all
                whole[f"{at}.wq.weight"][4 * head : 4 * head + 4] *= gamma
            elif layer == 1:
                queries, keys = whole[f"{at}.wq_b.weight"], whole[f"{at}.wkv_b.weight"]
                queries[4 * head : 4 * head + 2] *= root
                queries[4 * head + 2 : 4 * head + 4] *= gamma
                keys[5 * head : 5 * head + 2] *= root
            else:
                fused = whole[f"{at}.qkv.weight"]
                fused[4 * head : 4 * head + 4] *= root
                fused[12 + 4 * head : 12 + 4 * head + 4] *= root
    return whole


def clip_on_two_meshes(rank: int, world_size: int) -> dict[str, Tensor]:
    model = make("plain")
    fully_shard(model.get_submodule("layers.0"), mesh=init_device_mesh("cpu", (world_size,)))
    logits = {name: torch.tensor(values) for name, values in LOGITS.items()}
    order = sorted(logits, reverse=bool(rank))
    ordered = {name: logits[name] for name in order}
    return qk_clip_(model, ordered, 10.0, process_group=dist.group.WORLD)


def test_meshes_keep_one_order_on_all_ranks(run_on: Ranks) -> None:
    # A crossed collective would mix the six logits of one mesh with the six of the other.
    _, expected = clip(0, 1, "plain")
    for gammas in run_on(2)(clip_on_two_meshes):
        assert runs.equal(gammas, expected)


@LAYOUTS
def test_clipped_heads_equal_the_formulas_of_the_report(
    run_on: Ranks, layout: str, world_size: int
) -> None:
    expected, (alone, _) = clipped_by_the_report(), clip(0, 1, "plain")
    # Ranks of their own: PyTorch takes equal meshes for one another, so that one rank might wait in
    # a group of an earlier case's mesh, and the others in those of this one.
    for params, gammas in run_on(world_size, fresh=True)(clip, layout):
        assert runs.equal(params, alone)
        for name, value in expected.items():
            # A product may be rounded in another order.
            torch.testing.assert_close(params[name], value, rtol=2**-22, atol=0.0)
        assert gammas["layers.0.attention"].tolist() == pytest.approx([0.25, 1, 10 / 11, 1, 1, 0.5])
