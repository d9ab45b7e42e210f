"""Models of nobody's names: what the modules say decides, and nothing is silent."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from amo_dist import Fused, param_groups
from amo_dist.operators.views import MatrixView
from tests.operators import types_of, views_of

D, H, E = 32, 48, 7


class Map(nn.Linear):
    """A linear module of the user's own class."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)


class Own(nn.Module):
    """A linear module that is none of PyTorch's, but says its sizes."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.weight = nn.Parameter(torch.randn(outputs, inputs))


class Block(nn.Module):
    """Attention and feed-forward, whose leaves have names that no table knows."""

    def __init__(self, linear: type[nn.Module] = Map) -> None:
        super().__init__()
        self.mix = nn.ModuleDict({"abc": linear(D, D), "back": linear(D, D)})
        self.think = nn.ModuleDict({"wide": linear(D, H), "narrow": linear(H, D)})
        self.norm = nn.LayerNorm(D)


class Other(Block):
    """A block of another class, between the others."""


def numbered(prefix: str, blocks: list[nn.Module]) -> nn.Module:
    module = nn.Module()
    for number, block in enumerate(blocks):
        module.add_module(f"{prefix}_{number}", block)
    return module


CONTAINERS: dict[str, Callable[[list[nn.Module]], nn.Module]] = {
    "trunk": nn.ModuleList,
    "tower": lambda blocks: nn.Sequential(*blocks),
    "words": lambda blocks: nn.ModuleDict(dict(zip("abc", blocks, strict=True))),
    "siblings": lambda blocks: numbered("stone", blocks),
    "nested": lambda blocks: nn.ModuleList([nn.ModuleList(blocks[:2]), nn.ModuleList(blocks[2:])]),
}


@pytest.mark.parametrize("linear", [Map, Own])
@pytest.mark.parametrize("blocks", [(Block,) * 3, (Block, Other, Block)])
@pytest.mark.parametrize("container", CONTAINERS)
def test_every_linear_module_of_a_block_is_a_matrix(
    container: str, blocks: tuple[type[Block], ...], linear: type[nn.Module]
) -> None:
    model = nn.Module()
    model.table = nn.Embedding(50, D)
    model.body = CONTAINERS[container]([kind(linear) for kind in blocks])
    model.out = nn.Linear(D, 50, bias=False)
    matrices, others = param_groups(model)
    assert len(matrices["params"]) == 12
    assert {name for name, p in others["params"] if p.dim() > 1} == {"table.weight", "out.weight"}


@pytest.mark.parametrize("name", ["layers", "trunk"])
def test_a_model_of_one_layer(name: str) -> None:
    """A lone element counts by the name of its list, or if its maps lead back to its inputs."""
    model = nn.Module()
    model.add_module(name, nn.ModuleList([Block()]))
    assert len(types_of(model)) == 4
    pooler = nn.Module()
    pooler.rest = nn.ModuleList([nn.Sequential(nn.Linear(D, 2 * D), nn.Linear(2 * D, 7))])
    assert types_of(pooler) == {}


def test_lists_of_linear_modules_and_heads_are_no_blocks() -> None:
    model = nn.Module()
    model.trunk = nn.ModuleList([Block(), Block()])
    model.maps = nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D)])
    model.bbox_embed = nn.ModuleList([nn.Sequential(nn.Linear(D, D), nn.Linear(D, 4))] * 2)
    model.attn1, model.attn2 = Block(), Block()  # siblings without an underscore
    assert {name.split(".")[0] for name in types_of(model)} == {"trunk"}


def test_the_ends_of_models_in_a_dictionary_are_no_matrices() -> None:
    def model() -> nn.Module:
        whole = Other()
        whole.table, whole.head = nn.Embedding(50, D), nn.Linear(D, 50)
        return whole

    types = types_of(nn.ModuleDict({"student": model(), "teacher": model()}))
    assert {name.split(".")[1] for name in types} == {"mix", "think"}


class Mixture(nn.Module):
    """A mixture whose experts' matrices are stacked, behind a router that is a raw tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(E, D))
        self.w_rise = nn.Parameter(torch.randn(E, H, D))
        self.w_fall = nn.Parameter(torch.randn(E, D, H))
        self.shifts = nn.Parameter(torch.randn(6, D))


