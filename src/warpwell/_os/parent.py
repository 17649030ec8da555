"""The end of a process with its parent."""

from __future__ import annotations

import ctypes
import signal

_prctl = ctypes.CDLL(None).prctl
_PR_SET_PDEATHSIG = 1


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have Linux send a signal to this process when the thread that created it exits; for ``preexec_fn``, too."""
    _prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
