"""Compiled momentum and updates have the bits of the foreach calls, where nothing is fused."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from amo_dist import Muon, MuonConfig, param_groups
from amo_dist.kernels import elementwise
from amo_dist.kernels.elementwise import apply_update, nesterov, update_momentum
from tests.distributed import models
from tests.simulated_device import simulated_device

pytestmark = pytest.mark.slow


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What is compiled, run by PyTorch's own operations."""
    found: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        found.append(graph)
        return graph.forward

    compile_ = torch.compile

    def compiled(function: Any, *, options: Any, **rest: Any) -> Any:
        return compile_(function, backend=backend, **rest)

    monkeypatch.setattr(torch, "compile", compiled)
    elementwise._compiled.cache_clear()
    yield found
    elementwise._compiled.cache_clear()
    torch.compiler.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bad", [None, False, True])
def test_compiled_functions_are_the_calls_that_they_stand_for(
    dtype: torch.dtype, bad: bool | None, graphs: list[Any]
) -> None:
    draw = torch.Generator().manual_seed(0)

    def make(dtype: torch.dtype) -> list[Tensor]:
        whole = torch.randn(9, 6, generator=draw).to(dtype)
        return [torch.randn(4, 5, generator=draw).to(dtype), whole[1:7, 2:5], whole[:0]]

    verdict = None if bad is None else torch.tensor(bad)
    grads, params = make(dtype), make(dtype)
    buffers = make(torch.promote_types(dtype, torch.float32))
    if bad:
        grads[0][0, 0] = math.nan
    results = []
    for compiles in (False, True):
        b, p = copy.deepcopy((buffers, params))
        out = [torch.zeros_like(buffer, dtype=torch.bfloat16) for buffer in b]
        options: Any = {"bad": verdict, "compiles": compiles}
        for momentum, rate in (0.9, 0.1), (0.8, torch.tensor(0.3)):
            update_momentum(b, grads, momentum, **options)
            nesterov(b, grads, momentum, out, compiles=compiles)
            for cautious in (False, True):
                options["cautious"] = cautious
                scale = [0.5, 2.0, 1.0]
                apply_update(p, out, lr=rate, weight_decay=0.1, scale=scale, **options)
            del options["cautious"]
        results.append([*b, *p, *(x.nan_to_num(7) for x in out)])
    assert all(map(torch.equal, *results))
    before = [*buffers, *params]
    changes = [not torch.equal(x, y) for x, y in zip(results[1], before, strict=False)]
    assert any(changes) is not bool(bad)
    assert graphs


def test_each_list_compiles_once_whatever_the_numbers(graphs: list[Any]) -> None:
    # PyTorch by itself refuses the ninth.
    for _ in range(2):
        for size in range(1, 13):
            for momentum in (0.9, 0.95):
                update_momentum([torch.ones(size)], [torch.ones(size)], momentum, compiles=True)
    assert len(graphs) == 12


def train(**fields: Any) -> list[Tensor]:
    shapes = {f"layers.{i}.attention.wq.weight": (12, 8) for i in range(3)}
    with simulated_device():
        model = models.plain_model(shapes, "cuda")
        optimizer = Muon(param_groups(model), lr=0.02, config=MuonConfig(**fields))
        for step in range(1, 4):
            models.set_gradients(model, 1, step)
            optimizer.step()
        return [param.detach().cpu() for param in model.parameters()]


def test_a_step_takes_compiled_functions_on_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    called = set()

    def compiled(function: Callable[..., None]) -> Callable[..., None]:
        called.add(function.__name__)
        return function

    monkeypatch.setattr(elementwise, "_compiled", compiled)
    assert all(map(torch.equal, train(compile_updates=True), train()))
    assert called == {"_momentum_once", "_nesterov_once", "_update_once"}
    called.clear()
    model = models.plain_model({"layers.0.attention.wq.weight": (12, 8)})
    models.set_gradients(model, 1, 1)
    Muon(param_groups(model), lr=0.02, config=MuonConfig(compile_updates=True)).step()
    assert not called
