"""Parameter groups for the optimizers, and a table of what is in them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Literal

from torch import nn

from amo_dist.config import sort_operator_types
from amo_dist.operators.heads import heads_by_name
from amo_dist.operators.patterns import (
    BY_PATTERN,
    OUTSIDE,
    Found,
    Patterns,
    Shapes,
    check_expressions,
    check_patterns,
    clean_name,
    find,
    is_head,
    unknown_matrices,
)
from amo_dist.operators.views import ADAMW, Heads, cut_views, in_heads, require


def param_groups(
    model: nn.Module | Sequence[nn.Module],
    *,
    patterns: Patterns | None = None,
    report: bool = False,
    no_decay: Sequence[str] = (),
    lr_multipliers: Mapping[str, float] | None = None,
    allow_unused: bool = False,
    flatten_conv: bool = False,
    unknown: Literal["error", "matrix"] = "error",
    per_head: bool | int = False,
) -> list[dict[str, Any]]:
    """Parameter groups for the optimizers: matrices to the Muon family, the rest to AdamW.

    By default at most two groups, first ``{"params": [(name, parameter), ...], "algorithm":
    "muon", "matrix_views": {name: views}}``, then ``{"params": ..., "algorithm": "adamw"}``; a
    group that would be empty is left out. Names are cleaned of wrappers. Frozen parameters are left
    out, and a tied parameter appears once, under its first name. ``no_decay`` and
    ``lr_multipliers`` split the groups further, in an order that only depends on the arguments.

    Args:
        model: A module, wrapped or sharded in place or not, or the parts of one (pipeline stages).
        patterns: See ``classify``.
        report: Print ``describe`` of the groups, and what was left out.
        no_decay: Regular expressions (``re.fullmatch`` on cleaned names) of parameters whose group
            has ``weight_decay`` 0.
        lr_multipliers: Regular expression -> factor on the learning rate, first match wins. The
            factor is the group's ``lr_scale``, which schedulers, unlike ``lr``, do not overwrite.
        allow_unused: Accept expressions that match no parameter. By default such a one is an error,
            as it is most often a typo; a pipeline stage may need the leave, as it holds only its
            own blocks.
        flatten_conv: Convolutions of four dims inside blocks, ``(out, in, height, width)``, are
            matrices ``(out, in * height * width)`` of the operator type ``conv``, as in Keller
            Jordan's Muon; depthwise ones stay with AdamW, as all do by default. A pattern that
            names a convolution does the same for it.
        unknown: ``"matrix"`` makes one operator type, ``matrix``, of all parameters of two dims
            whose names nobody knows, inside blocks and outside, but for heads by their names and
            what ``nn.Embedding`` holds. By default AdamW has those outside of blocks, and those
            inside are an error.
        per_head: Make a matrix of each head's queries, keys and values (``attn_q``, ``attn_k``,
            ``attn_v``, and what latent attention expands). ``True`` reads the rows of a head from
            the modules of the attention and their configurations; an integer is that number.

    Raises:
        ValueError: nothing to train, an unknown matrix inside a block (see ``classify``), an
            unused expression, two parameters of one name, FSDP1, which hides the matrices, or
            heads whose size nothing tells or that does not divide a projection.
    """
    factors = lr_multipliers or {}
    # A bare string would be taken letter by letter.
    require(not isinstance(no_decay, str), "no_decay", no_decay, "a list of expressions")
    for pattern, factor in factors.items():
        is_valid = math.isfinite(factor) and factor > 0
        require(is_valid, f"lr_multipliers[{pattern!r}]", factor, "a number > 0")
    require(unknown in ("error", "matrix"), "unknown", repr(unknown), "'error' or 'matrix'")
    is_valid = isinstance(per_head, bool) or (isinstance(per_head, int) and per_head > 1)
    require(is_valid, "per_head", repr(per_head), "True, False or the rows of a head, 2 or more")
    targets = check_patterns(patterns)
    parts = [model] if isinstance(model, nn.Module) else model
    names = named_parameters(parts)
    expressions = {"patterns": targets, "no_decay": no_decay, "lr_multipliers": factors}
    for field, some in expressions.items():
        check_expressions(field, some)
        for pattern in () if allow_unused else some:
            is_used = any(re.fullmatch(pattern, name) for name in names.values())
            expected = "one that matches the whole of a cleaned name (allow_unused=True accepts it)"
            require(is_used, field, f"{pattern!r}, which matches no parameter", expected)
    parameters = [(name, each) for each, name in names.items() if each.requires_grad]
    for name, count in Counter(name for name, _ in parameters).items():
        require(count == 1, "model", f"two parameters {name!r}", "distinct names")
    shapes = {name: tuple(parameter.shape) for parameter, name in names.items()}
    matrices = _unnamed(parts, parameters) if unknown == "matrix" else frozenset()
    heads = heads_by_name(parts, names.values(), per_head)
    found = _find_all(parameters, targets, shapes, matrices, flatten_conv, heads)
    if per_head:
        _check_heads(found, heads)
    groups: dict[tuple[bool, bool, int], dict[str, Any]] = {}
    for name, parameter in parameters:
        views, _ = found[name]
        key = (not views, _first_match(no_decay, name) >= 0, _first_match(factors, name))
        group = groups.setdefault(key, _new_group(*key, [*factors.values()]))
        group["params"].append((name, parameter))
        if views:
            group["matrix_views"][name] = views
    num_frozen = len(names) - len(parameters)
    require(bool(groups), "model", f"{num_frozen} frozen parameters", "one to train, at least")
    result = [groups[key] for key in sorted(groups)]
    if report:
        print(describe(result, {name: reason for name, (_, reason) in found.items()}, num_frozen))
    return result


def _find_all(
    parameters: Sequence[tuple[str, nn.Parameter]],
    targets: Patterns,
    shapes: Shapes,
    matrices: Container[str],
    flatten_conv: bool,
    heads: Mapping[str, Heads],
) -> dict[str, Found]:
    """What each parameter is, by name; see `param_groups`.

    ``matrices`` are those that are matrices where their names tell nothing; ``heads`` those to
    divide by, by the name of a parameter.
    """
    found: dict[str, Found] = {}
    unknown: dict[str, tuple[int, ...]] = {}
    for name, _ in parameters:
        each = find(name, shapes[name], targets, shapes, flatten_conv, heads.get(name))
        if name in matrices and (each is None or each[1] == OUTSIDE):
            found[name] = cut_views(name, shapes[name], "matrix"), "of an unknown name"
        elif each is not None:
            found[name] = each
        else:
            unknown[name] = shapes[name]
    if unknown:
        outside = {name: shapes[name] for name, (_, reason) in found.items() if reason == OUTSIDE}
        raise unknown_matrices(unknown, outside)
    return found


def _check_heads(found: Mapping[str, Found], heads: Mapping[str, Heads]) -> None:
    """Refuse to leave together what was to be divided by heads."""
    for name, (views, reason) in found.items():
        kinds = {view.operator_type for view in views or ()}
        is_told = name in heads or not any(map(in_heads, kinds))
        expected = "per_head=ROWS of one head, or a pattern with Fused(..., heads=...)"
        require(is_told, f"per_head: {name}", "no module that tells its heads", expected)
        is_known = kinds != {"attn_qkv"} or reason == BY_PATTERN
        expected = "a pattern with Fused(..., groups=..., heads=...) that tells it"
        require(is_known, f"per_head: {name}", "heads in an order that nothing tells", expected)


def _unnamed(
    parts: Sequence[nn.Module], parameters: Sequence[tuple[str, nn.Parameter]]
) -> frozenset[str]:
    """Names of what is a matrix if its name tells nothing else."""
    modules = (module for part in parts for module in part.modules())
    embeddings = {m.weight for m in modules if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
    return frozenset(
        name
        for name, parameter in parameters
        if parameter.dim() == 2 and parameter not in embeddings and not is_head(name)
    )


def describe(
    groups: Sequence[Mapping[str, Any]],
    reasons: Mapping[str, str] | None = None,
    num_frozen: int = 0,
) -> str:
    """A table of names, shapes and operator types of the groups, followed by counts.

    Args:
        groups: From `param_groups`.
        reasons: By name, why a parameter went where it did.
        num_frozen: How many parameters were left out.
    """
    rows = [("parameter", "shape", "operator type")]
    counts, entries = Counter[str](), Counter[str]()
    for group in groups:
        notes = [f"{key} {group[key]}" for key in ("weight_decay", "lr_scale") if key in group]
        for name, parameter in group["params"]:
            views = group.get("matrix_views", {}).get(name, ())
            kinds = [view.operator_type for view in views] or [ADAMW]
            counts.update(kinds)
            entries["orthogonalized" if views else ADAMW] += parameter.numel()
            number = f"{len(views)} matrices" if len(views) > 1 else ""
            told = "; ".join(filter(None, [number, (reasons or {}).get(name), *notes]))
            kind = ", ".join(sort_operator_types(kinds)) + (f" ({told})" if told else "")
            rows.append((name, str(tuple(parameter.shape)), kind))
    summary = [(kind, str(counts[kind])) for kind in sort_operator_types(counts)]
    totals = [f"{number:,} entries {kind}" for kind, number in entries.items()]
    totals += [f"{num_frozen} frozen parameters left out"] if num_frozen else []
    table = [*_align(rows), "", *_align([("operator type", "count"), *summary])]
    return "\n".join([*table, "", ", ".join(totals)])


def _align(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    padded = [[cell.ljust(w) for cell, w in zip(row, widths, strict=True)] for row in rows]
    return ["  ".join(cells).rstrip() for cells in padded]


def _first_match(patterns: Iterable[str], name: str) -> int:
    """Index of the first expression that matches a name, -1 for none."""
    matches = (index for index, pattern in enumerate(patterns) if re.fullmatch(pattern, name))
    return next(matches, -1)


def _new_group(
    is_adamw: bool, is_undecayed: bool, index: int, factors: Sequence[float]
) -> dict[str, Any]:
    group: dict[str, Any] = {"params": [], "algorithm": ADAMW}
    if not is_adamw:
        group |= {"algorithm": "muon", "matrix_views": {}}
    if is_undecayed:
        group["weight_decay"] = 0.0
    if index >= 0:
        group["lr_scale"] = float(factors[index])
    return group


def named_parameters(parts: Sequence[nn.Module]) -> dict[nn.Parameter, str]:
    """The cleaned name of each parameter, the first one where it is tied.

    Raises:
        ValueError: FSDP1, which hides the matrices.
    """
    names: dict[nn.Parameter, str] = {}
    for part in parts:
        for name, module in part.named_modules():
            is_fsdp1 = type(module).__name__ == "FullyShardedDataParallel"
            found = f"FullyShardedDataParallel at {name!r}"
            require(not is_fsdp1, "model", found, "fully_shard (FSDP1 flattens the matrices)")
        for name, parameter in part.named_parameters():
            names.setdefault(parameter, clean_name(name))
    return names
