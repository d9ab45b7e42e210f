"""Recipes for trainers run as printed in docs/recipes.md, and resume to the last bit.

Each is skipped where its trainer is not installed: ``pip install -e '.[recipes]'``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples import ROOT, assert_same, blocks, examples, run, whole

PAGE = "docs/recipes.md"
STEPS = 12
MODEL, OPTIMIZER = "model.safetensors", "optimizer.pt"

# What of the last checkpoint is compared, and the packages that the recipe needs.
SAVED: dict[str, tuple[str, ...]] = {
    "ddp.py": ("ddp.pt",),
    "accelerate_ddp.py": (f"accelerate_ddp_saved/{MODEL}", "accelerate_ddp_saved/optimizer.bin"),
    "accelerate_fsdp2.py": (
        "accelerate_fsdp2_saved/pytorch_model_fsdp_0",
        "accelerate_fsdp2_saved/optimizer_0",
    ),
    "trainer.py": (MODEL, OPTIMIZER, "scheduler.pt"),
    "peft_lora.py": ("adapter_model.safetensors", OPTIMIZER, "scheduler.pt"),
    "lightning_ddp.py": ("lightning_ddp_saved/last.ckpt",),
    "lightning_fsdp2.py": ("lightning_fsdp2_saved/last.ckpt",),
    "fabric_ddp.py": ("fabric_ddp_saved",),
    "fabric_fsdp2.py": ("fabric_fsdp2_saved",),
}
NEEDS = ("accelerate", "lightning", "peft", "transformers")
"""The extra ``recipes``; the loop under DDP needs the last alone."""
TRAINERS = ("trainer.py", "peft_lora.py")
"""They keep a checkpoint of every epoch, in a folder of its own."""
ON_TWO_RANKS = ["torchrun", "--standalone", "--nproc-per-node", "2"]


def losses(printed: str) -> list[float]:
    """Of one rank or one voice, in order."""
    if "{'loss'" in printed:
        return [float(found) for found in re.findall(r"\{'loss': '([\d.]+)'", printed)]
    return [float(found) for found in re.findall(r"^\d+ \w+ (\d\.\d+)$", printed, re.MULTILINE)]


def phases(printed: str) -> list[tuple[str, str]]:
    """Each step with its phase; of `Trainer` the last one alone."""
    return re.findall(r"(\d+) (observation|transition|locked)", printed)


def prepare(name: str, folder: Path) -> list[str]:
    """Write a recipe into a folder, and return its command without the number of epochs."""
    for package in NEEDS[-1:] if name == "ddp.py" else NEEDS:
        pytest.importorskip(package)
    folder.mkdir()
    (small,) = [text for text in blocks([PAGE]) if "epochs = int(sys.argv[1])" in text]
    (folder / "small.py").write_text(small)
    command, text = examples([PAGE])[name]
    (folder / name).write_text(text)
    assert command[-2:] == [name, "2"]
    return command[:-1]


def train(command: list[str], folder: Path, epochs: int) -> str:
    """What the command prints. Its trainer may warn, but of nothing in `amo_dist`."""
    done = run([*command, str(epochs)], folder, warnings="default")
    assert done.returncode == 0, done.stderr
    assert not re.search(r"amo_dist/\S+\.py:\d+: \w*Warning", done.stderr), done.stderr
    return done.stdout


def saved(path: Path, scratch: Path) -> Any:
    """A checkpoint: a folder of torch.distributed.checkpoint, safetensors, or a file of torch."""
    if path.is_dir():
        return whole(path, scratch)
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    state = torch.load(path, weights_only=False)
    if path.suffix == ".ckpt":  # whose callbacks hold paths
        return {key: state[key] for key in ("state_dict", "optimizer_states")}
    return state


def test_every_recipe_is_tested_here() -> None:
    assert set(examples([PAGE])) == set(SAVED)
    assert len(blocks([PAGE])) == len(SAVED) + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "prefix"), [*((name, []) for name in SAVED), ("trainer.py", ON_TWO_RANKS)]
)
def test_a_recipe_resumes_to_the_last_bit(name: str, prefix: list[str], tmp_path: Path) -> None:
    """Trains without an interruption and with one, and compares all that the two leave."""
    interrupted, straight = tmp_path / "interrupted", tmp_path / "straight"
    command, _ = [prepare(name, folder) for folder in (interrupted, straight)]
    if prefix:
        command = [*prefix, name]
        assert " ".join([*command, "2"]) in (ROOT / PAGE).read_text()
    undisturbed = train(command, straight, 2)
    expected = losses(undisturbed)
    # Both ranks print under the Trainer.
    assert len(expected) in (STEPS, 2 * STEPS) if name in TRAINERS else len(expected) == STEPS
    assert phases(undisturbed)[-1] == (str(STEPS), "locked")
    # From a guess among 64 tokens, ln(64) = 4.16: anything that learns gets below it.
    assert expected[-1] < expected[0] - 0.2

    # A run of one epoch, and then of two: what the page says of a larger number.
    half = len(expected) // 2
    assert losses(train(command, interrupted, 1)) == expected[:half]
    resumed = train(command, interrupted, 2)
    assert losses(resumed) == expected[half:]
    assert phases(resumed)[-1] == (str(STEPS), "locked")
    folder = f"{name.removesuffix('.py')}_saved"
    kept = Path(folder, f"checkpoint-{STEPS}") if name in TRAINERS else Path()
    for path in SAVED[name]:
        states = [saved(each / kept / path, each / "whole.pt") for each in (interrupted, straight)]
        assert_same(*states, where=path)
