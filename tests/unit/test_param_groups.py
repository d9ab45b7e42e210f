from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from amo_dist import Fused, Muon
from amo_dist.operators.groups import param_groups
from amo_dist.operators.views import MatrixView
from tests import runs
from tests.distributed import models
from tests.operators import module_of, pasted, types_of

BLOCK = {
    "tok_embeddings.weight": (10, 4),
    "layers.0.attention.wq.weight": (4, 4),
    "layers.0.attention.wq.bias": (4,),
    "layers.0.feed_forward.w1.weight": (8, 4),
    "layers.1.attention.wq.weight": (4, 4),
    "layers.1.feed_forward.w1.weight": (8, 4),
    "norm.weight": (4,),
}


def test_groups_of_a_decoder() -> None:
    kinds = {"attention.wq.weight": "attn_q", "feed_forward.w1.weight": "mlp_gate"}
    expected = {f"layers.{n}.{tail}": kind for n in range(2) for tail, kind in kinds.items()}
    muon, adamw = param_groups(module_of(BLOCK))
    assert types_of(module_of(BLOCK)) == expected
    assert [name for name, _ in muon["params"]] == list(muon["matrix_views"])
    assert {name for name, _ in muon["params"] + adamw["params"]} == BLOCK.keys()
    assert muon.keys() == {"params", "algorithm", "matrix_views"}
    assert adamw.keys() == {"params", "algorithm"}
    assert (muon["algorithm"], adamw["algorithm"]) == ("muon", "adamw")
    assert muon["matrix_views"]["layers.0.attention.wq.weight"] == (MatrixView("", "attn_q", None),)


@pytest.mark.parametrize("name", ["experts.w2", "routed_experts.inner_experts.w2_EDF"])
def test_each_expert_is_a_matrix(name: str) -> None:
    shapes = {f"layers.0.moe.{name}": (3, 4, 8), "layers.0.moe.router.gate.weight": (3, 4)}
    muon, adamw = param_groups(module_of(shapes))
    assert [found for found, _ in adamw["params"]] == ["layers.0.moe.router.gate.weight"]
    (views,) = muon["matrix_views"].values()
    assert [view.suffix for view in views] == ["[0]", "[1]", "[2]"]
    assert views[1].boxes == (((1, 2), (0, 4), (0, 8)),)


def test_frozen_parameters_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    model = module_of({**BLOCK, "layers.0.what.matrix": (16, 16)})  # unknown, but no error
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" in name)
    groups = param_groups(model, report=True)
    assert [name for group in groups for name, _ in group["params"]] == [
        "layers.1.attention.wq.weight",
        "layers.1.feed_forward.w1.weight",
    ]
    # No group for AdamW, for it would be empty.
    assert [group["algorithm"] for group in groups] == ["muon"]
    (rest,) = param_groups(module_of({"norm.weight": (4,), "output.weight": (10, 4)}))
    assert rest["algorithm"] == "adamw"
    assert "6 frozen parameters left out" in capsys.readouterr().out


def test_tied_parameters_appear_once_under_the_first_name() -> None:
    model = module_of({"tok_embeddings.weight": (10, 4), "layers.0.attention.wq.weight": (4, 4)})
    head = nn.Module()
    head.weight = model.get_parameter("tok_embeddings.weight")
    model.output = head
    groups = param_groups(model)
    assert [[name for name, _ in group["params"]] for group in groups] == [
        ["layers.0.attention.wq.weight"],
        ["tok_embeddings.weight"],
    ]
    with pytest.raises(ValueError, match=r"matches no parameter.*a tied parameter's first"):
        param_groups(model, lr_multipliers={r"output\.weight": 2.0})
    # Across parts as well.
    assert len(param_groups([model, head])[1]["params"]) == 1


def test_parts_of_one_model() -> None:
    items = [*BLOCK.items()]
    first, second = (module_of(dict(part)) for part in (items[:4], items[4:]))
    assert types_of([first, second]) == types_of(module_of(BLOCK))
    with pytest.raises(ValueError, match=r"two parameters 'layers\.1"):
        param_groups([module_of(BLOCK), second])


def by_scale(groups: list[dict[str, Any]], rate: float) -> None:
    """timm, MAE and BEiT."""
    for group in groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)


def by_multiplier(groups: list[dict[str, Any]], rate: float) -> None:
    """dinov2 and dinov3."""
    for group in groups:
        group["lr"] = rate * group["lr_multiplier"]


