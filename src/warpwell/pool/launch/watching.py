"""`ask_job`: what the agents of a job do, asked from outside through its launcher."""

from __future__ import annotations

import json
import os
import socket
from typing import Any

from ...errors import PoolError
from .job_files import JobFiles

_SECONDS = 5.0


def ask_job(files: JobFiles) -> list[dict[str, Any]]:
    """Return an object for each agent: rank, host, pid, state, and info where it answered.

    Raises
    ------
    PoolError
        The job has ended, or does not answer.
    """
    try:
        token = (files.folder / "token").read_text(encoding="utf-8")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.settimeout(_SECONDS)
            line.connect(str(files.socket))
            line.sendall(json.dumps({"here": "observer", "token": token, "pid": os.getpid()}).encode() + b"\n")
            with line.makefile("rb") as lines:
                found: list[dict[str, Any]] = json.loads(lines.readline())["agents"]
    except (OSError, ValueError, KeyError) as error:
        raise PoolError(f"job {files.job} does not answer: it may have ended ({error})") from error
    return found
