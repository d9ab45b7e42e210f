"""QK-clip: after a step, the queries and keys of heads whose attention logits grew too large.

Source: Kimi Team, "Kimi K2: Open Agentic Intelligence" (2025), arXiv:2507.20534, MuonClip.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from amo_dist.distributed.groups import Given, this_rank
from amo_dist.distributed.layout import layout_of, local_tensor
from amo_dist.operators.groups import named_parameters
from amo_dist.operators.heads import heads_by_name
from amo_dist.operators.patterns import Patterns, check_patterns, clean_name, find_target
from amo_dist.operators.views import Fused, Heads, by_head, require

_QUERIES, _KEYS = ("attn_q", "mla_q_b"), ("attn_k", "mla_k_b")
# A norm of the keys themselves; `kv_norm` and `kv_a_layernorm` are of a latent, before its weights.
_KEY_NORM = re.compile(r"(k|key)_?(layer)?_?norm|norm_k(ey)?")


@dataclasses.dataclass(frozen=True, slots=True)
class _Attention:
    """One attention: its weights and biases of queries and keys, each with what it holds."""

    name: str
    held: Sequence[tuple[nn.Parameter, Fused]]
    rotary: int
    """Rows at the end of each query head that turn with the position; see `Heads`."""
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
    process_group: Given = None,
) -> dict[str, Tensor]:
    """Scale weights of queries and keys of each head whose greatest logit exceeds a threshold.

    To be called after ``optimizer.step()``, on all ranks that share the weights: one small
    maximum over them for each mesh. Weights change in place, on any layout, and nothing else is
    sent. With ``gamma = threshold / max_logit`` of a head where that is below 1:

    - as many heads of keys as of queries: both are multiplied by ``sqrt(gamma)``;
    - grouped queries: the queries by ``gamma``. The keys stay, as other heads share them; so
      does the report with the keys that latent attention shares;
    - latent attention: content of queries and keys by ``sqrt(gamma)``, what turns with the
      position by ``gamma`` in the queries, and not at all in the keys, which all heads share.

    Biases go with their weights. Momentum stays. Under ``bfloat16_params="master"`` what rounding
    took off stays too, at most half the spacing of an entry.

    Args:
        model: A module, wrapped or sharded in place or not, or the parts of one.
        max_logits: Name of an attention module -> greatest logit of each of its query heads since
            the last step, ``(num_heads,)``: of ``q @ k * scale``, before the softmax. What this
            rank saw; ``-inf`` for heads that other ranks compute. Attentions that are not named
            stay; a logit that is not finite clips nothing.
        threshold: ``tau``.
        patterns: As for `amo_dist.param_groups`.
        per_head: ``True`` reads the rows of a head from the model, an integer is that number.
        process_group: Ranks that hold plain tensors as replicas, as under DDP; for DTensors their
            mesh is known.

    Returns:
        ``gamma`` of each head by the names of ``max_logits``, float32, on the weights' device.

    Raises:
        ValueError: A name without queries and keys of known heads, logits of another number of
            heads, or keys that are normalized after their weights, which then scale nothing.
    """
    is_valid = isinstance(threshold, (int, float)) and 0 < threshold < math.inf
    require(is_valid, "threshold", repr(threshold), "a finite number > 0")
    parts = [model] if isinstance(model, nn.Module) else model
    logits = {clean_name(name): each for name, each in max_logits.items()}
    attentions = _attentions(parts, logits, check_patterns(patterns), per_head)
    found = _greatest(attentions, logits, process_group)
    gammas: dict[str, Tensor] = {}
    for name, attention in zip(max_logits, attentions, strict=True):
        greatest = found[attention.name]
        is_clipped = torch.isfinite(greatest) & (greatest > threshold)
        gammas[name] = gamma = torch.where(is_clipped, threshold / greatest, 1.0)
        _scale(attention, gamma)
    return gammas


def _attentions(
    parts: Sequence[nn.Module],
    logits: Mapping[str, Tensor],
    patterns: Patterns,
    per_head: bool | int,
) -> list[_Attention]:
    """Those that logits are known of, in their order."""
    params = {name: each for each, name in named_parameters(parts).items()}
    below: dict[str, list[str]] = defaultdict(list)
    for name in params:
        around = name
        while around := around.rpartition(".")[0]:
            if around in logits:
                below[around].append(name)
    for part in parts:
        for name, _ in part.named_modules():
            around, _, last = clean_name(name).rpartition(".")
            is_normed = around in logits and _KEY_NORM.fullmatch(last)
            found = f"{last}, which undoes what is done to the weights before it"
            require(not is_normed, around, found, "an attention without a norm of its keys")
    known = heads_by_name(parts, params, per_head)
    return [_attention(name, below[name], params, patterns, known) for name in logits]


def _attention(
    name: str,
    below: Sequence[str],
    params: Mapping[str, nn.Parameter],
    patterns: Patterns,
    known: Mapping[str, Heads],
) -> _Attention:
    shapes = {each: tuple(params[each].shape) for each in below}
    held: list[tuple[nn.Parameter, Fused]] = []
    counts: Counter[str] = Counter()
    rotary = 0
    for each, shape in shapes.items():
        found = find_target(each, shape, patterns, shapes, flatten_conv=False)
        if found is None or found[0] is None:
            continue
        target = found[0]
        if each in known:
            target, rotary = by_head(each, shape, target, known[each]), known[each].rotary
        if not isinstance(target, Fused) or not {*_QUERIES, *_KEYS} & target.heads.keys():
            continue
        counts.update(target.heads)
        held.append((params[each], target))
        bias = re.sub("weight$", "bias", each)
        if bias != each and bias in shapes:
            held.append((params[bias], dataclasses.replace(target, dim=0)))
    queries, keys = (sum(counts[kind] for kind in kinds) for kinds in (_QUERIES, _KEYS))
    told = f"{queries} heads of queries and {keys} of keys below it"
    expected = "an attention's name, and a model or per_head that tells its heads"
    is_one = 0 < keys <= queries and queries % keys == 0
    require(is_one, f"max_logits[{name!r}]", told, expected)
    return _Attention(name, held, rotary, queries, keys)


def _greatest(
    attentions: Sequence[_Attention], logits: Mapping[str, Tensor], process_group: Given
) -> dict[str, Tensor]:
    """The greatest logits over all ranks that share the weights; float32, on their device."""
    own: dict[str, Tensor] = {}
    by_mesh: dict[DeviceMesh | None, list[str]] = defaultdict(list)
    for attention in attentions:
        name, param = attention.name, attention.held[0][0]
        told = logits[name].detach().to(param.device, torch.float32)
        found, expected = tuple(told.shape), f"({attention.num_queries},), one logit a head"
        require(found == (attention.num_queries,), f"max_logits[{name!r}]", found, expected)
        own[name] = told.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
        by_mesh[param.device_mesh if isinstance(param, DTensor) else None].append(name)
    for mesh, names in by_mesh.items():
        sharing = process_group if mesh is None else mesh
        if sharing is None:
            continue
        if isinstance(sharing, DeviceMesh):
            groups = [sharing.get_group(axis) for axis in range(sharing.ndim)]
        else:
            groups = [sharing]
        # In an order that is alike on all ranks, whatever that of their dictionaries.
        names.sort()
        together = torch.cat([own[name] for name in names])
        for group in groups:
            dist.all_reduce(together, op=dist.ReduceOp.MAX, group=group)
        pieces = together.split([own[name].numel() for name in names])
        own |= dict(zip(names, pieces, strict=True))
    return own


def _scale(attention: _Attention, gamma: Tensor) -> None:
    """Multiply the rows of each head by what is due to them."""
    root, is_grouped = gamma.sqrt(), attention.num_keys < attention.num_queries

    def due(kind: str, fused: Fused, size: int) -> Tensor:
        """A factor for each row of a part."""
        number = fused.heads.get(kind, 0)
        if not number or kind not in (*_QUERIES, *_KEYS) or (is_grouped and kind in _KEYS):
            return gamma.new_ones(size)
        rows = size // number
        own = gamma if is_grouped else root
        if not attention.rotary or kind in _KEYS:
            return own.unsqueeze(1).expand(-1, rows).flatten()
        content = root.unsqueeze(1).expand(-1, rows - attention.rotary)
        turning = gamma.unsqueeze(1).expand(-1, attention.rotary)
        return torch.cat([content, turning], dim=1).flatten()

    for param, fused in attention.held:
        # In the order of storage: of each group its share of every part.
        shares = [due(kind, fused, size).view(fused.groups, -1) for kind, size in fused.parts]
        factors = torch.cat(shares, dim=1).flatten()
        local, dim = local_tensor(param), fused.dim
        intervals = layout_of(param, attention.name, [this_rank()]).intervals_by_rank[this_rank()]
        here = [factors[low:high] for low, high in intervals[dim]]
        if local.numel():
            shape = [1] * local.dim()
            shape[dim] = -1
            local.copy_(local * torch.cat(here).view(shape))