@pytest.mark.parametrize(
    ("key", "schedule"), [("lr_scale", by_scale), ("lr_multiplier", by_multiplier)]
)
def test_a_factor_that_a_scheduler_multiplies_into_lr_is_not_applied_again(
    key: str, schedule: Callable[[list[dict[str, Any]], float], None]
) -> None:
    def trained(rate: float, own: float, **note: float) -> Any:
        model = models.plain_model(runs.SHAPES)
        groups = param_groups(model, lr_multipliers={".*": own})
        optimizer = Muon([{**group, **note} for group in groups], lr=123.0)
        for group in optimizer.param_groups:
            assert group["muon_lr_factor"] == own
        if note:
            schedule(optimizer.param_groups, rate)
        else:
            for group in optimizer.param_groups:
                group["lr"] = rate
        return runs.train(model, optimizer)

    # Powers of two, so that products are exact.
    assert runs.equal(trained(2**-6, 0.5, **{key: 0.5}), trained(2**-7, 0.5))
    # Nothing of ours reads the note.
    assert not runs.equal(trained(2**-6, 0.5, **{key: 0.5}), trained(2**-8, 0.5))


def test_no_decay_and_multipliers_split_the_groups() -> None:
    groups = param_groups(
        module_of(BLOCK),
        no_decay=[r".*norm\.weight", r".*bias"],
        lr_multipliers={r"layers\.1\..*": 0.5, r"tok_.*": 2, r".*wq.*": 3.0},
    )
    options = ("algorithm", "weight_decay", "muon_lr_factor")
    found = [
        (*map(group.get, options), " ".join(name for name, _ in group["params"]))
        for group in groups
    ]
    assert found == [
        ("muon", None, None, "layers.0.feed_forward.w1.weight"),
        ("muon", None, 0.5, "layers.1.attention.wq.weight layers.1.feed_forward.w1.weight"),
        ("muon", None, 3.0, "layers.0.attention.wq.weight"),
        ("adamw", None, 2.0, "tok_embeddings.weight"),
        ("adamw", 0.0, None, "norm.weight"),
        ("adamw", 0.0, 3.0, "layers.0.attention.wq.bias"),
    ]
    for group in groups[:3]:
        assert list(group["matrix_views"]) == [name for name, _ in group["params"]]


def test_unused_expressions_pass_where_allowed_or_covered() -> None:
    unused: dict[str, Any] = {"patterns": {"atention": "attn_q"}, "lr_multipliers": {"layers": 2.0}}
    assert len(param_groups(module_of(BLOCK), allow_unused=True, no_decay=["norm"], **unused)) == 2
    covered = {".*wq.weight": "attn_q", "layers.0.attention.wq.weight": None}
    assert len(param_groups(module_of(BLOCK), patterns=covered)) == 2


X = "layers.0.x"
UNUSED = ", which matches no parameter"
QKV = Fused((("attn_q", 8), ("attn_k", 4), ("attn_v", 4)))
HEADS = {"layers.0.attention.wq.weight": (12, 8), "layers.0.attention.wo.weight": (8, 12)}


