"""Facts that only modules give: the dim of outputs, convolutions, gates, embeddings, adapters."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amo_dist import Muon, MuonConfig, NorMuon, param_groups
from amo_dist.operators.views import MatrixView
from tests.distributed.models import gradient
from tests.operators import views_of


class Conv1D(nn.Module):
    """The store (in, out) of Hugging Face's GPT-2."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))


def within(name: str, module: nn.Module) -> nn.Module:
    """A model whose only module has this name."""
    for part in reversed(name.split(".")):
        module = nn.ModuleDict({part: module})
    return module


def trained(
    model: nn.Module, kind: type[Muon], how: str, *, is_transposed: bool = False, **options: Any
) -> Tensor:
    """The only weight after three steps, with gradients that depend on its entries' order alone.

    A scale shows which dim counts outputs; NorMuon has its own.
    """
    scale = "match_rms_adamw" if kind is NorMuon else "spectral"
    config = MuonConfig(adjust_lr=scale, ns_dtype="float64", bfloat16_params=how)
    (param,) = model.parameters()

    def values(step: int) -> Tensor:
        numbers = gradient(0, step, "", (param.numel(),)).to(param.dtype)
        if is_transposed:
            return numbers.view(param.T.shape).T.contiguous()
        return numbers.view(param.shape)

    param.data.copy_(values(0))
    optimizer = kind(param_groups(model, **options), lr=0.1, config=config)
    for step in range(1, 4):
        param.grad = values(step)
        optimizer.step()
    return param.detach().T if is_transposed else param.detach()


@pytest.mark.parametrize("kind", [Muon, NorMuon])
@pytest.mark.parametrize("patterns", [{}, {r".*c_fc\.weight": "mine"}])
def test_outputs_of_conv1d_are_columns(kind: type[Muon], patterns: dict[str, str]) -> None:
    model = within("h.0.mlp.c_fc", Conv1D(96, 24))
    (views,) = views_of(model, patterns=patterns).values()
    assert (views[0].boxes, views[0].dim) == (None, 1)
    # The Linear of the transposed weight has transposed results: scale, norms by neuron and all.
    twin = within("h.0.mlp.c_fc", nn.Linear(24, 96, bias=False))
    found = trained(model, kind, "nearest", is_transposed=True, patterns=patterns)
    expected = trained(twin, kind, "nearest", patterns=patterns)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # sums in another order


@pytest.mark.parametrize("kind", [Muon, NorMuon])
@pytest.mark.parametrize(
    ("module", "rows"),
    [
        (nn.Conv2d(8, 16, 3, bias=False), 16),
        (nn.Conv3d(4, 16, 2, bias=False), 16),
        (nn.ConvTranspose1d(16, 8, 3, bias=False), 16),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "how"),
    [(torch.float32, "nearest"), (torch.bfloat16, "nearest"), (torch.bfloat16, "master")],
)
def test_a_convolution_is_one_matrix(
    kind: type[Muon], module: nn.Module, rows: int, dtype: torch.dtype, how: str
) -> None:
    model = within("blocks.0.conv", copy.deepcopy(module)).to(dtype)
    assert views_of(model, patterns={r".*conv\.weight": "adamw"}) == {}
    (views,) = views_of(model, flatten_conv=True).values()
    is_transposed = isinstance(module, nn.ConvTranspose1d)
    assert [(v.operator_type, v.boxes, v.dim) for v in views] == [("conv", None, is_transposed)]
    assert views_of(model, patterns={r".*conv\.weight": "conv"}).popitem()[1] == views
    columns = math.prod(next(model.parameters()).shape) // rows
    twin = Conv1D(columns, rows) if is_transposed else nn.Linear(columns, rows, bias=False)
    expected = trained(within("blocks.0.conv", twin).to(dtype), kind, how, patterns={".*": "conv"})
    assert torch.equal(trained(model, kind, how, flatten_conv=True).flatten(1), expected)


def attention(kind: str = "Attention", /, **shapes: tuple[int, int]) -> nn.Module:
    module = type(kind, (nn.Module,), {})()
    for name, (rows, columns) in shapes.items():
        module.add_module(name, nn.Linear(columns, rows, bias=False))
    return module


