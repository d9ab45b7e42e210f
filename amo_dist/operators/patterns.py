"""Which names are which operator types: the built-in table, and the user's patterns before it.

A matrix of a block is orthogonalized with the schedule of its operator type; everything else
(embeddings, heads, norms, biases, routers, LoRA adapters, convolutions) goes to AdamW. The table
knows torchtitan's language models with their vision towers (llama3, llama4, qwen3, qwen3_5,
deepseek_v3, gpt_oss, kimi_k2_7, muse_glimmer), the Hugging Face decoders that share Llama's names
(llama, qwen2, qwen3, mistral, gemma; mixtral's and deepseek's experts where each is a module),
GPT-2 and nanoGPT. A matrix inside a block that no pattern knows is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from amo_dist.operators.views import (
    ADAMW,
    Fused,
    MatrixView,
    check_operator_type,
    cut_views,
    require,
)

Target: TypeAlias = "str | Fused | None"
Patterns: TypeAlias = Mapping[str, Target]
"""Regular expression over cleaned names -> operator type, ``"adamw"`` or ``None``, or ``Fused``."""

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
_BLOCK = re.compile(r"(?:^|\.)(?:\w*(?:layers?|blocks?)|h)\.\d+\.")

# The end of a name, preceded by its start or by a dot, and the operator type (a template).
_BUILT_IN: tuple[tuple[str, str], ...] = (
    # torchtitan: attention, also where it is linear (in_proj_*, z gates what comes out of it)
    (r"att(?:ention|n)\.(?:qkv_linear\.)?w([qkvo])\.weight", r"attn_\1"),
    (r"attention\.w(q|kv)_([ab])\.weight", r"mla_\1_\2"),
    (r"attn\.in_proj_([qkv])\.weight", r"attn_\1"),
    (r"(?:attention\.o_gate|attn\.in_proj_z)\.weight", "attn_gate"),
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
_GPT2_QKV = r"attn\.c_attn\.weight"

# What goes to AdamW by the end of its name, even as a matrix inside a block.
_ADAMW_NAMES: tuple[tuple[str, str], ...] = (
    (r"lora_(?:A|B|embedding_A|embedding_B)(?:\..*)?", "LoRA adapter"),
    (r"(?:.*_)?bias(?:_[A-Z]+)?", "bias"),
    (r"(?:\w*embed\w*|wte|wpe)(?:\.weight)?", "embedding"),
    (r"(?:moe\.router|moe\.shared_experts|block_sparse_moe)\.gate\.weight", "router"),
    (r"mlp\.shared_expert_gate\.weight", "router"),
    (r"attn\.in_proj_[ab]\.weight", "one row a head"),
)
# A router in Hugging Face's mixtures, (num_experts, dim). A gate of a dense MLP, which the name
# fits too, has more rows than columns, and is not to fall to AdamW in silence.
_WIDE_ROUTER = r"mlp\.gate\.weight"


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
    return classify_with_reason(clean_name(name), tuple(shape), check_patterns(patterns))[0]


def classify_with_reason(
    name: str, shape: tuple[int, ...], patterns: Patterns
) -> tuple[tuple[MatrixView, ...] | None, str]:
    """What `classify` returns, and why, in a few words for a report; empty where built in.

    Args:
        name: Cleaned.
        shape: Global.
        patterns: From `check_patterns`.
    """
    for pattern, target in patterns.items():
        if re.fullmatch(pattern, name):
            views = None if target is None else cut_views(name, shape, target)
            return views, "by your pattern"
    if len(shape) < 2:
        return None, f"{len(shape)}-D"
    for tail, reason in _ADAMW_NAMES:
        if _ends_in(name, tail):
            return None, reason
    if len(shape) == 2 and shape[0] < shape[1] and _ends_in(name, _WIDE_ROUTER):
        return None, "router"
    built_in = _built_in(name, shape) if len(shape) <= 3 else None
    if built_in is not None:
        return cut_views(name, shape, built_in), ""
    if _BLOCK.search(name) and (len(shape) == 2 or (len(shape) == 3 and "expert" in name)):
        raise _unknown_matrix(name, shape)
    return None, "outside of any block" if len(shape) == 2 else f"{len(shape)}-D"


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


def _ends_in(name: str, tail: str) -> re.Match[str] | None:
    return re.fullmatch(rf"(?:.*\.)?{tail}", name)


def _built_in(name: str, shape: tuple[int, ...]) -> Target:
    for tail, template in _BUILT_IN:
        if match := _ends_in(name, tail):
            return match.expand(template)
    size = min(shape)
    if _ends_in(name, _GPT2_QKV) and sorted(shape) == [size, 3 * size]:
        # GPT-2 keeps (in, 3 * out), nanoGPT (3 * out, in); both have out = in.
        parts = (("attn_q", size), ("attn_k", size), ("attn_v", size))
        return Fused(parts, dim=int(shape[0] == size))
    return None


def _unknown_matrix(name: str, shape: tuple[int, ...]) -> ValueError:
    known = "\n".join(f"  {tail} -> {operator_type}" for tail, operator_type in _BUILT_IN)
    exact = re.escape(name)
    return ValueError(
        f"{name}: found a matrix of shape {shape} inside a block that no pattern knows; "
        f"expected one of the built-in patterns (the end of a name)\n{known}\n"
        f"  {_GPT2_QKV} -> attn_q, attn_k, attn_v (of equal sizes)\n"
        f"or one of yours. To orthogonalize it, pass patterns={{{exact!r}: 'attn_q'}} (any "
        "operator type, new ones too), or Fused(...) where it holds several matrices side by side; "
        f"to leave it to AdamW, pass patterns={{{exact!r}: 'adamw'}}."
    )
