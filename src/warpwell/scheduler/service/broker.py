"""`Broker`: handles the messages of a service's clients and of its owner, and submits again when the owner died.

`Session` is one client, as the service sees it.
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ..events import Event, Log
from ..report.prometheus import LogMetrics
from . import protocol, references, wire
from .ledger import BEFORE, Gone, HeldRequest, Holdings, Ledger, Piece
from .owner_process import Arrays, OwnerProcess, SendQueue

KEPT_EVENTS = 100_000
"""Events that are kept in memory; a file (`log`) has all."""

STATES = {"launch": "running", "preempt": "stopping", "stop": "preempted"}
"""States of tasks after events of the owner."""

ALONE = 2.0
"""Seconds that a task which may have killed the owner is on the device alone (see `Ledger`)."""


LINES = 4
"""Lines of messages to the owner that a tenant has: importing holds up those on the same line."""

MAX_TASKS = 65_536
"""Tasks of a client that have not ended, at most."""

client_handles = protocol.Handlers()
owner_handles = protocol.Handlers()


Answered = Callable[[protocol.ServiceMessage | None], None]
"""What is called with the owner's answer; with None if the owner died before."""

_AWAY = wire.error_fields(
    errors.TaskLostError(
        "the process that owns the device is being started again, and arrays on the device are gone: try again"
    )
)


class Session:
    """A client that got in.

    Attributes
    ----------
    number : int
        Of the client, in the service.
    user : int
        Its number, as the kernel of the operating system says.
    own : bool
        Whether it is a process of the owner's user.
    coming : int
        Bytes of its message that is on its way in.
    tasks : int
        Its tasks that have not ended.
    line : str
        What its messages to the owner pass: in order, and not past each other.
    badly : dict
        Numbers of its tasks that failed or were cancelled.
    """

    def __init__(self, connection: protocol.ServiceConnection, number: int, tenant: str, user: int) -> None:
        self.connection = connection
        self.number = number
        self.tenant = tenant
        self.user = user
        self.own = user == os.getuid()
        self.line = f"{tenant}/{number % LINES}"
        self.coming = 0
        self.tasks = 0
        self.badly: dict[int, None] = {}
        self.outbox = SendQueue(connection, f"warpwell-to-client-{number}")

    def ended(self, number: int, *, badly: bool) -> None:
        """Note that a task has ended; tasks that come after one that ended badly are cancelled."""
        self.tasks -= 1
        if badly:
            self.badly[number] = None
            if len(self.badly) > MAX_TASKS:
                del self.badly[next(iter(self.badly))]

    def answer(
        self,
        call: int,
        header: dict[str, Any],
        arrays: Sequence[NDArray[Any]] = (),
        sent: Callable[[], None] | None = None,
    ) -> None:
        """Answer a call; `sent` is called when the answer is sent, or when the client has gone."""
        self.outbox.put({**header, "type": "reply", "call": call}, arrays, sent)

    def refuse(self, why: str) -> None:
        """Tell the client that it is over, and end its connection."""
        with contextlib.suppress(errors.WarpwellError):
            self.outbox.put({"type": "refused", "message": why})
        self.outbox.close()
        self.connection.interrupt()