class ListOfExperts(nn.Module):
    """A mixture whose experts are modules, behind a router in a module of its own."""

    def __init__(self, spare: int = 0) -> None:
        super().__init__()
        self.chooser = nn.Sequential(nn.Linear(D, E + spare, bias=False))
        self.mlps = nn.ModuleList([Block().think for _ in range(E)])
        self.shared = nn.Linear(D, E, bias=False)  # as many rows, and no router


@pytest.mark.parametrize(
    ("make", "router", "matrices"),
    [
        (Mixture, "gate", 2 * E),
        (ListOfExperts, "chooser.0.weight", 2 * E + 1),
        (lambda: ListOfExperts(1), "chooser.0.weight", 2 * E + 1),
    ],
)
def test_experts_are_matrices_and_their_router_is_none(
    make: Callable[[], nn.Module], router: str, matrices: int
) -> None:
    model = nn.Module()
    model.trunk = nn.ModuleList([nn.ModuleDict({"moe": make(), **Block().mix}) for _ in range(2)])
    views = views_of(model)
    assert sum(len(own) for own in views.values()) == 2 * (matrices + 2)
    rest = {n for g in param_groups(model) if g["algorithm"] == "adamw" for n, _ in g["params"]}
    assert f"trunk.0.moe.{router}" in rest
    if make is Mixture:
        assert {name.rpartition(".")[2] for name in rest} == {"gate", "shifts"}


@pytest.mark.parametrize("shapes", [[(E, H, D), (E, D, H)], [(E * H, D), (E * H, D)]])
def test_matrices_of_nobody_s_experts_are_an_error(shapes: list[tuple[int, ...]]) -> None:
    """Without a router, or one below the other, as OLMo-core stores them."""
    own = nn.Module()
    own.w_rise, own.w_fall = (nn.Parameter(torch.randn(shape)) for shape in shapes)
    with pytest.raises(ValueError, match="w_rise"):
        param_groups(nn.ModuleDict({"layers": nn.ModuleList([own])}))


def test_a_matrix_of_a_known_name_is_no_router() -> None:
    """Though it has a row for each expert, as a narrow one may."""
    feed_forward = nn.ModuleDict({"w2": nn.Linear(H, E, bias=False)})
    block = nn.ModuleDict({"feed_forward": feed_forward, "moe": nn.ModuleDict({"x": Mixture()})})
    views = views_of(nn.ModuleDict({"layers": nn.ModuleList([block])}))
    assert views["layers.0.feed_forward.w2.weight"][0].operator_type == "mlp_down"


def test_experts_one_below_the_other() -> None:
    """OLMo-core stores (E * m, n)."""
    mlp = nn.Module()
    vars(mlp).update(num_experts=E)
    mlp.w1 = nn.Parameter(torch.randn(E * H, D))
    blocks = nn.ModuleDict({"0": nn.ModuleDict({"experts": mlp})})
    (views,) = views_of(nn.ModuleDict({"blocks": blocks})).values()
    assert [view.operator_type for view in views] == ["expert_gate"] * E
    assert views[1].boxes == (((H, 2 * H), (0, D)),)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_the_router_says_which_way_experts_are_stored(is_transposed: bool) -> None:
    """torchtune stores (in, out), others (out, in)."""
    experts = nn.Module()
    shapes = {"gate_proj": (E, H, D), "down_proj": (E, D, H), "up_proj": (E, H, D)}
    for name, shape in shapes.items():
        tensor = torch.randn(shape)
        experts.register_parameter(name, nn.Parameter(tensor.mT if is_transposed else tensor))
    moe = nn.ModuleDict({"experts": experts, "router": nn.Linear(D, E, bias=False)})
    views = views_of(nn.ModuleDict({"layers": nn.ModuleList([moe])}))
    assert {own[0].operator_type for own in views.values()} == {
        *("expert_gate", "expert_up", "expert_down")
    }
    assert {view.dim for own in views.values() for view in own} == {int(is_transposed)}


def attention(kind: str = "Mixer", /, heads: int = 4, **maps: tuple[int, int]) -> nn.Module:
    """A block's attention of any class; ``(rows, columns)`` of each map."""
    module: nn.Module = type(kind, (nn.Module,), {})()
    vars(module).update(num_heads=heads)
    for name, (rows, columns) in maps.items():
        module.add_module(name, Map(columns, rows))
    return module


def gate(kind: str) -> nn.Module:
    module: nn.Module = type(kind, (nn.Module,), {})()
    module.proj = Map(D, 2 * H)
    return module


