"""Run the printed commands of the README, in order, in a fresh clone and a fresh shell.

``python -m tests.fresh_shell FOLDER`` clones the last commit into a new folder, and prints the
seconds and the exit status of every command. ``--torch 'pip install ...'`` is the line of
PyTorch's Get Started page that the README asks for on machines without a GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.examples import ROOT

PROSE = ("./launch/quickstart.sh", "amo report ")
"""Starts of the commands to run that stand in sentences."""
MARK = "@@"


def commands(page: str) -> Iterator[tuple[str, str]]:
    """Shell commands of a page in order, each with the text of the file that it needs first."""
    has_run = set()
    for language, block, word in re.findall(r"```(\w+)\n(.*?)```|`([^`\n]+)`", page, re.DOTALL):
        if language == "bash":
            for line in block.splitlines():
                yield line.partition("  #")[0].strip(), ""
        elif language == "python" and block.startswith("# "):
            yield block.splitlines()[0].removeprefix("# "), block
        elif word.startswith(PROSE) and word not in has_run:
            has_run.add(word)
            yield word, ""


def in_order(page: str, torch_line: str | None) -> list[tuple[str, str]]:
    """The commands of the page; what a sentence announces before its install runs after it."""
    found = list(commands(page))
    first = next(place for place, (command, _) in enumerate(found) if "venv" in command)
    found = found[first:]
    activation = next(place for place, (word, _) in enumerate(found) if word.startswith("source"))
    if torch_line:
        found.insert(activation + 1, (torch_line, ""))
    return found


def script(steps: list[tuple[str, str]]) -> str:
    """A shell script of all commands, which prints a mark with status and seconds after each."""
    lines = []
    for number, (command, text) in enumerate(steps):
        if text:
            name = next(word for word in shlex.split(command) if word.endswith(".py"))
            lines.append(f"cat > {name} <<'{MARK}'\n{text}{MARK}")
        lines.append(f"start=$SECONDS\n{command} < /dev/null")
        lines.append(f'echo "{MARK} {number} $? $((SECONDS - start))"')
    return "\n".join(lines)


def main() -> int:
    """Clone, run and print a table.

    Returns:
        Number of commands that failed.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.fresh_shell")
    parser.add_argument("folder", type=Path, help="folder of the clone, which must not exist")
    parser.add_argument("--torch", help="command that installs PyTorch, after the activation")
    args = parser.parse_args()
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(args.folder)], check=True)
    steps = in_order((args.folder / "README.md").read_text(), args.torch)
    wanted = re.compile(
        "HOME|PATH|LANG|PIP_.*"
    )  # the shell of a login, and how pip finds its index
    kept = {name: value for name, value in os.environ.items() if wanted.fullmatch(name)}
    kept["PATH"] = os.pathsep.join(
        part for part in kept["PATH"].split(os.pathsep) if part != str(Path(sys.executable).parent)
    )
    log = args.folder / "fresh_shell.log"
    with log.open("w") as output:
        shell = ["bash", "--noprofile", "--norc"]
        subprocess.run(
            shell, input=script(steps), text=True, cwd=args.folder, env=kept, stdout=output,
            stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
    results = re.findall(rf"^{MARK} (\d+) (\d+) (\d+)$", log.read_text(), re.MULTILINE)
    for number, status, seconds in results:
        print(f"{int(seconds) / 60:6.1f} min  status {status}  {steps[int(number)][0]}")
    print(f"{len(results)} of {len(steps)} commands ended; output in {log}")
    return len(steps) - sum(status == "0" for _, status, _ in results)


if __name__ == "__main__":
    sys.exit(main())
