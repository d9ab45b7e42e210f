"""Validation on packed tokens, beside training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.titan_ranks import Job, Server
from tests.titan.data_corpus import write_packed
from torchtitan_ext.runs.run_files import read_metrics

pytestmark = pytest.mark.slow


def test_validation_reads_all_and_leaves_training_alone(titan: Server, tmp_path: Path) -> None:
    files = sorted(Path(json.__file__).parents[1].glob("*.py"))[:7]  # of the standard library
    library = [file.read_text(errors="ignore")[: 700 * (i + 1)] for i, file in enumerate(files)]
    held_out = write_packed(tmp_path / "packed", [library[:3], library[3:]])
    plain = ("--training.steps=16", "--training.global_batch_size=4")
    validating = (
        "--validator.enable",
        "--validator.freq=8",
        "--validator.steps=-1",
        "--validator.dataloader.dataset=packed",
        f"--validator.dataloader.dataset_path={held_out}",
    )
    batch = "--training.local_batch_size=2"
    unseen = titan.run(Job(2, str(tmp_path / "plain"), (*plain, batch)))
    found: dict[int, list[tuple[int, float]]] = {}
    for world in (1, 2):
        folder = tmp_path / str(world)
        batch = f"--training.local_batch_size={4 // world}"
        run = titan.run(Job(world, str(folder), (*plain, *validating, batch)))
        found[world] = read_metrics(folder).validations
        assert f"validation loss after step 16: {found[world][-1][1]:.4f}" in run.output()
    assert run.losses() == unseen.losses()
    assert [step for step, _ in found[2]] == [1, 8, 16]
    losses = [loss for _, loss in found[2]]
    assert losses == sorted(losses, reverse=True)
    # Of the same sequences; models trained in another order of additions differ a little, by 1.1e-4
    # at most where it was seen.
    assert losses == pytest.approx([loss for _, loss in found[1]], rel=1e-3)
