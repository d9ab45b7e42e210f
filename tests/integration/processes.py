"""Commands in processes of their own, watched by what they write, stopped and killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLAIN = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
"""The environment of a user who has activated this very one."""
CPU = {**PLAIN, "PYTHONPATH": str(ROOT), "AMO_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
"""The same with the CPU as device. One thread: a reduction's bits may depend on their number."""
TRAIN = (sys.executable, "-m", "torchtitan_ext", "train")


class Command:
    """A running command; what it prints goes to ``output.txt`` of its folder."""

    def __init__(
        self, words: Sequence[str], folder: Path, environment: Mapping[str, str] = CPU
    ) -> None:
        self.log = folder / "output.txt"
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                words,
                cwd=folder,
                env=environment,
                stdout=output,
                stderr=output,
                # Shells start what runs in their background with SIGINT ignored.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    def output(self) -> str:
        """All that was printed, by earlier commands of the folder too."""
        return self.log.read_text(errors="replace")

    def wait_until(self, is_done: Callable[[], object]) -> None:
        """Wait for something that the running command does."""
        deadline = time.monotonic() + 400  # a start takes some seconds, on a busy machine minutes
        while not is_done():
            assert self.process.poll() is None, self.output()[-4000:]
            assert time.monotonic() < deadline, self.output()[-4000:]
            time.sleep(0.02)

    def end(self, status: int = 0) -> str:
        """Wait for the end, which must have a status; returns the output."""
        found = self.process.wait(timeout=400)
        assert found == status, (found, self.output()[-4000:])
        return self.output()

    def first_process(self) -> int:
        """Process 1 of the namespace in which ``unshare`` runs the command."""
        outer = self.process.pid
        (first,) = Path(f"/proc/{outer}/task/{outer}/children").read_text().split()
        return int(first)

    def stop(self, number: signal.Signals, status: int) -> str:
        """Send a signal, and wait for the end."""
        self.process.send_signal(number)
        return self.end(status)
