"""The project's shape: who may import whom, how long a file may grow, what the text may say."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
WINGS = ("schedule", "kernels", "distributed")
BASE = ("config",)
TOP_LEVEL = {
    ".ci",
    "amo_dist",
    "benchmarks",
    "configs",
    "launch",
    "tests",
    "torchtitan_ext",
}
MAX_LINES = 500
# In pieces, so that this file does not contain what it looks for.
FORBIDDEN = re.compile(
    r"SPEC" + r"\.md|DESIGN" + r"\.md|(?<![\w/.-])/wo" + r"rk\b(?!-)|(?<![\w-])shared" + "/"
)


def sources(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def imports(source: str, package: str) -> Iterator[str]:
    """Every imported module, wherever the import stands; relative ones resolved in ``package``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                name = f"{base}.{alias.name}"
                yield name if is_module(name) else base


def allowed(importer: str, imported: str) -> bool:
    """The directions: ``torchtitan_ext -> amo_dist -> torch``, and the layers inside amo_dist.

    Triton comes with PyTorch where there is CUDA; one module, imported when needed, may use it.
    """
    top = imported.split(".")[0]
    if top in sys.stdlib_module_names:
        return True
    if importer.split(".")[0] != "amo_dist":
        return True
    layer = importer.split(".")[1] if "." in importer else ""
    if top == "torch":
        return layer not in ("schedule", *BASE)
    if top == "triton":
        return importer == "amo_dist.kernels.cuda.triton_symmetric"
    if top != "amo_dist":
        return False
    inner = imported.split(".")[1] if "." in imported else ""
    if layer in WINGS:
        return inner in (layer, *BASE)
    if layer == "operators":
        return inner in BASE
    return layer not in BASE


def violations(source: str, module: str, package: str) -> list[str]:
    found = sorted(set(imports(source, package)))
    return [f"{module} imports {name}" for name in found if not allowed(module, name)]


def test_imports_keep_their_directions() -> None:
    found = []
    for path in sources("amo_dist"):
        module = module_name(path)
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        found += violations(path.read_text(), module, package)
    assert not found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("amo_dist.optimizers.muon", "import numpy"),
        ("amo_dist.optimizers.muon", "import torchtitan_ext.plugin"),
        ("amo_dist.kernels.interface", "import triton"),
        ("amo_dist.config", "import torch"),
        ("amo_dist.config", "from amo_dist.kernels import geometry"),
        ("amo_dist.config", "from amo_dist.config import AMOConfig"),
        ("amo_dist.operators", "from amo_dist import optimizers"),
        ("amo_dist.schedule.budget", "def f():\n    import torch.nn as nn"),
        ("amo_dist.schedule.budget", "from ..kernels.geometry import ell"),
        ("amo_dist.kernels.geometry", "from amo_dist.distributed import layout"),
        ("amo_dist.kernels.geometry", "from amo_dist import schedule"),
        ("amo_dist.kernels.geometry", "from amo_dist import AMO"),
        ("amo_dist.distributed.plan", "from .. import schedule"),
        ("amo_dist.distributed.plan", "from amo_dist.operators import MatrixView"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str) -> None:
    assert violations(source, module, module.rpartition(".")[0])


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("amo_dist", "from amo_dist.config import AMOConfig\nfrom . import schedule"),
        ("amo_dist.optimizers.muon", "import math, torch\nfrom amo_dist.kernels import geometry"),
        ("amo_dist.operators", "from amo_dist.config import OPERATOR_TYPES"),
        ("amo_dist.schedule.budget", "from .polar_express import compose"),
        ("amo_dist.distributed.plan", "from torch.distributed import tensor\nfrom . import layout"),
        ("amo_dist.kernels.geometry", "from amo_dist.config import AMOConfig"),
        ("amo_dist.kernels.cuda.triton_symmetric", "import triton.language as tl"),
        ("torchtitan_ext.plugin.optimizers", "import amo_dist, torchtitan"),
    ],
)
def test_a_right_import_is_allowed(module: str, source: str) -> None:
    package = module if module == "amo_dist" else module.rpartition(".")[0]
    assert not violations(source, module, package)


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


def test_files_stay_short() -> None:
    folders = ("amo_dist", "torchtitan_ext", "tests", "benchmarks")
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for folder in folders
        for path in sources(folder)
    }
    assert len(lengths) > len(folders)
    assert {name: lines for name, lines in lengths.items() if lines >= MAX_LINES} == {}


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


@pytest.mark.parametrize(
    ("text", "forbidden"),
    [
        ("see SPEC" + ".md, part 3", True),
        ("in /wo" + "rk/main", True),
        ("from shared" + "/golden", True),
        ("the framework/works of each worker", False),
        ("https://example.org/wo" + "rk/page", False),
        ("a shared parameter", False),
    ],
)
def test_forbidden_text_is_told_from_harmless(text: str, forbidden: bool) -> None:
    assert bool(FORBIDDEN.search(text)) == forbidden
