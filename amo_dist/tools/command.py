"""What commands share: their parser, how they are run, options of pairs, and aligned tables."""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, TypeVar

from amo_dist.schedule.fields import read_file

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""What ``argparse.ArgumentParser.add_subparsers`` returns."""

_T = TypeVar("_T")


MOST_RANKS = 1024
"""Processes that one command starts on a node, at most."""
MOST_WORLD = 32_768
"""Ranks that are laid out without being started, at most: half a minute of work."""

_LONGEST = 1000
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Tell a mistake among the arguments, and exit with status 2."""
        print(one_line(f"{self.prog}: error: {message} (see --help)"), file=sys.stderr)
        raise SystemExit(2)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # Python 3.11 takes `--option=--` for an option with an empty list.
        if action.option_strings and "--" in arg_strings:
            self.error(f"argument {'/'.join(action.option_strings)}: found '--', expected a value")
        return super()._get_values(action, arg_strings)


def printable(text: str, keep: str = "\n") -> str:
    """A text without what would command a terminal; files that others wrote may hold that."""
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def print_text(text: str) -> None:
    """Print lines that hold words of files; all commands print these here."""
    print(printable(text))


def one_line(text: str) -> str:
    """A message on one line of bounded length, whatever a user's words in it hold."""
    text = printable(text, keep="")
    half = _LONGEST // 2
    return text if len(text) <= _LONGEST else f"{text[:half]} ... {text[-half:]}"


def whole(least: int, most: int = 10**9) -> Callable[[str], int]:
    """An ``argparse`` type: integers from ``least`` to ``most``."""
    expected = f"an integer >= {least} and <= {most}"
    return _reader(int, lambda found: least <= found <= most, expected)


def positive(most: float) -> Callable[[str], float]:
    """An ``argparse`` type: numbers above 0, up to ``most``."""
    return _reader(float, lambda found: 0 < found <= most, f"a number > 0 and <= {most:g}")


def _reader(
    kind: Callable[[str], _T], is_valid: Callable[[_T], bool], expected: str
) -> Callable[[str], _T]:
    def read(text: str) -> _T:
        found: _T | str = text
        with contextlib.suppress(ValueError):
            found = value = kind(text)
            if is_valid(value):
                return value
        raise argparse.ArgumentTypeError(f"found {found!r}, expected {expected}")

    return read


def read_json_file(path: Path) -> Any:
    """What a JSON file holds.

    Raises:
        ValueError: Names the file, which cannot be read or is no JSON.
    """
    try:
        return json.loads(read_file(path))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # JSON's, and that of UTF-8
        raise ValueError(f"{path}: not JSON: {error}") from None


def run_command(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> int:
    """Parse arguments and run the command that they name.

    A command whose parser sets ``overrides`` gets there the options that it does not know.

    Args:
        parser: With the commands, each of which sets ``run``: parsed arguments to an exit status.
        argv: Arguments after the program's name; those of the process by default.

    Returns:
        The command's own exit status, 2 for a mistake of the user's or a file that cannot be read
        or written (told in one line), or 0 where the reader of the output, such as ``head``, has
        seen enough and closed it.
    """
    if sys.stdout is None:  # the first file that is opened would take its place
        return _mistake("standard output: found it closed, expected it open")
    try:
        os.getcwd()
    except OSError:  # libraries would fail one by one, some without an exception
        return _mistake("the current folder has been deleted, expected one that exists")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names of files may be no UTF-8, and a terminal may know no blocks.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        args, rest = parser.parse_known_args(argv)
        if hasattr(args, "overrides"):
            args.overrides = rest
        elif rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        status: int = args.run(args)
        sys.stdout.flush()  # else what is left would fail at the end of the process
        return status
    except SystemExit as stop:  # after --help, or an error that argparse reported
        return int(stop.code or 0)
    except ValueError as error:
        return _mistake(str(error))
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
    """Else what is left would fail again at the end of the process."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def read_pair(flag: str, text: str, kind: Callable[[str], _T], expected: str) -> tuple[str, _T]:
    """Split ``name=value`` and read the value.

    Args:
        flag: The option that the text was given to.
        text: What was given.
        kind: Reads the value; raises ``ValueError`` for one that it does not take.
        expected: What an error asks for.

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
    """Newton-Schulz steps by operator type.

    Args:
        flag: The option that the texts were given to.
        texts: Each ``TYPE=STEPS``.
        types: Operator types that may be named.

    Raises:
        ValueError: A text is not of this form, names another type, or has no integer >= 1.
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
    """The cells of a table, each as wide as the widest of its column.

    Args:
        rows: Of equally many cells, the header among them.
        left: Columns that are aligned to the left; the others are aligned to the right.
        least: The fewest characters of a column.
    """
    widths = [max(least, *map(len, column)) for column in zip(*rows, strict=True)]
    return [
        [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]
