"""Printed commands in fresh processes: no patch, no setting of a test.

Those for a cluster or for GPUs run dry: their configs are read, checked and laid out as printed.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from torchtitan.config.manager import ConfigManager
from torchtitan.config.override import apply_overrides

from tests.integration.image import checkout
from tests.integration.processes import PLAIN, ROOT, TRAIN, Command
from tests.integration.titan_ranks import Run
from tests.printed import commands_of_pages, need, printed_commands
from tests.titan.data_corpus import bpe_folder, write_jsonl
from torchtitan_ext.cli import build_parser, main
from torchtitan_ext.plugin import machine
from torchtitan_ext.tools.export import find_source

pytestmark = pytest.mark.slow

PAGES = ("docs/torchtitan.md", "launch/README.md", "configs/README.md")


def printed(text: str, page: str = "docs/torchtitan.md") -> list[str]:
    """The words of the one printed command of a page that holds a text."""
    commands = {shlex.join(words): words for words in printed_commands((ROOT / page).read_text())}
    (words,) = [words for command, words in commands.items() if text in command]
    return words


def start(words: list[str], folder: Path) -> Command:
    return Command(words, folder, PLAIN)


@pytest.fixture
def torchtitans(tmp_path: Path) -> Path:
    """What torchtitan's checkout holds of data: a tokenizer, and rows of text."""
    assets = tmp_path / "tests" / "assets"
    shutil.copytree(bpe_folder(), assets / "tokenizer")
    (assets / "c4_test").mkdir()
    texts = [Path(file).read_text() for file in (json.__file__, subprocess.__file__)]
    write_jsonl(assets / "c4_test" / "data.json", [{"text": text} for text in texts])
    return tmp_path


def test_a_stock_config_trains_on_cpus_stops_and_goes_on(torchtitans: Path) -> None:
    words, run = printed("--config llama3.llama3_debugmodel"), Run(torchtitans / "outputs", 2)
    command = start(words, torchtitans)
    command.wait_until(lambda: 2 in run.losses())  # before the end of a step nothing is saved
    command.stop(signal.SIGTERM, 1)  # torchrun passes it on; success would be a finished run
    (stopped,) = run.complete()
    assert stopped == max(run.losses()) < 10, command.output()[-4000:]

    output = start(words, torchtitans).end()
    assert [*run.losses()] == [*range(1, 11)]
    assert f"training resumes at step {stopped + 1} of 10" in output
    source = find_source(run.folder / "checkpoint" / "step-10")
    assert (source.model.name, source.model.flavor) == ("llama3", "debugmodel")
    assert source.tokenizer.kind == "hf"


def test_a_toml_file_trains_alike_through_all_doors(tmp_path: Path) -> None:
    losses = []
    for door in ("amo train configs/debug", "-m torchtitan_ext.train", "--config debug_llama3"):
        folder = tmp_path / str(len(losses))
        folder.mkdir()
        (folder / "configs").symlink_to(ROOT / "configs")
        words = [*printed(door), "--optimizer.lr=2e-3"]  # the rate of the first command
        Command(words, folder).end()
        losses.append(Run(folder / "outputs" / "debug_llama3", 2).losses())
    assert max(losses[0]) == 20
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize("page", ["docs/torchtitan.md", "launch/README.md"])
def test_the_preflight_predicts_a_run_without_its_data(tmp_path: Path, page: str) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    start(printed("amo preflight configs/", page), tmp_path).end()


def test_the_doctor_probes_this_machine(tmp_path: Path) -> None:
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    (tmp_path / "outputs").mkdir()
    output = start(printed("doctor.sh --probe", "launch/README.md"), tmp_path).end()
    assert "ok   network: " in output
    assert "ok   disk: " in output


# ------------------------------------------------------------------ as printed

ELSEWHERE = {
    ".*(llama3_debugmodel|debug_llama3|--dry-run|doctor.sh --probe)": "tests above",
    ".*(mixer.toml|experiment.small)": "tests/integration/test_extend.py",
    ".*(trainer.py|test_recipes.py)": "tests/test_recipes.py",
    "python -m amo_dist plan": "a name without its options; tests/unit/test_cli_plan.py",
    "python -m benchmarks.amo_paper": "likewise; benchmarks/amo_paper/tests",
}
"""Where a command runs that is not run below, by a pattern of it."""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone with a finished run of the quickstart, which is shorter than the script's."""
    folder = checkout(tmp_path_factory.mktemp("clone"))
    short = ["observe_until=4", "observe_every=2", "transition_steps=3"]
    options = ["--training.steps=10", *(f"--optimizer.amo.{each}" for each in short)]
    Command([*TRAIN, "configs/quickstart.toml", *options], folder).end()
    return folder


@pytest.mark.parametrize(
    "command",
    [c for c in commands_of_pages() if not need(c) and not any(re.match(p, c) for p in ELSEWHERE)],
)
def test_a_command_runs_as_printed(command: str, clone: Path) -> None:
    environment = {**PLAIN, "PYTHONPATH": str(clone), "OMP_NUM_THREADS": "1"}
    Command(shlex.split(command), clone, environment).end()


# ------------------------------------------------------------------ dry runs


def cluster_starts() -> dict[str, tuple[list[str], int]]:
    """Arguments of `amo train` and number of nodes, by the printed command for a cluster."""
    starts = {}
    for page in PAGES:
        for words in printed_commands((ROOT / page).read_text()):
            nodes = next((int(word[8:]) for word in words if word.startswith("--nodes=")), 1)
            if "launch/train.slurm" in words:
                arguments = words[words.index("launch/train.slurm") + 1 :]
            elif words[:2] == ["amo", "train"] and {"--nodes", "--restarts"} & {*words}:
                arguments = words[2:]
            else:
                continue
            if arguments[0] != "FILE.toml":
                starts[shlex.join(words)] = arguments, nodes
    return starts


@pytest.mark.parametrize("command", cluster_starts())
def test_the_config_of_a_start_on_a_cluster_is_in_order(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    arguments, nodes = cluster_starts()[command]
    args, overrides = build_parser().parse_known_args(["train", *arguments])
    world = str(8 * (args.nodes or nodes))
    assert main(["preflight", args.config, "--world", world, *overrides]) == 0


def test_one_option_turns_amo_on_in_a_large_config() -> None:
    words = printed("--config llama3_8b")
    options = words[words.index("torchtitan.train") + 1 :]
    if machine.IS_OLD:  # the page names this option
        options += ["--parallelism.spmd_backend", "partial_dtensor"]
    config = ConfigManager().parse_args(options)
    apply_overrides(config.override, config)
    section: Any = config.optimizer
    assert (section.name, section.lr) == ("AMO", 1e-3)
    assert config.training.disable_cuda_graphs
