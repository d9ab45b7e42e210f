"""Names that say more than a role: the types of known matrices, and what is no matrix.

The tables cover torchtitan's language models with their vision towers, nanoGPT, PyTorch's
transformer layers, timm's transformers, and the families of Hugging Face in ``docs/families.md``.
"""

from __future__ import annotations

import re
from typing import TypeAlias

# Each row matches the end of a name, after a dot or from its start, and gives the operator type as
# a template of `re.Match.expand`, or a reason.
Table: TypeAlias = "tuple[tuple[str, str], ...]"
_SUFFIX = r"(?:_?(?:proj(?:s|ection)?|lin(?:ear)?|layer))?"
# Names in an attention, without the final ``weight``.
ATTENTION: Table = (
    (r"\w*(?:qkv|query_key_value|queries_keys_values)(z?)\w*|c_attn", r"attn_qkv\1"),
    (rf"(?:\w*_)?w?(?:kv|key_value){_SUFFIX}", "attn_kv"),
    (rf"(?:\w*_)?w?(qk|q|k|v)(?:uery|ey|alue)?{_SUFFIX}", r"attn_\1"),
    (rf"(?:\w*_)?[wW]?o(?:ut(?:put)?)?{_SUFFIX}|c_proj|dense|proj(?:ection)?", "attn_o"),
    (r"\w*in_proj_z|o_gate", "attn_gate"),
    (r"(?:attention|self_attn)\.w?(q|kv)_([ab])(?:_proj)?(?:_with_mqa)?", r"mla_\1_\2"),
)
# Names in a feed-forward, and in experts, whose family takes the place of ``mlp``.
FEED_FORWARD: Table = (
    (r"(?:\w*?_)??(gate_up|gate|up|down)_proj", r"mlp_\1"),
    (r"\w*experts?\.(?:\w*?_)??w?(gate_up|gate|up|down)", r"mlp_\1"),
    (r"Wi|weights_in|input_linear|mlp1_weight_\w+", "mlp_gate_up"),
    # torchtitan and Mixtral number the gate, down and up.
    (r"(?:feed_forward|\w*experts(?:\.mlp)?)\.w1(?:_E\w+)?|wi_0|fc1_g", "mlp_gate"),
    (
        r"(?:feed_forward|\w*experts(?:\.mlp)?)\.w2(?:_E\w+)?|wo|Wo|weights_out|mlp2_weight_\w+",
        "mlp_down",
    ),
    (r"(?:feed_forward|\w*experts(?:\.mlp)?)\.w3(?:_E\w+)?|wi|wi_1", "mlp_up"),
    (r"fc1|fc1_x|fc_in|lin1|linear1|pwconv1|dense_h_to_4h|\w*layers\.ffn", "mlp_up"),
    (r"fc2|fc_out|lin2|linear2|pwconv2|dense_4h_to_h|ffn_output", "mlp_down"),
    (r"mlp\.(?:c_fc|linear_fc1)", "mlp_up"),
    (r"mlp\.(?:c_proj|linear_fc2)", "mlp_down"),
    (r"intermediate(?:_dense|(?:_query)?\.dense)", "mlp_up"),
    (r"output(?:_dense|_linear|(?:_query)?\.dense)", "mlp_down"),
)
# Names anywhere else.
OTHERS: Table = (
    (r"(?:mamba|mixer)\.(in|x|dt|out)_proj", r"ssm_\1"),
    (r"eh_proj", "mtp_proj"),
    (r"downsample\.reduction", "patch_merge"),
)

# Paths whose last word or last but one stands in a module that is called an attention.
_IN_ATTENTION = re.compile(r"att[^.]*\.(?:(?!mlp)\w+\.)?\w+$", re.IGNORECASE)

_TABLE = r"(?:\w*emb(?:ed\w*)?(?:_\w+)?|wte|wpe)"
# Ends of names that go to AdamW, even for a matrix inside a block, and the reason.
NO_MATRIX: Table = (
    # PEFT's LoRA, VeRA, AdaLoRA, LoHa, LoKr, IA3, OFT, BOFT, HRA.
    (r"(?:(?:lora|vera|hada|lokr|ia3|oft|boft|hra)_|\w*adapter)\w*(?:\..*)?", "adapter"),
    (r"(?:relative_\w*bias|rel_pos_|rel_log|emb_rel)\w*(\.weight|\.proj)?", "relative positions"),
    (r"(?:\w*position_bias|cpb|rel_pos|meta)[._]mlp\..*", "relative positions"),
    (r"(?:.*_)?bias(?:es)?(?:_[A-Z]+)?", "bias"),
    (rf"{_TABLE}(?:\.(?:proj\w*|linear\w*|\d+))*(?:\.\w+)?|\w*tokens?|\w*_pos", "embedding"),
    (r"(?:lm_)?head\.weight", "head"),
    (r"\w*router\w*(?:\.[a-z]\w*){0,2}", "router"),
    (r"(?:moe\.shared_experts\.|shared_expert_)gate\.weight", "router"),
    (r"\w*in_proj_ba\.weight", "one row per head"),
    (r"A_log|D", "state-space table"),
    (r"\w*_hc\.fn", "table"),
)
# Names that mean so outside of blocks alone.
NO_MATRIX_OUTSIDE: Table = (
    (rf"{_TABLE}\..*", "embedding"),
    (r"(?:\w*head\w*|fc|output|classifier|score|logits)(?:\.\w+)?\.weight", "head"),
)


def ends_in(name: str, tail: str) -> re.Match[str] | None:
    """Match the end of a name, after a dot or from its start."""
    return re.fullmatch(rf"(?:.*\.)?(?:{tail})", name)


def known_type(name: str, *, in_attention: bool) -> str | None:
    """Look up the operator type of a matrix of a block.

    Args:
        name: Name of the parameter.
        in_attention: Whether an attention is around it, perhaps with a feed-forward between.
    """
    parts = name.removesuffix("_weight").split(".")
    path = ".".join(p for p in parts if not p.isdigit() and p not in ("weight", "linear"))
    rows = OTHERS + FEED_FORWARD + ATTENTION * in_attention
    if _IN_ATTENTION.search(path):
        rows = OTHERS + ATTENTION
    family = "shared_expert_" if re.search("shared_(?:expert|mlp)", name) else "expert_"
    for tail, template in rows:
        if match := ends_in(path, tail):
            kind = match.expand(template)
            return kind.replace("mlp_", family) if re.search("expert|shared_mlp", name) else kind
    return None
