"""The simulated device is as strict as a real one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from amo_dist import Muon
from tests import runs
from tests.simulated_device import simulated_device


def pinned(like: Tensor) -> Tensor:
    return torch.empty_like(like, device="cpu", pin_memory=True)


def read(x: Tensor) -> list[float]:
    """At once behind the copy: nothing is left for the device to do meanwhile."""
    landing, event = pinned(x), torch.cuda.Event()
    landing.copy_(x, non_blocking=True)
    event.record()
    event.synchronize()
    return landing.tolist()


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.tolist(),
        lambda x: bool(x.any()),
        lambda x: x.cpu(),
        lambda x: torch.zeros(3).copy_(x, non_blocking=True),
        lambda x: x.copy_(torch.zeros(3), non_blocking=True),
        lambda x: torch._foreach_copy_([torch.zeros(3)], [x]),
        lambda x: torch.tensor([1.0], device=x.device),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.equal(x, x),
        lambda x: torch.linalg.svdvals(x.outer(x)),
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.current_stream().synchronize(),
        read,
    ],
)
def test_each_wait_is_counted_with_its_line(wait: Callable[[Tensor], Any]) -> None:
    with simulated_device() as device:
        x = torch.ones(3, device="cuda")
        wait(x)
    (where,) = device.waits
    assert " at unit/test_simulated_device.py:" in where
    assert device.waits.total() == 1


def test_what_waits_for_nothing_is_not_counted() -> None:
    with simulated_device() as device:
        x = torch.ones(3, device="cuda")
        x.mul_(2.0).add_(x)
        x[1:].fill_(1.0)
        x.add_(torch.tensor(1.0))  # a number of the host goes along as an argument
        torch.where(x > 0, x, 0.0).copy_(x)
        x.copy_(torch.zeros(3).pin_memory(), non_blocking=True)
        x.to("cuda").index_copy_(0, torch.zeros(1, dtype=torch.int64, device="cuda"), x[:1].clone())
    assert device.waits == {}
    assert device.operations["mul_"] == 1


@pytest.mark.parametrize(
    "mix",
    [
        lambda x, y: x + y,
        lambda x, y: torch.cat([x, y]),
        lambda x, y: torch._foreach_add_([x], [y]),
        lambda x, y: x.index_copy_(0, y.long(), x),
    ],
)
def test_two_devices_do_not_mix(mix: Callable[[Tensor, Tensor], Any]) -> None:
    with simulated_device():
        x, y = torch.ones(3, device="cuda"), torch.ones(3)
        with pytest.raises(RuntimeError, match="two devices, cuda:0 and cpu"):
            mix(x, y)


def test_a_copy_lands_when_its_event_is_synchronized() -> None:
    with simulated_device() as device:
        x, events = torch.ones(2, device="cuda"), [torch.cuda.Event() for _ in range(2)]
        landing = pinned(x)
        for event in events:
            landing.copy_(x, non_blocking=True)
            event.record()
            x.mul_(2.0)  # behind the copy
        assert landing.isnan().all()
        events[0].synchronize()
        assert landing.isnan().all()  # used again, it has lost its first values
        events[1].synchronize()
        assert landing.tolist() == [2.0, 2.0]
        later = x.to("cpu", non_blocking=True)
        events[1].synchronize()
        assert later.isnan().all()
        assert not device.waits
        torch.cuda.synchronize()
        assert later.tolist() == [4.0, 4.0]


def test_new_memory_holds_no_useful_number() -> None:
    with simulated_device():
        assert torch.empty(3, device="cuda").cpu().isnan().all()
        wire = torch.empty(8, dtype=torch.uint8, device="cuda")
        assert wire.view(torch.bfloat16).cpu().isnan().all()


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_rate_on_the_device_and_no_momentum_train_as_on_the_cpu(
    momentum: float, nesterov: bool
) -> None:
    def run(place: str) -> dict[str, Tensor]:
        fields = {"momentum": momentum, "nesterov": nesterov, "ns_dtype": "float32"}
        model, optimizer = runs.make(kind=Muon, device=place, **fields)
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(1e-2, device=place)
        return {name: param.cpu() for name, param in runs.train(model, optimizer, 1, 3).items()}

    expected = run("cpu")
    with simulated_device():
        weights = run("cuda")
    for name, param in weights.items():
        # As above, of three steps.
        torch.testing.assert_close(param, expected[name], rtol=1e-5, atol=1e-6)
