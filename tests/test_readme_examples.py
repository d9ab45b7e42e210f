"""The pages' Python blocks run as printed, by the command in their first line.

Those of docs/recipes.md have tests of their own in test_recipes.py, those of docs/extend.md in
integration/test_extend.py.
"""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import amo_dist
from amo_dist.schedule.plan import Plan
from tests.examples import DOCUMENTS, ROOT, assert_same, blocks, code_blocks, examples, run, whole

PAGES = tuple(page for page in DOCUMENTS if page not in ("docs/recipes.md", "docs/extend.md"))
ANSWERS = "docs/questions.md"
"""Its blocks are lines of a loop, which run one after the other."""


def on_both_ranks(text: str, *words: str) -> bool:
    """Whether both ranks print the words; they may do so word by word into one line."""
    return all(text.count(word) == 2 for word in words)


def losses_below(most: float, text: str) -> bool:
    losses = [float(loss) for loss in re.findall(r"\d\.\d{3}", text)]
    return len(losses) == 2 and max(losses) < most


# Losses that an example of docs/layouts.md prints: how many, and that of one process.
LAYOUTS = dict.fromkeys(("shard.py", "replicate.py"), (2, 1.925))
LAYOUTS |= {**dict.fromkeys(("hybrid.py", "tensor.py"), (4, 1.925)), "stages.py": (1, 1.925)}
LAYOUTS["experts.py"] = 4, 2.104


def as_in_one_process(count: int, expected: float, text: str) -> bool:
    """Gradients sum in another order: 1e-3 is far above their rounding, the loss falls by 0.07."""
    losses = [float(loss) for loss in re.findall(r"\d\.\d{4}", text)]
    return losses == pytest.approx([expected] * count, abs=1e-3)


CHECKS: dict[str, Callable[[str], bool]] = {
    "single.py": lambda text: text == "20 locked\n",
    "fsdp2.py": lambda text: on_both_ranks(text, "20", "locked"),
    "ddp.py": lambda text: on_both_ranks(text, "12", "locked"),
    "three_optimizers.py": lambda text: text == "3\n",
    "by_group.py": lambda text: text == "3 [(0.8, 0.95), (0.8, 0.96), (0.8, 0.995), (0.9, 0.95)]\n",
    "rates.py": lambda text: text == "3 [0.02, 0.0003]\n",
    "huggingface.py": lambda text: (
        text.endswith("\n12 locked\n") and "muon_lr_factor 0.5" in text and "decay 0.0" in text
    ),
    **{name: functools.partial(as_in_one_process, *own) for name, own in LAYOUTS.items()},
    # Losses of two ranks, perhaps in one line; they are about 1 at the start.
    "muonh.py": lambda text: losses_below(0.5, text),
    "take_over.py": lambda text: losses_below(0.95, text),
}
"""Whether an example, by its file, has printed what it should."""


def run_example(name: str, folder: Path) -> str:
    """Write the example into ``folder``, run it, and return what it printed."""
    command, text = examples(PAGES)[name]
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    done = run(command, folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_tested_here() -> None:
    found = [name for page in PAGES for name in examples([page])]
    assert sorted(found) == sorted([*CHECKS, "everything.py", "metrics.py", "train.py"])
    assert sum(text.startswith("# ") for text in blocks(PAGES)) == len(found)


def test_blocks_without_a_command_run_too() -> None:
    """As printed; the test that CONTRIBUTING.md shows is defined and not called."""
    in_a_test = {"torch": torch, "dist": torch.distributed, "Ranks": Any}
    for page in PAGES:
        fragments = [text for text in blocks([page]) if not text.startswith("# ")]
        for text in fragments if page != ANSWERS else ():
            exec(text, dict(in_a_test) if page == "CONTRIBUTING.md" else {})
        assert fragments or page != "README.md"


@pytest.mark.parametrize(
    "name",
    ["single.py", "fsdp2.py", *(pytest.param(n, marks=pytest.mark.slow) for n in [*CHECKS][2:])],
)
def test_an_example_prints_what_it_should(name: str, tmp_path: Path) -> None:
    printed = run_example(name, tmp_path)
    assert CHECKS[name](printed), printed


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


def test_the_lines_of_short_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line runs as printed, one after the other; patterns that match no name are errors."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    config = transformers.MixtralConfig(
        vocab_size=32, num_hidden_layers=1, num_local_experts=2, num_key_value_heads=2, **sizes
    )
    model = transformers.MixtralForCausalLM(config)
    tokens = torch.arange(64).reshape(4, 16) % 32
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer = amo_dist.Muon(amo_dist.param_groups(model))
    names: dict[str, Any] = {"model": model, "optimizer": optimizer, "torch": torch}
    names |= {name: getattr(amo_dist, name) for name in amo_dist.__all__}
    for text in code_blocks((ROOT / ANSWERS).read_text(), "python"):
        exec(text, names)
        names["optimizer"].step()
    assert names["config"].ns_dtype == "float16"


@pytest.mark.slow
def test_a_run_resumes_from_its_newest_complete_checkpoint(tmp_path: Path) -> None:
    """As after a kill inside of a save; `tests.faults` kills."""
    undisturbed = run_example("train.py", tmp_path).splitlines()
    assert [line.split()[1] for line in undisturbed] == [str(step) for step in range(1, 25)]
    assert [line.split()[2] for line in undisturbed[::12]] == ["observation", "transition"]
    checkpoints, scratch = tmp_path / "checkpoints", tmp_path / "whole.pt"
    last = checkpoints / "step-000024"
    expected = whole(last, scratch)
    shutil.rmtree(last)
    (checkpoints / "step-000018" / ".metadata").unlink()
    assert run_example("train.py", tmp_path).splitlines() == undisturbed[12:]
    assert_same(whole(last, scratch), expected)
