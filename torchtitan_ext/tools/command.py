"""Parser, runner, readers of options, and aligned tables that all commands share."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import errno
import importlib.util
import io
import itertools
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, TypeVar

from amo_dist.schedule.fields import read_file

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""Return type of ``argparse.ArgumentParser.add_subparsers``."""

_T = TypeVar("_T")

MOST_RANKS = 1024
"""Most processes that one command starts on a node."""
MOST_WORLD = 32_768
"""Most ranks that a command lays out without starting them: half a minute of work."""

_LONGEST = 1000
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class Parser(argparse.ArgumentParser):
    """Parser whose errors are one line: the option, the value found, and the expected ones.

    A command that sets the default ``overrides`` accepts unknown options, unless they look like one
    of its own; every other one refuses them. Errors suggest the closest option.
    """

    def error(self, message: str) -> NoReturn:
        """Print a mistake among the arguments as one line, and exit with status 2."""
        message = message.removeprefix("argument ")
        if choice := re.fullmatch(r"(.+): invalid choice: '(.*)' \(choose from (.*)\)", message):
            option, value, choices = choice.groups()
            names = [name.strip("' ") for name in choices.split(",")]
            remedy = f"expected one of {', '.join(names)}{_suggestion(value, names)}"
            message = f"{option}: found '{value}', {remedy}"
        print(one_line(f"error: {message}; see {self.prog} --help"), file=sys.stderr)
        raise SystemExit(2)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments, but refuse unknown ones here, where the command's options are known."""
        if self._subparsers is None:
            # Before argparse asks for what is missing: a misspelt option may be just that.
            self._refuse_misspelt(sys.argv[1:] if args is None else args)
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown and not hasattr(namespace, "overrides"):
            self.error(f"found unknown {' '.join(unknown)}, expected options of {self.prog}")
        return namespace, unknown

    def _refuse_misspelt(self, words: Sequence[str]) -> None:
        options = sorted(self._option_string_actions)
        takes_others = self.get_default("overrides") is not None
        for word in itertools.takewhile(lambda word: word != "--", words):
            name = word.partition("=")[0]
            if not name.startswith("--") or any(option.startswith(name) for option in options):
                continue
            hint = _suggestion(name, options, 0.75 if takes_others else 0.6)
            if not takes_others or (hint and "." not in name):
                self.error(f"found unknown {name}, expected options of {self.prog}{hint}")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # Python 3.11 reads `--option=--` as an option with an empty list.
        if action.option_strings and "--" in arg_strings:
            self.error(f"{'/'.join(action.option_strings)}: found '--', expected a value")
        return super()._get_values(action, arg_strings)


def _suggestion(value: str, names: Sequence[str], least: float = 0.6) -> str:
    """Name that a misspelt one resembles, in brackets; empty below the least likeness."""
    closest = difflib.get_close_matches(value[:_LONGEST], names, 1, least)
    return f" (did you mean {closest[0]}?)" if closest else ""


def printable(text: str, keep: str = "\n") -> str:
    """Escape the characters of a text that could control a terminal, as a foreign file's may."""
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def print_text(text: str) -> None:
    """Print lines that quote files, escaped as by `printable`."""
    print(printable(text))


def one_line(text: str) -> str:
    """Escape a message to one line, and shorten its middle to a bounded length."""
    text = printable(text, keep="")
    half = _LONGEST // 2
    return text if len(text) <= _LONGEST else f"{text[:half]} ... {text[-half:]}"


class Mistakes(ValueError):
    """Several mistakes of the user's.

    Args:
        problems: A line for each, with the field, what was found and what was expected.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


def whole(least: int, most: int = 10**9) -> Callable[[str], int]:
    """Make an ``argparse`` type of integers from ``least`` to ``most``."""
    expected = f"an integer >= {least} and <= {most}"
    return _reader(int, lambda value: least <= value <= most, expected)


def positive(most: float) -> Callable[[str], float]:
    """Make an ``argparse`` type of numbers above 0, up to ``most``."""
    return _reader(float, lambda value: 0 < value <= most, f"a number > 0 and <= {most:g}")


def _reader(
    kind: Callable[[str], _T], is_valid: Callable[[_T], bool], expected: str
) -> Callable[[str], _T]:
    def read(text: str) -> _T:
        shown: _T | str = text
        with contextlib.suppress(ValueError):
            shown = value = kind(text)
            if is_valid(value):
                return value
        raise argparse.ArgumentTypeError(f"found {shown!r}, expected {expected}")

    return read


def read_json_file(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        ValueError: The file, which the message names, cannot be read or is no JSON.
    """
    try:
        return json.loads(read_file(path))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # of JSON, and of UTF-8
        raise ValueError(f"{path}: not JSON: {error}") from None


