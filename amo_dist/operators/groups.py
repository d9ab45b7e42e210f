"""Which parameter is which operator: names and shapes to operator types and parameter groups.

A matrix of a block is orthogonalized with the schedule of its operator type; everything else
(embeddings, heads, norms, biases, routers, LoRA adapters, convolutions) goes to AdamW. Built-in
patterns know torchtitan's llama3, llama4, qwen3 and deepseek_v3, the Hugging Face decoders that
share Llama's names (llama, qwen2, qwen3, mistral, gemma; mixtral's and deepseek's experts where
each is a module), GPT-2 and nanoGPT. A matrix inside a block that no pattern knows is an error.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from torch import nn

from amo_dist.config import sort_operator_types

ADAMW = "adamw"

Box: TypeAlias = tuple[tuple[int, int], ...]
"""A region of a parameter: ``(start, stop)`` for each of its dims."""


@dataclasses.dataclass(frozen=True)
class MatrixView:
    """One matrix inside a parameter."""

    suffix: str
    """Empty for the whole parameter, else such as ``[q]`` or ``[3]``; the name of the matrix is
    the parameter's name followed by it."""
    operator_type: str
    """Matrices of one type share a schedule."""
    boxes: tuple[Box, ...] | None
    """``None`` for the whole of a 2-D parameter, else the regions that make up the matrix, in
    coordinates of the parameter, one after the other along ``dim``."""
    dim: int = 0
    """Dim of the matrix (0 rows, 1 columns) along which the boxes are concatenated."""


