"""`Service`: shares a device, which a process of the service owns, between several processes.

`docs/scheduler.md` ("Trust") states the permissions of users. In short: kernels are code that runs as the user of the
service. By default only processes of this user may connect. A service for a group accepts kernels of other users from
the modules that its options name.

The service accepts connections, identifies their users, and hands each connection to the device process. It never uses
the device and imports no kernels. If the device process dies, the service starts a new one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import pwd
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import errors
from ..._check import checked_device, checked_nbytes
from ..._os import socket_peer
from ...replacing import unfinished
from ..tenants import read_tenants
from . import address, messages, references
from .device_process import not_named
from .messages import TIMEOUT_SECONDS, Connection, Message
from .recovery import StatusPage, Verdicts

MAX_HELD = 8 << 30
"""Default limit of a tenant's data at the service, in bytes."""

MAX_CLIENTS = 64
"""Maximum number of connections of a tenant; a user may have twice as many. Protection, not tuned."""

MAX_SILENT = 16
"""Maximum number of connections of a user that have not sent a hello; with one more, the service closes the oldest."""

SILENCE_SECONDS = 30.0
"""Time without a message from the device process, after which the service kills it. It sends one each second."""

START_SECONDS = 120.0
"""Time limit of the start of a device process: CUDA and imports may take tens of seconds on a busy machine."""

MAX_STARTS = 3
"""Number of consecutive device processes that die before they are ready, after which the service fails."""

EXIT_SECONDS, URGENT_EXIT_SECONDS = 5.0, 0.25
"""Time limit of the exit of the device process, which is then killed; the second applies after Ctrl-C."""

MAX_SESSIONS = 4096
"""Maximum number of sessions that clients may continue on another connection. Protection, not tuned."""

TICK_SECONDS = 1.0
"""Interval of checks, and of messages to clients that wait for a device process."""

COMMAND = (sys.executable, "-P", "-m", "warpwell.scheduler.service.device_process")
"""Command of a device process. With -P a file in the current folder cannot replace a module."""

_STOPPED = "the service was stopped: start it again with `warpwell sched serve`"


@dataclass
class Client:
    """A connection. `tenant` is set by its hello, and `joined` when the device process has the connection."""

    connection: Connection
    key: int
    user: int
    since: float
    tenant: str = ""
    session: int = 0
    sent: bool = False
    joined: bool = False


