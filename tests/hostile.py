"""Hostile command lines: bad values for every option and argument of every command of ``amo``.

``python -m tests.hostile`` tries all of them in a few minutes, ``--sample 100`` some. A command
must answer each in bounded time with status 0, or 2 after one line, and never with a traceback.
What would start ranks or load a model ends where it would start.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import io
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

LIMIT = 60
"""Seconds for one command; a guard against what never ends."""
ROOT = Path(__file__).resolve().parents[1]

TEXTS = (
    *("", " ", "-", "--", "=", "a=", "=1", ",", "../..", "nan", "inf", "-inf", "1e999", "-1", "0"),
    *("0.5", "7", "0x10", "1_0", "\u0661", "99999999999999999999", "-99999999999999999999"),
    *("1000000", "9" * 5000, "x" * 300, "y" * 100_000, "\udcff", "a\nb", "a\x1b[2J", "a\0b"),
    *("attn_q=nan", "attn_q=" + "9" * 20, "attn_q=1,attn_q=2", "1:2:3:4", "0/0", "1/" + "9" * 20),
    *("attn_q=0x1", "attn_q=1x" + "9" * 400, "1:9e99:1e-99", "0.1:nan", "0:1", "null", "[]", "{}"),
)
"""Values that are no path of something that exists."""


WRITTEN = ("output", "json", "results", "slurm", "png", "out", "hf_folder")
"""Arguments that name what is written: a full disk is one more bad value."""


class Reached(BaseException):
    """A command came to where it would start ranks, or load a model."""


class TookTooLong(BaseException):
    """A command did not end."""


def make_corner(folder: Path) -> list[str]:
    """Make files that nobody expects in the current folder, and return their names."""
    deep = "[" * 100_000
    contents: dict[str, bytes] = {
        "empty": b"",
        "binary.json": b"\xff\xfe\x00{",
        "deep.json": deep.encode(),
        "list.json": b"[]",
        "number.json": b"9" * 5000,
        "huge.json": b'{"layers": 1e999, "dim": 99999999999999999999, "hardware": 7}',
        "shape.json": b'{"layers": 999999999, "dim": 8, "ffn_dim": 8, "heads": 1, "kv_heads": 1}',
        "text.toml": b"a = [",
        "deep.toml": f"a = {'[' * 5000}".encode(),
        "binary.jsonl": b'{"text": "a"}\n\xff\xff\n',
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    (folder / "loop").symlink_to("loop")
    (folder / "folder").mkdir()
    good = json.dumps(RECORD).encode()
    changed = {**RECORD, "step": "x", "num_steps_by_type": [], "optimizer": None}
    runs: dict[str, dict[str, bytes]] = {
        "run": {"metrics.jsonl": good + b"\n"},
        "run_empty": {"metrics.jsonl": b"", "run.json": b"", "plan.json": b""},
        "run_deep": {name: deep.encode() + b"\n{}\n" for name in ("metrics.jsonl", "run.json")},
        "run_deep_plan": {"metrics.jsonl": good, "plan.json": b'{"a": ' + deep.encode()},
        "run_stray": {"metrics.jsonl": good + b"\n\xff\n" + good, "run.json": b"\xff"},
        "run_types": {"metrics.jsonl": json.dumps(changed).encode() + b"\n", "run.json": b"[1]"},
        "run_sparse": {"metrics.jsonl": b'{"step": 1}\n', "run.json": b'{"checkpoint": 3}'},
        "run_null": {"metrics.jsonl": b"{}\n", "geometry.jsonl": b"{}\n{}\n", "run.json": b"{}"},
    }
    for name, files in runs.items():
        (folder / name).mkdir()
        for file, content in files.items():
            (folder / name / file).write_bytes(content)
    for kind in ("loop", "folder"):
        (folder / f"run_of_{kind}s").mkdir()
        for file in ("metrics.jsonl", "run.json", "plan.json", "lock", "checkpoint"):
            path = folder / f"run_of_{kind}s" / file
            path.symlink_to(file) if kind == "loop" else path.mkdir()
    os.mkfifo(folder / "pipe")
    for kind, target in (("zeros", "/dev/zero"), ("pipes", "../pipe")):
        (folder / f"run_of_{kind}").mkdir()
        for file in ("metrics.jsonl", "run.json", "plan.json", "geometry.jsonl"):
            (folder / f"run_of_{kind}" / file).symlink_to(target)
    saved = folder / "run" / "checkpoint" / "step-1"
    saved.mkdir(parents=True)
    (saved / ".metadata").write_bytes(b"garbage")
    config = {"model": {"name": "llama3", "flavor": "quickstart"}, "hf_assets_path": "folder"}
    config |= {"tokenizer": {"kind": "byte"}, "optimizer": {"name": "AMO"}}
    (folder / "run" / "run.json").write_text(json.dumps(config))
    scores = {"model": "m", "tasks": {"a": 1.0}}
    both = [{**scores, "optimizer": name} for name in ("AMO", "Muon-KJ")]
    (folder / "scores.json").write_text(json.dumps(both))
    (folder / "corpus.jsonl").write_text('{"text": "abc"}\n' * 20)
    sizes = {"step": 1, "name": "w", "operator_type": "attn_q", "model": "m", "family": "f"}
    sizes |= {"sigma_min": 0.1, "sigma_max": 1, "frobenius": 2}
    (folder / "log.jsonl").write_text(json.dumps(sizes) + "\n")
    more = [*contents, *runs, "loop", "loop/x", "folder", "empty/x", "run_of_loops", "nothing"]
    more += ["run_of_folders", "run_of_zeros", "run_of_pipes", "pipe", "/dev/zero"]
    more += ["z/" * 3000, "/dev/null", "/proc/x"]
    more += ["run/checkpoint", "run/checkpoint/step-1", "scores.json", "log.jsonl", "corpus.jsonl"]
    return more


RECORD: dict[str, Any] = {
    "step": 1,
    "training_steps": 2,
    "lock_step": 2,
    "loss": 1.0,
    "phase": "locked",
    "seconds_per_step": 1.0,
    "tokens_per_second": 1.0,
    "num_steps_by_type": {"attn_q": 5},
    "optimizer": {},
}

QUICKSTART = str(ROOT / "configs" / "quickstart.toml")

STARTS: dict[str, list[list[str]]] = {
    "train": [[QUICKSTART]],
    "paper compare": [["scores.json", "--no-test"]],
    "paper score": [["run", "--tasks", "sciq"]],
    "paper list": [[]],
    "paper show": [["ell"]],
    "paper run": [["ell", "--small", "--out", "new"], ["ell", "--dry-run"]],
    "paper gather": [["ell", "--small"]],
    "paper evaluate": [["ell", "--small", "--dry-run"]],
    "export": [["run", "-o", "new"]],
    "preflight": [[QUICKSTART, "--world", "2"]],
    "paper static-schedule": [["log.jsonl"]],
    "paper figures": [["run", "-o", "new"]],
    "tokenize": [["corpus.jsonl", "-o", "new", "--tokenizer", "byte"]],
    "report": [["run"]],
    "plan": [["--ell", "attn_q=1e-3", "--ell", "mlp_up=1e-2"], ["--plan", "run"]],
    "doctor": [["--seconds", "60"]],
}
"""For each command arguments that work, or nearly: one of them is exchanged."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """How a command line ended."""

    line: tuple[str, ...]
    status: int | None
    """None where it was stopped before it would start something."""
    seconds: float
    error: str
    """What it wrote to standard error."""
    traceback: str = ""

    def problem(self) -> str:
        """What is wrong with the answer; empty where nothing is."""
        if self.traceback:
            return self.traceback.strip().splitlines()[-1][:300]
        has_mistakes = self.status == 1 and self.line[0] == "preflight"
        if self.status not in (None, 0, 2) and not has_mistakes:
            return f"status {self.status}: {self.error[-300:]}"
        if "Traceback" in self.error:
            return f"a traceback: {self.error[-300:]}"
        if self.status == 2 or has_mistakes:
            return self._of_error()
        return ""

    def _of_error(self) -> str:
        is_box = "╭" in self.error  # tyro's
        told = [one for one in self.error.splitlines() if "error: " in one]
        # These tell all mistakes of a config.
        most = 1 if self.line[0] not in ("train", "preflight") else 20
        if not is_box and not 1 <= len(told) <= most:
            return f"{len(told)} lines of error: {self.error[:300]}"
        more = [one for one in self.error.split("\n") if one not in told and one.strip()]
        # A progress bar may have begun.
        if not is_box and any(not one.startswith(("note:", "warning:", "\r")) for one in more):
            return f"more than one line: {self.error[:300]!r}"
        if is_box and "amo train --help" not in self.error:
            return f"another program's name: {self.error[-300:]}"
        if max(map(len, told), default=0) > 4000:
            return f"a line of {max(map(len, told))} characters: {told[0][:100]}..."
        return ""


def lines(values: Sequence[str], fields: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Every option and argument of every command with every value, and fields of the config.

    Args:
        values: Bad ones.
        fields: Names of options of torchtitan.
    """
    from benchmarks.amo_paper.__main__ import build_parser as build_paper_parser
    from torchtitan_ext.cli import build_parser

    yield from ((), ("--",), ("",), ("no",), ("plan",), ("paper",), ("paper", ""))
    for words, parser in (*_leaves(build_parser()), *_leaves(build_paper_parser(), ("paper",))):
        for start in STARTS[" ".join(words)]:
            yield from _of_command(words, parser, start, values)
        if parser.get_default("overrides") is not None and words[0] != "paper":
            start = STARTS[" ".join(words)][0]
            for field in fields:
                for value in values:
                    yield (*words, *start, f"--{field}={value}")


