"""The documentation says what the code says. ``python -m tests.test_docs`` rewrites the tables."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import shlex
import warnings
from pathlib import Path

import pytest

from amo_dist.config import AMOConfig, MuonConfig
from tests.examples import ROOT, code_blocks

with warnings.catch_warnings():
    # torchtitan compiles a module on import, and a part of torch that this needs is deprecated.
    warnings.simplefilter("ignore")
    from torchtitan_ext.cli import build_parser

README = ROOT / "README.md"
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
CONFIGS = (MuonConfig, AMOConfig)


def field_docs(config: type) -> dict[str, str]:
    """The string below each field that ``config`` itself declares, on one line."""
    (body,) = ast.parse(inspect.getsource(config)).body
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, doc in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            is_doc = isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant)
            docs[field.target.id] = " ".join(str(doc.value.value).split()) if is_doc else ""
    return docs


def table(config: type) -> str:
    """The Markdown table of the fields that ``config`` adds to its base."""
    rows = ["| field | default | meaning |", "|---|---|---|"]
    docs = field_docs(config)
    for field in dataclasses.fields(config):
        if field.name in docs:
            default = f'"{field.default}"' if isinstance(field.default, str) else field.default
            meaning = docs[field.name].replace("``", "`").replace("|", "\\|")
            rows.append(f"| `{field.name}` | `{default}` | {meaning} |")
    return "\n".join(rows)


def commands() -> dict[str, str]:
    """What each command of the front door does, as its ``--help`` says."""
    (subparsers,) = build_parser()._subparsers._group_actions  # type: ignore[union-attr]
    return {action.dest: str(action.help) for action in subparsers._choices_actions}  # type: ignore[attr-defined]


def command_table() -> str:
    """The Markdown table of the front door's commands."""
    rows = [f"| `amo {name}` | {what} |" for name, what in commands().items()]
    return "\n".join(["| command | what it does |", "|---|---|", *rows])


def tables() -> dict[str, str]:
    """What README.md must hold between two comments, by the name in them."""
    return {**{config.__name__: table(config) for config in CONFIGS}, "commands": command_table()}


def fences(name: str) -> tuple[str, str]:
    return f"<!-- begin {name} -->\n", f"\n<!-- end {name} -->"


def written_table(text: str, name: str) -> str:
    begin, end = fences(name)
    assert text.count(begin) == text.count(end) == 1, f"README.md has no one table of {name}"
    return text.split(begin)[1].split(end)[0]


def rewrite() -> None:
    """Puts the tables of this code into README.md."""
    text = README.read_text()
    for name, expected in tables().items():
        written = written_table(text, name).join(fences(name))
        text = text.replace(written, expected.join(fences(name)))
    README.write_text(text)


@pytest.mark.parametrize("config", CONFIGS)
def test_every_field_has_a_doc(config: type) -> None:
    docs = field_docs(config)
    assert docs
    assert [name for name, doc in docs.items() if not doc.endswith(".")] == []


def test_the_tables_cover_every_field() -> None:
    described = {name for config in CONFIGS for name in field_docs(config)}
    assert described == {field.name for field in dataclasses.fields(AMOConfig)}


@pytest.mark.parametrize("name", tables())
def test_readme_tables_match_the_code(name: str) -> None:
    assert written_table(README.read_text(), name) == tables()[name], (
        "run `python -m tests.test_docs` to rewrite the tables of README.md"
    )


def test_every_command_says_what_it_does() -> None:
    assert {"quickstart", "plan"} <= set(commands())
    assert [name for name, what in commands().items() if what in ("", "None")] == []


def test_readme_stays_short() -> None:
    assert len(README.read_text().splitlines()) <= 450


