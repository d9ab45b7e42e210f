"""What is changed in torchtitan and PyTorch themselves, each with why it still has to be."""

from __future__ import annotations

import pytest
import torch
import torchtitan.distributed.parallel_dims as loaded_before
from torchtitan.tools import utils

from torchtitan_ext.plugin import machine, patches


@pytest.mark.parametrize(
    ("version", "is_old"), [("2.13.0+cpu", True), ("2.14.0a0+ecf3bae40a", False), ("2.14.1", False)]
)
def test_an_alpha_of_an_image_counts_as_its_version(version: str, is_old: bool) -> None:
    assert machine.is_old(version) == is_old


@pytest.mark.skipif(torch.accelerator.is_available(), reason="for machines without an accelerator")
def test_torchtitan_is_told_of_the_cpu_where_there_is_nothing_else() -> None:
    patches.install()
    assert utils.device_type == loaded_before.device_type == "cpu"
    module = utils.device_module
    assert module.get_device_properties(None).total_memory > 0
    assert module.memory_stats(None)["active_bytes.all.peak"] > 0
    # What torchtitan is told is not told to anybody else.
    assert torch._utils._get_available_device_type() is None
    assert torch._utils._get_device_module("cpu") is torch.cpu
    # It still asks for no device by a setting: this patch could go otherwise.
    assert utils.get_device_info()[0] == "cuda"
