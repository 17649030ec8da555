"""Clears up behind a launcher that was killed: its processes and files.

The launcher starts it as a file, in a session of its own, with a pipe as stdin, which ends with the launcher,
however that ends. The arguments are the job's name and its folders.
"""

import contextlib
import os
import shutil
import signal
import sys
import time

_GRACE = 2.0
"""Seconds in which mpiexec and all others have to end by themselves."""
_LIMIT = 4.0


def main(job: str, folders: list[str]) -> None:
    """Wait for the launcher's end, and finish what it did not."""
    while os.read(0, 1):
        pass
    if not os.path.exists(folders[0]):
        return  # it has cleared up itself
    began = time.monotonic()
    while (left := _processes(job)) and time.monotonic() < began + _LIMIT:
        if time.monotonic() > began + _GRACE:
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _processes(job: str) -> list[int]:
    """Return the processes of the job, and what the application has started in their sessions."""
    found = []
    mark = f"WARPWELL_POOL_JOB={job}".encode()
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                with open(f"/proc/{name}/environ", "rb") as stream:
                    marked = mark in stream.read().split(b"\0")
                with open(f"/proc/{name}/stat", encoding="ascii", errors="replace") as stat:
                    ended = stat.read().rpartition(")")[2].split()[0] in "ZX"
                if marked and not ended:
                    found.append(int(name))
    return found


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
