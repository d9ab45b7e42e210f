"""What commands share: their parser, how they are run, options of pairs, and aligned tables."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn, TypeAlias, TypeVar

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""What ``argparse.ArgumentParser.add_subparsers`` returns."""

_T = TypeVar("_T")


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Tell a mistake among the arguments, and exit with status 2."""
        print(f"{self.prog}: error: {message} (see --help)", file=sys.stderr)
        raise SystemExit(2)


def run_command(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> int:
    """Parse arguments and run the command that they name.

    A command whose parser sets ``overrides`` gets there the options that it does not know.

    Args:
        parser: With the commands, each of which sets ``run``: parsed arguments to an exit status.
        argv: Arguments after the program's name; those of the process by default.

    Returns:
        The command's own exit status, 2 for a mistake of the user's (told in one line), or 0 where
        the reader of the output, such as ``head``, has seen enough and closed it.
    """
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
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


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
