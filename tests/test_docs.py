"""The documents say what the code says. ``python -m tests.test_docs`` rewrites their tables."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import os
import re
import shlex
import warnings
from typing import Any

import docstring_parser
import pytest
import torch
from torch import nn

import amo_dist
from amo_dist import (
    AMO,
    OPTIMIZER_NAMES,
    AMOConfig,
    Muon,
    MuonConfig,
    make_optimizer,
    param_groups,
)
from tests.distributed import models
from tests.examples import DOCUMENTS, ROOT, code_blocks, fill
from tests.printed import not_run_table, printed_commands, prose

with warnings.catch_warnings():
    # torchtitan compiles a module on import, and a part of torch that this needs is deprecated.
    warnings.simplefilter("ignore")
    from torchtitan_ext.cli import build_parser

CONFIGS = (MuonConfig, AMOConfig)
"""Their tables of fields are written by this code."""
ELSEWHERE = ("export", "git", "hf", "python3", "salloc", "sbatch", "source")
"""Programs of others, whose words no test here knows."""


def table(config: type) -> str:
    """The Markdown table of the fields that a config itself declares."""
    rows = ["| field | default | meaning |", "|---|---|---|"]
    params = docstring_parser.parse(config.__doc__ or "").params
    docs = {param.arg_name: " ".join((param.description or "").split()) for param in params}
    assert docs.keys() == inspect.get_annotations(config).keys()
    for field in dataclasses.fields(config):
        if field.name in docs:
            default = f'"{field.default}"' if isinstance(field.default, str) else field.default
            meaning = docs[field.name].replace("``", "`").replace("|", "\\|")
            rows.append(f"| `{field.name}` | `{default}` | {meaning} |")
    return "\n".join(rows)


def command_table() -> str:
    """The Markdown table of the front door's commands, as their ``--help`` says."""
    (parsers,) = build_parser()._subparsers._group_actions  # type: ignore[union-attr]
    actions: Any = parsers._choices_actions  # type: ignore[attr-defined]
    rows = [f"| `amo {action.dest}` | {action.help} |" for action in actions]
    return "\n".join(["| command | what it does |", "|---|---|", *rows])


def tables() -> dict[str, tuple[str, str]]:
    """A page, and the table that it must hold between two comments, by the name in them."""
    found = {config.__name__: ("docs/settings.md", table(config)) for config in CONFIGS}
    return {
        **found,
        "commands": ("docs/commands.md", command_table()),
        "not run": ("docs/commands.md", not_run_table()),
    }


@pytest.mark.parametrize("name", tables())
def test_written_tables_match_the_code(name: str) -> None:
    page, expected = tables()[name]
    text = (ROOT / page).read_text()
    # A row says something.
    assert re.search(r"\| *(None)? \|$", expected, re.MULTILINE) is None
    assert text == fill(text, name, expected), f"run `python -m tests.test_docs` to rewrite {page}"


