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


class Breaker(ast.NodeTransformer):
    """Breaks one node, and counts all that could be.

    Annotations, texts and the words of an error take no part in a result.

    Attributes:
        number: Which of the nodes to break; -1 for none.
        count: Nodes so far that could be broken.
        what: Place of the break, what was there, and what is.
    """

    def __init__(self, number: int = -1) -> None:
        self.number, self.count, self.what = number, -1, ""
        self._left = set[int]()

    def visit(self, node: ast.AST) -> ast.AST:
        if id(node) in self._left or isinstance(node, ast.JoinedStr):
            return node
        fields = ("annotation", "returns", "exc", "msg", "pattern")
        self._left |= {id(getattr(node, name, None)) for name in fields}
        if new := broken(node):
            self.count += 1
            if self.count == self.number:
                lines = [ast.unparse(each).splitlines()[0][:60] for each in (node, new)]
                self.what = f"{node.lineno}: {' -> '.join(lines)}"  # type: ignore[attr-defined]
                return new
        result: ast.AST = self.generic_visit(node)
        return result


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
    places = []
    for file in arguments.files:
        (breaker := Breaker()).visit(ast.parse(file.read_bytes()))
        places += [(file, number) for number in range(breaker.count + 1)]
    random.Random(arguments.seed).shuffle(places)
    with tempfile.TemporaryDirectory() as folder:
        project = shutil.copytree(
            ROOT, Path(folder, "copy"), ignore=shutil.ignore_patterns(".*", "outputs")
        )
        if fails(project, arguments.tests):
            raise SystemExit("the tests fail without any break")
        for file, index in places[: arguments.number]:
            breaker = Breaker(index)
            tree = breaker.visit(ast.parse(file.read_bytes()))
            place = project / file.resolve().relative_to(ROOT)
            place.write_text(ast.unparse(ast.fix_missing_locations(tree)))
            outcome = "killed  " if fails(project, arguments.tests) else "SURVIVED"
            print(f"{outcome} {file}:{breaker.what}", flush=True)
            shutil.copy(file, place)


if __name__ == "__main__":
    main()
