"""Run a command on a machine with busy processors: ``python tools/busy.py 4 --times 3 -- make test``.

The exit status is the status of the first run that fails, or 0. The busy processes end when this process ends, in any
way.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1


def busy_loop(parent: int) -> None:
    """Use one processor until the parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    while os.getppid() == parent:
        sum(range(100_000))


def start(count: int) -> list[int]:
    """Fork `count` busy loops and return their process ids."""
    parent, children = os.getpid(), []
    for _ in range(count):
        child = os.fork()
        if child == 0:
            try:
                busy_loop(parent)
            finally:
                os._exit(0)
        children.append(child)
    return children


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("count", type=int, help="number of busy processes")
    parser.add_argument("--times", type=int, default=1, help="how often to run the command")
    parser.add_argument("command", nargs="+", help="the command, after --")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the busy loops end, too
    children = start(options.count)
    status = 0
    try:
        for number in range(options.times):
            began = time.monotonic()
            found = subprocess.run(options.command).returncode
            print(f"run {number + 1}: exit status {found}, {time.monotonic() - began:.0f} s", flush=True)
            status = status or found
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return status


if __name__ == "__main__":
    sys.exit(main())