class Broker:
    """Serves the clients of a service.

    Parameters
    ----------
    settings : dict
        What the owner is sent first: device, policy and so on, and `max_message`.
    allow, trust, max_held, log, silence, command
        As for `Service` (`trust`: its `trust_group`).
    """

    def __init__(
        self,
        settings: dict[str, Any],
        *,
        allow: Sequence[str],
        trust: bool,
        max_held: int,
        log: str | os.PathLike[str] | None,
        silence: float,
        command: Sequence[str],
    ) -> None:
        self._named = frozenset(settings["tenants"] or ())
        self._allow, self._trust = references.checked_patterns(allow), trust
        self._lock = threading.RLock()
        self._ledger = Ledger()
        self._holdings = Holdings(self._lock, self._ledger, max_held)
        self.sessions: dict[int, Session] = {}
        self._calls: dict[int, Answered] = {}  # of the owner
        self._call_numbers = itertools.count()
        self._open: dict[int, Session] = {}  # tasks that have ended, and whose lent memory is still open
        self._settled, self.failure = threading.Event(), ""
        self._fault: tuple[int | None, str] | None = None
        self._alone_since: float | None = None
        self._began, self._clock_offset = time.monotonic(), 0.0
        self.about: dict[str, Any] = {}
        self._metrics = LogMetrics(settings["policy"])
        self._events = Log(most=KEPT_EVENTS)
        self._log = log
        self._file: io.FileIO | None = None
        self.unlogged = ""  # why lines are missing from the log's file
        self._settings = settings
        self._owner = OwnerProcess(
            settings, said=self._owner_said, died=self._owner_died, command=command, silence=silence
        )

    def start(self, spool: str, timeout: float) -> None:
        """Start the owner, which may write to the folder `spool`; raise ServiceError unless it is ready in time."""
        if self._log is not None:
            self._file = open(self._log, "ab", buffering=0)
        self._settings["spool"] = spool
        self._owner.start()
        if not self._settled.wait(timeout) or self.failure:
            raise errors.ServiceError(
                f"the process that owns the device does not start: {self.failure or f'not ready in {timeout:g} s'}"
            )

    def close(self, seconds: float) -> None:
        """End the owner, by force after some seconds."""
        self._owner.stop(seconds)
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    # clients

    def enter(self, session: Session, limit: int) -> None:
        """Let a client in; raise ServiceError if its tenant has `limit` clients already, or its user twice as many."""
        with self._lock:
            others = list(self.sessions.values())
            for whose, count, most in (
                (f"tenant {session.tenant!r}", sum(s.tenant == session.tenant for s in others), limit),
                (f"user {session.user}", sum(s.user == session.user for s in others), 2 * limit),
            ):
                if count >= most:
                    raise errors.ServiceError(f"{whose} has {count} connections, which is all it may have: close some")
            self.sessions[session.number] = session

    def drop(self, session: Session) -> None:
        """Forget a client: its tasks are cancelled, its arrays on the device freed."""
        with self._lock:
            self.sessions.pop(session.number, None)
            self._came(session)
            sent, arrays, gone = self._ledger.drop(session.number)
            for piece in sent:
                self._owner.send({"type": "cancel", "task": piece.number, "line": session.line})
            for number in arrays:
                self._owner.send({"type": "free", "buffer": number, "line": session.line})
            self._end(gone)
            self._holdings.changed()
            self._pump()

    def comes(self, session: Session, nbytes: int) -> None:
        """Count a message of a client that begins to come. Raises `QuotaError` where its tenant has too much here."""
        with self._lock:
            self._came(session)
            self._holdings.comes(session.tenant, nbytes)
            session.coming = nbytes

    def _came(self, session: Session) -> None:
        """Stop counting a message that has arrived: its arrays are counted as input."""
        self._holdings.comes(session.tenant, -session.coming)
        session.coming = 0

    def take(self, session: Session, message: protocol.ServiceMessage) -> None:
        """Handle a client's message; raise ServiceError if it is unknown or malformed: the caller drops the client."""
        action = client_handles.get(message.kind)
        if action is None:
            raise errors.ServiceError(f"{session.connection.peer} sent {message.kind!r:.40}, an unknown message")
        call = message.get("call", int)
        try:
            with self._lock:
                self._came(session)
                if message.refused is not None:
                    raise message.refused
                if self.failure:
                    raise errors.ServiceError(f"the process that owns the device does not start: {self.failure}")
                later = action(self, session, call, message)
            if later is not None:  # long work that needs no lock
                later()
        except errors.WarpwellError as error:
            session.answer(call, {"error": wire.error_fields(error)})

    @client_handles("submit")
    def _submit(self, session: Session, call: int, message: protocol.ServiceMessage) -> None:
        chosen = wire.options(message)
        listed = message.get("tasks", list)
        if not 1 <= len(listed) <= wire.MAX_TASKS:
            raise errors.ServiceError(f"a request has {len(listed)} launches: 1 to {wire.MAX_TASKS} are taken")
        lent = wire.check_lent(message.get("lent", list, []))
        if lent and not (session.own or self._trust):
            raise errors.ServiceError(
                "only processes of the service's user lend it memory of the GPU: a handle may name anybody's memory. "
                "Copy the arrays to the host, or to_device"
            )
        tasks = [wire.check_task(t, message.arrays, len(lent)) for t in listed]
        for task in tasks:
            self._authorize(session, task["kernel"])
        buffers = set().union(*[wire.used(task, "buffer") for task in tasks])
        self._ledger.check_buffers(session.number, buffers)
        self._admit(session, sum(a.nbytes for a in message.arrays))
        after = chosen.pop("after")
        waits = {number for number in after if self._ledger.find(session.number, number)}
        if session.tasks + len(tasks) > MAX_TASKS:
            raise errors.ServiceError(f"you may have {MAX_TASKS} tasks at the service: wait for some of them")
        session.tasks += len(tasks)
        pieces = [Piece(self._ledger.number(), task["kernel"]["name"]) for task in tasks]
        for task, piece in zip(tasks, pieces, strict=True):
            task["id"] = piece.number
        held = HeldRequest(session.number, session.tenant, pieces, tasks, chosen, message.arrays, buffers, lent, waits)
        self._ledger.add(held)
        session.answer(call, {"tasks": [piece.number for piece in pieces]})
        if any(number in session.badly for number in after):
            self._end(self._ledger.withdraw(held, why=BEFORE))
        self._pump()

    def _authorize(self, session: Session, named: dict[str, str]) -> None:
        if session.own or self._trust or references.allowed(named, self._allow):
            return
        may = f"those of {', '.join(self._allow)} may" if self._allow else "none may"
        above = [p for p in self._allow if named.get("module", "").startswith(p + ".")]
        if above:
            may += f" ({above[0]} is that module alone; --allow '{above[0]}.*' is for those below it)"
        raise errors.ServiceError(
            f"kernel {references.told(named)} may not be launched by other users than the service's: {may}. Kernels "
            "are code that runs as that user; ask for --allow"
        )

    def _admit(self, session: Session, nbytes: int) -> None:
        if self._named and session.tenant not in self._named:
            raise errors.QuotaError(not_named(session.tenant, self._named), name="tenant")
        self._holdings.admit(session.tenant, nbytes)

    @client_handles("cancel")
    def _cancel(self, session: Session, call: int, message: protocol.ServiceMessage) -> None:
        found = self._ledger.find(session.number, message.get("task", int))
        if found is None:
            session.answer(call, {"cancelled": False})
        elif not found[0].sent:
            self._end(self._ledger.withdraw(*found))
            session.answer(call, {"cancelled": True})
        else:
            number = found[1].number

            def note(reply: protocol.ServiceMessage | None) -> None:
                if reply is not None and reply.get("cancelled", bool, False):
                    self._ledger.cancelled(number)

            self._relay(session, call, {"type": "cancel", "task": number}, then=note, lost={"cancelled": False})

    @client_handles("state")
    def _state(self, session: Session, call: int, message: protocol.ServiceMessage) -> None:
        found = self._ledger.find(session.number, message.get("task", int))
        session.answer(call, {"state": "waiting" if found is None else found[1].state})

    @client_handles("put")
    def _put(self, session: Session, call: int, message: protocol.ServiceMessage) -> None:
        if len(message.arrays) != 1:
            raise errors.ServiceError("one array at a time is put on the device")
        nbytes = message.arrays[0].nbytes
        self._admit(session, nbytes)
        number = self._ledger.new_buffer(session.number, session.tenant, nbytes)

        def note(reply: protocol.ServiceMessage | None) -> None:
            if reply is None or "error" in reply.header:
                self._ledger.freed(number)

        header = {"type": "put", "buffer": number, "tenant": session.tenant}
        self._relay(session, call, header, message.arrays, then=note)

    @client_handles("get")
    def _get(self, session: Session, call: int, message: protocol.ServiceMessage) -> None:
        number = message.get("buffer", int)
        self._ledger.check_buffers(session.number, [number])
        nbytes = self._ledger.buffers[number].nbytes
        sent = self._holdings.promise(session.tenant, nbytes)  # if the owner dies meanwhile, the next one has no such
        self._relay(session, call, {"type": "get", "buffer": number}, sent=sent)

    @client_handles("free")
    def _free(self, session: Session, call: int, message: protocol.ServiceMessage) -> None:
        number = message.get("buffer", int)
        if self._ledger.free_buffer(session.number, number):
            self._owner.send({"type": "free", "buffer": number, "line": session.line})
        session.answer(call, {})

    @client_handles("metrics")
    def _tell_metrics(self, session: Session, call: int, message: protocol.ServiceMessage) -> None:
        self._answer_text(session, call, self.render(None if session.own else session.tenant))

    def _answer_text(self, session: Session, call: int, text: str) -> None:
        content = np.frombuffer(text.encode(), np.uint8)
        with self._lock:
            sent = self._holdings.promise(session.tenant, content.nbytes)
        session.answer(call, {}, [content], sent)

    @client_handles("log")
    def _tell_log(self, session: Session, call: int, message: protocol.ServiceMessage) -> Callable[[], None]:
        log = Log()
        log.about, log.dropped = dict(self.about), self._events.dropped
        events = self._events.events

        def write() -> None:
            for event in events:
                if session.own or event.tenant == session.tenant:
                    log.add(event)
            text = io.StringIO()
            log.write(text)
            self._answer_text(session, call, text.getvalue())

        return write

    @client_handles("status")
    def _tell_status(self, session: Session, call: int, message: protocol.ServiceMessage) -> None:
        session.answer(call, self.status())

    def status(self) -> dict[str, Any]:
        """Return the service's policy, device and counters, as plain data."""
        process = self._owner.process
        with self._lock:
            return {
                **self.about,
                "owner_pid": None if process is None else process.pid,
                "owner_restarts": max(0, self._owner.starts - 1),
                "clients": len(self.sessions),
                "requests": sum(not h.left for h in self._ledger.requests),
                "uptime": time.monotonic() - self._began,
                "held_bytes": self._ledger.held.total(),
            }

    def render(self, tenant: str | None = None) -> str:
        """Return metrics in Prometheus' text format: of all tenants, or of one."""
        with self._lock:
            now = self.status()
            self._metrics.service(restarts=now["owner_restarts"], clients=now["clients"], held=now["held_bytes"])
            return self._metrics.render(tenant)

    # the owner; called in its thread

    def _pump(self) -> None:
        """Send the owner the requests that it may have now."""
        if self._fault is not None or not self._owner.connected:
            return
        for held in self._ledger.sendable():
            self._alone_since = None
            line = self.sessions[held.client].line
            header = {
                **held.options,
                "type": "submit",
                "tenant": held.tenant,
                "tasks": held.tasks,
                "lent": held.lent,
                "line": line,
            }
            self._owner.send(header, held.arrays)

    def _relay(
        self,
        session: Session,
        call: int,
        header: dict[str, Any],
        arrays: Sequence[NDArray[Any]] = (),
        *,
        then: Answered | None = None,
        lost: dict[str, Any] | None = None,
        sent: Callable[[], None] | None = None,
    ) -> None:
        """Ask the owner, call `then`, and answer as it did; if it died before, by `lost`, or an error."""

        def done(reply: protocol.ServiceMessage | None) -> None:
            if then is not None:
                then(reply)
            if reply is None:
                session.answer(call, {"error": _AWAY} if lost is None else lost, (), sent)
            else:
                session.answer(call, reply.header, reply.arrays, sent)

        if not self._owner.connected:
            done(None)
            return
        number = next(self._call_numbers)
        self._calls[number] = done
        self._owner.send({**header, "line": session.line, "call": number}, arrays)

    def _owner_said(self, message: protocol.ServiceMessage) -> None:
        with self._lock:
            self._record(message.get("events", list, []))
            handler = owner_handles.get(message.kind)  # of "events" there is no more to be done
            if handler is not None:
                handler(self, message)

    @owner_handles("hello")
    def _ready(self, message: protocol.ServiceMessage) -> None:
        self.about = message.get("about", dict)
        self._append({"about": self.about})
        self._clock_offset = time.monotonic() - self._began - float(message.get("now", (int, float)))
        self._settled.set()
        self._pump()

    @owner_handles("taking")
    def _takes(self, message: protocol.ServiceMessage) -> None:
        self._ledger.taking(message.get("task", int))

    @owner_handles("taken")
    def _has_taken(self, message: protocol.ServiceMessage) -> None:
        for number in message.get("tasks", list):
            self._ledger.taken(number)

    @owner_handles("beat")
    def _beats(self, message: protocol.ServiceMessage) -> None:
        if self._alone_since is not None and time.monotonic() - self._alone_since > ALONE:
            self._ledger.acquit()
            self._pump()

    @owner_handles("reply")
    def _replied(self, message: protocol.ServiceMessage) -> None:
        done = self._calls.pop(message.get("call", int), None)
        if done is not None:
            done(message)

    @owner_handles("freed")
    def _freed(self, message: protocol.ServiceMessage) -> None:
        self._ledger.freed(message.get("buffer", int))
        self._holdings.changed()

    def _record(self, events: list[dict[str, Any]]) -> None:
        for fields in events:
            event = Event(**fields)
            if event.kind in STATES:
                self._ledger.moved(event.task, STATES[event.kind])
                alone = self._ledger.alone
                if self._alone_since is None and alone is not None and alone.launched:
                    self._alone_since = time.monotonic()
            self._note(replace(event, time=event.time + self._clock_offset))

    @owner_handles("fault")
    def _faults(self, message: protocol.ServiceMessage) -> None:
        self._fault = (message.get("task", (int, type(None)), None), message.get("message", str))

    @owner_handles("ended")
    def _ended(self, message: protocol.ServiceMessage) -> None:
        number = message.get("task", int)
        found = self._ledger.ended(number)
        header = {k: v for k, v in message.header.items() if k in ("error", "changed", "cancelled", "open")}
        gone = self._ledger.release(number, badly="error" in header or "cancelled" in header)
        self._pump()  # before anything else: the owner may have nothing to do meanwhile
        if found is not None:
            session = self.sessions[found[0].client]
            if message.header.get("open"):
                self._open[number] = session
            if message.arrays:
                places = message.get("changed", list)
                self._tell(session, found[1], header, *self._holdings.results(found[0], places, message.arrays))
            else:
                self._tell(session, found[1], header)
        self._end(gone)
        self._holdings.changed()

    @owner_handles("closed")
    def _closed(self, message: protocol.ServiceMessage) -> None:
        self._tell_closed(message.get("tasks", list))

    def _tell_closed(self, numbers: Sequence[int]) -> None:
        """Tell clients that their tasks' lent memory is open in no owner any more."""
        for number in numbers:
            session = self._open.pop(number, None)
            if session is not None:
                session.outbox.put({"type": "closed", "task": number})

    def _tell(
        self,
        session: Session,
        piece: Piece,
        header: dict[str, Any],
        arrays: Arrays = (),
        sent: Callable[[], None] | None = None,
    ) -> None:
        session.ended(piece.number, badly="error" in header or "cancelled" in header)
        session.outbox.put({**header, "type": "ended", "task": piece.number}, arrays, sent)

    def _end(self, gone: Sequence[Gone]) -> None:
        """Tell of tasks that end without the owner; their clients, too, where they are still there."""
        for one in gone:
            kind = "lost" if one.error is not None else "cancel"
            self._note(Event(self._now(), kind, one.piece.number, one.piece.name, one.held.tenant, one.why))
            session = self.sessions.get(one.held.client)
            if session is not None:
                told = {"cancelled": True} if one.error is None else {"error": wire.error_fields(one.error)}
                self._tell(session, one.piece, told)

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _note(self, event: Event) -> None:
        self._events.add(event)
        self._metrics.observe(event)
        self._append(event.plain())

    def _append(self, line: dict[str, Any]) -> None:
        """Append a line to the log's file."""
        if self._file is not None:
            text = (json.dumps(line, sort_keys=True) + "\n").encode()
            try:
                written = self._file.write(text) or 0
                if written < len(text):  # the next line must not be joined to a part of this one
                    self._file.truncate(self._file.tell() - written)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:  # a full disk is no reason to stop the tasks
                self.unlogged = error.strerror or str(error)

    def _owner_died(self, reason: str, last: bool) -> None:
        with self._lock:
            guilty, text = self._fault or (None, reason)
            self._fault = None
            calls, self._calls = self._calls, {}
            for done in calls.values():
                done(None)
            there = [(h, p) for h in self._ledger.requests for p in h.pieces if p.launched]
            gone = self._ledger.owner_died(guilty, text)
            self._tell_closed(list(self._open))
            lost_ones = {g.piece.number for g in gone}
            for held, piece in there:
                if piece.number not in lost_ones:
                    self._note(
                        Event(
                            self._now(),
                            "stop",
                            piece.number,
                            piece.name,
                            held.tenant,
                            {"rule": "owner died", "reason": text, "done": 0},
                        )
                    )
            self._end(gone)
            self._holdings.changed()
            if last:
                self.failure = reason
                self._settled.set()
                for session in self.sessions.values():
                    session.refuse(f"the process that owns the device does not start any more: {reason}")


def not_named(tenant: str, named: Iterable[str]) -> str:
    """Return the message for a tenant without a setting, if others have one."""
    return (
        f"tenant {tenant!r} has no setting in this service: connect(tenant=...) as one of "
        f"{', '.join(sorted(named))}, or ask for it in --tenants"
    )
