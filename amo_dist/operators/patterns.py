"""Patterns of the user: their form, the names that they match, and lines to paste."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from amo_dist.config import require
from amo_dist.operators.views import ADAMW, Fused, check_operator_type

Target: TypeAlias = "str | Fused | None"
# Regular expression over cleaned names -> operator type, ``"adamw"`` or ``None``, or `Fused`.
Patterns: TypeAlias = Mapping[str, Target]
# Shapes of parameters by cleaned name.
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]

# Modules that wrappers add around another: torch.compile, activation checkpointing, FSDP,
# Lightning Fabric, PEFT's layers.
WRAPPERS: tuple[str, ...] = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
WRAPPERS += ("_forward_module", "base_layer")
# Parametrizations, too, whose weight_norm keeps the direction in ``original1`` and the magnitude in
# ``original0``.
_ADDED = re.compile(
    rf"(?:{'|'.join(WRAPPERS)})\.|parametrizations\.(?=\w+\.original)|(?<=\w)\.original1?$"
)
# Names of raw tensors that are weights.
_WEIGHT = re.compile(r"(?:.*\.)?(?:w|w_\w+|\w*(?:weight|proj|kernel|matrix))")
# PEFT's copies of whole modules, one for each adapter.
_COPIES = re.compile(r"modules_to_save\.\w+\.")


def clean_name(name: str, *, keeps_copies: bool = False) -> str:
    """Remove the components that wrappers add to a name.

    Those of ``torch.compile``, activation checkpointing, FSDP, Fabric, PEFT and parametrizations go
    wherever they stand, the ``module.`` of DDP at the start.

    Args:
        name: Name as PyTorch gives it.
        keeps_copies: Keep the names of adapters for which PEFT copies a module.
    """
    name = _ADDED.sub("", name)
    return (name if keeps_copies else _COPIES.sub("", name)).removeprefix("module.")


def check_patterns(patterns: Patterns | None) -> Patterns:
    """Check patterns, and write ``None`` for AdamW in any case of letters.

    Raises:
        ValueError: An expression is malformed, or a value has another type than `Patterns` allows.
    """
    checked = dict(patterns or {})
    check_expressions("patterns", checked)
    for pattern, target in checked.items():
        is_valid = target is None or isinstance(target, (str, Fused))
        expected = "an operator type, 'adamw', None or Fused"
        require(is_valid, f"patterns[{pattern!r}]", target, expected)
        if isinstance(target, str) and target.casefold() == ADAMW:
            checked[pattern] = None
        elif isinstance(target, str):
            check_operator_type(target)
    return checked


def check_expressions(field: str, patterns: Iterable[str]) -> None:
    """Raise ``ValueError`` with the field of a malformed regular expression."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            expected = f"expected a regular expression ({error})"
            raise ValueError(f"{field}: found {pattern!r}, {expected}") from error


def own_words(name: str) -> str:
    """Write an operator type of the last two words of a parameter's name."""
    parts = [part for part in name.split(".") if not part.isdigit() and part != "weight"]
    return re.sub(r"\W+", "_", "_".join(parts[-2:])).lower() or "matrix"


def format_patterns(
    shapes: Shapes, others: Iterable[str] = (), *, of_raw_tensors: bool = False
) -> str:
    """Write patterns as Python, with the count and the shapes of each one's matches.

    A line after them says which values a pattern may have. Two dims (and four, of a convolution)
    become a matrix, but not tables and heads by their names. Of raw tensors only those with a
    weight's name do: others are often tables, which AdamW trains.

    Args:
        shapes: Shapes of the parameters that need a pattern.
        others: Names that no pattern may match.
        of_raw_tensors: Whether no parameter belongs to a linear module or a convolution.
    """
    kinds, alike = dict[str, str](), defaultdict[tuple[str, str], list[str]](list)
    for name, shape in shapes.items():
        is_matrix = len(shape) in (2, 4) and not re.search(r"emb|head|classifier|output\.w", name)
        if of_raw_tensors:
            is_matrix = len(shape) == 2 and _WEIGHT.fullmatch(name) is not None
        kinds[name] = own_words(name) if is_matrix else ADAMW
        alike[re.sub(r"\b\d+\b", "0", name), kinds[name]].append(name)
    lines = []
    for (_, kind), names in alike.items():
        strangers = {*others, *(name for name in shapes if kinds[name] != kind)} - {*names}
        sizes = ", ".join(dict.fromkeys(str(shapes[name]) for name in names))
        expression = _expression(names, strangers)
        lines.append(f'    r"{expression}": "{kind}",  # {len(names)} of {sizes}')
    remark = "A value is an operator type of any name (its matrices share a schedule), 'adamw', or "
    remark += "amo_dist.Fused(...) for several matrices side by side."
    return "\n".join(["patterns = {", *lines, "}", remark])


def _expression(names: list[str], strangers: Iterable[str]) -> str:
    """Write an expression that matches names alike but for numbers, and no stranger."""
    columns = [*zip(*(name.split(".") for name in names), strict=True)]
    escaped = [[*dict.fromkeys(map(re.escape, column))] for column in columns]
    any_number = [r"\d+" if column[0].isdigit() else column[0] for column in escaped]
    these = [f"(?:{'|'.join(column)})" if len(column) > 1 else column[0] for column in escaped]
    for parts in (any_number, these):
        expression = re.compile(r"\.".join(parts))
        if not any(map(expression.fullmatch, strangers)):
            return expression.pattern
    return "|".join(map(re.escape, names))
