"""The role of each parameter: the operator type of its matrices, or the reason for AdamW.

The modules decide first: the weight of a linear module inside a block is a matrix, unless it is a
router, a head, an embedding, an adapter or has one row per head. Names give known types, and say
what modules cannot. A router has one row for each expert that the module around it holds. A raw
tensor of a block is a stack of experts' matrices if a module around it is called so, something
beside it has one row for each, or its module counts experts that divide its rows; a table for AdamW
if it has few rows; and else unknown: an error.
"""

from __future__ import annotations

import re

from amo_dist.operators import names
from amo_dist.operators.patterns import own_words
from amo_dist.operators.tree import Node, Place

# Reason of a matrix outside of blocks that is neither an embedding nor a head.
OUTSIDE = "outside of any block"
# Reason of a tensor that nothing names; an error.
UNKNOWN = "of an unknown role"
# Reason of a convolution inside a block, which ``flatten_conv`` makes a matrix.
CONVOLUTION = "convolution"
# A raw tensor of at most so many rows or columns is a table: one row for each of few things, such
# as the shifts and scales of a modulation, and no map from features to features.
_FEW = 8
_NO_ROUTER = re.compile(r"\w*(?:expert|shared|att)\w*")

Role = tuple[str | None, str]


def role_of(place: Place) -> Role:
    """Find the operator type of a parameter, None for AdamW, and the reason.

    A type of several matrices, such as ``attn_qkv`` or ``mlp_gate_up``, is for `parts.divide`.
    """
    shape, in_block = place.shape, place.node.in_block
    if len(shape) < 2 or place.parameter.is_complex():
        return None, f"{len(shape)}-D" if len(shape) < 2 else "complex"
    for tail, reason in names.NO_MATRIX + names.NO_MATRIX_OUTSIDE * (not in_block):
        if names.ends_in(place.name, tail):
            return None, reason
    if place.is_embedding:
        return None, "embedding"
    if place.is_convolution:
        return None, CONVOLUTION if in_block and shape[1] > 1 else f"{len(shape)}-D"
    if not in_block:
        return None, OUTSIDE
    kind = _known_type(place)
    if kind is None and _is_router(place):  # a known matrix may have as many rows
        return None, "router"
    return _linear_role(place, kind) if place.is_linear else _raw_role(place, kind)


def attention_of(place: Place) -> Node | None:
    """The attention around a parameter, if a name, a class or a number of heads says so."""
    nodes = [node for node in place.node.around() if node.in_block and not node.is_container]
    for node in nodes[place.is_linear :][:2]:
        if node.is_called("att") or node.own_num_heads:
            return node
    return None


def _is_router(place: Place) -> bool:
    """Whether a parameter scores the experts that a module around it directly holds.

    It has one row for each, or one more for none of them, and no module beside it reads the scores.
    """
    rows, parent = place.outputs, place.node.parent
    beside = parent.linears if parent and place.is_linear else []
    if len(place.shape) > 2 or any(o.inputs == rows for o in beside if o is not place):
        return False
    for node in [*place.node.around()][:4]:
        if node.num_experts:
            return node.in_block and not node.num_experts.isdisjoint({rows, rows - 1})
        if _NO_ROUTER.fullmatch(node.name):
            return False
    return False


def _linear_role(place: Place, kind: str | None) -> Role:
    if kind:
        return kind, ""
    if attention_of(place) and place.outputs in place.node.num_heads:
        return None, "one row per head"
    if place.outputs <= 4:
        return None, "head"
    return (own_words(place.name), "") if place.inputs > 4 else (None, "table")


def _raw_role(place: Place, kind: str | None) -> Role:
    if kind and place.field.endswith("weight"):
        return kind, ""
    sizes = [size for size in place.shape if size > 1]
    if len(sizes) < 2:
        return None, "1-D"
    if len(sizes) == 2 and place.shape[0] in place.node.num_heads:
        return None, "one row per head"
    if experts_by_rows(place):
        return kind or own_words(place.name), ""
    is_called = any(node.is_called("expert") for node in [*place.node.around()][:3])
    if place.is_stack and (is_called or width_beside(place) in place.shape[1:]):
        return kind or own_words(place.name), ""
    return None, "table" if sum(size > _FEW for size in sizes) < 2 else UNKNOWN


def _known_type(place: Place) -> str | None:
    attention = attention_of(place)
    kind = names.known_type(place.name, in_attention=attention is not None)
    # PyTorch's attention, and DeBERTa's.
    is_third = "in_proj" in place.name and place.outputs == 3 * place.inputs
    return kind or ("attn_qkv" if attention and is_third else None)


def experts_by_rows(place: Place) -> int:
    """Number of experts whose matrices lie in the rows ``(E * m, n)`` of a raw tensor, else 0."""
    number = vars(place.node.module).get("num_experts")
    if type(number) is not int or number < 2 or len(place.shape) != 2 or place.is_linear:
        return 0
    return number if place.shape[0] > number and place.shape[0] % number == 0 else 0


def width_beside(place: Place) -> int:
    """Columns of what has one row for each of a stack's experts, the width of the model; else 0."""
    nodes = [near for node in [*place.node.around()][:3] for near in (node, *node.children)]
    others = [other for node in nodes for other in node.places if "bias" not in other.field]
    scores = (o.shape for o in others if len(o.shape) == 2 and o.shape[0] == place.shape[0])
    return next((columns for _, columns in scores), 0)
