"""CUDA graphs: what is captured, and when it is freed, on a capture that only counts."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from amo_dist import AMO, AMOConfig, Muon, MuonConfig, param_groups
from amo_dist.kernels.cuda import graphs
from amo_dist.kernels.cuda.graphs import MAX_IDLE_STEPS, MIN_STEPS, Function, GraphCache, SharedPool
from amo_dist.kernels.cuda.kernels import CudaKernels
from amo_dist.kernels.devices import make_kernels
from amo_dist.kernels.newton_schulz import orthogonalize
from amo_dist.schedule.polar_express import compose
from tests.distributed import models

SHAPES = {
    "layers.0.attention.wq.weight": (12, 8),
    "layers.1.attention.wq.weight": (12, 8),
    "layers.0.feed_forward.w1.weight": (13, 8),
    "norm.weight": (8,),
}
SHORT: dict[str, Any] = {
    "observe_until": 4,
    "observe_every": 2,
    "sample_size": 2,
    "transition_steps": 6,
}


class FakeCapture:
    """Counts captures; as a graph does, it replays into one and the same memory."""

    def __init__(self) -> None:
        self.num_captures = 0
        self.num_replays = 0

    def __call__(self, function: Function, example: Tensor) -> Function:
        self.num_captures += 1
        static, result = example.clone(), function(example)

        def replay(x: Tensor) -> Tensor:
            self.num_replays += 1
            static.copy_(x)
            result.copy_(function(static))
            return result.clone()

        return replay


def run(cache: GraphCache, *keys: str) -> None:
    """One optimizer step that brings these keys."""
    cache.begin_step()
    for key in keys:
        found = cache.run(key, torch.neg, torch.tensor([1.0]))
        assert found.item() == -1.0


def test_what_repeats_is_captured_once() -> None:
    capture = FakeCapture()
    cache = GraphCache(capture)
    for step in range(1, 10):
        run(cache, "a")
        assert capture.num_captures == cache.num_graphs == (step >= MIN_STEPS)
        assert capture.num_replays == max(0, step - MIN_STEPS + 1)


def test_steps_count_and_not_calls() -> None:
    capture = FakeCapture()
    cache = GraphCache(capture)
    run(cache, *["a"] * 100)
    assert capture.num_captures == 0


def test_what_changes_at_every_step_is_never_captured() -> None:
    capture = FakeCapture()
    cache = GraphCache(capture)
    for step in range(200):
        run(cache, f"a{step}", f"b{step}", f"a{step}")
    assert capture.num_captures == 0
    # Nor is it remembered: a transition of any length takes no memory.
    assert len(cache._entries) == 2 * (MAX_IDLE_STEPS + 1)


def test_what_is_idle_is_freed() -> None:
    cache = GraphCache(FakeCapture())
    for _ in range(MIN_STEPS):
        run(cache, "old", "kept")
    for step in range(1, MAX_IDLE_STEPS + 2):
        assert cache.num_graphs == 2, step
        run(cache, "kept")
    assert cache.num_graphs == 1
    # It begins anew.
    run(cache, "old", "kept")
    assert cache.num_graphs == 1


def test_work_that_skips_some_steps_is_captured_too() -> None:
    cache = GraphCache(FakeCapture())
    for _ in range(MIN_STEPS):
        run(cache, "a")
        for _ in range(MAX_IDLE_STEPS - 1):
            run(cache)
    assert cache.num_graphs == 1


def test_a_full_cache_runs_the_rest_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    capture = FakeCapture()
    cache = GraphCache(capture)
    for _ in range(50):
        run(cache, "a", "b", "c")
    assert capture.num_captures == cache.num_graphs == 2
    for _ in range(MAX_IDLE_STEPS + 2):
        run(cache, "b", "c")
    # What idles has made room.
    assert capture.num_captures == 3
    assert cache.num_graphs == 2


def test_results_are_the_callers_own() -> None:
    cache = GraphCache(FakeCapture())
    results = []
    for step in range(6):
        cache.begin_step()
        x = torch.tensor([float(step)])
        results.append(cache.run("a", lambda x: x * 2, x))
        assert x.item() == step
    assert [result.item() for result in results] == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]


def test_a_pool_that_all_graphs_have_left_is_not_used_again() -> None:
    class Graph:
        pass

    handles = iter("abc")
    pool = SharedPool(lambda: next(handles))
    first, second = Graph(), Graph()
    assert pool.handle() == "a"
    pool.graphs.add(first)
    assert pool.handle() == "a"
    pool.graphs.add(second)
    del first
    assert pool.handle() == "a"
    del second
    assert pool.handle() == "b"


def train(optimizer: Muon, model: nn.Module, steps: range) -> list[Tensor]:
    for step in steps:
        models.set_gradients(model, 1, step)
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


def make(cache: GraphCache | None) -> tuple[nn.Module, AMO]:
    """A model on CPU with the kernels of CUDA, which take any tensors."""
    kernels = CudaKernels(torch.bfloat16, graphs=cache)
    model = models.plain_model(SHAPES)
    with mock.patch("amo_dist.engine.engine.make_kernels", return_value=kernels):
        return model, AMO(param_groups(model), lr=1e-2, config=AMOConfig(**SHORT))


def test_the_transition_captures_nothing_and_training_keeps_its_bits() -> None:
    capture = FakeCapture()
    (plain, reference), (model, optimizer) = make(None), make(GraphCache(capture))
    locked = SHORT["observe_until"] + SHORT["transition_steps"]
    train(optimizer, model, range(1, SHORT["observe_until"] + 1))
    uniform = capture.num_captures
    assert uniform > 0
    train(optimizer, model, range(SHORT["observe_until"] + 1, locked))
    assert (capture.num_captures, optimizer.phase) == (uniform, "transition")
    found = train(optimizer, model, range(locked, locked + 6))
    assert capture.num_captures > uniform
    expected = train(reference, plain, range(1, locked + 6))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_graphs_are_refused_on_cpu() -> None:
    groups = param_groups(models.plain_model(SHAPES))
    with pytest.raises(ValueError, match="cuda_graphs: found True with parameters on cpu, expecte"):
        Muon(groups, config=MuonConfig(cuda_graphs=True))
    for device in ("cpu", "meta"):
        with pytest.raises(
            ValueError, match=f"cuda_graphs: found True with parameters on {device}"
        ):
            make_kernels(
                torch.device(device), ns_dtype=torch.bfloat16, ns_backend="auto", cuda_graphs=True
            )
    with pytest.raises(ValueError, match="cuda_graphs: found 1, expected true or false"):
        MuonConfig(cuda_graphs=1)  # type: ignore[arg-type]


@pytest.mark.cuda
@pytest.mark.parametrize("backend", ["standard", "triton"])
@pytest.mark.parametrize("preconditioner", ["frobenius", "aol"])
def test_replayed_bits_are_those_of_launches(backend: str, preconditioner: str) -> None:
    if backend == "triton":
        pytest.importorskip("triton")

    def function(x: Tensor) -> Tensor:
        coefficients = compose(1e-2, 5)
        return orthogonalize(x, coefficients, preconditioner=preconditioner, backend=backend)

    cache = GraphCache()
    inputs = [torch.randn(3, m, 256, device="cuda") for m in (96, 200, 96, 200)]
    for step in range(MIN_STEPS + 3):
        cache.begin_step()
        # Two shapes in turn: graphs share their memory.
        results = [cache.run(x.shape, function, x + step) for x in inputs]
        for x, result in zip(inputs, results, strict=True):
            assert torch.equal(result, function(x + step))
    assert cache.num_graphs == 2


@pytest.mark.cuda
def test_graphs_are_captured_again_after_all_were_freed() -> None:
    # As when a transition longer than MAX_IDLE_STEPS locks.
    cache, x = GraphCache(), torch.randn(96, 256, device="cuda")
    for low in (1e-2, 1e-3):

        def function(x: Tensor, low: float = low) -> Tensor:
            return orthogonalize(x, compose(low, 5))

        for _ in range(MIN_STEPS + 1):
            cache.begin_step()
            assert torch.equal(cache.run(low, function, x), function(x))
        assert cache.num_graphs == 1
        for _ in range(MAX_IDLE_STEPS + 1):
            cache.begin_step()
        assert cache.num_graphs == 0


@pytest.mark.cuda
def test_training_with_graphs_keeps_its_bits() -> None:
    found = []
    for cuda_graphs in (False, True):
        model = models.plain_model(SHAPES).cuda()
        config = AMOConfig(**SHORT, cuda_graphs=cuda_graphs)
        optimizer = AMO(param_groups(model), lr=1e-2, config=config)
        found.append(train(optimizer, model, range(1, 20)))
        kernels = optimizer._engine.kernels
        assert isinstance(kernels, CudaKernels)
        assert kernels.graphs is None or kernels.graphs.num_graphs > 0
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
