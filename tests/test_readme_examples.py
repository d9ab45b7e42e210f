"""The pages' Python blocks run as printed, by the command in their first line.

Those of docs/recipes.md have tests of their own in test_recipes.py, those of docs/extend.md in
integration/test_extend.py.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import amo_dist
from amo_dist.schedule.plan import Plan
from tests.examples import DOCUMENTS, ROOT, assert_same, blocks, code_blocks, examples, run

PAGES = tuple(page for page in DOCUMENTS if page not in ("docs/recipes.md", "docs/extend.md"))
ANSWERS = "docs/questions.md"
"""Its blocks are lines of a loop, which run one after the other."""
EXAMPLES = {
    "fsdp2.py": "README.md",
    "single.py": "README.md",
    "ddp.py": "docs/loops.md",
    "huggingface.py": "docs/loops.md",
    "everything.py": "docs/loops.md",
    "metrics.py": "docs/loops.md",
    "three_optimizers.py": "docs/from-adamw.md",
    "rates.py": "docs/optimizers.md",
    "train.py": "docs/checkpoints.md",
    "take_over.py": "docs/checkpoints.md",
    "muonh.py": "CONTRIBUTING.md",
}
"""Each example has a test here."""


def run_example(name: str, folder: Path) -> str:
    """Write the example into ``folder``, run it, and return what it printed."""
    command, text = examples(PAGES)[name]
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    done = run(command, folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_tested_here() -> None:
    found = {name: page for page in PAGES for name in examples([page])}
    assert found == EXAMPLES
    assert sum(text.startswith("# ") for text in blocks(PAGES)) == len(found)


def test_blocks_without_a_command_run_too() -> None:
    """A pattern, and a test that CONTRIBUTING.md shows, which is defined and not called."""
    fragments = [
        text
        for text in blocks(page for page in PAGES if page != ANSWERS)
        if not text.startswith("# ")
    ]
    for text in fragments:
        exec(text, {"torch": torch, "dist": torch.distributed, "Ranks": Any})
    assert fragments


@pytest.mark.slow
@pytest.mark.parametrize(("name", "most"), [("muonh.py", 0.5), ("take_over.py", 0.95)])
def test_both_losses_fall(name: str, most: float, tmp_path: Path) -> None:
    """Of two ranks, perhaps in one line; it is about one at the start."""
    losses = [float(found) for found in re.findall(r"\d\.\d{3}", run_example(name, tmp_path))]
    assert len(losses) == 2
    assert max(losses) < most


@pytest.mark.parametrize(
    ("name", "steps"), [("fsdp2.py", "20"), pytest.param("ddp.py", "12", marks=pytest.mark.slow)]
)
def test_on_two_ranks(name: str, steps: str, tmp_path: Path) -> None:
    # Both ranks print, word by word, and may do so into one line.
    printed = run_example(name, tmp_path)
    assert printed.count(steps) == printed.count("locked") == 2, printed


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("single.py", "20 locked\n"),
        pytest.param("three_optimizers.py", "3\n", marks=pytest.mark.slow),
        pytest.param("rates.py", "3 [0.02, 0.0003]\n", marks=pytest.mark.slow),
    ],
)
def test_one_process(name: str, printed: str, tmp_path: Path) -> None:
    assert run_example(name, tmp_path) == printed


@pytest.mark.slow
def test_hugging_face(tmp_path: Path) -> None:
    printed = run_example("huggingface.py", tmp_path)
    assert printed.splitlines()[-1] == "12 locked"
    assert "lr_multiplier 0.5" in printed
    assert "weight_decay 0.0" in printed


@pytest.mark.slow
def test_everything_in_one_loop(tmp_path: Path) -> None:
    printed = run_example("everything.py", tmp_path)
    (loss,) = re.fullmatch(r"locked, lr 0e\+00, loss (\d\.\d\d)\n", printed).groups()  # type: ignore[union-attr]
    assert float(loss) < 1.9  # of 2, the variance of the difference of two unit normals


@pytest.mark.slow
def test_metrics_and_the_plan(tmp_path: Path) -> None:
    """Each metric stands in the page's table, and each row of the table is a metric."""
    printed = run_example("metrics.py", tmp_path)
    plan = Plan.from_json((tmp_path / "plan.json").read_text())
    assert printed.endswith(f"\n{plan}\n")
    found = {line.split()[0] for line in printed.removesuffix(f"{plan}\n").splitlines()}
    rows = (ROOT / "docs/loops.md").read_text().split("| metric | meaning |\n|---|---|\n")[1]
    named = re.findall(r"`([a-z_]+/[\w/]+)`", rows.split("\n\n")[0])
    assert len(named) > 8
    told = {name: re.sub("TYPE|BACKEND", r"\\w+", name) for name in named}
    assert [name for name in found if not any(re.fullmatch(t, name) for t in told.values())] == []
    assert [name for name, t in told.items() if not any(re.fullmatch(t, f) for f in found)] == []