def rows_of(views: Sequence[MatrixView]) -> list[str]:
    boxes = sorted((box[0], view.operator_type) for view in views for box in view.boxes or ())
    return [f"{kind} {start}-{stop}" for (start, stop), kind in boxes]


@pytest.mark.parametrize("kind", ["Qwen3NextAttention", "Qwen3_5MoeAttention", "Qwen35Attention"])
@pytest.mark.parametrize("names", [("self_attn", "q_proj", "o_proj"), ("attn", "wq", "wo")])
def test_queries_and_gates_in_turn_by_head(names: tuple[str, str, str], kind: str) -> None:
    block, query, output = names
    module = attention(kind, **{query: (16, 6), output: (6, 8)})
    model = within(f"layers.0.{block}", module)
    views = views_of(model)[f"layers.0.{block}.{query}.weight"]
    assert [view.operator_type for view in views] == ["attn_q"]  # no module gives the heads
    module.head_dim = 4
    views = views_of(within(f"layers.0.{block}", module))[f"layers.0.{block}.{query}.weight"]
    assert rows_of(views) == ["attn_q 0-4", "attn_gate 4-8", "attn_q 8-12", "attn_gate 12-16"]
    views = views_of(model, per_head=True)[f"layers.0.{block}.{query}.weight"]
    assert [view.operator_type for view in views] == ["attn_q", "attn_q", "attn_gate"]
    # A wide query is a gate in these classes alone: DeepSeek's has more rows than values.
    module.__class__ = nn.Module
    views = views_of(model)[f"layers.0.{block}.{query}.weight"]
    assert [view.operator_type for view in views] == ["attn_q"]


def test_linear_attention_in_one_projection() -> None:
    # Two key heads of 2 rows, four value heads of 3.
    shapes = {"in_proj_qkv": (4 + 4 + 12, 6), "in_proj_qkvz": (32, 6), "out_proj": (6, 12)}
    module = attention(**shapes)
    module.head_k_dim, module.head_v_dim = 2, 3
    model = within("layers.0.linear_attn", module)
    views = views_of(model)
    rows = rows_of(views["layers.0.linear_attn.in_proj_qkv.weight"])
    assert rows == ["attn_q 0-4", "attn_k 4-8", "attn_v 8-20"]
    assert rows_of(views["layers.0.linear_attn.in_proj_qkvz.weight"]) == [
        *("attn_q 0-2", "attn_k 2-4", "attn_v 4-10", "attn_gate 10-16"),
        *("attn_q 16-18", "attn_k 18-20", "attn_v 20-26", "attn_gate 26-32"),
    ]
    heads = views_of(model, per_head=True)["layers.0.linear_attn.in_proj_qkv.weight"]
    assert [view.operator_type for view in heads].count("attn_v") == 4


def test_adapters_go_to_adamw() -> None:
    module = nn.Module()
    for field in ("hada_w1_a", "lokr_w2", "lora_E", "ia3_l", "oft_R", "boft_s", "hra_u"):
        setattr(module, field, nn.ParameterDict({"default": torch.randn(4, 8)}))
    module.base_layer = nn.Linear(8, 8, bias=False)
    views = views_of(within("layers.0.self_attn.q_proj", module))
    assert list(views) == ["layers.0.self_attn.q_proj.weight"]


def test_parametrized_and_saved_modules_keep_their_names() -> None:
    linear = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8, bias=False))
    views = views_of(within("layers.0.self_attn.modules_to_save.default.q_proj", linear))
    assert list(views) == ["layers.0.self_attn.q_proj.weight"]
    odd = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8, bias=False))
    assert list(views_of(within("layers.0.odd", odd), unknown="matrix")) == ["layers.0.odd.weight"]


def test_no_decay_of_norms_biases_and_embeddings_by_one_flag() -> None:
    model = nn.Module()
    model.table = nn.Embedding(8, 4)
    model.layers = nn.ModuleList([attention(q_proj=(4, 4))])
    model.layers[0].norm = nn.LayerNorm(4)
    model.head = nn.Linear(4, 8)
    patterns = {r".*q_proj\.weight": "attn_q"}
    groups = param_groups(model, patterns=patterns, no_decay=True)
    undecayed = {n for g in groups if g.get("weight_decay") == 0 for n, _ in g["params"]}
    norm = {"layers.0.norm.weight", "layers.0.norm.bias"}
    assert undecayed == {"table.weight", *norm, "head.bias"}
