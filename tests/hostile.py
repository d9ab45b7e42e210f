"""Bad values for every option of every command of ``amo``.

``python -m tests.hostile`` tries them all; the suite tries some. Each command line must end
within a minute with status 0, or with a line that says ``error`` or ``FAIL``; never with a
traceback. What would start ranks, ask the network or train ends where it would start.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from tests.examples import ROOT

QUICKSTART = str(ROOT / "configs" / "quickstart.toml")
VALUES = (
    *("", "-1", "nan", "1e999", "9" * 5000, "x" * 300, "a\nb", "a\x1b[2J", "a\0b", "\udcff", "0/0"),
    *("folder", "deep.json", "list.json", "binary", "text.toml", "loop", "pipe", "empty/x", "run"),
    *("/dev/zero", "/dev/full", "nothing"),
)
STARTS = {
    "train": [QUICKSTART],
    "preflight": [QUICKSTART, "--world", "2"],
    "tokenize": ["corpus.jsonl", "-o", "new", "--tokenizer", "byte"],
    "report": ["run"],
    "export": ["run", "-o", "new"],
    "plan": ["--ell", "attn_q=1e-3", "--ell", "mlp_up=1e-2"],
}
"""Arguments that work, or nearly: the first gives way to a bad one."""
STOPS = (
    "subprocess.Popen",
    "socket.socket.connect",
    "torch.distributed.init_process_group",
    "torch.distributed.launcher.api.launch_agent",
    "datatrove.executor.local.LocalPipelineExecutor.run",
    "torchtitan_ext.train.main",
)


class Stopped(BaseException):
    """A command came to where it would start something, or did not end."""


def fill(folder: Path) -> None:
    """Files that nobody expects."""
    files = {"empty": b"", "binary": b"\xff\xfe\0{", "list.json": b"[]", "text.toml": b"a = ["}
    files["deep.json"] = b"[" * 100_000
    files["corpus.jsonl"] = b'{"text": "a"}\n' * 20
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / "loop").symlink_to("loop")
    (folder / "folder").mkdir()
    (folder / "run").mkdir()
    (folder / "run" / "metrics.jsonl").write_text('{"step": "x"}\n{}\n[1]\n')
    os.mkfifo(folder / "pipe")


def lines() -> list[list[str]]:
    """Each option and argument of each command with each value."""
    from torchtitan_ext.cli import build_parser

    result = [[], ["--"], ["no"]]
    (commands,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    for command, parser in commands.choices.items():
        start = STARTS.get(command, [])
        for action in parser._actions:
            options = action.option_strings
            if isinstance(action, argparse._HelpAction) or (options and action.nargs == 0):
                continue
            for value in VALUES:
                words = [*start, f"{options[-1]}={value}"] if options else [value, *start[1:]]
                result.append([command, *words])
    return result


def problem(line: list[str]) -> str:
    """A wrong end of one command line, run in this process; empty where it ends well."""
    from torchtitan_ext.cli import main

    def stop(*_: object, **__: object) -> None:
        raise Stopped

    out, err = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        for name in STOPS:
            stack.enter_context(mock.patch(name, stop))
        before = signal.signal(signal.SIGALRM, lambda *_: sys.exit("no end within a minute"))
        signal.alarm(60)
        try:
            status = main(line)
        except Stopped:
            return ""
        except SystemExit as error:
            status = error.code
        except BaseException:
            return traceback.format_exc().splitlines()[-1]
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
    text = err.getvalue() + out.getvalue()
    if "Traceback" in text or (status and "error" not in text and "FAIL" not in text):
        return f"status {status}: {text[-300:]}"
    return "" if status in (0, 1, 2) else f"status {status}"


@contextlib.contextmanager
def corner() -> Iterator[None]:
    """A current folder with bad files in it."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        fill(Path(folder))
        yield


def main() -> int:
    """Tries all of them; 1 where any ends wrongly."""
    with corner():
        wrong = {str(line)[:200]: text for line in lines() if (text := problem(line))}
    for line, text in wrong.items():
        print(f"{line}\n    {text}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
