"""How a parameter holds matrices: as one, as one an expert, or several side by side."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence

from amo_dist.config import Box

ADAMW = "adamw"
"""Names what is not orthogonalized."""


@dataclasses.dataclass(frozen=True)
class MatrixView:
    """One matrix inside a parameter."""

    suffix: str
    """Empty for the whole parameter, else such as ``[q]`` or ``[3]``; the name of the matrix is
    the parameter's name followed by it."""
    operator_type: str
    """Matrices of one type share a schedule."""
    boxes: tuple[Box, ...] | None
    """``None`` for the whole of a parameter of two dims, or of four whose last three are the
    columns; else the regions that make up the matrix, in
    coordinates of the parameter, one after the other along ``dim``."""
    dim: int = 0
    """Dim of the matrix (0 rows, 1 columns) along which the boxes are concatenated."""


@dataclasses.dataclass(frozen=True)
class Fused:
    r"""How one parameter holds several matrices side by side.

    For a parameter of rows q, k, v with grouped-query attention, whose sizes no shape tells::

        Fused((("attn_q", 3072), ("attn_k", 1024), ("attn_v", 1024)))

    A 3-D parameter ``(E, m, n)`` is so divided in each of its E matrices. One part alone with
    ``heads`` is a projection that is orthogonalized head by head, in all layers by one pattern::

        {r".*\.q_proj\.weight": Fused((("attn_q", 3072),), heads={"attn_q": 24})}
    """

    parts: tuple[tuple[str, int], ...]
    """``(operator type, size along dim)`` in the order of storage; the sizes add up to the
    parameter's size along ``dim``. One type cannot occur twice."""
    dim: int = 0
    """0 where the parts are rows of the matrix (``nn.Linear``), 1 where they are columns."""
    groups: int = 1
    """Interleaving: ``dim`` consists of this many equal groups (KV groups, as a rule), and each
    holds its share of every part in order. 1 stores each part in one piece."""
    heads: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Splits the part of an operator type further into this many equal matrices, one a head."""

    def __post_init__(self) -> None:
        # From TOML or JSON these arrive as lists.
        parts = tuple((str(operator_type), int(size)) for operator_type, size in self.parts)
        object.__setattr__(self, "parts", parts)
        types = [operator_type for operator_type, _ in parts]
        require(len(types) > 0, "Fused.parts", self.parts, "at least one part")
        require(len(set(types)) == len(types), "Fused.parts", types, "distinct operator types")
        for operator_type in types:
            check_operator_type(operator_type)
        require(self.dim in (0, 1), "Fused.dim", self.dim, "0 (rows) or 1 (columns)")
        unknown = sorted(set(self.heads) - set(types))
        require(not unknown, "Fused.heads", unknown, f"operator types among {types}")
        for operator_type, size in parts:
            divisors = {"groups": self.groups, "heads": self.heads.get(operator_type, 1)}
            for field, divisor in divisors.items():
                divides = size >= 1 and divisor >= 1 and size % divisor == 0
                expected = f"a divisor of {operator_type}'s size {size}"
                require(divides, f"Fused.{field}", divisor, expected)


@dataclasses.dataclass(frozen=True)
class Heads:
    """How many rows one head has in each projection of an attention."""

    query: int
    key: int
    """In what latent attention expands its latent to: of the part without positions."""
    value: int
    rotary: int = 0
    """The last so many rows of each query head turn with the position, and their keys are one for
    all heads: latent attention."""

    def of(self, operator_type: str) -> int:
        """Rows of a head in a projection of this type, 0 where it has no heads."""
        part = _IN_HEADS.get(operator_type)
        return getattr(self, part) if part else 0


_IN_HEADS = {
    "attn_q": "query",
    "attn_k": "key",
    "attn_v": "value",
    "mla_q_b": "query",
    "mla_k_b": "key",
    "mla_v_b": "value",
}
"""Operator types whose matrices are made of heads, and which of `Heads` tells how."""


def in_heads(operator_type: str) -> bool:
    """Whether matrices of this type divide by heads."""
    return operator_type in _IN_HEADS or operator_type == "mla_kv_b"


def by_head(name: str, shape: tuple[int, ...], target: str | Fused, heads: Heads) -> str | Fused:
    """How a parameter holds a matrix for each head of its queries, keys and values.

    Everything else stays as it is, and so does a part whose ``heads`` are given.

    Args:
        name: For errors.
        shape: Of the parameter.
        target: What it is without heads.
        heads: Of its attention.

    Raises:
        ValueError: The rows are no multiple of a head's.
    """
    if target == "mla_kv_b":  # keys and values of each head in turn
        both = heads.key + heads.value
        number = _count(name, shape[-2], both)
        parts = (("mla_k_b", number * heads.key), ("mla_v_b", number * heads.value))
        return Fused(parts, groups=number, heads={kind: number for kind, _ in parts})
    if isinstance(target, str):
        if not heads.of(target):
            return target
        target = Fused(((target, shape[-2]),))
    found = {
        kind: _count(name, size, rows) for kind, size in target.parts if (rows := heads.of(kind))
    }
    return dataclasses.replace(target, heads={**found, **target.heads})


def _count(name: str, size: int, rows: int) -> int:
    remedy = "per_head=ROWS gives another, and a pattern with Fused(..., heads=...) their number"
    expected = f"a multiple of {rows}, what one head has: {remedy}"
    require(size % rows == 0, name, f"{size} rows of heads", expected)
    return size // rows


def cut_views(name: str, shape: tuple[int, ...], target: str | Fused) -> tuple[MatrixView, ...]:
    """The matrices of one parameter.

    Args:
        name: For errors.
        shape: ``(m, n)``, ``(E, m, n)`` for E matrices, or that of a convolution, ``(out, in,
            height, width)``, for the one matrix ``(out, in * height * width)``.
        target: The operator type of each matrix, or how it holds several.

    Raises:
        ValueError: The shape has other dims, or the parts do not add up to it.
    """
    if len(shape) == 4 and isinstance(target, str):
        return (MatrixView("", target, None),)
    require(len(shape) in (2, 3), name, f"shape {shape} for {target!r}", "(m, n) or (E, m, n)")
    whole = ((0, shape[-2]), (0, shape[-1]))
    if isinstance(target, str):
        matrix = [MatrixView("", target, None)]
    else:
        matrix = _fused_views(name, whole, target)
    if len(shape) == 2:
        return tuple(matrix)
    views = []
    for expert, view in itertools.product(range(shape[0]), matrix):
        suffix = f"[{expert}.{view.suffix[1:]}" if view.suffix else f"[{expert}]"
        boxes = tuple(((expert, expert + 1), *box) for box in view.boxes or (whole,))
        views.append(dataclasses.replace(view, suffix=suffix, boxes=boxes))
    return tuple(views)


def _fused_views(name: str, whole: Box, fused: Fused) -> list[MatrixView]:
    """Views of one matrix, all of which is the box ``whole``."""
    total = sum(size for _, size in fused.parts)
    expected = f"parts that add up to {whole[fused.dim][1]}, its size along dim {fused.dim}"
    require(total == whole[fused.dim][1], name, f"{fused.parts} = {total}", expected)
    labels = _labels([operator_type for operator_type, _ in fused.parts])
    views, offset = [], 0
    for (operator_type, size), label in zip(fused.parts, labels, strict=True):
        share, stride = size // fused.groups, total // fused.groups
        num_heads = fused.heads.get(operator_type, 1)
        for head in range(num_heads):
            start, stop = head * size // num_heads, (head + 1) * size // num_heads
            # Of each group what falls to the head, counted in the part, and how far to shift it.
            found = [
                (max(start, g * share), min(stop, (g + 1) * share), g * (stride - share) + offset)
                for g in range(fused.groups)
            ]
            ranges = [(low + shift, high + shift) for low, high, shift in found if low < high]
            boxes = tuple((r, whole[1]) if fused.dim == 0 else (whole[0], r) for r in ranges)
            suffix = f"[{label}.{head}]" if operator_type in fused.heads else f"[{label}]"
            views.append(MatrixView(suffix, operator_type, boxes, fused.dim))
        offset += share
    return views


def _labels(operator_types: Sequence[str]) -> list[str]:
    """Types without their family (``attn_q`` -> ``q``), where that leaves them distinct."""
    short = [re.sub(r"^(?:attn|mlp|expert|shared_expert)_", "", t) for t in operator_types]
    return short if len(set(short)) == len(short) else list(operator_types)


def check_operator_type(operator_type: str) -> None:
    """Raise ``ValueError`` unless the name of a type is one that reports and files can carry."""
    # "/" stands before the part of the depth in a layer group, "=" in options of commands.
    is_plain = operator_type.isprintable() and not set("/=") & set(operator_type)
    is_valid = is_plain and operator_type.strip() == operator_type != ""
    expected = "a name such as 'attn_q': any characters that print, but no '/' and '='"
    is_valid = is_valid and operator_type.casefold() != ADAMW
    require(is_valid, "operator type", repr(operator_type), expected)


def require(condition: bool, field: str, found: object, expected: str) -> None:
    """Raise ``ValueError`` with what was found and what was expected, unless all is well."""
    if not condition:
        raise ValueError(f"{field}: found {found}, expected {expected}")
