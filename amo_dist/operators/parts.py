"""The matrices that one parameter holds, from its role and the modules around it.

Fused queries, keys and values are divided by the columns of the projection behind them, in turn
where their class does so; a fused gate and up in halves, if the projection behind reads one half;
a modulation into its shifts, scales and gates. A stack of experts is one matrix for each, halved
likewise. What cannot be divided stays one matrix, and a remark says so.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from amo_dist.config import require
from amo_dist.operators.roles import attention_of, experts_by_rows, width_beside
from amo_dist.operators.tree import Heads, Node, Place
from amo_dist.operators.views import Fused, MatrixView, cut_views

# Remark of a parameter whose parts lie in an order that nothing tells.
AS_ONE = "fused, as one matrix"
# Remark of parts whose order the modules do not tell: one part behind the other.
ASSUMED = "parts assumed one behind the other"

# Attentions that store their parts in turn, head by head: a class, and the value of a field where
# not all of its objects do so (... is any value). Read in their sources.
_IN_TURN: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"(GPTNeoX|GPTNeoXJapanese|Bloom|Persimmon|MiniMaxLightning)Attention", {}),
    (r"DisentangledSelfAttention", {}),  # DeBERTa
    (r"InternLM2\w*Attention2?", {}),
    (r"GPTBigCodeAttention|FalconAttention", {"multi_query": False}),
    (r"FalconAttention", {"new_decoder_architecture": True}),
    (r"AttentionCl", {"head_first": True}),  # timm's maxvit
    (r"Attention|AttentionDownsample", {"val_dim": ...}),  # timm's levit, tiny_vit
    (r"SelfAttention", {"num_query_groups_per_partition": ...}),  # Megatron's
)
# Attentions whose queries have a gate for each head behind it.
_GATED_QUERY = re.compile(r"Qwen3_?(Next|5)\w*Attention")
# Libraries whose other attentions store one part behind the other; all were read or tried.
_READ = {"torch", "torchtitan", "transformers", "timm", "torchvision", "diffusers", "litgpt"}
# Modules that store the value before its gate; the order gives types their names, and no more.
_VALUE_FIRST = re.compile(r"GEGLU|SwiGLU|GatedMLP|GluMlp")
_MODULATION = re.compile(r"\w*(?:mod|modulation|ada_?ln\w*|norm\d?(?:_\w+)?)", re.IGNORECASE)

# Operator type or parts, and a remark on what is doubtful.
Divided = tuple[str | Fused, str]


def divide(place: Place, kind: str) -> Divided:
    """Divide a parameter of two or three dims and of a type, if the modules say where parts lie."""
    if len(place.shape) == 3:
        return _stack(place, kind)
    if kind in ("attn_q", "attn_kv", "attn_qk", "attn_qkv", "attn_qkvz"):
        return _attention_parts(place, kind)
    if number := experts_by_rows(place):
        return Fused(((kind, place.shape[0]),), heads={kind: number}), ""
    if kind.startswith(("attn_", "mla_", "ssm_")) or not place.is_linear:
        return kind, AS_ONE if kind == "ssm_in" else ""
    if number := _modulations(place):
        return Fused(((kind, place.outputs),), place.output_dim, heads={kind: number}), ""
    return _gate_and_up(place, kind)


def _behind(place: Place) -> int:
    """Columns of the projection behind an attention, 0 if there is none."""
    attention = attention_of(place) or place.node.parent or place.node
    others = [o for o in attention.linears if o is not place and o.kind not in IN_HEADS]
    outputs = [other for other in others if other.kind == "attn_o"]
    if len(others) == 1:
        outputs = others
    return outputs[0].inputs if outputs else 0


def heads_of(place: Place) -> Heads:
    """Rows per head: what the modules say, or all rows by the number of heads."""
    heads, numbers, attention = place.node.heads, place.node.num_heads, attention_of(place)
    if heads.query or not numbers or not attention:
        return heads
    queries = next((other.outputs for other in attention.linears if other.kind == "attn_q"), 0)
    rows, odd = divmod(queries or _behind(place) or place.inputs, max(numbers))
    return heads if odd else Heads(rows, rows, rows)


def _attention_parts(place: Place, kind: str) -> Divided:
    """Divide queries, keys, values and gates, in turn or one behind the other."""
    attention, letters = attention_of(place), kind.removeprefix("attn_")
    kinds = attention.kinds if attention else frozenset[str]()
    if letters == "q":
        if not any(map(_GATED_QUERY.fullmatch, kinds)):
            return kind, ""
        letters = "qz"
    # GCViT's queries may come from outside.
    if "WindowAttentionGlobal" in kinds and place.outputs == 2 * _behind(place):
        letters = "kv"
    sizes, rows = _sizes(place, letters), heads_of(place).key
    first = sizes.get("k") or sizes.get("q") or 0
    is_in_turn = "z" in letters or (attention is not None and _is_in_turn(attention))
    is_known = first and "CodeGenAttention" not in kinds  # queries, values, keys in four turns
    if not is_known or (is_in_turn and (not rows or first % rows)):
        return kind, AS_ONE
    names = {"z": "gate"}
    parts = tuple((f"attn_{names.get(part, part)}", size) for part, size in sizes.items())
    fused = Fused(parts, place.output_dim, groups=first // rows if is_in_turn else 1)
    is_read = attention and type(attention.module).__module__.partition(".")[0] in _READ
    return fused, "" if is_read or is_in_turn else ASSUMED


def _sizes(place: Place, letters: str) -> dict[str, int]:
    """Rows of queries, keys, values and their gates (z); none if nothing tells.

    Equal parts have as many rows as the projection behind has columns, or whole heads in a number
    that a module says. Else one part is as large, and two share the rest: keys and values of
    grouped queries, or queries and keys of linear attention.
    """
    values, heads, numbers = _behind(place), heads_of(place), place.node.num_heads
    equal, odd = divmod(place.outputs, len(letters))
    is_whole = heads.key > 0 and equal / heads.key in numbers
    if not odd and (letters == "qk" or equal == (values or place.inputs) or is_whole):
        return dict.fromkeys(letters, equal)
    shared, odd = divmod(place.outputs - values * (len(letters) - 2), 2)
    if odd or not values or shared <= 0 or len(letters) < 3:
        return {}
    if letters == "qkvz" or heads.key != heads.value or "linear_attn" in place.name:
        return dict.fromkeys(letters, values) | {"q": shared, "k": shared}
    groups, odd = divmod(shared, heads.key or shared)
    is_grouped = (
        shared < values and not odd and (not heads.key or not numbers or groups in numbers | {1})
    )
    return {"q": values, "k": shared, "v": shared} if is_grouped else {}


def _is_in_turn(attention: Node) -> bool:
    """Whether an attention of this class stores its parts head by head."""
    fields = {**attention.config, **vars(attention.module)}
    return any(
        any(re.fullmatch(name, kind) for kind in attention.kinds)
        and all(field in fields and value in (..., fields[field]) for field, value in so.items())
        for name, so in _IN_TURN
    )


def _gate_and_up(place: Place, kind: str) -> Divided:
    """Divide gate and up, if they are called so, or the projection behind reads half of them."""
    half, odd = divmod(place.outputs, 2)
    node = next((n for n in place.node.around() if len(n.linears) > 1), place.node)
    after = node.linears[node.linears.index(place) + 1 :]
    readers = [o for o in after if o.inputs == half and o.node.parent is node]
    writers = [o for o in node.linears if o.outputs == half and o not in readers]
    is_read = len(readers) == 1 and not writers and attention_of(place) is None
    is_named = kind.endswith("gate_up")
    if odd or not (is_named or is_read):
        return kind, AS_ONE if is_named else ""
    family = next((f for f in ("shared_expert", "expert") if kind.startswith(f)), "mlp")
    kinds = {name for node in [*place.node.around()][:3] for name in node.kinds}
    order = ("up", "gate") if any(map(_VALUE_FIRST.fullmatch, kinds)) else ("gate", "up")
    return Fused(tuple((f"{family}_{part}", half) for part in order), place.output_dim), ""


def _modulations(place: Place) -> int:
    """Number of shifts, scales and gates that a modulation gives, 0 for another module."""
    number, odd = divmod(place.outputs, place.inputs)
    nodes = [*place.node.around()][:2]
    is_known = any(_MODULATION.fullmatch(n.name) or n.is_called("adalayernorm") for n in nodes)
    return number if is_known and not odd and 2 <= number <= 9 else 0


def _stack(place: Place, kind: str) -> Divided:
    """Divide gate and up of experts, if the only stack beside them reads half of their outputs.

    Those of gpt-oss, the only one with a bias, alternate.
    """
    dim = output_dim(place)
    outputs, inputs = place.shape[1 + dim], place.shape[2 - dim]
    others = [{*o.shape[1:]} for o in place.node.places if o is not place and len(o.shape) == 3]
    has_bias = any("bias" in other.field for other in place.node.places)
    if others == [{outputs / 2, inputs}] and not has_bias:
        return Fused((("expert_gate", outputs // 2), ("expert_up", outputs // 2)), dim), ""
    return kind, AS_ONE if kind.endswith("gate_up") else ""


def output_dim(place: Place) -> int:
    """Dim of each matrix of a parameter that counts outputs.

    The first matrices of experts read the width of the model, and the last one makes it.
    """
    if len(place.shape) != 3 or place.is_convolution:
        return place.output_dim
    stacks = [o for o in place.node.places if (o.kind or "").startswith("expert_")]
    if place not in stacks:
        return 0
    common = set.intersection(*({*other.shape[1:]} for other in stacks))
    width = common.pop() if len(common) == 1 else width_beside(place)
    inputs = [o.shape[1:] if (o.kind or "").endswith("_down") else o.shape[:0:-1] for o in stacks]
    return int(any(made == width != read for read, made in inputs))


# Types whose matrices consist of heads.
IN_HEADS = ("attn_q", "attn_k", "attn_v", "mla_q_b", "mla_k_b", "mla_v_b", "mla_kv_b")


def cut(place: Place, per_head: bool | int) -> tuple[MatrixView, ...]:
    """Cut a parameter into the matrices of its target; none for AdamW.

    Raises:
        ValueError: The target does not fit the shape, or see `by_head`.
    """
    if place.target is None:
        return ()
    target = by_head(place, per_head) if per_head else place.target
    dim = output_dim(place)
    return cut_views(place.name, place.shape, target, place.is_convolution, dim)


def by_head(place: Place, per_head: bool | int = True) -> str | Fused:
    """Divide the queries, keys and values of a parameter's target into one matrix per head.

    A part that has an entry in ``target.heads``, and every other type, stays unchanged. A type of a
    user's own counts like the one that the role gives.

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
    heads = heads_of(place) if per_head is True else Heads(per_head, per_head, per_head)
    assert target is not None
    if isinstance(target, Fused):
        num_heads = {
            kind: _num_heads(place.name, size, heads.rows(kind))
            for kind, size in target.parts
            if kind in IN_HEADS and kind not in target.heads
        }
        return dataclasses.replace(target, heads={**num_heads, **target.heads})
    kind, size = target if target in IN_HEADS else place.kind, place.shape[dim - 2]
    if kind not in IN_HEADS:
        return target
    if kind == "mla_kv_b":  # each head's keys, then its values
        number = _num_heads(place.name, size, heads.key + heads.value)
        sizes = {"mla_k_b": number * heads.key, "mla_v_b": number * heads.value}
        return Fused((*sizes.items(),), groups=number, heads=dict.fromkeys(sizes, number))
    number = _num_heads(place.name, size, heads.rows(kind))
    return Fused(((target, size),), dim=dim, heads={target: number})


def _num_heads(name: str, size: int, rows: int) -> int:
    value = f"{size} rows in heads of {rows}" if rows else "no module that gives the rows of a head"
    expected = "whole heads: set per_head=ROWS, or write a pattern with Fused(..., heads=...)"
    require(rows > 0 and size % rows == 0, f"per_head: {name}", value, expected)
    return size // rows
