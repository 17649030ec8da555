"""The owner: the one process of a service that touches the device.

``python -m warpwell.scheduler.service.owner DESCRIPTOR`` runs it.

It imports the kernels that clients name, runs a `Scheduler`, and tells the service what becomes of each task. It is
made to die: when the device fails, or a kernel is stuck, it says so and ends at once, and the service starts another
one. It also ends when the service does.

Four threads besides the scheduler's: the first one receives messages of the service; the reporter tells events and ends
in the order in which they happened; the third one sends a sign of life each second and watches imports; the last one
closes memory that clients lent, which may wait for all that runs on the device. Messages of clients may take long
(importing a new file, compiling a kernel): each line of clients has a thread that takes them in order.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ...targets import Launch, at_address, default_device, to_device, to_host
from ...turns import device_name
from ..events import Event, Log
from ..handle import Handle
from ..predict.learner import Learner
from ..scheduler import Scheduler
from ..task import Request
from . import protocol, references, wire
from .ipc import Borrowed

BEAT = 1.0
"""Seconds between two signs of life."""

FAULT = 70
"""Exit status of an owner that ends because of its device."""

SAVING = 30.0
"""Seconds between two savings of the learner's history."""

LOADING = 120.0
"""Seconds that importing a file of kernels may take."""

LINES = 32
"""Lines of clients whose threads are kept while they have nothing to do: tenants, and with them lines, have no end."""

Answer = tuple[dict[str, Any], list[NDArray[Any]]]
"""Header and arrays of an answer."""

handles = protocol.Handlers()

_EVENTS = 200


class _EventQueue(Log):
    """A log that keeps nothing, and hands each event on."""

    def __init__(self, to: queue.SimpleQueue[Any]) -> None:
        super().__init__()
        self._to = to

    def add(self, event: Event) -> None:
        self._to.put(event)


class _RequestArrays:
    """A request here: its arrays, and what of them the service has seen."""

    def __init__(
        self, tasks: Sequence[dict[str, Any]], arrays: list[NDArray[Any]], readonly: set[int], memory: Borrowed
    ) -> None:
        self.seen = arrays
        self._memory = memory
        self.borrowed: list[bytes] = []  # handles of the client's memory that is open for it
        self.left = len(tasks)  # that have not ended
        # of what came nothing may change: it is what results are compared with
        self.arrays = [a if k in readonly else a.copy() for k, a in enumerate(arrays)]
        for place in readonly & set(range(len(arrays))):
            arrays[place].flags.writeable = False  # as for the client: nothing that a kernel writes may stay there
        self.places = {task["id"]: sorted(wire.used(task, "array") - readonly) for task in tasks}

    def borrow(self, device: str, lent: dict[str, Any]) -> Any:
        """Return an array in a client's own memory, until its last task has ended.

        Raise ArgumentError if the memory cannot be opened, or the array is not all in it.
        """
        handle = bytes.fromhex(lent["handle"])
        address, nbytes = self._memory.open(handle)
        self.borrowed.append(handle)
        if lent["offset"] + wire.lent_bytes(lent) > nbytes:
            raise errors.ArgumentError(
                f"an array of {wire.lent_bytes(lent)} bytes from byte {lent['offset']} on is not in memory of {nbytes} "
                "bytes that was lent",
                name="args",
            )
        return at_address(device, address + lent["offset"], tuple(lent["shape"]), np.dtype(lent["dtype"]))

    def close(self) -> None:
        """Close memory of the client; that may wait for all that runs on the device."""
        with contextlib.ExitStack() as stack:  # all of it, though some cannot be closed
            for handle in self.borrowed:
                stack.callback(self._memory.close, handle)

    def changes(self, number: int) -> tuple[list[int], list[NDArray[Any]]]:
        """Return which arrays of a task have changed since they were last sent, and copies of them."""
        places, copies = [], []
        for place in self.places[number]:
            now = self.arrays[place].copy()
            if not np.array_equal(_bytes(now), _bytes(self.seen[place])):
                self.seen[place] = now
                places.append(place)
                copies.append(now)
        return places, copies


def _bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)


