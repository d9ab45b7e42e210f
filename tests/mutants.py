"""Breaks the code in one place at a time, and lists the breaks that no test notices.

    python -m tests.mutants amo_dist/state --number 50 --tests tests/unit tests/distributed

One traced run of the tests tells the lines that a test runs, on its ranks too, and its seconds.
Then a mutant at a time is tried by the tests of its line, quickest first, until one fails. They run
in a fork of a process that has collected them; ranks import the mutant from a copy of the project.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

from _pytest.runner import runtestprotocol

ROOT = Path(__file__).resolve().parents[1]
OTHER = {
    ast.Eq: ast.NotEq, ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.Is: ast.IsNot, ast.In: ast.NotIn,
    ast.Add: ast.Sub, ast.Mult: ast.Div, ast.FloorDiv: ast.Mult, ast.And: ast.Or,
}  # fmt: skip
OTHER |= {new: old for old, new in OTHER.items()} | {ast.Mod: ast.Mult, ast.Pow: ast.Mult}
PYTEST = ["-p", "tests.mutants", "-p", "no:cacheprovider"]
# Coverage imports this plug-in before pytest does.
PYTEST += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
TRACE = """
[run]
parallel = true
patch = subprocess, _exit
sigterm = true
plugins = tests.mutants
source = amo_dist, torchtitan_ext
disable_warnings = no-data-collected
"""


class Mutant(NamedTuple):
    """One break: ``new`` in place of the bytes from ``start`` to ``end`` of a file."""

    path: str
    lines: range
    start: int
    end: int
    old: str
    new: str


def pytest_runtest_setup(item: Any) -> None:
    """Under a traced run: says which test runs."""
    import coverage

    if (current := coverage.Coverage.current()) is not None:
        current.switch_context(item.nodeid.partition("[")[0])


def pytest_runtest_logreport(report: Any) -> None:
    """As a plug-in of pytest: writes the seconds of a test, and whether it failed."""
    with open(os.environ["MUTANTS_RECORD"], "a") as lines:
        print(json.dumps([report.nodeid, report.duration, report.failed]), file=lines)


def coverage_init(registry: Any, options: Any) -> None:
    """As a plug-in of coverage: a line's context is the function of the tests, also on ranks."""
    from coverage import CoveragePlugin

    if sys.argv[:1] != ["-c"]:  # pytest itself, which says which test runs
        return

    class Contexts(CoveragePlugin):
        def dynamic_context(self, frame: FrameType) -> str | None:
            _, tests, name = frame.f_code.co_filename.rpartition("/tests/")
            if not tests or name.endswith(("harness.py", "conftest.py")):
                return None
            return f"tests/{name}::{frame.f_code.co_name}"

    registry.add_dynamic_context(Contexts())


