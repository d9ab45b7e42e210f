"""What PyTorch's own tests ask of any optimizer, asked of this family."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import SWALR

from amo_dist import AMO, ROOT, AdaMuon, AMOConfig, Muon, NorMuon, param_groups
from amo_dist.engine.ballot import NonFiniteGradientError
from tests import runs
from tests.distributed import models


def pickled(both: Any) -> Any:
    return pickle.loads(pickle.dumps(both))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize(
    ("kind", "steps"),
    [(AMO, 3), (AMO, 8), *((kind, 3) for kind in (Muon, AdaMuon, NorMuon, ROOT))],
)
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


def test_a_scaler_leaves_out_a_step_with_an_infinite_gradient() -> None:
    model, optimizer = runs.make("plain", Muon)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    models.set_gradients(model, 1, 1)
    model.get_parameter(runs.WQ).grad[0, 0] = torch.inf  # type: ignore[index]
    before = runs.weights(model)
    scaler.step(optimizer)
    assert runs.equal(runs.weights(model), before)
    assert optimizer.num_steps_taken == 0


# Both warnings are PyTorch's: of a loss that was not in the graph before the break, and of slow
# guards on Python 3.13.0.
@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_training_step() -> None:
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
    others, other_losses = run(lambda step: torch.compile(step, backend="aot_eager"))
    torch._dynamo.reset()
    # The backend runs PyTorch's own kernels, in the same order.
    assert losses == other_losses
    assert runs.equal(weights, others)


def test_printing_shows_hyperparameters_and_no_control_text() -> None:
    text = repr(runs.make("plain", AMO)[1])
    assert text.startswith("AMO (\nParameter Group 0\n    algorithm: muon\n    betas: (0.9, 0.95)")
    assert "control" not in text


def test_hooks_of_states_see_and_change_them() -> None:
    _, optimizer = runs.make("plain", Muon)
    loaded: list[str] = []

    def halve(own: Any, state: dict[str, Any]) -> dict[str, Any]:
        groups = [{**group, "lr": group["lr"] / 2} for group in state["param_groups"]]
        return {**state, "param_groups": groups}

    # As PyTorch's own test does.
    optimizer.register_state_dict_pre_hook(lambda own: own.state.update(test=1))
    optimizer.register_state_dict_post_hook(lambda own, state: {**state, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(halve)
    optimizer.register_load_state_dict_post_hook(lambda own: loaded.append("loaded"))
    state = optimizer.state_dict()
    assert (state["extra"], state["state"]["test"]) == (1, 1)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 5e-3
    assert loaded == ["loaded"]


def test_complex_parameters_are_trained_by_adamw_as_pytorch_does() -> None:
    """Beside matrices; a NaN in an imaginary part is an error, too."""
    torch.manual_seed(0)
    up = nn.Parameter(torch.randn(16, 8))
    phases = nn.Parameter(torch.randn(16, 3, dtype=torch.complex64))
    model = models.build({"up_proj.weight": up, "phases": phases})
    twin = nn.Parameter(phases.detach().clone())
    options = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.95)}
    groups = param_groups(model, patterns={r"up_proj\.weight": "mlp_up"})
    optimizer = Muon(groups, **options)
    expected = torch.optim.AdamW([twin], foreach=True, **options)
    for _ in range(3):
        up.grad = torch.randn_like(up)
        phases.grad = twin.grad = torch.randn_like(twin)
        optimizer.step()
        expected.step()
        assert torch.equal(phases, twin)
    phases.grad = torch.full_like(twin, complex(0.0, float("nan")))
    with pytest.raises(NonFiniteGradientError, match="phases"):
        optimizer.step()
    assert torch.equal(phases, twin)


# ---------------------------------------------------------------- loads of other forms


def with_names(optimizer: Muon, state: dict[str, Any]) -> None:
    """As PyTorch's optimizers write it that were given named parameters."""
    names = iter(optimizer.params_by_name)
    for group in state["param_groups"]:
        group["param_names"] = [next(names) for _ in group["params"]]


def without_keys(optimizer: Muon, state: dict[str, Any]) -> None:
    for group in state["param_groups"]:
        del group["muon_lr_factor"], group["eps"], group["lr"]


def with_whole_steps(optimizer: Muon, state: dict[str, Any]) -> None:
    for own in state["state"].values():
        if "step" in own:
            own["step"] = own["step"].item()


@pytest.mark.parametrize("change", [with_names, without_keys, with_whole_steps])
@pytest.mark.parametrize("kind", [AMO, NorMuon])
def test_a_state_of_another_form_goes_on_alike(
    kind: type[Muon], change: Callable[[Muon, dict[str, Any]], None]
) -> None:
    model, optimizer = runs.make(kind=kind)
    runs.train(model, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    change(optimizer, state)
    twin, other = runs.make(kind=kind)
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(state)
    assert runs.equal(runs.train(twin, other, 4, 6), runs.train(model, optimizer, 4, 6))
    other.load_state_dict(other.state_dict())
    has_names = change is with_names
    assert all(("param_names" in group) == has_names for group in other.param_groups)


def test_a_flattened_state_is_refused_with_what_to_do() -> None:
    model, optimizer = runs.make(kind=Muon)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    message = (
        r"^state\..*: found a flattened key, expected state and param_groups: .*"
        "flatten_optimizer_state_dict, but not together with full_state_dict"
    )
    # What PyTorch makes of a full one on the way from rank 0 has groups beside.
    for found in (state, {**state, "param_groups": optimizer.state_dict()["param_groups"]}):
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(found)


# ---------------------------------------------------------------- groups and schedulers


SCHEDULES: dict[str, Callable[[Muon], Any]] = {
    "multiplicative": lambda own: schedules.MultiplicativeLR(own, lambda _: 0.9),
    "cyclic": lambda own: schedules.CyclicLR(own, 1e-3, 1e-2, 2),
    "one cycle": lambda own: schedules.OneCycleLR(own, 1e-2, total_steps=20),
    "swa": lambda own: SWALR(own, 1e-3),
}


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_schedulers_move_the_rate_and_resume(kind: str, as_tensor: bool) -> None:
    def make() -> tuple[nn.Module, Muon, Any]:
        model = models.plain_model(runs.SHAPES)
        optimizer = Muon(param_groups(model), lr=torch.tensor(1e-2) if as_tensor else 1e-2)
        return model, optimizer, SCHEDULES[kind](optimizer)

    def train(model: nn.Module, optimizer: Muon, scheduler: Any, first: int, last: int) -> Any:
        """The rate and the momentum of each step."""
        moved = []
        for step in range(first, last + 1):
            group = optimizer.param_groups[0]
            moved.append((float(group["lr"]), group["momentum"]))
            runs.train(model, optimizer, step, step)
            scheduler.step()
        return moved

    run = make()
    rates, momenta = zip(*train(*run, 1, 5), strict=True)
    assert len({*rates}) > 1
    assert (len({*momenta}) > 1) == (kind in ("cyclic", "one cycle"))
    assert run[1].param_groups[1]["betas"] == (0.9, 0.95)
    resumed = make()
    for other, own in zip(resumed, run, strict=True):
        other.load_state_dict(copy.deepcopy(own.state_dict()))
    assert train(*resumed, 6, 9) == train(*run, 6, 9)
    assert runs.same(resumed[0], run[0])
    assert isinstance(resumed[1].param_groups[0]["lr"], torch.Tensor) == as_tensor
