"""Patterns of the user: their form, the names that they match, and lines to paste."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import TypeAlias

from amo_dist.config import require
from amo_dist.operators.views import ADAMW, Fused, check_operator_type

Target: TypeAlias = "str | Fused | None"
# Regular expression over cleaned names -> operator type, ``"adamw"`` or ``None``, or `Fused`.
Patterns: TypeAlias = Mapping[str, Target]

# Modules that wrappers add around another: torch.compile, activation checkpointing, FSDP,
# Lightning Fabric, PEFT's layers.
WRAPPER = re.compile(r"_orig_mod|_(?:checkpoint|fsdp)_wrapped_module|_forward_module|base_layer")
# PEFT's copies of whole modules, and parametrizations, whose weight_norm keeps the direction in
# ``original1`` and the magnitude in ``original0``.
_ADDED = re.compile(
    rf"(?:{WRAPPER.pattern}|modules_to_save\.\w+)\."
    r"|parametrizations\.(?=\w+\.original)|(?<=\w)\.original1?$"
)
# Names of weights, and of embeddings and heads.
_WEIGHT = re.compile(r"(?:.*\.)?(?:w|w_\w+|\w*(?:weight|proj|kernel|matrix))")
_TABLE = re.compile(r"emb|head|classifier|output\.w")


def clean_name(name: str) -> str:
    """Remove the components that wrappers add to a name.

    Those of ``torch.compile``, activation checkpointing, FSDP, Fabric, PEFT and parametrizations go
    wherever they stand, the ``module.`` of DDP at the start.
    """
    return _ADDED.sub("", name).removeprefix("module.")


def check_patterns(patterns: Patterns | None) -> Patterns:
    """Check patterns, and write ``None`` for AdamW in any case of letters.

    Raises:
        ValueError: An expression is malformed, or a value has another type than `Patterns` allows.
    """
    checked = {
        pattern: None if str(target).casefold() == ADAMW else target
        for pattern, target in (patterns or {}).items()
    }
    check_expressions("patterns", checked)
    for pattern, target in checked.items():
        is_valid = target is None or isinstance(target, (str, Fused))
        expected = "an operator type, 'adamw', None or Fused"
        require(is_valid, f"patterns[{pattern!r}]", target, expected)
        if isinstance(target, str):
            check_operator_type(target)
    return checked


def check_expressions(
    field: str, expressions: Iterable[str], names: Collection[str] | None = None
) -> None:
    """Refuse malformed regular expressions, and those that match none of the names.

    Raises:
        ValueError: Names the field and the expression.
    """
    for expression in expressions:
        try:
            pattern = re.compile(expression)
        except re.error as error:
            expected = f"expected a regular expression ({error})"
            raise ValueError(f"{field}: found {expression!r}, {expected}") from error
        value = f"{expression!r}, which matches no parameter"
        expected = "one that matches a whole name (a tied parameter's first), or allow_unused=True"
        require(names is None or any(map(pattern.fullmatch, names)), field, value, expected)


def own_words(name: str) -> str:
    """Write an operator type of the last two words of a parameter's name."""
    parts = [part for part in name.split(".") if not part.isdigit() and part != "weight"]
    return re.sub(r"\W+", "_", "_".join(parts[-2:])).lower() or "matrix"


def format_patterns(shapes: Mapping[str, tuple[int, ...]], others: Iterable[str] = ()) -> str:
    """Write patterns as Python, with the count and the shapes of each one's matches.

    A line after them says which values a pattern may have. Two dims (and four, of a convolution)
    become a matrix if the name is a weight's: other raw tensors are often tables, which AdamW
    trains, like embeddings and heads.

    Args:
        shapes: Shapes of the parameters that need a pattern.
        others: Names that no pattern may match.
    """
    names_by_kind = defaultdict[tuple[str, str], list[str]](list)
    for name, shape in shapes.items():
        is_matrix = len(shape) in (2, 4) and _WEIGHT.fullmatch(name) and not _TABLE.search(name)
        kind = own_words(name) if is_matrix else ADAMW
        names_by_kind[re.sub(r"\b\d+\b", "0", name), kind].append(name)
    lines = []
    for (_, kind), names in names_by_kind.items():
        parts = (r"\d+" if part.isdigit() else re.escape(part) for part in names[0].split("."))
        expression = r"\.".join(parts)
        strangers = {*others, *shapes} - {*names}
        if any(re.fullmatch(expression, stranger) for stranger in strangers):
            expression = "|".join(map(re.escape, names))
        sizes = ", ".join(dict.fromkeys(str(shapes[name]) for name in names))
        lines.append(f'    r"{expression}": "{kind}",  # {len(names)} of {sizes}')
    remark = "A value is an operator type of any name (its matrices share a schedule), 'adamw', or "
    remark += "amo_dist.Fused(...) for several matrices side by side."
    return "\n".join(["patterns = {", *lines, "}", remark])