def _of_command(
    words: tuple[str, ...],
    parser: argparse.ArgumentParser,
    start: Sequence[str],
    values: Sequence[str],
) -> Iterator[tuple[str, ...]]:
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        is_written = bool(action.option_strings) and action.dest in WRITTEN
        for value in (*values, "/dev/full" if is_written else "/proc/self/mem"):
            if not action.option_strings:
                # Whatever stands first is its place: all starts name what they need by options.
                yield (*words, value, *start[1:])
            elif action.nargs == 0:
                break
            else:
                yield (*words, *start, f"{max(action.option_strings, key=len)}={value}")
        else:
            continue
        yield (*words, *start, action.option_strings[0], "surplus")
    yield (*words, *start, "--nothing-of-this-name=1")


def _leaves(
    parser: argparse.ArgumentParser, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    inner = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
    if not inner:
        yield words, parser
    for action in inner:
        for name, child in action.choices.items():
            yield from _leaves(child, (*words, name))


def config_fields() -> list[str]:
    """Every option of torchtitan that a config has, by its dotted name."""
    from torchtitan_ext.plugin.trainer import Trainer

    return [*_names(Trainer.Config())]


def _names(section: Any, prefix: str = "") -> Iterator[str]:
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from _names(value, f"{prefix}{field.name}.")
        elif field.name != "model_spec":
            yield prefix + field.name


@contextlib.contextmanager
def stopped() -> Iterator[None]:
    """Have commands end where they would start ranks, load a model or ask the network."""
    import torchtitan_ext.train
    from amo_dist.doctor import site
    from benchmarks.amo_paper import evaluate, runner
    from torchtitan_ext.data import files, loader
    from torchtitan_ext.tools import export, preflight_here
    from torchtitan_ext.tools import train as command

    def reach(*_: Any, **__: Any) -> Any:
        raise Reached

    with contextlib.ExitStack() as stack:
        for module, name in (
            *((command, "start"), (torchtitan_ext.train, "main"), (runner, "_train")),
            *((runner, "_prepare"), (site, "join"), (files, "hub_files")),
            *((loader, "tokenize_first"), (evaluate, "_harness")),
        ):
            stack.enter_context(mock.patch.object(module, name, reach))
        library = type("Library", (), {"__getattr__": reach})()
        stack.enter_context(mock.patch.object(export, "require_transformers", return_value=library))
        no_hub = mock.patch.object(preflight_here, "_why_no_hub", return_value="is not asked")
        stack.enter_context(no_hub)
        environment = {k: v for k, v in os.environ.items() if k != "RANK"}
        stack.enter_context(mock.patch.dict(os.environ, environment, clear=True))
        yield


def answer(line: Sequence[str]) -> Answer:
    """Run one command line in this process, in the current folder."""
    from benchmarks.amo_paper.__main__ import main as paper_main
    from torchtitan_ext.cli import main

    def stop(*_: object) -> None:
        raise TookTooLong(f"not done after {LIMIT} s")

    out, err = (
        io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=errors, write_through=True)
        for errors in ("strict", "backslashreplace")
    )
    before, start = signal.signal(signal.SIGALRM, stop), time.monotonic()
    signal.alarm(LIMIT)
    status, told = None, ""
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            is_paper = list(line[:1]) == ["paper"]
            status = paper_main(line[1:]) if is_paper else main(line)
    except Reached:
        pass
    except BaseException:
        told = traceback.format_exc()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    seconds = time.monotonic() - start
    texts = [one.buffer.getvalue().decode("utf-8") for one in (err, out)]  # type: ignore[attr-defined]
    error = texts[0]
    if status == 1 and line[0] == "preflight":  # mistakes of a config end its report
        error += "".join(f"{row}\n" for row in texts[1].splitlines() if row.startswith("error: "))
        if "--json" in line:
            error += "".join(f"error: {one}\n" for one in json.loads(texts[1])["problems"])
    return Answer(tuple(line), status, seconds, error, told)


