"""A wrapped model of Hugging Face's transformers; `tests.test_recipes` trains plain ones."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from amo_dist import AMO, AMOConfig, param_groups
from tests import runs

pytestmark = pytest.mark.slow

# Grouped-query attention, and no width divides another.
SIZES = {
    "vocab_size": 64,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZES))


def losses(model: nn.Module, optimizer: AMO) -> list[float]:
    """Of seven steps on one batch, until after the lock."""
    batch: Tensor = torch.arange(64).view(4, 16)
    found = []
    for _ in range(7):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_compiled_and_checkpointed_models_keep_names_and_bits() -> None:
    plain, wrapped = make_model(), make_model()
    for index, layer in enumerate(wrapped.model.layers):
        wrapped.model.layers[index] = checkpoint_wrapper(layer)
    compiled = torch.compile(wrapped, backend="eager")
    raw = {name for name, _ in compiled.named_parameters()}
    assert all(name.startswith("_orig_mod.") for name in raw)
    assert any("_checkpoint_wrapped_module." in name for name in raw)
    groups, expected = param_groups(compiled), param_groups(plain)
    assert [[name for name, _ in g["params"]] for g in groups] == [
        [name for name, _ in g["params"]] for g in expected
    ]
    assert [g.get("matrix_views") for g in groups] == [g.get("matrix_views") for g in expected]
    # Recomputed activations are the same numbers; so are gradients and all that follows.
    config = AMOConfig(**runs.PHASES)
    assert losses(wrapped, AMO(groups, lr=1e-2, config=config)) == losses(
        plain, AMO(expected, lr=1e-2, config=config)
    )
