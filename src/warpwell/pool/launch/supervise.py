"""Starts the application and tells the launcher how it ended, whatever way that was.

It is run as a file, without the package and without site packages, so that it starts in milliseconds. The arguments
are the application's command.
"""

import contextlib
import json
import os
import signal
import socket
import sys


def main(command: list[str]) -> int:
    """Run; always 0, because the status of the application goes to the launcher alone."""
    line = None
    address = os.environ["WARPWELL_POOL_LAUNCHER"]
    try:
        line = _connect(address)
        about = {"here": "supervisor", "token": os.environ["WARPWELL_POOL_TOKEN"], "rank": 0, "pid": os.getpid()}
        line.sendall(json.dumps({**about, "host": socket.gethostname()}).encode() + b"\n")
        if address.startswith("unix:"):
            _, handed, _, _ = socket.recv_fds(line, 1, 3)
            for number, descriptor in enumerate(handed):
                os.dup2(descriptor, number)  # the launcher's own: nothing stands between terminal and application
                os.close(descriptor)
    except OSError as error:
        print(f"warpwell: no launcher at {address}: {error}", file=sys.stderr)
        return 1
    # the application may interrupt its process group, as kernels of Jupyter do; this is in it, and must wait
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = os.fork()
    if child == 0:
        line.close()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)  # mpiexec's processes have other habits
        with contextlib.suppress(OSError):
            os.execv(command[0], command)
        os._exit(127)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(OSError):
        line.sendall(json.dumps({"status": os.waitstatus_to_exitcode(status)}).encode() + b"\n")
        line.recv(1)  # until the launcher is done with the others
    return 0


def _connect(address: str) -> socket.socket:
    kind, _, rest = address.partition(":")
    if kind == "unix":
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        line.connect(rest)
        return line
    port, _, names = rest.partition(":")
    reason = OSError("it has no address")
    for name in names.split(","):
        try:
            line = socket.create_connection((name, int(port)), 10)
            line.settimeout(None)
            return line
        except OSError as error:
            reason = error
    raise reason


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
