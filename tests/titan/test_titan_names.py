"""torchtitan's own models: the operator type of every parameter, by its name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from amo_dist.operators.parts import IN_HEADS
from amo_dist.operators.views import MatrixView
from tests.titan.test_models import build
from torchtitan_ext.plugin.optimizers import MuonSection, OptimizersContainer, groups_of

ATTENTION = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_o"), 1)
DENSE = dict.fromkeys(("mlp_gate", "mlp_up", "mlp_down"), 1)
EXPERTS = dict.fromkeys(("expert_gate", "expert_up", "expert_down"), 8)
SHARED = dict.fromkeys(("shared_expert_gate", "shared_expert_up", "shared_expert_down"), 1)
VISION = ATTENTION | {"mlp_up": 1, "mlp_down": 1}
MLA = dict.fromkeys(("attn_q", "mla_kv_a", "mla_kv_b", "attn_o"), 1)


def times(number: int, types: dict[str, int]) -> Counter[str]:
    return Counter({name: number * count for name, count in types.items()})


def check(model: nn.Module, types: Counter[str], by_adamw: set[str]) -> None:
    """The model's matrices by type, and the names of matrices and experts' biases of AdamW."""
    muon, adamw = groups_of([model], OptimizersContainer.Config(name="Muon"))
    assert types == Counter(v.operator_type for vs in muon["matrix_views"].values() for v in vs)
    assert by_adamw == {name for name, parameter in adamw["params"] if parameter.dim() > 1}
    by_head = OptimizersContainer.Config(name="Muon", muon=MuonSection(per_head=True))
    apart, _ = groups_of([model], by_head)
    views_by_name = apart["matrix_views"].items()
    divided = {name: views for name, views in views_by_name if types_in(views)[0] in IN_HEADS}
    assert divided
    for name, views in divided.items():
        # Each attention has two heads of each at least.
        counts = Counter(kind for kind in types_in(views) if kind in IN_HEADS)
        assert min(counts.values()) > 1, name


def types_in(views: Sequence[MatrixView]) -> list[str]:
    return [view.operator_type for view in views]


ENDS = {"tok_embeddings.weight", "lm_head.weight"}


def gates(layers: range, name: str = "moe.router.gate.weight") -> set[str]:
    return {f"layers.{n}.{name}" for n in layers}


@pytest.mark.parametrize(
    ("name", "flavor", "types", "by_adamw"),
    [
        ("llama3", "debugmodel", times(6, ATTENTION | DENSE), ENDS),
        ("qwen3", "debugmodel", times(8, ATTENTION | DENSE), {"tok_embeddings.weight"}),
        (
            "qwen3",
            "debugmodel_moe",
            times(8, ATTENTION) + times(64, EXPERTS),
            ENDS | gates(range(8)),
        ),
        (
            "deepseek_v3",
            "debugmodel",
            times(6, MLA) + times(1, DENSE) + times(5, EXPERTS | SHARED),
            ENDS | gates(range(1, 6)),
        ),
        (
            "gpt_oss",
            "debugmodel",
            times(4, ATTENTION | {"expert_gate_up": 8, "expert_down": 8}),
            ENDS
            | gates(range(4))
            | gates(range(4), "moe.routed_experts.inner_experts.mlp1_bias_EG")
            | gates(range(4), "moe.routed_experts.inner_experts.mlp2_bias_ED"),
        ),
        (
            "kimi_k2_7",
            "debugmodel",
            times(6, MLA) + times(1, DENSE) + times(5, EXPERTS | SHARED) + times(4, VISION),
            ENDS
            | gates(range(1, 6))
            | {"vision_encoder.pos_embed", "vision_encoder.patch_embed.weight"}
            | {f"vision_encoder.projector.linear_{n}.weight" for n in (1, 2)},
        ),
        (
            "muse_glimmer",
            "debugmodel_mm",
            times(8, ATTENTION | DENSE | {"attn_gate": 1}) + times(3, VISION),
            {"tok_embeddings.embedding.weight", "lm_head.weight", "vision_projection.weight"}
            | {f"vision_adapter.{name}.weight" for name in ("c_fc", "c_proj")}
            | {"vision_encoder.positional_embedding_vlm", "vision_encoder.conv1_linear.weight"},
        ),
    ],
)
def test_models(name: str, flavor: str, types: Counter[str], by_adamw: set[str]) -> None:
    with torch.device("meta"):
        model = build(name, flavor, attention="varlen")
    check(model, types, by_adamw)
