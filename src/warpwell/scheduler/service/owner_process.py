"""`OwnerProcess`: the service's side of the process that owns the device: starts it, listens, and starts it again.

The service itself never touches the device and imports no kernels, so no kernel can take it down. Everything here runs
in one thread that lives as long as the service.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from numpy.typing import NDArray

from ... import errors
from . import wire
from .protocol import OWNER_HEADER, ServiceConnection, ServiceMessage, check_version

SILENCE = 30.0
"""Seconds without a word from the owner, after which it is killed. It says something each second."""

START = 120.0
"""Seconds that an owner has to get ready."""

TRIES = 3
"""Owners in a row that may die before they are ready; then the service gives up."""

UNREAD = 1000
"""Messages that may wait to be read by a peer; with more, the service receives nothing from it."""

COMMAND = (sys.executable, "-P", "-m", "warpwell.scheduler.service.owner")
"""Starts an owner; the descriptor of its socket follows. -P: a file in the current folder is no module of ours."""


Arrays = Sequence[NDArray[Any]] | Callable[[], Sequence[NDArray[Any]]]


class SendQueue:
    """Sends messages from a thread of its own, so that callers do not wait for a slow peer.

    Raise ServiceError if no thread can start.
    """

    def __init__(self, connection: ServiceConnection, name: str) -> None:
        self._connection = connection
        self._thread = ThreadPoolExecutor(1, name)
        self._last: deque[Future[None]] = deque(maxlen=UNREAD)
        self._gone = False
        try:
            self._thread.submit(lambda: None)  # the thread starts now, and no `put` can fail for want of one
        except RuntimeError as error:
            raise errors.ServiceError(f"{connection.peer} cannot be answered: {error}. Try again later") from None

    def put(self, header: dict[str, Any], arrays: Arrays = (), sent: Callable[[], None] | None = None) -> None:
        """Have a message sent; where the peer has gone it is dropped.

        `arrays` may be a function that returns them when they are sent. `sent` is called once, when the message is sent
        or dropped; in this object's thread, or in this one.
        """
        try:
            self._last.append(self._thread.submit(self._send, header, arrays, sent))
        except RuntimeError:  # closed
            if sent is not None:
                sent()

    def close(self, seconds: float = 1.0) -> None:
        """Send the messages that are queued, for some seconds, and stop."""
        self._thread.shutdown(wait=False)
        wait(list(self._last), seconds)

    def wait_for_room(self, seconds: float) -> None:
        """Wait until fewer messages than `UNREAD` wait, for some seconds at most."""
        if len(self._last) == UNREAD:
            wait([self._last[0]], seconds)

    def _send(self, header: dict[str, Any], arrays: Arrays, sent: Callable[[], None] | None) -> None:
        try:
            if not self._gone:
                self._send_or_refuse(header, arrays() if callable(arrays) else arrays)
        except Exception:  # the peer has gone, or memory is short
            self._gone = True
            self._connection.interrupt()  # its reader finds out, and cleans up
        finally:
            if sent is not None:
                sent()

    def _send_or_refuse(self, header: dict[str, Any], arrays: Sequence[NDArray[Any]]) -> None:
        try:
            self._connection.send(header, arrays)
        except errors.MessageSizeError as error:
            if header["type"] not in ("reply", "ended"):
                raise
            # the waiting caller gets an error instead
            kept: dict[str, Any] = {key: header[key] for key in ("type", "call", "task") if key in header}
            self._connection.send({**kept, "error": wire.error_fields(error)})


class OwnerProcess:
    """Starts the owner process, and starts it again when it dies.

    Parameters
    ----------
    settings : dict
        What an owner is sent first: device, policy and so on, and the bytes of a message's body at most.
    said, died : callable
        ``said(message)`` for what an owner says, its hello first; ``died(reason, last)`` when it is gone, with whether
        no more owners are started. Each in the thread of this object.
    command : sequence of str
        Starts an owner (`COMMAND`).
    silence : float
        Seconds without a word from an owner, after which it is killed.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        *,
        said: Callable[[ServiceMessage], None],
        died: Callable[[str, bool], None],
        command: Sequence[str],
        silence: float,
    ) -> None:
        self._settings = settings
        self._said, self._died = said, died
        self._command = tuple(command)
        self._silence = silence
        self._stopping = threading.Event()
        self._outbox: SendQueue | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.starts = 0
        self._thread = threading.Thread(target=self._run, name="warpwell-owner", daemon=True)

    @property
    def connected(self) -> bool:
        """Whether there is an owner that is ready."""
        return self._outbox is not None

    def start(self) -> None:
        """Start the first owner, and return before it is ready."""
        self._thread.start()

    def send(self, header: dict[str, Any], arrays: Sequence[NDArray[Any]] = ()) -> None:
        """Have a message sent to the owner; dropped where there is none."""
        outbox = self._outbox
        if outbox is not None:
            outbox.put(header, arrays)

    def stop(self, seconds: float) -> None:
        """End the owner, by force after some seconds, and start no other."""
        self._stopping.set()
        if not self._thread.is_alive():
            return
        if self.connected:
            self.send({"type": "stop"})
            self._thread.join(seconds)
        if self._thread.is_alive():
            self._kill()
            self._thread.join(seconds)

    def _run(self) -> None:
        unready = 0
        while not self._stopping.is_set():
            try:
                reason, was_ready, last = self._one()
            except OSError as error:  # no descriptors, no memory: a try that failed
                reason, was_ready, last = f"it could not be started: {error.strerror or error}", False, False
            if self._stopping.is_set():
                return
            unready = 0 if was_ready else unready + 1
            last = last or unready >= TRIES
            self._died(reason, last)
            if last:
                return
            self._stopping.wait(0.1 * 2**unready)

    def _one(self) -> tuple[str, bool, bool]:
        """Run one owner to its end; return what ended it, whether it had been ready, and if another would end so."""
        process, ours = self._spawn()
        self.starts += 1
        connection = ServiceConnection(
            ours, "the owner", max_body=self._settings["max_message"], max_header=OWNER_HEADER, patience=self._silence
        )
        refused, until = False, time.monotonic() + START
        try:
            connection.send({"type": "settings", **self._settings})
            while True:
                message = connection.receive()
                if message is None:
                    if not self.connected and time.monotonic() < until:
                        continue
                    self._kill()
                    reason = f"it did not answer for {self._silence:g} s"
                    break
                if message.kind == "refused":  # a bad option
                    refused, reason = True, message.get("message", str)
                    break
                if message.kind == "hello":
                    check_version(message, "the owner", "the service")
                    self._outbox = SendQueue(connection, "warpwell-to-owner")
                self._said(message)
        except EOFError:
            reason = "it closed its connection"
        except errors.ServiceError as error:
            reason = str(error)
        except Exception as error:  # this thread must go on: without it no owner is started, and no client would know
            reason = f"it sent an invalid message: {error!r}"
        finally:
            outbox, self._outbox = self._outbox, None
            connection.interrupt()
            if outbox is not None:
                outbox.close(0.5)
            told = self._reap(process)
            connection.close()
        return reason if refused else told or reason, outbox is not None, refused

    def _spawn(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """Start the process; return it, and our end of its socket."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self.process = subprocess.Popen(
                    [*self._command, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # what kernels' files print is no output of the service
                    start_new_session=True,  # Ctrl-C in a terminal is for the service, which ends the owner in order
                )
        except BaseException:
            ours.close()
            raise
        return self.process, ours

    def _kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(OSError):
                self.process.kill()

    def _reap(self, process: subprocess.Popen[bytes]) -> str:
        """Wait for the process, after some seconds by force; return how it ended, or nothing if it was asked to."""
        try:
            code = process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._kill()
            process.wait()
            return ""
        if code < 0:
            return f"it was killed by signal {-code} ({signal.strsignal(-code)})"
        return f"it exited with status {code}" if code else ""
