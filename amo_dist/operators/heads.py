"""Rows per head, read from the modules of an attention or from their configurations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from amo_dist.operators.patterns import clean_name
from amo_dist.operators.views import Heads

_LATENT = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_LINEAR = (("head_k_dim", "head_v_dim"), ("key_head_dim", "value_head_dim"))
_SIZES = ("head_dim", "attention_head_size", "key_value_proj_dim")
_WIDTH_AND_NUMBER = (
    ("hidden_size", "num_attention_heads"),
    ("embed_dim", "num_heads"),
    ("n_embd", "n_head"),
    ("d_model", "n_heads"),
    ("dim", "n_heads"),
)
"""Fields with the width of a model and the number of heads that share it."""


def heads_by_name(
    parts: Sequence[nn.Module], names: Iterable[str], per_head: bool | int = True
) -> dict[str, Heads]:
    """Find the heads of the attention that each parameter belongs to.

    The nearest enclosing module with sizes of heads, in its own attributes or in its configuration,
    decides for a parameter.

    Args:
        parts: Modules of the model.
        names: Cleaned names of its parameters.
        per_head: Argument of `amo_dist.param_groups`; an integer is the rows of every head.

    Returns:
        Heads by name, without the parameters that no module describes.
    """
    if per_head is not True:
        return {name: Heads(per_head, per_head, per_head) for name in names} if per_head else {}
    heads_by_module: dict[str, Heads] = {}
    for part in parts:
        for name, module in part.named_modules():
            if (heads := _heads_of(module)) is not None:
                heads_by_module.setdefault(clean_name(name), heads)
    heads_by_parameter: dict[str, Heads] = {}
    for name in names:
        module_name = name
        while module_name and name not in heads_by_parameter:
            module_name = module_name.rpartition(".")[0]
            if module_name in heads_by_module:
                heads_by_parameter[name] = heads_by_module[module_name]
    return heads_by_parameter


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

    if latent := sizes(*_LATENT):
        content, rotary, value = latent
        return Heads(content + rotary, content, value, rotary)
    for fields in _LINEAR:
        if linear := sizes(*fields):
            return Heads(linear[0], linear[0], linear[1])
    for field in _SIZES:
        if size := sizes(field):
            return Heads(*size * 3)
    for fields in _WIDTH_AND_NUMBER:
        if (shared := sizes(*fields)) and shared[0] % shared[1] == 0:
            return Heads(*[shared[0] // shared[1]] * 3)
    return None
