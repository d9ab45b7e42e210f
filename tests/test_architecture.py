"""The project's shape: which rooms there are, who may import whom, what the text may say."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.examples import ROOT

FOLDERS = ("amo_dist", "torchtitan_ext", "tests", "benchmarks")
LEVELS = (
    ("config", "compat"),
    ("schedule", "kernels", "distributed", "operators"),
    ("engine", "state"),
    ("optimizers",),
    ("doctor", "tools"),
    ("",),
    ("__main__",),
)
"""Rooms of amo_dist, and modules that stand loose ("" is the package): one imports from those above
it in this list, and nothing from others of its level."""
LEVEL_BY_ROOM = {name: level for level, names in enumerate(LEVELS) for name in names}
LOOSE = {"__init__.py", "__main__.py", "compat.py", "config.py", "py.typed"}
TOP_LEVEL = {*FOLDERS, ".ci", "configs", "docs", "launch"}
# In pieces, so that this file does not contain what it looks for.
FORBIDDEN = re.compile(
    r"SPEC" + r"\.md|DESIGN" + r"\.md|(?<![\w/.-])/wo" + r"rk\b(?!-)|(?<![\w-])shared" + "/"
)


def sources(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever the import stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                file = ROOT.joinpath(*name.split("."))
                is_module = file.is_dir() or file.with_suffix(".py").is_file()
                yield name if is_module else str(node.module)


def room(module: str) -> str:
    """The room of amo_dist that a module is in, or its name where it stands loose."""
    return module.split(".")[1] if "." in module else ""


def is_allowed(importer: str, imported: str) -> bool:
    """The directions of what is installed, those inside amo_dist, and that it needs torch alone."""
    top = imported.split(".")[0]
    if importer.startswith("torchtitan_ext"):
        return top not in ("benchmarks", "tests")
    if top in sys.stdlib_module_names:
        return True
    if top == "torch":
        return room(importer) not in ("schedule", "config")
    own, other = room(importer), room(imported)
    is_below = LEVEL_BY_ROOM[other] < LEVEL_BY_ROOM[own] if top == "amo_dist" else False
    return is_below or (top == "amo_dist" and own == other and importer != imported)


def test_imports_keep_their_directions() -> None:
    wrong = [
        f"{module_name(path)} imports {name}"
        for path in (*sources("amo_dist"), *sources("torchtitan_ext"))
        for name in sorted(set(imports(path)))
        if not is_allowed(module_name(path), name)
    ]
    assert wrong == []


def test_no_imports_run_in_a_circle() -> None:
    paths = [path for folder in FOLDERS for path in sources(folder)]
    graph = {module_name(path): set(imports(path)) for path in paths}
    graphlib.TopologicalSorter(graph).prepare()  # raises on one, and names its modules


def test_modules_stand_in_rooms() -> None:
    paths = list((ROOT / "amo_dist").iterdir())
    # A folder without source is what Python left of one.
    rooms = {path.name for path in paths if any(path.rglob("*.py"))}
    assert rooms <= LEVEL_BY_ROOM.keys()
    assert {path.name for path in paths if path.is_file()} <= LOOSE


def private_names(source: str) -> set[str]:
    """Private attributes that a module reads of what it did not define, and private imports."""
    nodes = list(ast.walk(ast.parse(source)))
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {node.attr for node in attributes if isinstance(node.ctx, ast.Store)}
    own |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    read = {node.attr for node in attributes} - own
    names = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    read |= {part for node in names for part in str(node.module).split(".")}
    return {name for name in read if re.match(r"_[a-zA-Z]", name)}


def test_private_names_of_pytorch_stand_in_one_file() -> None:
    read = {
        f"{path.name}: {name}"
        for folder in ("distributed", "engine", "operators", "optimizers", "schedule", "state")
        for path in sources(f"amo_dist/{folder}")
        for name in private_names(path.read_text())
        # Operations on lists of tensors have no public name, and many of PyTorch's users call them.
        if not name.startswith("_foreach_")
    }
    assert read == set()
    source = "from torch._compile import x\nmesh._get_root_mesh()\nself._own = self._own.y"
    assert private_names(source) == {"_compile", "_get_root_mesh"}


def test_the_text_speaks_of_the_project_alone() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: no list of tracked files")
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    names = [name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    assert {name.split("/")[0] for name in names if "/" in name} <= TOP_LEVEL
    lines = [
        f"{name}: {line}"
        for name in names
        for line in (ROOT / name).read_text(encoding="utf-8", errors="ignore").splitlines()
    ]
    assert [line for line in lines if FORBIDDEN.search(line)] == []
