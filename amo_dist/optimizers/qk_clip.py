"""QK-clip: scales queries and keys of heads whose attention logits grew too large.

Source: Kimi Team, "Kimi K2: Open Agentic Intelligence" (2025), arXiv:2507.20534, MuonClip.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from amo_dist.config import require
from amo_dist.distributed.layout import layout_of, local_tensor
from amo_dist.distributed.ranks import GroupLike, this_rank
from amo_dist.operators.groups import decide
from amo_dist.operators.parts import by_head, heads_of
from amo_dist.operators.patterns import Patterns, check_patterns, clean_name
from amo_dist.operators.tree import Place, read_tree
from amo_dist.operators.views import Fused

_QUERIES, _KEYS = ("attn_q", "mla_q_b"), ("attn_k", "mla_k_b")
# Norms of keys; `kv_norm` and `kv_a_layernorm` normalize a latent before its weights.
_KEY_NORM = re.compile(r"(k|key)_?(layer)?_?norm|norm_k(ey)?")


@dataclasses.dataclass(frozen=True, slots=True)
class _Attention:
    """Weights and biases of one attention's queries and keys, each with its parts.

    Attributes:
        rotary: Rows at the end of each query head that rotate with the position; see `Heads`.
    """

    name: str
    held: Sequence[tuple[nn.Parameter, Fused]]
    rotary: int
    num_queries: int
    num_keys: int


@torch.no_grad()
def qk_clip_(
    model: nn.Module | Sequence[nn.Module],
    max_logits: Mapping[str, Tensor],
    threshold: float = 100.0,
    *,
    patterns: Patterns | None = None,
    per_head: bool | int = True,
    process_group: GroupLike = None,
) -> dict[str, Tensor]:
    """Scale weights of queries and keys of each head whose greatest logit exceeds a threshold.

    Call it after ``optimizer.step()`` on all ranks that share the weights. It takes one small
    maximum over the ranks of each mesh and changes the weights in place, on any layout. For a head
    with ``gamma = threshold / max_logit`` below 1:

    - as many key heads as query heads: both are multiplied by ``sqrt(gamma)``;
    - grouped queries: the queries are multiplied by ``gamma``. The keys stay, because other heads
      share them, as in the report for the shared keys of latent attention;
    - latent attention: content rows of queries and keys are multiplied by ``sqrt(gamma)``, rotary
      rows of the queries by ``gamma``. Rotary keys stay, because all heads share them.

    Biases are scaled with their weights. Momentum stays. Under ``bfloat16_params="master"`` the
    rounding residual stays too, at most half the spacing of an entry.

    Args:
        model: Module, wrapped or sharded in place or not, or several (pipeline stages).
        max_logits: Greatest logit of each query head since the last step, ``(num_heads,)``, by
            name of the attention module: of ``q @ k * scale``, before the softmax, on this rank.
            Use ``-inf`` for heads that other ranks compute. Attentions without an entry stay, and
            a logit that is not finite clips nothing.
        threshold: ``tau``, a finite number > 0.
        patterns: Argument of `amo_dist.param_groups`.
        per_head: ``True`` reads the rows of a head from the model; an integer is that number.
        process_group: Ranks whose plain tensors are replicas, as under DDP. DTensors need none.

    Returns:
        ``gamma`` of each head by the names of ``max_logits``, float32, on the weights' device.

    Raises:
        ValueError: A name has no queries and keys with known heads, logits have another number of
            heads, or keys are normalized after their weights, so that scaling has no effect.
    """
    is_valid = isinstance(threshold, (int, float)) and 0 < threshold < math.inf
    require(is_valid, "threshold", repr(threshold), "a finite number > 0")
    parts = [model] if isinstance(model, nn.Module) else model
    logits = {clean_name(name): values for name, values in max_logits.items()}
    modules = {clean_name(name): module for part in parts for name, module in part.named_modules()}
    places = {place.name: place for place in read_tree(model)}
    decide([*places.values()], check_patterns(patterns))
    attentions = [
        _attention(name, modules.get(name, nn.Module()), places, per_head) for name in logits
    ]
    greatest_by_name = _greatest(attentions, logits, process_group)
    gammas: dict[str, Tensor] = {}
    for name, attention in zip(max_logits, attentions, strict=True):
        greatest = greatest_by_name[attention.name]
        is_clipped = torch.isfinite(greatest) & (greatest > threshold)
        gammas[name] = gamma = torch.where(is_clipped, threshold / greatest, 1.0)
        _scale(attention, gamma)
    return gammas


def _attention(
    name: str, module: nn.Module, places: Mapping[str, Place], per_head: bool | int
) -> _Attention:
    """Find the queries and keys of an attention; an empty module has none, which is an error."""
    for child, _ in module.named_modules():
        norm = f"{child}, which cancels any scale of the weights before it"
        is_fine = _KEY_NORM.fullmatch(clean_name(child)) is None
        require(is_fine, name, norm, "an attention without a norm of its keys")
    params = {clean_name(f"{name}.{field}"): p for field, p in module.named_parameters()}
    held: list[tuple[nn.Parameter, Fused]] = []
    counts: Counter[str] = Counter()
    rotary = 0
    for param in params:
        place = places[param]
        if place.target is None:
            continue
        target = by_head(place, per_head)
        if per_head is True and heads_of(place).query:
            rotary = heads_of(place).query - heads_of(place).key
        if not isinstance(target, Fused) or not {*_QUERIES, *_KEYS} & target.heads.keys():
            continue
        counts.update(target.heads)
        held.append((params[param], target))
        bias = re.sub("weight$", "bias", param)
        if bias != param and bias in params:
            held.append((params[bias], dataclasses.replace(target, dim=0)))
    queries, keys = (sum(counts[kind] for kind in kinds) for kinds in (_QUERIES, _KEYS))
    counted = f"{queries} heads of queries and {keys} of keys below it"
    expected = "an attention's name, and heads that the model or per_head gives"
    is_attention = 0 < keys <= queries and queries % keys == 0
    require(is_attention, f"max_logits[{name!r}]", counted, expected)
    return _Attention(name, held, rotary, queries, keys)


def _greatest(
    attentions: Sequence[_Attention], logits: Mapping[str, Tensor], process_group: GroupLike
) -> dict[str, Tensor]:
    """Take the greatest logits over all ranks that share the weights; float32, on their device."""
    own: dict[str, Tensor] = {}
    names_by_sharing: dict[Any, list[str]] = defaultdict(list)
    for attention in attentions:
        name, param = attention.name, attention.held[0][0]
        values = logits[name].detach().to(param.device, torch.float32)
        shape, expected = tuple(values.shape), f"({attention.num_queries},), one logit per head"
        require(shape == (attention.num_queries,), f"max_logits[{name!r}]", shape, expected)
        own[name] = values.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
        sharing = param.device_mesh if isinstance(param, DTensor) else process_group
        if sharing is not None:
            names_by_sharing[sharing].append(name)
    # Sorted, because ranks whose dictionaries differ in order would cross their collectives.
    for sharing, names in sorted(names_by_sharing.items(), key=lambda item: min(item[1])):
        groups = [sharing]
        if isinstance(sharing, DeviceMesh):
            groups = [sharing.get_group(axis) for axis in range(sharing.ndim)]
        names.sort()
        together = torch.cat([own[name] for name in names])
        for group in groups:
            dist.all_reduce(together, op=dist.ReduceOp.MAX, group=group)
        pieces = together.split([own[name].numel() for name in names])
        own |= dict(zip(names, pieces, strict=True))
    return own


def _scale(attention: _Attention, gamma: Tensor) -> None:
    """Multiply the rows of each head by their factors."""
    root, is_grouped = gamma.sqrt(), attention.num_keys < attention.num_queries
    factor_by_kind = dict.fromkeys(_QUERIES, gamma if is_grouped else root)
    if not is_grouped:
        factor_by_kind |= dict.fromkeys(_KEYS, root)

    def factors_of(kind: str, fused: Fused, size: int) -> Tensor:
        """Factors of the rows of a part."""
        if kind not in factor_by_kind or kind not in fused.heads:
            return gamma.new_ones(size)
        rows = factor_by_kind[kind].unsqueeze(1).repeat(1, size // fused.heads[kind])
        if attention.rotary and kind in _QUERIES:
            rows[:, -attention.rotary :] = gamma.unsqueeze(1)
        return rows.flatten()

    for param, fused in attention.held:
        # The order of storage: each group has its share of every part.
        shares = [
            factors_of(kind, fused, size).view(fused.groups, -1) for kind, size in fused.parts
        ]
        factors = torch.cat(shares, dim=1).flatten()
        local, dim = local_tensor(param), fused.dim
        intervals = layout_of(param, attention.name, [this_rank()]).intervals_by_rank[this_rank()]
        local_factors = [factors[low:high] for low, high in intervals[dim]]
        if local.numel():
            shape = [1] * local.dim()
            shape[dim] = -1
            local.copy_(local * torch.cat(local_factors).view(shape))
