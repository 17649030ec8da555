"""Starts the application and tells the launcher how it ended, however that was; `connect` reaches the launcher.

It is run as a file, without the package and without site packages, so that it starts in milliseconds. The arguments
are the application's command.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys

_CONNECT_SECONDS = 10.0


def main(command: list[str]) -> int:
    """Run the application; return 0 whatever its status is, because only the launcher needs that."""
    line = None
    address = os.environ["WARPWELL_POOL_LAUNCHER"]
    try:
        line = connect(address)
        about = {"here": "supervisor", "token": os.environ["WARPWELL_POOL_TOKEN"], "rank": 0, "pid": os.getpid()}
        line.sendall(json.dumps({**about, "host": socket.gethostname()}).encode() + b"\n")
        if address.startswith("unix:"):
            _, handed, _, _ = socket.recv_fds(line, 1, 3)
            for number, descriptor in enumerate(handed):
                os.dup2(descriptor, number)  # the launcher's own: the application writes to the terminal itself
                os.close(descriptor)
    except OSError as error:
        if not is_closed(address, error):
            print(f"warpwell: no launcher at {address}: {error}", file=sys.stderr)
        return 1
    # the application may interrupt its process group, as kernels of Jupyter do; this process is in it, and must wait
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = os.fork()
    if child == 0:
        line.close()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)  # mpiexec has set others
        with contextlib.suppress(OSError):
            os.execve(command[0], command, _environ())
        os._exit(127)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(OSError):
        line.sendall(json.dumps({"status": os.waitstatus_to_exitcode(status)}).encode() + b"\n")
        line.recv(1)  # until the launcher is done with the others
    return 0


def _environ() -> dict[str, str]:
    """Return the application's environment: its CUDA may be that of the pool, which agents must not meet."""
    found = dict(os.environ)
    for name, value in json.loads(found.pop("WARPWELL_POOL_CUDA", "{}")).get("environ", {}).items():
        old = found.pop(name, None)
        if name in ("LD_LIBRARY_PATH", "PYTHONPATH") and old:
            value += os.pathsep + old  # mpiexec may have put its own libraries there
        if value is not None:
            found[name] = value
    return found


def is_closed(address: str, error: OSError) -> bool:
    """Say whether the launcher of this host has closed already: the job ends, perhaps by a Ctrl-C while it starts."""
    return address.startswith("unix:") and isinstance(error, ConnectionError)


def connect(address: str) -> socket.socket:
    """Connect to ``unix:PATH``, or to ``tcp:PORT:HOST,HOST,..`` (the first that answers).

    Raises
    ------
    OSError
        None answers.
    """
    kind, _, rest = address.partition(":")
    port, _, names = rest.partition(":")
    reason = OSError("it has no address")
    for name in [rest] if kind == "unix" else names.split(","):
        try:
            if kind == "unix":
                line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                line.settimeout(_CONNECT_SECONDS)
                line.connect(name)
            else:
                line = socket.create_connection((name, int(port)), _CONNECT_SECONDS)
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            line.settimeout(None)
            return line
        except OSError as error:
            reason = error
    raise reason


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
