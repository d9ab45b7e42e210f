"""The project's files and modules as tests of its shape read them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("amo_dist", "torchtitan_ext", "tests", "benchmarks")


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


def room(module: str) -> str:
    """The room of amo_dist that a module is in, or its name where it stands loose."""
    return module.split(".")[1] if "." in module else ""


def package_of(path: Path) -> str:
    """What relative imports in a file start from."""
    module = module_name(path)
    return module if path.name == "__init__.py" else module.rpartition(".")[0]
