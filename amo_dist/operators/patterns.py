"""Which names are which operator types: the built-in tables, and the user's patterns before them.

A matrix of a block is orthogonalized with the schedule of its operator type; everything else
(embeddings, heads, norms, biases, tables of relative positions, routers, LoRA adapters) goes to
AdamW. The tables know torchtitan's language models with their vision towers, nanoGPT, PyTorch's
transformer layers, timm's transformers, and the families of Hugging Face in ``docs/families.md``. A
matrix inside a block that no pattern knows is an error.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from amo_dist.operators.views import (
    ADAMW,
    Fused,
    Heads,
    MatrixView,
    by_head,
    check_operator_type,
    cut_views,
    require,
)

Target: TypeAlias = "str | Fused | None"
Patterns: TypeAlias = Mapping[str, Target]
"""Regular expression over cleaned names -> operator type, ``"adamw"`` or ``None``, or ``Fused``."""
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""Of parameters, by cleaned name."""
Found: TypeAlias = "tuple[tuple[MatrixView, ...] | None, str]"
"""The matrices of a parameter, None for AdamW, and why."""

OUTSIDE = "outside of any block"
"""Why a matrix that nothing knows goes to AdamW without an error."""
BY_PATTERN = "by your pattern"
"""Why a parameter is what the user says."""

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
_BLOCK = re.compile(r"(?:^|\.)(?:\w*(?:layers?|blocks?)|h|layer\d|stages?|conformer)\.\d+\.")

