"""Parameters that are swapped after construction, and steps without gradients.

A swap before the first step is followed; what would train nothing is refused.
"""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amo_dist import AMO, AdaMuon, MissingGradientError, Muon, NorMuon
from amo_dist.engine.ballot import MAX_IDLE_STEPS
from tests import runs
from tests.distributed import models
from tests.distributed.test_ballot import DEVICES, on
from tests.runs import NORM, W1, WQ

MATRICES = f"{WQ}, {W1}, layers.1.attention.wq.weight"


# ---------------------------------------------------------------- swapped parameters


def swap_lists(optimizer: Muon, fresh: dict[Tensor, nn.Parameter]) -> None:
    for group in optimizer.param_groups:
        group["params"] = [fresh[param] for param in group["params"]]


def swap_groups(optimizer: Muon, fresh: dict[Tensor, nn.Parameter]) -> None:
    optimizer.param_groups = [
        {**group, "params": [fresh[param] for param in group["params"]]}
        for group in optimizer.param_groups
    ]


def twins(model: nn.Module) -> tuple[nn.Module, dict[Tensor, nn.Parameter]]:
    """The model with other parameters of the same values, which it is from now on."""
    fresh = {param: nn.Parameter(param.detach().clone()) for param in model.parameters()}
    return models.build({name: fresh[param] for name, param in model.named_parameters()}), fresh


@pytest.mark.parametrize("swap", [swap_lists, swap_groups])
@pytest.mark.parametrize(("kind", "steps"), [(Muon, 0), (AMO, 0), (AMO, 5)])
def test_swapped_parameters_are_trained(
    kind: type[Muon], steps: int, swap: Callable[..., None]
) -> None:
    """After so many steps, whose state is loaded into them."""
    (old, optimizer), (expected, reference) = runs.make(kind=kind), runs.make(kind=kind)
    runs.train(expected, reference, 1, steps)
    old.load_state_dict(expected.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())  # as Accelerate does before it swaps
    model, fresh = twins(old)
    swap(optimizer, fresh)
    if steps:
        optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    runs.train(model, optimizer, steps + 1, steps + 3)
    runs.train(expected, reference, steps + 1, steps + 3)
    assert runs.same(model, expected)
    assert not runs.same(model, old)
    assert set(optimizer.state) == set(model.parameters())
    assert all(param is model.get_parameter(n) for n, param in optimizer.params_by_name.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Tensor.t, r"found shape \(8, 13\), expected \(13, 8\), that of the parameter in whose"),
        (lambda param: param.to("meta"), "found a meta tensor"),
    ],
)
def test_other_parameters_cannot_take_the_place(
    change: Callable[[Tensor], Tensor], message: str
) -> None:
    model, optimizer = runs.make(kind=Muon)
    _, fresh = twins(model)
    param = model.get_parameter(W1)
    fresh[param] = nn.Parameter(change(param.detach().clone()))
    swap_lists(optimizer, fresh)
    for use in (optimizer.step, optimizer.state_dict):
        with pytest.raises(ValueError, match=f"{W1}: {message}"):
            use()
    optimizer.param_groups.pop()
    with pytest.raises(ValueError, match=r"param_groups: found \[3\]"):
        optimizer.step()


def test_a_swap_that_comes_too_late_is_refused() -> None:
    source, trained = runs.make(kind=Muon)
    runs.train(source, trained, 1, 1)
    for is_loaded in (False, True):
        old, optimizer = runs.make(kind=Muon)
        if is_loaded:
            optimizer.load_state_dict(trained.state_dict())
        else:
            runs.train(old, optimizer, 1, 1)
        model, fresh = twins(old)
        swap_lists(optimizer, fresh)
        before = runs.weights(model)
        with pytest.raises(ValueError, match=f"^{WQ}: found another tensor in param_groups"):
            runs.train(model, optimizer)
        assert runs.equal(runs.weights(model), before)


# ---------------------------------------------------------------- no gradients


def make(device: str) -> tuple[nn.Module, Any]:
    """After one step."""
    model, optimizer = runs.make(kind=Muon, device=device)
    runs.train(model, optimizer, 1, 1)
    return model, optimizer


@DEVICES
def test_parameters_replaced_after_the_first_step_are_refused(device: str) -> None:
    """The last such step keeps what AdamW trains, too, though devices tell of it a step late."""
    with on(device):
        model, optimizer = make(device)
        norms = []
        for step in range(2, MAX_IDLE_STEPS + 1 + (device == "cuda")):
            missing = frozenset(MATRICES.split(", "))  # for good: the model has other parameters
            models.set_gradients(model, 1, step, missing=missing)
            optimizer.step()
            norms.append(models.whole(model.get_parameter(NORM)))
        with pytest.raises(MissingGradientError, match=f"{MATRICES}: .* 10 such steps"):
            optimizer.step()
        norms.append(model.get_parameter(NORM))
        is_moved = [not torch.equal(*pair) for pair in itertools.pairwise(norms)]
        assert is_moved == [True] * (MAX_IDLE_STEPS - 2) + [False] * (1 + (device == "cuda"))


@DEVICES
def test_steps_before_the_first_gradient_change_nothing(device: str) -> None:
    with on(device):
        model, optimizer = runs.make(kind=Muon, device=device, ns_guard_every=0)
        before = runs.weights(model)
        for _ in range(3):
            optimizer.step()
        assert runs.equal(runs.weights(model), before)
        assert optimizer.num_steps_taken == optimizer.control_state_dict()["steps_skipped"] == 0
        runs.train(model, optimizer, 1, 1)
        assert runs.same(model, make(device)[0])


@DEVICES
def test_later_steps_without_gradients_warn_once_in_a_row(
    caplog: pytest.LogCaptureFixture, device: str
) -> None:
    with on(device):
        model, optimizer = make(device)
        for step, has in enumerate((False, False, True, False), start=2):
            models.set_gradients(model, 1, step)
            if not has:
                optimizer.zero_grad()
            optimizer.step()
        optimizer.check_last_update()  # which waits for what devices tell of the last step
    assert [record.getMessage() for record in caplog.records] == [
        f"{MATRICES}: found no gradient on any rank in step {step}: "
        "parameters and state stay as they are"
        for step in (2, 5)
    ]


def test_a_matrix_without_a_gradient_in_the_first_step_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On the simulated device, whose new memory is NaN: what it has in place is a zero update."""
    with on("cuda"):
        model, optimizer = runs.make(kind=Muon, device="cuda")
        runs.train(model, optimizer, 1, 2, missing=frozenset({W1, NORM}))
        optimizer.check_last_update()
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{W1}: found no gradient in step 1, as of a parameter")


# ---------------------------------------------------------------- replaced or moved between steps


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
