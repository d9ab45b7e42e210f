"""The project's shape: which rooms there are, who may import whom, what the text may say."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.source_tree import FOLDERS, ROOT, imports, module_name, package_of, room, sources

BOTTOM = ("schedule", "kernels", "distributed", "operators")
MIDDLE = ("engine", "state")
BASE = ("config", "compat")
BELOW: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(BASE, ()),
    **dict.fromkeys(BOTTOM, BASE),
    **dict.fromkeys(MIDDLE, (*BASE, *BOTTOM)),
    "optimizers": (*BASE, *BOTTOM, *MIDDLE),
    "tools": (*BASE, *BOTTOM, *MIDDLE, "optimizers"),
    "doctor": (*BASE, *BOTTOM, *MIDDLE, "optimizers"),
    "": (*BASE, *BOTTOM, *MIDDLE, "optimizers"),
    "__main__": (*BASE, *BOTTOM, *MIDDLE, "optimizers", "doctor", ""),
}
"""By room of amo_dist, or module that stands loose ("" is the package): what it may import."""
LOOSE = {"__init__.py", "__main__.py", "compat.py", "config.py", "py.typed"}
TOP_LEVEL = {
    ".ci",
    "amo_dist",
    "benchmarks",
    "configs",
    "docs",
    "launch",
    "tests",
    "torchtitan_ext",
}
# In pieces, so that this file does not contain what it looks for.
FORBIDDEN = re.compile(
    r"SPEC" + r"\.md|DESIGN" + r"\.md|(?<![\w/.-])/wo" + r"rk\b(?!-)|(?<![\w-])shared" + "/"
)


def allowed(importer: str, imported: str) -> bool:
    """The directions inside amo_dist, and that it needs torch alone."""
    top = imported.split(".")[0]
    if top in sys.stdlib_module_names:
        return True
    if top == "torch":
        return room(importer) not in ("schedule", "config")
    if top != "amo_dist":
        return False
    own = room(importer)
    return importer != imported and room(imported) in (own, *BELOW.get(own, ()))


def violations(source: str, module: str, package: str) -> list[str]:
    found = sorted(set(imports(source, package)))
    return [f"{module} imports {name}" for name in found if not allowed(module, name)]


def test_imports_keep_their_directions() -> None:
    found = []
    for path in sources("amo_dist"):
        found += violations(path.read_text(), module_name(path), package_of(path))
    assert not found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("amo_dist.optimizers.muon", "import numpy"),
        ("amo_dist.optimizers.muon", "def f():\n    from amo_dist.tools import tracker"),
        ("amo_dist.doctor.command", "from amo_dist import AMO"),
        ("amo_dist.engine.step", "from ..optimizers.muon import Muon"),
        (
            "amo_dist.state.load",
            "if TYPE_CHECKING:\n    from amo_dist.engine import parameters",
        ),
        ("amo_dist.config", "import torch"),
        ("amo_dist.distributed.plan", "from .. import schedule"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str) -> None:
    assert violations(source, module, module.rpartition(".")[0])


def imports_of_benchmarks(source: str, package: str) -> list[str]:
    return [name for name in imports(source, package) if name.split(".")[0] == "benchmarks"]


def test_nothing_that_is_installed_imports_benchmarks() -> None:
    modules = []
    for path in (*sources("amo_dist"), *sources("torchtitan_ext")):
        modules += imports_of_benchmarks(path.read_text(), package_of(path))
    assert not modules
    wrong = "def f():\n    from benchmarks.amo_paper import catalog"
    assert imports_of_benchmarks(wrong, "torchtitan_ext.tools")


def strays(root: Path) -> list[str]:
    """What stands in a package beside its rooms and the modules that may stand loose."""
    return sorted(
        path.name
        for path in root.iterdir()
        # A folder without source is what Python left of one.
        if (any(path.rglob("*.py")) and path.name not in BELOW)
        or (path.is_file() and path.name not in LOOSE)
    )


def test_modules_stand_in_rooms() -> None:
    assert strays(ROOT / "amo_dist") == []


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


# Operations on lists of tensors have no public name, and many of PyTorch's users call them.
LISTS = re.compile("_foreach_")


ROOMS = ["distributed", "engine", "operators", "optimizers", "schedule", "state"]


@pytest.mark.parametrize("name", ROOMS)
def test_private_names_of_pytorch_stand_in_one_file(name: str) -> None:
    read = {
        f"{path.name}: {word}"
        for path in sources(f"amo_dist/{name}")
        for word in private_names(path.read_text())
        if not LISTS.match(word)
    }
    assert read == set()


def test_a_private_name_is_seen() -> None:
    source = "from torch._compile import x\nmesh._get_root_mesh()\nself._own = self._own.y"
    assert private_names(source) == {"_compile", "_get_root_mesh"}


Graph = Mapping[str, set[str]]


def reachable(graph: Graph, start: str) -> set[str]:
    found: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        module = waiting.pop()
        if module in graph and module not in found:
            found.add(module)
            waiting += graph[module]
    return found


def circles(graph: Graph) -> set[tuple[str, ...]]:
    """Strongly connected components: the modules that import one another, however far around."""
    reach = {module: reachable(graph, module) for module in graph}
    return {
        tuple(sorted(other for other in reach[module] if module in reach[other]))
        for module in graph
        if module in reach[module]
    }


def test_no_imports_run_in_a_circle() -> None:
    paths = [path for folder in FOLDERS for path in sources(folder)]
    graph = {module_name(path): set(imports(path.read_text(), package_of(path))) for path in paths}
    assert circles(graph) == set()


@pytest.mark.parametrize("folder", ["amo_dist", "torchtitan_ext"])
def test_a_package_has_what_it_exports(folder: str) -> None:
    packages = [path for path in sources(folder) if path.name == "__init__.py"]
    missing = [
        f"{module_name(path)}.{name}"
        for path in packages
        if "__all__" in path.read_text()
        for package in [importlib.import_module(module_name(path))]
        for name in package.__all__
        if not hasattr(package, name)
    ]
    assert packages
    assert not missing


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: no list of tracked files")
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def test_the_top_level_stays_the_users(tracked: list[str]) -> None:
    folders = {name.split("/")[0] for name in tracked if "/" in name}
    assert folders <= TOP_LEVEL


def test_the_text_speaks_of_the_project_alone(tracked: list[str]) -> None:
    found = []
    for name in tracked:
        text = (ROOT / name).read_text(encoding="utf-8", errors="ignore")
        lines = enumerate(text.splitlines(), start=1)
        found += [f"{name}:{number}: {line}" for number, line in lines if FORBIDDEN.search(line)]
    assert not found
