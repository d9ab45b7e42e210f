"""The hooks for quack-kernels, with a stand-in of its signatures and limits. Not run on a GPU."""

from __future__ import annotations

import importlib.metadata
import logging
import sys
import types
from collections import Counter
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor

from amo_dist import Muon, MuonConfig, param_groups
from amo_dist.kernels import quack
from amo_dist.kernels.newton_schulz import TORCH, orthogonalize, step_sizes
from amo_dist.schedule.polar_express import compose
from tests.distributed import models
from tests.simulated_device import Device, simulated_device

CUDA, CPU, ROWS = torch.device("cuda", 0), torch.device("cpu"), 16


class StandIn(types.ModuleType):
    """`quack.gemm_interface` of the pinned version, with the arguments that are given here."""

    def __init__(self) -> None:
        super().__init__("quack.gemm_interface")
        self.calls: Counter[str] = Counter()

    def check(self, name: str, *tensors: Tensor | None) -> None:
        self.calls[name] += 1
        for x in tensors:
            if x is not None:
                assert x.is_cuda
                assert x.dtype in (torch.bfloat16, torch.float16)
                assert 1 in x.stride()[-2:]
                assert x.data_ptr() % 16 == 0
                assert all(size % 8 == 0 for size in x.shape[-2:])

    def gemm_symmetric(
        self, A: Tensor, B: Tensor, *, C: Tensor | None, out: Tensor, alpha: float, beta: float
    ) -> Tensor:
        self.check("gemm_symmetric", A, B, C, out)
        assert type(alpha) is type(beta) is float
        result = alpha * (A.double() @ B.double())
        result = result if C is None else result + beta * C.double()
        # The library mirrors what it computes.
        torch.testing.assert_close(result.cpu(), result.mT.cpu(), rtol=0, atol=2**-5)
        return out.copy_(result)

    def gemm_add(
        self, A: Tensor, B: Tensor, *, C: Tensor, out: Tensor, beta: float, tuned: bool
    ) -> Tensor:
        self.check("gemm_add", A, B, C, out)
        assert type(beta) is float
        assert not tuned
        return out.copy_(A.double() @ B.double() + beta * C.double())


@pytest.fixture
def device() -> Iterator[Device]:
    quack.library.cache_clear()
    with simulated_device() as device:
        yield device
    quack.library.cache_clear()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, device: Device) -> StandIn:
    interface = StandIn()
    monkeypatch.setattr(quack, "_MIN_ROWS", ROWS)
    monkeypatch.setitem(sys.modules, "quack", types.ModuleType("quack"))
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", interface)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: quack.VERSION)
    return interface


TAKEN = [(48, 16), (16, 16), (136, 400)]
REFUSED = [(8, 48), (20, 48), (16, 44)]


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("shape", [*TAKEN, *REFUSED])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_within_the_limits_are_the_librarys(
    shape: tuple[int, int], batch: tuple[int, ...], dtype: torch.dtype, installed: StandIn
) -> None:
    products = quack.library("auto", CUDA, dtype)
    assert products is quack.library("auto", CUDA, dtype) is not TORCH
    installed.calls.clear()
    x = torch.randn(*batch, *shape, generator=torch.Generator().manual_seed(0)).to("cuda")
    coefficients = tuple(compose(1.01e-2, 5))
    found = orthogonalize(x, coefficients, library=products, dtype=dtype).cpu().double()
    expected = orthogonalize(x, coefficients, dtype=dtype).cpu().double()
    # Both round every product to 16 bits, lifted by steps for 1e-2.
    error = (found - expected).norm() / expected.norm()
    assert error < (0.05 if dtype == torch.bfloat16 else 0.01)
    num_pairs = step_sizes("auto", shape, coefficients, dtype, CUDA).count(2)
    assert bool(num_pairs) is (shape == (136, 400))
    # Two symmetric products and another one a single step, and six symmetric ones a pair.
    taken = {"gemm_symmetric": 10 + 2 * num_pairs, "gemm_add": 5 - 2 * num_pairs}
    # An X of a side that 8 does not divide still has a small matrix that it does.
    small = {"gemm_symmetric": 5} if shape == (16, 44) else {}
    assert installed.calls == (taken if shape in TAKEN else small)


def test_kernels_are_compiled_before_the_first_collective(
    installed: StandIn, device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(2):
        model = models.plain_model({"layers.0.attention.wq.weight": (16, 32)}, "cuda")
        optimizer = Muon(param_groups(model), lr=0.02, config=MuonConfig(ns_guard_every=0))
    assert installed.calls["gemm_symmetric"] > 0 < installed.calls["gemm_add"]
    assert not device.collectives
    lines = [r.message for r in caplog.records if "Newton-Schulz products by" in r.message]
    assert lines == ["Newton-Schulz products by quack-kernels"]
    installed.calls.clear()
    models.set_gradients(model, 1, 1)
    optimizer.step()
    assert installed.calls["gemm_add"] == 5


@pytest.mark.parametrize(
    ("place", "dtype", "capability", "version", "cause"),
    [
        (CPU, torch.bfloat16, (9, 0), "0.6.5", "matrices on cpu, expected a CUDA device"),
        (CUDA, torch.float32, (9, 0), "0.6.5", "ns_dtype = 'float32', expected 'bfloat16' or"),
        (CUDA, torch.float16, (8, 0), "0.6.5", "compute capability 8.0, expected 9.0 or newer"),
        (CUDA, torch.float16, (9, 0), None, "no quack-kernels installed, expected the extra amo-d"),
        (CUDA, torch.float16, (12, 0), "0.7.0", "quack-kernels 0.7.0, expected 0.6.5"),
    ],
)
@pytest.mark.usefixtures("device")
def test_where_quack_cannot_run(
    place: torch.device,
    dtype: torch.dtype,
    capability: tuple[int, int],
    version: str | None,
    cause: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    missing = None if version else importlib.metadata.PackageNotFoundError
    find = mock.Mock(return_value=version, side_effect=missing)
    capable = mock.patch.object(torch.cuda, "get_device_capability", return_value=capability)
    with mock.patch.object(importlib.metadata, "version", find), capable:
        with pytest.raises(ValueError, match=f"ns_kernels: found 'quack' with {cause}"):
            quack.library("quack", place, dtype)
        assert quack.library("torch", place, dtype) is TORCH
        assert not caplog.records
        assert quack.library("auto", place, dtype) is TORCH
        # Nobody expects it elsewhere.
        assert ("products by PyTorch: " in caplog.text) == (place == CUDA)
