"""A process that does not outlive the one that started it."""

from __future__ import annotations

import ctypes
import signal
import sys


def end_with_parent() -> None:
    """Let the kernel terminate this process when its parent is gone (Linux; elsewhere a no-op).

    A killed torchrun leaves its ranks running, and the next start would train beside them.
    """
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