def of_blocks(module: nn.Module, **fields: Any) -> nn.Module:
    vars(module).update(fields)
    model = nn.Module()
    model.trunk = nn.ModuleList([nn.ModuleDict({"own": module})] * 1 + [Block(), Block()])
    model.trunk[0].__class__ = Block
    return model


def rows_of(views: tuple[MatrixView, ...]) -> str:
    """Letters of the types, in the order of storage, with the rows of each piece."""
    boxes = sorted((box[0], view.operator_type) for view in views for box in view.boxes or ())
    return " ".join(f"{kind.rpartition('_')[2][0]}{stop - start}" for (start, stop), kind in boxes)


@pytest.mark.parametrize("name", ["wqkv", "to_qkv", "qkv", "linear_qkv", "query_key_value"])
@pytest.mark.parametrize(
    ("kind", "fields", "rows", "expected"),
    [
        ("Mixer", {}, 3 * 32, "q32 k32 v32"),
        ("Mixer", {"num_kv_heads": 2}, 32 + 2 * 16, "q32 k16 v16"),
        ("Mixer", {}, 32 + 2 * 16, ""),  # no number of key heads says so
        ("GPTNeoXAttention", {}, 3 * 32, "q8 k8 v8 q8 k8 v8 q8 k8 v8 q8 k8 v8"),
        ("GPTBigCodeAttention", {"multi_query": False}, 3 * 32, "q8 k8 v8 " * 3 + "q8 k8 v8"),
        ("GPTBigCodeAttention", {"multi_query": True}, 32 + 2 * 8, "q32 k8 v8"),
        (
            "FalconAttention",
            {"new_decoder_architecture": True, "num_kv_heads": 2},
            32 + 2 * 16,
            "q16 k8 v8 q16 k8 v8",
        ),
        ("FalconAttention", {"multi_query": True, "num_kv_heads": 1}, 32 + 2 * 8, "q32 k8 v8"),
        ("AttentionCl", {"head_first": True}, 3 * 32, "q8 k8 v8 " * 3 + "q8 k8 v8"),
        ("AttentionCl", {"head_first": False}, 3 * 32, "q32 k32 v32"),
        ("Attention", {"key_dim": 4, "val_dim": 8}, 2 * 16 + 32, "q4 k4 v8 " * 3 + "q4 k4 v8"),
        ("WindowAttentionGlobal", {}, 2 * 32, "k32 v32"),
        ("InternLM2Attention", {"num_key_value_heads": 2}, 32 + 2 * 16, "q16 k8 v8 q16 k8 v8"),
        (
            "SelfAttention",
            {"num_query_groups_per_partition": 2, "num_query_groups": 2},
            32 + 2 * 16,
            "q16 k8 v8 q16 k8 v8",
        ),
    ],
)
def test_packed_queries_keys_and_values(
    name: str, kind: str, fields: dict[str, Any], rows: int, expected: str
) -> None:
    model = of_blocks(attention(kind, 4, back=(32, 32), **{name: (rows, 32)}), **fields)
    assert rows_of(views_of(model)[f"trunk.0.own.{name}.weight"]) == expected.strip()


@pytest.mark.parametrize(
    ("rows", "back", "fields", "expected"),
    [
        (2 * 32, (32, 32), {}, "k32 v32"),
        (16 + 32, (32, 32), {}, ""),  # keys of fewer rows than values
        (2 * 16, (32, 48), {"head_dim": 8, "num_kv_heads": 2}, "k16 v16"),
        (2 * 16, (), {"head_dim": 8, "num_kv_heads": 2}, "k16 v16"),
        (16, (), {"head_dim": 16}, ""),  # DeepSeek V4: one head, for keys and values both
    ],
)
def test_packed_keys_and_values(
    rows: int, back: tuple[int, ...], fields: dict[str, Any], expected: str
) -> None:
    maps = {"kv_proj": (rows, 32)} | ({"back": back} if back else {})
    model = of_blocks(attention("Mixer", 4, **maps), **fields)  # type: ignore[arg-type]
    assert rows_of(views_of(model)["trunk.0.own.kv_proj.weight"]) == expected


@pytest.mark.parametrize("sizes", [{}, {"kdim": 24, "vdim": 24}])
def test_attention_of_pytorch_by_any_name(sizes: dict[str, int]) -> None:
    model = of_blocks(nn.MultiheadAttention(D, 4, **sizes))
    types = [kind for name, kind in types_of(model).items() if "own" in name]
    separate = ["attn_q", "attn_k", "attn_v", "attn_o"]
    assert types == (separate if sizes else ["attn_q,attn_k,attn_v", "attn_o"])


