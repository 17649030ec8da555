"""The device process of a service: the only user of the device, which serves the clients that the service sends.

``python -m warpwell.scheduler.service.device_process CONTROL PAGE`` runs it, with the descriptors of its connection to
the service and of the status page. It imports the kernels that clients name, so it may die at any moment. The service
then starts a new device process, and the clients resubmit.

Threads: the first one receives all messages and never waits; each client has a worker (imports, copies); the scheduler
has its own; the reporter sends results in the order in which requests ended, and writes files.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import json
import logging
import os
import queue
import resource
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ..._os import end_with_parent
from ...libcuda import device_name
from ...targets import default_device, to_device, to_host
from ..events import Event, Log
from ..handle import RequestHandle
from ..predict.learner import Learner
from ..report.prometheus import LogMetrics, write_text
from ..scheduler import Scheduler
from ..task import Request, State
from . import references
from .messages import (
    MAX_TASKS,
    TIMEOUT_SECONDS,
    VERSION,
    Connection,
    Message,
    arguments_of,
    checked,
    checked_shape,
    error_fields,
    profile_of,
)
from .recovery import Quarantine, Start, StatusPage

_log = logging.getLogger(__package__)

BEAT_SECONDS = 1.0
"""Interval of heartbeats to the service."""

FAULT = 70
"""Exit status after a failure of the device or a stuck request: EX_SOFTWARE of sysexits.h."""

METRICS_SECONDS = 5.0
"""Interval at which the file of metrics is written: a third of Prometheus' usual 15 s."""

SAVE_SECONDS = 30.0
"""Interval at which the learner's history is saved. Chosen: a death loses the measurements of this time."""

IMPORT_SECONDS = 120.0
"""Maximum duration of an import, after which the process ends. Protection, not tuned."""

RESUME_SECONDS = 5.0
"""Time in which clients must resubmit the suspects of a death. Protection, not tuned."""

MAX_UNFINISHED = 16_384
"""Maximum number of unfinished tasks of a client. Protection, not tuned."""

MAX_CALLS = 1024
"""Maximum number of calls of a client that wait for its worker. Protection, not tuned."""

MAX_LOG_EVENTS = 100_000
"""Maximum number of events of the log in memory; the file has all of them. Chosen: a few 10 MB."""

FREE_TEXT_BYTES = 4096
"""Size of a message's JSON text that does not count for its tenant. Beyond it, the text counts eightfold, because its
Python objects take about as much."""


class Session:
    """A connected client.

    Attributes
    ----------
    key : int
        Number of the connection.
    number : int
        Number of the session, which continues on another connection if a device process dies.
    """

    def __init__(self, connection: Connection, key: int, number: int, tenant: str, own: bool) -> None:
        self.connection, self.key, self.number, self.tenant, self.own = connection, key, number, tenant, own
        self.worker = ThreadPoolExecutor(1, f"warpwell-client-{number}")
        self.requests: dict[int, Submission] = {}  # by token
        self.unfinished = 0  # tasks
        self.calls = 0  # for the worker
        self.failed: dict[int, None] = {}  # tokens of requests that failed or were cancelled
        self.buffers: dict[int, Any] = {}
        self.sending = threading.Lock()
        self.outbox: deque[tuple[dict[str, Any], Sequence[NDArray[Any]], int]] = deque()  # see DeviceProcess._send
        self.blocked_since = 0.0
        self.importing: tuple[float, int] | None = None  # start of an import in the worker, and token of its request
        self.is_gone = False


class Submission:
    """A request of a client."""

    def __init__(self, session: Session, token: int, message: Message, nbytes: int) -> None:
        self.session, self.token, self.header, self.nbytes = session, token, message.header, nbytes
        self.tasks: list[dict[str, Any]] = message.get("tasks", list)
        self.arrays, self.originals = message.arrays(), message.arrays()
        self.read_only = {k for k in message.get("readonly", list, []) if type(k) is int and 0 <= k < len(self.arrays)}
        for k in self.read_only:
            self.arrays[k].flags.writeable = False
        self.buffers = dict(session.buffers)  # The client may free the arrays before the request starts.
        self.handle: RequestHandle | None = None  # set when the request is in the scheduler
        self.failed = self.is_running = False
        self.numbers = range(0)

    def changes(self) -> list[int]:
        """Return the indices of the arrays that the kernels have changed."""
        writable = [k for k in range(len(self.arrays)) if k not in self.read_only]
        return [k for k in writable if not np.array_equal(_items(self.arrays[k]), _items(self.originals[k]))]

    @property
    def is_waiting(self) -> bool:
        """True if no task of the request has been launched."""
        return self.handle is None or self.handle.state is State.WAITING


