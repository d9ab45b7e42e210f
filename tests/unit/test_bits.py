"""The hashes of ``tests.bits`` tell a change of bits, and nothing else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
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


CONTROL: dict[str, Any] = {
    "steps_taken": 4,
    "config": {"plan": "not hashed"},
    "policy": {
        "observations": [{"step": 2, "ell": {"attn_q": "0x1.0p-3"}, "num_sampled": {}}],
        "plan": None,
    },
}
CONTROL["policy"]["observations"][0]["num_invalid"] = {}


def test_a_new_field_and_another_way_to_write_a_float_leave_the_hash_of_control() -> None:
    grown = copy.deepcopy(CONTROL)
    grown["new"] = grown["policy"]["observations"][0]["new"] = 1
    grown["policy"]["observations"][0]["ell"]["attn_q"] = 0.125
    assert bits.hash_of_control(grown) == bits.hash_of_control(CONTROL)


def test_compare_names_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    found = {"a": {"control": "1"}, "b": {"control": "2"}}
    assert bits.compare(found, found) == 0
    assert bits.compare({"a": {"control": "1"}}, found) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "b: control differs"
