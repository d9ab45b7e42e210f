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
from amo_dist.operators.parts import AS_ONE, ASSUMED, by_head, divide, in_heads, output_dim
from amo_dist.operators.patterns import (
    Patterns,
    check_expressions,
    check_patterns,
    clean_name,
    format_patterns,
)
from amo_dist.operators.roles import CONVOLUTION, OUTSIDE, UNKNOWN, role_of
from amo_dist.operators.tree import Place, read_tree
from amo_dist.operators.views import ADAMW, MatrixView, cut_views

logger = logging.getLogger(__name__)

# Reason of a parameter that one of the user's patterns matches.
BY_PATTERN = "by your pattern"
# Remark of queries, keys or values that ``per_head`` leaves whole.
WHOLE = "whole in spite of per_head"
# What is said of each remark, and how to decide otherwise.
_DOUBTS = {
    OUTSIDE: "AdamW trains what stands outside of any block",
    ASSUMED: "queries, keys and values are taken to lie one behind the other; if heads alternate, "
    "pass Fused(..., groups=...)",
    AS_ONE: "several matrices in an unknown order are orthogonalized as one",
    WHOLE: "per_head divides the types attn_q, attn_k and attn_v, and Fused(..., heads=...)",
}
# Packed types whose heads nothing tells.
_INTERLEAVED = ("attn_qkv", "attn_qkvz", "attn_kv", "attn_qk")


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
        report: Print `describe` of the groups, with the number of frozen parameters.
        no_decay: Regular expressions (``re.fullmatch`` on cleaned names) of parameters whose group
            has ``weight_decay`` 0. ``True`` means norms, biases and embeddings: all parameters of
            AdamW with fewer than two dims, those that are or are named embeddings, and what modules
            ask for: the names of timm's ``no_weight_decay()``, and parameters with Mamba's
            attribute ``_no_weight_decay``.
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
            raw tensors inside blocks that neither modules nor names explain, and banks of matrices
            outside. ``"matrix"`` makes all of these that have two dims one operator type,
            ``matrix``, except heads and embeddings.
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
    parts = _as_modules(model)
    places = read_tree(parts)
    names = {place.parameter: place.name for place in places}
    expressions = {"patterns": targets, "no_decay": undecayed, "lr_multipliers": factors}
    for field, patterns_of_field in expressions.items():
        check_expressions(field, patterns_of_field)
        if not allow_unused:
            _check_use(field, patterns_of_field, parts, names)
    trained = [place for place in places if place.parameter.requires_grad]
    for name, count in Counter(place.name for place in trained).items():
        require(count == 1, "model", f"two parameters {name!r}", "distinct names")
    decide(places, targets, flatten_conv=flatten_conv, takes_unknown=unknown == "matrix")
    _refuse_unknown(trained, places, unknown)
    views_by_name = {place.name: _cut(place, per_head) for place in trained}
    pairs_by_key = defaultdict[tuple[bool, bool, int], list[tuple[str, nn.Parameter]]](list)
    spared = _spared(parts) if no_decay is True else set()
    for place in trained:
        name, parameter = place.name, place.parameter
        views = views_by_name[name]
        is_undecayed = _first_match(undecayed, name) >= 0 or name in spared
        if no_decay is True:
            is_table = not views and (place.is_embedding or place.reason == "embedding")
            is_undecayed |= (not views and parameter.dim() < 2) or is_table
            is_undecayed |= getattr(parameter, "_no_weight_decay", False)
        key = (not views, is_undecayed, _first_match(factors, name))
        pairs_by_key[key].append((name, parameter))
    num_frozen = len(places) - len(trained)
    expected = "at least one with requires_grad"
    require(bool(trained), "model", f"{num_frozen} frozen parameters", expected)
    groups: list[dict[str, Any]] = []
    for (is_adamw, is_undecayed, index), pairs in sorted(pairs_by_key.items()):
        group: dict[str, Any] = {"params": pairs, "algorithm": ADAMW if is_adamw else "muon"}
        if not is_adamw:
            group["matrix_views"] = {name: views_by_name[name] for name, _ in pairs}
        if is_undecayed:
            group["weight_decay"] = 0.0
        if index >= 0:
            group["muon_lr_factor"] = float([*factors.values()][index])
        groups.append(group)
    _say(trained, views_by_name)
    if report:
        print(describe(groups, {p.name: p.reason for p in trained}, num_frozen))
    return groups


def _as_modules(model: Any) -> list[nn.Module]:
    is_single = isinstance(model, nn.Module) or not isinstance(model, Iterable)
    parts = [model] if is_single else list(model)
    for part in parts:
        expected = "a module or a list of modules: param_groups(model), not model.parameters()"
        require(isinstance(part, nn.Module), "model", f"a {type(part).__name__}", expected)
    return parts


def _check_use(
    field: str,
    patterns: Iterable[str],
    parts: Sequence[nn.Module],
    names: Mapping[nn.Parameter, str],
) -> None:
    """Refuse expressions that match no parameter, and name the first name of a tied one."""
    for pattern in patterns:
        if any(re.fullmatch(pattern, name) for name in names.values()):
            continue
        for part in parts:
            for alias, parameter in part.named_parameters(remove_duplicate=False):
                tied = f"{pattern!r}, and {clean_name(alias)} is tied to {names[parameter]}"
                is_alias = re.fullmatch(pattern, clean_name(alias)) is not None
                require(not is_alias, field, tied, f"one that matches {names[parameter]}")
        expected = "one that matches a whole name, or allow_unused=True"
        require(False, field, f"{pattern!r}, which matches no parameter", expected)


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
            # A matrix of one row or column is a vector, such as a magnitude of a neuron.
            place.target = "matrix" if min(place.shape) > 1 else None
            place.reason = UNKNOWN if place.target else "vector"