def run_command(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> int:
    """Parse arguments and run the command that they name.

    A command with the default ``overrides`` receives its unknown options there.

    Args:
        parser: Parser with the commands. Each sets ``run``, a function from parsed arguments to an
            exit status.
        argv: Arguments after the program's name; None for those of the process.

    Returns:
        The command's own exit status; 2 for a mistake of the user's or a file that cannot be read
        or written, printed in one line; 0 if a reader of the output such as ``head`` closed it.
    """
    if sys.stdout is None:  # the next opened file would take its descriptor
        return _mistake("standard output: found it closed, expected it open")
    try:
        os.getcwd()
    except OSError:  # libraries would fail later, some without an exception
        return _mistake("the current folder has been deleted, expected one that exists")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # File names may be invalid UTF-8, and a terminal's encoding may lack block characters.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        args, unknown = parser.parse_known_args(argv)
        if unknown:
            args.overrides = unknown
        status: int = args.run(args)
        sys.stdout.flush()  # a later failure, at the end of the process, would print a traceback
        return status
    except SystemExit as stop:  # after --help, or an error of the parser
        return int(stop.code or 0)
    except Mistakes as error:
        return max(map(_mistake, error.problems))
    except ValueError as error:
        return _mistake(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        _drop_output()
        return 0
    except OSError as error:
        if error.filename is not None:
            return _mistake(f"{os.fsdecode(error.filename)}: {error.strerror}")
        if error.errno not in _FULL_DISK:
            raise
        _drop_output()
        return _mistake(f"standard output: {error.strerror}")


def _mistake(text: str) -> int:
    print(one_line(f"error: {text}"), file=sys.stderr)
    return 2


def _drop_output() -> None:
    """Discard buffered output, which would fail again at the end of the process."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def read_pair(flag: str, text: str, kind: Callable[[str], _T], expected: str) -> tuple[str, _T]:
    """Split ``name=value`` and read the value.

    Args:
        flag: Option that holds the text, for errors.
        text: Value of the option.
        kind: Reader of the value; raises ``ValueError`` for an invalid one.
        expected: Expected form, for errors.

    Raises:
        ValueError: The text is not of this form.
    """
    name, _, value = text.partition("=")
    try:
        if name:
            return name, kind(value)
    except ValueError:
        pass
    raise ValueError(f"{flag}: found {text!r}, expected {expected}")


def read_steps(flag: str, texts: Iterable[str], types: Sequence[str]) -> dict[str, int]:
    """Read Newton-Schulz steps by operator type.

    Args:
        flag: Option that holds the texts, for errors.
        texts: Texts of the form ``TYPE=STEPS``.
        types: Allowed operator types.

    Raises:
        ValueError: A text has another form, another type, or no integer >= 1.
    """
    expected = f"TYPE=STEPS, a type of {', '.join(types)} and an integer >= 1"
    steps: dict[str, int] = {}
    for text in texts:
        name, number = read_pair(flag, text.strip(), int, expected)
        if name not in types or number < 1:
            raise ValueError(f"{flag}: found {text!r}, expected {expected}")
        steps[name] = number
    return steps


def pad(rows: Sequence[Sequence[str]], left: Sequence[int] = (), least: int = 0) -> list[list[str]]:
    """Pad the cells of a table to the width of their column.

    Args:
        rows: Rows of equally many cells, header included.
        left: Columns to align to the left; the others are aligned to the right.
        least: Fewest characters of a column.
    """
    widths = [max(least, *map(len, column)) for column in zip(*rows, strict=True)]
    return [
        [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """Cells below a header.

    Attributes:
        head: Header of each column.
        rows: Cells of each row. A column of numbers is aligned to the right, others to the left.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def is_text(self, column: int) -> bool:
        """Whether a column holds more than numbers."""
        return column == 0 or not all(re.fullmatch(r"[\d.,]*", row[column]) for row in self.rows)

    def lines(self) -> list[str]:
        """The table as aligned and indented lines."""
        left = [column for column in range(len(self.head)) if self.is_text(column)]
        return [f"  {'  '.join(row)}".rstrip() for row in pad([self.head, *self.rows], left)]


def plain_text(parts: Iterable[str | Table]) -> str:
    """Lines and tables as text of aligned lines."""
    return "\n".join(
        line for part in parts for line in ([part] if isinstance(part, str) else part.lines())
    )


def print_parts(parts: Iterable[str | Table]) -> None:
    """Print lines and tables: in colour on a terminal if rich is installed, else as plain lines.

    Args:
        parts: Tables, and lines without an indent, which are titles, or with one.
    """
    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        print_text(plain_text(parts))
        return
    # Imported by name: amo_dist depends on torch alone.
    console = importlib.import_module("rich.console").Console(highlight=False)
    make_table: Any = importlib.import_module("rich.table").Table
    make_text: Any = importlib.import_module("rich.text").Text  # without markup of its own
    for part in parts:
        if isinstance(part, str):
            is_error, is_title = part.startswith("error: "), not part.startswith(" ")
            style = "red" if is_error else "bold" if is_title else ""
            console.print(printable(part), style=style, markup=False, soft_wrap=True)
            continue
        table = make_table(box=None, header_style="cyan", padding=(0, 2, 0, 0))
        for column, title in enumerate(part.head):
            table.add_column(title, justify="left" if part.is_text(column) else "right")
        for row in part.rows:
            table.add_row(*(make_text(printable(cell)) for cell in row))
        console.print(table)
