"""Compiled models, and models whose activations are computed again."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from amo_dist import AMO, AMOConfig, param_groups
from tests import runs


def make_model() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(24, 4, 40, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def losses(model: nn.Module, optimizer: AMO) -> list[float]:
    """Of seven steps on one batch, until after the lock."""
    batch, found = torch.ones(2, 5, 24), []
    for _ in range(7):
        loss = (model(batch) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_compiled_and_checkpointed_models_keep_names_and_bits() -> None:
    plain, wrapped = make_model(), make_model()
    for index, layer in enumerate(wrapped.layers):
        wrapped.layers[index] = checkpoint_wrapper(layer)
    groups, expected = param_groups(torch.compile(wrapped, backend="eager")), param_groups(plain)
    for own, others in zip(groups, expected, strict=True):
        assert [name for name, _ in own["params"]] == [name for name, _ in others["params"]]
        assert own.get("matrix_views") == others.get("matrix_views")
    config = AMOConfig(**runs.PHASES)
    assert losses(wrapped, AMO(groups, lr=1e-2, config=config)) == losses(
        plain, AMO(expected, lr=1e-2, config=config)
    )
