"""Parameters and state that their owner replaces, moves or reshapes between steps."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from amo_dist import AMO, AdaMuon, Muon, NorMuon
from tests import runs
from tests.runs import NORM, W1, WQ


@pytest.mark.parametrize("kind", [Muon, AMO, NorMuon, AdaMuon])
def test_what_is_replaced_is_freed_at_once(kind: type[Muon]) -> None:
    """Trainers that roll out between steps offload both; a view that is kept would free nothing."""
    make = partial(runs.make, kind=kind, ns_dtype="float32")
    model, optimizer = make()
    runs.train(model, optimizer)
    twin, other = runs.resume(model, optimizer, make)
    model.zero_grad()
    held = [*model.parameters(), *(x for own in optimizer.state.values() for x in own.values())]
    references = [tensor.untyped_storage()._weak_ref() for tensor in held]
    del held
    for param in model.parameters():
        own = optimizer.state[param]
        for name in own:
            own[name] = own[name].clone()
        param.data = param.data.clone()
    del own, param
    gc.collect()
    assert all(map(torch.UntypedStorage._expired, references))
    assert runs.equal(runs.train(model, optimizer, 4, 5), runs.train(twin, other, 4, 5))


def test_a_transposed_weight_gets_its_update_as_it_lies() -> None:
    """Another layout of the same memory: the address alone does not tell."""
    make = partial(runs.make, kind=Muon, shapes={WQ: (8, 8)}, ns_dtype="float32")
    model, optimizer = make()
    runs.train(model, optimizer)
    twin, other = runs.resume(model, optimizer, make)
    weight, expected = model.get_parameter(WQ), twin.get_parameter(WQ)
    weight.data = weight.data.t()
    expected.data = expected.data.t().clone()
    assert runs.equal(runs.train(model, optimizer, 4, 5), runs.train(twin, other, 4, 5))


F32 = "torch.float32"


@pytest.mark.parametrize(
    ("name", "key", "change", "message"),
    [
        (WQ, "", Tensor.double, rf"found torch.float64 \(12, 8\) on cpu, expected {F32}"),
        (W1, "", lambda x: x[:-1], rf"found {F32} \(12, 8\) on cpu, expected {F32} \(13, 8\)"),
        (
            WQ,
            "momentum_buffer",
            lambda x: x.to("meta"),
            r"found torch.float32 \(12, 8\) on meta, expected",
        ),
        (
            NORM,
            "exp_avg",
            lambda x: x[:-1],
            r"found torch.float32 \(7,\) on cpu, expected torch.float32 \(8,\)",
        ),
    ],
)
def test_only_a_step_asks_where_they_lie(
    name: str, key: str, change: Callable[[Tensor], Tensor], message: str
) -> None:
    """Of a weight, or of the state under a key."""
    model, optimizer = runs.make(kind=Muon)
    runs.train(model, optimizer)
    weight = model.get_parameter(name)
    own, place = optimizer.state[weight], f"state of {name}.{key}" if key else name
    if key:
        own[key] = change(own[key])
    else:
        weight.grad = None  # that of before has another shape or dtype
        weight.data = change(weight.data)
    optimizer.state_dict()
    with pytest.raises(ValueError, match=f"{place}: {message}"):
        optimizer.step()
