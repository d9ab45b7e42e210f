"""The hashes of ``tests.bits`` tell a change of bits, and nothing else."""

from __future__ import annotations

import torch

from tests.bits import digest


def test_one_bit_changes_the_hash_of_tensors() -> None:
    ones = torch.ones(3)
    after = torch.tensor([1.0, 1.0, torch.nextafter(*torch.tensor([1, 2.0]))])
    assert digest({"x": ones}) == digest({"x": ones.clone()})
    others = ({"x": ones}, {"x": after}, {"y": ones}, {"x": ones.view(1, 3)})
    assert len({digest(tensors) for tensors in others}) == 4
