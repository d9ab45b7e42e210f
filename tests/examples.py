"""Python blocks of the documents: found, run as printed, and compared."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._pytree import keystr, tree_flatten_with_path

ROOT = Path(__file__).resolve().parent.parent


DOCUMENTS = tuple(
    sorted(
        str(path.relative_to(ROOT))
        for pattern in ("*.md", "*/README.md", "benchmarks/*/README.md", "docs/*.md")
        for path in ROOT.glob(pattern)
        if not str(path.relative_to(ROOT)).startswith(".")  # such as the page in pytest's cache
    )
)
"""Every page of the project, by its path."""


def code_blocks(text: str, language: str) -> list[str]:
    """The blocks of a page in a language, those in lists too."""
    fenced = rf"^( *)```{language}\n(.*?)^\1```"
    found = re.findall(fenced, text, flags=re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(block) for _, block in found]


def fill(text: str, name: str, filling: str) -> str:
    """A page with other text between its two comments of a name."""
    begin, end = f"<!-- begin {name} -->\n", f"\n<!-- end {name} -->"
    assert text.count(begin) == text.count(end) == 1, f"expected one place of {name}"
    return text.split(begin)[0] + begin + filling + end + text.split(end)[1]


def blocks(documents: Iterable[str]) -> list[str]:
    """The Python blocks of documents, by their paths."""
    texts = [(ROOT / document).read_text() for document in documents]
    return [block for text in texts for block in code_blocks(text, "python")]


def examples(documents: Iterable[str]) -> dict[str, tuple[list[str], str]]:
    """By file name, the command in the first line of a Python block, and the block."""
    found = {}
    for text in blocks(documents):
        if not text.startswith("# "):
            continue
        command = shlex.split(text.splitlines()[0].removeprefix("# "))
        (name,) = [word for word in command if word.endswith(".py")]
        found[name] = (command, text)
    return found


def run(
    command: list[str], folder: Path, *, warnings: str = "error"
) -> subprocess.CompletedProcess[str]:
    """Run ``command`` as a user would in this environment, warnings as errors."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": warnings,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def whole(checkpoint: Path, scratch: Path) -> Any:
    """Everything in a checkpoint of ``torch.distributed.checkpoint``, in whole tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a checkpoint read outside a process group
        dcp_to_torch_save(checkpoint, scratch)
    return torch.load(scratch, weights_only=False)


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    """To the last bit, and with the same keys in the same order."""
    leaves, spec = tree_flatten_with_path(expected)
    others, other_spec = tree_flatten_with_path(found)
    assert other_spec == spec, (where, other_spec, spec)
    for (path, leaf), (_, other) in zip(leaves, others, strict=True):
        is_same = torch.equal(other, leaf) if isinstance(leaf, torch.Tensor) else other == leaf
        assert is_same, f"{where}{keystr(path)}"