class Service:
    """A scheduler for several processes.

    Parameters
    ----------
    path : path, optional
        Path of the socket; default: `warpwell.scheduler.service.address.default_path`.
    device, policy, limit, tenants
        As for `Scheduler`. If `tenants` has names, only these tenants may connect.
    group : str, optional
        Name or number of a group that may connect. Then the user of a process decides its tenant.
    users : mapping, optional
        Tenant of each user, by name or number; other users may not connect. Default: a user's tenant is the login name.
    allow : sequence of str
        Modules whose kernels other users may launch: ``pkg.mod``, or ``pkg.*`` for all modules below a package.
    trust_group : bool
        Accept any kernel from other users: each of them can then do whatever this user can.
    log : path, optional
        File to which every event is appended, as JSON lines.
    metrics : path, optional
        File that the device process replaces every few seconds by metrics in Prometheus' text format.
    max_message, max_held : int or str
        Maximum size of the arrays of one message, and of the data of one tenant at the service, in bytes.
    stuck : float, optional
        Time in which a kernel must end a block, in seconds (see `Scheduler`).
    """

    # Time in which a process must send its hello, maximum silence of the device process, and its command.
    hello_seconds, silence_seconds, command = TIMEOUT_SECONDS, SILENCE_SECONDS, COMMAND

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        device: str | None = None,
        policy: str = "lanes",
        limit: int | None = None,
        tenants: Mapping[str, Any] | None = None,
        group: str | None = None,
        users: Mapping[Any, str] | None = None,
        allow: Sequence[str] = (),
        trust_group: bool = False,
        log: str | os.PathLike[str] | None = None,
        metrics: str | os.PathLike[str] | None = None,
        max_message: int | str = messages.MAX_BYTES,
        max_held: int | str = MAX_HELD,
        stuck: float | None = None,
    ) -> None:
        self.path = address.checked_path(path)
        self._group = None if group is None else address.own_group(str(group))
        self._users = None if users is None else {address.number_of("user", str(n)): t for n, t in users.items()}
        named = {t.name: t.settings() for t in read_tenants(tenants)}
        self._named = frozenset(named)
        unnamed = sorted(set((users or {}).values()) - self._named)
        if self._named and unnamed:
            text = f"users are tenants {', '.join(unnamed)}, which have no setting in tenants=: add them"
            raise errors.ArgumentError(text, name="users")
        self._settings = {
            "device": None if device is None else checked_device(device, among=("cpu", "cuda")),
            "policy": policy,
            "limit": limit,
            "tenants": named or None,
            "stuck": stuck,
            "max_message": checked_nbytes(max_message, "max_message"),
            "max_held": checked_nbytes(max_held, "max_held"),
            "allow": references.checked_patterns(allow),
            "trust": trust_group,
            "log": None if log is None else os.path.abspath(log),
            "metrics": None if metrics is None else os.path.abspath(metrics),
            "began": time.monotonic(),
        }
        self.properties: dict[str, Any] = {}
        self.failure = ""
        self.process: subprocess.Popen[bytes] | None = None
        self._control: Connection | None = None
        self._is_ready = False
        self._ready = threading.Event()
        self._last_message = 0.0  # when the device process sent its last message
        self._starts = self._unready = 0
        self._fault: dict[str, Any] = {}
        self._verdicts = Verdicts()
        self._page: StatusPage
        self._clients: dict[int, Client] = {}
        self._sessions: dict[int, tuple[int, str]] = {}  # user and tenant
        self._numbers = itertools.count(1)
        self._selector: selectors.BaseSelector
        self._wake = -1
        self._listener: socket.socket | None = None
        self._stop_seconds: float | None = None
        self._lock_file = self._pidfd = -1
        self._thread = threading.Thread(target=self._run, name="warpwell-service", daemon=True)

    def start(self, timeout: float = START_SECONDS) -> Service:
        """Start the device process, and accept connections once it is ready.

        Raises
        ------
        ServiceError
            Another service uses the socket, its folder is not safe, or no device process gets ready in `timeout`
            seconds.
        """
        address.prepare(self.path, self._group)
        self._lock_file = address.lock(self.path)
        try:
            unfinished.add(self.path)
            self._page, self._selector = StatusPage(), selectors.DefaultSelector()
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._selector.register(self._wake, selectors.EVENT_READ, functools.partial(os.eventfd_read, self._wake))
            self._thread.start()
            if not self._ready.wait(timeout) or self.failure:
                problem = self.failure or f"it was not ready in {timeout:g} s"
                raise errors.ServiceError(f"the device process does not start: {problem}")
            self._listen()
        except BaseException as error:
            self.close(urgent=not isinstance(error, Exception))
            raise
        return self

    def __enter__(self) -> Service:
        return self if self._listener is not None else self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, *, urgent: bool = False) -> None:
        """Stop: clients get `ServiceError`, the device process exits, the socket is removed. May be called twice.

        Parameters
        ----------
        urgent : bool
            Wait for the device process for a fraction of a second only.
        """
        if self._stop_seconds is None:
            self._stop_seconds = URGENT_EXIT_SECONDS if urgent else EXIT_SECONDS
            if self._thread.is_alive():
                os.eventfd_write(self._wake, 1)
        if self._thread.is_alive():
            self._thread.join(3 * EXIT_SECONDS)
        if self._lock_file >= 0:
            if self._listener is not None:
                self.path.unlink(missing_ok=True)
            os.close(self._lock_file)
            self._lock_file = -1
            if self._wake >= 0 and not self._thread.is_alive():
                os.close(self._wake)
                os.close(self._page.fd)
            unfinished.discard(self.path)

    def _listen(self) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.path.unlink(missing_ok=True)  # This process has the lock, so a killed service has left the socket.
        listener.bind(os.fspath(self.path))
        # No client can connect before listen(), so the socket is never open with another mode.
        if self._group is not None:
            os.chown(self.path, -1, self._group)
        os.chmod(self.path, 0o600 if self._group is None else 0o660)
        listener.listen(1024)
        listener.setblocking(False)
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    # -- the thread of the service

    def _run(self) -> None:
        tick = 0.0
        try:
            while self._stop_seconds is None:
                while self._control is None and not self.failure:
                    self._spawn()
                for key, _ in self._selector.select(max(0.0, tick - time.monotonic())):
                    key.data()
                if time.monotonic() >= tick:
                    tick = time.monotonic() + TICK_SECONDS
                    self._check()
        finally:
            self._end()

    def _end(self) -> None:
        """Refuse all clients, and end the device process."""
        if self._listener is not None:
            self._listener.close()
        for client in list(self._clients.values()):
            self._refuse(client, self.failure or _STOPPED)
        if self._control is not None:
            with contextlib.suppress(OSError):
                self._control.send({"type": "stop"}, wait=False)
            self._bury("", self._stop_seconds or EXIT_SECONDS)
        if not self.failure:
            self.failure = _STOPPED
        self._ready.set()
        self._selector.close()

    def _check(self) -> None:
        """Kill a silent device process; close late connections; report to clients that wait."""
        now = time.monotonic()
        limit = self.silence_seconds if self._is_ready else START_SECONDS
        if self._control is not None and now - self._last_message > limit:
            self._bury(f"it did not answer for {limit:g} s")
        for client in list(self._clients.values()):
            if not client.tenant and now - client.since > self.hello_seconds:
                self._refuse(client, f"{client.connection.peer} did not send 'hello' within {self.hello_seconds:g} s")
            elif client.tenant and not client.joined:
                with contextlib.suppress(OSError):
                    client.connection.send({"type": "starting"}, wait=False)
                self._hand_over(client)

    # -- clients

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:
            time.sleep(0.05)  # No descriptor is free until other connections end.
            return
        sock.setblocking(True)
        pid, user = socket_peer(sock)
        silent = [c for c in self._clients.values() if c.user == user and not c.tenant]
        if len(silent) >= MAX_SILENT:
            self._forget(silent[0])
        key = next(self._numbers)
        connection = Connection(sock, f"client {key} (process {pid} of user {user})", 0)
        client = self._clients[key] = Client(connection, key, user, time.monotonic())
        self._selector.register(sock, selectors.EVENT_READ, functools.partial(self._greet, client))

    def _greet(self, client: Client) -> None:
        """Receive the hello of a client, and hand the client to the device process."""
        try:
            with client.connection.receive(wait=False) as hello:
                if hello.kind != "hello":
                    raise errors.ServiceError(f"{client.connection.peer} sent {hello.kind!r:.40} instead of 'hello'")
                messages.check_version(hello, "your program", "the service")
                tenant = self._tenant(client.user, hello.get("tenant", (str, type(None)), None))
                session = hello.get("session", int, 0)
        except BlockingIOError:
            return
        except EOFError:
            self._forget(client)
            return
        except errors.WarpwellError as error:
            self._refuse(client, str(error))
            return
        self._selector.unregister(client.connection.sock)
        for former in [c for c in self._clients.values() if c.session == session != 0]:
            if (former.user, former.tenant) == (client.user, tenant):
                self._forget(former)  # The client's process has connected again.
        if self._sessions.get(session) != (client.user, tenant):
            session = next(self._numbers)
        if self.failure:
            self._refuse(client, f"the device process failed to restart: {self.failure}")
            return
        for subject, count, limit in (
            (f"tenant {tenant!r}", sum(c.tenant == tenant for c in self._clients.values()), MAX_CLIENTS),
            (f"user {client.user}", sum(c.user == client.user for c in self._greeted_clients()), 2 * MAX_CLIENTS),
        ):
            if count >= limit:
                self._refuse(client, f"{subject} has {count} connections, which is the maximum: close some")
                return
        client.tenant, client.session = tenant, session
        self._sessions[session] = client.user, tenant
        if len(self._sessions) > MAX_SESSIONS:
            used = {each.session for each in self._clients.values()}
            self._sessions.pop(next((s for s in self._sessions if s not in used), 0), None)
        self._hand_over(client)

    def _greeted_clients(self) -> list[Client]:
        return [client for client in self._clients.values() if client.tenant]

    def _hand_over(self, client: Client) -> None:
        """Send the socket of a client to the device process, if the device process is ready."""
        if client.sent or not self._is_ready or self._control is None:
            return
        header = {
            "type": "client",
            "key": client.key,
            "session": client.session,
            "tenant": client.tenant,
            "own": client.user == os.getuid(),
            "peer": client.connection.peer,
        }
        with contextlib.suppress(OSError):  # The next check tries again.
            self._control.send(header, wait=False, fd=client.connection.sock.fileno())
            client.sent = True

    def _refuse(self, client: Client, text: str) -> None:
        with contextlib.suppress(OSError):
            client.connection.send({"type": "refused", "message": text}, wait=False)
        self._forget(client)

    def _forget(self, client: Client) -> None:
        """Close the connection of a client, also in the device process."""
        self._clients.pop(client.key, None)
        with contextlib.suppress(KeyError):
            self._selector.unregister(client.connection.sock)
        client.connection.interrupt()
        client.connection.close()

    def _tenant(self, user: int, requested: str | None) -> str:
        """Return the tenant of a user; raise ServiceError if the user may not connect, or not as this tenant."""
        own = user == os.getuid()
        users = {} if self._users is None else self._users
        if requested is not None and not (0 < len(requested) <= 64 and requested.isprintable()):
            raise errors.ServiceError("a tenant's name has 1 to 64 printable letters")
        if self._group is None and not own:
            text = f"this service is for user {os.getuid()} alone, and you are user {user}: ask for one with --group"
            raise errors.ServiceError(text)
        if self._users is not None and not own and user not in users:
            raise errors.ServiceError(f"user {user} is not a tenant of this service: ask to be added to --users")
        tenant = users.get(user) or ("default" if self._group is None else _login(user))
        if requested not in (None, tenant) and not own:  # A user who may stop the service may choose any tenant.
            raise errors.ServiceError(f"user {user} is tenant {tenant!r}, not {requested!r}: omit tenant=")
        only_reads = requested is None and own  # `sched status` may connect, and submits nothing.
        tenant = requested or tenant
        if self._named and tenant not in self._named and not only_reads:
            raise errors.ServiceError(not_named(tenant, self._named))
        return tenant

    # -- the device process

    def _spawn(self) -> None:
        """Start a device process."""
        self._fault, self._last_message = {}, time.monotonic()
        control, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with child_end:
                descriptors = [child_end.fileno(), self._page.fd]
                self.process = subprocess.Popen(
                    [*self.command, *map(str, descriptors)],
                    pass_fds=descriptors,
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # Output of kernels' files is not output of the service.
                    start_new_session=True,  # Only the service must receive Ctrl-C of a terminal; it ends this process.
                )
            self._pidfd = os.pidfd_open(self.process.pid)
        except OSError as error:
            control.close()
            self._conclude(f"it could not be started: {error.strerror or error}", False)
            return
        self._control = Connection(control, "the device process")
        self._starts += 1
        settings = json.dumps({**self._settings, **vars(self._verdicts), "restarts": self._starts - 1})
        with contextlib.suppress(OSError):  # The device process has died.
            self._control.send({"type": "settings"}, [np.frombuffer(settings.encode(), np.uint8)])
        self._selector.register(control, selectors.EVENT_READ, self._receive_messages)
        self._selector.register(self._pidfd, selectors.EVENT_READ, functools.partial(self._bury, ""))

    def _receive_messages(self) -> None:
        """Handle the messages of the device process, and the end of its connection."""
        control = self._control
        try:
            while control is not None and control is self._control:
                with control.receive(wait=False) as message:
                    self._last_message = time.monotonic()
                    self._handle(message)
        except BlockingIOError:
            pass
        except (EOFError, errors.WarpwellError) as error:
            self._bury("" if isinstance(error, EOFError) else f"it sent an invalid message: {error}")

    def _handle(self, message: Message) -> None:
        client = self._clients.get(message.get("key", int, 0))
        if message.kind == "ready":
            self.properties = message.get("properties", dict)
            self._is_ready, self._unready = True, 0
            self._ready.set()
            for each in self._greeted_clients():
                self._hand_over(each)
        elif message.kind == "joined" and client is not None:
            client.joined = True
        elif message.kind == "left" and client is not None:
            self._forget(client)
        elif message.kind in ("fault", "refused"):
            self._fault = message.header

    def _bury(self, reason: str, seconds: float = 2.0) -> None:
        """End a device process that exits or does not respond, and close its connections."""
        control, process = self._control, self.process
        if control is None or process is None:
            return
        with contextlib.suppress(BlockingIOError, EOFError, errors.WarpwellError):
            while True:  # read the messages that it sent before its death
                with control.receive(wait=False) as message:
                    self._handle(message)
        self._selector.unregister(control.sock)
        self._selector.unregister(self._pidfd)
        os.close(self._pidfd)
        if reason:
            process.kill()
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        control.close()
        if not reason and code:
            killed = code < 0 and f"it was killed by signal {-code} ({signal.strsignal(-code)})"
            reason = killed or f"it exited with status {code}"
        was_ready, self._is_ready, self._control = self._is_ready, False, None
        self._conclude(reason or "it closed its connection", was_ready)

    def _conclude(self, reason: str, was_ready: bool) -> None:
        """Judge the death of a device process, and fail if too many did not start."""
        if self._stop_seconds is not None:
            return
        reason = str(self._fault.get("message", reason))
        named = (self._fault["token"], self._fault["error"]) if self._fault.get("error") else None
        alone = self._page.alone
        self._verdicts.judge(self._page.clear(), alone, named, reason)
        for client in self._greeted_clients():
            if client.joined:
                self._forget(client)  # The client connects again.
            client.sent = False
        self._unready = 0 if was_ready else self._unready + 1
        if self._fault.get("type") == "refused" or self._unready >= MAX_STARTS:
            self.failure = reason
            self._ready.set()
            for client in list(self._clients.values()):
                self._refuse(client, f"the device process failed to restart: {reason}")


def _login(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user-{user}"
