"""Parameter groups for the optimizers, and a table of their contents."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from torch import nn

from amo_dist.config import require, sort_operator_types
from amo_dist.operators.modules import sites_by_name
from amo_dist.operators.patterns import (
    UNKNOWN,
    Classified,
    Patterns,
    Shapes,
    check_expressions,
    check_patterns,
    clean_name,
    find_views,
    format_patterns,
)
from amo_dist.operators.views import ADAMW, Site


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

    Args:
        model: Module, wrapped or sharded in place or not, or several (pipeline stages).
        patterns: Targets by regular expression (``re.fullmatch`` on cleaned names); the first
            match wins, before all built-in ones. A target is an operator type, ``"adamw"`` or
            ``None`` for AdamW, or `Fused` for several matrices.
        report: Print `describe` of the groups, with the number of frozen parameters.
        no_decay: Regular expressions (``re.fullmatch`` on cleaned names) of parameters whose group
            has ``weight_decay`` 0. ``True`` means norms, biases and embeddings: all parameters of
            AdamW with fewer than two dims, and those that are or are named embeddings.
        lr_multipliers: Factors on the learning rate by regular expression; the first match wins.
            The factor is the group's ``lr_multiplier``, which schedulers, unlike ``lr``, do not
            overwrite.
        allow_unused: Accept expressions that match no parameter. The default refuses them, as most
            are typos; a pipeline stage may need this, as it holds its own blocks alone.
        flatten_conv: Make each convolution inside blocks, of one, two or three dims, such as
            ``(out, in, height, width)``, a matrix ``(out, in * height * width)`` of the operator
            type ``conv``, as in Keller Jordan's Muon. The rows of a transposed one are its inputs.
            Depthwise ones stay with AdamW, like all by default. A pattern that matches a
            convolution does the same for it.
        unknown: ``"error"`` (default) gives matrices of unknown names to AdamW outside of blocks
            and refuses them inside. ``"matrix"`` makes all of them one operator type, ``matrix``,
            except heads by their names and the weights of ``nn.Embedding``.
        per_head: Make one matrix per head of queries, keys and values (``attn_q``, ``attn_k``,
            ``attn_v``, and the expansions of latent attention). ``True`` reads the rows of a head
            from the attention's modules and their configurations; an integer is that number.

    Raises:
        ValueError: No module, nothing to train, a matrix of unknown name inside a block, a
            malformed pattern or one that does not fit the shape, an expression that matches
            nothing, two parameters of one name, FSDP1, which hides the matrices, or heads whose
            rows no module gives or do not divide a projection.
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
    names = named_parameters(parts)
    expressions = {"patterns": targets, "no_decay": undecayed, "lr_multipliers": factors}
    for field, patterns_of_field in expressions.items():
        check_expressions(field, patterns_of_field)
        if not allow_unused:
            _check_use(field, patterns_of_field, parts, names)
    parameters = [(name, param) for param, name in names.items() if param.requires_grad]
    for name, count in Counter(name for name, _ in parameters).items():
        require(count == 1, "model", f"two parameters {name!r}", "distinct names")
    shapes = {name: tuple(parameter.shape) for parameter, name in names.items()}
    sites = sites_by_name(parts, per_head)
    options = {"flatten_conv": flatten_conv, "per_head": bool(per_head)}
    options["takes_unknown"] = unknown == "matrix"
    classified = _classify(parameters, targets, shapes, sites, **options)
    pairs_by_key = defaultdict[tuple[bool, bool, int], list[tuple[str, nn.Parameter]]](list)
    for name, parameter in parameters:
        views, reason = classified[name]
        is_undecayed = _first_match(undecayed, name) >= 0
        if no_decay is True and not views:
            is_embedding = sites[name].is_embedding or reason == "embedding"
            is_undecayed = parameter.dim() < 2 or is_embedding
        key = (not views, is_undecayed, _first_match(factors, name))
        pairs_by_key[key].append((name, parameter))
    num_frozen = len(names) - len(parameters)
    expected = "at least one with requires_grad"
    require(bool(parameters), "model", f"{num_frozen} frozen parameters", expected)
    groups: list[dict[str, Any]] = []
    for (is_adamw, is_undecayed, index), pairs in sorted(pairs_by_key.items()):
        group: dict[str, Any] = {"params": pairs, "algorithm": ADAMW if is_adamw else "muon"}
        if not is_adamw:
            group["matrix_views"] = {name: classified[name][0] for name, _ in pairs}
        if is_undecayed:
            group["weight_decay"] = 0.0
        if index >= 0:
            group["lr_multiplier"] = float([*factors.values()][index])
        groups.append(group)
    if report:
        print(describe(groups, classified, num_frozen))
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


def _classify(
    parameters: Sequence[tuple[str, nn.Parameter]],
    patterns: Patterns,
    shapes: Shapes,
    sites: Mapping[str, Site],
    **options: bool,
) -> dict[str, Classified]:
    """Matrices of all parameters to train, by name; ``options`` are those of `find_views`."""
    classified: dict[str, Classified] = {}
    for name, parameter in parameters:
        if parameter.is_complex():
            classified[name] = None, "complex"
        else:
            classified[name] = find_views(name, patterns, shapes, sites[name], **options)
    refused = {name: shapes[name] for name, made in classified.items() if made == (None, UNKNOWN)}
    value = f"matrices of unknown names inside blocks ({len(refused)}), first {[*refused][:1]}"
    expected = "a pattern for each, or unknown='matrix', which makes all of them one operator type"
    remedy = f"Paste, edit and pass as patterns=patterns:\n{format_patterns(refused)}"
    require(not refused, "patterns", value, f"{expected}. {remedy}")
    return classified


def describe(
    groups: Sequence[Mapping[str, Any]], classified: Mapping[str, Classified], num_frozen: int
) -> str:
    """Format a table of names, shapes and operator types of the groups, and counts in lines.

    Args:
        groups: Result of `param_groups`.
        classified: Matrices and reason of each parameter, by name.
        num_frozen: Number of frozen parameters that were left out.
    """
    rows = [("parameter", "shape", "operator type")]
    counts, entries = Counter[str](), Counter[str]()
    for group in groups:
        notes = [f"{key} {group[key]}" for key in ("weight_decay", "lr_multiplier") if key in group]
        for name, parameter in group["params"]:
            views, reason = classified[name]
            kinds = [view.operator_type for view in views or ()] or [ADAMW]
            counts.update(kinds)
            entries["orthogonalized" if views else ADAMW] += parameter.numel()
            number = f"{len(kinds)} matrices" if len(kinds) > 1 else ""
            remark = "; ".join(filter(None, [number, reason, *notes]))
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


def named_parameters(parts: Sequence[nn.Module]) -> dict[nn.Parameter, str]:
    """Map each parameter to its cleaned name; a tied one to its first name.

    Raises:
        ValueError: FSDP1, which hides the matrices.
    """
    names: dict[nn.Parameter, str] = {}
    for part in parts:
        for name, module in part.named_modules():
            is_fsdp1 = type(module).__name__ == "FullyShardedDataParallel"
            value = f"FullyShardedDataParallel at {name!r}"
            require(not is_fsdp1, "model", value, "fully_shard (FSDP1 flattens the matrices)")
        for name, parameter in part.named_parameters():
            names.setdefault(parameter, clean_name(name))
    return names