# The end of a name, preceded by its start or by a dot, and the operator type (a template).
_Table: TypeAlias = "tuple[tuple[str, str], ...]"
_ANYWHERE: _Table = (
    # torchtitan: attention, also where it is linear (in_proj_*, z gates what comes out of it)
    (r"att(?:ention|n)\.(?:qkv_linear\.)?w([qkvo])\.weight", r"attn_\1"),
    (r"attention\.w(q|kv)_([ab])\.weight", r"mla_\1_\2"),
    (r"\w*attn\.in_proj_([qkv]|qkvz?)\.weight", r"attn_\1"),
    (r"(?:attention\.o_gate|\w*attn\.in_proj_z)\.weight", "attn_gate"),
    (r"attn\.(?:out_)?proj\.weight", "attn_o"),
    # its feed-forwards; E, F, D: experts, hidden and model dimension
    (r"feed_forward\.w1\.weight", "mlp_gate"),
    (r"feed_forward\.w3\.weight", "mlp_up"),
    (r"feed_forward\.w2\.weight", "mlp_down"),
    (r"mlp\.linear_fc1\.weight", "mlp_up"),
    (r"mlp\.linear_fc2\.weight", "mlp_down"),
    (r"moe\.(?:routed_experts\.inner_)?(shared_)?experts\.w1(?:_EFD|\.weight)?", r"\1expert_gate"),
    (r"moe\.(?:routed_experts\.inner_)?(shared_)?experts\.w3(?:_EFD|\.weight)?", r"\1expert_up"),
    (r"moe\.(?:routed_experts\.inner_)?(shared_)?experts\.w2(?:_EDF|\.weight)?", r"\1expert_down"),
    # gpt_oss: rows of gate and up in turn, as one matrix, for in two each row would be a piece.
    (r"inner_experts\.mlp1_weight_EGD", "expert_gate_up"),
    (r"inner_experts\.mlp2_weight_EDF", "expert_down"),
    (r"eh_proj\.weight", "mtp_proj"),
    # Llama, and what shares its names; GPT-2 and nanoGPT
    (r"self_attn\.([qkvo])_proj\.weight", r"attn_\1"),
    (r"self_attn\.(q|kv)_([ab])_proj(?:_with_mqa)?\.weight", r"mla_\1_\2"),
    (r"mlp\.(gate|up|down)_proj\.weight", r"mlp_\1"),
    (r"attn\.c_proj\.weight", "attn_o"),
    (r"mlp\.c_fc\.weight", "mlp_up"),
    (r"mlp\.c_proj\.weight", "mlp_down"),
)
# attention, self_attn, SelfAttention, crossattention, attention.self
_ATTENTION = r"\w*[aA]tt\w*\.(?:[a-z]+\.)?"
# Shorter names, which elsewhere may be those of heads, poolers and projectors.
_IN_BLOCKS: _Table = (
    (rf"{_ATTENTION}([qkv])(?:uery|ey|alue)?(?:_proj|_lin)?\.weight", r"attn_\1"),
    (rf"{_ATTENTION}(?:o|Wo|dense|projection|(?:o|out)_proj|out_lin)\.weight", "attn_o"),
    (r"(?:mixer|temporal_block)\.([qkvo])_proj\.weight", r"attn_\1"),
    (r"(?:mamba|mixer)\.(in|x|dt|out)_proj[._]weight", r"ssm_\1"),
    (r"(?:mixer|feed_forward|ffn|mlp_block)\.(gate|up|down)_proj\.weight", r"mlp_\1"),
    (r"(shared_)?experts?\.(?:\d+\.)?(gate|up|down)_proj(?:\.weight)?", r"\1expert_\2"),
    (r"block_sparse_moe\.experts\.\d+\.w1\.weight", "expert_gate"),
    (r"block_sparse_moe\.experts\.\d+\.w3\.weight", "expert_up"),
    (r"block_sparse_moe\.experts\.\d+\.w2\.weight", "expert_down"),
    (r"shared_mlp\.output_linear\.weight", "shared_expert_down"),
    (r"(?:DenseReluDense\.wi_0|fc1_g)\.weight", "mlp_gate"),
    (r"(?:fc1|fc1_x|fc_in|lin1|linear1|pwconv1|dense_h_to_4h|ffn)\.weight", "mlp_up"),
    (r"(?:DenseReluDense\.wi(?:_1)?|intermediate(?:_dense|(?:_query)?\.dense))\.weight", "mlp_up"),
    (r"(?:fc2|fc_out|lin2|linear2|pwconv2|dense_4h_to_h|ffn_output)\.weight", "mlp_down"),
    (
        r"(?:DenseReluDense\.wo|mlp\.(?:Wo|weights_out)|output(?:_dense|(?:_query)?\.dense))\.weight",
        "mlp_down",
    ),
    (r"downsample\.reduction\.weight", "patch_merge"),
    (r"layers\.\d+\.linear\.weight", "hybrid_proj"),
)

# Several matrices in one parameter, in the order in which they lie, one after the other.
_QKV = ("attn_q", "attn_k", "attn_v")
_THIRDS = rf"{_ATTENTION}(?:(?:c_attn|qkv|Wqkv)\.weight|in_proj_weight)"
_HALVES = r"(?:gate_up_proj|mlp\.(?:Wi|weights_in)|shared_mlp\.input_linear)\.weight"
_GATE_UP_EXPERTS = r"experts\.gate_up_proj"
# By heads in turn (GPT-NeoX, Bloom, CodeGen) or not (Falcon): neither name nor shape tells.
_ONE_QKV = rf"{_ATTENTION}(?:query_key_value|qkv_proj)\.weight"
# Matrices whose parts neither names nor shapes tell, or that would be cut into single rows.
_AS_ONE = ("attn_qkv", "attn_qkvz", "expert_gate_up", "ssm_in")

