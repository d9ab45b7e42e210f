"""Commands of docs/torchtitan.md as printed, in fresh processes: no patch, no setting of a test.

Those of the section for a cluster, and the one for eight GPUs, need what they name.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from torchtitan_ext.runs.run_files import complete_steps
from torchtitan_ext.tools.export import find_source

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "torchtitan.md").read_text()


def printed(start: str) -> list[str]:
    """The words of the one printed command that holds a text."""
    blocks = re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    (line,) = [line for line in lines if start in line]
    return shlex.split(line, comments=True)


def launch(words: list[str], folder: Path) -> subprocess.Popen[str]:
    # The machine's own environment, but for the coverage and warnings of pytest.
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    environment.pop("PYTHONWARNINGS", None)
    with (folder / "output.txt").open("a") as output:
        return subprocess.Popen(
            words, cwd=folder, env=environment, stdout=output, stderr=output, text=True
        )


def steps(folder: Path) -> list[int]:
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line)["step"] for line in lines]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What torchtitan's checkout holds of data: a tokenizer, and rows of text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [Path(file).read_text() for file in (json.__file__, subprocess.__file__)]
    tokenizer.train_from_iterator(texts, trainer)
    assets = tmp_path / "tests" / "assets"
    (assets / "tokenizer").mkdir(parents=True)
    (assets / "c4_test").mkdir()
    tokenizer.save(str(assets / "tokenizer" / "tokenizer.json"))
    names = dict(zip(("bos_token", "eos_token"), special, strict=True))
    (assets / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(names))
    rows = (json.dumps({"text": text}) + "\n" for text in texts)
    (assets / "c4_test" / "data.json").write_text("".join(rows))
    return tmp_path


def test_a_stock_config_trains_on_cpus_stops_and_goes_on(checkout: Path) -> None:
    words, run = printed("--config llama3.llama3_debugmodel"), checkout / "outputs"
    process = launch(words, checkout)
    try:
        while not steps(run) and process.poll() is None:
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)  # torchrun passes it on
        process.wait(timeout=120)
    finally:
        process.kill()
    output = checkout / "output.txt"
    (stopped,) = complete_steps(run / "checkpoint")
    assert stopped == steps(run)[-1] < 10, output.read_text()[-4000:]

    assert launch(words, checkout).wait(timeout=400) == 0, output.read_text()[-4000:]
    assert steps(run) == [*range(1, 11)]
    assert f"training resumes at step {stopped + 1} of 10" in output.read_text()
    source = find_source(run / "checkpoint" / "step-10")
    assert (source.name, source.flavor, source.tokenizer) == ("llama3", "debugmodel", "hf")


@pytest.mark.parametrize(
    "start", ["amo train configs/debug_llama3", "-m torchtitan_ext.train", "--config debug_llama3"]
)
def test_a_toml_file_trains(tmp_path: Path, start: str) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    process = launch(printed(start), tmp_path)
    assert process.wait(timeout=400) == 0, (tmp_path / "output.txt").read_text()[-4000:]
    assert steps(tmp_path / "outputs" / "debug_llama3")[-1] == 20