@pytest.mark.parametrize(
    ("model", "options", "field"),
    [
        (nn.Linear(2, 2, bias=False).requires_grad_(False), {}, "model"),
        (nn.Linear(2, 2).parameters(), {}, "model"),
        # By its name, as a real one wants a process group.
        (nn.Sequential(type("FullyShardedDataParallel", (nn.Module,), {})()), {}, "FullySharded"),
        *[(BLOCK, {"lr_multipliers": {".*": rate}}, "lr_multipliers") for rate in (0.0, math.nan)],
        (BLOCK, {"no_decay": "norm.weight"}, "no_decay"),
        (BLOCK, {"patterns": {"layers.0.atention.*": "attn_q"}}, f"^patterns: found '.*{UNUSED}"),
        (BLOCK, {"no_decay": ["norm"]}, f"^no_decay: found 'norm'{UNUSED}"),
        (BLOCK, {"lr_multipliers": {"layers": 2.0}}, f"^lr_multipliers: found 'layers'{UNUSED}"),
        (BLOCK, {"unknown": "adamw"}, "unknown"),
        ({"layers.0.mixing": (30, 40, 40)}, {"unknown": "matrix"}, "patterns"),
        ({X: (4, 4)}, {"patterns": {"(": "attn_q"}}, "patterns"),
        ({X: (4, 4)}, {"patterns": {".*": "attn/q"}}, "operator type"),
        ({X: (4, 4)}, {"patterns": {".*": 3}}, r"patterns\['\.\*'\]"),
        ({X: (4,)}, {"patterns": {".*": "attn_q"}}, X),
        ({X: (4, 4, 3, 3, 3)}, {"patterns": {".*": "conv"}}, X),
        ({X: (15, 4)}, {"patterns": {".*": QKV}}, X),
        (HEADS, {"per_head": True}, "per_head: .*wq.* no module"),
        (HEADS, {"per_head": 5}, "per_head: .*wq.* found 12 rows"),
        (HEADS, {"per_head": 1}, "per_head: found 1, expected True, False or"),
    ],
)
def test_mistakes_name_the_argument_or_the_parameter(
    model: Any, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(ValueError, match=field):
        param_groups(module_of(model) if isinstance(model, dict) else model, **options)


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    shapes = {**BLOCK, "transformer.h.0.attn.c_attn.weight": (12, 4), "mapping.weight": (2, 4)}
    shapes["layers.0.attention.query_key_value.weight"] = (13, 4)
    param_groups(module_of(shapes), report=True)
    text = capsys.readouterr().out
    by_name = {line.split()[0]: line for line in text.splitlines() if line}
    for name, kind in (
        ("layers.0.attention.wq.weight", "attn_q"),
        ("transformer.h.0.attn.c_attn.weight", "attn_q, attn_k, attn_v (3 matrices)"),
        ("layers.0.attention.query_key_value.weight", "attn_qkv (fused, as one matrix)"),
        ("tok_embeddings.weight", "adamw (embedding)"),
        ("mapping.weight", "adamw (outside of any block)"),
    ):
        assert kind in by_name[name]
    assert shapes.keys() <= by_name.keys()


MIXER = {
    "embed.weight": (10, 4),
    **{f"blocks.{n}.mixer.receptance": (16, 24) for n in range(2)},
    "blocks.0.mixer.mix_weight": (16, 24),
    "blocks.0.first.0.kernel": (16, 24),
    "blocks.0.first.1.scan": (16, 24),
    "blocks.0.first.2.kernel": (16, 24),
    "blocks.0.attn.proj.weight": (4, 4),
    "0.weight": (4, 4),
    "blocks.0.norm.weight": (4,),
}
PATTERNS = r"""patterns = {
    r"blocks\.\d+\.mixer\.receptance": "adamw",  # 2 of (16, 24)
    r"blocks\.\d+\.mixer\.mix_weight": "mixer_mix_weight",  # 1 of (16, 24)
    r"blocks\.\d+\.first\.\d+\.kernel": "first_kernel",  # 2 of (16, 24)
    r"blocks\.\d+\.first\.\d+\.scan": "adamw",  # 1 of (16, 24)
}"""


def test_an_error_prints_patterns_for_the_whole_model() -> None:
    with pytest.raises(
        ValueError, match=r"^patterns: .*\(6\), first .'blocks.0.mixer.receptance"
    ) as caught:
        param_groups(module_of(MIXER))
    assert PATTERNS in str(caught.value)
    types = types_of(module_of(MIXER), patterns=pasted(PATTERNS))
    assert types["blocks.0.first.2.kernel"] == "first_kernel"


def test_lines_to_paste_match_the_refused_names_alone() -> None:
    """Numbers become any number, unless another parameter has such a name."""
    names = [f"blocks.0.projs.{n}.{m}.kernel" for n in range(2) for m in (0, 2)]
    stranger = "blocks.0.projs.0.1.kernel"  # a vector, which no matrix's pattern may match
    model = module_of({**dict.fromkeys(names, (16, 24)), stranger: (24,)})
    with pytest.raises(ValueError, match="kernel") as caught:
        param_groups(model)
    groups = param_groups(model, patterns=pasted(str(caught.value)))
    assert [name for name, _ in groups[0]["params"]] == names


def test_unknown_matrices_are_one_type_where_asked_for() -> None:
    embedding = nn.Embedding(10, 4)
    plain = nn.Sequential(embedding, nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    _, adamw = param_groups(plain, unknown="matrix")
    assert types_of(plain, unknown="matrix") == {"1.weight": "matrix", "3.weight": "matrix"}
    assert adamw["params"][0] == ("0.weight", embedding.weight)
    with pytest.raises(ValueError, match="found no matri") as caught:
        Muon(param_groups(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))))
    assert [*pasted(str(caught.value)).values()] == ["matrix"]
    known = {"layers.0.attention.wq.weight": (4, 4), "tok_embeddings.weight": (10, 4)}
    unknown = {"layers.0.mixing": (16, 16), "mapping.weight": (4, 4)}
    heads = {"output.weight": (10, 4), "lm_head.weight": (10, 4), "classifier.dense.weight": (4, 4)}
    model = module_of({**known, **unknown, **heads, "layers.0.norm.weight": (4,)})
    expected = {"layers.0.attention.wq.weight": "attn_q", **dict.fromkeys(unknown, "matrix")}
    assert types_of(model, unknown="matrix") == expected
    patterns = {r"mapping\.weight": "adamw", r"output\.weight": "head"}
    named = types_of(model, unknown="matrix", patterns=patterns)
    del expected["mapping.weight"]
    assert named == {**expected, "output.weight": "head"}
    with pytest.raises(ValueError, match=r"layers\.0\.mixing.*unknown='matrix'"):
        param_groups(model)
