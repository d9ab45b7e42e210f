"""Queries, keys and values in one matrix multiplication: the same run as with three."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.integration.test_titan_layouts import PHASES, assert_same_losses, assert_trained, degrees
from tests.integration.titan_ranks import Job, Server

pytestmark = pytest.mark.slow

FUSED = "--model.fuse_qkv"
SAVED = ("--checkpoint.enable", "--checkpoint.interval=5", "--checkpoint.no-last_save_model_only")


@pytest.mark.parametrize("options", [(), degrees(tp=2, shard=1)], ids=["FSDP2", "TP2"])
def test_fused_trains_as_three(titan: Server, tmp_path: Path, options: tuple[str, ...]) -> None:
    apart, fused = (
        titan.run(Job(2, str(tmp_path / name), (*options, *extra)))
        for name, extra in (("apart", ()), ("fused", (FUSED,)))
    )
    assert_trained(fused, PHASES)
    assert_same_losses(fused, apart)


def test_fused_resumes(titan: Server, tmp_path: Path) -> None:
    """Its model is saved as three matrices, and its optimizer's state as one tensor."""
    job = Job(2, str(tmp_path), (FUSED, *SAVED))
    whole = titan.run(job).losses()
    shutil.rmtree(tmp_path / "checkpoint" / "step-10")
    resumed = titan.run(job)
    assert "resumes at step 6" in resumed.output()
    assert resumed.losses() == whole
