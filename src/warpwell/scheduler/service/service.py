"""`Service`: takes launches of several processes over a local socket, for one process that owns the device.

Who may do what is in ``docs/scheduler.md``, section "Trust". In short: kernels are code that runs as the owner's user.
By default only processes of the same user get in. A service for a group takes the kernels of modules that were named at
start, and no others, from other users; and those users still share one process and one device with each other.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
import shutil
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ... import errors
from ..._check import checked_device, checked_nbytes
from ...replacing import unfinished
from ..tenants import read_tenants
from . import address, protocol
from .broker import Broker, Session, not_named
from .owner_process import COMMAND, SILENCE

MAX_HELD = 8 << 30
"""Bytes of a tenant here at most, unless the service says otherwise."""

MAX_CLIENTS = 64
"""Clients of a tenant, and twice as many of a user."""

SILENT = 16
"""Connections of a user that have not said who they are yet. One more, and the oldest of them is dropped."""

_STOPPED = "the service was stopped: start it again with `warpwell sched serve`"

_OWNER, _SOON = 5.0, 0.25
"""Seconds that the owner has to end by itself, usually and where somebody waits."""


class Service:
    """A scheduler for several processes.

    Parameters
    ----------
    path : path, optional
        Of the socket; `warpwell.scheduler.service.address.default_path` by default.
    device, policy, limit, tenants
        As for `Scheduler`. If `tenants` names any, only those get in.
    group : str, optional
        Name or number of a group that the socket is opened to as well. Then a user is a tenant, and cannot choose.
    users : mapping, optional
        Tenant of each user, by name or number. Without it, a user's tenant is his login name; with it, other users than
        those it names do not get in.
    allow : sequence of str
        Modules whose kernels other users may launch: ``pkg.mod`` that one alone, ``pkg.*`` all below a package.
    trust_group : bool
        Take any kernel from them: each of them can then do whatever this user can.
    log : path, optional
        File that every event is appended to, as JSON lines.
    max_message, max_held : int
        Bytes of one message, and of all that one tenant may have here: messages on their way, input, arrays on the
        device, and answers that were not read.
    stuck : float, optional
        Seconds in which a kernel must end a block (see `Scheduler`).
    patience : float
        Seconds in which a client's message that has begun must move on.
    silence : float
        Seconds without a word from the owner, after which it is killed.
    command : sequence of str
        Starts an owner.
    """

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
        max_message: int | str = protocol.MAX_BODY,
        max_held: int | str = MAX_HELD,
        stuck: float | None = None,
        patience: float = protocol.PATIENCE,
        silence: float = SILENCE,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self.path = address.checked_path(path)
        self._group = None if group is None else address.own_group(str(group))
        self._users = None if users is None else {address.number_of("user", str(n)): t for n, t in users.items()}
        named = {t.name: t.settings() for t in read_tenants(tenants)}
        self._named = frozenset(named)
        unnamed = sorted(set((users or {}).values()) - self._named)
        if self._named and unnamed:
            raise errors.ArgumentError(
                f"users are tenants {', '.join(unnamed)}, for which tenants= has no setting: name them there, too",
                name="users",
            )
        self._max_message, self._patience = checked_nbytes(max_message, "max_message"), patience
        max_held = checked_nbytes(max_held, "max_held")
        settings = {
            "device": None if device is None else checked_device(device, among=("cpu", "cuda")),
            "policy": policy,
            "limit": limit,
            "tenants": named or None,
            "stuck": stuck,
            "max_message": self._max_message,
        }
        self.broker = Broker(
            settings, allow=allow, trust=trust_group, max_held=max_held, log=log, silence=silence, command=command
        )
        self._lock = threading.Lock()
        self._closed = False
        self._listener: socket.socket | None = None
        self._place = -1
        self._spool = ""
        self._threads: list[threading.Thread] = []
        self._silent: dict[protocol.ServiceConnection, tuple[int, float]] = {}  # user and time, the oldest first

    def start(self, timeout: float = 120.0) -> Service:
        """Start the owner, and listen once it is ready.

        Raises
        ------
        ServiceError
            Another service listens there, the folder is not safe, or no owner gets ready.
        """
        address.prepare(self.path, self._group)
        self._place = address.lock(self.path)
        try:
            self._spool = f"{self.path}.kernels"  # beside the socket nobody else can write
            unfinished.update((self.path, Path(self._spool)))
            shutil.rmtree(self._spool, ignore_errors=True)  # of a service that was killed
            os.makedirs(self._spool, mode=0o700, exist_ok=True)
            self.broker.start(self._spool, timeout)
            self._listen()
        except BaseException as error:
            self.close(soon=not isinstance(error, Exception))  # Ctrl-C waits for no owner
            raise
        return self

    def __enter__(self) -> Service:
        return self if self._listener is not None else self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, *, soon: bool = False) -> None:
        """Stop: clients get `ServiceError`, the owner ends, the socket goes. May be called twice.

        Parameters
        ----------
        soon : bool
            Wait for clients and owner no longer than a fraction of a second.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
            self._listener.close()
            self.path.unlink(missing_ok=True)
        for session in list(self.broker.sessions.values()):
            session.refuse(_STOPPED)
        self.broker.close(_SOON if soon else _OWNER)
        with self._lock:
            for connection in self._silent:
                connection.interrupt()
        until = time.monotonic() + (_SOON if soon else self._patience)
        for thread in list(self._threads):
            thread.join(max(0.0, until - time.monotonic()))
        if self._spool:
            shutil.rmtree(self._spool, ignore_errors=True)
            unfinished.difference_update((self.path, Path(self._spool)))
        if self._place >= 0:
            os.close(self._place)

    def _listen(self) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.path.unlink(missing_ok=True)  # left by a service that was killed: its lock is ours
        listener.bind(os.fspath(self.path))
        # no client can connect before listen(), so the socket is never open with another mode
        if self._group is not None:
            os.chown(self.path, -1, self._group)
        os.chmod(self.path, 0o600 if self._group is None else 0o660)
        listener.listen(1024)
        self._listener = listener
        thread = threading.Thread(target=self._accept, args=(listener,), name="warpwell-service", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        number = 0
        while not self._closed:
            try:
                sock, _ = listener.accept()
            except OSError:
                time.sleep(0.05)  # closed; or out of descriptors, which other connections will release
                continue
            number += 1
            self._threads = [t for t in self._threads if t.is_alive()]
            pid, uid = protocol.credentials(sock)
            connection = protocol.ServiceConnection(
                sock, f"client {number} (process {pid} of user {uid})", max_body=0, patience=self._patience
            )
            self._await_hello(uid, connection)
            thread = threading.Thread(
                target=self._serve, args=(connection, uid, number), name=f"warpwell-client-{number}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # no more threads; others will end, and who connects again may get in
                self._said_hello(connection)
                connection.close()
                continue
            self._threads.append(thread)  # started before, or it would be taken for one that has ended

    def _await_hello(self, uid: int, connection: protocol.ServiceConnection) -> None:
        """Note a connection that has not said hello yet; interrupt those that took too long, or are too many."""
        now = time.monotonic()
        with self._lock:
            its = [c for c, (user, _) in self._silent.items() if user == uid]
            late = {c for c, (_, since) in self._silent.items() if now - since > self._patience}
            for other in late.union(its[: len(its) - SILENT + 1] if len(its) >= SILENT else ()):
                other.interrupt()
                del self._silent[other]
            self._silent[connection] = uid, now

    def _said_hello(self, connection: protocol.ServiceConnection) -> None:
        with self._lock:
            self._silent.pop(connection, None)

    def _serve(self, connection: protocol.ServiceConnection, uid: int, number: int) -> None:
        session: Session | None = None
        try:
            hello = connection.expect("hello")
            self._said_hello(connection)
            protocol.check_version(hello, "your program", "the service")
            tenant = self._tenant(uid, hello.get("tenant", (str, type(None)), None))
            connection.max_body = self._max_message  # not before it is known who sends it
            session = Session(connection, number, tenant, uid)
            self.broker.enter(session, MAX_CLIENTS)
            about = self.broker.about
            session.outbox.put(
                {
                    "type": "hello",
                    "version": protocol.VERSION,
                    "tenant": session.tenant,
                    "about": about,
                    "owner": os.getuid(),
                    "max_message": self._max_message,
                }
            )
            while not self._closed:
                session.outbox.wait_for_room(self._patience)  # a client that reads nothing may not send
                message = connection.receive(functools.partial(self.broker.comes, session))
                if message is None:
                    continue
                if message.kind == "ping":
                    self.broker.comes(session, 0)  # whatever came with it is dropped
                    session.outbox.put({"type": "pong"})
                else:
                    self.broker.take(session, message)
            session.refuse(_STOPPED)
        except EOFError:
            pass  # the client has closed, or was killed
        except errors.WarpwellError as error:
            with contextlib.suppress(errors.WarpwellError):
                connection.send({"type": "refused", "message": str(error)})
        finally:
            if session is not None:
                self.broker.drop(session)
                session.outbox.close()
            self._said_hello(connection)
            connection.close()

    def _tenant(self, uid: int, wanted: str | None) -> str:
        """Return the tenant of a client, by the user that the kernel says it is.

        Raise ServiceError if it may not come in, or is not the tenant that it says.
        """
        own = uid == os.getuid()
        users = {} if self._users is None else self._users
        if wanted is not None and not (0 < len(wanted) <= 64 and wanted.isprintable()):
            raise errors.ServiceError("a tenant's name has 1 to 64 printable letters")
        if self._group is None and not own:
            raise errors.ServiceError(
                f"this service is for user {os.getuid()} alone, and you are user {uid}: start one of your own, or "
                "ask for one with --group"
            )
        if self._users is not None and not own and uid not in users:
            raise errors.ServiceError(f"user {uid} is not a tenant of this service: ask to be added to --users")
        tenant = users.get(uid) or ("default" if self._group is None else _login(uid))
        if wanted not in (None, tenant) and not own:  # a user who may stop the service may choose any tenant
            raise errors.ServiceError(f"user {uid} is tenant {tenant!r} of this service, not {wanted!r}")
        looks_on = wanted is None and own  # `sched status` may come in, and submits nothing
        tenant = wanted or tenant
        if self._named and tenant not in self._named and not looks_on:
            raise errors.ServiceError(not_named(tenant, self._named))
        return tenant


def _login(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user-{uid}"