@dataclasses.dataclass(frozen=True)
class Fused:
    """How one parameter holds several matrices side by side.

    For a parameter of rows q, k, v with grouped-query attention, whose sizes no shape tells::

        Fused((("attn_q", 3072), ("attn_k", 1024), ("attn_v", 1024)))

    A 3-D parameter ``(E, m, n)`` is so divided in each of its E matrices.
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
        _require(len(types) > 0, "Fused.parts", self.parts, "at least one part")
        _require(len(set(types)) == len(types), "Fused.parts", types, "distinct operator types")
        for operator_type in types:
            _check_operator_type(operator_type)
        _require(self.dim in (0, 1), "Fused.dim", self.dim, "0 (rows) or 1 (columns)")
        _require(self.groups >= 1, "Fused.groups", self.groups, "an integer >= 1")
        unknown = sorted(set(self.heads) - set(types))
        _require(not unknown, "Fused.heads", unknown, f"operator types among {types}")
        for operator_type, size in parts:
            divisors = {"groups": self.groups, "heads": self.heads.get(operator_type, 1)}
            for field, divisor in divisors.items():
                divides = size >= 1 and divisor >= 1 and size % divisor == 0
                expected = f"a divisor of {operator_type}'s size {size}"
                _require(divides, f"Fused.{field}", divisor, expected)


Target: TypeAlias = "str | Fused | None"
Patterns: TypeAlias = Mapping[str, Target]
"""Regular expression over cleaned names -> operator type, ``"adamw"`` or ``None``, or ``Fused``."""

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
_BLOCK = re.compile(r"(?:^|\.)(?:\w*(?:layers?|blocks?)|h)\.\d+\.")

# The end of a name, preceded by its start or by a dot, and the operator type (a template).
_BUILT_IN: tuple[tuple[str, str], ...] = (
    # torchtitan
    (r"attention\.w([qkvo])\.weight", r"attn_\1"),
    (r"attention\.w(q|kv)_([ab])\.weight", r"mla_\1_\2"),
    (r"feed_forward\.w1\.weight", "mlp_gate"),
    (r"feed_forward\.w3\.weight", "mlp_up"),
    (r"feed_forward\.w2\.weight", "mlp_down"),
    (r"moe\.(shared_)?experts\.w1(?:\.weight)?", r"\1expert_gate"),
    (r"moe\.(shared_)?experts\.w3(?:\.weight)?", r"\1expert_up"),
    (r"moe\.(shared_)?experts\.w2(?:\.weight)?", r"\1expert_down"),
    # Hugging Face
    (r"self_attn\.([qkvo])_proj\.weight", r"attn_\1"),
    (r"self_attn\.(q|kv)_([ab])_proj(?:_with_mqa)?\.weight", r"mla_\1_\2"),
    (r"mlp\.(gate|up|down)_proj\.weight", r"mlp_\1"),
    (r"mlp\.experts\.\d+\.(gate|up|down)_proj\.weight", r"expert_\1"),
    (r"mlp\.shared_experts?\.(gate|up|down)_proj\.weight", r"shared_expert_\1"),
    (r"block_sparse_moe\.experts\.\d+\.w1\.weight", "expert_gate"),
    (r"block_sparse_moe\.experts\.\d+\.w3\.weight", "expert_up"),
    (r"block_sparse_moe\.experts\.\d+\.w2\.weight", "expert_down"),
    # GPT-2 and nanoGPT (attn.c_attn, fused, is apart)
    (r"attn\.c_proj\.weight", "attn_o"),
    (r"mlp\.c_fc\.weight", "mlp_up"),
    (r"mlp\.c_proj\.weight", "mlp_down"),
)
_BUILT_IN_COMPILED = tuple(
    (re.compile(rf"(?:.*\.)?{tail}"), operator_type) for tail, operator_type in _BUILT_IN
)
_GPT2_QKV_TAIL = r"attn\.c_attn\.weight"
_GPT2_QKV = re.compile(rf"(?:.*\.)?{_GPT2_QKV_TAIL}")

# What goes to AdamW by its name, even as a matrix inside a block.
_ADAMW_NAMES: tuple[tuple[str, str], ...] = (
    (r"(?:.*\.)?lora_(?:A|B|embedding_A|embedding_B)(?:\..*)?", "LoRA adapter"),
    (r"(?:.*[._])?bias", "bias"),
    (r"(?:.*\.)?(?:\w*embed\w*|wte|wpe)(?:\.weight)?", "embedding"),
    (r"(?:.*\.)?(?:moe\.router|block_sparse_moe)\.gate\.weight", "router"),
    (r"(?:.*\.)?mlp\.shared_expert_gate\.weight", "router"),
)
_ADAMW_COMPILED = tuple((re.compile(pattern), reason) for pattern, reason in _ADAMW_NAMES)
# A router in Hugging Face's mixtures, (num_experts, dim). A gate of a dense MLP, which the name
# fits too, has more rows than columns, and is not to fall to AdamW in silence.
_WIDE_ROUTER = re.compile(r"(?:.*\.)?mlp\.gate\.weight")


def clean_name(name: str) -> str:
    """``name`` without the components that wrappers add.

    Removes those of ``torch.compile``, activation checkpointing and FSDP anywhere, and the
    ``module.`` of DDP in front.
    """
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")


def classify(
    name: str, shape: Sequence[int], patterns: Patterns | None = None
) -> tuple[MatrixView, ...] | None:
    """The matrices that a parameter holds, or ``None`` where it goes to AdamW.

    Args:
        name: Name of the parameter; cleaned as by ``clean_name``.
        shape: Its global shape. ``(E, m, n)`` holds one matrix for each expert.
        patterns: Regular expressions that must match the whole cleaned name (``re.fullmatch``),
            in order of precedence, and all before the built-in ones. A value is an operator type,
            ``"adamw"`` or ``None`` for AdamW, or ``Fused`` for several matrices.

    Raises:
        ValueError: a matrix inside a block that nothing matches; a pattern that does not fit the
            shape; a malformed pattern.
    """
    views, _ = _classify(clean_name(name), tuple(shape), _compile(patterns))
    return views


def param_groups(
    model: nn.Module | Sequence[nn.Module],
    *,
    patterns: Patterns | None = None,
    report: bool = False,
    no_decay: Sequence[str] = (),
    lr_multipliers: Mapping[str, float] | None = None,
    allow_unused: bool = False,
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

    Raises:
        ValueError: nothing to train, an unknown matrix inside a block (see ``classify``), an
            unused expression, two parameters of one name, or FSDP1, which hides the matrices.
    """
    parts = [model] if isinstance(model, nn.Module) else list(model)
    rules = _Rules(patterns, no_decay, lr_multipliers)
    named, num_frozen = _named_parameters(parts, rules)
    _require(bool(named), "model", f"{num_frozen} frozen parameters", "one to train, at least")
    if not allow_unused:
        rules.raise_unused()
    groups: dict[tuple[str, bool, int], dict[str, Any]] = {}
    reasons: dict[str, str] = {}
    for name, parameter in named.items():
        views, reasons[name] = _classify(name, tuple(parameter.shape), rules.patterns)
        key = ("muon" if views else ADAMW, *rules.key(name))
        group = groups.setdefault(key, rules.new_group(*key))
        group["params"].append((name, parameter))
        if views:
            group["matrix_views"][name] = views
    result = [groups[key] for key in sorted(groups, key=lambda k: (k[0] == ADAMW, *k[1:]))]
    if report:
        print(_describe(result, reasons, num_frozen))
    return result


