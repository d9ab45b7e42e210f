"""The scale of updates, cautious decay, and how bfloat16 parameters take updates."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amo_dist import Muon, MuonConfig, param_groups
from amo_dist.kernels.elementwise import apply_update, master_weights, update_scale
from amo_dist.optimizers import muon
from tests import runs
from tests.distributed import models
from tests.simulated_device import simulated_device

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
    """`runs.weights`, after steps with the same bfloat16 gradients whatever their dtype."""
    for step in range(first, last + 1):
        models.set_gradients(model, 1, step)
        for param in model.parameters():
            assert param.grad is not None
            param.grad = param.grad.bfloat16().to(param.dtype)
        optimizer.step()
    return runs.weights(model)


# --- adjust_lr


@pytest.mark.parametrize(
    ("adjust_lr", "tall", "wide"),
    [("match_rms_adamw", 0.8, 0.8), ("original", 2.0, 1.0), ("spectral", 2.0, 0.5)],
)
def test_scales(adjust_lr: str, tall: float, wide: float) -> None:
    factor = MuonConfig(adjust_lr=adjust_lr).update_factor
    assert update_scale((16, 4), factor, adjust_lr) == pytest.approx(tall, rel=1e-15)
    assert update_scale((4, 16), factor, adjust_lr) == pytest.approx(wide, rel=1e-15)


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
    apply_update(found[:1], [x], scales=[0.3], **options)
    apply_update(found[1:2], [x], scales=[0.3], skip_mask=torch.tensor(False), **options)
    assert all(torch.equal(each, expected.to(dtype)) for each in found)
    apply_update(found[:1], [x], scales=[0.3], skip_mask=torch.tensor(True), **options)
    assert torch.equal(found[0], expected.to(dtype))


def test_cautious_decay_is_for_matrices_alone() -> None:
    cautious, plain = (
        train(*make(cautious_decay=on, dtype=torch.float32), last=1) for on in (True, False)
    )
    assert [n for n in SHAPES if not torch.equal(cautious[n], plain[n])] == [WQ, W2]


# --- bfloat16 parameters


def test_a_master_weight_is_parameter_and_remainder_exactly() -> None:
    draw = torch.Generator().manual_seed(0)
    numbers = torch.randn(4000, generator=draw) * 10.0 ** torch.arange(-43, 37).repeat(50)
    wide = torch.cat([numbers, torch.tensor([1 + 2**-8, -1 - 3 * 2**-8, 2.0**-149, 0.0])])
    rounded, remainder = torch.zeros_like(wide, dtype=torch.bfloat16), torch.zeros_like(wide)
    with master_weights([rounded], [remainder]) as (master,):
        master.copy_(wide)
    assert torch.equal(rounded, wide.bfloat16())
    assert torch.equal(rounded + remainder, wide)


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


def test_parameters_of_other_dtypes_are_written_as_ever() -> None:
    model, optimizer = make(dtype=torch.float32, bfloat16_params="master")
    assert runs.equal(train(model, optimizer), train(*make(dtype=torch.float32)))
    assert not any("rounded_off" in state for state in optimizer.state.values())
    with pytest.raises(ValueError, match=r"bfloat16_params: found 'master' with .* of float16"):
        make(dtype=torch.float16, bfloat16_params="master")


# --- as settings


@pytest.mark.parametrize(("was", "becomes"), [("nearest", "master"), ("master", "nearest")])
def test_how_bfloat16_is_written_may_change_where_settings_may(was: str, becomes: str) -> None:
    def make(params: str, rule: str = "error") -> tuple[nn.Module, Any]:
        return runs.make(dtype=torch.bfloat16, bfloat16_params=params, on_config_change=rule)

    model, optimizer = make(was)
    train(model, optimizer, 1, 5)
    for rule in ("error", "keep_checkpoint"):
        message = f"bfloat16_params: the checkpoint has '{was}', this .* to 'replan'"
        with pytest.raises(ValueError, match=message):  # no advice leads nowhere
            runs.resume(model, optimizer, lambda rule=rule: make(becomes, rule))
    resumed, other = runs.resume(model, optimizer, lambda: make(becomes, "replan"))
    train(resumed, other, 6, 8)
    assert all(("rounded_off" in each) == (becomes == "master") for each in other.state.values())


@pytest.mark.parametrize(
    ("ns_dtype", "wire_dtype", "has_bfloat16", "in_force"),
    [
        ("auto", None, False, ("float32", "float32")),
        ("auto", None, True, ("bfloat16", "bfloat16")),
        ("auto", "float32", True, ("bfloat16", "float32")),
        ("float16", None, True, ("float16", "bfloat16")),
        (torch.float32, torch.bfloat16, True, ("float32", "bfloat16")),
    ],
)
def test_dtypes_in_force(
    ns_dtype: Any, wire_dtype: Any, has_bfloat16: bool, in_force: tuple[str, str]
) -> None:
    config = MuonConfig(ns_dtype=ns_dtype, wire_dtype=wire_dtype)
    config = config.in_force(has_bfloat16=has_bfloat16)
    assert (config.ns_dtype, config.wire_dtype) == in_force


@pytest.mark.parametrize(
    ("units", "takes_bfloat16"),
    [
        ({"architecture": "x86_64", "avx512_f": True, "avx512_bf16": False}, False),
        ({"architecture": "x86_64", "avx512_bf16": True}, True),
        ({"architecture": "x86_64", "amx_bf16": True}, True),
        ({"architecture": "arm64", "neon": True}, False),
        ({"architecture": "arm64", "bf16": True}, True),
    ],
)
def test_auto_takes_bfloat16_where_the_cpu_has_units_for_it(
    units: dict[str, Any], takes_bfloat16: bool, monkeypatch: pytest.MonkeyPatch, cpu_as_it_is: None
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: units)
    _, optimizer = runs.make(kind=Muon)
    assert optimizer.config.ns_dtype == ("bfloat16" if takes_bfloat16 else "float32")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    _, optimizer = runs.make(kind=Muon)
    assert optimizer.config.ns_dtype == "float32"


def test_the_real_cpu_is_asked(cpu_as_it_is: None) -> None:
    """PyTorch has this function, whose keys decide."""
    assert muon.has_bfloat16(torch.device("cpu")) in (True, False)
    units = torch.cpu.get_capabilities()
    assert {"x86_64": "avx512_bf16", "arm64": "bf16"}[units["architecture"]] in units


@pytest.mark.parametrize("has_bfloat16", [False, True])
@pytest.mark.parametrize("wire_dtype", [None, "float32"])
def test_auto_resumes_with_the_dtype_of_its_checkpoint(
    has_bfloat16: bool,
    wire_dtype: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    make = functools.partial(runs.make, kind=Muon, wire_dtype=wire_dtype)
    monkeypatch.setattr(muon, "has_bfloat16", lambda _: has_bfloat16)
    model, optimizer = make()
    runs.train(model, optimizer)
    before = optimizer.config
    assert before.ns_dtype == ("bfloat16" if has_bfloat16 else "float32")
    monkeypatch.setattr(muon, "has_bfloat16", lambda _: not has_bfloat16)
    twin, other = runs.resume(model, optimizer, make)
    assert other.config == before
    assert "ns_dtype = 'auto' keeps the checkpoint's" in caplog.text
    assert runs.equal(runs.train(model, optimizer, 4, 5), runs.train(twin, other, 4, 5))
    # The other dtype, written out, is another setting.
    written = "float32" if has_bfloat16 else "bfloat16"
    with pytest.raises(ValueError, match="ns_dtype: the checkpoint has"):
        runs.resume(model, optimizer, functools.partial(make, ns_dtype=written))


def test_the_dtypes_in_force_are_saved() -> None:
    """A resume that writes out what was in force changes nothing."""
    model, optimizer = runs.make(kind=Muon)
    runs.train(model, optimizer)
    explicit = {"ns_dtype": "float32", "wire_dtype": torch.float32}
    twin, other = runs.resume(model, optimizer, lambda: runs.make(kind=Muon, **explicit))
    assert runs.equal(runs.train(model, optimizer, 4, 5), runs.train(twin, other, 4, 5))
    with pytest.raises(ValueError, match="wire_dtype: the checkpoint has 'float32', this run has"):
        runs.resume(model, optimizer, lambda: runs.make(kind=Muon, wire_dtype="bfloat16"))
