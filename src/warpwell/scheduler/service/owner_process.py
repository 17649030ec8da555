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
from .protocol import MAX_BODY, OWNER_HEADER, ServiceConnection, ServiceMessage, check_version

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
    """Sends messages from a thread of its own, so that callers do not wait for a slow peer."""

    def __init__(self, connection: ServiceConnection, name: str) -> None:
        self._connection = connection
        self._thread = ThreadPoolExecutor(1, name)
        self._last: deque[Future[None]] = deque(maxlen=UNREAD)
        self._gone = False

    def put(self, header: dict[str, Any], arrays: Arrays = (), sent: Callable[[], None] | None = None) -> None:
        """Have a message sent; where the peer has gone it is dropped.

        Parameters
        ----------
        header : dict
        arrays : sequence of ndarray or callable
            Or what returns them when they are sent.
        sent : callable, optional
            Called once, when the message is sent or dropped; in this object's thread, or in this one.
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
        Settings that an owner is sent first: device, policy and so on (see `warpwell.scheduler.service.owner`).
    ready, message, died, failed : callable
        ``ready(hello)`` when an owner has started; ``message(message)`` for what it says; ``died(reason)`` when it is
        gone, each in the thread of this object; ``failed(reason)`` when no more owners are started.
    command : sequence of str
        Starts an owner (`COMMAND`).
    """

    def __init__(
        self,
        settings: dict[str, Any],
        *,
        ready: Callable[[ServiceMessage], None],
        message: Callable[[ServiceMessage], None],
        died: Callable[[str], None],
        failed: Callable[[str], None],
        command: Sequence[str] = COMMAND,
        silence: float = SILENCE,
        max_body: int = MAX_BODY,
    ) -> None:
        self._settings = settings
        self._ready, self._message, self._died, self._failed = ready, message, died, failed
        self._command = tuple(command)
        self._silence = silence
        self._max_body = max_body
        self._stopping = threading.Event()
        self._outbox: SendQueue | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.starts = 0
        self._refused = False
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

    def stop(self, seconds: float = 5.0) -> None:
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
            unready += 1
            reason, was_ready = self._one()
            if self._stopping.is_set():
                break
            unready = 0 if was_ready else unready
            self._died(reason)
            if unready >= TRIES or self._refused:
                self._failed(reason)
                return
            self._stopping.wait(0.1 * 2**unready)

    def _one(self) -> tuple[str, bool]:
        """Run one owner to its end; return what ended it, and whether it had been ready."""
        try:
            ours = self._spawn()
        except OSError as error:  # no descriptors, no memory: a try that failed
            return f"it could not be started: {error.strerror or error}", False
        self.starts += 1
        connection = ServiceConnection(ours, "the owner", max_body=self._max_body, max_header=OWNER_HEADER,
                                patience=self._silence)  # fmt: skip
        was_ready = False
        try:
            connection.send({"type": "settings", **self._settings})
            hello = self._hello(connection)
            self._outbox = SendQueue(connection, "warpwell-to-owner")
            was_ready = True
            self._ready(hello)
            reason = self._listen(connection)
        except errors.ServiceError as error:
            reason = str(error)
        except Exception as error:  # this thread must go on: without it no owner is started, and no client would know
            reason = f"it sent an invalid message: {error!r}"
        finally:
            outbox, self._outbox = self._outbox, None
            connection.interrupt()
            if outbox is not None:
                outbox.close(0.5)
            told = self._reap()
            connection.close()
        return reason if self._refused else told or reason, was_ready

    def _spawn(self) -> socket.socket:
        """Start the process; return our end of its socket."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                theirs.set_inheritable(True)
                self.process = subprocess.Popen(
                    [*self._command, str(theirs.fileno())], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                    stdout=2,  # what kernels' files print is no output of the service
                    start_new_session=True,  # Ctrl-C in a terminal is for the service, which ends the owner in order
                )  # fmt: skip
        except BaseException:
            ours.close()
            raise
        return ours

    def _hello(self, connection: ServiceConnection) -> ServiceMessage:
        until = time.monotonic() + START
        while time.monotonic() < until and not self._stopping.is_set():
            try:
                message = connection.receive()
            except EOFError:
                raise errors.ServiceError("it ended before it was ready") from None
            if message is not None:
                if message.kind == "refused":  # a bad option: another owner would say the same
                    self._refused = True
                    raise errors.ServiceError(message.get("message", str))
                check_version(message, "the owner", "the service")
                return message
        raise errors.ServiceError(f"it was not ready within {START:g} s")

    def _listen(self, connection: ServiceConnection) -> str:
        while True:
            try:
                message = connection.receive()
            except EOFError:
                return "it closed its connection"
            if message is None:
                self._kill()
                return f"it did not answer for {self._silence:g} s"
            self._message(message)

    def _kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(OSError):
                self.process.kill()

    def _reap(self) -> str:
        """Wait for the process, after some seconds by force; return how it ended, or nothing if it was asked to."""
        process = self.process
        assert process is not None
        forced = False
        try:
            code = process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._kill()
            forced = True
            code = process.wait()
        if forced or code == 0:
            return ""
        if code < 0:
            return f"it was killed by signal {-code} ({signal.strsignal(-code)})"
        return f"it exited with status {code}"
