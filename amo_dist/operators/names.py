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
# Ends of the types of matrices with a number for a name.
NUMBERED = {"1": "gate", "2": "down", "3": "up"}
ANYWHERE: Table = (
    # torchtitan's attention, softmax and linear (in_proj_*, whose z gates the output).
    (r"att(?:ention|n)\.(?:qkv_linear\.)?w([qkvo])\.weight", r"attn_\1"),
    (r"attention\.w(q|kv)_([ab])\.weight", r"mla_\1_\2"),
    (r"\w*attn\.in_proj_([qkv]|qkvz?)\.weight", r"attn_\1"),
    (r"(?:attention\.o_gate|\w*attn\.in_proj_z)\.weight", "attn_gate"),
    (r"attn\.(?:out_|c_)?proj\.weight", "attn_o"),
    (r"mlp\.(?:linear_fc1|c_fc)\.weight", "mlp_up"),
    (r"mlp\.(?:linear_fc2|c_proj)\.weight", "mlp_down"),
    # torchtitan and Mixtral number the matrices of a feed-forward: see `NUMBERED`.
    (r"feed_forward\.w([123])\.weight", r"mlp_\1"),
    (r"(?:inner_)?(shared_)?experts\.(?:\d+\.)?w([123])(?:_E\w+|\.weight)?", r"\1expert_\2"),
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
IN_BLOCKS: Table = (
    (rf"{_ATTENTION}([qkv])(?:uery|ey|alue)?(?:_proj|_lin)?\.weight", r"attn_\1"),
    (rf"{_ATTENTION}(?:o|Wo|dense|projection|(?:o|out)_proj|out_lin)\.weight", "attn_o"),
    (r"(?:mixer|temporal_block)\.([qkvo])_proj\.weight", r"attn_\1"),
    (r"(?:mamba|mixer)\.(in|x|dt|out)_proj[._]weight", r"ssm_\1"),
    (r"(?:mixer|feed_forward|ffn|mlp_block)\.(gate|up|down)_proj\.weight", r"mlp_\1"),
    (r"(shared_)?experts?\.(?:\d+\.)?(gate|up|down|gate_up)_proj(?:\.weight)?", r"\1expert_\2"),
    (r"shared_mlp\.output_linear\.weight", "shared_expert_down"),
    (r"shared_mlp\.input_linear\.weight", "shared_expert_gate_up"),
    (r"(?:gate_up_proj|mlp\.(?:Wi|weights_in))\.weight", "mlp_gate_up"),
    (r"(?:DenseReluDense\.wi_0|fc1_g)\.weight", "mlp_gate"),
    (r"(?:fc1|fc1_x|fc_in|lin1|linear1|pwconv1|dense_h_to_4h|ffn)\.weight", "mlp_up"),
    (r"(?:DenseReluDense\.wi(?:_1)?|intermediate(?:_dense|(?:_query)?\.dense))\.weight", "mlp_up"),
    (r"(?:fc2|fc_out|lin2|linear2|pwconv2|dense_4h_to_h|ffn_output)\.weight", "mlp_down"),
    (r"(?:DenseReluDense\.wo|mlp\.(?:Wo|weights_out))\.weight", "mlp_down"),
    (r"output(?:_dense|(?:_query)?\.dense)\.weight", "mlp_down"),
    (r"downsample\.reduction\.weight", "patch_merge"),
    (r"layers\.\d+\.linear\.weight", "hybrid_proj"),
    (
        rf"{_ATTENTION}(?:(?:c_attn|W?qkv|query_key_value|qkv_proj)\.weight|in_proj_weight)",
        "attn_qkv",
    ),
)
# Words that name a part of any attention, or of any expert.
ATTENTION_WORD = re.compile(
    r"(?:\w*?_)??w?(qkv|kv|qk|q|k|v|o|query_key_value|queries_keys_values|key_value|query|key|value"
    r"|out(?:put)?)(?:_?(?:proj(?:s|ection)?|lin(?:ear)?|layer))?"
)
LETTERS = {"query_key_value": "qkv", "queries_keys_values": "qkv", "key_value": "kv", "query": "q"}
LETTERS |= {"key": "k", "value": "v", "out": "o", "output": "o"}
EXPERT_WORD = re.compile(r"(?:\w*_)?(?:w?(gate_up|gate|up|down)(?:_proj)?|w([123]))")

# Ends of names that go to AdamW, even for a matrix inside a block, and the reason.
NO_MATRIX: Table = (
    # PEFT's LoRA, VeRA, AdaLoRA, LoHa, LoKr, IA3, OFT, BOFT, HRA.
    (r"(?:(?:lora|vera|hada|lokr|ia3|oft|boft|hra)_|\w*adapter)\w*(?:\..*)?", "adapter"),
    (r"\w+\.original0", "magnitude"),
    (r"relative_attention_bias\.weight|\w*bias_table|rel_pos_\w+", "relative positions"),
    (r"(?:\w*position_bias|cpb|rel_pos|meta)[._]?mlp\..*", "relative positions"),
    (r"emb_rel_\w+|(?:relative_position_bias|rel_logits_proj)\.proj", "relative positions"),
    (r"(?:.*_)?bias(?:es)?(?:_[A-Z]+)?", "bias"),
    (r"\w*pos_?emb\w*(?:\.\w+)?|\w*tokens?|\w*_pos", "embedding"),
    (r"(?:\w*embed\w*|wte|wpe)(?:\.proj\w*)?(?:\.weight)?", "embedding"),
    (
        r"(?:\w*(?:time|cond|class|label)\w*_emb\w*|emb_layers|\w*t_emb\w*)(?:\.\w+){1,2}",
        "embedding",
    ),
    (r"(?:lm_head|shared_head\.head)\.weight", "head"),
    (r"\w*hypernetworks?_mlps?\..*", "head"),
    (r"\w*router\w*(?:\.[a-z]\w*){0,2}", "router"),
    (r"(?:moe\.shared_experts\.|block_sparse_moe\.|mlp\.shared_expert_)gate\.weight", "router"),
    (r"\w*attn\.in_proj_(?:[ab]|ba)\.weight", "one row per head"),
    (r"A_log|D", "state-space table"),
    (r"\w*_hc\.fn", "table"),
)
# Names of heads and of embeddings outside of blocks.
HEADS = r"(?:\w*head|output|classifier|score|logits)(?:\.\w+)?\.weight"
EMBEDDINGS = r"(?:.*\.)?\w*emb(?:ed\w*)?(?:_\w+)?\..*"


def ends_in(name: str, tail: str) -> re.Match[str] | None:
    """Match the end of a name, after a dot or from its start."""
    return re.fullmatch(rf"(?:.*\.)?(?:{tail})", name)


def known_type(name: str, *, in_block: bool) -> str | None:
    """Look up the operator type of a name."""
    for tail, template in ANYWHERE + IN_BLOCKS * in_block:
        if match := ends_in(name, tail):
            family, _, part = match.expand(template).rpartition("_")
            return f"{family}_{NUMBERED.get(part, part)}"
    return None
