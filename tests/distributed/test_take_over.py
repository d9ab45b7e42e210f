"""`take_over` of docs/checkpoints.md: the state of other optimizers by name, on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from amo_dist import Muon, MuonConfig, param_groups
from tests.distributed import models
from tests.distributed.harness import Ranks
from tests.examples import examples

# torch.optim.Muon takes no matrix of fewer rows than ranks.
SHAPES = models.shapes(models.EVEN_SHAPES)
STEPS = 3


def recipe() -> Any:
    """The function as printed."""
    _, text = examples(["docs/checkpoints.md"])["take_over.py"]
    names: dict[str, Any] = {}
    exec(text[: text.index("model = ")], names)
    return names["take_over"]


def foreign(model: torch.nn.Module, origin: str) -> dict[str, Any]:
    """State of other optimizers after some steps."""
    matrices, rest = (group["params"] for group in param_groups(model))
    adamw = torch.optim.AdamW(rest, lr=0.0, betas=(0.9, 0.95))
    optimizers = [adamw, torch.optim.Muon(matrices, lr=0.0, momentum=0.9)]
    if origin == "AdamW":
        optimizers = [torch.optim.AdamW([*matrices, *rest], lr=0.0, betas=(0.9, 0.95))]
    for step in range(1, STEPS + 1):
        models.set_gradients(model, 0, 1 if origin == "AdamW" else step)
        for optimizer in optimizers:
            optimizer.step()
    found: dict[str, Any] = get_optimizer_state_dict(model, optimizers)
    if origin == "Dion":  # its names; a sum, where torch.optim.Muon keeps a mean of weight 0.1
        for group in found["param_groups"]:
            group["step"] = STEPS
        for name, state in found["state"].items():
            mean = state.pop("momentum_buffer", None)
            renamed = {"momentum": state.get("exp_avg") if mean is None else 10 * mean}
            if mean is None:
                renamed["variance"] = state["exp_avg_sq"]
            found["state"][name] = renamed
    return found


def differences(rank: int, world_size: int, origin: str, bfloat16_params: str) -> list[str]:
    """Names whose state is not that of a run from the start with this package."""
    dtype = torch.bfloat16 if bfloat16_params == "master" else torch.float32
    config = MuonConfig(momentum=0.9, bfloat16_params=bfloat16_params)
    model, twin = (models.make_model("fsdp", SHAPES).to(dtype) for _ in range(2))
    new, expected = (
        Muon(param_groups(each), lr=0.0, betas=(0.9, 0.95), config=config) for each in (model, twin)
    )
    for step in range(1, STEPS + 1):
        models.set_gradients(twin, 0, 1 if origin == "AdamW" else step)
        expected.step()
    recipe()(new, foreign(model, origin))
    # PyTorch keeps bfloat16 moments of bfloat16 parameters.
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-5
    wrong = []
    for name, param in new.params_by_name.items():
        for key, value in expected.state[expected.params_by_name[name]].items():
            if origin == "AdamW" and key == "momentum_buffer":
                # AdamW's mean of one gradient is that gradient, and the sum of all its powers.
                value = 10 * twin.get_parameter(name).grad.float()  # type: ignore[union-attr]
            pair = models.whole(new.state[param][key]), models.whole(value)
            if not torch.allclose(*pair, rtol=tolerance, atol=tolerance * pair[1].abs().max()):
                wrong.append(f"{name}.{key}")
    models.set_gradients(model, 0, STEPS + 1)
    new.step()
    return wrong


@pytest.mark.parametrize("bfloat16_params", ["nearest", "master"])
@pytest.mark.parametrize("origin", ["torch", "Dion", "AdamW"])
def test_state_is_taken_over_by_name(run_on: Ranks, origin: str, bfloat16_params: str) -> None:
    assert run_on(2)(differences, origin, bfloat16_params) == [[], []]