# What goes to AdamW by the end of its name, even as a matrix inside a block.
_ADAMW_NAMES: _Table = (
    (r"lora_(?:A|B|embedding_A|embedding_B)(?:\..*)?", "LoRA adapter"),
    (r"\w*_adapter_list\.\d+\.\d+\.weight", "LoRA adapter"),
    (r"relative_attention_bias\.weight|\w*bias_table|rel_pos_\w+", "relative positions"),
    (r"(?:continuous_position_bias|cpb)_mlp\..*", "relative positions"),
    (r"(?:.*_)?bias(?:_[A-Z]+)?", "bias"),
    (r"(?:\w*embed\w*|wte|wpe)(?:\.proj\w*)?(?:\.weight)?", "embedding"),
    (r"(?:lm_head|shared_head\.head)\.weight", "head"),
    (r"\w*router\w*(?:\.[a-z]\w*){0,2}", "router"),
    (r"(?:moe\.shared_experts|block_sparse_moe)\.gate\.weight", "router"),
    (r"mlp\.shared_expert_gate\.weight", "router"),
    (r"\w*attn\.in_proj_(?:[ab]|ba)\.weight", "one row a head"),
    (r"A_log|D", "state-space table"),
)
# A router in Hugging Face's mixtures, (num_experts, dim). A gate of a dense MLP, which the name
# fits too, has more rows than columns, and is not to fall to AdamW in silence.
_WIDE_ROUTER = r"(?:mlp|mixer|feed_forward)\.gate\.weight"


# Outside of blocks, where AdamW has them unless all that is unknown shall be matrices.
_HEADS = r"(?:\w*head|output|classifier|score|logits)(?:\.\w+)?\.weight"


def is_head(name: str) -> bool:
    """Whether a name is that of a model's head, if no pattern knows it."""
    return _BLOCK.search(name) is None and _ends_in(name, _HEADS) is not None


def clean_name(name: str) -> str:
    """``name`` without the components that wrappers add.

    Removes those of ``torch.compile``, activation checkpointing and FSDP anywhere, and the
    ``module.`` of DDP in front.
    """
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")


def classify(
    name: str,
    shape: Sequence[int],
    patterns: Patterns | None = None,
    shapes: Shapes | None = None,
    *,
    flatten_conv: bool = False,
) -> tuple[MatrixView, ...] | None:
    """The matrices that a parameter holds, or ``None`` where it goes to AdamW.

    Args:
        name: Name of the parameter; cleaned as by ``clean_name``.
        shape: Its global shape. ``(E, m, n)`` holds one matrix for each expert.
        patterns: Regular expressions that must match the whole cleaned name (``re.fullmatch``),
            in order of precedence, and all before the built-in ones. A value is an operator type,
            ``"adamw"`` or ``None`` for AdamW, or ``Fused`` for several matrices.
        shapes: Of all parameters of the model. Those beside a fused one may tell its parts, where
            it is one matrix otherwise.
        flatten_conv: See `amo_dist.param_groups`.

    Raises:
        ValueError: a matrix inside a block that nothing matches; a pattern that does not fit the
            shape; a malformed pattern.
    """
    cleaned = clean_name(name)
    found = find(cleaned, tuple(shape), check_patterns(patterns), shapes or {}, flatten_conv)
    if found is None:
        raise unknown_matrices({cleaned: tuple(shape)})
    return found[0]


def find(
    name: str,
    shape: tuple[int, ...],
    patterns: Patterns,
    shapes: Shapes,
    flatten_conv: bool,
    heads: Heads | None = None,
) -> Found | None:
    """What `classify` returns, and why, in a few words for a report; None for an unknown matrix.

    Args:
        name: Cleaned.
        shape: Global.
        patterns: From `check_patterns`.
        shapes: As for `classify`.
        flatten_conv: As for `classify`.
        heads: Of the attention that the parameter belongs to, to divide it by.
    """
    found = find_target(name, shape, patterns, shapes, flatten_conv)
    if found is None:
        return None
    target, reason = found
    if target is None:
        return None, reason
    if heads is not None:
        target = by_head(name, shape, target, heads)
    return cut_views(name, shape, target), reason


