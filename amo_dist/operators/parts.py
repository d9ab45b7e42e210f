"""The matrices that one parameter holds, from its role and the modules around it."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from amo_dist.config import require
from amo_dist.operators.roles import attention_of, num_experts, width_beside
from amo_dist.operators.tree import Heads, Place
from amo_dist.operators.views import Fused

# Remark of a parameter whose parts lie in an order that nothing tells.
AS_ONE = "fused, as one matrix"
# Remark of parts whose order the modules do not tell: one part behind the other.
ASSUMED = "parts assumed one behind the other"

# Attentions that store their parts in turn: a class, the value of a field where not all of its
# objects do so (... is any value), and the field with the number of turns. Read in their sources.
_HEADS = r"num_heads|num_attention_heads|n_heads?"
_IN_TURN: tuple[tuple[str, dict[str, Any], str], ...] = (
    (r"(GPTNeoX|GPTNeoXJapanese|Bloom|Persimmon|MiniMaxLightning)Attention", {}, _HEADS),
    (r"DisentangledSelfAttention", {}, _HEADS),  # DeBERTa
    (r"GPTBigCodeAttention", {"multi_query": False}, _HEADS),
    (r"FalconAttention", {"new_decoder_architecture": True}, "num_kv_heads"),
    (r"FalconAttention", {"multi_query": False}, _HEADS),
    (r"AttentionCl", {"head_first": True}, _HEADS),  # timm's maxvit
    (r"Attention|AttentionDownsample", {"val_dim": ...}, _HEADS),  # timm's levit, tiny_vit
    (r"InternLM2\w*Attention2?", {}, "num_key_value_heads"),
    # Megatron's
    (r"SelfAttention", {"num_query_groups_per_partition": ...}, r"num_query_groups_per_partition"),
    (r"(Levit|EfficientFormer)\w*Attention\w*", {}, _HEADS),
)
# CodeGen stores queries, values and keys in four turns, one for each of its first devices.
_UNKNOWN_ORDER = re.compile(r"CodeGenAttention")
# Attentions whose queries have a gate for each head behind it.
_GATED_QUERY = re.compile(r"Qwen3_?(Next|5)\w*Attention")
# Libraries whose other attentions store one part behind the other; all were read or tried.
_READ = {"torch", "torchtitan", "transformers", "timm", "torchvision", "diffusers", "litgpt"}
# Modules that store the value before its gate; the order gives types their names, and no more.
_VALUE_FIRST = re.compile(r"GEGLU|SwiGLU|GatedMLP|GluMlp")
_MODULATION = re.compile(r"\w*(?:mod|modulation|ada_?ln\w*|norm\d?(?:_\w+)?)", re.IGNORECASE)

# Operator type or parts, and a remark on what is doubtful.
Divided = tuple[str | Fused, str]
_Parts = tuple[tuple[str, int], ...]


def divide(place: Place, kind: str) -> Divided:
    """Divide a parameter of two or three dims and of a type, if the modules say where parts lie."""
    if len(place.shape) == 3:
        return _stack(place, kind)
    if kind == "ssm_in":
        return kind, AS_ONE
    if kind == "attn_q":
        return _query(place), ""
    if kind in ("attn_kv", "attn_qk"):
        return _pair(place, kind)
    if kind in ("attn_qkv", "attn_qkvz"):
        return _queries_keys_values(place, kind)
    if number := num_experts(place):
        return Fused(((kind, place.shape[0]),), heads={kind: number}), ""
    if kind.startswith(("attn_", "mla_", "ssm_")) or not place.is_linear:
        return kind, ""
    if number := _modulations(place):
        return Fused(((kind, place.outputs),), place.output_dim, heads={kind: number}), ""
    return _gate_and_up(place, kind)


def _behind(place: Place) -> int:
    """Columns of the projection behind an attention, 0 if there is none."""
    attention = attention_of(place) or place.node.parent or place.node
    others = [other for other in attention.linears if other is not place]
    outputs = [other for other in others if other.kind == "attn_o"]
    if not outputs and len(others) == 1:
        outputs = others
    return outputs[0].inputs if outputs else 0


def _pair(place: Place, kind: str) -> Divided:
    """Divide keys and values by the columns behind them, queries and keys in halves.

    DeepSeek V4 has one projection for both, of one head.
    """
    half, odd = divmod(place.outputs, 2)
    rows = place.node.heads.key
    is_even = kind == "attn_qk" or (
        rows and half % rows == 0 and half // rows in place.node.num_heads
    )
    last = half if is_even else _behind(place)
    if odd or not 0 < last < place.outputs:
        return kind, AS_ONE
    first = (f"attn_{kind[-2]}", place.outputs - last)
    return _in_order(place, (first, (f"attn_{kind[-1]}", last)))


def _query(place: Place) -> str | Fused:
    """Divide queries and gates by head, as Qwen3-Next, Qwen3.5 and torchtitan's qwen3_5 do."""
    values, heads, attention = _behind(place), place.node.heads.query, attention_of(place)
    is_gated = attention and any(map(_GATED_QUERY.fullmatch, attention.kinds))
    if not is_gated or place.outputs != 2 * values or not heads or values % heads:
        return "attn_q"
    return Fused((("attn_q", values), ("attn_gate", values)), groups=values // heads)


def _queries_keys_values(place: Place, kind: str) -> Divided:
    """Divide queries, keys and values by the columns of the projection behind them.

    Linear attention has fewer keys than values; Qwen3-Next's stores the gates of values, too, and
    all of them by key head.
    """
    rows, values, heads = place.outputs, _behind(place), place.node.heads
    attention = attention_of(place)
    key_dim = vars(attention.module).get("key_dim") if attention else None
    num_values = len(kind) - len("attn_qk")
    keys, odd = divmod(rows - num_values * values, 2)
    is_linear = kind == "attn_qkvz" or heads.key != heads.value or "linear_attn" in place.name
    if is_linear or (key_dim and keys > 0 and keys % key_dim == 0):
        parts: _Parts = (("attn_q", keys), ("attn_k", keys), ("attn_v", values))
        if not values or odd or keys <= 0:
            return kind, AS_ONE
        if kind == "attn_qkv":
            return _in_order(place, parts)
        if not heads.key or keys % heads.key or values % (keys // heads.key):
            return kind, AS_ONE
        return Fused((*parts, ("attn_gate", values)), groups=keys // heads.key), ""
    is_pair = attention is not None and "WindowAttentionGlobal" in attention.kinds
    if is_pair and rows == 2 * values:  # GCViT's, with queries from outside
        return _in_order(place, (("attn_k", values), ("attn_v", values)))
    if rows == 3 * (values or place.inputs):
        values = keys = rows // 3
    elif not values or odd or not 0 < keys < values or not _are_grouped(place, keys, values):
        return kind, AS_ONE
    return _in_order(place, (("attn_q", values), ("attn_k", keys), ("attn_v", keys)))


def _are_grouped(place: Place, keys: int, values: int) -> bool:
    """Whether fewer heads of keys than of queries agree with the numbers of heads around."""
    numbers, rows = place.node.num_heads, place.node.heads.key
    if not numbers or (rows and keys % rows == 0 and keys // rows in numbers):
        return True
    return any(keys * heads == values * shared for heads in numbers for shared in (1, *numbers))


def _in_order(place: Place, parts: _Parts) -> Divided:
    """Parts of an attention in turn or one behind the other, as its class says."""
    attention, fused = attention_of(place), Fused(parts, place.output_dim)
    if attention is None:
        return fused, ASSUMED
    if any(map(_UNKNOWN_ORDER.fullmatch, attention.kinds)):
        return "attn_qkv", AS_ONE
    fields = {**attention.values, **vars(attention.module)}
    for name, conditions, turns in _IN_TURN:
        is_class = any(re.fullmatch(name, kind) for kind in attention.kinds)
        if is_class and all(
            field in fields and value in (..., fields[field]) for field, value in conditions.items()
        ):
            number = next((n for f, n in fields.items() if re.fullmatch(turns, f)), 0)
            return dataclasses.replace(fused, groups=number), ""
    is_read = type(attention.module).__module__.partition(".")[0] in _READ
    return fused, "" if is_read else ASSUMED


def _gate_and_up(place: Place, kind: str) -> Divided:
    """Divide gate and up, if the projection behind reads half as many features."""
    rows, odd = divmod(place.outputs, 2)
    is_named = kind.endswith("gate_up")
    if odd or not (is_named or (attention_of(place) is None and _is_packed(place))):
        return kind, AS_ONE if is_named else ""
    family = next((f for f in ("shared_expert", "expert") if kind.startswith(f)), "mlp")
    kinds = {name for node in [*place.node.around()][:3] for name in node.kinds}
    order = ("up", "gate") if any(map(_VALUE_FIRST.fullmatch, kinds)) else ("gate", "up")
    return Fused(tuple((f"{family}_{part}", rows) for part in order), place.output_dim), ""


def _is_packed(place: Place) -> bool:
    """Whether the next linear module reads half of a module's outputs, and of no other's."""
    half, node = place.outputs / 2, place.node.parent
    while node:
        if others := [other for other in node.linears if other is not place]:
            after = node.linears[node.linears.index(place) + 1 :]
            readers = [o for o in after if o.inputs == half and o.node.parent is node]
            writers = [o for o in others if o.outputs == half and o not in readers]
            return len(readers) == 1 and not writers
        # A gate's own module in a list, as in diffusers.
        node = node.parent if node.parent and node.parent.is_container else None
    return False


def _modulations(place: Place) -> int:
    """Number of shifts, scales and gates that a modulation gives, 0 for another module."""
    number, odd = divmod(place.outputs, place.inputs)
    nodes = [*place.node.around()][:2]
    is_named = any(_MODULATION.fullmatch(node.name) for node in nodes)
    is_known = is_named or any("AdaLayerNorm" in kind for node in nodes for kind in node.kinds)
    return number if is_known and not odd and 2 <= number <= 9 else 0


def _stack(place: Place, kind: str) -> Divided:
    """Divide gate and up of experts; gpt-oss, the only one with a bias, interleaves them."""
    dim = _packed_dim(place)
    if not kind.endswith("gate_up") and dim is None:
        return kind, ""
    has_bias = any("bias" in other.field for other in place.node.places)
    if has_bias or dim is None or place.shape[1 + dim] % 2:
        return kind, AS_ONE
    half = place.shape[1 + dim] // 2
    return Fused((("expert_gate", half), ("expert_up", half)), dim), ""


def _packed_dim(place: Place) -> int | None:
    """Dim of outputs of a stack that holds gate and up, None for another.

    The only stack beside it says so: (E, dim, hidden) beside (E, 2 * hidden, dim), or transposed.
    """
    others = [o.shape[1:] for o in place.node.places if o is not place and len(o.shape) == 3]
    _, rows, columns = place.shape
    if others == [(columns, rows / 2)]:
        return 0
    return 1 if others == [(columns / 2, rows)] else None


def output_dim(place: Place) -> int:
    """Dim of each matrix of a parameter that counts outputs."""
    if len(place.shape) != 3 or place.is_convolution:
        return place.output_dim
    for other in place.node.places:
        # A packed gate and up, or down beside it.
        if len(other.shape) == 3 and (dim := _packed_dim(other)) is not None:
            return dim
    if not (place.kind or "").startswith("expert_"):
        return 0
    # Matrices (in, out): the router beside them reads the model, whose width gate and up read.
    inputs, outputs = place.shape[1:]
    if place.kind == "expert_down":
        inputs, outputs = outputs, inputs
    return int(inputs == width_beside(place) != outputs)


# Field of `Heads` by operator type, for the types whose matrices consist of heads.
_ROWS_BY_TYPE = {
    "attn_q": "query",
    "attn_k": "key",
    "attn_v": "value",
    "mla_q_b": "query",
    "mla_k_b": "key",
    "mla_v_b": "value",
}


def in_heads(operator_type: str) -> bool:
    """Whether matrices of this type consist of heads."""
    return operator_type in _ROWS_BY_TYPE or operator_type == "mla_kv_b"


def by_head(place: Place, per_head: bool | int = True) -> str | Fused:
    """Divide the queries, keys and values of a parameter's target into one matrix per head.

    A part that has an entry in ``target.heads``, and every other type, stays unchanged.

    Args:
        place: Parameter with a target.
        per_head: Argument of `amo_dist.param_groups`; an integer is the rows of every head.

    Returns:
        The target with heads.

    Raises:
        ValueError: The rows are no multiple of a head's, or neither the target nor a module gives
            the heads.
    """
    target, dim = place.target, output_dim(place)
    assert target is not None
    heads = heads_of(place) if per_head is True else Heads(per_head, per_head, per_head)
    if target == "mla_kv_b":  # each head's keys, then its values
        number = _num_heads(place.name, place.shape[-2], heads.key + heads.value)
        parts = (("mla_k_b", number * heads.key), ("mla_v_b", number * heads.value))
        return Fused(parts, groups=number, heads={kind: number for kind, _ in parts})
    if isinstance(target, str):
        if not in_heads(target):
            return target
        target = Fused(((target, place.shape[dim - 2]),), dim=dim)
    num_heads = {
        kind: _num_heads(place.name, size, getattr(heads, _ROWS_BY_TYPE[kind]))
        for kind, size in target.parts
        if kind in _ROWS_BY_TYPE and kind not in target.heads
    }
    return dataclasses.replace(target, heads={**num_heads, **target.heads})


def _num_heads(name: str, size: int, rows: int) -> int:
    value = f"{size} rows in heads of {rows}" if rows else "no module that gives the rows of a head"
    expected = "whole heads: set per_head=ROWS, or write a pattern with Fused(..., heads=...)"
    require(rows > 0 and size % rows == 0, f"per_head: {name}", value, expected)
    return size // rows


def heads_of(place: Place) -> Heads:
    """Rows per head: what the modules say, or the rows of the queries by their number of heads."""
    heads, numbers, attention = place.node.heads, place.node.num_heads, attention_of(place)
    if heads.query or not numbers or attention is None:
        return heads
    sizes = [(p.kind, p.outputs) for p in attention.linears]
    if isinstance(place.target, Fused):
        sizes = [*place.target.parts]
    queries = next((size for kind, size in sizes if kind == "attn_q"), 0)
    rows, odd = divmod(queries, max(numbers))
    return heads if odd else Heads(rows, rows, rows)