class ServiceLog(Log):
    """A log that also hands each event to a function, with times and numbers of the whole service."""

    def __init__(self, report: Callable[[Event], None]) -> None:
        super().__init__(max_events=MAX_LOG_EVENTS)
        self.offset, self._report = 0.0, report

    def add(self, event: Event) -> None:
        """Append an event; called in the scheduler's thread."""
        event.time += self.offset
        super().add(event)
        self._report(event)


class DeviceProcess:
    """The scheduler of a service, and the sessions of its clients.

    Parameters
    ----------
    control : Connection
        Connection to the service.
    page : StatusPage
    settings : dict
        Options of the scheduler and of the service, and the verdicts about earlier device processes.
    scheduler : callable
        Constructor of the scheduler.
    """

    def __init__(
        self, control: Connection, page: StatusPage, settings: dict[str, Any], scheduler: Any = Scheduler
    ) -> None:
        self._control, self._page, self._settings = control, page, settings
        self._lock = threading.RLock()
        self._kernels = references.Kernels()
        self._reports: queue.SimpleQueue[Start] = queue.SimpleQueue()
        self._held: Counter[str] = Counter()
        self._sessions: dict[int, Session] = {}
        self._by_token: dict[int, Submission] = {}  # A client that connects again uses its tokens again.
        self._by_number: dict[int, Submission] = {}
        self._fresh: list[Submission] = []

        self._quarantine = Quarantine(settings["suspects"])
        self._culprits = {int(token): fields for token, fields in settings["culprits"].items()}
        self._named = frozenset(settings["tenants"] or ())
        self._log = ServiceLog(self._note)
        self._metrics, self._metrics_lock = LogMetrics(settings["policy"]), threading.Lock()
        path = settings["log"]
        self._file = None if path is None else open(path, "ab", buffering=0)
        self._unwritable: set[str] = set()  # files whose error was logged
        self._learner = Learner(saves=True)
        self._scheduler = scheduler(
            settings["device"] or default_device(),
            settings["policy"],
            analyzer=self._learner,
            limit=settings["limit"],
            tenants=settings["tenants"],
            log=self._log,
            **({} if settings["stuck"] is None else {"stuck_after": settings["stuck"]}),
        )
        device = self._scheduler.device
        core, now = self._scheduler.inspect(lambda core: (core, core.executor.now()))
        self._properties = {
            "device": device,
            "gpu": device_name(0) if device == "cuda" else "",
            "policy": core.policy.name,
            "limit": core.limit,
            "memory": core.executor.capacity.memory,
            "processors": core.executor.capacity.processors,
        }
        self._log.offset = time.monotonic() - settings["began"] - now
        self._log.about = dict(self._properties)
        self._append({"about": self._properties})
        self._selector = selectors.DefaultSelector()
        self._selector.register(control.sock, selectors.EVENT_READ, None)
        threading.Thread(target=self._report, name="warpwell-reporter", daemon=True).start()
        # An error ends the service at its start, and not later.
        if settings["metrics"] is not None and not settings["restarts"]:
            write_text(settings["metrics"], self._render(None))

    def run(self) -> None:
        """Serve until the service sends "stop" or is gone."""
        self._control.send({"type": "ready", "properties": {**self._properties, "owner_pid": os.getpid()}})
        began = beat = written = saved = time.monotonic()
        while True:
            for key, ready in self._selector.select(max(0.0, beat - time.monotonic())):
                if key.data is None:
                    if not self._take_control():
                        return
                elif not key.data.is_gone:
                    (self._serve if ready & selectors.EVENT_READ else self._flush)(key.data)
            now = time.monotonic()
            if now < beat:
                continue
            beat = now + BEAT_SECONDS
            self._check(now)
            if now - began > RESUME_SECONDS:
                self._start(self._quarantine.expire)
            if now - written > METRICS_SECONDS:
                written = now
                self._reports.put(self._write_metrics)
            if now - saved > SAVE_SECONDS:
                saved = now
                self._reports.put(self._save)

    def _take_control(self) -> bool:
        """Handle a message of the service; return False at the end."""
        with self._control.receive(wait=False) as message:
            if message.kind == "client":
                sock = socket.socket(fileno=message.fd)
                message.fd = -1
                key, number, tenant = message.get("key", int), message.get("session", int), message.get("tenant", str)
                connection = Connection(sock, message.get("peer", str), self._settings["max_message"])
                for former in [s for s in self._sessions.values() if s.number == number]:
                    self._drop(former)  # The client has connected again.
                session = self._sessions[key] = Session(connection, key, number, tenant, message.get("own", bool))
                self._selector.register(sock, selectors.EVENT_READ, session)
                self._control.send({"type": "joined", "key": key})
                hello = {"type": "hello", "version": VERSION, "session": number, "tenant": tenant}
                hello |= {"properties": self._properties, "max_message": self._settings["max_message"]}
                self._send(session, hello)
            return message.kind != "stop"

    def _serve(self, session: Session) -> None:
        """Handle a message of a client, or the end of its connection."""
        try:
            with session.connection.receive(wait=False) as message:
                if message.kind == "ping":
                    self._send(session, {"type": "pong"})
                    return
                call = message.get("call", int)
                if message.kind not in _HANDLERS or not 0 < call < 1 << 32:
                    raise errors.ServiceError(f"{message.kind!r:.40} is not a message of this protocol")
                try:
                    _HANDLERS[message.kind](self, session, call, message)
                except errors.WarpwellError as error:
                    self._reply(session, call, {"error": error_fields(error)})
        except BlockingIOError:
            pass
        except EOFError:
            self._drop(session)
        except Exception as error:  # an invalid message, or too few resources for this client
            with contextlib.suppress(OSError):
                session.connection.send({"type": "refused", "message": str(error)}, wait=False)
            self._drop(session)

    # -- messages of clients: in the first thread, which must not wait

    def _submit(self, session: Session, call: int, message: Message) -> None:
        tasks = message.get("tasks", list)
        if not 1 <= len(tasks) <= MAX_TASKS:
            raise errors.ServiceError(f"a request has {len(tasks)} launches; 1 to {MAX_TASKS} are allowed")
        for task in tasks:
            task["kernel"] = references.check(checked(task, "kernel", dict))
            self._authorize(session, task["kernel"])
        token = session.number << 32 | call
        if token in session.requests or session.unfinished + len(tasks) > MAX_UNFINISHED:
            raise errors.ServiceError(f"a client may have {MAX_UNFINISHED} unfinished tasks: wait for some of them")
        after = {session.number << 32 | n for n in message.get("after", list, []) if type(n) is int}
        nbytes = message.nbytes + (8 * message.size if message.size > FREE_TEXT_BYTES else 0)
        self._require_setting(session)
        self._charge_bytes(session, nbytes)
        try:
            submission = Submission(session, token, message, nbytes)
        except BaseException:
            self._release(session, nbytes)
            raise
        self._reply(session, call, {})
        with self._lock:
            session.requests[token] = self._by_token[token] = submission
            session.unfinished += len(tasks)
        if token in self._culprits:
            submission.failed = True
            self._reports.put(functools.partial(self._finish_culprit, submission))
            return
        start = functools.partial(self._begin, submission, after)
        self._start(functools.partial(self._quarantine.admit, token, after, start))

    def _authorize(self, session: Session, named: dict[str, str]) -> None:
        allow = self._settings["allow"]
        if session.own or self._settings["trust"] or references.is_allowed(named, allow):
            return
        text = f"only kernels of {', '.join(allow)} may" if allow else "none may"
        above = [p for p in allow if named.get("module", "").startswith(p + ".")]
        if above:
            text += f" ({above[0]} is that module alone; --allow '{above[0]}.*' is for those below it)"
        kernel = references.describe(named)
        raise errors.ServiceError(f"kernel {kernel} may not be launched by other users: {text}; ask for --allow")

    def _require_setting(self, session: Session) -> None:
        """Raise QuotaError if only other tenants may submit; other clients may still read status and metrics."""
        if self._named and session.tenant not in self._named:
            raise errors.QuotaError(not_named(session.tenant, self._named), name="tenant")

    def _charge_bytes(self, session: Session, nbytes: int) -> None:
        """Count bytes for the tenant of a session; raise QuotaError if the tenant has too many."""
        tenant, limit = session.tenant, self._settings["max_held"]
        with self._lock:
            if self._held[tenant] + nbytes > limit:
                text = (
                    f"tenant {tenant!r} has {self._held[tenant]} bytes at the service, and {nbytes} more exceed {limit}"
                )
                raise errors.QuotaError(f"{text}: wait for results, free arrays, or start the service with --max-held")
            self._held[tenant] += nbytes

    def _release(self, session: Session, nbytes: int) -> None:
        with self._lock:
            self._held[session.tenant] -= nbytes

    def _cancel(self, session: Session, call: int, message: Message) -> None:
        token = session.number << 32 | message.get("request", int)
        submission = session.requests.get(token)
        if submission is None or self._withdraw(submission):
            self._reply(session, call, {"cancelled": submission is not None})
        else:
            self._in_worker(session, call, lambda: ({"cancelled": _cancel(submission)}, []))

    def _state(self, session: Session, call: int, message: Message) -> None:
        submission = session.requests.get(session.number << 32 | message.get("request", int))
        handle = None if submission is None else submission.handle
        self._reply(session, call, {"state": State.WAITING.value if handle is None else handle.state.value})

    def _resumed(self, session: Session, call: int, message: Message) -> None:
        self._reply(session, call, {})
        self._start(functools.partial(self._quarantine.expire, session.number))

    def _free(self, session: Session, call: int, message: Message) -> None:
        number = message.get("buffer", int)
        self._in_worker(session, call, lambda: ({"freed": session.buffers.pop(number, None) is not None}, []))

    def _put(self, session: Session, call: int, message: Message) -> None:
        nbytes = message.nbytes
        self._require_setting(session)
        self._charge_bytes(session, nbytes)
        try:
            if len(message.layout) != 1:
                raise errors.ServiceError("one array at a time is put on the device")
            (values,) = message.arrays()
            self._in_worker(session, call, functools.partial(self._put_array, session, call, values))
        except BaseException:
            self._release(session, nbytes)
            raise

    def _put_array(self, session: Session, call: int, values: NDArray[Any]) -> tuple[dict[str, Any], list[Any]]:
        tenant, nbytes = session.tenant, values.nbytes
        reserved = False
        try:
            self._scheduler.inspect(lambda core: core.admission.reserve(tenant, nbytes))
            reserved = True
            array = to_device(self._scheduler.device, values)
        except BaseException as error:
            self._freed(session, nbytes, reserved)
            if not isinstance(error, MemoryError) or isinstance(error, errors.WarpwellError):
                raise
            raise errors.TaskMemoryError(f"{error}: free other arrays, or copy less") from None
        session.buffers[call] = array
        # Tasks that use the array keep it after the client has freed it.
        freed = functools.partial(self._freed, session, nbytes, True)
        weakref.finalize(array, self._reports.put, freed).atexit = False
        if session.is_gone:
            session.buffers.clear()
        return {}, []

    def _freed(self, session: Session, nbytes: int, reserved: bool) -> None:
        self._release(session, nbytes)
        if reserved:
            with contextlib.suppress(errors.WarpwellError):  # The scheduler has failed.
                self._scheduler.inspect(lambda core: core.admission.release(session.tenant, nbytes))

    def _get(self, session: Session, call: int, message: Message) -> None:
        number = message.get("buffer", int)
        self._in_worker(session, call, lambda: ({}, [np.asarray(to_host(_buffer(session.buffers, number)))]))

    def _log_text(self, session: Session, call: int, message: Message) -> None:
        def write() -> tuple[dict[str, Any], list[Any]]:
            log, text = Log(), io.StringIO()
            log.about, log.dropped = self._properties, self._log.dropped
            for event in self._log.events:
                if session.own or event.tenant == session.tenant:
                    log.add(event)
            log.write(text)
            return {}, [_text(text.getvalue())]

        self._in_worker(session, call, write)

    def _metrics_text(self, session: Session, call: int, message: Message) -> None:
        tenant = None if session.own else session.tenant
        self._in_worker(session, call, lambda: ({}, [_text(self._render(tenant))]))

    def _status_of(self, session: Session, call: int, message: Message) -> None:
        self._reply(session, call, {"status": self._status()})

    def _status(self) -> dict[str, Any]:
        with self._lock:
            sessions = [s for s in self._sessions.values() if not s.is_gone]
            return {
                **self._properties,
                "owner_pid": os.getpid(),
                "owner_restarts": self._settings["restarts"],
                "clients": len(sessions),
                "requests": sum(len(s.requests) for s in sessions),
                "uptime": time.monotonic() - self._settings["began"],
                "held_bytes": self._held.total(),
            }

    def _render(self, tenant: str | None) -> str:
        status = self._status()
        with self._metrics_lock:
            self._metrics.set_service(status["owner_restarts"], status["clients"], status["held_bytes"])
            return self._metrics.render(tenant)

    # -- sending

    def _in_worker(self, session: Session, call: int, function: Callable[[], tuple[dict[str, Any], list[Any]]]) -> None:
        """Answer a call with the result of a function, in the worker of the client."""
        with self._lock:
            if session.calls >= MAX_CALLS:
                raise errors.QuotaError(f"a client may have {MAX_CALLS} unanswered calls: wait for some", name="calls")
            session.calls += 1

        def answer() -> None:
            held = 0
            try:
                header, arrays = function()
                if held := sum(array.nbytes for array in arrays):
                    self._charge_bytes(session, held)
            except BaseException as error:
                header, arrays, held = {"error": error_fields(error)}, [], 0
            with self._lock:
                session.calls -= 1
            self._reply(session, call, header, arrays, held)

        session.worker.submit(answer)

    def _reply(
        self, session: Session, call: int, header: dict[str, Any], arrays: Sequence[NDArray[Any]] = (), held: int = 0
    ) -> None:
        self._send(session, {**header, "type": "reply", "call": call}, arrays, held)

    def _send(
        self, session: Session, header: dict[str, Any], arrays: Sequence[NDArray[Any]] = (), held: int = 0
    ) -> None:
        """Send a message after the client has read earlier messages; then its tenant has `held` bytes less."""
        with session.sending:
            if session.outbox or not self._try_to_send(session, header, arrays, held):
                if not session.outbox:  # Stop receiving from a client that does not read.
                    session.blocked_since = time.monotonic()
                    self._selector.modify(session.connection.sock, selectors.EVENT_WRITE, session)
                session.outbox.append((header, arrays, held))

    def _try_to_send(self, session: Session, header: dict[str, Any], arrays: Sequence[NDArray[Any]], held: int) -> bool:
        """Send a message; return False if the client must read first."""
        self._release(session, held)  # The client may use the bytes again as soon as it has the message.
        try:
            if not session.is_gone:
                session.connection.send(header, arrays, wait=False)
        except errors.MessageSizeError as error:
            fields: dict[str, Any] = {key: header[key] for key in ("type", "call", "request") if key in header}
            with contextlib.suppress(OSError):
                session.connection.send({**fields, "error": error_fields(error)}, wait=False)
        except OSError as error:
            # Other errors: too few resources, or (ETOOMANYREFS) too many descriptors in sockets of this user.
            if error.errno not in (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF):
                self._release(session, -held)
                return False
        return True

    def _flush(self, session: Session) -> None:
        """Send the messages that wait for a client, and then receive from it again."""
        with session.sending:
            while session.outbox and self._try_to_send(session, *session.outbox[0]):
                session.outbox.popleft()
                session.blocked_since = time.monotonic()
            if not session.outbox:
                self._selector.modify(session.connection.sock, selectors.EVENT_READ, session)

    def _drop(self, session: Session) -> None:
        """End a client: cancel its requests and free its arrays."""
        if session.is_gone:
            return
        self._control.send({"type": "left", "key": session.key})
        with session.sending:  # Another thread must not send on a descriptor number that was reused.
            session.is_gone = True
            self._selector.unregister(session.connection.sock)
            session.connection.interrupt()  # The service has the socket, too, so `close` would not end the connection.
            session.connection.close()
            self._release(session, sum(held for _, _, held in session.outbox))
            session.outbox.clear()
        for submission in list(session.requests.values()):
            if not self._withdraw(submission):
                with contextlib.suppress(RuntimeError):  # No more threads can be started.
                    session.worker.submit(_cancel, submission)
        with contextlib.suppress(RuntimeError):
            session.worker.submit(session.buffers.clear)
        session.worker.shutdown(wait=False)

    # -- requests

    def _start(self, change: Callable[[], list[Start]]) -> None:
        """Change the quarantine, and start the requests that may run now."""
        with self._lock:
            starts = change()
            self._page.alone = self._quarantine.alone
            for start in starts:  # The lock keeps other threads from starting later requests before these.
                start()

    def _withdraw(self, submission: Submission) -> bool:
        """End a request that has not started because of the quarantine; return False if the request has started."""
        with self._lock:
            if submission.token not in self._quarantine:
                return False
            self._fail(submission, {"cancelled": True})
            self._start(functools.partial(self._quarantine.end, submission.token))
        return True

    def _fail(self, submission: Submission, fields: dict[str, Any]) -> None:
        """End a request that has not reached the scheduler."""
        submission.failed = True
        self._reports.put(functools.partial(self._finish, submission, fields))

    def _begin(self, submission: Submission, after: set[int]) -> None:
        try:
            submission.session.worker.submit(self._prepare, submission, after)
        except RuntimeError:  # The client is gone, or no thread can be started.
            self._fail(submission, {"cancelled": True})

    def _prepare(self, submission: Submission, after: set[int]) -> None:
        """Import the kernels of a request and submit it; in the worker of its client."""
        session, header = submission.session, submission.header
        try:
            with self._lock:
                self._page.add(submission.token)
            earlier = [r for t in after if (r := session.requests.get(t)) is not None]
            if session.is_gone or any(r.failed for r in earlier) or any(t in session.failed for t in after):
                self._fail(submission, {"cancelled": True})
                return
            kernels = []
            for task in submission.tasks:
                session.importing = time.monotonic(), submission.token
                kernels.append(self._kernels.load(task["kernel"]))
            session.importing = None
            profile, name = profile_of(header.get("profile")), checked(header, "name", str, "")
            size = checked(header, "size", dict, {})
            if len(name) > references.MAX_NAME or not all(type(n) in (int, float) for n in size.values()):
                raise errors.ServiceError("a request has a name that is too long, or a size that is not numbers")
            options = {key: header[key] for key in ("priority", "deadline", "memory") if header.get(key) is not None}
            ready = []
            for kernel, task in zip(kernels, submission.tasks, strict=True):
                shape = checked_shape(task)
                values = arguments_of(task, submission.arrays, functools.partial(_buffer, submission.buffers))
                launch = kernel[shape if len(shape) > 1 else shape[0]]
                made = self._scheduler.task(
                    launch, *values, tenant=session.tenant, profile=profile, size=size, **options
                )
                # Arrays that stay on the device are reserved already.
                numbers = {number for kind, number in task["arguments"] if kind == "buffer"}
                reserved = sum(_buffer(submission.buffers, number).nbytes for number in numbers)
                made.memory = max(0, made.memory - reserved)
                made.resident_bytes = max(0, made.resident_bytes - reserved)
                ready.append(made)
            with self._lock:
                first = self._page.reserve_numbers(len(ready))
                submission.numbers = range(first, first + len(ready))
                self._by_number.update(dict.fromkeys(submission.numbers, submission))
            request = Request(name or ready[0].name, ready, first=first)
            before = [r.handle.handles[-1] for r in earlier if r.handle is not None]
            submission.handle = RequestHandle(request.name, self._scheduler.submit_request(request, before))
            end = functools.partial(self._end, submission)
            submission.handle.add_done_callback(lambda _: self._reports.put(end))
            self._fresh.append(submission)
        except BaseException as error:
            if (failure := self._scheduler.failure) is not None:
                self._fault(str(failure))
            self._fail(submission, {"error": error_fields(error)})
        finally:
            submission.buffers, session.importing = {}, None

    def _note(self, event: Event) -> None:
        """Update the status page for an event. The scheduler's thread calls this for each event."""
        submission = self._by_number.get(event.task) if event.kind in ("launch", "stop") else None
        if submission is not None:
            with self._lock:
                submission.is_running = event.kind == "launch"
                (self._page.add if submission.is_running else self._page.discard)(submission.token)
        self._reports.put(functools.partial(self._record, event))

    # -- the reporter

    def _report(self) -> None:
        while True:
            try:
                self._reports.get()()
            except Exception:  # Without this thread, no client would get a result.
                traceback.print_exc()

    def _record(self, event: Event) -> None:
        with self._metrics_lock:
            self._metrics.observe(event)
        self._append(event.plain())
        if event.kind == "lost" and "reason" not in event.why:  # A task of an earlier device process has a reason.
            self._fault(str(event.why.get("error", "the device failed")))

    def _append(self, line: dict[str, Any]) -> None:
        """Append a line to the log's file. A full disk must not stop the requests."""
        if self._file is None:
            return
        text = (json.dumps(line, sort_keys=True) + "\n").encode()
        try:
            written = self._file.write(text) or 0
            if written < len(text):  # The next line must not be joined to a part of this line.
                self._file.truncate(self._file.tell() - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            problem = "events are missing from %s: %s; `sched status --log` writes the last events"
            self._log_error(self._file.name, problem, error)

    def _write_metrics(self) -> None:
        """Write the file of metrics. A full disk must not stop the requests."""
        if (path := self._settings["metrics"]) is None:
            return
        try:
            write_text(path, self._render(None))
            self._unwritable.discard(path)
        except OSError as error:
            self._log_error(path, "no metrics are written to %s: %s", error)

    def _log_error(self, path: str, text: str, error: OSError) -> None:
        """Log the error of a file that cannot be written, once."""
        if path not in self._unwritable:
            self._unwritable.add(path)
            _log.error(text, path, error.strerror or error)

    def _end(self, submission: Submission) -> None:
        """Send the result of a request whose tasks have ended."""
        handle = submission.handle
        assert handle is not None
        if handle.cancelled():
            return self._finish(submission, {"cancelled": True})
        error = handle.exception()
        if isinstance(error, errors.StallError):
            # This process cannot stop its threads, or the GPU.
            self._fault(str(error), submission.token, error_fields(error))
        elif isinstance(error, errors.TaskLostError):
            self._fault(str(error))
        elif error is not None:
            self._finish(submission, {"error": error_fields(error)})
        else:
            changed = submission.changes()
            self._finish(submission, {"changed": changed}, [submission.arrays[k] for k in changed])

    def _finish(self, submission: Submission, fields: dict[str, Any], arrays: Sequence[NDArray[Any]] = ()) -> None:
        """Send the end of a request, and forget it."""
        session, token = submission.session, submission.token
        with self._lock:
            if session.requests.pop(token, None) is None:
                return
            is_current = self._by_token.get(token) is submission
            if is_current:
                del self._by_token[token]
            session.unfinished -= len(submission.tasks)
            if "changed" not in fields:
                session.failed[token] = None
                if len(session.failed) > MAX_UNFINISHED:
                    del session.failed[next(iter(session.failed))]
            for number in submission.numbers:
                del self._by_number[number]
        self._send(session, {**fields, "type": "ended", "request": token & 0xFFFFFFFF}, arrays, submission.nbytes)
        if is_current:
            with self._lock:
                self._page.discard(token)
            self._start(functools.partial(self._quarantine.end, token))

    def _finish_culprit(self, submission: Submission) -> None:
        """Send the error of a request that ended an earlier device process."""
        fields, name = dict(self._culprits[submission.token]), submission.tasks[0]["kernel"]["name"]
        why = {"reason": fields["message"]}
        if fields["class"] == "TaskLostError":
            fields["message"] = f"the device process was started again because of task {name!r}: {fields['message']}"
        with self._lock:
            number = self._page.reserve_numbers(1)
        now = time.monotonic() - self._settings["began"] - self._log.offset
        self._log.add(Event(now, "lost", number, name, submission.session.tenant, why))
        self._finish(submission, {"error": fields})

    def _clear_waiting(self) -> None:
        """Remove requests that wait in the scheduler from the status page: their imports did not end this process."""
        fresh, self._fresh = self._fresh, []
        waiting = [s for s in fresh if s.is_waiting]
        if waiting:
            self._scheduler.inspect(lambda _: None)  # The launches of earlier decisions are recorded by now.
            with self._lock:
                for submission in waiting:
                    if not submission.is_running:
                        self._page.discard(submission.token)

    def _save(self) -> None:
        with contextlib.suppress(Exception):  # A full disk must not stop the requests.
            self._learner.save()

    # -- heartbeats, and the end

    def _check(self, now: float) -> None:
        """Send a heartbeat, or end this process; drop clients that do not read."""
        for session in list(self._sessions.values()):
            if session.outbox and now - session.blocked_since > TIMEOUT_SECONDS:
                self._drop(session)
            if session.is_gone and not session.requests:
                del self._sessions[session.key]
            if (importing := session.importing) is not None and now - importing[0] > IMPORT_SECONDS:
                text = f"importing its file of kernels took over {IMPORT_SECONDS:g} s"
                self._fault(text, importing[1], error_fields(errors.TaskLostError(text)))
        if (failure := self._scheduler.failure) is not None:
            self._fault(str(failure))
        if self._control.is_writable():  # If the service is stopped, leave room for messages that must not be lost.
            self._control.send({"type": "beat"})
        self._reports.put(self._clear_waiting)

    def _fault(self, message: str, token: int = 0, error: dict[str, Any] | None = None) -> None:
        """Send the reason and the culprit to the service, and end the process at once."""
        with contextlib.suppress(OSError):
            self._control.send({"type": "fault", "message": message[:4096], "token": token, "error": error})
        os._exit(FAULT)

    def close(self) -> None:
        """Save what was measured, and end the process without waiting for its tasks."""
        for work in (self._write_metrics, self._save, functools.partial(os._exit, 0)):
            self._reports.put(work)
        time.sleep(TIMEOUT_SECONDS)  # If the reporter does not end this process, the service kills it before this time.
        os._exit(0)


_HANDLERS: dict[str, Callable[[DeviceProcess, Session, int, Message], None]] = {
    "submit": DeviceProcess._submit,
    "cancel": DeviceProcess._cancel,
    "state": DeviceProcess._state,
    "resumed": DeviceProcess._resumed,
    "put": DeviceProcess._put,
    "get": DeviceProcess._get,
    "free": DeviceProcess._free,
    "log": DeviceProcess._log_text,
    "metrics": DeviceProcess._metrics_text,
    "status": DeviceProcess._status_of,
}


def not_named(tenant: str, named: Iterable[str]) -> str:
    """Return the message about a tenant without a setting."""
    return f"tenant {tenant!r} has no setting in this service: connect as one of {', '.join(sorted(named))}"


def _buffer(buffers: dict[int, Any], number: int) -> Any:
    if number not in buffers:
        raise errors.ArgumentError(f"array {number} is not on the device: it was freed", name="args")
    return buffers[number]


def _cancel(submission: Submission) -> bool:
    """Cancel the tasks of a request that have not ended."""
    return submission.handle is not None and submission.handle.cancel()


def _items(array: NDArray[Any]) -> NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)


def _text(text: str) -> NDArray[np.uint8]:
    return np.frombuffer(text.encode(), np.uint8)


def main(arguments: Sequence[str], scheduler: Any = Scheduler) -> None:
    """Run a device process with the descriptors of its connection to the service and of the status page."""
    # If the service is killed, no process may keep the device.
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # Each message in a socket may hold a descriptor.
    references.in_device_process = True
    control = Connection(socket.socket(fileno=int(arguments[0])), "the service")
    with contextlib.suppress(EOFError, BrokenPipeError):  # The service is gone.
        with control.receive() as message:
            settings = json.loads(message.arrays()[0].tobytes())
        try:
            process = DeviceProcess(control, StatusPage(int(arguments[1])), settings, scheduler)
        except (errors.WarpwellError, OSError) as error:
            control.send({"type": "refused", "message": str(error)})
            return
        with contextlib.suppress(EOFError, BrokenPipeError):
            process.run()
        process.close()


if __name__ == "__main__":
    main(sys.argv[1:])
