"""Commands that the pages print, and what those need that no test runs."""

from __future__ import annotations

import re
import shlex

from tests.examples import DOCUMENTS, ROOT, code_blocks


def prose(text: str) -> str:
    """A document without its blocks of code."""
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)


def printed_commands(text: str) -> list[list[str]]:
    """The words of each command in a document's shell blocks, and of those in its sentences."""
    blocks = code_blocks(text, "(?:bash|sh)")
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    sentences = re.sub(r"^\|.*?$", "", prose(text), flags=re.MULTILINE)
    quoted = [each for each in re.findall(r"`([^`]+)`", sentences) if "<" not in each]
    lines += [" ".join(each.split()) for each in quoted if re.match(PROGRAMS, each)]
    words = [shlex.split(line, comments=True) for line in lines]
    return [line for line in words if line]


PROGRAMS = r"(?:amo|python|torchrun|pip|(?:\./)?launch/[\w.]+|bash|sbatch) (?!\.\.\.)"

NEEDS = {
    r"hf |.* hf://|export HF_TOKEN": "the Hugging Face hub",
    r"export WANDB|.*enable_wandb": "W&B's server",
    r"sbatch|salloc": "a cluster with Slurm; stand-ins in `tests/integration/test_slurm.py`",
    r"(python3 -m venv|pip install|source \.venv|launch/setup\.sh)": "an environment of its own; "
    "`tests/integration/test_image.py` runs `launch/setup.sh`",
    r".*(llama3_8b|qwen3_300m|--head )": "GPUs; the config is checked and runs dry",
    r"python -m tests\.(faults|fuzz) --number": "half an hour; the suite runs short forms",
    r"amo tokenize data/fineweb_edu -o \.\.\.": "data of yours",
}
"""What a printed command needs that no machine of the tests has, by a pattern of the command."""


def commands_of_pages() -> list[str]:
    """Those of the README, of docs and of the launchers' page, without mere names in sentences."""
    pages = [p for p in DOCUMENTS if p in ("README.md", "launch/README.md") or p[:5] == "docs/"]
    found = {}
    for text in ((ROOT / page).read_text() for page in pages):
        in_blocks = printed_commands(re.sub("`[^`\n]+`", "", text))
        for words in printed_commands(text):
            if len(words) > 2 or words in in_blocks:
                found[shlex.join(words)] = None
    return [*found]


def need(command: str) -> str:
    """What a command needs; empty for one that a test runs as printed."""
    return next((what for pattern, what in NEEDS.items() if re.match(pattern, command)), "")


def not_run_table() -> str:
    """The Markdown table of the printed commands that no test runs."""
    rows = [f"| `{command}` | {need(command)} |" for command in commands_of_pages()]
    rows = [row.replace("'<|endoftext|>'", "...") for row in rows if not row.endswith("|  |")]
    return "\n".join(["| command | it needs |", "|---|---|", *rows])