def test_arguments_have_the_defaults_of_their_table() -> None:
    page = (ROOT / "docs/loops.md").read_text()
    (rows,) = re.findall(r"^\|.*default \| meaning \|\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE)
    written = dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \|", rows, re.MULTILINE))
    parameters = {
        name: parameter.default
        for optimizer in (Muon, AMO)
        for name, parameter in inspect.signature(optimizer).parameters.items()
        if name != "params" and parameter.kind is not parameter.VAR_KEYWORD
    }
    # What is None is the rule's, which a group shows.
    group = AMO(param_groups(models.plain_model(models.shapes()))).param_groups[1]
    expected = {name: group.get(name) if x is None else x for name, x in parameters.items()}
    assert written == {name: repr(default) for name, default in expected.items()}


STATE = re.findall(
    r"^\| (matrix|other) \| (.+?) \| (\d+) \| (\d+) \|$",
    (ROOT / "docs" / "questions.md").read_text(),
    re.MULTILINE,
)
"""Rows of the table of bytes of state per parameter."""


@pytest.mark.parametrize("row", STATE, ids=[f"{kind}: {title}" for kind, title, *_ in STATE])
def test_state_takes_what_its_table_says(row: tuple[str, str, str, str]) -> None:
    kind, title, *cells = row
    option = re.search(r'bfloat16_params="(\w+)"', title)
    config = MuonConfig(bfloat16_params=option[1]) if option else None
    for name in [name for name in OPTIMIZER_NAMES if f"`{name}" in title] or ["Muon"]:
        for dtype, cell in zip((torch.float32, torch.bfloat16), cells, strict=True):
            model = nn.Sequential(*(nn.Linear(256, 256, bias=False, dtype=dtype) for _ in range(2)))
            groups = param_groups(model, patterns={r"0\.weight": "mlp_up", r"1\.weight": "adamw"})
            optimizer = make_optimizer(name, groups, config=config)
            state = optimizer.state[model[0 if kind == "matrix" else 1].weight].values()
            num_bytes = sum(value.numel() * value.element_size() for value in state)
            # One number per output of NorMuon and one counter of AdamW stand below the table.
            assert num_bytes / 256**2 == pytest.approx(int(cell), abs=0.02), name


# ---------------------------------------------------------------- links and names


def links(text: str) -> list[tuple[str, str]]:
    """Path and heading of each link and picture that does not leave the project."""
    pictures = [(path, "") for path in re.findall(r'<img src="([^"]+)"', prose(text))]
    return re.findall(r"\]\((?!\w+:)([^)#]*)#?([^)]*)\)", prose(text)) + pictures


def headings(text: str) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def paths(text: str) -> set[str]:
    """What a document's sentences and commands name as a file or folder of the project."""
    quoted = re.findall(r"`([^`\s]+)`", prose(text))
    commands = [word for block in code_blocks(text, "(?:bash|sh)") for word in block.split()]
    named = [word for word in [*quoted, *commands] if re.fullmatch(r"[\w./-]+", word)]
    is_path = re.compile(r"(\./)?[.\w-]+/[\w./-]*|[\w-]+\.(md|toml|sh|yaml)")
    # What runs write, folders of a user's machine, data sets of the hub, words of NCCL, metrics.
    metrics = "amo/|newton_schulz/|exchange/|optimizer/"
    hub = "meta-llama/|DKYoon/|HuggingFaceFW/|Qwen/"
    made = re.compile(
        rf"\.venv/|outputs/|assets/|data/|sample/|mixer\.toml|\.\./|NET/|{hub}|{metrics}"
    )
    return {word for word in named if is_path.fullmatch(word) and not made.match(word)}


# ---------------------------------------------------------------- commands


def mistake(words: list[str]) -> str | None:
    """What is wrong with a command, by its program."""
    while re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    program, rest = words[0], words[1:]
    if program in ELSEWHERE:
        return None
    if program == "pip":
        text = (ROOT / "pyproject.toml").read_text()
        extras = [each for word in rest for each in re.findall(r"\[(.+)\]$", word)]
        missing = [e for each in extras for e in each.split(",") if f"\n{e} = [" not in text]
        return f"no extra {missing}" if missing else None
    if program == "amo":
        return amo_mistake(rest)
    if program in ("python", "torchrun") and "-m" in rest:
        module, *rest = rest[rest.index("-m") + 1 :]
        if module in ("amo_dist", "torchtitan_ext"):
            return amo_mistake(rest)
        return None if importlib.util.find_spec(module) else f"no module {module}"
    is_here = program in ("bash", "python", "torchrun") or os.access(ROOT / program, os.X_OK)
    return None if is_here else f"no program {program}"


def amo_mistake(arguments: list[str]) -> str | None:
    """What the front door says of arguments, which it does not run."""
    if not any(word.startswith("-") for word in arguments) and len(arguments) < 3:
        arguments = [*arguments, "--help"]  # a command's name in a sentence lacks what it needs
    try:
        args, rest = build_parser().parse_known_args(arguments)
    except SystemExit as error:
        return f"exits with {error.code}" if error.code else None
    return f"unknown: {rest}" if rest and not hasattr(args, "overrides") else None


# ---------------------------------------------------------------- pages


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_a_page_names_is_there(document: str) -> None:
    """Links, files, commands and tests."""
    page = ROOT / document
    text = page.read_text()
    for path, heading in links(text):
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not heading or heading in headings(target.read_text()), f"{path}#{heading}"
    if document != "CHANGELOG.md":  # it names the past
        places = (ROOT, page.parent)
        named = sorted(paths(text))
        assert [path for path in named if not any((at / path).exists() for at in places)] == []
    mistakes = {shlex.join(words): mistake(words) for words in printed_commands(text)}
    assert {command: what for command, what in mistakes.items() if what} == {}
    for path, function in re.findall(r"`(tests/[^`\s]*)::(\w+)", text):
        assert f"def {function}(" in (ROOT / path).read_text(), path


def test_the_reference_has_every_public_name() -> None:
    text = (ROOT / "docs" / "site" / "reference.md").read_text()
    names = re.findall(r"^::: amo_dist\.(\w+)$", text, re.MULTILINE)
    assert sorted(names) == sorted(set(amo_dist.__all__) - {"__version__"})


def test_readme_and_site_lead_to_every_page() -> None:
    linked = {path for path, _ in links((ROOT / "README.md").read_text())}
    assert [page for page in DOCUMENTS if page != "README.md" and page not in linked] == []
    menu = (ROOT / "docs" / "site" / "mkdocs.yml").read_text()
    assert [page for page in DOCUMENTS if page.startswith("docs/") and page not in menu] == []


if __name__ == "__main__":
    # Puts the tables of this code into their pages.
    for name, (page, written) in tables().items():
        path = ROOT / page
        path.write_text(fill(path.read_text(), name, written))
