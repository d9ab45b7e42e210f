"""The role of each parameter: the operator type of its matrices, or the reason for AdamW.

The modules decide first: the weight of a linear module inside a block is a matrix, unless it is a
router, a head, an embedding, an adapter or has one row per head. Names give known types, and say
what modules cannot. A raw tensor of a block that is neither known nor a stack of experts' matrices
is unknown.
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
# Fields with the number of outputs of a head.
_LABELS = r"num_(?:classes|labels)|n_classes"
_NO_ROUTER = re.compile(r"\w*(?:expert|shared|att)\w*")
_HAS_HEADS = re.compile(r"(?:num_|n_)?(?:attention_)?heads?")

Role = tuple[str | None, str]


def role_of(place: Place) -> Role:
    """Find the operator type of a parameter, None for AdamW, and the reason.

    A type of several matrices, such as ``attn_qkv`` or ``mlp_gate_up``, is for `parts.divide`.
    """
    name, shape, in_block = place.name, place.shape, place.node.in_block
    if len(shape) < 2 or place.parameter.is_complex():
        return None, f"{len(shape)}-D" if len(shape) < 2 else "complex"
    for tail, reason in names.NO_MATRIX:
        if names.ends_in(name, tail):
            return None, reason
    if place.is_embedding:
        return None, "embedding"
    if place.is_convolution:
        return None, CONVOLUTION if in_block and shape[1] > 1 else f"{len(shape)}-D"
    if in_block and _is_router(place):
        return None, "router"
    kind = names.known_type(name, in_block=in_block) if len(shape) <= 3 else None
    if kind is not None:
        return kind, ""
    if in_block:
        return _linear_role(place) if place.is_linear else _raw_role(place)
    if names.ends_in(name, names.HEADS) or _is_head(place):
        return None, "head"
    if re.fullmatch(names.EMBEDDINGS, name):
        return None, "embedding"
    return None, UNKNOWN if len(shape) > 2 and min(shape[-2:]) > 4 * _FEW and shape[
        0
    ] > 1 else OUTSIDE


def attention_of(place: Place) -> Node | None:
    """The attention around a parameter, if a name, a class or a number of heads says so."""
    nodes = [node for node in place.node.around() if node.in_block and not node.is_container]
    for node in nodes[place.is_linear :][:2]:
        is_named = any("att" in text.lower() for text in (node.name, *node.kinds))
        if is_named or any(map(_HAS_HEADS.fullmatch, vars(node.module))):
            return node
    return None


def _is_head(place: Place) -> bool:
    """Whether a linear module has an output for each label or token, and no other reads them."""
    # A width of blocks may be the size of another model's vocabulary.
    labels = re.compile(_LABELS if place.node.in_block else rf"{_LABELS}|vocab_size")
    for node in place.node.around() if place.is_linear else ():
        values = {**node.values, **vars(node.module)}
        if any(labels.fullmatch(field) and n == place.outputs for field, n in values.items()):
            return True
        if node.in_block and any(other.inputs == place.outputs for other in node.linears):
            return False
    return False


def _is_router(place: Place) -> bool:
    """Whether a parameter scores the experts that a module around it directly holds.

    It has one row for each, or one more for none of them, and no module beside it reads the scores.
    """
    if len(place.shape) != 2:
        return False
    rows, parent = place.outputs, place.node.parent
    beside = parent.linears if parent and place.is_linear else []
    if any(other.inputs == rows for other in beside if other is not place):
        return False
    inner: Node | None = None
    for node in [*place.node.around()][:4]:
        if inner is not None and (inner.num_experts or _NO_ROUTER.fullmatch(inner.name)):
            return False
        if node.in_block and node.num_experts & {rows, rows - 1}:
            return True
        inner = node
    return False


def _linear_role(place: Place) -> Role:
    words = [w for w in place.name.split(".") if not w.isdigit() and w not in ("weight", "linear")]
    word, attention = words[-1] if words else "", attention_of(place)
    if attention and (match := names.ATTENTION_WORD.fullmatch(word)):
        return f"attn_{names.LETTERS.get(match[1], match[1])}", ""
    is_third = word == "in_proj" and place.outputs == 3 * place.inputs  # DeBERTa's
    if attention and (is_third or "qkv" in word):
        return "attn_qkv", ""
    if attention and place.outputs in place.node.num_heads:
        return None, "one row per head"
    if place.outputs <= 4 or _is_head(place):
        return None, "head"
    if place.inputs <= 4:
        return None, "table"
    return _expert_type(place) or own_words(place.name), ""


def _raw_role(place: Place) -> Role:
    shape = [size for size in place.shape if size > 1]
    if len(shape) < 2:
        return None, "1-D"
    if place.shape[0] in place.node.num_heads and len(shape) == 2:
        return None, "one row per head"
    if "MultiheadAttention" in place.node.kinds and place.field.endswith("_proj_weight"):
        return "attn_qkv" if place.field == "in_proj_weight" else f"attn_{place.field[0]}", ""
    if _holds_experts(place):
        return _expert_type(place) or own_words(place.name), ""
    beside = [other for other in place.node.places if other is not place and len(other.shape) > 1]
    is_beside = any(names.known_type(other.name, in_block=True) for other in beside)
    is_table = sum(size > _FEW for size in shape) < 2 and not is_beside
    return None, "table" if is_table else UNKNOWN


def _expert_type(place: Place) -> str | None:
    path = place.name.split(".")
    match = names.EXPERT_WORD.fullmatch(path[-1 - place.is_linear])
    if not match or not any("expert" in part for part in path):
        return None
    prefix = "shared_expert" if any("shared" in part for part in path) else "expert"
    return f"{prefix}_{match[1] or names.NUMBERED[match[2]]}"


def _holds_experts(place: Place) -> bool:
    """Whether a tensor (E, m, n) or (E * m, n) holds one matrix for each of E experts.

    A module around says so, something scores E experts beside it, or a stack leads back.
    """
    if not place.is_stack:
        return len(place.shape) == 2 and num_experts(place) > 0
    for node in [*place.node.around()][:3]:
        fields = {**node.values, **vars(node.module)}.items()
        is_said = any("expert" in field and n == place.shape[0] for field, n in fields)
        if is_said or "expert" in node.name:
            return True
    number, rows, columns = place.shape
    is_closed = any(other.shape == (number, columns, rows) for other in place.node.places)
    return width_beside(place) in (rows, columns) or (is_closed and rows != columns)


def num_experts(place: Place) -> int:
    """Number of experts whose matrices a raw tensor (E * m, n) holds, else 0."""
    fields = vars(place.node.module)
    number = next((n for f, n in fields.items() if f == "num_experts" and type(n) is int), 0)
    return number if number > 1 and not place.is_linear and place.shape[0] % number == 0 else 0


def width_beside(place: Place) -> int:
    """Columns of what has one row for each of a stack's experts, the width of the model; else 0."""
    for node in [*place.node.around()][:3]:
        for other in [*node.places, *(p for child in node.children for p in child.places)]:
            is_score = len(other.shape) == 2 and "bias" not in other.field
            if is_score and other.shape[0] == place.shape[0]:
                return other.shape[1]
    return 0