def paths(text: str) -> set[str]:
    """What a document names as a file or folder of the project."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    linked = re.findall(r"\]\((?!\w+:|#)([^)#]+)", prose)
    quoted = re.findall(r"`([^`\s]+)`", prose)
    commands = [word for block in code_blocks(text, "(?:bash|sh)") for word in block.split()]
    named = [word for word in [*quoted, *commands] if re.fullmatch(r"[\w./-]+", word)]
    is_path = re.compile(r"(\./)?[.\w-]+/[\w./-]*|[\w-]+\.(md|toml|sh|yaml)")
    return {*linked, *(word for word in named if is_path.fullmatch(word))}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_files_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    assert [path for path in sorted(paths(text)) if not (ROOT / path).exists()] == []


def test_paths_are_found_in_prose_links_and_commands() -> None:
    text = "[a](LICENSE) [b](https://x.org/y) `tests/unit` `a.b` `m/n > 1` `x.toml`\n"
    text += "```bash\nlaunch/test.sh -m slow  # all\n```\n```python\na = b/c\n```\n"
    assert paths(text) == {"LICENSE", "tests/unit", "x.toml", "launch/test.sh"}


def front_door_commands(text: str) -> list[list[str]]:
    """The arguments of every ``amo`` line in a document's shell blocks, and in its sentences."""
    lines = [line for block in code_blocks(text, "(?:bash|sh)") for line in block.splitlines()]
    prose = re.sub(r"^(?:```.*?^```|\|.*?$)", "", text, flags=re.MULTILINE | re.DOTALL)
    lines += [line for line in re.findall(r"`([^`]+)`", prose) if "<" not in line]
    words = [shlex.split(line, comments=True) for line in lines if line.startswith("amo ")]
    return [line[1:] for line in words]


def test_printed_commands_are_found() -> None:
    text = "| `amo plan` | x |\n`amo <command>`, `amo plan --json`\n"
    text += "```bash\namo simulate --x  # y\n```\n"
    assert front_door_commands(text) == [["simulate", "--x"], ["plan", "--json"]]


@pytest.mark.parametrize(
    "document", [*DOCUMENTS, *(f"{each}/README.md" for each in ("benchmarks", "configs", "launch"))]
)
def test_printed_commands_parse(document: str) -> None:
    for arguments in front_door_commands((ROOT / document).read_text()):
        args, rest = build_parser().parse_known_args(arguments)
        assert not rest or hasattr(args, "overrides"), arguments


def layout_rows(text: str) -> list[str]:
    """The rows of the table of layouts."""
    (rows,) = re.findall(r"^\| layout \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    return str(rows).splitlines()


def named_tests(row: str) -> list[tuple[str, str]]:
    """``(path::function, case)`` of ``path::function[case], [case]``; the case may be empty."""
    named: list[tuple[str, str]] = []
    for quoted in re.findall(r"`([^`]*(?:::|\[)[^`]*)`", row):
        test, _, case = quoted.rstrip("]").partition("[")
        assert test or named, f"{quoted} follows no test"
        named.append((test or named[-1][0], case))
    return named


def collected(path: Path) -> tuple[set[str], set[str]]:
    """Names of the test functions of a file, and the ids that it gives to cases."""
    tree = ast.parse(path.read_text())
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    keywords = [node for node in ast.walk(tree) if isinstance(node, ast.keyword)]
    ids = {
        constant.value
        for keyword in keywords
        if keyword.arg in ("id", "ids")
        for constant in ast.walk(keyword.value)
        if isinstance(constant, ast.Constant)
    }
    return functions, ids


def test_every_layout_names_tests_that_exist() -> None:
    for row in layout_rows(README.read_text()):
        assert named_tests(row), row
        for test, case in named_tests(row):
            path, function = test.split("::")
            functions, ids = collected(ROOT / path)
            assert function in functions, test
            assert case in {"", *ids}, f"{test} has no case {case}"


def test_named_tests_are_found_in_a_row() -> None:
    assert named_tests("| `a` | `t.py::test_x[one]`, `[two]`, `t.py::test_y` |") == [
        ("t.py::test_x", "one"),
        ("t.py::test_x", "two"),
        ("t.py::test_y", ""),
    ]
    assert named_tests("| `a` | 2, 3 | |") == []


if __name__ == "__main__":
    rewrite()