# ---------------------------------------------------------------- short answers


def small_moe() -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    config = transformers.MixtralConfig(
        vocab_size=32, num_hidden_layers=1, num_local_experts=2, num_key_value_heads=2, **sizes
    )
    return transformers.MixtralForCausalLM(config)  # type: ignore[no-any-return]


def backward(model: torch.nn.Module, scale: float = 1.0) -> None:
    tokens = torch.arange(64).reshape(4, 16) % 32
    (model(input_ids=tokens, labels=tokens).loss * scale).backward()


def test_the_lines_of_short_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line runs as printed, and does what its answer says."""
    monkeypatch.chdir(tmp_path)
    model = small_moe()
    backward(model)
    clip, decay, router, embeddings, warm_up, fine_tune, old_gpus, matrices = code_blocks(
        (ROOT / ANSWERS).read_text(), "python"
    )
    names: dict[str, Any] = {"model": model, "torch": torch}
    names |= {name: getattr(amo_dist, name) for name in amo_dist.__all__}

    exec(clip, names)
    norms = [each.grad.norm() for each in model.parameters() if each.grad is not None]
    assert torch.stack(norms).norm() <= 1.0 + 1e-5  # float32

    exec(decay, names)
    undecayed = {
        name
        for group in names["groups"]
        for name, _ in group["params"]
        if group.get("weight_decay") == 0.0
    }
    assert "model.embed_tokens.weight" in undecayed
    assert {name for name in undecayed if "norm" in name} == {
        name for name, _ in model.named_parameters() if "norm" in name
    }

    (name,) = [name for name, _ in model.named_parameters() if name.endswith("mlp.gate.weight")]
    assert name in dict(amo_dist.param_groups(model)[1]["params"])
    exec(router, names)
    assert name in dict(names["groups"][0]["params"])

    exec(embeddings, names)
    factors = {group.get("lr_multiplier", 1.0) for group in names["groups"]}
    assert factors == {1.0, 0.1, 0.5}

    optimizer = names["optimizer"] = amo_dist.Muon(amo_dist.param_groups(model))
    for _ in range(3):
        exec(warm_up, names)
        optimizer.step()
    momenta = {group.get("momentum") for group in optimizer.param_groups}
    assert momenta == {None, 0.85 + 0.10 * min(1.0, 2 / 300)}

    exec(fine_tune, names)
    names["optimizer"].step()

    exec(old_gpus, names)
    assert names["config"].ns_dtype == "float16"
    exec(matrices, names)
    scaled = {
        name: group["lr_multiplier"]
        for group in names["groups"]
        for name, _ in group["params"]
        if "lr_multiplier" in group
    }
    assert scaled == {"lm_head.weight": 0.5}


def newest_state(folder: Path) -> Any:
    """Everything in the last checkpoint of a run of ``train.py``."""
    whole = folder / "whole.pt"
    dcp_to_torch_save(folder / "checkpoints" / "step-000024", whole)
    return torch.load(whole, weights_only=False)


@pytest.mark.slow
def test_a_run_resumes_from_its_newest_complete_checkpoint(tmp_path: Path) -> None:
    """As after a kill inside of a save; `tests.faults` kills."""
    undisturbed = run_example("train.py", tmp_path).splitlines()
    assert [line.split()[1] for line in undisturbed] == [str(step) for step in range(1, 25)]
    assert [line.split()[2] for line in undisturbed[::12]] == ["observation", "transition"]
    expected, checkpoints = newest_state(tmp_path), tmp_path / "checkpoints"
    shutil.rmtree(checkpoints / "step-000024")
    (checkpoints / "step-000018" / ".metadata").unlink()
    assert run_example("train.py", tmp_path).splitlines() == undisturbed[12:]
    assert_same(newest_state(tmp_path), expected)
