"""First weights, tied weights, and torchtitan on CPU."""

from __future__ import annotations

import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

import torchtitan_ext

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own modules warn while torchtitan imports them
    torchtitan_ext.register()

from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools import utils

from torchtitan_ext.plugin import models


def build(name: str, flavor: str, device: str) -> torch.nn.Module:
    spec = get_train_spec(name)
    with torch.device(device):
        model: torch.nn.Module = spec.model_cls(spec.model_args[flavor])
    return model


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_first_weights_have_the_papers_deviation(name: str) -> None:
    model = build(name, "tiny", "cpu")
    torch.manual_seed(1)
    with torch.no_grad():
        model.init_weights()  # type: ignore[operator]
    for key, weight in model.named_parameters():
        if weight.dim() == 2:
            # Five standard errors of the estimate from this many draws.
            tolerance = 5 * 0.02 / (2 * weight.numel()) ** 0.5
            assert weight.std().item() == pytest.approx(0.02, abs=tolerance), key
    if name == "qwen3":
        assert model.output.weight is model.tok_embeddings.weight


def test_torchtitans_own_flavors_keep_their_first_weights() -> None:
    model = build("qwen3", "debugmodel", "meta")
    assert getattr(model.model_args, "init_std", None) is None
    assert model.model_args.vocab_size == 2048


def test_flavors_are_fresh() -> None:
    models.flavors("llama3")["tiny"].dim = 1
    assert models.flavors("llama3")["tiny"].dim == 48


@pytest.mark.skipif(torch.accelerator.is_available(), reason="for machines without an accelerator")
def test_torchtitan_runs_on_cpu_without_an_accelerator() -> None:
    assert utils.device_type == "cpu"
    module = utils.device_module
    assert module.get_device_properties(None).total_memory > 0
    assert module.memory_stats(None)["active_bytes.all.peak"] > 0
    # What torchtitan was told for the time of its import is not told to anybody else.
    assert torch._utils._get_available_device_type() is None
    assert torch._utils._get_device_module("cpu") is torch.cpu


@pytest.mark.skipif(torch.accelerator.is_available(), reason="for machines without an accelerator")
def test_torchtitan_imported_first_is_an_error_with_the_remedy() -> None:
    program = "import torchtitan.tools.utils, torchtitan_ext; torchtitan_ext.register()"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert "start training with `-m torchtitan_ext.train`" in done.stderr


def test_registering_twice_is_harmless() -> None:
    before = get_train_spec("llama3")
    torchtitan_ext.register()
    assert get_train_spec("llama3") is before


def test_importing_the_package_alone_is_cheap() -> None:
    program = (
        "import sys, torchtitan_ext; print(any('torch' in m.split('.')[:1] for m in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_tied_weights_are_one_fsdp_group() -> None:
    from torchtitan_ext.plugin import parallelize

    model = SimpleNamespace(enable_weight_tying=True, tok_embeddings=object(), output=object())
    norm, calls = object(), []
    module = parallelize._llama4_parallelize()
    stock = module.fully_shard
    module.fully_shard = lambda found, **kwargs: calls.append((found, kwargs))
    try:
        with parallelize._tied_weights_in_one_group(model):  # type: ignore[arg-type]
            module.fully_shard(model.tok_embeddings, reshard_after_forward=True)
            module.fully_shard([norm, model.output], reshard_after_forward=False)
            module.fully_shard(model, mesh=1)
    finally:
        module.fully_shard = stock
    assert calls == [
        ([model.tok_embeddings, norm, model.output], {"reshard_after_forward": False}),
        (model, {"mesh": 1}),
    ]