def find_target(
    name: str, shape: tuple[int, ...], patterns: Patterns, shapes: Shapes, flatten_conv: bool
) -> tuple[Target, str] | None:
    """As `find`, but what the parameter holds as it would stand in a pattern."""
    for pattern, target in patterns.items():
        if re.fullmatch(pattern, name):
            return target, BY_PATTERN
    if len(shape) < 2:
        return None, f"{len(shape)}-D"
    for tail, reason in _ADAMW_NAMES:
        if _ends_in(name, tail):
            return None, reason
    if len(shape) == 2 and shape[0] < shape[1] and _ends_in(name, _WIDE_ROUTER):
        return None, "router"
    in_block = _BLOCK.search(name) is not None
    if len(shape) == 4 and flatten_conv and in_block:
        return (None, "depthwise") if shape[1] == 1 else ("conv", "")
    if len(shape) <= 3:
        built_in, reason = _built_in(name, shape, shapes, in_block)
        if built_in is not None:
            return built_in, reason
        if in_block and (len(shape) == 2 or _may_be_matrices(name, shape)):
            return None
    return None, OUTSIDE if len(shape) == 2 else f"{len(shape)}-D"


def check_patterns(patterns: Patterns | None) -> Patterns:
    """The patterns, with ``None`` for AdamW however it was written.

    Raises:
        ValueError: An expression is malformed, or a value is none of the kinds in `Patterns`.
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
    """Raise ``ValueError`` that names the field where a regular expression is malformed."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            expected = f"expected a regular expression ({error})"
            raise ValueError(f"{field}: found {pattern!r}, {expected}") from error


def suggest_patterns(shapes: Shapes, *, anywhere: bool = False) -> dict[str, str | Fused]:
    """A pattern for each kind of parameter, and what it may be by its name and shape.

    Args:
        shapes: Of the parameters that need one. A matrix in a block, or one for each expert,
            becomes an operator type, or three where its name and shape are those of queries, keys
            and values; anything else goes to AdamW.
        anywhere: The model has no blocks: matrices and convolutions are such anywhere, but for
            embeddings and heads.
    """
    found: dict[str, str | Fused] = {}
    for name, shape in shapes.items():
        parts = name.split(".")
        words = [part for part in parts if not part.isdigit() and part != "weight"][-2:]
        if anywhere:
            is_known = is_head(name) or any(_ends_in(name, tail) for tail, _ in _ADAMW_NAMES)
            is_matrix = len(shape) in (2, 4) and not is_known
        else:
            is_matrix = _BLOCK.search(name) is not None and (len(shape) == 2 or "expert" in name)
        kind: str | Fused = ADAMW
        if is_matrix:
            kind = _qkv(name, shape) or re.sub(r"\W+", "_", "_".join(words)).lower() or "matrix"
        found[r"\.".join(r"\d+" if part.isdigit() else re.escape(part) for part in parts)] = kind
    return found


def _qkv(name: str, shape: tuple[int, ...]) -> Fused | None:
    """Queries, as many as the model is wide, keys and values, if these are side by side."""
    rows, width = shape[:2]
    keys, odd = divmod(rows - width, 2)
    if len(shape) != 2 or odd or not 0 < keys <= width or not re.search(r"(?i)qkv", name):
        return None
    return Fused(tuple(zip(_QKV, (width, keys, keys), strict=True)))


def format_patterns(shapes: Shapes, *, anywhere: bool = False) -> str:
    """`suggest_patterns` as Python, each with the number and the shapes of what it matches."""
    lines = []
    for pattern, kind in suggest_patterns(shapes, anywhere=anywhere).items():
        matched = [shape for name, shape in shapes.items() if re.fullmatch(pattern, name)]
        told = ", ".join(str(shape) for shape in dict.fromkeys(matched))
        value = f"Fused({kind.parts})" if isinstance(kind, Fused) else f'"{kind}"'
        lines.append(f'    r"{pattern}": {value},  # {len(matched)} of {told}')
    return "\n".join(["patterns = {", *lines, "}"])