def _refuse_unknown(trained: Sequence[Place], places: Sequence[Place], unknown: str) -> None:
    shapes = {p.name: p.shape for p in trained if (p.target, p.reason) == (None, UNKNOWN)}
    value = f"tensors of unknown roles ({len(shapes)}), first {[*shapes][:1]}"
    expected = "a pattern for each"
    if unknown == "error" and any(len(shape) == 2 for shape in shapes.values()):
        expected += ", or unknown='matrix', which makes all of two dims one operator type"
    others = [place.name for place in places if place.name not in shapes]
    lines = format_patterns(shapes, others, of_raw_tensors=True)
    require(
        not shapes,
        "patterns",
        value,
        f"{expected}. Paste, edit and pass as patterns=patterns:\n{lines}",
    )


def _cut(place: Place, per_head: bool | int) -> tuple[MatrixView, ...] | None:
    """Cut a parameter into its matrices."""
    target = place.target
    if target is None:
        return None
    if per_head:
        has_order = place.reason == BY_PATTERN or target not in _INTERLEAVED
        expected = "a pattern with Fused(..., groups=..., heads=...)"
        value = "queries, keys, values in unknown order"
        require(has_order, f"per_head: {place.name}", value, expected)
        is_other = isinstance(target, str) and not in_heads(target)
        if place.reason == BY_PATTERN and is_other and in_heads(place.kind or ""):
            place.reason = WHOLE
        target = by_head(place, per_head)
    return cut_views(
        place.name,
        place.shape,
        target,
        is_convolution=place.is_convolution,
        output_dim=output_dim(place),
    )


def _spared(parts: Sequence[nn.Module]) -> set[str]:
    """Names that modules spare from weight decay by the method ``no_weight_decay`` of timm."""
    names = set()
    for part in parts:
        for prefix, module in part.named_modules():
            method = getattr(module, "no_weight_decay", None)
            own = method() if callable(method) else ()
            names |= {clean_name(f"{prefix}.{name}".lstrip(".")) for name in own}
    return names


def _say(
    places: Sequence[Place], views_by_name: Mapping[str, tuple[MatrixView, ...] | None]
) -> None:
    """Log what was decided, and warn of what is doubtful; rank 0 alone."""
    if dist.is_available() and dist.is_initialized() and dist.get_rank() != 0:
        return
    entries, reasons = Counter[bool](), Counter[str]()
    names_by_doubt = defaultdict[str, dict[str, None]](dict)
    for place in places:
        if place.node.in_block:
            entries[place.target is not None] += place.parameter.numel()
        if place.target is None:
            is_vector = place.reason in ("0-D", "1-D", "bias")
            reasons["vector" if is_vector else place.reason] += 1
        if place.reason in _DOUBTS and sum(size > 1 for size in place.shape) > 1:
            # Names that differ in numbers alone are one.
            names_by_doubt[place.reason][re.sub(r"\b\d+\b", "N", place.name)] = None
    number = sum(len(views or ()) for views in views_by_name.values())
    share = entries[True] / max(entries.total(), 1)
    others = [f"{reason} ({count})" if count > 1 else reason for reason, count in reasons.items()]
    text = "%d matrices, %.0f%% of the entries of blocks; AdamW: %s"
    logger.info(text, number, 100 * share, ", ".join(others) or "nothing")
    doubts = [f"{_DOUBTS[doubt]}: {', '.join(names)}" for doubt, names in names_by_doubt.items()]
    if doubts:
        logger.warning("patterns decide otherwise than this: %s", "; ".join(doubts))


def describe(
    groups: Sequence[Mapping[str, Any]], reasons: Mapping[str, str], num_frozen: int
) -> str:
    """Format a table of names, shapes and operator types of the groups, and counts in lines.

    Args:
        groups: Result of `param_groups`.
        reasons: Reason or remark of each parameter, by name.
        num_frozen: Number of frozen parameters that were left out.
    """
    rows = [("parameter", "shape", "operator type")]
    counts, entries = Counter[str](), Counter[str]()
    for group in groups:
        notes = [
            f"{key} {group[key]}" for key in ("weight_decay", "muon_lr_factor") if key in group
        ]
        for name, parameter in group["params"]:
            views = group.get("matrix_views", {}).get(name, ())
            kinds = [view.operator_type for view in views] or [ADAMW]
            counts.update(kinds)
            entries["orthogonalized" if views else ADAMW] += parameter.numel()
            number = f"{len(kinds)} matrices" if len(kinds) > 1 else ""
            remark = "; ".join(filter(None, [number, reasons[name], *notes]))
            kind = ", ".join(sort_operator_types(kinds)) + (f" ({remark})" if remark else "")
            rows.append((name, str(tuple(parameter.shape)), kind))
    totals = [f"{number:,} entries {kind}" for kind, number in entries.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    summary = ", ".join(f"{counts[kind]} {kind}" for kind in sort_operator_types(counts))
    totals.append(f"{num_frozen} frozen parameters left out")
    return "\n".join([*table, "", summary, ", ".join(totals)])


def _first_match(patterns: Iterable[str], name: str) -> int:
    """Index of the first expression that matches a name, -1 for none."""
    matches = (index for index, pattern in enumerate(patterns) if re.fullmatch(pattern, name))
    return next(matches, -1)
