"""Breaks the code in one place at a time, and lists the breaks that no test notices.

    python -m tests.mutants amo_dist/state/*.py --tests tests/unit/test_checkpoint.py --number 20

Each break is made in a copy of the project, in which pytest then runs the tests.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 900  # of all tests, with one break; tests that take longer hang
OTHER = {
    ast.Eq: ast.NotEq, ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.Is: ast.IsNot, ast.In: ast.NotIn,
    ast.Add: ast.Sub, ast.Mult: ast.Div, ast.FloorDiv: ast.Mult, ast.And: ast.Or,
}  # fmt: skip
OTHER |= {new: old for old, new in OTHER.items()} | {ast.Mod: ast.Mult, ast.Pow: ast.Mult}


def broken(node: ast.AST) -> ast.AST | None:
    """Another node for the place of one, or nothing."""
    match node:
        case ast.Compare(left, [op, *ops], right) if type(op) in OTHER:
            return ast.Compare(left, [OTHER[type(op)](), *ops], right)
        case ast.BinOp(left, op, right) if type(op) in OTHER:
            return ast.BinOp(left, OTHER[type(op)](), right)
        case ast.BoolOp(op, values):
            return ast.BoolOp(OTHER[type(op)](), values)
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            return operand
        case ast.Constant(bool(value)):
            return ast.Constant(not value)
        case ast.Constant(int(value) | float(value)):
            return ast.Constant(value + 1)
        case ast.Expr(ast.Call()):
            return ast.Expr(ast.Constant(None))
        case ast.If(test, body, orelse):
            return ast.If(ast.UnaryOp(ast.Not(), test), body, orelse)
        case ast.IfExp(test, body, orelse):
            return ast.IfExp(test, orelse, body)
    return None


def breaks(node: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
    """Parent, field, index and new child for all that takes part in a result.

    Annotations, texts and the words of an error do not.
    """
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "exc", "msg", "pattern"):
            continue
        is_list = isinstance(value, list)
        for index, child in enumerate(value if is_list else [value]):
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                if new := broken(child):
                    yield node, name, index if is_list else None, new
                yield from breaks(child)


def mutant(path: Path, number: int) -> tuple[str, str]:
    """What a break of a file is, and the text of the file with it."""
    tree = ast.parse(path.read_bytes())
    parent, name, index, new = list(breaks(tree))[number]
    children = getattr(parent, name)
    old = children if index is None else children[index]
    lines = [ast.unparse(node).splitlines()[0][:60] for node in (old, new)]
    if index is None:
        setattr(parent, name, new)
    else:
        children[index] = new
    text = ast.unparse(ast.fix_missing_locations(tree))
    return f"{path}:{old.lineno}: {' -> '.join(lines)}", text


def fails(folder: Path, tests: list[str]) -> bool:
    """Whether a test fails in a copy of the project."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    with (folder / "tests.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, *tests], cwd=folder, env=environment, stdout=log, stderr=log
        )
        try:
            return bool(process.wait(SECONDS))
        except subprocess.TimeoutExpired:
            process.kill()
            return True


def main() -> None:
    """Draws breaks of the files, and says which of them survive the tests."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="files to break")
    parser.add_argument("--tests", nargs="+", required=True, help="files or folders of tests")
    parser.add_argument("--number", type=int, default=20, help="breaks to draw")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    places = [
        (file, number)
        for file in arguments.files
        for number, _ in enumerate(breaks(ast.parse(file.read_bytes())))
    ]
    random.Random(arguments.seed).shuffle(places)
    with tempfile.TemporaryDirectory() as folder:
        project = shutil.copytree(
            ROOT, Path(folder, "copy"), ignore=shutil.ignore_patterns(".*", "outputs")
        )
        if fails(project, arguments.tests):
            raise SystemExit("the tests fail without any break")
        for file, index in places[: arguments.number]:
            what, text = mutant(file, index)
            place = project / file.resolve().relative_to(ROOT)
            place.write_text(text)
            print("killed  " if fails(project, arguments.tests) else "SURVIVED", what, flush=True)
            shutil.copy(file, place)


if __name__ == "__main__":
    main()
