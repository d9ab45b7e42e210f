"""The scale of updates, cautious decay, and how bfloat16 parameters take updates."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amo_dist import AdaMuon, Fused, Muon, MuonConfig, NorMuon, param_groups
from amo_dist.kernels.elementwise import apply_update, update_scale
from amo_dist.kernels.rounding import random_bits, round_stochastically, split_into
from tests.distributed import models
from tests.simulated_device import simulated_device
from tests.unit.checkpoint_runs import make as make_amo

WQ, EMBEDDING = "layers.0.attention.wq.weight", "tok_embeddings.weight"
W2 = "layers.0.feed_forward.w2.weight"
SHAPES = {
    EMBEDDING: (5, 8),
    WQ: (12, 8),
    "layers.0.feed_forward.w2.weight": (8, 13),
    "norm.w": (8,),
}


def make(**fields: Any) -> tuple[nn.Module, Muon]:
    dtype, device = fields.pop("dtype", torch.bfloat16), fields.pop("device", "cpu")
    values = {name: models.initial(name, shape).bfloat16() for name, shape in SHAPES.items()}
    model = models.build({name: value.to(device, dtype) for name, value in values.items()})
    return model, Muon(param_groups(model), lr=3e-3, config=MuonConfig(**fields))


def train(model: nn.Module, optimizer: Muon, first: int = 1, last: int = 6) -> dict[str, Tensor]:
    """The parameters, after steps with the same bfloat16 gradients whatever their dtype."""
    for step in range(first, last + 1):
        models.set_gradients(model, 1, step)
        for param in model.parameters():
            assert param.grad is not None
            param.grad = param.grad.bfloat16().to(param.dtype)
        optimizer.step()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return all(torch.equal(found[name], value) for name, value in expected.items())


# --- adjust_lr


@pytest.mark.parametrize(
    ("adjust_lr", "tall", "wide"),
    [("match_rms_adamw", 0.8, 0.8), ("original", 2.0, 1.0), ("spectral", 2.0, 0.5)],
)
def test_scales(adjust_lr: str, tall: float, wide: float) -> None:
    factor = MuonConfig(adjust_lr=adjust_lr).update_factor
    assert update_scale((16, 4), factor, adjust_lr) == pytest.approx(tall, rel=1e-15)
    assert update_scale((4, 16), factor, adjust_lr) == pytest.approx(wide, rel=1e-15)


def distance(param: Tensor, adjust_lr: str, target: str | Fused) -> float:
    """How far one step moves a matrix."""
    before = param.clone()
    model = models.build({"w": nn.Parameter(param.clone())})
    config = MuonConfig(adjust_lr=adjust_lr, ns_dtype="float32")
    optimizer = Muon(param_groups(model, patterns={"w": target}), 1e-3, 0.0, config=config)
    model.get_parameter("w").grad = torch.ones_like(param)
    optimizer.step()
    return float((model.get_parameter("w").detach() - before).norm())


def test_columns_are_outputs_where_a_parameter_is_fused_by_them() -> None:
    rows, columns = Fused((("attn_q", 16),)), Fused((("attn_q", 16),), dim=1)
    param = torch.zeros(16, 4)
    found = [distance(param, "spectral", rows), distance(param.mT.clone(), "spectral", columns)]
    assert found[0] == pytest.approx(found[1], rel=1e-6)  # float32, of transposed products
    # sqrt(4/16) instead of sqrt(16/4)
    assert distance(param.mT.clone(), "spectral", "attn_q") == pytest.approx(found[0] / 4, rel=1e-6)


@pytest.mark.parametrize("kind", [AdaMuon, NorMuon])
def test_what_scales_updates_itself_takes_no_other_scale(kind: type[Muon]) -> None:
    model = models.plain_model(SHAPES)
    with pytest.raises(ValueError, match=r"adjust_lr: found 'original' with .*Rule, which scales"):
        kind(param_groups(model), config=MuonConfig(adjust_lr="original"))


# --- cautious decay


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1, dtype=torch.float64)])
def test_cautious_decay_by_the_formula(dtype: torch.dtype, lr: float | Tensor) -> None:
    draw = torch.Generator().manual_seed(0)
    w, x = (torch.randn(7, 5, generator=draw).to(each) for each in (dtype, torch.bfloat16))
    w[0], x[1] = 0.0, 0.0
    wide = w.double() if dtype == torch.float64 else w.float()
    same = (w > 0) & (x > 0) | (w < 0) & (x < 0)
    expected = torch.where(same, wide * (1 - 0.1 * 0.5), wide) - x.to(wide.dtype) * (0.1 * 0.3)
    assert 0 < same.sum() < same.numel()
    options: dict[str, Any] = {"lr": lr, "weight_decay": 0.5, "cautious": True}
    found = [w.clone() for _ in range(2)]
    apply_update(found[:1], [x], scale=0.3, **options)
    apply_update(found[1:2], [x], scale=0.3, bad=torch.tensor(False), **options)
    assert all(torch.equal(each, expected.to(dtype)) for each in found)
    apply_update(found[:1], [x], scale=0.3, bad=torch.tensor(True), **options)
    assert torch.equal(found[0], expected.to(dtype))


def test_cautious_decay_is_for_matrices_alone() -> None:
    cautious, plain = (
        train(*make(cautious_decay=on, dtype=torch.float32), last=1) for on in (True, False)
    )
    assert [n for n in SHAPES if not torch.equal(cautious[n], plain[n])] == [WQ, W2]


# --- bfloat16 parameters


def test_what_is_rounded_off_makes_up_the_number() -> None:
    draw = torch.Generator().manual_seed(0)
    numbers = torch.randn(4000, generator=draw) * 10.0 ** torch.arange(-43, 37).repeat(50)
    wide = torch.cat([numbers, torch.tensor([1 + 2**-8, -1 - 3 * 2**-8, 2.0**-149, 0.0])])
    rounded, rest = torch.empty_like(wide, dtype=torch.bfloat16), torch.empty_like(wide)
    split_into(wide, rounded, rest)
    assert torch.equal(rounded, wide.bfloat16())
    assert torch.equal(rounded + rest, wide)


def test_random_bits_are_uniform_and_stochastic_rounding_without_bias() -> None:
    bits = random_bits(7, torch.arange(1000), torch.arange(1000)).double()
    assert 0 <= bits.min() <= bits.max() < 2**16
    # Five standard errors of a million draws.
    assert abs(bits.mean() / 2**16 - 0.5) < 5 / 12**0.5 / 1e3
    for other in (bits.roll(1, 0), bits.roll(1, 1), bits.mT, bits.roll((1, 1), (0, 1))):
        assert abs(torch.corrcoef(torch.stack([bits.flatten(), other.flatten()]))[0, 1]) < 5e-3
    value, out = (
        torch.full((1000, 1000), -1 - 2**-10),
        torch.empty(1000, 1000, dtype=torch.bfloat16),
    )
    round_stochastically(value, bits.int(), out)
    assert out.unique().tolist() == [-1 - 2**-7, -1.0]
    assert abs((out == -1.0).double().mean() - 7 / 8) < 5 * (7 / 64) ** 0.5 / 1e3


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_master_weights_are_those_of_float32_bit_for_bit(device: str) -> None:
    with simulated_device() if device == "cuda" else contextlib.nullcontext():
        expected = train(*make(device=device, dtype=torch.float32, cautious_decay=True))
        model, optimizer = make(device=device, bfloat16_params="master", cautious_decay=True)
        found = train(model, optimizer)
        named = optimizer.params_by_name.items()
        rests = {name: optimizer.state[param]["rounded_off"] for name, param in named}
        for name, value in expected.items():
            assert torch.equal(found[name] + rests[name], value), name


def test_rounded_to_nearest_small_updates_are_lost() -> None:
    """Of weights near 1 none moves by 1e-4 a step; on average they do under the others."""
    moved: dict[str, float] = {}
    for how in ("nearest", "stochastic", "master"):
        model = models.build({"norm.w": nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))})
        config = MuonConfig(bfloat16_params=how)
        groups = param_groups(model)
        optimizer = Muon(groups, 1e-4, 0.0, config=config, allow_no_matrices=True)
        for _ in range(20):
            model.get_parameter("norm.w").grad = torch.ones(1000, dtype=torch.bfloat16)
            optimizer.step()
        steps = 1 - model.get_parameter("norm.w").double()
        moved[how] = steps.mean().item()
        if how == "stochastic":
            # Each step draws anew: 1 - (1 - 1e-4 * 2^8)^20 = 0.40 of the entries have moved, to
            # five standard errors. With one draw for all steps it would be a fortieth.
            assert abs((steps != 0).double().mean().item() - 0.40) < 5 * 0.5 / 1000**0.5
    # 20 steps of 1e-4. Stochastic: spacing 2^-8 below one, 1000 draws, five standard errors.
    assert moved["nearest"] == 0.0
    assert abs(moved["stochastic"] - 2e-3) < 5 * 2**-8 * 0.5 / 1000**0.5
    assert abs(moved["master"] - 2e-3) < 2**-9


def test_stochastic_rounding_is_a_function_of_the_seed() -> None:
    first, again, other = (train(*make(bfloat16_params="stochastic", seed=s)) for s in (1, 1, 2))
    assert equal(first, again)
    assert not any(torch.equal(first[name], other[name]) for name in SHAPES)
    assert not equal(first, train(*make()))


@pytest.mark.parametrize("how", ["stochastic", "master"])
def test_a_skipped_step_changes_nothing(how: str) -> None:
    with simulated_device():
        model, optimizer = make(device="cuda", bfloat16_params=how, nonfinite="skip_step")
        before = train(model, optimizer, 1, 3)
        rests = copy.deepcopy([state.get("rounded_off") for state in optimizer.state.values()])
        grad = model.get_parameter(WQ).grad
        assert grad is not None
        grad[0, 0] = torch.nan
        optimizer.step()
        assert optimizer.metrics()["optimizer/steps_skipped"] == 0  # not looked at yet
        optimizer.check_last_update()
        assert equal(dict(model.named_parameters()), before)
        for state, value in zip(optimizer.state.values(), rests, strict=True):
            assert value is None or torch.equal(state["rounded_off"], value)


@pytest.mark.parametrize("how", ["stochastic", "master"])
def test_a_step_on_devices_waits_for_nothing(how: str) -> None:
    with simulated_device() as device:
        model, optimizer = make(device="cuda", bfloat16_params=how, cautious_decay=True)
        train(model, optimizer, 1, 3)
        models.set_gradients(model, 1, 4)
        device.clear()
        optimizer.step()
        assert device.operations
        assert not device.waits


def test_parameters_of_other_dtypes_are_written_as_ever() -> None:
    for how in ("stochastic", "master"):
        model, optimizer = make(dtype=torch.float32, bfloat16_params=how)
        assert equal(train(model, optimizer), train(*make(dtype=torch.float32)))
        assert not any("rounded_off" in state for state in optimizer.state.values())
    with pytest.raises(ValueError, match=r"bfloat16_params: found 'master' with .* of float16"):
        make(dtype=torch.float16, bfloat16_params="master")


# --- head by head


# --- as settings


@pytest.mark.parametrize(("was", "becomes"), [("nearest", "master"), ("master", "nearest")])
def test_how_bfloat16_is_written_may_change_where_settings_may(was: str, becomes: str) -> None:
    model, optimizer = make_amo(torch.bfloat16, bfloat16_params=was)
    train(model, optimizer, 1, 5)
    state = copy.deepcopy(optimizer.state_dict())
    rules = {
        "error": f"bfloat16_params: the checkpoint has '{was}', this run has '{becomes}'",
        "keep_checkpoint": f"control.config.bfloat16_params: found '{was}', expected '{becomes}'",
    }
    for rule, message in rules.items():
        _, other = make_amo(torch.bfloat16, bfloat16_params=becomes, on_config_change=rule)
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(state)
    resumed, other = make_amo(torch.bfloat16, bfloat16_params=becomes, on_config_change="replan")
    resumed.load_state_dict(model.state_dict())
    other.load_state_dict(state)
    train(resumed, other, 6, 8)
    assert all(("rounded_off" in each) == (becomes == "master") for each in other.state.values())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("adjust_lr", "adamw"), ("cautious_decay", 1)),
        *(("bfloat16_params", "kahan"), ("seed", -1)),
    ],
)
def test_bad_values_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{field}: found {value!r}, expected"):
        MuonConfig(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ns_dtype", "wire_dtype", "wire"),
    [
        ("float32", None, "float32"),
        ("float16", None, "bfloat16"),
        ("bfloat16", "float32", "float32"),
        ("bfloat16", "float64", None),
        ("float32", "float16", None),
        ("float8", None, None),
    ],
)
def test_dtypes_on_the_wire(ns_dtype: str, wire_dtype: str | None, wire: str | None) -> None:
    if wire is not None:
        assert MuonConfig(ns_dtype=ns_dtype, wire_dtype=wire_dtype).wire == wire
        return
    field = "ns_dtype" if wire_dtype is None else "wire_dtype"
    with pytest.raises(ValueError, match=f"{field}: found .*, expected"):
        MuonConfig(ns_dtype=ns_dtype, wire_dtype=wire_dtype)