def try_lines(chosen: Sequence[Sequence[str]], verbose: bool = False) -> list[Answer]:
    """The answers that are wrong."""
    bad: list[Answer] = []
    kinds: collections.Counter[str] = collections.Counter()
    with stopped():
        for number, line in enumerate(chosen, start=1):
            one = answer(line)
            kinds["started" if one.status is None else f"status {one.status}"] += 1
            if one.problem():
                bad.append(one)
            if verbose and one.problem():
                print(f"{shown(line)}\n    {one.problem()}", flush=True)
            if verbose and sys.stderr.isatty():
                print(f"\r{number}/{len(chosen)}", end="", file=sys.stderr)
            if verbose and one.seconds > 10:
                print(f"{shown(line)}\n    took {one.seconds:.0f} s", flush=True)
    if verbose:
        print(dict(kinds))
    return bad


def shown(line: Sequence[str]) -> str:
    """A line for messages, with its long words cut."""
    return "amo " + " ".join(repr(word if len(word) < 90 else f"{word[:60]}...") for word in line)


@contextlib.contextmanager
def in_corner() -> Iterator[list[str]]:
    """A folder of hostile files as the current one; gives all bad values."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        try:
            yield [*TEXTS, *make_corner(Path(name))]
        finally:
            os.chdir(before)


def main() -> int:
    """Try them and print what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("--sample", type=int, help="so many lines (default: all)")
    parser.add_argument("--fields", type=int, default=12, help="fields of the config (default 12)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="one command")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    dice = random.Random(arguments.seed)
    with in_corner() as values:
        chosen = [*lines(values, dice.sample(config_fields(), arguments.fields))]
        if arguments.only:
            chosen = [line for line in chosen if line[:1] == (arguments.only,)]
        if arguments.sample:
            chosen = dice.sample(chosen, arguments.sample)
        bad = try_lines(chosen, verbose=True)
    tracebacks = sum(bool(one.traceback) for one in bad)
    print(f"{len(chosen)} command lines: {len(bad)} wrong, {tracebacks} of them with a traceback")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
