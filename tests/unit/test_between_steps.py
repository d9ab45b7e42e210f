"""Parameters and state that their owner replaces, moves or reshapes between steps."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from amo_dist import AMO, AdaMuon, Muon, NorMuon
from tests import runs
from tests.distributed import models
from tests.runs import W1, WQ


def storages(tensors: list[Tensor]) -> list[object]:
    return [tensor.untyped_storage()._weak_ref() for tensor in tensors]


def num_freed(references: list[object]) -> int:
    gc.collect()
    return sum(torch.UntypedStorage._expired(reference) for reference in references)


@pytest.mark.parametrize("kind", [Muon, AMO, NorMuon, AdaMuon])
def test_what_is_replaced_is_freed_at_once(kind: type[Muon]) -> None:
    """Trainers that roll out between steps offload both; a view that is kept would free nothing."""
    model, optimizer = runs.make(kind=kind, ns_dtype="float32")
    twin, other = runs.make(kind=kind, ns_dtype="float32")
    for each in (model, twin):
        runs.train(each, optimizer if each is model else other)
        for param in each.parameters():
            param.grad = None
    values = [value for own in optimizer.state.values() for value in own.values()]
    references = storages([*values, *model.parameters()])
    del values
    for param in model.parameters():
        own = optimizer.state[param]
        for name in own:
            own[name] = own[name].clone()
        param.data = param.data.clone()
    del own, param
    assert num_freed(references) == len(references)
    assert runs.equal(runs.train(model, optimizer, 4, 5), runs.train(twin, other, 4, 5))


def test_a_transposed_weight_gets_its_update_as_it_lies() -> None:
    """Another layout of the same memory: the address alone does not tell."""
    model, optimizer = runs.make(kind=Muon, shapes={WQ: (8, 8)}, ns_dtype="float32")
    twin, other = runs.make(kind=Muon, shapes={WQ: (8, 8)}, ns_dtype="float32")
    runs.train(model, optimizer)
    runs.train(twin, other)
    weight, expected = model.get_parameter(WQ), twin.get_parameter(WQ)
    weight.data = weight.data.t()
    expected.data = expected.data.t().clone()
    assert runs.equal(runs.train(model, optimizer, 4, 5), runs.train(twin, other, 4, 5))


def cast(model: nn.Module, optimizer: Muon) -> Callable[[], object]:
    """Cast a weight; returns how it is undone."""
    weight = model.get_parameter(WQ)
    before = weight.data
    weight.data = before.double()
    return lambda: setattr(weight, "data", before)


def offload_state(model: nn.Module, optimizer: Muon) -> Callable[[], object]:
    """Move state elsewhere; returns how it is undone."""
    own = optimizer.state[model.get_parameter(WQ)]
    before = own["momentum_buffer"]
    own["momentum_buffer"] = before.to("meta")
    return lambda: own.update(momentum_buffer=before)


def reshape(model: nn.Module, optimizer: Muon) -> Callable[[], object]:
    """Give a weight another shape; returns how it is undone."""
    weight = model.get_parameter(W1)
    before = weight.data
    weight.data = before[:-1]
    return lambda: setattr(weight, "data", before)


def reshape_state(model: nn.Module, optimizer: Muon) -> Callable[[], object]:
    """Give state another shape; returns how it is undone."""
    own = optimizer.state[model.get_parameter(runs.NORM)]
    before = own["exp_avg"]
    own["exp_avg"] = before[:-1]
    return lambda: own.update(exp_avg=before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cast, f"{WQ}: found torch.float64 on cpu, expected torch.float32 on cpu"),
        (offload_state, rf"state of {WQ}.momentum_buffer: found \(12, 8\) on meta, expected"),
        (reshape, rf"{W1}: found shape \(12, 8\), expected \(13, 8\)"),
        (reshape_state, rf"state of {runs.NORM}.exp_avg: found \(7,\) on cpu, expected \(8,\)"),
    ],
)
def test_only_a_step_asks_where_they_lie(
    change: Callable[[nn.Module, Muon], Callable[[], object]], message: str
) -> None:
    model, optimizer = runs.make(kind=Muon)
    runs.train(model, optimizer)
    twin, other = copy.deepcopy((model, optimizer))
    undo = change(model, optimizer)
    optimizer.state_dict()
    models.set_gradients(model, 1, 4)
    if change is cast or change is reshape:
        for param in model.parameters():
            param.grad = None
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    undo()
    assert runs.equal(runs.train(model, optimizer, 4, 5), runs.train(twin, other, 4, 5))
