"""Every parameter of some seventy models, by name: `tests/families.py` records them."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Iterator

import pytest

from tests.examples import fill
from tests.families import PAGE, RECORD, Line, classified, expand, table
from tests.operators import classify

RECORDED: dict[str, dict[str, dict[str, str]]] = json.loads(RECORD.read_text())
FAMILIES = [(release, family) for release, families in RECORDED.items() for family in families]


@functools.cache
def parameters(release: str, family: str) -> dict[str, Line]:
    return expand(RECORDED[release][family])


def everything() -> Iterator[tuple[str, Line]]:
    for release, family in FAMILIES:
        yield from parameters(release, family).items()


@pytest.mark.parametrize(
    ("release", "family"),
    [
        pytest.param(*one, marks=[pytest.mark.slow] if one[0].startswith("transformers 4") else [])
        for one in FAMILIES
    ],
)
def test_every_parameter_is_what_the_record_says(release: str, family: str) -> None:
    recorded = parameters(release, family)
    assert classified(recorded) == recorded


# The record is a snapshot of what the tables say. What follows knows nothing of the tables: the
# classes of the modules, and names that have one meaning in all of these libraries.
TO_ADAMW = re.compile("Embedding|Router|MoEGate|Norm|Conv[123]d|PositionBias|LayerScale")
ADAMW_PARTS = re.compile(
    r"(?x) (^|\.) ( \w*bias | lm_head | (\w+_)?head | classifier | cls | predictions | \w*router\w*"
    r" | \w*relative_position\w*(?<!_embedding) | rel_pos_[hw] | \w*position_bias_mlp | wte | wpe"
    r" | \w*(tok|token|word|position)_?embed\w* | \w*pos_embed | shared_expert_gate | A_log | D"
    r" | (cls|mask|query|iou)_tokens? ) (\.|$)"
)
LINEAR_TO_ADAMW = re.compile(
    r".*(router(\.layer)?|(mlp|block_sparse_moe)\.gate|shared_expert_gate|in_proj_(a|b|ba)"
    r"|continuous_position_bias_mlp\.\d|_adapter_list\.\d\.\d)\.weight"
)
INSIDE = re.compile(r"(^|\.)(layers?|blocks?|h|albert_layers|conformer)\.\d+\.")


def test_what_is_no_matrix_of_a_block_goes_to_adamw() -> None:
    wrong = [
        (name, line)
        for name, line in everything()
        if line[2] not in ("adamw", "unknown")
        and (TO_ADAMW.search(line[1]) or ADAMW_PARTS.search(name) or not INSIDE.search(name))
    ]
    assert wrong == []


def test_every_linear_layer_of_a_block_is_a_matrix() -> None:
    wrong = [
        (name, line)
        for name, line in everything()
        if line[2] == "adamw"
        and len(line[0]) > 1
        and re.search("Linear|^Conv1D$|Experts", line[1])
        and INSIDE.search(name)
        and not (LINEAR_TO_ADAMW.fullmatch(name) or name.endswith("bias"))
    ]
    assert wrong == []


@pytest.mark.slow
def test_the_page_shows_the_record() -> None:
    assert PAGE.read_text() == fill(PAGE.read_text(), "families", table(RECORDED)), (
        "run `python -m tests.families` to rewrite the table of docs/families.md"
    )


QKV = ("attn_q", "attn_k", "attn_v")
PHI = "layers.0.self_attn.qkv_proj.weight"


@pytest.mark.parametrize(
    ("name", "shape", "sizes", "dim"),
    [
        # 96 rows of queries, for o_proj below has 96 columns.
        (PHI, (160, 32), {"attn_q": 96, "attn_k": 32, "attn_v": 32}, 0),
        ("blocks.0.attn.qkv.weight", (24, 8), dict.fromkeys(QKV, 8), 0),
        ("layers.0.attn.Wqkv.weight", (24, 8), dict.fromkeys(QKV, 8), 0),
        ("layers.0.self_attn.in_proj_weight", (24, 8), dict.fromkeys(QKV, 8), 0),
        ("h.0.attn.c_attn.weight", (8, 24), dict.fromkeys(QKV, 8), 1),
        ("layers.0.mlp.gate_up_proj.weight", (24, 8), {"mlp_gate": 12, "mlp_up": 12}, 0),
        ("layers.0.mlp.Wi.weight", (24, 8), {"mlp_gate": 12, "mlp_up": 12}, 0),
    ],
)
def test_parts_of_fused_matrices(
    name: str, shape: tuple[int, int], sizes: dict[str, int], dim: int
) -> None:
    views = classify(name, shape, shapes={PHI.replace("qkv", "o"): (32, 96)}) or ()
    assert [(v.operator_type, v.dim) for v in views] == [(kind, dim) for kind in sizes]
    places = itertools.pairwise([0, *itertools.accumulate(sizes.values())])
    assert [view.boxes[0][dim] for view in views if view.boxes] == [*places]


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
