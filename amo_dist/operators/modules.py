"""Facts about parameters that only the modules around them give: heads, convolutions, outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from amo_dist.operators.patterns import clean_name
from amo_dist.operators.views import Heads, Site

# Fields with the width of a model and the number of heads that share it.
_WIDTH_AND_NUMBER = (
    ("hidden_size", "num_attention_heads"),
    ("embed_dim", "num_heads"),
    ("n_embd", "n_head"),
    ("d_model", "n_heads"),
    ("dim", "n_heads"),
)


def sites_by_name(parts: Sequence[nn.Module], per_head: bool | int = False) -> dict[str, Site]:
    """Read the facts about each parameter from its module, and its heads from the attention.

    The nearest enclosing module with sizes of heads, in its own attributes or in its configuration,
    gives the heads of a parameter.

    Args:
        parts: Modules of the model.
        per_head: Argument of `amo_dist.param_groups`; an integer is the rows of every head.

    Returns:
        Site of every parameter, by each of its cleaned names.
    """
    sites: dict[str, Site] = {}
    chosen = None if isinstance(per_head, bool) else Heads(per_head, per_head, per_head)

    def visit(module: nn.Module, prefix: str, outer: Heads) -> None:
        heads = chosen or _heads_of(module) or outer
        # GPT-2 of Hugging Face. FSDP2 makes a subclass of a module's class.
        is_conv1d = any(kind.__name__ == "Conv1D" for kind in type(module).__mro__)
        site = Site(
            heads,
            is_convolution=isinstance(module, _ConvNd),
            is_embedding=isinstance(module, (nn.Embedding, nn.EmbeddingBag)),
            output_dim=int(is_conv1d or isinstance(module, _ConvTransposeNd)),
        )
        for name, _ in module.named_parameters(recurse=False):
            sites.setdefault(clean_name(prefix + name), site)
        for name, child in module.named_children():
            visit(child, f"{prefix}{name}.", heads)

    for part in parts:
        visit(part, "", Heads())
    return sites


def _heads_of(module: nn.Module) -> Heads | None:
    """Read the heads from a module's attributes, or else from its configuration."""
    config = getattr(module, "config", None)
    values = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    return _read(vars(module)) or _read(values)


def _read(values: Mapping[str, Any]) -> Heads | None:
    def sizes(*fields: str) -> list[int] | None:
        numbers = [values.get(field) for field in fields]
        is_valid = all(isinstance(number, int) and number > 0 for number in numbers)
        return numbers if is_valid else None  # type: ignore[return-value]

    if latent := sizes("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        content, rotary, value = latent
        return Heads(content + rotary, content, value, rotary)
    for fields in (("head_k_dim", "head_v_dim"), ("key_head_dim", "value_head_dim")):
        if linear := sizes(*fields):
            return Heads(linear[0], linear[0], linear[1])
    for field in ("head_dim", "attention_head_size", "key_value_proj_dim"):
        if size := sizes(field):
            return Heads(*size * 3)
    for fields in _WIDTH_AND_NUMBER:
        if (shared := sizes(*fields)) and shared[0] % shared[1] == 0:
            return Heads(*[shared[0] // shared[1]] * 3)
    return None
