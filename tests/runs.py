"""Short training runs for tests: make, train, resume, and read the result.

One module in place of a ``make``, ``build`` or ``train`` in each test file. Gradients are those of
`tests.distributed.models`, a function of (seed, step, name), so that bits can be compared between
layouts. `tests.faults` kills such runs; `tests.integration.titan_ranks` trains, kills and reads
runs of torchtitan. ::

    model, optimizer = runs.make("fsdp", observe_until=4)
    runs.train(model, optimizer, 1, 5)
    twin, other = runs.resume(model, optimizer, lambda: runs.make("fsdp", observe_until=4))
    runs.train(model, optimizer, 6, 9)
    runs.train(twin, other, 6, 9)
    assert runs.same(model, twin)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from amo_dist import AMO, AMOConfig, Muon, MuonConfig, param_groups
from tests.distributed import models

WQ, W1 = "layers.0.attention.wq.weight", "layers.0.feed_forward.w1.weight"
NORM = "layers.0.attention_norm.weight"
SHAPES: dict[str, tuple[int, ...]] = {
    "tok_embeddings.weight": (5, 8),
    WQ: (12, 8),
    "layers.1.attention.wq.weight": (12, 8),
    W1: (13, 8),
    NORM: (8,),
}
PHASES: dict[str, Any] = {
    "observe_until": 4,
    "observe_every": 2,
    "sample_size": 2,
    "transition_steps": 3,
}
"""Fields of AMO: it observes until step 4, and is locked from step 7 on."""


def make(
    layout: str = "plain",
    kind: type[Muon] = AMO,
    *,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    groups: Mapping[str, Any] | None = None,
    **fields: Any,
) -> tuple[nn.Module, Any]:
    """A model over the running world, and its optimizer before the first step.

    Args:
        layout: One of `models.make_model`. ``plain`` ranks form the group of all.
        kind: Optimizer class.
        shapes: Shapes of the parameters by name.
        dtype: Type of the parameters.
        device: Device of the parameters; ``cuda`` inside `tests.simulated_device`.
        groups: Arguments of `param_groups`.
        **fields: Fields of the config; of AMO after `PHASES`.
    """
    model = models.make_model(layout, shapes, device).to(dtype)
    group = dist.group.WORLD if layout == "plain" and dist.is_initialized() else None
    config = AMOConfig(**{**PHASES, **fields}) if kind is AMO else MuonConfig(**fields)
    params = param_groups(model, **(groups or {}))
    return model, kind(params, lr=1e-2, config=config, process_group=group)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    first: int = 1,
    last: int = 3,
    *,
    seed: int = 1,
    missing: frozenset[str] = frozenset(),
) -> dict[str, Tensor]:
    """Steps from ``first`` to ``last``; returns `weights`.

    Frozen parameters, and those named in ``missing``, get no gradient.
    """
    missing |= {name for name, param in model.named_parameters() if not param.requires_grad}
    for step in range(first, last + 1):
        models.set_gradients(model, seed, step, missing=missing)
        optimizer.step()
    return weights(model)


def resume(
    model: nn.Module, optimizer: Muon, make_again: Callable[[], tuple[nn.Module, Any]]
) -> tuple[nn.Module, Any]:
    """A new model and optimizer that go on from a copy of the state of others."""
    twin, other = make_again()
    twin.load_state_dict(copy.deepcopy(model.state_dict()))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return twin, other


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the whole parameters, on every rank."""
    return {name: models.whole(param) for name, param in model.named_parameters()}


def everything(model: nn.Module, optimizer: Muon) -> list[Tensor]:
    """Copies of the whole parameters and of all state, in one order."""
    state = [value for values in optimizer.state.values() for value in values.values()]
    return [models.whole(tensor) for tensor in [*model.parameters(), *state]]


def equal(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    """Whether two runs ended on the same bits."""
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def same(one: nn.Module, other: nn.Module) -> bool:
    """Whether two models hold the same bits."""
    return equal(weights(one), weights(other))