def describe(groups: Sequence[Mapping[str, Any]]) -> str:
    """A table of names, shapes and operator types of the groups, followed by counts."""
    return _describe(groups, {}, 0)


def _unknown_matrix(name: str, shape: tuple[int, ...]) -> ValueError:
    known = "\n".join(f"  {tail} -> {operator_type}" for tail, operator_type in _BUILT_IN)
    exact = re.escape(name)
    return ValueError(
        f"{name}: found a matrix of shape {shape} inside a block that no pattern knows; "
        f"expected one of the built-in patterns (the end of a name)\n{known}\n"
        f"  {_GPT2_QKV_TAIL} -> attn_q, attn_k, attn_v (of equal sizes)\n"
        f"or one of yours. To orthogonalize it, pass patterns={{{exact!r}: 'attn_q'}} (any "
        "operator type, new ones too), or Fused(...) where it holds several matrices side by side; "
        f"to leave it to AdamW, pass patterns={{{exact!r}: 'adamw'}}."
    )


_CompiledPatterns: TypeAlias = "tuple[tuple[re.Pattern[str], Target], ...]"


class _Rules:
    """The user's expressions, compiled, with a record of those that matched nothing yet."""

    def __init__(
        self,
        patterns: Patterns | None,
        no_decay: Sequence[str],
        lr_multipliers: Mapping[str, float] | None,
    ) -> None:
        # A bare string would be taken letter by letter.
        _require(not isinstance(no_decay, str), "no_decay", no_decay, "a list of expressions")
        self.patterns = _compile(patterns)
        self.no_decay = [_compile_one("no_decay", pattern) for pattern in no_decay]
        self.lr_multipliers: list[tuple[re.Pattern[str], float]] = []
        for pattern, factor in (lr_multipliers or {}).items():
            is_valid = math.isfinite(factor) and factor > 0
            _require(is_valid, f"lr_multipliers[{pattern!r}]", factor, "a number > 0")
            self.lr_multipliers.append((_compile_one("lr_multipliers", pattern), float(factor)))
        self.unused = [("patterns", p) for p, _ in self.patterns]
        self.unused += [("no_decay", p) for p in self.no_decay]
        self.unused += [("lr_multipliers", p) for p, _ in self.lr_multipliers]

    def note(self, name: str) -> None:
        """Strikes what matches ``name`` from the unused expressions."""
        self.unused = [(field, p) for field, p in self.unused if not p.fullmatch(name)]

    def raise_unused(self) -> None:
        for field, pattern in self.unused:
            raise ValueError(
                f"{field}: found {pattern.pattern!r}, which matches no parameter; expected one "
                "that matches the whole of a cleaned name (allow_unused=True accepts it)"
            )

    def key(self, name: str) -> tuple[bool, int]:
        """Whether ``name`` goes without decay, and its first matching multiplier, -1 for none."""
        is_undecayed = any(pattern.fullmatch(name) for pattern in self.no_decay)
        matches = [i for i, (p, _) in enumerate(self.lr_multipliers) if p.fullmatch(name)]
        return is_undecayed, matches[0] if matches else -1

    def new_group(self, algorithm: str, is_undecayed: bool, index: int) -> dict[str, Any]:
        group: dict[str, Any] = {"params": [], "algorithm": algorithm}
        if algorithm == "muon":
            group["matrix_views"] = {}
        if is_undecayed:
            group["weight_decay"] = 0.0
        if index >= 0:
            group["lr_scale"] = self.lr_multipliers[index][1]
        return group


