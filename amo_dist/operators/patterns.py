"""Operator types by parameter name: the user's patterns first, then the built-in tables.

A matrix of a block is orthogonalized with the schedule of its operator type; everything else
(embeddings, heads, norms, biases, tables of relative positions, routers, LoRA adapters) goes to
AdamW. The tables cover torchtitan's language models with their vision towers, nanoGPT, PyTorch's
transformer layers, timm's transformers, and the families of Hugging Face in ``docs/families.md``. A
matrix inside a block whose name matches nothing is an error.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from amo_dist.config import require
from amo_dist.operators.views import (
    ADAMW,
    Fused,
    MatrixView,
    Site,
    by_head,
    check_operator_type,
    cut_views,
)

Target: TypeAlias = "str | Fused | None"
# Regular expression over cleaned names -> operator type, ``"adamw"`` or ``None``, or `Fused`.
Patterns: TypeAlias = Mapping[str, Target]
# Shapes of parameters by cleaned name.
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
# The matrices of a parameter, None for AdamW, and the reason.
Classified: TypeAlias = "tuple[tuple[MatrixView, ...] | None, str]"

# Reason why a matrix of an unknown name goes to AdamW without an error.
OUTSIDE = "outside of any block"
# Reason of a matrix inside a block that nothing names; without views it is an error.
UNKNOWN = "of an unknown name"
# Reason of a convolution inside a block, which ``flatten_conv`` makes a matrix.
CONVOLUTION = "convolution"
# Reason of a parameter that one of the user's patterns matches.
BY_PATTERN = "by your pattern"

# torch.compile, activation checkpointing, FSDP; PEFT's layers and copies; parametrizations, whose
# weight_norm keeps the direction in ``original1`` and the magnitude in ``original0``.
_WRAPPERS = re.compile(
    r"(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module|base_layer|modules_to_save\.\w+)\."
    r"|parametrizations\.(?=\w+\.original)|(?<=\w)\.original1?$"
)
_BLOCK = re.compile(r"(?:^|\.)(?:\w*(?:layers?|blocks?)|h|layer\d|stages?|conformer)\.\d+\.")

# Each row matches the end of a name, after a dot or from its start, and gives the operator type as
# a template of `re.Match.expand`.
_Table: TypeAlias = "tuple[tuple[str, str], ...]"
# Ends of the types of matrices with a number for a name.
_NUMBERED = {"1": "gate", "2": "down", "3": "up"}
_ANYWHERE: _Table = (
    # torchtitan's attention, softmax and linear (in_proj_*, whose z gates the output).
    (r"att(?:ention|n)\.(?:qkv_linear\.)?w([qkvo])\.weight", r"attn_\1"),
    (r"attention\.w(q|kv)_([ab])\.weight", r"mla_\1_\2"),
    (r"\w*attn\.in_proj_([qkv]|qkvz?)\.weight", r"attn_\1"),
    (r"(?:attention\.o_gate|\w*attn\.in_proj_z)\.weight", "attn_gate"),
    (r"attn\.(?:out_|c_)?proj\.weight", "attn_o"),
    (r"mlp\.(?:linear_fc1|c_fc)\.weight", "mlp_up"),
    (r"mlp\.(?:linear_fc2|c_proj)\.weight", "mlp_down"),
    # torchtitan and Mixtral number the matrices of a feed-forward: see `_NUMBERED`.
    (r"feed_forward\.w([123])\.weight", r"mlp_\1"),
    (r"(?:inner_)?(shared_)?experts\.(?:\d+\.)?w([123])(?:_E\w+|\.weight)?", r"\1expert_\2"),
    # gpt_oss interleaves rows of gate and up: one matrix, as two would have a piece per row.
    (r"inner_experts\.mlp1_weight_EGD", "expert_gate_up"),
    (r"inner_experts\.mlp2_weight_EDF", "expert_down"),
    (r"eh_proj\.weight", "mtp_proj"),
    # Llama and models with its names.
    (r"self_attn\.([qkvo])_proj\.weight", r"attn_\1"),
    (r"self_attn\.(q|kv)_([ab])_proj(?:_with_mqa)?\.weight", r"mla_\1_\2"),
    (r"mlp\.(gate|up|down)_proj\.weight", r"mlp_\1"),
)
# attention, self_attn, SelfAttention, crossattention, attention.self
_ATTENTION = r"\w*[aA]tt\w*\.(?:[a-z]+\.)?"
# Short names, matched inside blocks alone: elsewhere heads, poolers and projectors have them.
_IN_BLOCKS: _Table = (
    (rf"{_ATTENTION}([qkv])(?:uery|ey|alue)?(?:_proj|_lin)?\.weight", r"attn_\1"),
    (rf"{_ATTENTION}(?:o|Wo|dense|projection|(?:o|out)_proj|out_lin)\.weight", "attn_o"),
    (r"(?:mixer|temporal_block)\.([qkvo])_proj\.weight", r"attn_\1"),
    (r"(?:mamba|mixer)\.(in|x|dt|out)_proj[._]weight", r"ssm_\1"),
    (r"(?:mixer|feed_forward|ffn|mlp_block)\.(gate|up|down)_proj\.weight", r"mlp_\1"),
    (r"(shared_)?experts?\.(?:\d+\.)?(gate|up|down)_proj(?:\.weight)?", r"\1expert_\2"),
    (r"shared_mlp\.output_linear\.weight", "shared_expert_down"),
    (r"(?:DenseReluDense\.wi_0|fc1_g)\.weight", "mlp_gate"),
    (r"(?:fc1|fc1_x|fc_in|lin1|linear1|pwconv1|dense_h_to_4h|ffn)\.weight", "mlp_up"),
    (r"(?:DenseReluDense\.wi(?:_1)?|intermediate(?:_dense|(?:_query)?\.dense))\.weight", "mlp_up"),
    (r"(?:fc2|fc_out|lin2|linear2|pwconv2|dense_4h_to_h|ffn_output)\.weight", "mlp_down"),
    (r"(?:DenseReluDense\.wo|mlp\.(?:Wo|weights_out))\.weight", "mlp_down"),
    (r"output(?:_dense|(?:_query)?\.dense)\.weight", "mlp_down"),
    (r"downsample\.reduction\.weight", "patch_merge"),
    (r"layers\.\d+\.linear\.weight", "hybrid_proj"),
)

# Parameters that hold several matrices, one after the other.
_QKV = ("attn_q", "attn_k", "attn_v")
_THIRDS = rf"{_ATTENTION}(?:(?:c_attn|qkv|Wqkv)\.weight|in_proj_weight)"
_HALVES = r"(?:gate_up_proj|mlp\.(?:Wi|weights_in)|shared_mlp\.input_linear)\.weight"
_GATE_UP_EXPERTS = r"experts\.gate_up_proj"
# GPT-NeoX, Bloom and CodeGen interleave q, k and v by heads, Falcon does not; neither name nor
# shape distinguishes them.
_ONE_QKV = rf"{_ATTENTION}(?:query_key_value|qkv_proj)\.weight"
# Fused parameters that stay one matrix: their parts are ambiguous or single rows.
_INTERLEAVED = ("attn_qkv", "attn_qkvz", "attn_q_gate")
_AS_ONE = (*_INTERLEAVED, "expert_gate_up", "ssm_in")

# Ends of names that go to AdamW, even for a matrix inside a block, and the reason.
_ADAMW_NAMES: _Table = (
    # PEFT's LoRA, VeRA, AdaLoRA, LoHa, LoKr, IA3, OFT, BOFT, HRA.
    (r"(?:(?:lora|vera|hada|lokr|ia3|oft|boft|hra)_|\w*_adapter_list\.)\w+(?:\..*)?", "adapter"),
    (r"\w+\.original0", "magnitude"),
    (r"relative_attention_bias\.weight|\w*bias_table|rel_pos_\w+", "relative positions"),
    (r"(?:continuous_position_bias|cpb)_mlp\..*", "relative positions"),
    (r"(?:.*_)?bias(?:_[A-Z]+)?", "bias"),
    (r"(?:\w*embed\w*|wte|wpe)(?:\.proj\w*)?(?:\.weight)?", "embedding"),
    (r"(?:lm_head|shared_head\.head)\.weight", "head"),
    (r"\w*router\w*(?:\.[a-z]\w*){0,2}", "router"),
    (r"(?:moe\.shared_experts\.|block_sparse_moe\.|mlp\.shared_expert_)gate\.weight", "router"),
    (r"\w*attn\.in_proj_(?:[ab]|ba)\.weight", "one row per head"),
    (r"A_log|D", "state-space table"),
)
# A router in Hugging Face's mixtures, (num_experts, dim). The gate of a dense MLP may have the same
# name; its greater number of rows keeps it from going to AdamW silently.
_WIDE_ROUTER = r"(?:mlp|mixer|feed_forward)\.gate\.weight"

# Heads of a model, which stay with AdamW even with unknown="matrix".
_HEADS = r"(?:\w*head|output|classifier|score|logits)(?:\.\w+)?\.weight"


def is_head(name: str) -> bool:
    """Whether a parameter outside of blocks has a name that model heads have."""
    return _BLOCK.search(name) is None and _ends_in(name, _HEADS) is not None


def clean_name(name: str) -> str:
    """Remove the components that wrappers add to a name.

    Those of ``torch.compile``, activation checkpointing, FSDP, PEFT and parametrizations go
    wherever they stand, the ``module.`` of DDP at the start.
    """
    return _WRAPPERS.sub("", name).removeprefix("module.")


def find_views(
    name: str,
    patterns: Patterns,
    shapes: Shapes,
    site: Site,
    *,
    flatten_conv: bool = False,
    per_head: bool = False,
    takes_unknown: bool = False,
) -> Classified:
    """Find the matrices of a parameter and a short reason, ``UNKNOWN`` for an unknown matrix.

    Args:
        name: Cleaned name.
        patterns: Result of `check_patterns`. The first expression that matches the whole name
            wins, before all built-in ones.
        shapes: Global shapes of all parameters of the model; ``(E, m, n)`` holds one matrix per
            expert. A neighbour's shape may give the sizes of a fused parameter's parts; without it
            the parameter is one matrix.
        site: Facts that the modules around the parameter give.
        flatten_conv: Argument of `amo_dist.param_groups`.
        per_head: Whether to divide the parameter by the heads of its attention.
        takes_unknown: Whether matrices of unknown names become the operator type ``matrix``, but
            for heads of models and embeddings.

    Raises:
        ValueError: A pattern or the heads do not fit the shape, or nothing gives the heads.
    """
    shape = shapes[name]
    target, reason = find_target(name, patterns, shapes, site)
    if flatten_conv and reason == CONVOLUTION:
        target, reason = "conv", ""
    if takes_unknown and reason in (UNKNOWN, OUTSIDE) and len(shape) == 2:
        # A matrix of one row or column is a vector, such as a magnitude of a neuron.
        is_matrix = min(shape) > 1 and not site.is_embedding and not is_head(name)
        target, reason = ("matrix", UNKNOWN) if is_matrix else (None, "head, embedding or vector")
    if target is None:
        return None, reason
    if per_head:
        has_order = reason == BY_PATTERN or target not in _INTERLEAVED
        expected = "a pattern with Fused(..., groups=..., heads=...)"
        require(has_order, f"per_head: {name}", "queries, keys, values in unknown order", expected)
        target = by_head(name, shape, target, site)
    if isinstance(target, str) and _experts_dim(name, shapes):
        site = dataclasses.replace(site, output_dim=1)
    return cut_views(name, shape, target, site), reason


def find_target(name: str, patterns: Patterns, shapes: Shapes, site: Site) -> tuple[Target, str]:
    """Find the target of a parameter, in the form of a pattern's value, and the reason."""
    for pattern, target in patterns.items():
        if re.fullmatch(pattern, name):
            return target, BY_PATTERN
    shape = shapes[name]
    if len(shape) < 2:
        return None, f"{len(shape)}-D"
    for tail, reason in _ADAMW_NAMES:
        if _ends_in(name, tail):
            return None, reason
    if len(shape) == 2 and shape[0] < shape[1] and _ends_in(name, _WIDE_ROUTER):
        return None, "router"
    in_block = _BLOCK.search(name) is not None
    if len(shape) == 4 or site.is_convolution:
        return None, CONVOLUTION if in_block and shape[1] > 1 else f"{len(shape)}-D"
    if len(shape) <= 3:
        built_in = _built_in(name, shapes, site, in_block)
        if built_in is not None:
            return built_in, "fused, as one matrix" if built_in in _AS_ONE else ""
        # A tensor of three dims may be more than a vector or the kernel of a convolution.
        is_more = "conv" not in name and sum(size > 1 for size in shape) > 1
        if in_block and (len(shape) == 2 or is_more):
            return None, UNKNOWN
    return None, OUTSIDE if len(shape) == 2 else f"{len(shape)}-D"


