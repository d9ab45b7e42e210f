from __future__ import annotations

import math
import re

import pytest
import torch

from amo_dist.operators.views import Fused, MatrixView
from tests.layouts import cut_view
from tests.operators import classify, pasted


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        # What models of libraries have: see test_families.py.
        # one row of a matrix, and wrappers
        ("layers.0.attention.wk.weight", (1, 8), "attn_k"),
        ("layers.0.attention.qkv_linear.wq.weight", (8, 8), "attn_q"),
        ("layers.0.attention.wo.weight", (8, 8), "attn_o"),
        ("_orig_mod.layers.0._checkpoint_wrapped_module.attention.wq.weight", (8, 8), "attn_q"),
        # linear attention, vision towers, and the block of a multi-token prediction
        ("layers.0.attn.in_proj_v.weight", (8, 8), "attn_v"),
        ("layers.0.attn.out_proj.weight", (8, 8), "attn_o"),
        ("layers.0.attention.o_gate.weight", (8, 8), "attn_gate"),
        ("vision_encoder.layers.0.attn.proj.weight", (8, 8), "attn_o"),
        ("mtp_layers.0.eh_proj.weight", (8, 16), "mtp_proj"),
        ("layers.0.attention.wq_a.weight", (4, 8), "mla_q_a"),
        # AdamW
        ("model.layers.61.embed_tokens.weight", (100, 8), None),
        ("layers.0.moe.experts.mlp1_bias", (4, 8), None),
        ("layers.0.moe.shared_experts.gate.weight", (1, 8), None),
        ("layers.0.attn.in_proj_a.weight", (4, 8), None),
        ("layers.0.moe.router.gate.weight", (4, 8), None),
        ("layers.0.self_attn.q_proj.lora_A.default.weight", (4, 8), None),
        ("layers.0.scale", (), None),
        # short names mean nothing outside of blocks
        ("head.mlp.fc1.weight", (24, 8), None),
        ("predictions.transform.dense.weight", (24, 8), None),
        ("decoder.attention.query.weight", (24, 8), None),
        # queries, keys and values in parts of unknown sizes are one matrix
        ("transformer.h.0.attn.c_attn.weight", (12, 8), "attn_qkv"),
    ],
)
def test_names(name: str, shape: tuple[int, ...], expected: str | None) -> None:
    views = classify(name, shape)
    assert views == (None if expected is None else (MatrixView("", expected, None),))


@pytest.mark.parametrize(
    ("name", "shape", "suggestion"),
    [
        ("layers.0.mixer.w_mix", (24, 8 + 1), "mixer_w_mix"),
        ("embedder.layers.0.mixing", (12, 16), "adamw"),
        ("layers.0.lstm.weight_hh_l0", (64, 16), "adamw"),
        # Three dims, and nothing that says what the first one counts.
        ("transformer.layer.0.rel_attn.q", (64, 2, 32), "adamw"),
        ("layers.0.rg_lru.input_gate_weight", (3, 16, 16), "adamw"),
    ],
)
@pytest.mark.parametrize("unknown", ["error", "matrix"])
def test_an_unknown_tensor_is_an_error(
    name: str, shape: tuple[int, ...], suggestion: str, unknown: str
) -> None:
    if unknown == "matrix" and len(shape) == 2:
        assert classify(name, shape, unknown=unknown) == (MatrixView("", "matrix", None),)
        return
    with pytest.raises(ValueError, match=re.escape(name)) as caught:
        classify(name, shape, unknown=unknown)
    message = str(caught.value)
    assert str(shape) in message
    # The remedies that it names work.
    patterns = pasted(message)
    assert [*patterns.values()] == [suggestion]
    assert (classify(name, shape, patterns) is None) == (suggestion == "adamw")
    assert classify(name, shape, {re.escape(name): "adamw"}) is None
    views = classify(name, shape, {re.escape(name): "attn_q"}) or ()
    # One matrix for each place in the leading dims, with a name of its own.
    assert len({view.suffix for view in views}) == math.prod(shape[:-2])


QKV = Fused((("attn_q", 8), ("attn_k", 4), ("attn_v", 4)))


