"""QK-clip on one process: what it does to the logits of real attentions, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest

from amo_dist import Fused, qk_clip_
from tests.examples import blocks
from tests.unit.test_modules import Conv1D, within

HEADS, SIZE, DIM = 4, 3, 12
# Relative to the largest logit: factors are float32, and weights here float64.
NEAR = 1e-5


class Attention(nn.Module):
    """Queries and keys by one of the ways in which models keep them, with biases."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.head_dim = kind, SIZE
        if kind == "apart":
            self.q_proj, self.k_proj = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        elif kind == "columns":
            self.c_attn = Conv1D(3 * DIM, DIM)
            self.c_attn.bias = nn.Parameter(torch.randn(3 * DIM))
        else:
            self.query_key_value = nn.Linear(DIM, 3 * DIM)

    def logits(self, x: Tensor) -> Tensor:
        """Of each head, ``(heads, tokens, tokens)``."""
        if self.kind == "apart":
            q, k = self.q_proj(x), self.k_proj(x)
        elif self.kind == "columns":
            q, k, _ = (x @ self.c_attn.weight + self.c_attn.bias).chunk(3, dim=-1)
        else:
            q, k, _ = self.query_key_value(x).view(len(x), HEADS, 3, SIZE).unbind(2)
        q, k = (part.reshape(len(x), HEADS, SIZE).transpose(0, 1) for part in (q, k))
        return q @ k.transpose(1, 2)


def model_of(kind: str) -> tuple[nn.Module, Attention]:
    torch.manual_seed(0)
    attention = Attention(kind)
    return within("layers.0.attn", attention), attention


@pytest.mark.parametrize("kind", ["apart", "columns", "in turn"])
@torch.no_grad()
def test_logits_of_heads_above_the_threshold_fall_to_it(kind: str) -> None:
    model, attention = model_of(kind)
    model.double()
    x = torch.randn(16, DIM, dtype=torch.float64)
    before = attention.logits(x)
    greatest = before.amax(dim=(1, 2))
    threshold = greatest.median().item()
    one = (("attn_q", DIM), ("attn_k", DIM), ("attn_v", DIM))
    patterns = {r".*query_key_value\.weight": Fused(one, groups=HEADS)}
    given = patterns if kind == "in turn" else None
    (gamma,) = qk_clip_(model, {"layers.0.attn": greatest}, threshold, patterns=given).values()
    assert (gamma < 1).sum() >= 1
    after = attention.logits(x)
    near = NEAR * before.abs().max().item()
    torch.testing.assert_close(after, before * gamma.view(-1, 1, 1), rtol=0, atol=near)
    torch.testing.assert_close(
        after.amax(dim=(1, 2)), greatest.clamp(max=threshold), rtol=0, atol=near
    )


def test_bfloat16_weights_are_rounded_once() -> None:
    model, attention = model_of("apart")
    model.bfloat16()
    before = attention.q_proj.weight.detach().float().clone()
    qk_clip_(model, {"layers.0.attn": torch.full((HEADS,), 70.0)}, 30.0)
    root = (torch.tensor(30.0) / 70.0).sqrt()
    assert torch.equal(attention.q_proj.weight.detach(), (before * root).bfloat16())


@pytest.mark.parametrize(
    ("change", "name", "num_heads", "threshold", "field"),
    [
        ({"k_norm": nn.LayerNorm(SIZE)}, "layers.0.attn", HEADS, 1.0, "k_norm"),
        ({"head_dim": None}, "layers.0.attn", HEADS, 1.0, "heads"),
        ({}, "layers.0.attention", HEADS, 1.0, "max_logits"),
        ({}, "layers.0.attn", 2, 1.0, "one logit per head"),
        ({}, "layers.0.attn", HEADS, 0.0, "threshold"),
    ],
)
def test_errors_name_the_argument(
    change: dict[str, Any], name: str, num_heads: int, threshold: float, field: str
) -> None:
    model, attention = model_of("apart")
    for key, value in change.items():
        setattr(attention, key, value)
    with pytest.raises(ValueError, match=field):
        qk_clip_(model, {name: torch.zeros(num_heads)}, threshold)


def attention_with_maxima(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> tuple[Tensor, AuxOutput]:
    """What flex_attention does on CUDA and refuses on a CPU."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    assert how == {"return_aux": AuxRequest(max_scores=True)}
    return scores.softmax(-1) @ v, AuxOutput(max_scores=scores.amax(-1))


@pytest.mark.filterwarnings("ignore:TensorFloat32")  # of torch.compile, on GPUs that have it
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_the_recipe_of_the_page_finds_the_greatest_logits(device: str) -> None:
    (recipe,) = [text for text in blocks(["docs/optimizers.md"]) if "qk_clip_" in text]
    names: dict[str, Any] = {}
    exec(recipe, names)
    if device == "cpu":
        names["flex_attention"] = attention_with_maxima
    else:
        names["flex_attention"] = torch.compile(names["flex_attention"])
    torch.manual_seed(0)
    dim = DIM if device == "cpu" else 16 * HEADS  # flex_attention compiles no narrower head
    attention = names["Attention"](dim, HEADS).to(device)
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"attention": attention})])})
    x = torch.randn(3, 5, dim, device=device)
    with torch.no_grad():
        attention.wq.weight.mul_(500)
    attention(x[:1])
    attention(x[1:])
    q, k = (
        f(x).view(3, 5, HEADS, -1).transpose(1, 2).detach() for f in (attention.wq, attention.wk)
    )
    greatest = (q @ k.mT / math.sqrt(dim // HEADS)).amax(dim=(0, 2, 3))
    bound = {} if device == "cpu" else {"rtol": 2e-3, "atol": 0.0}  # TF32 has ten bits
    torch.testing.assert_close(attention.max_logits, greatest, **bound)
    (gamma,) = names["clip"](model).values()
    torch.testing.assert_close(gamma, (100 / greatest).clamp(max=1.0), **bound)
    assert (gamma < 1).any()
    assert attention.max_logits.isneginf().all()
