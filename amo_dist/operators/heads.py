"""How many rows a head has, as the modules of an attention or their configurations tell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from amo_dist.operators.patterns import clean_name
from amo_dist.operators.views import Heads

_LATENT = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_LINEAR = (("head_k_dim", "head_v_dim"), ("key_head_dim", "value_head_dim"))
_SIZES = ("head_dim", "attention_head_size", "key_value_proj_dim")
_NUMBERS = (
    ("hidden_size", "num_attention_heads"),
    ("embed_dim", "num_heads"),
    ("n_embd", "n_head"),
    ("d_model", "n_heads"),
    ("dim", "n_heads"),
)
"""What a model is wide, and how many heads share that."""


def heads_by_name(
    parts: Sequence[nn.Module], names: Iterable[str], per_head: bool | int = True
) -> dict[str, Heads]:
    """The heads of the attention around each parameter.

    Args:
        parts: Of the model. The nearest module around a parameter which tells any does so for it,
            by itself or by its configuration.
        names: Cleaned, of its parameters; those of which nothing is known are left out.
        per_head: As for `amo_dist.param_groups`; an integer is the rows of every head.
    """
    if per_head is not True:
        return {name: Heads(per_head, per_head, per_head) for name in names} if per_head else {}
    told: dict[str, Heads] = {}
    for part in parts:
        for name, module in part.named_modules():
            if (heads := _told_by(module)) is not None:
                told.setdefault(clean_name(name), heads)
    found: dict[str, Heads] = {}
    for name in names:
        around = name
        while around and name not in found:
            around = around.rpartition(".")[0]
            if around in told:
                found[name] = told[around]
    return found


def _told_by(module: nn.Module) -> Heads | None:
    """What a module says itself, or else its configuration."""
    config = getattr(module, "config", None)
    values = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    return _read(vars(module)) or _read(values)


def _read(values: Mapping[str, Any]) -> Heads | None:
    def sizes(*fields: str) -> list[int] | None:
        found = [values.get(field) for field in fields]
        is_told = all(isinstance(each, int) and each > 0 for each in found)
        return found if is_told else None  # type: ignore[return-value]

    if latent := sizes(*_LATENT):
        content, rotary, value = latent
        return Heads(content + rotary, content, value, rotary)
    for pair in _LINEAR:
        if linear := sizes(*pair):
            return Heads(linear[0], linear[0], linear[1])
    for field in _SIZES:
        if one := sizes(field):
            return Heads(*one * 3)
    for fields in _NUMBERS:
        if (told := sizes(*fields)) and told[0] % told[1] == 0:
            return Heads(*[told[0] // told[1]] * 3)
    return None
