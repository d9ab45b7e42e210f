"""Parameter groups for the optimizers, and a table of their contents."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch.distributed as dist
from torch import nn

from amo_dist.config import require, sort_operator_types
from amo_dist.operators.parts import AS_ONE, ASSUMED, cut, divide
from amo_dist.operators.patterns import Patterns, check_expressions, check_patterns, format_patterns
from amo_dist.operators.roles import CONVOLUTION, OUTSIDE, UNKNOWN, role_of
from amo_dist.operators.tree import Place, read_tree
from amo_dist.operators.views import ADAMW

logger = logging.getLogger(__name__)

# Reason of a parameter that one of the user's patterns matches.
BY_PATTERN = "by your pattern"
# Reasons of parameters that are no maps.
_TABLES = ("embedding", "relative positions", "state-space table", "table")
# What is said of each remark, and how to decide otherwise.
_DOUBTS = {
    OUTSIDE: "AdamW trains what stands outside of any block",
    ASSUMED: "queries, keys and values are taken to lie one behind the other; if heads alternate, "
    "pass Fused(..., groups=...)",
    AS_ONE: "several matrices in an unknown order are orthogonalized as one",
}


def param_groups(
    model: nn.Module | Sequence[nn.Module],
    *,
    patterns: Patterns | None = None,
    report: bool = False,
    no_decay: Sequence[str] | bool = (),
    lr_multipliers: Mapping[str, float] | None = None,
    allow_unused: bool = False,
    flatten_conv: bool = False,
    unknown: Literal["error", "matrix"] = "error",
    per_head: bool | int = False,
) -> list[dict[str, Any]]:
    """Make parameter groups for the optimizers: matrices for the Muon family, the rest for AdamW.

    By default at most two groups, first ``{"params": [(name, parameter), ...], "algorithm":
    "muon", "matrix_views": {name: views}}``, then ``{"params": ..., "algorithm": "adamw"}``; an
    empty group is left out. Names lose the components that wrappers add. Frozen parameters are left
    out, and a tied parameter appears once, under its first name. ``no_decay`` and
    ``lr_multipliers`` split the groups further, in an order that depends on the arguments alone.
    Rank 0 logs one line of what was decided, and one warning with the names of what is doubtful.

    Args:
        model: Module, wrapped or sharded in place or not, or several (pipeline stages).
        patterns: Targets by regular expression (``re.fullmatch`` on cleaned names); the first
            match wins, before all built-in ones. A target is an operator type, ``"adamw"`` or
            ``None`` for AdamW, or `Fused` for several matrices.
        report: Print a table of names, shapes and operator types, and the line of the log.
        no_decay: Regular expressions (``re.fullmatch`` on cleaned names) of parameters whose group
            has ``weight_decay`` 0. ``True`` means norms, biases and embeddings: all parameters of
            AdamW with fewer than two dims, those that are or are named embeddings, tables such as
            relative positions, and what modules ask for: the names of timm's
            ``no_weight_decay()``, and parameters with Mamba's attribute ``_no_weight_decay``.
        lr_multipliers: Factors on the learning rate by regular expression; the first match wins.
            The factor is the group's ``muon_lr_factor``, which schedulers, unlike ``lr``, do not
            overwrite.
        allow_unused: Accept expressions that match no parameter. The default refuses them, as most
            are typos; a pipeline stage may need this, as it holds its own blocks alone.
        flatten_conv: Make each convolution inside blocks, of one, two or three dims, such as
            ``(out, in, height, width)``, a matrix ``(out, in * height * width)`` of the operator
            type ``conv``, as in Keller Jordan's Muon. The rows of a transposed one are its inputs.
            Depthwise ones stay with AdamW, like all by default. A pattern that matches a
            convolution does the same for it.
        unknown: ``"error"`` (default) gives linear modules outside of blocks to AdamW, and refuses
            raw tensors inside blocks that neither modules nor names explain. ``"matrix"`` makes all
            of these that have two dims one operator type, ``matrix``, except heads and embeddings.
        per_head: Make one matrix per head of queries, keys and values (``attn_q``, ``attn_k``,
            ``attn_v``, and the expansions of latent attention). ``True`` reads the rows of a head,
            or the number of heads, from the attention's modules and their configurations; an
            integer is the number of rows.

    Raises:
        ValueError: No module, nothing to train, a tensor of unknown role, a malformed pattern or
            one that does not fit the shape, an expression that matches nothing, two parameters of
            one name, FSDP1, which hides the matrices, or heads whose rows no module gives or do not
            divide a projection.
    """
    factors = lr_multipliers or {}
    # A bare string would be read as one expression per letter.
    expected = "a list of expressions, or True for norms, biases and embeddings"
    require(not isinstance(no_decay, str), "no_decay", no_decay, expected)
    undecayed = () if isinstance(no_decay, bool) else no_decay
    for pattern, factor in factors.items():
        is_valid = math.isfinite(factor) and factor > 0
        require(is_valid, f"lr_multipliers[{pattern!r}]", factor, "a number > 0")
    require(unknown in ("error", "matrix"), "unknown", repr(unknown), "'error' or 'matrix'")
    is_valid = isinstance(per_head, bool) or (isinstance(per_head, int) and per_head > 1)
    require(is_valid, "per_head", repr(per_head), "True, False or the rows of a head, 2 or more")
    targets = check_patterns(patterns)
    places = read_tree(model)
    names = [place.name for place in places]
    expressions = {"patterns": targets, "no_decay": undecayed, "lr_multipliers": factors}
    for field, own in expressions.items():
        check_expressions(field, own, None if allow_unused else names)
    trained = [place for place in places if place.parameter.requires_grad]
    for name, count in Counter(place.name for place in trained).items():
        require(count == 1, "model", f"two parameters {name!r}", "distinct names")
    num_frozen = len(places) - len(trained)
    require(len(trained) > 0, "model", f"{num_frozen} frozen parameters", "at least one to train")
    decide(places, targets, flatten_conv=flatten_conv, takes_unknown=unknown == "matrix")
    shapes = {p.name: p.shape for p in trained if (p.target, p.reason) == (None, UNKNOWN)}
    value = f"tensors of unknown roles ({len(shapes)}), first {[*shapes][:1]}"
    expected = "a pattern for each, or unknown='matrix', which makes all of two dims one operator "
    expected += (
        f"type. Paste, edit and pass as patterns=patterns:\n{format_patterns(shapes, names)}"
    )
    require(not shapes, "patterns", value, expected)
    places_by_key = defaultdict[tuple[bool, bool, int], list[Place]](list)
    for place in trained:
        place.views = cut(place, per_head)
        is_undecayed = _first_match(undecayed, place.name) >= 0
        is_undecayed |= no_decay is True and _spares_decay(place)
        key = (not place.views, is_undecayed, _first_match(factors, place.name))
        places_by_key[key].append(place)
    groups: list[dict[str, Any]] = []
    for (is_adamw, is_undecayed, index), members in sorted(places_by_key.items()):
        pairs = [(place.name, place.parameter) for place in members]
        group: dict[str, Any] = {"params": pairs, "algorithm": ADAMW if is_adamw else "muon"}
        if not is_adamw:
            group["matrix_views"] = {place.name: place.views for place in members}
        if is_undecayed:
            group["weight_decay"] = 0.0
        if index >= 0:
            group["muon_lr_factor"] = float([*factors.values()][index])
        groups.append(group)
    summary = _summary(trained, num_frozen)
    if not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0:
        logger.info(summary)
        if doubts := _doubts(trained):
            logger.warning("patterns decide otherwise than this: %s", "; ".join(doubts))
    if report:
        print(f"{_table(trained)}\n\n{summary}")
    return groups


def decide(
    places: Sequence[Place],
    patterns: Patterns,
    *,
    flatten_conv: bool = False,
    takes_unknown: bool = False,
) -> None:
    """Decide the target of each parameter, and the reason.

    Args:
        places: Result of `read_tree`; their ``kind``, ``target`` and ``reason`` are set.
        patterns: Result of `check_patterns`. The first expression that matches the whole name
            wins, before roles and all built-in names.
        flatten_conv: Argument of `param_groups`.
        takes_unknown: Whether matrices of unknown roles become the operator type ``matrix``.
    """
    for place in places:
        place.kind, place.reason = role_of(place)
    for place in places:
        match = next((p for p in patterns if re.fullmatch(p, place.name)), None)
        if match is not None:
            place.target, place.reason = patterns[match], BY_PATTERN
        elif place.kind is not None:
            place.target, place.reason = divide(place, place.kind)
        elif flatten_conv and place.reason == CONVOLUTION:
            place.target, place.reason = "conv", ""
        elif takes_unknown and place.reason in (UNKNOWN, OUTSIDE) and len(place.shape) == 2:
            place.target, place.reason = "matrix", UNKNOWN


def _spares_decay(place: Place) -> bool:
    """Whether AdamW trains a vector or a table, or the model asks to spare a parameter.

    It asks by Mamba's attribute ``_no_weight_decay``, or by timm's method ``no_weight_decay``.
    """
    is_table = place.is_embedding or place.reason in _TABLES or len(place.shape) < 2
    if (is_table and not place.views) or getattr(place.parameter, "_no_weight_decay", False):
        return True
    name = place.field
    for node in place.node.around():
        if name in node.undecayed:
            return True
        name = f"{node.name}.{name}"
    return False


def _summary(places: Sequence[Place], num_frozen: int) -> str:
    """Describe in one line what was decided."""
    entries, reasons = Counter[bool](), Counter[str]()
    for place in places:
        if place.node.in_block:
            entries[bool(place.views)] += place.parameter.numel()
        if not place.views:
            is_vector = place.reason in ("0-D", "1-D", "bias")
            reasons["vector" if is_vector else place.reason] += 1
    number = sum(len(place.views) for place in places)
    share = entries[True] / max(entries.total(), 1)
    others = [f"{reason} ({count})" if count > 1 else reason for reason, count in reasons.items()]
    text = f"{number} matrices, {share:.0%} of the entries of blocks; AdamW: "
    return f"{text}{', '.join(others) or 'nothing'}; {num_frozen} frozen parameters left out"


def _doubts(places: Sequence[Place]) -> list[str]:
    """Describe what is doubtful, with names; those that differ in numbers alone are one."""
    names_by_doubt = defaultdict[str, dict[str, None]](dict)
    for place in places:
        if place.reason in _DOUBTS and sum(size > 1 for size in place.shape) > 1:
            names_by_doubt[_DOUBTS[place.reason]][re.sub(r"\b\d+\b", "N", place.name)] = None
    return [f"{doubt}: {', '.join(names)}" for doubt, names in names_by_doubt.items()]


def _table(places: Iterable[Place]) -> str:
    """Format names, shapes and operator types, with reasons and remarks; matrices first."""
    rows = [("parameter", "shape", "operator type")]
    for place in sorted(places, key=lambda place: not place.views):
        kind = ", ".join(sort_operator_types(view.operator_type for view in place.views)) or ADAMW
        number = f"{len(place.views)} matrices" if len(place.views) > 1 else ""
        remark = "; ".join(filter(None, [number, place.reason]))
        rows.append((place.name, str(place.shape), f"{kind} ({remark})" if remark else kind))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _first_match(patterns: Iterable[str], name: str) -> int:
    """Index of the first expression that matches a name, -1 for none."""
    matches = (index for index, pattern in enumerate(patterns) if re.fullmatch(pattern, name))
    return next(matches, -1)
