"""The documentation says what the code says. ``python -m tests.test_docs`` rewrites the tables."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import amo_dist
from amo_dist.config import AMOConfig, MuonConfig

ROOT = Path(__file__).resolve().parent.parent
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


def fences(config: type) -> tuple[str, str]:
    return f"<!-- begin {config.__name__} -->\n", f"\n<!-- end {config.__name__} -->"


def written_table(text: str, config: type) -> str:
    begin, end = fences(config)
    assert text.count(begin) == text.count(end) == 1, f"README.md has no one table of {config}"
    return text.split(begin)[1].split(end)[0]


def rewrite() -> None:
    """Puts the tables of this code into README.md."""
    text = README.read_text()
    for config in CONFIGS:
        written = written_table(text, config).join(fences(config))
        text = text.replace(written, table(config).join(fences(config)))
    README.write_text(text)


@pytest.mark.parametrize("config", CONFIGS)
def test_every_field_has_a_doc(config: type) -> None:
    docs = field_docs(config)
    assert docs
    assert [name for name, doc in docs.items() if not doc.endswith(".")] == []


def test_the_tables_cover_every_field() -> None:
    described = {name for config in CONFIGS for name in field_docs(config)}
    assert described == {field.name for field in dataclasses.fields(AMOConfig)}


@pytest.mark.parametrize("config", CONFIGS)
def test_readme_tables_match_the_code(config: type) -> None:
    assert written_table(README.read_text(), config) == table(config), (
        "run `python -m tests.test_docs` to rewrite the tables of README.md"
    )


def code_blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


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


@pytest.mark.xfail(not hasattr(amo_dist, "AMO"), reason="amo_dist.AMO is still to come")
def test_readme_examples_run(tmp_path: Path) -> None:
    blocks = code_blocks(README.read_text(), "python")
    assert blocks
    for block in blocks:
        command = [sys.executable, "-W", "error", "-c", block]
        subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, text=True)


if __name__ == "__main__":
    rewrite()
