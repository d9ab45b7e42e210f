"""The matrices that one parameter holds: one, one per expert, or several side by side."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

from amo_dist.config import Box, require

# Target of the parameters that AdamW trains.
ADAMW = "adamw"


@dataclasses.dataclass(frozen=True)
class MatrixView:
    """One matrix inside a parameter.

    Attributes:
        suffix: Text after the parameter's name in the matrix's name: empty for the whole parameter,
            else such as ``[attn_q]`` or ``[3]``.
        operator_type: Type of the matrix; matrices of one type share a schedule.
        boxes: Regions of the parameter that make up the matrix, joined along ``dim``. ``None`` is
            the whole parameter: of two dims, or of a convolution, all of whose dims but the first
            become columns.
        dim: Dim of the matrix (0 rows, 1 columns) that counts outputs, along which boxes are
            joined.
    """

    suffix: str
    operator_type: str
    boxes: tuple[Box, ...] | None
    dim: int = 0


@dataclasses.dataclass(frozen=True)
class Fused:
    r"""Several matrices side by side in one parameter.

    A parameter whose rows are q, k and v of grouped-query attention, whose shape alone does not
    give the three sizes::

        Fused((("attn_q", 3072), ("attn_k", 1024), ("attn_v", 1024)))

    A 3-D parameter ``(E, m, n)`` is divided this way in each of its E matrices. A single part with
    ``heads`` is a projection that is orthogonalized head by head; one pattern covers all layers::

        {r".*\.q_proj\.weight": Fused((("attn_q", 3072),), heads={"attn_q": 24})}

    Attributes:
        parts: ``(operator type, size along dim)`` in the order of storage; the sizes add up to the
            parameter's size along ``dim``. An operator type occurs once.
        dim: 0 if the parts are rows of the matrix (``nn.Linear``), 1 if they are columns.
        groups: Number of equal groups in which ``dim`` is interleaved (usually KV groups); each
            group holds its share of every part, in order. 1 stores each part in one piece.
        heads: Number of heads by operator type; that part becomes so many equal matrices.

    Raises:
        ValueError: A field has another type than declared, an operator type occurs twice or has a
            name that files cannot hold, or ``groups`` or ``heads`` does not divide a size.
    """

    parts: tuple[tuple[str, int], ...]
    dim: int = 0
    groups: int = 1
    heads: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        is_pairs = isinstance(self.parts, (tuple, list)) and all(map(_is_part, self.parts))
        types = [operator_type for operator_type, _ in self.parts] if is_pairs else []
        expected = "pairs (operator type, integer size), at least one, of distinct types"
        require(0 < len(types) == len(set(types)), "Fused.parts", repr(self.parts), expected)
        for operator_type in types:
            check_operator_type(operator_type)
        is_dim = type(self.dim) is int and self.dim in (0, 1)
        require(is_dim, "Fused.dim", repr(self.dim), "0 (rows) or 1 (columns)")
        is_mapping = isinstance(self.heads, Mapping) and self.heads.keys() <= set(types)
        expected = f"a mapping of operator types among {types} to integers"
        require(is_mapping, "Fused.heads", repr(self.heads), expected)
        for operator_type, size in self.parts:
            divisors = {"groups": self.groups, "heads": self.heads.get(operator_type, 1)}
            for field, divisor in divisors.items():
                divides = type(divisor) is int and divisor >= 1 and size % divisor == 0
                expected = f"an integer that divides {operator_type}'s size {size}"
                require(divides, f"Fused.{field}", repr(divisor), expected)


def _is_part(part: Any) -> bool:
    is_pair = isinstance(part, (tuple, list)) and len(part) == 2
    return is_pair and isinstance(part[0], str) and type(part[1]) is int and part[1] >= 1


def cut_views(
    name: str,
    shape: tuple[int, ...],
    target: str | Fused,
    is_convolution: bool = False,
    output_dim: int = 0,
) -> tuple[MatrixView, ...]:
    """List the matrices of one parameter.

    Args:
        name: Name of the parameter, for errors.
        shape: ``(m, n)``; ``(..., m, n)`` for one matrix per place in the leading dims, such as
            those of experts; or ``(m, ...)`` of a convolution, for the one matrix of m rows.
        target: Operator type of each matrix, or `Fused` for several.
        is_convolution: Whether the parameter is a convolution's.
        output_dim: Dim of the matrix that counts outputs.

    Raises:
        ValueError: The shape has another number of dims, or the parts do not add up to it.
    """
    is_kernel = is_convolution and len(shape) > 2
    is_known = isinstance(target, str) if is_kernel else 2 <= len(shape) <= 4
    require(is_known, name, f"shape {shape} for {target!r}", "(m, n) or (E, m, n)")
    whole = ((0, shape[-2]), (0, shape[-1]))
    if isinstance(target, str):
        matrix = [MatrixView("", target, None, output_dim)]
    else:
        matrix = _fused_views(name, whole, target)
    if len(shape) == 2 or is_kernel:
        return tuple(matrix)
    views = []
    places = itertools.product(*map(range, shape[:-2]))
    for place, view in itertools.product(places, matrix):
        number = ".".join(map(str, place))
        suffix = f"[{number}.{view.suffix[1:]}" if view.suffix else f"[{number}]"
        leading = tuple((index, index + 1) for index in place)
        boxes = tuple((*leading, *box) for box in view.boxes or (whole,))
        views.append(MatrixView(suffix, view.operator_type, boxes, view.dim))
    return tuple(views)


def _fused_views(name: str, whole: Box, fused: Fused) -> list[MatrixView]:
    """List the views of the matrix that occupies the box ``whole``."""
    total = sum(size for _, size in fused.parts)
    expected = f"parts that add up to {whole[fused.dim][1]}, its size along dim {fused.dim}"
    require(total == whole[fused.dim][1], name, f"{fused.parts} = {total}", expected)
    views, offset = [], 0
    for operator_type, size in fused.parts:
        share, rows = size // fused.groups, size // fused.heads.get(operator_type, 1)
        # Pieces that neither a group nor a head divides further, in the order of the part.
        length = math.gcd(share, rows)
        starts = [
            group * (total // fused.groups) + offset + start
            for group in range(fused.groups)
            for start in range(0, share, length)
        ]
        for head in range(size // rows):
            own = starts[head * rows // length : (head + 1) * rows // length]
            ranges = [(start, start + length) for start in own]
            boxes = tuple((r, whole[1]) if fused.dim == 0 else (whole[0], r) for r in ranges)
            suffix = f".{head}]" if operator_type in fused.heads else "]"
            views.append(MatrixView(f"[{operator_type}{suffix}", operator_type, boxes, fused.dim))
        offset += share
    return views


def check_operator_type(operator_type: str) -> None:
    """Raise ``ValueError`` for a name of a type that reports and files cannot hold."""
    # "/" separates the layer group, and "=" the value of a command's option.
    is_plain = operator_type.isprintable() and not set("/=") & set(operator_type)
    is_name = operator_type.strip() == operator_type and operator_type.casefold() not in ("", ADAMW)
    expected = "a printable name without '/' and '=', such as 'attn_q'"
    require(is_plain and is_name, "operator type", repr(operator_type), expected)