class Owner:
    """The scheduler of a service, in the owner's process; it is sent its settings (see `Service`) first."""

    def __init__(self, connection: protocol.ServiceConnection, settings: protocol.ServiceMessage) -> None:
        self._connection = connection
        self._kernels = references.Kernels(Path(settings.get("spool", str)))
        self._events: queue.SimpleQueue[Event | Callable[[], None]] = queue.SimpleQueue()
        options: dict[str, Any] = {}
        stuck = settings.get("stuck", (int, float, type(None)), None)
        if stuck is not None:
            options["stuck_after"] = float(stuck)
        device = settings.get("device", (str, type(None))) or default_device()
        self._learner = Learner(saves=True)
        self._saving = threading.Lock()  # the process must not end while the history is being written
        self._scheduler = Scheduler(
            device,
            settings.get("policy", str),
            analyzer=self._learner,
            limit=settings.get("limit", (int, type(None))),
            tenants=settings.get("tenants", (dict, type(None))),
            log=_EventQueue(self._events),
            **options,
        )
        self._buffers: dict[int, Any] = {}
        self._borrowed = Borrowed()
        self._closing = ThreadPoolExecutor(1, "warpwell-closing")
        self._tasks: dict[int, tuple[Handle, _RequestArrays]] = {}
        self._loading: dict[int, tuple[float, int]] = {}
        self._lines: dict[str, tuple[ThreadPoolExecutor, Future[None]]] = {}
        self._fresh: deque[tuple[int, Handle]] = deque()
        self._told: list[dict[str, Any]] = []
        self._stuck: int | None = None

    def run(self) -> None:
        """Serve until the service says stop, or is gone."""
        for name, work in (("reporter", self._report), ("beat", self._beat)):
            threading.Thread(target=work, name=f"warpwell-{name}", daemon=True).start()
        device = self._scheduler.device
        gpu = device_name(0) if device == "cuda" else ""
        now, about = self._scheduler.inspect(
            lambda core: (
                core.executor.now(),
                {
                    "device": device,
                    "gpu": gpu,
                    "policy": core.policy.name,
                    "limit": core.limit,
                    "memory": core.executor.capacity.memory,
                    "processors": core.executor.capacity.processors,
                },
            )
        )
        try:
            protocol.hello(self._connection, about=about, now=now, pid=os.getpid())
        except errors.ServiceError as error:
            raise EOFError(str(error)) from error  # it was stopped while this process began
        while True:
            message = self._connection.receive()
            if message is None:
                continue  # nothing to do for a while
            if message.kind == "stop":
                return
            line = message.get("line", str, "")
            if not line:
                self._take(message)
                continue
            thread = self._line(line)
            self._lines[line] = thread, thread.submit(self._take, message)

    def _line(self, name: str) -> ThreadPoolExecutor:
        """Return the thread of a line."""
        if name not in self._lines:
            if len(self._lines) >= LINES:
                for idle in [its for its, (_, last) in self._lines.items() if last.done()]:
                    self._lines.pop(idle)[0].shutdown(wait=False)
            return ThreadPoolExecutor(1, f"warpwell-line-{name}")
        return self._lines[name][0]

    def _take(self, message: protocol.ServiceMessage) -> None:
        """Handle a message, and answer it if it is a call."""
        call = message.get("call", (int, type(None)), None)
        header: dict[str, Any] = {}
        arrays: list[NDArray[Any]] = []
        try:
            if message.kind not in handles:
                raise errors.ServiceError(f"the owner does not know {message.kind!r}")
            header, arrays = handles[message.kind](self, message) or (header, arrays)
        except BaseException as error:
            if call is None:
                traceback.print_exc()  # nobody waits for it
            header = {"error": self._error(error)}
        if call is not None:
            self._send({**header, "type": "reply", "call": call}, arrays)

    @handles("free")
    def _free(self, message: protocol.ServiceMessage) -> None:
        number = message.get("buffer", int)
        if self._buffers.pop(number, None) is None:
            self._send({"type": "freed", "buffer": number})  # it was not put there after all

    @handles("cancel")
    def _cancel(self, message: protocol.ServiceMessage) -> Answer:
        handle, _ = self._tasks.get(message.get("task", int), (None, None))
        return {"cancelled": bool(handle is not None and handle.cancel())}, []

    @handles("get")
    def _get(self, message: protocol.ServiceMessage) -> Answer:
        return {}, [np.array(to_host(self._buffer(message.get("buffer", int))))]

    @handles("put")
    def _put(self, message: protocol.ServiceMessage) -> Answer:
        number, tenant, values = message.get("buffer", int), message.get("tenant", str), message.arrays[0]
        nbytes = values.nbytes
        self._scheduler.inspect(lambda core: core.admission.reserve(tenant, nbytes))
        try:
            array = self._buffers[number] = to_device(self._scheduler.device, values)
        except BaseException as error:
            self._scheduler.inspect(lambda core: core.admission.release(tenant, nbytes))
            if not isinstance(error, MemoryError):
                raise
            raise errors.TaskMemoryError(f"{error}: free other arrays, or put less there") from None
        # when the last task that uses it has gone, too
        freed = functools.partial(self._freed, number, tenant, nbytes)
        weakref.finalize(array, self._events.put, freed).atexit = False
        return {"buffer": number}, []

    def _freed(self, number: int, tenant: str, nbytes: int) -> None:
        with contextlib.suppress(errors.WarpwellError):  # the scheduler has failed
            self._scheduler.inspect(lambda core: core.admission.release(tenant, nbytes))
        self._send({"type": "freed", "buffer": number})

    def _buffer(self, number: int) -> Any:
        if number not in self._buffers:
            raise errors.TaskLostError("the array on the device is gone: put it there again with to_device")
        return self._buffers[number]

    @handles("submit")
    def _submit(self, message: protocol.ServiceMessage) -> None:
        tasks = message.get("tasks", list)
        first = tasks[0]["id"]
        self._send({"type": "taking", "task": first})  # if this process dies of it, that is known
        request = _RequestArrays(tasks, message.arrays, set(message.get("readonly", list)), self._borrowed)
        try:
            launches = [self._launch(task) for task in tasks]
            lent = message.get("lent", list, [])
            theirs = [request.borrow(self._scheduler.device, one) for one in lent]
            chosen = {key: message.header[key] for key in ("priority", "deadline", "memory", "size", "tenant")}
            profile = wire.profile_of(message.header["profile"])
            ready = []
            for task, launch in zip(tasks, launches, strict=True):
                values = wire.unpack(task["arguments"], request.arrays, self._buffer, theirs)
                made = self._scheduler.task(launch, *values, profile=profile, **chosen)
                # what stays on the device is counted there already; what is lent, by nobody
                kept = sum(int(self._buffer(n).nbytes) for n in wire.used(task, "buffer"))
                kept += sum(wire.lent_bytes(lent[k]) for k in wire.used(task, "lent"))
                made.memory = max(0, made.memory - kept)
                made.there = max(0, made.there - kept)
                ready.append(made)
            name = message.get("name", str) or ready[0].name
            handles = self._scheduler.submit_request(Request(name, ready, first=first))
            for handle, task in zip(handles, tasks, strict=True):
                self._tasks[task["id"]] = (handle, request)
                handle.add_done_callback(functools.partial(self._done, task["id"]))
            self._fresh.append((first, handles[0]))
        except BaseException as error:
            failure = self._scheduler.failure
            if failure is not None:
                self._fault(self._stuck, str(failure))
            for task in tasks:
                self._events.put(functools.partial(self._ended, task["id"], request, error=self._error(error)))

    def _launch(self, task: dict[str, Any]) -> Launch:
        self._loading[threading.get_ident()] = time.monotonic(), task["id"]
        try:
            kernel = self._kernels.load(task["kernel"])
        finally:
            del self._loading[threading.get_ident()]
        shape = task["shape"]
        return kernel[tuple(shape) if len(shape) > 1 else shape[0]]

    # the reporter

    def _report(self) -> None:
        while True:
            items = [self._events.get()]
            while len(items) < _EVENTS and not self._events.empty():
                items.append(self._events.get())
            self._tell(items)

    def _tell(self, items: Sequence[Event | Callable[[], None]]) -> None:
        told = []
        for event in (e for e in items if isinstance(e, Event)):
            number = event.task if event.kind != "reject" else -1
            if event.kind == "lost":
                self._fault(self._stuck, str(event.why.get("error", "the device failed")))
            plain = {**event.plain(), "task": number}
            if "error" in event.why:
                plain["why"] = {**plain["why"], "error": self._kernels.told(str(event.why["error"]))}
            told.append(plain)
        self._told = told
        for item in items:
            if not isinstance(item, Event):
                item()
        if self._told:
            self._send_on({"type": "events"})

    def _send_on(self, header: dict[str, Any], arrays: Sequence[NDArray[Any]] = ()) -> None:
        """Send a message with the events that came before it, which saves them a message of their own."""
        told, self._told = self._told, []
        self._send({**header, "events": told} if told else header, arrays)

    def _error(self, error: BaseException) -> dict[str, Any]:
        """Return an error as plain data that names the files of clients."""
        fields = wire.error_fields(error)
        return {**fields, "message": self._kernels.told(fields["message"])}

    def _done(self, number: int, _: object) -> None:
        self._events.put(functools.partial(self._end, number))

    def _tell_taken(self) -> None:
        """Report requests that wait, once the scheduler has decided on them and lives: they ended nobody."""
        fresh = [self._fresh.popleft() for _ in range(len(self._fresh))]
        waiting = [n for n, handle in fresh if not handle.done() and (handle.job is None or handle.job.waits)]
        with contextlib.suppress(errors.WarpwellError):  # it has failed: the other threads tell it
            if waiting:
                self._scheduler.inspect(lambda _: None)
                # after what was launched meanwhile
                self._events.put(functools.partial(self._send_on, {"type": "taken", "tasks": waiting}))

    def _end(self, number: int) -> None:
        handle, request = self._tasks.pop(number)
        if handle.cancelled():
            self._ended(number, request, cancelled=True)
            return
        error = handle.exception()
        if isinstance(error, errors.TaskLostError):
            self._fault(self._stuck, str(error))
        elif isinstance(error, errors.StallError):
            # this process cannot stop its threads, or the GPU
            self._stuck = number
            self._fault(number, str(error), {"type": "ended", "task": number, "error": self._error(error)})
        elif error is not None:
            self._ended(number, request, error=self._error(error))
        else:
            places, copies = request.changes(number)
            self._ended(number, request, copies, changed=places)

    def _ended(self, number: int, request: _RequestArrays, arrays: Sequence[NDArray[Any]] = (), **about: Any) -> None:
        """Report the end of a task at once; what was borrowed for its request is closed after the last one."""
        self._send_on({**about, "type": "ended", "task": number, "open": bool(request.borrowed)}, arrays)
        request.left -= 1
        if request.borrowed and not request.left:
            self._closing.submit(self._close, request)

    def _close(self, request: _RequestArrays) -> None:
        try:
            request.close()
        finally:  # a client waits for it before it leaves
            self._send({"type": "closed", "tasks": list(request.places)})

    def _fault(self, task: int | None, why: str, then: dict[str, Any] | None = None) -> None:
        """Report a fault, so that nothing more is sent here, `then` something else, and end the process now."""
        self._send_on({"type": "fault", "task": task, "message": why[:4096]})
        if then is not None:
            self._send(then)
        os._exit(FAULT)

    def _send(self, header: dict[str, Any], arrays: Sequence[NDArray[Any]] = ()) -> None:
        try:
            self._connection.send(header, arrays)
        except errors.ServiceError:
            self.close()  # the service is gone

    def _beat(self) -> None:
        saving = time.monotonic() + SAVING
        while True:
            time.sleep(BEAT)
            loading, failure = min(list(self._loading.values()), default=None), self._scheduler.failure
            if failure is not None:
                self._fault(self._stuck, str(failure))
            if loading is not None and time.monotonic() - loading[0] > LOADING:
                self._fault(loading[1], f"importing its file of kernels took over {LOADING:g} s")
            self._send({"type": "beat"})
            self._events.put(self._tell_taken)
            if time.monotonic() >= saving:
                saving = time.monotonic() + SAVING
                self._save()

    def _save(self) -> None:
        with contextlib.suppress(Exception), self._saving:  # a full disk, or whatever it may be, is no reason to stop
            self._learner.save()

    def close(self) -> None:
        """End, without waiting for what runs. The service waits for it for two seconds."""
        self._connection.interrupt()
        self._save()
        os._exit(0)


def main(arguments: Sequence[str]) -> None:
    """Be an owner, over the socket with this descriptor."""
    # the service may be killed: nothing must hold the device after it
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    references.in_owner = True
    connection = protocol.ServiceConnection(
        socket.socket(fileno=int(arguments[0])), "the service", max_header=protocol.OWNER_HEADER
    )
    settings = connection.expect("settings")
    connection.max_body = settings.get("max_message", int)
    try:
        owner = Owner(connection, settings)
    except errors.WarpwellError as error:
        connection.send({"type": "refused", "message": str(error)})
        return
    try:
        owner.run()
    except EOFError:
        pass  # the service is gone
    owner.close()


if __name__ == "__main__":
    main(sys.argv[1:])