def _built_in(name: str, shapes: Shapes, site: Site, in_block: bool) -> Target:
    """Find the target of a parameter in the tables; None for a name that they lack."""
    for tail, template in _ANYWHERE + _IN_BLOCKS * in_block:
        if match := _ends_in(name, tail):
            family, _, part = match.expand(template).rpartition("_")
            return _packed(name, shapes, site, f"{family}_{_NUMBERED.get(part, part)}")
    return _fused(name, shapes) if in_block else None


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


def suggest_patterns(shapes: Shapes) -> dict[str, str]:
    """Suggest a pattern and a target for each kind of parameter, from its name and shape.

    A matrix, a convolution or the matrices of experts become one operator type. Anything else, an
    embedding and a head go to AdamW.

    Args:
        shapes: Shapes of the parameters that need a pattern.
    """
    patterns = {}
    for name, shape in shapes.items():
        parts = name.split(".")
        words = [part for part in parts if not part.isdigit() and part != "weight"][-2:]
        is_known = is_head(name) or any(_ends_in(name, tail) for tail, _ in _ADAMW_NAMES)
        is_matrix = not is_known and (len(shape) in (2, 4) or "expert" in name)
        kind = re.sub(r"\W+", "_", "_".join(words)).lower() or "matrix"
        pattern = r"\.".join(r"\d+" if part.isdigit() else re.escape(part) for part in parts)
        patterns[pattern] = kind if is_matrix else ADAMW
    return patterns