def test_outputs_of_gpt2_are_columns() -> None:
    store = type("Conv1D", (nn.Module,), {})()
    store.weight = nn.Parameter(torch.randn(32, 96))
    module = attention(c_proj=(32, 32))
    module.c_attn = store
    views = views_of(of_blocks(nn.ModuleDict({"attn": module})))["trunk.0.own.attn.c_attn.weight"]
    assert [view.operator_type for view in views] == ["attn_q", "attn_k", "attn_v"]
    assert views[1].boxes == (((0, 32), (32, 64)),)
    assert {view.dim for view in views} == {1}


def test_the_projection_behind_gives_the_sizes_where_widths_change() -> None:
    """hiera, SAM 2 and mvit: three times the outputs' width, not the inputs'."""
    model = of_blocks(attention(qkv=(3 * 48, 32), proj=(48, 48)))
    assert rows_of(views_of(model)["trunk.0.own.qkv.weight"]) == "q48 k48 v48"


@pytest.mark.parametrize(
    ("make", "name", "expected"),
    [
        (lambda: nn.ModuleDict({"fc1": Map(D, 2 * H), "fc2": Map(H, D)}), "fc1", "g48 u48"),
        (lambda: nn.Sequential(Map(D, 2 * H), nn.Identity(), Map(H, D)), "0", "g48 u48"),
        # diffusers: a gate's own module in a list, which stores the value first.
        (
            lambda: nn.ModuleList([gate("GEGLU"), Map(H, D)]),
            "0.proj",
            "u48 g48",
        ),
        # No halves: an attention's, one that another module reads whole, two that feed one.
        (lambda: attention(abc=(2 * H, D), back=(D, H)), "abc", ""),
        (lambda: nn.ModuleDict({"a": Map(D, 2 * H), "b": Map(2 * H, D)}), "a", ""),
        (
            lambda: nn.ModuleDict({"a": Map(D, 2 * H), "b": Map(D, H), "c": Map(H, D)}),
            "a",
            "",
        ),
    ],
)
def test_packed_gate_and_up(make: Callable[[], nn.Module], name: str, expected: str) -> None:
    assert rows_of(views_of(of_blocks(make()))[f"trunk.0.own.{name}.weight"]) == expected


def test_packed_gate_and_up_of_experts() -> None:
    experts = Mixture()
    experts.w_rise = nn.Parameter(torch.randn(E, 2 * H, D))
    views = views_of(of_blocks(experts))["trunk.0.own.w_rise"]
    assert [view.operator_type for view in views[:2]] == ["expert_gate", "expert_up"]
    assert views[1].boxes == (((0, 1), (H, 2 * H), (0, D)),)


def test_a_modulation_is_cut_into_its_parts() -> None:
    module = nn.ModuleDict({"adaLN_modulation": nn.Sequential(nn.SiLU(), Map(D, 6 * D))})
    views = views_of(of_blocks(module))["trunk.0.own.adaLN_modulation.1.weight"]
    assert [view.boxes for view in views] == [(((n * D, (n + 1) * D), (0, D)),) for n in range(6)]


def test_what_is_no_matrix_inside_a_block() -> None:
    module = attention(alpha=(4, D), q=(D, D), classes=(3, D), lora_A=(4, D))
    module.adapter = nn.Sequential(Map(D, 8), Map(8, D))
    module.rel_pos = nn.ModuleDict({"mlp": nn.ModuleDict({"fc1": Map(2, D), "fc2": Map(D, 4)})})
    module.time_emb_proj = Map(D, D)
    module.scale_shift_table = nn.Parameter(torch.randn(6, D))
    module.r_k = nn.Parameter(torch.randn(4, 16))
    model = of_blocks(module)
    assert [name for name in types_of(model) if "own" in name] == ["trunk.0.own.q.weight"]


def test_heads_of_own_names_are_divided_where_a_module_says_their_number() -> None:
    model = of_blocks(attention(c_q=(32, D), c_k=(16, D), c_v=(16, D), c_proj=(D, 32)))
    counts = {n: len(v) for n, v in views_of(model, per_head=True).items() if "own" in n}
    assert [*counts.values()] == [4, 2, 2, 1]


@pytest.mark.parametrize("target", ["attn_c_q", Fused((("mine", 32),), heads={"mine": 4})])
def test_types_of_own_names_are_divided_by_head(target: Any) -> None:
    model = of_blocks(attention(c_q=(32, D), c_proj=(D, 32)))
    views = views_of(model, per_head=True, patterns={r".*c_q\.weight": target})
    assert len(views["trunk.0.own.c_q.weight"]) == 4


