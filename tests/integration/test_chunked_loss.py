"""Training with the logits of a part of each sequence at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.titan_ranks import Job, Server

pytestmark = pytest.mark.slow


def test_parts_train_as_the_whole(titan: Server, tmp_path: Path) -> None:
    arguments = (
        "--model.name=qwen3",  # whose head is tied to its embedding
        "--optimizer.name=Muon",
        "--training.steps=5",
        "--training.global_batch_size=4",
        "--training.local_batch_size=2",
        "--validator.enable",
        "--validator.dataloader.dataset=stdlib",
        "--validator.steps=1",
    )
    runs = []
    for num_chunks in (1, 4):
        folder = str(tmp_path / str(num_chunks))
        more = (*arguments, f"--loss.num_chunks={num_chunks}")
        runs.append(titan.run(Job(2, folder, more)))
    whole, parts = runs
    assert parts.losses() == pytest.approx(whole.losses(), abs=1e-4)
    norms = [[record["grad_norm"] for record in run.records()] for run in runs]
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)