def mutations(node: ast.AST) -> Iterator[ast.AST]:
    """Each way to break one node."""
    match node:
        case ast.Compare(left, [op, *ops], right) if type(op) in OTHER:
            yield ast.Compare(left, [OTHER[type(op)](), *ops], right)
        case ast.BinOp(left, op, right) if type(op) in OTHER:
            yield ast.BinOp(left, OTHER[type(op)](), right)
        case ast.BoolOp(op, values):
            yield ast.BoolOp(OTHER[type(op)](), values)
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield operand
        case ast.Constant(bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(int(value) | float(value)):
            yield ast.Constant(value + 1)
        case ast.Expr(ast.Call()):
            yield ast.Constant(None)
        case ast.If(test) | ast.While(test) | ast.IfExp(test):
            yield ast.copy_location(ast.UnaryOp(ast.Not(), test), test)


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes that take part in a result: no annotation, no text, no words of an error."""
    yield tree
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "exc", "msg", "pattern"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                yield from nodes(child)


def mutants(path: Path) -> list[Mutant]:
    """All mutants of one file."""
    source = path.read_bytes()
    begins = [0]
    for line in source.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))
    result = []
    for node in nodes(ast.parse(source)):
        for new in mutations(node):
            place: Any = new if hasattr(new, "lineno") and isinstance(new, ast.UnaryOp) else node
            start = begins[place.lineno - 1] + place.col_offset
            end = begins[place.end_lineno - 1] + place.end_col_offset
            lines = range(place.lineno, place.end_lineno + 1)
            # As many lines as before: a function is known again by its first line.
            text = f"({ast.unparse(new)}{chr(10) * (place.end_lineno - place.lineno)})"
            old = " ".join(source[start:end].decode().split())
            result.append(Mutant(str(path.relative_to(ROOT)), lines, start, end, old, text))
    return result


def names_by_test(path: Path) -> dict[str, set[str]]:
    """All names that a test of a file uses, those of the helpers that it names with them."""
    names: dict[str, set[str]] = {}
    for node in ast.parse(path.read_bytes()).body:
        found = {
            getattr(item, name)
            for item in ast.walk(node)
            for name in ("id", "attr", "arg")
            if isinstance(getattr(item, name, None), str)
        }
        targets = node.targets if isinstance(node, ast.Assign) else [node]
        for target in targets:
            names[getattr(target, "name", None) or getattr(target, "id", "")] = found
    for _ in range(3):
        names = {
            key: uses.union(*(names.get(use, ()) for use in uses)) for key, uses in names.items()
        }
    return {key: uses for key, uses in names.items() if key.startswith("test_")}


class Traced(NamedTuple):
    """Seconds of a test, and tests of a line."""

    seconds: dict[str, float]
    tests: dict[str, dict[int, set[str]]]


def run_traced(copy: Path, tests: list[str], select: str) -> None:
    """Runs the tests once under coverage."""
    (copy / "trace.ini").write_text(TRACE)
    record = copy / "times"
    files = {"COVERAGE_FILE": str(copy / ".traced"), "MUTANTS_RECORD": str(record)}
    files["PYTHONPATH"] = str(copy)  # coverage imports its plug-in before a rank has a folder
    command = [sys.executable, "-m", "coverage", "run", "--rcfile=trace.ini", "-m", "pytest"]
    command += [*PYTEST, "-q", "-m", select, *tests]
    status = subprocess.run(command, cwd=copy, env=os.environ | files, stdout=sys.stderr).returncode
    if status not in (0, 1):  # a test that fails is left out
        raise SystemExit(f"pytest ended with status {status}")
    import coverage

    measured = coverage.Coverage(data_file=str(copy / ".traced"), config_file=False)
    measured.combine([str(copy)])
    measured.save()


def read_traced(copy: Path) -> Traced:
    """The result of that run."""
    import coverage

    data = coverage.CoverageData(str(copy / ".traced"))
    data.read()
    seconds: dict[str, float] = defaultdict(float)
    for line in (copy / "times").read_text().splitlines():
        name, duration, failed = json.loads(line)
        seconds[re.sub(r"\[.*", "", name)] += float("inf") if failed else duration
    seconds = {name: duration for name, duration in seconds.items() if duration < float("inf")}
    names = {path: names_by_test(copy / path) for path in {test.split("::")[0] for test in seconds}}

    def tests_of(context: str) -> set[str]:
        function = context.partition("::")[2]
        if context in seconds or not function:
            return {context} & seconds.keys()
        return {
            f"{file}::{test}"
            for file, uses in names.items()
            for test, used in uses.items()
            if function in used and f"{file}::{test}" in seconds
        }

    known: dict[str, set[str]] = {}
    result: dict[str, dict[int, set[str]]] = {}
    for file in data.measured_files():
        if not Path(file).is_relative_to(copy):
            continue
        lines = result.setdefault(str(Path(file).relative_to(copy)), {})
        for line, contexts in data.contexts_by_lineno(file).items():
            known.update((name, tests_of(name)) for name in contexts if name not in known)
            lines[line] = set().union(*(known[name] for name in contexts))
    return Traced(seconds, result)


def tests_of_mutant(mutant: Mutant, traced: Traced, limit: float) -> list[str]:
    """Tests that run its lines, quickest first, ``limit`` seconds of them."""
    lines = traced.tests.get(mutant.path, {})
    covering: set[str] = set().union(*(lines.get(line, ()) for line in mutant.lines))
    if not covering and any(line in lines for line in mutant.lines):  # it runs at the import alone
        covering = set().union(*lines.values())
    chosen: list[str] = []
    total = 0.0
    for test in sorted(
        covering & traced.seconds.keys(), key=lambda test: (traced.seconds[test], test)
    ):
        total += traced.seconds[test]
        if chosen and total > limit:
            break
        chosen.append(test)
    return chosen


def patch(mutant: Mutant, copy: Path, source: bytes) -> bool:
    """Gives the functions of this process the code of a mutant; False where it is in none."""
    path = str(copy / mutant.path)
    codes: dict[tuple[str, int], CodeType] = {}
    waiting = [compile(source, path, "exec")]
    while waiting:
        code = waiting.pop()
        codes[code.co_name, code.co_firstlineno] = code
        waiting += [value for value in code.co_consts if isinstance(value, CodeType)]
    is_in_one = False
    for function in gc.get_objects():
        if type(function) is FunctionType and function.__code__.co_filename == path:
            old = function.__code__
            new = codes.get((old.co_name, old.co_firstlineno), old)
            if new != old:
                function.__code__ = new
                is_in_one = True
    return is_in_one


class Session:
    """Plug-in of pytest: runs the tests of a mutant in a fork of the process that collected all."""

    def __init__(
        self, copy: Path, traced: Traced, drawn: list[tuple[str, Mutant]], options: Any
    ) -> None:
        self.copy, self.traced, self.drawn, self.options = copy, traced, drawn, options
        self.sound: set[str] = set()
        self.items: dict[str, list[Any]] = defaultdict(list)

    def pytest_runtestloop(self, session: Any) -> bool:
        """Tries all mutants in place of the tests."""
        for item in session.items:
            self.items[item.nodeid.partition("[")[0]].append(item)
        tried: Counter[str] = Counter()
        killed: Counter[str] = Counter()
        results = []
        start = time.monotonic()
        for room, mutant in self.drawn:
            began = time.monotonic()
            if began - start > 60 * self.options.minutes:
                break
            failed = self.try_mutant(mutant)
            tried[room] += 1
            killed[room] += bool(failed)
            text = f"{mutant.path}:{mutant.lines[0]}: {mutant.old[:60]} -> {mutant.new[:60]}"
            seconds = time.monotonic() - began
            results.append({"mutant": text, "killed_by": failed, "seconds": round(seconds, 1)})
            word = "killed" if failed else "SURVIVED"
            print(f"{word} {seconds:.1f} s  {text}  [{failed}]", file=sys.stderr, flush=True)
            if self.options.json:
                summary = {"tried": tried, "killed": killed, "results": results}
                self.options.json.write_text(json.dumps(summary, indent=1))
        for room in tried:
            print(f"{room}: killed {killed[room]} of {tried[room]}", file=sys.stderr)
        return True

    def try_mutant(self, mutant: Mutant) -> str:
        """The test that fails for one mutant, or nothing."""
        tests = tests_of_mutant(mutant, self.traced, self.options.seconds)
        tests = [test for test in tests if test in self.items]
        if not tests:
            return ""
        file = self.copy / mutant.path
        source, times = file.read_bytes(), file.stat()
        broken = source[: mutant.start] + mutant.new.encode() + source[mutant.end :]
        file.write_bytes(broken)  # ranks import it
        failed = self.run(tests, mutant, broken)
        file.write_bytes(source)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # its compiled form is good again
        if failed in self.items and failed not in self.sound:
            if self.run([failed], None, b""):  # it fails without the mutant, too
                del self.items[failed]
                return self.try_mutant(mutant)
            self.sound.add(failed)
        return failed

    def run(self, tests: list[str], mutant: Mutant | None, source: bytes) -> str:
        """The first test that fails in a forked process, ``hangs``, or nothing."""
        record = self.copy / "result"
        record.unlink(missing_ok=True)
        if (child := os.fork()) == 0:
            try:
                record.write_text(self.try_in_child(tests, mutant, source))
            finally:
                os._exit(0)
        deadline = time.monotonic() + 60 + 4 * sum(self.traced.seconds[test] for test in tests)
        while (ended := os.waitpid(child, os.WNOHANG)[0]) == 0 and time.monotonic() < deadline:
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # ranks that are left over
        if not ended:
            os.waitpid(child, 0)
            return "hangs"
        return record.read_text() if record.exists() else ""

    def try_in_child(self, tests: list[str], mutant: Mutant | None, source: bytes) -> str:
        """The first test that fails in this process, with the code of a mutant."""
        os.setsid()
        devnull = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(devnull, stream)
        if mutant and not patch(mutant, self.copy, source):
            # It changes a module and not a function: a new process imports it.
            command = [sys.executable, "-m", "pytest", *PYTEST, "-x", *tests]
            environment = {**os.environ, "MUTANTS_RECORD": os.devnull}
            status = subprocess.run(command, env=environment, check=False).returncode
            return "in a new process" if status else ""
        chosen = [item for test in tests for item in self.items[test]]
        for item, following in itertools.zip_longest(chosen, chosen[1:]):
            reports = runtestprotocol(item, log=False, nextitem=following)
            if any(report.failed for report in reports):
                return str(item.nodeid).partition("[")[0]
        return ""


def main() -> None:
    """Draws mutants of each room, by turns, and says which of them survive."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rooms", nargs="+", type=Path, help="files or folders to break")
    parser.add_argument("--number", type=int, default=150, help="mutants of each room")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", nargs="+", default=["tests/unit", "tests/distributed"])
    parser.add_argument("--select", default="not slow", help="marker expression of pytest")
    parser.add_argument("--seconds", type=float, default=30, help="of tests, for one mutant")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after these")
    parser.add_argument("--json", type=Path, help="a file for the results")
    parser.add_argument("--copy", type=Path, help="a folder to keep the traced run in, or with one")
    arguments = parser.parse_args()
    drawn = []
    for room in arguments.rooms:
        files = sorted(room.resolve().rglob("*.py")) if room.is_dir() else [room.resolve()]
        choices = [mutant for file in files for mutant in mutants(file)]
        number = min(arguments.number, len(choices))
        chosen = random.Random(arguments.seed).sample(choices, number)
        drawn += [(place, str(room), mutant) for place, mutant in enumerate(chosen)]
    drawn.sort(key=lambda item: item[:2])
    copy = (arguments.copy or Path(tempfile.mkdtemp(prefix="mutants"), "copy")).resolve()
    if not copy.exists():
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "outputs"))
        run_traced(copy, arguments.tests, arguments.select)
    traced = read_traced(copy)
    import pytest

    os.chdir(copy)
    os.environ["PYTHONPATH"] = sys.path[0] = str(copy)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    session = Session(copy, traced, [item[1:] for item in drawn], arguments)
    options = ["-q", "-p", "no:cacheprovider", "-m", arguments.select, *arguments.tests]
    pytest.main(options, plugins=[session])


if __name__ == "__main__":
    main()