class Doubtful(nn.Module):
    """Something of each kind that is said."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, D)
        moe = nn.ModuleDict({"own": Mixture()})
        moe.__class__ = Block  # type: ignore[assignment]
        odd = attention(abc_qkv=(7 * D, D), back=(D, D))
        packed = attention(qkv=(3 * D, D), back=(D, D))
        blocks = [*(nn.ModuleDict({"own": m}) for m in (odd, packed)), moe]
        for block in blocks:
            block.__class__ = Block  # type: ignore[assignment]
        self.trunk = nn.ModuleList(blocks)
        self.pool = nn.Linear(D, D)
        self.classifier = nn.Linear(D, 50, bias=False)


def test_what_was_decided_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        param_groups(Doubtful())
    (line,) = [r.getMessage() for r in caplog.records if r.levelname == "INFO"]
    # Sums of entries: the experts, the two packed ones with their outputs; gate and table beside.
    matrices = 2 * E * H * D + (7 + 1 + 3 + 1) * D * D
    share = round(100 * matrices / (matrices + (E + 6) * D))
    assert line == (
        f"{2 * E + 1 + 1 + 3 + 1} matrices, {share}% of the entries of blocks; AdamW: embedding, "
        "router, table, outside of any block, vector, head; 0 frozen parameters left out"
    )
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    for words in (
        "AdamW trains what stands outside of any block: pool.weight",
        "pass Fused(..., groups=...): trunk.N.own.qkv.weight",
        "orthogonalized as one: trunk.N.own.abc_qkv.weight",
    ):
        assert words in warning
    assert "classifier" not in warning


def test_a_sure_model_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Module()
    model.table = nn.Embedding(50, D)
    model.trunk = nn.ModuleList([Block(), Block()])
    param_groups(model)
    assert [r for r in caplog.records if r.levelname == "WARNING"] == []


def test_other_ranks_say_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    with caplog.at_level(logging.INFO):
        param_groups(Doubtful())
    assert caplog.records == []


@pytest.mark.parametrize("wrap", ["_orig_mod", "_forward_module", "base_layer", "module"])
def test_what_wrappers_add_is_no_level_and_no_name(wrap: str) -> None:
    plain = nn.Module()
    plain.trunk = nn.ModuleList([Block(), Block()])
    kind = "DistributedDataParallel" if wrap == "module" else "Wrapper"

    def wrapped(module: nn.Module) -> nn.Module:
        outer: nn.Module = type(kind, (nn.Module,), {})()
        outer.add_module(wrap, module)
        return outer

    inner = nn.Module()
    inner.trunk = nn.ModuleList([wrapped(Block()), wrapped(Block())])
    for model in (wrapped(plain), inner, wrapped(wrapped(plain))):
        assert types_of(model) == types_of(plain)


def test_nothing_goes_to_adamw_without_a_reason() -> None:
    table: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", lambda text: table.extend(text.splitlines()))
        param_groups(Doubtful(), report=True)
    rows = [line for line in table if re.search(r"\) +adamw", line)]
    assert rows
    assert all(re.search(r"adamw \([a-zA-Z0-9-][\w -]+\)$", line) for line in rows)


def test_no_decay_spares_tables_and_what_a_model_asks_for() -> None:
    model = nn.Module()
    for name in ("cls_token", "grid", "other", "decayed"):
        model.register_parameter(name, nn.Parameter(torch.randn(9, D)))
    model.no_weight_decay = lambda: {"grid"}  # timm's, of the model's own parameters
    model.deep = nn.Module()
    model.deep.grid = nn.Parameter(torch.randn(9, D))
    model.deep.no_weight_decay = {"grid"}  # a note of somebody's, which is no method
    model.trunk = nn.ModuleList([Block(), Block()])
    for name in ("scale", "decay"):
        model.trunk[0].register_parameter(name, nn.Parameter(torch.randn(6, D)))
    vars(model.other)["_no_weight_decay"] = True  # Mamba's
    groups = param_groups(model, no_decay=True)
    names = {n for g in groups if g.get("weight_decay") == 0 for n, _ in g["params"]}
    norms = {f"trunk.{n}.norm.{field}" for n in range(2) for field in ("weight", "bias")}
    assert names == {"cls_token", "grid", "other", "trunk.0.scale", "trunk.0.decay", *norms}