@pytest.mark.parametrize(
    ("heads", "rows"),
    [
        ({}, "q q q q k k v v q q q q k k v v"),
        # Four heads of two rows of queries. One of keys is in both groups.
        (
            {"attn_q": 4, "attn_k": 1, "attn_v": 2},
            "q.0 q.0 q.1 q.1 k.0 k.0 v.0 v.0 q.2 q.2 q.3 q.3 k.0 k.0 v.1 v.1",
        ),
    ],
)
def test_fused_rows_interleaved_by_group(heads: dict[str, int], rows: str) -> None:
    """Two groups of keys and values; the matrix of each row."""
    fused = Fused(QKV.parts, groups=2, heads=heads)
    views = classify("layers.0.qkv.weight", (16, 3), {r".*qkv\.weight": fused}) or ()
    expected: dict[str, list[int]] = {}
    for row, matrix in enumerate(rows.split()):
        expected.setdefault(f"[attn_{matrix}]", []).append(row)
    parameter = torch.arange(16)[:, None].expand(16, 3)
    assert {v.suffix: cut_view(v, parameter)[:, 0].tolist() for v in views} == expected


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("heads", [{}, {"attn_q": 4}, {"attn_q": 2, "attn_k": 4, "attn_v": 1}])
@pytest.mark.parametrize("num_experts", [None, 3])
def test_fused_covers_every_entry_once(
    dim: int, groups: int, heads: dict[str, int], num_experts: int | None
) -> None:
    fused = Fused(QKV.parts, dim=dim, groups=groups, heads=heads)
    matrix = (16, 5) if dim == 0 else (5, 16)
    shape = matrix if num_experts is None else (num_experts, *matrix)
    views = classify("layers.0.x", shape, {"layers.0.x": fused}) or ()
    sizes, count = dict(QKV.parts), torch.zeros(shape)
    for view in views:
        for box in view.boxes or ():
            count[tuple(slice(*interval) for interval in box)] += 1
        found = cut_view(view, count)
        assert found.shape[dim] == sizes[view.operator_type] // heads.get(view.operator_type, 1)
        assert found.shape[1 - dim] == 5
    assert count.eq(1).all()
    num_views = (num_experts or 1) * sum(heads.get(kind, 1) for kind in sizes)
    assert len({view.suffix for view in views}) == len(views) == num_views


PARTS = (("attn_q", 4),)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("parts", parts) for parts in ((), 4, (("attn_q",),), PARTS * 2)],
        *[("parts", (("attn_q", size),)) for size in (0, 16.9, "4", True)],
        *[("operator type", ((kind, 4),)) for kind in ("", "a\nb", "q=1", " q", "AdamW")],
        *[("dim", dim) for dim in (2, True, 0.0)],
        *[("groups", groups) for groups in (0, 3, "4", True)],
        *[("heads", heads) for heads in (4, {"attn_q": 3}, {"attn_q": 2.0}, {"attn_k": 2})],
    ],
)
def test_errors_of_fused_name_the_field(field: str, value: object) -> None:
    argument = "parts" if field == "operator type" else field
    with pytest.raises(ValueError, match=field):
        Fused(**{"parts": PARTS, argument: value})  # type: ignore[arg-type]


def test_user_patterns_win_and_match_the_whole_name() -> None:
    name = "layers.0.attention.wq.weight"
    for target in (None, "adamw", "AdamW"):
        assert classify(name, (4, 4), {r"layers\.0\..*": target}) is None
    assert classify(name, (4, 4), {"wq": None}) == (MatrixView("", "attn_q", None),)
    first = classify(name, (4, 4), {".*wq.*": "first", ".*": "second"})
    assert first == (MatrixView("", "first", None),)
    assert classify("tok_embeddings.weight", (9, 4), {"tok.*": "emb"}) is not None
    # Cleaned before matching.
    assert classify(f"module.{name}", (4, 4), {name: None}) is None


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("layer1.0.conv1.weight", (8, 4, 3, 3), "conv"),
        ("stages.1.downsample.1.weight", (8, 4, 2, 2), "conv"),
        # Depthwise, the first one of the model, and one that makes patches.
        ("stages.0.blocks.0.conv_dw.weight", (8, 1, 7, 7), None),
        ("conv1.weight", (8, 3, 7, 7), None),
        ("stages.1.patch_embeddings.proj.weight", (8, 4, 3, 3), None),
        ("layers.0.conv.weight", (8, 8, 3), None),
    ],
)
def test_convolutions_are_matrices_by_an_option(
    name: str, shape: tuple[int, ...], expected: str | None
) -> None:
    assert classify(name, shape) is None
    views = None if expected is None else (MatrixView("", expected, None),)
    assert classify(name, shape, flatten_conv=True) == views
    if len(shape) == 4:
        assert classify(name, shape, {".*": "mine"}) == (MatrixView("", "mine", None),)


GATE_UP = "layers.0.mlp.experts.gate_up_proj"
DOWN = "layers.0.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ({GATE_UP: (2, 12, 8), DOWN: (2, 8, 6)}, ("expert_gate", ((0, 1), (0, 6), (0, 8)))),
        ({GATE_UP: (2, 8, 12), DOWN: (2, 6, 8)}, ("expert_gate", ((0, 1), (0, 8), (0, 6)))),
        # A bias, as gpt-oss alone has: rows of both in turn.
        (
            {GATE_UP: (2, 8, 12), DOWN: (2, 6, 8), f"{GATE_UP}_bias": (2, 12)},
            ("expert_gate_up", ((0, 1), (0, 8), (0, 12))),
        ),
        ({GATE_UP: (2, 12, 8)}, ("expert_gate_up", ((0, 1), (0, 12), (0, 8)))),
    ],
)
def test_parts_of_fused_experts(
    shapes: dict[str, tuple[int, ...]], expected: tuple[str, object]
) -> None:
    view, *_ = classify(GATE_UP, shapes[GATE_UP], shapes=shapes) or ()
    assert (view.operator_type, (view.boxes or ())[0]) == expected
    assert view.dim == (shapes[GATE_UP] == (2, 8, 12))  # outputs are columns