def format_patterns(shapes: Shapes) -> str:
    """Write `suggest_patterns` as Python, with the count and the shapes of each one's matches.

    A line after them says which values a pattern may have.
    """
    lines = []
    for pattern, kind in suggest_patterns(shapes).items():
        matched = [str(shape) for name, shape in shapes.items() if re.fullmatch(pattern, name)]
        comment = f"{len(matched)} of {', '.join(dict.fromkeys(matched))}"
        lines.append(f'    r"{pattern}": "{kind}",  # {comment}')
    remark = "A value is an operator type of any name (its matrices share a schedule), 'adamw', or "
    remark += "amo_dist.Fused(...) for several matrices side by side."
    return "\n".join(["patterns = {", *lines, "}", remark])


def _ends_in(name: str, tail: str) -> re.Match[str] | None:
    return re.fullmatch(rf"(?:.*\.)?(?:{tail})", name)


def _packed(name: str, shapes: Shapes, site: Site, kind: str) -> str | Fused:
    """Divide projections that hold more than their name says.

    The output projection beside them has as many columns as the attention has rows of values.
    Qwen3-Next, Qwen3.5 and torchtitan's qwen3_5 store the query and the gate of each head in turn
    in ``q_proj``. Their linear attention stores queries, keys and values, in ``in_proj_qkvz`` the
    gates too and all of them by key head.
    """
    if kind not in ("attn_q", "attn_qkv", "attn_qkvz") or len(shapes[name]) != 2:
        return kind
    parent, rows = name.rsplit(".", 2)[0], shapes[name][0]
    names = [f"{parent}.{output}.weight" for output in ("o_proj", "wo", "out_proj")]
    values = next((shapes[output][1] for output in names if output in shapes), 0)
    heads = site.heads
    if kind == "attn_q":
        if rows != 2 * values:
            return kind
        if not heads.query or values % heads.query:
            return "attn_q_gate"
        return Fused((("attn_q", values), ("attn_gate", values)), groups=values // heads.query)
    num_values = len(kind) - len("attn_qk")  # v, or v and z
    keys, odd = divmod(rows - num_values * values, 2)
    if not values or odd or keys <= 0:
        return kind
    parts = (("attn_q", keys), ("attn_k", keys), ("attn_v", values))
    if kind == "attn_qkv":
        return Fused(parts)
    if not heads.key or keys % heads.key or values % (keys // heads.key):
        return kind
    return Fused((*parts, ("attn_gate", values)), groups=keys // heads.key)


def _fused(name: str, shapes: Shapes) -> Target:
    """Divide a parameter of several matrices; one operator type if their sizes are ambiguous."""
    shape = shapes[name]
    rows, size = shape[-2], min(shape)
    if _ends_in(name, _THIRDS):
        if sorted(shape) != [size, 3 * size]:
            return "attn_qkv"
        # GPT-2 stores (in, 3 * out), all others (3 * out, in); out = in in all of them.
        return Fused(tuple((kind, size) for kind in _QKV), dim=int(rows == size))
    if _ends_in(name, _ONE_QKV):
        # Phi has as many rows of queries as its output projection has columns.
        _, queries = shapes.get(f"{name.rsplit('.', 2)[0]}.o_proj.weight", (0, 0))
        keys, odd = divmod(rows - queries, 2)
        if queries == 0 or keys <= 0 or odd:
            return "attn_qkv"
        return Fused(tuple(zip(_QKV, (queries, keys, keys), strict=True)))
    if _ends_in(name, _HALVES) and rows % 2 == 0:
        prefix = "shared_expert" if "shared_mlp" in name else "mlp"
        return Fused(((f"{prefix}_gate", rows // 2), (f"{prefix}_up", rows // 2)))
    if _ends_in(name, _GATE_UP_EXPERTS) and len(shape) == 3:
        # gpt-oss, the only one with a bias, interleaves gate and up.
        dim = _experts_dim(name, shapes)
        if f"{name}_bias" in shapes or dim is None or shape[1 + dim] % 2:
            return "expert_gate_up"
        half = shape[1 + dim] // 2
        return Fused((("expert_gate", half), ("expert_up", half)), dim=dim)
    return None


def _experts_dim(name: str, shapes: Shapes) -> int | None:
    """Dim of each expert's matrix that counts outputs; None if the name and shapes do not say.

    ``gate_up_proj`` and ``down_proj`` are ``(E, 2 * hidden, dim)`` and ``(E, dim, hidden)``, or
    the transposes of both, as in gpt-oss and Llama 4.
    """
    experts, _, part = name.rpartition(".")
    if part not in ("gate_up_proj", "down_proj") or len(shapes[name]) != 3:
        return None
    rows, columns = shapes.get(f"{experts}.gate_up_proj", shapes[name])[1:]
    down = shapes.get(f"{experts}.down_proj", shapes[name])[1:]
    dim_by_down: dict[tuple[int, ...], int] = {(columns, rows // 2): 0, (columns // 2, rows): 1}
    return dim_by_down.get(down)
