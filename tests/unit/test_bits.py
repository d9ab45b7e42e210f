"""The hashes of ``tests.bits`` tell a change of bits, and nothing else."""

from __future__ import annotations

import torch

from tests import bits


def test_one_bit_changes_the_hash_of_tensors() -> None:
    before, after = (
        torch.ones(3),
        torch.tensor([1.0, 1.0, torch.nextafter(*torch.tensor([1, 2.0]))]),
    )
    assert bits.hash_of_tensors({"x": before}) == bits.hash_of_tensors({"x": before.clone()})
    hashes = {
        bits.hash_of_tensors(tensors)
        for tensors in ({"x": before}, {"x": after}, {"y": before}, {"x": before.view(1, 3)})
    }
    assert len(hashes) == 4