def _named_parameters(
    parts: Sequence[nn.Module], rules: _Rules
) -> tuple[dict[str, nn.Parameter], int]:
    """Parameters to train by cleaned name, each once, and the number of frozen ones."""
    named: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    num_frozen = 0
    for part in parts:
        _reject_fsdp1(part)
        for raw_name, parameter in part.named_parameters():
            name = clean_name(raw_name)
            rules.note(name)
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if not parameter.requires_grad:
                num_frozen += 1
                continue
            _require(name not in named, "model", f"two parameters {name!r}", "distinct names")
            named[name] = parameter
    return named, num_frozen


def _reject_fsdp1(part: nn.Module) -> None:
    for name, module in part.named_modules():
        is_fsdp1 = type(module).__name__ == "FullyShardedDataParallel"
        found = f"FullyShardedDataParallel at {name!r}"
        _require(not is_fsdp1, "model", found, "fully_shard (FSDP1 flattens the matrices)")


def _classify(
    name: str, shape: tuple[int, ...], patterns: _CompiledPatterns
) -> tuple[tuple[MatrixView, ...] | None, str]:
    """Views or ``None``, and the reason for the report."""
    for pattern, target in patterns:
        if pattern.fullmatch(name):
            return _views(name, shape, target), "by your pattern"
    if len(shape) < 2:
        return None, f"{len(shape)}-D"
    for pattern, reason in _ADAMW_COMPILED:
        if pattern.fullmatch(name):
            return None, reason
    if len(shape) == 2 and shape[0] < shape[1] and _WIDE_ROUTER.fullmatch(name):
        return None, "router"
    built_in = _match_built_in(name, shape) if len(shape) <= 3 else None
    if built_in is not None:
        return _views(name, shape, built_in), ""
    is_expert = len(shape) == 3 and "expert" in name
    if _BLOCK.search(name) and (len(shape) == 2 or is_expert):
        raise _unknown_matrix(name, shape)
    return None, "outside of any block" if len(shape) == 2 else f"{len(shape)}-D"


def _match_built_in(name: str, shape: tuple[int, ...]) -> Target:
    for pattern, template in _BUILT_IN_COMPILED:
        if match := pattern.fullmatch(name):
            return match.expand(template)
    return _gpt2_qkv(shape) if _GPT2_QKV.fullmatch(name) else None


def _gpt2_qkv(shape: tuple[int, ...]) -> Fused | None:
    """GPT-2 keeps (in, 3 * out), nanoGPT (3 * out, in); both have out = in."""
    size = min(shape)
    if shape not in ((3 * size, size), (size, 3 * size)):
        return None
    return Fused((("attn_q", size), ("attn_k", size), ("attn_v", size)), dim=int(shape[0] == size))


def _views(name: str, shape: tuple[int, ...], target: Target) -> tuple[MatrixView, ...] | None:
    if target is None:
        return None
    _require(len(shape) in (2, 3), name, f"shape {shape} for {target!r}", "(m, n) or (E, m, n)")
    whole = ((0, shape[-2]), (0, shape[-1]))
    if isinstance(target, Fused):
        matrix = _fused_views(name, whole, target)
    else:
        matrix = [MatrixView("", target, None)]
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
    _require(total == whole[fused.dim][1], name, f"{fused.parts} = {total}", expected)
    labels = _labels([operator_type for operator_type, _ in fused.parts])
    views, offset = [], 0
    for (operator_type, size), label in zip(fused.parts, labels, strict=True):
        share = size // fused.groups
        stride = total // fused.groups
        pieces = [(g * stride + offset, g * stride + offset + share) for g in range(fused.groups)]
        offset += share
        num_heads = fused.heads.get(operator_type)
        for head in range(num_heads or 1):
            length = size // (num_heads or 1)
            ranges = _cut(pieces, head * length, (head + 1) * length)
            suffix = f"[{label}]" if num_heads is None else f"[{label}.{head}]"
            boxes = tuple((r, whole[1]) if fused.dim == 0 else (whole[0], r) for r in ranges)
            views.append(MatrixView(suffix, operator_type, boxes, fused.dim))
    return views


