"""What PyTorch's own tests ask of any optimizer, asked of this family."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amo_dist import AMO, ROOT, AdaMuon, AMOConfig, Muon, NorMuon, param_groups
from amo_dist.engine.ballot import NonFiniteGradientError
from tests import runs
from tests.distributed import models
from tests.runs import WQ


def pickled(both: Any) -> Any:
    return pickle.loads(pickle.dumps(both))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("steps", [3, 8])  # AMO observes, and is locked
@pytest.mark.parametrize("kind", [AMO, Muon, AdaMuon, NorMuon, ROOT])
def test_a_copy_goes_on_as_the_original(
    kind: type[Muon], steps: int, copied: Callable[[Any], Any]
) -> None:
    model, optimizer = runs.make("plain", kind)
    before = runs.train(model, optimizer, 1, steps)
    twin, other = copied((model, optimizer))
    after = runs.train(twin, other, steps + 1, 10)
    assert runs.equal(runs.weights(model), before)
    assert runs.equal(runs.train(model, optimizer, steps + 1, 10), after)
    assert (other.num_steps_taken, other.phase) == (10, optimizer.phase)
    assert other.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


def test_a_copy_alone_has_parameters_of_its_own() -> None:
    model, optimizer = runs.make("plain", Muon)
    before, other = runs.train(model, optimizer, 1, 2), copy.deepcopy(optimizer)
    for param in other.params_by_name.values():
        param.grad = torch.ones_like(param)
    other.step()
    assert runs.equal(runs.weights(model), before)
    assert not torch.equal(other.params_by_name[WQ], model.get_parameter(WQ))


def test_a_scaler_leaves_out_a_step_with_an_infinite_gradient() -> None:
    model, optimizer = runs.make("plain", Muon)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    models.set_gradients(model, 1, 1)
    model.get_parameter(WQ).grad[0, 0] = torch.inf  # type: ignore[index]
    before = runs.weights(model)
    scaler.step(optimizer)
    assert runs.equal(runs.weights(model), before)
    assert optimizer.num_steps_taken == 0


def test_parameters_of_several_dtypes() -> None:
    model = models.plain_model(runs.SHAPES)
    for name, param in model.named_parameters():
        if "norm" in name or "w1" in name:
            param.data = param.data.bfloat16()
    before = runs.weights(model)
    after = runs.train(model, Muon(param_groups(model), lr=1e-1), 1, 2)
    for name, old in before.items():
        assert after[name].dtype == old.dtype
        assert not torch.equal(after[name], old)


# Both warnings are PyTorch's: of a loss that was not in the graph before the break, and of slow
# guards on Python 3.13.0.
@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_training_step(backend: str) -> None:
    def run(wrap: Callable[[Any], Any]) -> tuple[dict[str, Tensor], list[float]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        groups = param_groups(model, patterns={r"\d\.weight": "mlp_up"})
        optimizer = AMO(groups, lr=1e-2, config=AMOConfig(**runs.PHASES))

        def step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = wrap(step)
        losses = [step(torch.ones(4, 8)).item() for _ in range(9)]
        return runs.weights(model), losses

    weights, losses = run(lambda step: step)
    others, other_losses = run(lambda step: torch.compile(step, backend=backend))
    torch._dynamo.reset()
    # Both backends run PyTorch's own kernels, in the same order.
    assert losses == other_losses
    assert runs.equal(weights, others)


def test_printing_shows_hyperparameters_and_no_control_text() -> None:
    text = repr(runs.make("plain", AMO)[1])
    assert text.startswith("AMO (\nParameter Group 0\n    algorithm: muon\n    betas: (0.9, 0.95)")
    assert "control" not in text


def test_a_hook_may_put_a_number_into_the_state() -> None:
    """PyTorch's own test of hooks before ``state_dict`` does so."""
    model, optimizer = runs.make("plain", Muon)
    optimizer.register_state_dict_pre_hook(lambda own: own.state.update(test=1))
    assert optimizer.state_dict()["state"]["test"] == 1
    runs.train(model, optimizer, 1, 1)


def test_complex_parameters_are_trained_by_adamw_as_pytorch_does() -> None:
    """Beside matrices; a NaN in an imaginary part is an error, too."""
    torch.manual_seed(0)
    model = torch.nn.Module()
    model.up_proj = torch.nn.Linear(8, 16, bias=False)
    model.phases = torch.nn.Parameter(torch.randn(16, 3, dtype=torch.complex64))
    twin = torch.nn.Parameter(model.phases.detach().clone())
    options = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.95)}
    groups = param_groups(model, patterns={r"up_proj\.weight": "mlp_up"})
    optimizer = Muon(groups, **options)
    expected = torch.optim.AdamW([twin], foreach=True, **options)
    for _ in range(3):
        model.up_proj.weight.grad = torch.randn_like(model.up_proj.weight)
        model.phases.grad = twin.grad = torch.randn_like(twin)
        optimizer.step()
        expected.step()
        assert torch.equal(model.phases, twin)
    model.phases.grad = torch.full_like(twin, complex(0.0, float("nan")))
    with pytest.raises(NonFiniteGradientError, match="phases"):
        optimizer.step()
    assert torch.equal(model.phases, twin)
