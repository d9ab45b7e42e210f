"""Which matrices heads are: `param_groups(model, per_head=...)`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from amo_dist import AMO, Fused, Muon
from tests import runs
from tests.operators import module_of, views_of

Q, K = "layers.0.attention.wq.weight", "layers.0.attention.wk.weight"
GROUPED = {Q: (12, 8), K: (6, 8), "layers.0.attention.wo.weight": (8, 12)}


def told(model: nn.Module, name: str = "layers.0.attention", **sizes: object) -> nn.Module:
    for field, size in sizes.items():
        setattr(model.get_submodule(name), field, size)
    return model


def counts(model: nn.Module, **options: Any) -> dict[str, int]:
    """Matrices of each parameter that is orthogonalized."""
    return {name: len(views) for name, views in views_of(model, **options).items()}


@pytest.mark.parametrize(
    "sizes",
    [
        {"head_dim": 3},
        {"num_heads": 4},
        {"config": SimpleNamespace(head_dim=None, hidden_size=12, num_attention_heads=4)},
        {"config": {"n_embd": 12, "n_head": 4}},
        # What the module says goes before what the configuration says.
        {"head_dim": 3, "config": SimpleNamespace(head_dim=6)},
    ],
)
def test_modules_and_configurations_tell_the_heads(sizes: dict[str, object]) -> None:
    found = counts(told(module_of(GROUPED), **sizes), per_head=True)
    assert found == {Q: 4, K: 2, "layers.0.attention.wo.weight": 1}


def test_the_nearest_module_tells() -> None:
    shapes = {**GROUPED, "layers.1.attention.wq.weight": (12, 8)}
    model = told(module_of(shapes), "layers.1.attention", head_dim=6)
    model.config = SimpleNamespace(head_dim=3)
    found = counts(model, per_head=True)
    assert (found[Q], found["layers.1.attention.wq.weight"]) == (4, 2)


def test_what_a_pattern_says_of_heads_holds() -> None:
    model = told(module_of({**GROUPED, "layers.0.attention.wv.weight": (6, 8)}), head_dim=3)
    # One head of keys, as given; queries of a name that nobody knows divide by their type.
    patterns = {r".*wk\.weight": Fused((("attn_k", 6),), heads={"attn_k": 1})}
    found = counts(model, patterns=patterns, per_head=True)
    assert (found[K], found[Q]) == (1, 4)
    model = told(module_of({"layers.0.mine": (12, 8)}), "layers.0", head_dim=3)
    patterns = {r".*mine": "attn_q"}
    assert counts(model, patterns=patterns, per_head=True) == {"layers.0.mine": 4}
    model = module_of({"layers.0.mine": (12, 8)})  # no module gives heads
    patterns = {r".*mine": Fused((("attn_q", 12),), heads={"attn_q": 6})}
    assert counts(model, patterns=patterns, per_head=True) == {"layers.0.mine": 6}


def test_unknown_matrices_stay_whole_beside_heads() -> None:
    model = told(module_of({**GROUPED, "layers.0.odd": (12, 16)}), head_dim=3)
    found = counts(model, unknown="matrix", per_head=True)
    assert (found[Q], found["layers.0.odd"]) == (4, 1)


# AMO observes, is on its way to the plan, and is locked.
@pytest.mark.parametrize(("cls", "step"), [(Muon, 2), (AMO, 3), (AMO, 5), (AMO, 7)])
@pytest.mark.parametrize("before", [False, True])
def test_a_run_may_change_per_head_between_checkpoints(
    cls: type[Muon], step: int, before: bool
) -> None:
    def make(per_head: bool) -> tuple[nn.Module, Muon]:
        shapes = {**GROUPED, "layers.0.attention.wv.weight": (6, 8)}
        return runs.make(kind=cls, shapes=shapes, groups={"per_head": 3 if per_head else False})

    model, optimizer = make(before)
    runs.train(model, optimizer, 1, step)
    twin, other = runs.resume(model, optimizer, lambda: make(not before))
    for running in ((model, optimizer), (twin, other)):
        runs.train(*running, step + 1, step + 1)
    assert optimizer.phase == other.phase
    for name, param in model.named_parameters():
        same = twin.get_parameter(name)
        # Momentum is that of the parameter, whatever matrices are in it.
        buffers = optimizer.state[param], other.state[same]
        assert torch.equal(*(own["momentum_buffer"] for own in buffers))
        # What has no heads, and by AMO's schedules, goes on to the bit.
        assert torch.equal(param, same) == name.endswith("wo.weight")
