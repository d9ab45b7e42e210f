"""What PyTorch's own tests ask of any optimizer, asked of this family."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from amo_dist import AMO, ROOT, AdaMuon, AMOConfig, Muon, NorMuon, param_groups
from tests.distributed import models
from tests.unit.in_use import same, train

SHAPES = {
    "tok_embeddings.weight": (5, 8),
    "layers.0.attention.wq.weight": (12, 8),
    "layers.0.attention.wo.weight": (8, 12),
    "layers.0.feed_forward.w1.weight": (13, 8),
    "layers.0.attention_norm.weight": (8,),
}
WQ = "layers.0.attention.wq.weight"
SHORT = AMOConfig(observe_until=4, observe_every=2, sample_size=2, transition_steps=3)
FAMILY: dict[str, Callable[..., Muon]] = {
    "AMO": lambda groups, **options: AMO(groups, config=SHORT, **options),
    "Muon": Muon,
    "AdaMuon": AdaMuon,
    "NorMuon": NorMuon,
    "ROOT": ROOT,
}


def pair(name: str = "Muon", **options: Any) -> tuple[nn.Module, Muon]:
    model = models.plain_model(SHAPES)
    return model, FAMILY[name](param_groups(model), lr=1e-2, **options)


def weights(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def pickled(both: Any) -> Any:
    return pickle.loads(pickle.dumps(both))


# ---------------------------------------------------------------- copies


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("steps", [3, 8])  # of AMO: observation, locked
@pytest.mark.parametrize("name", list(FAMILY))
def test_a_copy_goes_on_as_the_original(
    name: str, steps: int, copied: Callable[[Any], Any]
) -> None:
    model, optimizer = pair(name)
    train(model, optimizer, 1, steps)
    twin, other = copied((model, optimizer))
    before = weights(model)
    train(twin, other, steps + 1, 10)
    assert all(map(torch.equal, weights(model), before))
    train(model, optimizer, steps + 1, 10)
    assert same(model, twin)
    assert other.num_steps_taken == 10
    assert other.phase == optimizer.phase
    assert other.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


def test_a_copy_alone_has_parameters_of_its_own() -> None:
    model, optimizer = pair()
    train(model, optimizer, 1, 2)
    before, other = weights(model), copy.deepcopy(optimizer)
    for param in other.params_by_name.values():
        param.grad = torch.ones_like(param)
    other.step()
    assert all(map(torch.equal, weights(model), before))
    assert not torch.equal(other.params_by_name[WQ], model.get_parameter(WQ))


# ---------------------------------------------------------------- state dicts


# ---------------------------------------------------------------- steps


def test_hooks_of_steps_are_called_in_order() -> None:
    model, optimizer = pair()
    models.set_gradients(model, 1, 1)
    before, calls = weights(model), []

    def look(place: str) -> Callable[..., None]:
        def hook(own: Any, args: Any, kwargs: Any) -> None:
            assert own is optimizer
            calls.append((place, all(map(torch.equal, weights(model), before))))

        return hook

    handles = [
        optimizer.register_step_pre_hook(look("before")),
        optimizer.register_step_post_hook(look("after")),
        register_optimizer_step_post_hook(look("after any")),
    ]
    optimizer.step()
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert calls == [("before", True), ("after", False), ("after any", False)]


def test_a_scaler_leaves_out_a_step_with_an_infinite_gradient() -> None:
    model, optimizer = pair()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    models.set_gradients(model, 1, 1)
    model.get_parameter(WQ).grad[0, 0] = torch.inf  # type: ignore[index]
    before = weights(model)
    scaler.step(optimizer)
    assert all(map(torch.equal, weights(model), before))
    assert optimizer.num_steps_taken == 0


def test_parameters_of_several_dtypes() -> None:
    model, optimizer = pair()
    for name, param in model.named_parameters():
        if "norm" in name or "w1" in name:
            param.data = param.data.bfloat16()
    optimizer = Muon(param_groups(model), lr=1e-1)
    before = weights(model)
    train(model, optimizer, 1, 2)
    for param, old in zip(model.parameters(), before, strict=True):
        assert param.dtype == old.dtype
        assert not torch.equal(param, old)


@pytest.mark.parametrize("name", list(FAMILY))
def test_parameters_without_elements(name: str) -> None:
    empty = {"layers.0.feed_forward.w2.weight": (0, 8), "layers.0.ffn_norm.weight": (0,)}
    model, twin = models.plain_model({**SHAPES, **empty}), models.plain_model(SHAPES)
    train(model, FAMILY[name](param_groups(model)), 1, 9)
    train(twin, FAMILY[name](param_groups(twin)), 1, 9)
    for param_name, param in twin.named_parameters():
        assert torch.equal(model.get_parameter(param_name), param)


# ---------------------------------------------------------------- torch.compile


# Both warnings are PyTorch's: of a loss that was not in the graph before the break, and of slow
# guards on Python 3.13.0.
@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_training_step(backend: str) -> None:
    def run(wrap: Callable[[Any], Any]) -> tuple[nn.Module, list[float]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        groups = param_groups(model, patterns={r"\d\.weight": "mlp_up"})
        optimizer = AMO(groups, lr=1e-2, config=SHORT)

        def step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = wrap(step)
        return model, [step(torch.ones(4, 8)).item() for _ in range(9)]

    model, losses = run(lambda step: step)
    twin, others = run(lambda step: torch.compile(step, backend=backend))
    torch._dynamo.reset()
    # Both backends run PyTorch's own kernels, in the same order.
    assert losses == others
    assert same(model, twin)


# ---------------------------------------------------------------- what is printed and refused


def test_printing_shows_hyperparameters_and_no_control_text() -> None:
    text = repr(pair("AMO")[1])
    assert text.startswith("AMO (\nParameter Group 0\n    algorithm: muon\n    betas: (0.9, 0.95)")
    assert "control" not in text


def ones(*shape: int, **options: Any) -> nn.Parameter:
    return nn.Parameter(torch.ones(*shape, **options))


@pytest.mark.parametrize(
    ("param", "message"),
    [
        (ones(3, 3, dtype=torch.complex64), "a: found dtype torch.complex64, expected a floating"),
        (torch.ones(3, 3).to_sparse(), "a: found a tensor of layout torch.sparse_coo, expected a"),
        (ones(3, 3, device="meta"), "a: found a meta tensor, expected one with storage"),
        ([1.0], "a: found list, expected a tensor"),
    ],
)
def test_other_tensors_are_refused(param: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Muon([{"params": [("a", param)], "algorithm": "adamw"}])


@pytest.mark.parametrize("params", ["parameters", "named_parameters"])
def test_what_does_not_come_from_param_groups_is_refused(params: str) -> None:
    model = models.plain_model(SHAPES)
    for given in (getattr(model, params)(), [*getattr(model, params)()]):
        with pytest.raises(ValueError, match=r"expected the groups that amo_dist\.param_groups"):
            Muon(given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("name", ["AMO", "Muon"])
def test_a_model_cast_after_construction_is_refused(
    name: str, steps: int, dtype: torch.dtype
) -> None:
    model, optimizer = pair(name)
    train(model, optimizer, 1, steps)
    model.to(dtype)
    models.set_gradients(model, 1, steps + 1)
    before = weights(model)
    message = rf"^{WQ}: found {dtype} on cpu, expected torch.float32 on cpu, as at construction"
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert all(map(torch.equal, weights(model), before))
    assert optimizer.num_steps_taken == steps


def test_a_parameter_moved_after_construction_is_refused() -> None:
    model, optimizer = pair()
    train(model, optimizer, 1, 1)
    param = model.get_parameter(WQ)
    torch.utils.swap_tensors(param, nn.Parameter(param.detach().to("meta")))
    with pytest.raises(ValueError, match=rf"{WQ}: found torch.float32 on meta, expected .* on cpu"):
        optimizer.step()


def test_state_put_in_place_of_the_optimizers_is_refused_after_a_step() -> None:
    for field in ("state", "param_groups"):
        model, optimizer = pair()
        train(model, optimizer, 1, 1)
        setattr(optimizer, field, copy.copy(getattr(optimizer, field)))
        with pytest.raises(ValueError, match="another param_groups or state, after the first step"):
            train(model, optimizer, 2, 2)
