"""Runs of the debug models whose numbers are kept, to hold a later version of torchtitan against.

``python -m tests.integration.titan_golden FOLDER`` records them: ``runs.json``, and one archive for
each checkpoint of :data:`SAVED`. ``tests/golden/torchtitan_0.2.2`` says how its files were made.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.integration.titan_ranks import ROOT, Job, Run, server

GOLDEN = ROOT / "tests" / "golden" / "torchtitan_0.2.2"

STEPS = 20
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one": (1, ()),
    "fsdp2": (2, ()),
    "tp2_fsdp2": (4, ("--parallelism.tensor_parallel_degree=2",)),
    "hsdp": (4, ("--parallelism.data_parallel_replicate_degree=2",)),
}
MODELS = ("llama3", "qwen3")
NS_DTYPES = ("bfloat16", "float32")


def job(model: str, layout: str, ns_dtype: str, folder: Path) -> Job:
    """One run: AMO observes until step 8, and is locked from step 14 on.

    Its data is that of then, sequence by sequence.

    Args:
        model: One of `MODELS`.
        layout: One of `LAYOUTS`.
        ns_dtype: One of `NS_DTYPES`.
        folder: The dump folder.
    """
    world_size, degrees = LAYOUTS[layout]
    sequences = folder / "sequences.npy"
    folder.mkdir(parents=True, exist_ok=True)
    np.save(sequences, np.load(GOLDEN / "sequences.npy"))
    arguments = (
        *("--training.seq_len=64", f"--training.steps={STEPS}"),
        *("--training.global_batch_size=4", "--training.local_batch_size=1"),
        *("--optimizer.amo.observe_every=2", "--optimizer.amo.observe_until=8"),
        *("--optimizer.amo.transition_steps=6", f"--optimizer.muon.ns_dtype={ns_dtype}"),
        "--optimizer.muon.update_norm=as_is",  # that of then
        *("--checkpoint.enable", "--checkpoint.interval=4", "--checkpoint.keep_latest_k=0"),
        "--checkpoint.no-last_save_model_only",
        *degrees,
    )
    config = str(ROOT / "configs" / f"debug_{model}.toml")
    return Job(world_size, str(folder), arguments, config, sequences=str(sequences))


def summary(run: Run) -> dict[str, Any]:
    """What is kept of a run, as JSON values; floats in full."""
    records, state = run.records(), run.state(STEPS)
    (control,) = {value for key, value in state.items() if key.endswith("control")}
    return {
        "losses": [record["loss"] for record in records],
        "grad_norms": [record["grad_norm"] for record in records],
        # Of the coefficients of each step; the control state holds the plan itself.
        "schedules": [_digest(json.dumps(one["schedules"]).encode()) for one in run.traces()[0]],
        "control": control,
    }


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def main(folder: Path) -> None:
    """Record everything."""
    runs = {}
    with server() as titan, tempfile.TemporaryDirectory() as scratch:
        for model in MODELS:
            for layout in LAYOUTS:
                for ns_dtype in NS_DTYPES:
                    name = f"{model}-{layout}-{ns_dtype}"
                    run = titan.run(job(model, layout, ns_dtype, Path(scratch, name)))
                    runs[name] = summary(run)
                    print(name, runs[name]["losses"][-1], flush=True)
    lines = [f"{json.dumps(name)}: {json.dumps(run)}" for name, run in runs.items()]
    (folder / "runs.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