def _cut(pieces: Sequence[tuple[int, int]], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The ranges at positions ``start`` to ``stop`` of the concatenated pieces."""
    position = 0
    for low, high in pieces:
        first, last = max(start, position), min(stop, position + high - low)
        if first < last:
            yield low + first - position, low + last - position
        position += high - low


def _labels(operator_types: Sequence[str]) -> list[str]:
    """Types without their family (``attn_q`` -> ``q``), where that leaves them distinct."""
    short = [re.sub(r"^(?:attn|mlp|expert|shared_expert)_", "", t) for t in operator_types]
    return short if len(set(short)) == len(short) else list(operator_types)


def _compile(patterns: Patterns | None) -> _CompiledPatterns:
    return tuple(
        (_compile_one("patterns", pattern), _check_target(pattern, target))
        for pattern, target in (patterns or {}).items()
    )


def _compile_one(field: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        expected = f"expected a regular expression ({error})"
        raise ValueError(f"{field}: found {pattern!r}, {expected}") from error


def _check_target(pattern: str, target: Target) -> Target:
    is_valid = target is None or isinstance(target, (str, Fused))
    _require(is_valid, f"patterns[{pattern!r}]", target, "an operator type, 'adamw', None or Fused")
    if isinstance(target, str):
        if target.casefold() == ADAMW:
            return None
        _check_operator_type(target)
    return target


def _check_operator_type(operator_type: str) -> None:
    is_valid = re.fullmatch(r"[a-z][a-z0-9_]*", operator_type) and operator_type != ADAMW
    expected = "lower case letters, digits and underscores, such as 'attn_q'"
    _require(bool(is_valid), "operator type", operator_type, expected)


def _describe(
    groups: Sequence[Mapping[str, Any]], reasons: Mapping[str, str], num_frozen: int
) -> str:
    rows = [("parameter", "shape", "operator type")]
    counts: Counter[str] = Counter()
    entries: Counter[str] = Counter()
    for group in groups:
        for name, parameter in group["params"]:
            views = group.get("matrix_views", {}).get(name, ())
            kinds = [view.operator_type for view in views]
            counts.update(kinds or [ADAMW])
            entries["orthogonalized" if views else ADAMW] += parameter.numel()
            kind = _kind(group, kinds, reasons.get(name, ""))
            rows.append((name, str(tuple(parameter.shape)), kind))
    summary = [(kind, str(counts[kind])) for kind in sort_operator_types(set(counts) - {ADAMW})]
    summary += [(ADAMW, str(counts[ADAMW]))] if ADAMW in counts else []
    totals = [f"{number:,} entries {kind}" for kind, number in entries.items()]
    totals += [f"{num_frozen} frozen parameters left out"] if num_frozen else []
    table = [*_align(rows), "", *_align([("operator type", "count"), *summary])]
    return "\n".join([*table, "", ", ".join(totals)])


def _kind(group: Mapping[str, Any], kinds: Sequence[str], reason: str) -> str:
    notes = [f"{len(kinds)} matrices"] if len(kinds) > 1 else []
    notes += [reason] if reason else []
    notes += [f"{key} {group[key]}" for key in ("weight_decay", "lr_scale") if key in group]
    types = ", ".join(sort_operator_types(kinds)) or ADAMW
    return types + (f" ({'; '.join(notes)})" if notes else "")


def _align(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    padded = [[cell.ljust(w) for cell, w in zip(row, widths, strict=True)] for row in rows]
    return ["  ".join(cells).rstrip() for cells in padded]


def _require(condition: bool, field: str, found: object, expected: str) -> None:
    if not condition:
        raise ValueError(f"{field}: found {found}, expected {expected}")
