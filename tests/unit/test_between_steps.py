"""Parameters and state that their owner replaces, moves or reshapes between steps."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch

from amo_dist import AMO, AdaMuon, Muon, NorMuon
from tests import runs
from tests.runs import WQ


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
