"""Run a command of ``amo``, and turn mistakes into lines and exit statuses."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence


def run_command(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> int:
    """Parse arguments and run the command that they name.

    Args:
        parser: Parser with the commands. Each sets ``run``, a function from parsed arguments to an
            exit status. A command with the default ``overrides`` gets its unknown options there.
        argv: Arguments after the program's name; None for those of the process.

    Returns:
        The command's own exit status; 2 for a mistake of the user's or a file that cannot be read
        or written, a line for each; 0 if a reader of the output such as ``head`` closed it.
    """
    try:
        args, unknown = parser.parse_known_args(argv)
        if unknown and not hasattr(args, "overrides"):
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        args.overrides = unknown
        status: int = args.run(args)
        sys.stdout.flush()  # a later failure, at the end of the process, would be a traceback
        return status
    except SystemExit as stop:  # after --help, or an error of the parser
        return int(stop.code or 0)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # Python would try to write the rest at the end of the process.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, RecursionError) as error:
        for line in str(error).splitlines() or [type(error).__name__]:
            print(f"error: {printable(line)}", file=sys.stderr)
        return 2


def printable(text: str) -> str:
    """Escape a text that could control a terminal, as a foreign file's may."""
    return text if text.isprintable() else ascii(text)[1:-1]
