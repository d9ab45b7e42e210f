"""How large a thing may grow, and what it may ask: counted from the source."""

from __future__ import annotations

import ast
from collections.abc import Mapping

import pytest

from tests.source_tree import FOLDERS, ROOT, module_name, room, sources

MAX_LINES = 450
MAX_PARAMETERS = 8
MAX_ATTRIBUTES = 14
MAX_METHODS = 20
ONE_PATH = ("kernels/newton_schulz.py", "kernels/elementwise.py", "distributed/exchange.py")
"""Of amo_dist, what reads as one path on every device."""


def long_files(texts: Mapping[str, str]) -> dict[str, int]:
    """The number of lines of each text that has too many, by name."""
    lengths = {name: len(text.splitlines()) for name, text in texts.items()}
    return {name: lines for name, lines in lengths.items() if lines > MAX_LINES}


def test_files_stay_short() -> None:
    paths = [path for folder in FOLDERS for path in sources(folder)]
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in paths}
    assert {name.split("/")[0] for name in texts} == set(FOLDERS)
    assert long_files(texts) == {}


def test_a_long_file_is_found() -> None:
    assert long_files({"a": "\n" * 450, "b": "x = 1\n" * 450 + "y = 2"}) == {"b": 451}


def long_constructors(source: str) -> list[str]:
    """Classes with a hand-written ``__init__`` of too many parameters beside self."""
    found = []
    for node in ast.walk(ast.parse(source)):
        for part in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(part, ast.FunctionDef) and part.name == "__init__":
                args = part.args
                names = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
                if len([name for name in names if name is not None]) > 1 + MAX_PARAMETERS:
                    found.append(node.name)
    return found


def test_constructors_take_few_parameters() -> None:
    found = {
        module_name(path): long
        for path in sources("amo_dist")
        # There parameters are what a user sets.
        if room(module_name(path)) != "optimizers" and (long := long_constructors(path.read_text()))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("parameters", "is_long"),
    [
        ("a, b, c, d, e, f, g, h", False),
        ("a, b, c, d, e, f, g, h, i", True),
        ("a, b, /, c, d, e=1, *, f, g=2, h", False),
        ("a, b, /, c, d, e=1, *rest, f, g=2, h", True),
        ("a, b, c, d, e, f, g, h, **rest", True),
    ],
)
def test_a_long_constructor_is_found(parameters: str, is_long: bool) -> None:
    source = f"def f():\n class A:\n  x = 1\n  def __init__(self, {parameters}): pass"
    assert long_constructors(source) == (["A"] if is_long else [])


def size_of_class(source: str, name: str) -> tuple[set[str], list[str]]:
    """The attributes assigned on self anywhere in a class, and the methods and properties of it."""
    (found,) = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    attributes = {
        node.attr
        for node in ast.walk(found)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return attributes, [part.name for part in found.body if isinstance(part, kinds)]


def test_the_optimizer_stays_small() -> None:
    source = (ROOT / "amo_dist" / "optimizers" / "muon.py").read_text()
    attributes, methods = size_of_class(source, "Muon")
    counts = len(attributes), len(methods)
    is_small = counts[0] <= MAX_ATTRIBUTES and counts[1] <= MAX_METHODS
    assert is_small, (counts, sorted(attributes), methods)


def test_the_size_of_a_class_is_counted() -> None:
    source = """
class Other:
    def other(self): self.other = 1
class Muon(Other):
    kind = 1
    def __init__(self):
        self.a = self.b = other.c = 1
        self.d: int = 2
        self.e, (self.f, x) = 3, (4, 5)
    def step(self):
        def inner(): self.g += 1
        for self.h in self.i: print(self.j)
        self.a = self.k.l = 0
    @property
    def value(self): return self.m
    @staticmethod
    async def work(): pass
"""
    attributes, methods = size_of_class(source, "Muon")
    assert attributes == set("abdefgh")
    assert methods == ["__init__", "step", "value", "work"]


def asks_for_amo(source: str) -> list[int]:
    """Lines with ``isinstance(..., AMOConfig)``, alone or among other classes."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("isinstance", "issubclass")
        and any(
            "AMOConfig" in (getattr(part, "id", ""), getattr(part, "attr", ""))
            for kind in node.args[1:]
            for part in ast.walk(kind)
        )
    ]


def asks_for_device(source: str) -> list[int]:
    """Lines that look at the type of a device."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and (
            node.attr in ("is_cpu", "is_cuda")
            or (node.attr == "type" and ast.unparse(node.value).endswith("device"))
        )
    ]


def test_only_settings_and_schedules_know_amo_from_others() -> None:
    found = {
        module_name(path): lines
        for folder in FOLDERS
        for path in sources(folder)
        if folder != "tests" and not module_name(path).startswith("amo_dist.schedule.")
        if module_name(path) != "amo_dist.config" and (lines := asks_for_amo(path.read_text()))
    }
    assert found == {}


@pytest.mark.parametrize("name", ONE_PATH)
def test_one_path_serves_every_device(name: str) -> None:
    assert asks_for_device((ROOT / "amo_dist" / name).read_text()) == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("isinstance(config, AMOConfig)", True),
        ("x = 1 if isinstance(self.config, (config.AMOConfig, int)) else 2", True),
        ("issubclass(kind, AMOConfig | None)", True),
        ("isinstance(config, MuonConfig)", False),
        ("isinstance(AMOConfig(), MuonConfig)", False),
    ],
)
def test_a_question_for_amo_is_found(line: str, found: bool) -> None:
    assert asks_for_amo(f"x = 1\n{line}") == ([2] if found else [])


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("x = tensor.device.type == 'cpu'", True),
        ("f(device_type=device.type)", True),
        ("if values[0].is_cpu: pass", True),
        ("assert not x.is_cuda", True),
        ("torch.empty(3, device=x.device)", False),
        ("error.type", False),
    ],
)
def test_a_question_for_the_device_is_found(line: str, found: bool) -> None:
    assert asks_for_device(f"x = 1\n{line}") == ([2] if found else [])