def unknown_matrices(unknown: Shapes, others: Shapes | None = None) -> ValueError:
    """The error for matrices inside blocks that no pattern knows, with patterns to paste.

    Args:
        unknown: Their shapes by name; at least one.
        others: Of parameters that went to AdamW because no block holds them.
    """
    name, shape = next(iter(unknown.items()))
    more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
    return ValueError(
        f"{name}: found a matrix of shape {shape}{more} inside a block that no pattern knows; "
        "expected a pattern for each. Those of the whole model, to paste and to edit:\n"
        f"{format_patterns({**unknown, **(others or {})})}\n"
        "A value is any operator type (matrices of one share a schedule), 'adamw', or Fused(...) "
        "for several matrices side by side; param_groups(model, patterns=patterns) takes them. "
        "unknown='matrix' makes one operator type of all that are unknown."
    )


def _ends_in(name: str, tail: str) -> re.Match[str] | None:
    return _compiled(tail).fullmatch(name)


@functools.cache
def _compiled(tail: str) -> re.Pattern[str]:
    # Mixtures have tens of thousands of parameters.
    return re.compile(rf"(?:.*\.)?(?:{tail})")


def _built_in(
    name: str, shape: tuple[int, ...], shapes: Shapes, in_block: bool
) -> tuple[Target, str]:
    """What the tables say, None where they know nothing, and a remark."""
    matches = ((_ends_in(name, tail), kind) for tail, kind in _ANYWHERE + _IN_BLOCKS * in_block)
    target: Target = next((match.expand(kind) for match, kind in matches if match), None)
    if target is None and in_block:
        target = _fused(name, shape, shapes)
    return target, "fused, as one matrix" if target in _AS_ONE else ""


def _fused(name: str, shape: tuple[int, ...], shapes: Shapes) -> Target:
    """How a parameter holds several matrices; one type where that cannot be told."""
    rows, columns = shape[-2:]
    size = min(shape)
    if _ends_in(name, _THIRDS):
        if sorted(shape) != [size, 3 * size]:
            return "attn_qkv"
        # GPT-2 keeps (in, 3 * out), all others (3 * out, in); all have out = in.
        return Fused(tuple((kind, size) for kind in _QKV), dim=int(rows == size))
    if _ends_in(name, _ONE_QKV):
        # Phi: as many queries as the output projection has columns, keys as values.
        head, is_phi, tail = name.rpartition(".qkv_proj.")
        _, queries = shapes.get(f"{head}.o_proj.{tail}", (0, 0)) if is_phi else (0, 0)
        keys, odd = divmod(rows - queries, 2)
        if queries == 0 or keys <= 0 or odd:
            return "attn_qkv"
        return Fused(tuple(zip(_QKV, (queries, keys, keys), strict=True)))
    if _ends_in(name, _HALVES) and rows % 2 == 0:
        prefix = "shared_expert" if "shared_mlp" in name else "mlp"
        return Fused(((f"{prefix}_gate", rows // 2), (f"{prefix}_up", rows // 2)))
    if _ends_in(name, _GATE_UP_EXPERTS) and len(shape) == 3:
        # (E, 2 * hidden, dim) or, transposed, (E, dim, 2 * hidden): `down_proj` tells. gpt-oss
        # has gate and up in turn, and alone a bias.
        down = shapes.get(name.replace("gate_up_proj", "down_proj"), shape)[1:]
        ways: dict[tuple[int, ...], int] = {(columns, rows // 2): 0, (columns // 2, rows): 1}
        dim = ways.get(down)
        if f"{name}_bias" in shapes or dim is None or shape[1 + dim] % 2:
            return "expert_gate_up"
        half = shape[1 + dim] // 2
        return Fused((("expert_gate", half), ("expert_up", half)), dim=dim)
    return None


def _may_be_matrices(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor of three dims is more than a vector or the kernel of a convolution."""
    return "conv" not in name and sum(size > 1 for size in shape) > 1
