"""The service's protocol: framing, references, what a service holds, and a service whose owner is a script."""

import contextlib
import errno
import hashlib
import importlib
import io
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.harness.until import HANG_SECONDS, until

import warpwell as ww
from warpwell import errors, gpu
from warpwell.cli import main
from warpwell.replacing import unfinished
from warpwell.scheduler.service import address, broker, ipc, protocol, references, wire
from warpwell.scheduler.service import client as client_module
from warpwell.scheduler.service import ledger as ledger_module
from warpwell.scheduler.service.client import Client, Packer, connect
from warpwell.scheduler.service.ledger import HeldRequest, Ledger, Piece
from warpwell.scheduler.service.owner_process import TRIES, SendQueue
from warpwell.scheduler.service.protocol import MAGIC, ServiceConnection
from warpwell.scheduler.service.service import MAX_CLIENTS, SILENT, Service
from warpwell.scheduler.task import Kind, Profile

Pair = tuple[ServiceConnection, ServiceConnection]


@contextlib.contextmanager
def pair(**options: Any) -> Iterator[Pair]:
    left, right = socket.socketpair()
    a, b = ServiceConnection(left, "left", **options), ServiceConnection(right, "right", **options)
    try:
        yield a, b
    finally:
        a.close()
        b.close()


def exchange(array: NDArray[Any]) -> NDArray[Any]:
    with pair() as (a, b):
        sender = threading.Thread(target=a.send, args=({"type": "x"}, [array]))
        sender.start()
        message = b.receive()
        sender.join()
        assert message is not None and message.kind == "x"
        (got,) = message.arrays
        return got


# framing


@settings(max_examples=40)
@given(
    dtype=st.sampled_from("|b1 |i1 <i2 <i4 <i8 |u1 <u2 <u4 <u8 <f2 <f4 <f8 <c8 <c16 >i4 >f8".split()),
    shape=st.lists(st.integers(0, 5), max_size=3),
    seed=st.integers(0, 1000),
)
def test_arrays_arrive_bit_for_bit(dtype: str, shape: list[int], seed: int) -> None:
    wanted = np.dtype(dtype)
    raw = np.random.default_rng(seed).integers(0, 2 if wanted.kind == "b" else 256, (*shape, wanted.itemsize), np.uint8)
    array = np.ascontiguousarray(raw).view(wanted).reshape(shape)
    got = exchange(array)
    assert got.shape == array.shape and got.dtype == wanted.newbyteorder("<") and got.flags.writeable
    assert got.tobytes() == array.astype(wanted.newbyteorder("<")).tobytes()


def test_views_and_large_arrays_arrive() -> None:
    base = np.arange(3_000_000, dtype=np.int64).reshape(1000, 3000)
    assert np.array_equal(exchange(base), base)
    assert np.array_equal(exchange(base[::7, 1::3]), base[::7, 1::3])
    assert np.array_equal(exchange(base.T), base.T)


@pytest.mark.parametrize(
    "array",
    [np.array([object()]), np.array(["text"]), np.zeros(2, "i4,f8"), np.zeros(1, "M8[s]"), np.zeros(1, np.longdouble)],
)
def test_what_is_no_plain_number_does_not_travel(array: NDArray[Any]) -> None:
    with pair() as (a, _), pytest.raises(errors.DTypeError, match="does not travel"):
        a.send({"type": "x"}, [array])


def raw(header: bytes, body: bytes = b"", *, announced: tuple[int, int] | None = None, magic: bytes = MAGIC) -> bytes:
    sizes = announced or (len(header), len(body))
    return struct.pack("<4sIQ", magic, *sizes) + header + body


def layout(*arrays: Any) -> bytes:
    return json.dumps({"type": "x", "arrays": list(arrays)}).encode()


BAD: dict[str, tuple[bytes, str]] = {
    "another protocol": (b"GET / HTTP/1.1\r\n\r\n", "does not speak this protocol"),
    "header too large": (raw(b"", announced=(1 << 30, 0)), "at most"),
    "body too large": (raw(b"{}", announced=(2, 1 << 40)), "at most"),
    "body of 2**64 - 1": (raw(b"{}", announced=(2, (1 << 64) - 1)), "at most"),
    "no JSON": (raw(b"\xff\xfe{"), "not JSON"),
    "deep JSON": (raw(b"[" * 100_000), "not JSON"),
    "no object": (raw(b"[1]"), "not an object with a type"),
    "no type": (raw(b'{"version": 1}'), "not an object with a type"),
    "pickle": (raw(b"\x80\x04\x95"), "not JSON"),
    "body without arrays": (raw(layout(), b"12345678"), "does not fit"),
    "array without body": (raw(layout(["<i8", [1]])), "does not fit"),
    "more body than arrays": (raw(layout(["<i8", [1]]), b"1" * 9), "does not fit"),
    "objects": (raw(layout(["|O", [1]]), b"12345678"), "does not fit"),
    "text": (raw(layout(["<U2", [1]]), b"12345678"), "does not fit"),
    "void": (raw(layout(["|V8", [1]]), b"12345678"), "does not fit"),
    "a dtype that is a list": (raw(layout([[["a", "<i8"]], [1]]), b"12345678"), "does not fit"),
    "negative": (raw(layout(["<i8", [-1, -1]]), b"12345678"), "does not fit"),
    "overflow": (raw(layout(["<i8", [1 << 40, 1 << 40]]), b"12345678"), "does not fit"),
    "float": (raw(layout(["<i8", [1.0]]), b"12345678"), "does not fit"),
    "true": (raw(layout(["<i8", [True]]), b"12345678"), "does not fit"),
    "33 dimensions": (raw(layout(["<i8", [1] * 33]), b"12345678"), "does not fit"),
    "too many arrays": (raw(layout(*[["<i8", [0]]] * 1025)), "does not fit"),
    "arrays is a number": (raw(b'{"type": "x", "arrays": 7}'), "does not fit"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_message_is_refused(name: str) -> None:
    data, told = BAD[name]
    with pair(max_body=1 << 20, patience=5.0) as (a, b):
        a._socket.sendall(data)
        with pytest.raises(errors.ServiceError, match=told):
            b.receive()


@pytest.mark.timing
def test_a_message_that_stops_is_given_up() -> None:
    with pair(patience=0.2) as (a, b):
        assert b.receive() is None  # nothing began
        a._socket.sendall(raw(b'{"type": "x"}', announced=(100, 0)))
        began = time.monotonic()
        with pytest.raises(errors.ServiceError, match="stopped in the middle of a message"):
            b.receive()
        assert time.monotonic() - began < 5
    with pair() as (a, b):
        a._socket.sendall(b"WWSM")
        a.close()
        with pytest.raises(errors.ServiceError, match="closed the connection in the middle"):
            b.receive()
    with pair() as (a, b):
        a.close()
        with pytest.raises(EOFError):
            b.receive()


def test_memory_is_not_taken_for_what_is_only_announced() -> None:
    import resource

    with pair(max_body=1 << 40, patience=0.2) as (a, b):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        header = layout(["|u1", [1 << 31]])
        a._socket.sendall(raw(header, b"x" * 1000, announced=(len(header), 1 << 31)))
        with pytest.raises(errors.ServiceError, match="stopped in the middle"):
            b.receive()
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB, of 2 GiB announced


def test_a_peer_that_takes_nothing_is_given_up() -> None:
    with pair(patience=0.2) as (a, _):
        with pytest.raises(errors.ServiceError, match=r"has received nothing for 0\.2 s"):
            a.send({"type": "x"}, [np.zeros(1 << 24)])
        with pytest.raises(errors.ServiceError, match="has gone"):
            a.send({"type": "x"})


def test_a_small_message_is_sent_in_one_piece() -> None:
    """A peer that waits for it wakes once."""
    sizes: list[int] = []
    with pair() as (a, b):
        send = a._socket.sendall
        a._socket = types.SimpleNamespace(  # type: ignore[assignment]
            sendall=lambda data: (sizes.append(len(data)), send(data)),
            shutdown=a._socket.shutdown,
            close=a._socket.close,
        )
        a.send({"type": "x"}, [np.arange(5), np.arange(3.0)])
        message = b.receive()
        assert message is not None and [x.tolist() for x in message.arrays] == [[0, 1, 2, 3, 4], [0.0, 1.0, 2.0]]
    assert len(sizes) == 1


def test_too_much_is_not_sent() -> None:
    with pair(max_body=1000) as (a, b):
        with pytest.raises(errors.MessageSizeError, match="--max-message"):
            a.send({"type": "x"}, [np.zeros(1000)])
        with pytest.raises(errors.MessageSizeError, match="too large"):
            a.send({"type": "x", "text": "x" * (1 << 21)})
        a.send({"type": "y"})  # nothing of the others is on its way
        message = b.receive()
        assert message is not None and message.kind == "y"


class Interrupted:
    """A socket in whose sending Ctrl-C comes, once the beginning of a message is out."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def sendall(self, data: bytes) -> None:
        self._sock.sendall(data[: len(data) // 2])
        raise KeyboardInterrupt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


def test_after_half_a_message_nothing_more_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair() as (a, b):
        monkeypatch.setattr(a, "_socket", Interrupted(a._socket))
        with pytest.raises(KeyboardInterrupt):
            a.send({"type": "x"}, [np.zeros(100)])
        with pytest.raises(errors.ServiceError, match="has gone"):
            a.send({"type": "y"})
        with pytest.raises(errors.ServiceError, match="closed the connection in the middle"):
            b.receive()


# references and launches


@ww.kernel
def double(x: Any) -> None:
    x[gpu.grid(1)] *= 2


@ww.kernel
def waits(x: Any) -> None:
    x[gpu.grid(1)] = 0


@ww.kernel
def kills(x: Any) -> None:
    x[gpu.grid(1)] = 0


@ww.kernel
def aborts(x: Any) -> None:
    x[gpu.grid(1)] = 0


@ww.kernel
def stays(x: Any) -> None:
    x[gpu.grid(1)] = 0


@ww.kernel
def sticks(x: Any) -> None:
    x[gpu.grid(1)] = 0


@ww.kernel
def fails(x: Any) -> None:
    x[gpu.grid(1)] = 0


alias = double


def test_kernels_are_found_by_name_or_refused() -> None:
    named = references.reference(double)
    assert named["name"] == "double"
    assert named["sha256"] == hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    assert references.check(json.loads(json.dumps(named))) == named

    @ww.kernel
    def inner(x: Any) -> None:
        x[0] = 1

    with pytest.raises(errors.ArgumentError, match="top level"):
        references.reference(inner)
    for wrong in (double[3], print, None):
        with pytest.raises(errors.ArgumentError):
            references.reference(wrong)


@pytest.mark.parametrize(
    "named",
    [
        {"module": "os", "name": "system()", "sha256": ""},
        {"module": "os;x", "name": "a", "sha256": ""},
        {"module": "..evil", "name": "a", "sha256": ""},
        {"module": "a", "name": "a.b", "sha256": ""},
        {"path": "relative.py", "name": "a", "sha256": "0" * 64},
        {"path": "/a.py", "name": "a", "sha256": ""},
        {"path": "/a\0.py", "name": "a", "sha256": "0" * 64},
        {"path": "/a.py", "name": "a", "sha256": "0" * 63},
        {"path": "/" + 4096 * "a", "name": "a", "sha256": "0" * 64},
        {"module": "a", "name": 201 * "a", "sha256": ""},
        {"name": "a", "sha256": ""},
        {"module": 3, "name": "a", "sha256": ""},
        {"module": "a", "sha256": ""},
    ],
)
def test_references_that_are_none(named: dict[str, Any]) -> None:
    with pytest.raises(errors.ServiceError):
        references.check(named)


def test_who_may_launch_what() -> None:
    named = {"module": "lab.sched.workloads.dense", "name": "gemm"}
    assert references.allowed(named, ["lab.sched.workloads.dense"])
    assert references.allowed(named, ["lab.sched.*"]) and references.allowed(named, ["x", "lab.*"])
    assert not references.allowed(named, ["lab.sched.workloads", "lab.sched.work", "dense"])
    assert not references.allowed(named, ["lab.sched.work.*", "lab.sched.workloads.dense.*"])
    assert not references.allowed({"path": "/warpwell.py", "name": "gemm"}, ["warpwell.*", "/warpwell.py"])
    main = {"module": "ourlab.kernels.__main__", "name": "x"}  # importing it runs a program
    assert not references.allowed(main, ["ourlab.kernels", "ourlab.kernels.*", "ourlab.*"])
    assert references.allowed(main, ["ourlab.kernels.__main__"])
    assert references.checked_patterns(["a.b", "a.b.*"]) == ("a.b", "a.b.*")


@pytest.mark.parametrize("pattern", ["", "*", ".*", "a.*.b", "a*", "a/b", "a.py.*x"])
def test_patterns_that_name_no_module(pattern: str) -> None:
    with pytest.raises(errors.ArgumentError, match="names no module"):
        references.checked_patterns(["fine", pattern])


def test_what_a_module_imports_is_not_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "__init__.py").write_text("")
    (tmp_path / "theirs" / "private.py").write_text("import warpwell as ww\n@ww.kernel\ndef k(x):\n    x[0] = 1\n")
    (tmp_path / "theirs" / "public.py").write_text("from .private import k\n")
    monkeypatch.syspath_prepend(tmp_path)
    kernels = references.Kernels(tmp_path)
    try:
        assert kernels.load({"module": "theirs.private", "name": "k", "sha256": ""}) is not None
        with pytest.raises(errors.SchedulerError, match="is not a kernel"):
            kernels.load({"module": "theirs.public", "name": "k", "sha256": ""})
    finally:
        for name in ("theirs", "theirs.private", "theirs.public"):
            sys.modules.pop(name, None)


def test_files_of_kernels(tmp_path: Path) -> None:
    spool, path = tmp_path / "spool", tmp_path / "mine.py"
    spool.mkdir()
    path.write_text("import warpwell as ww\nruns = []\n@ww.kernel\ndef k(x):\n    x[0] = 1\nnone = 3\n")
    named = {"path": str(path), "name": "k", "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    kernels = references.Kernels(spool)
    kernel = kernels.load(named)
    assert kernel is kernels.load(named) and kernel.function.__name__ == "k"
    import inspect

    path.write_text("raise SystemExit(3)\n")  # what was hashed is what ran, and what the compiler will read
    assert kernels.load(named) is kernel and "x[0] = 1" in inspect.getsource(kernel.function)
    with pytest.raises(errors.SchedulerError, match="has changed"):
        references.Kernels(spool).load(named)
    with pytest.raises(errors.SchedulerError, match="is not a kernel"):
        kernels.load({**named, "name": "none"})
    with pytest.raises(errors.SchedulerError, match=r"SystemExit: 3.*__main__"):
        kernels.load({**named, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()})
    with pytest.raises(errors.SchedulerError, match="cannot read"):
        kernels.load({**named, "path": str(tmp_path / "absent.py")})
    with pytest.raises(errors.SchedulerError, match="could not import no_such_module"):
        kernels.load({"module": "no_such_module", "name": "k", "sha256": ""})
    with pytest.raises(errors.SchedulerError, match="another one for the service"):
        kernels.load({"module": "warpwell.scheduler.service.wire", "name": "k", "sha256": "0" * 64})


def test_a_file_that_was_edited_is_not_what_the_program_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, text = tmp_path / "edited_kernels.py", "import warpwell as ww\n@ww.kernel\ndef k(x):\n    x[0] = 1\n"
    path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    edited = importlib.import_module("edited_kernels")
    try:
        path.write_text(text + "# edited\n")
        with pytest.raises(errors.ArgumentError, match=r"imported kernel 'k'.*importlib\.reload"):
            references.reference(edited.k)
        importlib.reload(edited)
        named = references.reference(edited.k)
        os.utime(path, (1, 1))  # written again, as it was
        assert references.reference(edited.k) == named
    finally:
        del sys.modules["edited_kernels"]


def test_modules_are_hashed_when_they_are_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package_of_kernels"
    package.mkdir()
    (package / "__init__.py").touch()
    text = "import warpwell as ww\n@ww.kernel\ndef k(x):\n    x[0] = 1\n"
    (package / "other.py").write_text(text)
    (package / "first.py").write_text("from . import other\n" + text)
    monkeypatch.syspath_prepend(tmp_path)
    kernels = references.Kernels(tmp_path)
    named = {"module": "package_of_kernels.other", "name": "k"}
    try:
        kernels.load({"module": "package_of_kernels.first", "name": "k", "sha256": ""})
        (package / "other.py").write_text(text + "# changed\n")
        with pytest.raises(errors.SchedulerError, match="another one for the service"):
            kernels.load({**named, "sha256": hashlib.sha256((package / "other.py").read_bytes()).hexdigest()})
        assert kernels.load({**named, "sha256": hashlib.sha256(text.encode()).hexdigest()})
    finally:
        for name in [m for m in sys.modules if m.startswith("package_of_kernels")]:
            del sys.modules[name]


def test_two_who_want_the_same_kernels_import_them_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slowly").mkdir()
    (tmp_path / "slowly" / "__init__.py").write_text("")
    text = "import time, warpwell as ww\ntime.sleep(0.3)\n@ww.kernel\ndef k(x):\n    x[0] = 1\n"
    (tmp_path / "slowly" / "mod.py").write_text(text)
    (tmp_path / "file.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    kernels, found = references.Kernels(tmp_path), []
    file = {"path": str(tmp_path / "file.py"), "name": "k", "sha256": hashlib.sha256(text.encode()).hexdigest()}
    named = [{"module": "slowly.mod", "name": "k", "sha256": ""}, file]
    try:
        threads = [threading.Thread(target=lambda n=n: found.append(kernels.load(n))) for n in named * 3]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG_SECONDS)
        assert len(found) == 6 and len({id(k) for k in found}) == 2
    finally:
        for name in [n for n in sys.modules if n.startswith(("slowly", "warpwell_kernels_"))]:
            del sys.modules[name]


def test_arguments_that_do_not_travel() -> None:
    a = np.zeros(8)
    read_only = np.arange(8.0)
    read_only.flags.writeable = False
    for wrong in ("text", [1], None, 1 << 64, 1j, {}, np.ma.array([1.0, 2.0], mask=[0, 1])):
        with pytest.raises(errors.ArgumentError, match="does not travel"):
            Packer().launch(double[8], [wrong])
    query = type("Query", (), {"__repr__": lambda _: pytest.fail("what may take long was printed")})()
    with pytest.raises(errors.ArgumentError, match="is a Query, which does not travel"):
        Packer().launch(double[8], [query])
    with pytest.raises(errors.ArgumentError, match="overlap"):
        Packer().launch(double[8], [a[:5], a[3:]])
    graph = type("CUDAGraph", (), {"__module__": "torch.cuda.graphs"})()
    for work in (lambda stream: None, graph):
        with pytest.raises(errors.ArgumentError, match="is a function or a graph, and a service runs kernels alone"):
            Packer().launch(work, [])
    Packer().launch(double[8], [*a.reshape(4, 2).T])  # columns of a matrix lie between each other
    packer = Packer()
    task = packer.launch(double[8], [a, a, read_only, read_only[2:], np.float32(0.1), 3, True, 0.5, -1])
    assert len(packer.arrays) == 4 and [t is a for t in packer.targets] == [True, False, False, False]
    checked = wire.check_task(task, packer.arrays)
    got = wire.unpack(checked["arguments"], packer.arrays, lambda n: None)
    assert got[0] is got[1] and got[4].dtype == np.float32 and got[5:] == [3, True, 0.5, -1]


@pytest.mark.parametrize(
    "change",
    [
        {"shape": []},
        {"shape": [0]},
        {"shape": [1, 1, 1, 1]},
        {"shape": [1 << 41]},
        {"shape": [True]},
        {"shape": "8"},
        {"arguments": [["array", 1]]},
        {"arguments": [["array", -1]]},
        {"arguments": [["array", True]]},
        {"arguments": [["scalar", 0]]},
        {"arguments": [["int", 1 << 63]]},
        {"arguments": [["int", 0.5]]},
        {"arguments": [["pickle", "gA=="]]},
        {"arguments": [["float", "nan"]]},
        {"arguments": [7]},
        {"arguments": [["int", 0]] * 257},
        {"kernel": "os:system"},
        {"kernel": {}},
    ],
)
def test_launches_that_are_none(change: dict[str, Any]) -> None:
    good = {"shape": [8], "arguments": [["array", 0]], "kernel": {"module": "m", "name": "k", "sha256": ""}}
    assert wire.check_task(good, [np.zeros(8)])["shape"] == [8]
    with pytest.raises(errors.ServiceError):
        wire.check_task({**good, **change}, [np.zeros(8)])


def test_profiles_travel() -> None:
    profile = Profile(Kind.MEMORY, seconds=0.5, miss_rate=0.25, resident=7)
    assert wire.profile_of(json.loads(json.dumps(wire.profile_fields(profile)))) == profile
    assert wire.profile_of(wire.profile_fields(None)) is None
    for wrong in ({"kind": "neither"}, {"seconds": -1.0}, {"miss_rate": 2}, {"unknown": 1}):
        with pytest.raises(errors.ServiceError, match="the profile of a request is not valid"):
            wire.profile_of(wrong)


def test_errors_come_back_as_what_they_were() -> None:
    sent = errors.IndexRangeError("index 9", array="a", index=9, size=3)
    got = wire.error_of(json.loads(json.dumps(wire.error_fields(sent))))
    assert type(got) is errors.IndexRangeError and vars(got) == vars(sent) and str(got) == "index 9"
    got = wire.error_of(wire.error_fields(ZeroDivisionError("by zero")))
    assert type(got) is errors.SchedulerError and str(got) == "ZeroDivisionError: by zero"
    for name in ("SystemExit", "os", "__all__", "annotations", "errno"):  # a name is looked up among errors alone
        assert type(wire.error_of({"class": name, "message": "m"})) is errors.SchedulerError
    attributes = {"__class__": "x", "args": "y", "task": "t"}
    odd = wire.error_of({"class": "TaskLostError", "message": "m", "attributes": attributes})
    assert vars(odd) == {"task": "t"} and odd.args == ("m",)


# what is held, and what becomes of it


def held(ledger: Ledger, client: int = 1, tasks: int = 1, **options: Any) -> HeldRequest:
    pieces = [Piece(ledger.number(), f"k{k}") for k in range(tasks)]
    request = HeldRequest(client, "t", pieces, [], {}, [np.zeros(4)], **options)
    ledger.add(request)
    return request


def test_requests_are_sent_once_and_forgotten_at_their_end() -> None:
    ledger = Ledger()
    one, two = held(ledger), held(ledger, tasks=2)
    assert ledger.sendable() == [one, two] and ledger.sendable() == []
    assert ledger.ended(one.pieces[0].number) == (one, one.pieces[0])
    assert ledger.ended(one.pieces[0].number) is None
    assert ledger.ended(two.pieces[0].number) is not None and list(ledger.requests) == [two]
    assert ledger.held.total() == ledger.held["t"] == 32 and ledger.held["other"] == 0
    assert ledger.ended(two.pieces[1].number) is not None and not ledger.requests


def launch(ledger: Ledger, *requests: HeldRequest) -> None:
    for request in requests:
        ledger.moved(request.pieces[0].number, "running")


def test_suspects_run_again_alone_and_the_one_that_did_it_is_given_up() -> None:
    ledger = Ledger()
    good, other, bad, waiting = (held(ledger) for _ in range(4))
    ledger.sendable()
    launch(ledger, good, other, bad)
    assert ledger.owner_died(None, "r") == []
    assert ledger.sendable() == [bad] and ledger.sendable() == []  # the last one that came is tried first
    launch(ledger, bad)
    gone = ledger.owner_died(None, "killed")
    assert [g.held for g in gone] == [bad] and isinstance(gone[0].error, errors.TaskLostError)
    assert "because of task 'k0': killed" in str(gone[0].error)
    assert ledger.sendable() == [good, other, waiting]  # what happened is known: nobody else is a suspect


def test_each_suspect_runs_to_its_end_before_the_next_one() -> None:
    ledger = Ledger()
    first, second, waiting = held(ledger), held(ledger), held(ledger)
    ledger.sendable()
    launch(ledger, second, first)
    ledger.owner_died(None, "r")
    for one in (second, first):
        assert ledger.sendable() == [one] and ledger.sendable() == []
        ledger.ended(one.pieces[0].number)
    assert ledger.sendable() == [waiting]


def test_a_suspect_that_lives_long_holds_nobody_up() -> None:
    ledger = Ledger()
    other, long, waiting = held(ledger), held(ledger), held(ledger)
    ledger.sendable()
    launch(ledger, other, long)
    ledger.owner_died(None, "r")
    assert ledger.sendable() == [long] and ledger.sendable() == []
    launch(ledger, long)
    ledger.acquit()
    assert ledger.sendable() == [other] and ledger.sendable() == []
    launch(ledger, other)
    assert ledger.owner_died(None, "r") == []  # two were there: nobody is given up for it yet
    assert ledger.sendable() == [other]
    launch(ledger, other)
    ledger.acquit()
    assert ledger.sendable() == [long]
    launch(ledger, long)
    ledger.acquit()
    assert ledger.sendable() == []  # the second time it is alone to its end
    ledger.drop(1)
    assert ledger.sendable() == [] and waiting not in ledger.requests


def test_a_known_culprit_is_given_up_at_once_and_the_others_are_no_suspects() -> None:
    ledger = Ledger()
    good, bad = held(ledger), held(ledger)
    ledger.sendable()
    launch(ledger, good, bad)
    number = bad.pieces[0].number
    assert [g.held for g in ledger.owner_died(number, "stuck")] == [bad]
    later = held(ledger)
    assert ledger.sendable() == [good, later]
    launch(ledger, good)
    # one that has been told already leaves no suspects either
    assert ledger.owner_died(number, "stuck") == [] and ledger.sendable() == [good, later]


def test_what_left_the_device_is_no_suspect() -> None:
    ledger = Ledger()
    preempted, running = held(ledger), held(ledger)
    ledger.sendable()
    launch(ledger, preempted, running)
    ledger.moved(preempted.pieces[0].number, "preempted")
    ledger.owner_died(None, "r")
    assert ledger.sendable() == [running]


def test_what_was_being_taken_in_is_a_suspect_and_what_waits_is_none() -> None:
    ledger = Ledger()
    good, waiting, bad = held(ledger), held(ledger), held(ledger)
    ledger.sendable()
    launch(ledger, good)
    for request in (waiting, bad):
        ledger.taking(request.pieces[0].number)
    ledger.taken(waiting.pieces[0].number)
    assert ledger.owner_died(None, "r") == [] and ledger.sendable() == [bad]
    ledger.taking(bad.pieces[0].number)
    assert [g.held for g in ledger.owner_died(None, "r")] == [bad]
    assert ledger.sendable() == [good, waiting]


def test_what_comes_after_others_is_sent_when_they_have_succeeded() -> None:
    ledger = Ledger()
    first, other = held(ledger), held(ledger)
    both = held(ledger, waits={first.pieces[0].number, other.pieces[0].number})
    last = held(ledger, waits={both.pieces[0].number})
    assert ledger.sendable() == [first, other]
    for one in (first, other):
        assert ledger.sendable() == []
        assert ledger.ended(one.pieces[0].number) is not None
        assert ledger.release(one.pieces[0].number, badly=False) == []
    assert ledger.sendable() == [both]
    launch(ledger, both)
    ledger.owner_died(None, "r")
    assert ledger.sendable() == [both]  # and not `last`, which is no suspect
    assert ledger.ended(both.pieces[0].number) is not None
    gone = ledger.release(both.pieces[0].number, badly=True)
    assert [(g.held, g.why["rule"]) for g in gone] == [(last, "a task before it did not succeed")]
    assert not ledger.requests and ledger.sendable() == []


def test_what_comes_after_what_is_given_up_goes_with_it() -> None:
    """However long the chain is."""
    ledger = Ledger()
    chain = [held(ledger)]
    for _ in range(5000):
        chain.append(held(ledger, waits={chain[-1].pieces[0].number}))
    assert ledger.sendable() == chain[:1]
    gone = ledger.owner_died(chain[0].pieces[0].number, "stuck")
    assert [g.held for g in gone] == chain and [g.error is None for g in gone] == [False] + [True] * 5000
    assert not ledger.requests and not ledger._followers


def test_what_was_cancelled_does_not_run_again() -> None:
    ledger = Ledger()
    request, alone = held(ledger, tasks=3), held(ledger)
    ledger.sendable()
    for piece in (request.pieces[1], alone.pieces[0]):
        ledger.cancelled(piece.number)
    gone = ledger.owner_died(None, "r")
    assert [(g.held, g.piece.name, g.error) for g in gone] == [
        (request, "k1", None),
        (request, "k2", None),
        (alone, "k0", None),
    ]
    assert list(ledger.requests) == [request] and ledger.sendable() == [request]
    assert ledger.ended(request.pieces[0].number) is not None and not ledger.requests


def test_what_may_have_changed_memory_of_its_client_does_not_run_again() -> None:
    ledger = Ledger()
    begun, sent = held(ledger, lent=[{}]), held(ledger, lent=[{}])
    unsent = held(ledger, lent=[{}], waits={sent.pieces[0].number})
    assert ledger.sendable() == [begun, sent]
    ledger.taking(begun.pieces[0].number)
    ledger.taken(begun.pieces[0].number)
    gone = ledger.owner_died(None, "r")
    assert [g.held for g in gone] == [begun] and "may have changed memory" in str(gone[0].error)
    assert list(ledger.requests) == [sent, unsent] and ledger.sendable() == [sent]


def test_a_request_is_taken_back_from_a_task_on() -> None:
    ledger = Ledger()
    request = held(ledger, tasks=3)
    numbers = [p.number for p in request.pieces]
    assert [g.piece.number for g in ledger.withdraw(request, request.pieces[1])] == numbers[1:]
    assert ledger.sendable() == [request] and ledger.find(1, numbers[1]) is None and ledger.find(2, numbers[0]) is None
    assert ledger.ended(numbers[0]) is not None and not ledger.requests


@pytest.mark.timing
def test_the_death_of_an_owner_with_many_requests_is_noted_at_once() -> None:
    """Looks into lists of suspects would take 20 s here."""
    ledger = Ledger()
    for _ in range(30_000):
        held(ledger)
    ledger.sendable()
    began = time.monotonic()
    assert ledger.owner_died(None, "r") == []
    for _ in range(100):
        first = ledger.sendable()[0]
        ledger.ended(first.pieces[0].number)
    assert time.monotonic() - began < 2


def test_nobody_runs_again_for_ever() -> None:
    """Two that end their owner only together, or after a while, are given up, one after the other."""
    ledger = Ledger()
    one, two = held(ledger), held(ledger)
    lost: list[HeldRequest] = []
    for _ in range(6):
        for _ in range(3):
            launch(ledger, *ledger.sendable())
            ledger.acquit()  # whoever is alone lives that long
        lost += [g.held for g in ledger.owner_died(None, "r")]
    assert lost == [two, one] and not ledger.requests


@pytest.mark.parametrize("seed", range(100))
def test_innocent_tasks_survive_whatever_ends_the_owner(seed: int) -> None:
    """Requests in random orders, some of which end their owner when they are taken in, or some time after."""
    chance, ledger = np.random.default_rng(seed), Ledger()
    share = chance.random() / 3
    killers: set[HeldRequest] = set()
    requests: list[HeldRequest] = []
    ended: dict[HeldRequest, None] = {}
    lost: set[HeldRequest] = set()
    cancelled: set[HeldRequest] = set()
    here: list[HeldRequest] = []  # at the owner
    deaths = 0

    def note(gone: list[Any]) -> None:
        for one in gone:
            (cancelled if one.error is None else lost).add(one.held)

    for _ in range(5000):
        if len(requests) < 25 and chance.random() < 0.2:
            before = [r for r in requests if r in ledger.requests and chance.random() < 0.05]
            requests.append(held(ledger, waits={r.pieces[0].number for r in before}))
            if chance.random() < share:
                killers.add(requests[-1])
        elif len(requests) == 25 and not ledger.requests:
            break
        here += ledger.sendable()
        if not here:
            continue
        one = here[chance.integers(min(3, len(here)))]
        number = one.pieces[0].number
        waiting, dies = not (one.taking or one.launched), one in killers and chance.random() < 0.3
        if waiting:
            ledger.taking(number)
        elif not one.launched and chance.random() < 0.5:
            ledger.moved(number, "running")
        elif one.launched and ledger.alone is one and chance.random() < 0.5:
            ledger.acquit()
        elif one.launched and one not in killers and chance.random() < 0.5:
            assert ledger.ended(number) is not None and one not in ended
            assert all(p not in {r.pieces[0].number for r in requests if r not in ended} for p in one.waits)
            ended[one] = None
            here.remove(one)
            note(ledger.release(number, badly=False))
        if dies:
            deaths += 1
            here = []
            note(ledger.owner_died(None, "killed"))
    assert not ledger.requests, "something waits"
    assert lost == killers - cancelled and not cancelled & {r for r in requests if not r.waits}
    assert set(requests) == lost | cancelled | set(ended) and deaths <= 4 * len(killers)


def test_a_request_runs_again_as_a_whole_and_is_told_once() -> None:
    ledger = Ledger()
    request = held(ledger, tasks=2)
    ledger.sendable()
    first, second = (p.number for p in request.pieces)
    assert ledger.ended(first) is not None
    ledger.owner_died(None, "r")
    assert ledger.sendable() == [request]
    assert ledger.ended(first) is None
    assert ledger.ended(second) is not None and not ledger.requests


def test_arrays_on_the_device_die_with_their_owner() -> None:
    ledger = Ledger()
    mine, other = ledger.new_buffer(1, "t", 100), ledger.new_buffer(2, "u", 50)
    ledger.check_buffers(1, [mine])
    for number in (other, 99):
        with pytest.raises(errors.ArgumentError):
            ledger.check_buffers(1, [number])
    assert not ledger.free_buffer(1, other)
    used, plain = held(ledger, buffers={mine}), held(ledger)
    assert ledger.held["t"] == 100 + 64 and ledger.held.total() == 150 + 64
    ledger.sendable()
    gone = ledger.owner_died(None, "r")
    assert [g.held for g in gone] == [used] and "to_device" in str(gone[0].error)
    assert list(ledger.requests) == [plain]
    with pytest.raises(errors.TaskLostError):
        ledger.check_buffers(1, [mine])
    with pytest.raises(errors.ArgumentError):
        ledger.check_buffers(2, [mine])
    assert ledger.held.total() == 32


def test_what_is_on_its_way_out_counts_until_it_is_gone() -> None:
    ledger = Ledger()
    one, two = held(ledger, tasks=2), held(ledger)
    buffers = [ledger.new_buffer(1, "t", n) for n in (100, 1000)]
    ledger.sendable()
    assert ledger.free_buffer(1, buffers[0]) and not ledger.free_buffer(1, buffers[0])
    with pytest.raises(errors.ArgumentError, match="it was freed"):
        ledger.check_buffers(1, [buffers[0]])
    assert ledger.held["t"] == 1164 and ledger.leaves("t") and not ledger.leaves("u")
    ledger.drop(1)  # who connects again has it still
    assert ledger.held["t"] == 1164
    for number, left in ((one.pieces[0].number, 1164), (two.pieces[0].number, 1132), (one.pieces[1].number, 1100)):
        ledger.ended(number)
        assert ledger.held["t"] == left
    ledger.freed(buffers[0])
    ledger.freed(99)
    assert ledger.leaves("t")
    assert ledger.held["t"] == 1000
    ledger.owner_died(None, "r")
    assert ledger.held["t"] == 0


def test_a_client_that_has_gone_leaves_nothing() -> None:
    ledger = Ledger()
    sent = held(ledger, client=1, tasks=2)
    ledger.sendable()
    unsent = held(ledger, client=1)
    stays = held(ledger, client=2)
    ledger.new_buffer(1, "t", 10)
    pieces, arrays, gone = ledger.drop(1)
    assert arrays == list(ledger.buffers) and pieces == sent.pieces and [g.held for g in gone] == [unsent]
    assert list(ledger.requests) == [sent, stays] and all(b.leaves for b in ledger.buffers.values())
    assert ledger.ended(sent.pieces[0].number) is None  # what it does not tell any more, the next death does
    left = sent.pieces[1:]
    assert [g.piece for g in ledger.owner_died(None, "r")] == left and ledger.owner_died(None, "r") == []
    assert list(ledger.requests) == [stays] and not ledger.buffers and ledger.held["t"] == stays.nbytes


# a service whose owner is a script

OWNER = """
import os, socket, sys, time
from warpwell.scheduler.service import protocol
c = protocol.ServiceConnection(socket.socket(fileno=int(sys.argv[-1])), "the service", max_header=protocol.OWNER_HEADER,
                        patience=0.3)
settings = c.expect("settings")
if settings.header["policy"] == "bad":
    c.send({"type": "refused", "message": "there is no policy 'bad': choose another"}); sys.exit()
if settings.header["policy"] == "dies":
    os._exit(9)
protocol.hello(c, about={"policy": settings.header["policy"], "device": "script"}, now=0.0)
waiting, buffers = {}, {}
def end(n, **f): c.send({"type": "ended", "task": n, **f})
while True:
    try: m = c.receive()
    except EOFError: break
    c.send({"type": "beat"})
    if m is None: continue
    h = m.header
    if m.kind == "stop": break
    if m.kind == "submit":
        for t in h["tasks"]:
            n, name = t["id"], t["kernel"]["name"]
            c.send({"type": "taking", "task": n})
            if name == "aborts": os._exit(9)
            c.send({"type": "taken", "tasks": [n]})
            c.send({"type": "events", "events": [dict(time=1.0, kind=k, task=n, name=name, tenant=h["tenant"], why={})
                                                 for k in ("arrive", "launch")]})
            if name == "double":
                for a in m.arrays: a *= 2
                c.send({"type": "ended", "task": n, "changed": list(range(len(m.arrays)))}, m.arrays)
            elif name == "fails":
                end(n, error={"class": "IndexRangeError", "message": "index 9", "attributes": {"index": 9}})
            elif name == "kills": os._exit(9)
            elif name == "sticks":
                c.send({"type": "fault", "task": n, "message": "it was stuck"}); os._exit(70)
            else: waiting[n] = name
    elif m.kind == "free":
        buffers.pop(h["buffer"], None)
        c.send({"type": "freed", "buffer": h["buffer"]})
    else:
        out, arrays = {}, []
        if m.kind == "put": buffers[h["buffer"]] = m.arrays[0]; out = {"buffer": h["buffer"]}
        if m.kind == "get": arrays = [buffers[h["buffer"]]]
        if m.kind == "cancel":
            name = waiting.pop(h["task"], "")
            out = {"cancelled": name != ""}
            if name and name != "stays": end(h["task"], cancelled=True)
        if h.get("call") is not None: c.send({**out, "type": "reply", "call": h["call"]}, arrays)
os._exit(0)
"""

Made = Callable[..., Service]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Made]:
    """Make services that end with the test; where they leave an owner or a thread behind, the test fails."""
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    made: list[Service] = []
    before = set(threading.enumerate())

    def start(**options: Any) -> Service:
        path = options.pop("path", tmp_path / "run" / "s.sock")
        service = Service(
            path,
            command=(sys.executable, "-P", str(script)),
            silence=20.0,
            **{"policy": "p", "patience": 5.0, **options},
        )
        made.append(service)
        return service.start(60.0)

    yield start
    for service in made:
        service.close()
        process = service.broker._owner.process
        assert process is None or process.poll() is not None
    assert not any(service.path.is_socket() for service in made)
    until = time.monotonic() + 10
    while time.monotonic() < until and set(threading.enumerate()) - before:
        time.sleep(0.02)
    assert not set(threading.enumerate()) - before


def pid_of(client: Client) -> int:
    return int(client.status()["owner_pid"])


def test_results_come_into_the_callers_arrays(make: Made) -> None:
    service = make()
    mode = service.path.stat().st_mode
    assert mode & 0o777 == 0o600 and service.path.parent.stat().st_mode & 0o777 == 0o700
    with connect(service.path) as client:
        assert client.tenant == "default" and client.about["device"] == "script"
        x, y, keep = np.arange(8), np.arange(4.0)[::2], np.arange(3)
        keep.flags.writeable = False
        handle = client.submit(double[8], x, y, keep)
        assert handle.result(HANG_SECONDS) is None and handle.done() and handle.state.value == "done"
        assert x.tolist() == [0, 2, 4, 6, 8, 10, 12, 14] and y.tolist() == [0, 4] and keep.tolist() == [0, 1, 2]
        with pytest.raises(errors.IndexRangeError, match="index 9") as caught:
            client.submit(fails[8], x).result(HANG_SECONDS)
        assert caught.value.index == 9
        device = client.to_device(np.arange(3))
        assert device.numpy().tolist() == [0, 1, 2]
        device.free()
        with pytest.raises(errors.ArgumentError, match="it was freed"):
            device.numpy()
        assert 'warpwell_launches_total{policy="p",tenant="default"} 2' in client.metrics()
        assert [e.kind for e in client.log()] == ["arrive", "launch"] * 2


def test_cancelling_and_order(make: Made) -> None:
    service = make()
    x = np.zeros(8)
    with connect(service.path) as client:
        waiting = client.submit(waits[8], x)
        until(waiting.running)
        with pytest.raises(FutureTimeout):
            waiting.result(0.05)
        assert waiting.cancel()
        with pytest.raises(CancelledError):
            waiting.result(HANG_SECONDS)
        failed = client.submit(fails[8], x)
        assert failed.exception(HANG_SECONDS) is not None
        for before in (waiting, [waiting], failed):  # what comes after those is cancelled
            with pytest.raises(CancelledError):
                client.submit(double[8], x, after=before).result(HANG_SECONDS)
        for odd in (failed, "handle", 3):
            with connect(service.path) as other, pytest.raises((errors.ArgumentError, TypeError)):
                other.submit(double[8], x, after=odd)  # type: ignore[arg-type]


def test_what_comes_after_a_task_waits_at_the_service(make: Made) -> None:
    x = np.zeros(8)
    with connect(make().path) as client:
        first = client.submit(waits[8], x)
        second = client.submit(double[8], x, after=first)
        third = client.submit(double[8], x, after=[second])
        free = client.submit(double[8], x)
        late = client.submit(double[8], x, after=[free])
        assert late.result(HANG_SECONDS) is None and not second.done()
        assert second.state.value == "waiting"
        assert first.cancel()
        for one in (second, third):
            with pytest.raises(CancelledError):
                one.result(HANG_SECONDS)
        assert [e.task for e in client.log() if e.kind == "launch"] == [1, 4, 5]
        rules = [e.why.get("rule") for e in client.log() if e.kind == "cancel"]
        assert rules == ["a task before it did not succeed"] * 2
        assert client.status()["requests"] == 0


def test_messages_after_the_end_are_dropped_and_told() -> None:
    with pair(patience=0.2) as (a, _):
        told: list[str] = []
        queue = SendQueue(a, "queue")
        queue.put({"type": "x"}, [np.zeros(1 << 24)], lambda: told.append("stuck"))
        queue.put({"type": "x"}, (), lambda: told.append("behind"))
        queue.close(20.0)
        queue.put({"type": "x"}, (), lambda: told.append("late"))
        assert told == ["stuck", "behind", "late"]


def test_a_queue_without_a_thread_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at its first message, which would be lost."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pair() as (a, _), monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(errors.ServiceError, match=r"left cannot be answered: can't start new thread"):
            SendQueue(a, "queue")


def test_a_socket_that_is_not_open_to_this_user_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Closed(socket.socket):
        def connect(self, _: Any) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(client_module.socket, "socket", Closed)
    with pytest.raises(errors.ServiceError, match="it, or its folder, is for its user alone, or for a group that"):
        connect(tmp_path / "s.sock")


def test_a_child_of_a_client_does_not_keep_its_connection(make: Made) -> None:
    service = make()
    code = """
import os, sys, time, warnings
from warpwell.scheduler.service.client import connect
client = connect(sys.argv[1])
warnings.simplefilter("ignore")
child = os.fork()
if child == 0:
    time.sleep(100)
    os._exit(0)
print(child, flush=True)
time.sleep(100)
"""
    command = [sys.executable, "-c", code, str(service.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        child = int(program.stdout.readline())
        try:
            assert len(service.broker.sessions) == 1
            program.kill()
            until(lambda: not service.broker.sessions)
            os.kill(child, 0)  # it lives
        finally:
            os.kill(child, signal.SIGKILL)


def test_the_status_of_a_service_needs_no_turns(
    make: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WARPWELL_TURNS", "/proc/nothing")
    service = make()
    assert main(["sched", "status", "--socket", str(service.path)]) == 0
    told = capsys.readouterr()
    assert str(service.path) in told.out.replace("\n", "") and "the variable WARPWELL_TURNS" in told.err
    assert main(["sched", "status", "--socket", str(service.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["turns"] == [] and "WARPWELL_TURNS" in found["turns_unknown"]
    monkeypatch.setenv("WARPWELL_SOCKET", str(tmp_path / "nobody.sock"))
    assert main(["sched", "status"]) == 2
    assert "WARPWELL_TURNS, and no scheduler service listens" in capsys.readouterr().err


def test_a_handle_of_a_service_is_no_use_to_a_forked_child(make: Made) -> None:
    with connect(make().path) as client:
        waiting = client.submit(waits[8], np.zeros(8))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads: it is what is tested
            child = os.fork()
        if child == 0:
            code = 1
            signal.alarm(10)
            try:
                waiting.result(HANG_SECONDS)
            except errors.ForkError:
                client._lock.acquire()  # as a thread of the parent may have had it
                client.close()  # as the end of a `with` block does
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert client.submit(double[8], np.ones(8)).result(HANG_SECONDS) is None  # the connection lives
        with pytest.raises(errors.ArgumentError, match="timeout"):
            waiting.result(float("nan"))
        with pytest.raises(errors.ArgumentError, match="give handles"):
            client.submit(double[8], np.ones(8), after=3)  # type: ignore[arg-type]
        assert waiting.cancel()


def test_what_is_in_flight_when_the_owner_dies(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker, "ALONE", 0.1)
    service = make()
    x, y = np.arange(4), np.arange(4)
    with connect(service.path) as client, connect(service.path, tenant="other") as other:
        device = client.to_device(np.arange(3))
        innocent, uses = client.submit(waits[4], x), client.submit(waits[4], device)
        first = pid_of(client)
        killer = other.submit(kills[4], y)
        with pytest.raises(errors.TaskLostError, match=r"'kills'.*exited with status 9"):
            killer.result(HANG_SECONDS)  # it ran twice, the second time alone
        with pytest.raises(errors.TaskLostError, match="needs arrays on the device"):
            uses.result(HANG_SECONDS)
        with pytest.raises(errors.TaskLostError, match="to_device"):
            device.numpy()
        until(lambda: innocent.state.value == "running")
        assert client.submit(double[4], y).result(HANG_SECONDS) is None and y.tolist() == [0, 2, 4, 6]
        assert client.status()["owner_restarts"] >= 2 and pid_of(client) != first
        stuck = client.submit(sticks[4], x)
        with pytest.raises(errors.TaskLostError, match="it was stuck"):
            stuck.result(HANG_SECONDS)
        until(lambda: innocent.state.value == "running")
        kinds = [(e.kind, e.name) for e in client.log()]
        assert ("lost", "kills") in kinds and ("lost", "sticks") in kinds and ("stop", "waits") in kinds
        assert innocent.cancel()


def test_a_client_that_is_killed_takes_its_tasks_with_it(make: Made, tmp_path: Path) -> None:
    service = make()
    script = tmp_path / "client.py"
    script.write_text(f"""
import sys, time
import numpy as np, warpwell as ww
from warpwell.scheduler.service.client import connect
@ww.kernel
def waits(x):
    x[0] = 1
if __name__ == "__main__":
    client = connect({str(service.path)!r})
    client.to_device(np.zeros(1000))
    client.submit(waits[1], np.zeros(1000))
    print("submitted", flush=True)
    time.sleep(100)
""")
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"submitted\n"
        with connect(service.path) as client:
            assert client.status()["requests"] == 1 and client.status()["held_bytes"] == 16000
            process.kill()
            until(lambda: client.status()["requests"] == 0 and client.status()["held_bytes"] == 0)
            assert client.submit(double[1], np.zeros(1)).result(HANG_SECONDS) is None


def talk(service: Service, *messages: bytes) -> str:
    """Send bytes as a client would; return why the service refuses them."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(os.fspath(service.path))
        connection = ServiceConnection(sock.dup(), "the service", patience=20.0)
        try:
            for message in messages:
                sock.sendall(message)
            while True:
                got = connection.receive()
                assert got is not None
                if got.kind == "refused":
                    return str(got.header["message"])
        finally:
            connection.close()


HELLO = raw(json.dumps({"type": "hello", "version": protocol.VERSION}).encode())


@pytest.mark.timing
def test_clients_that_say_the_wrong_thing_are_refused_and_others_served(make: Made) -> None:
    service = make(max_message=1 << 20, patience=0.5)
    with connect(service.path) as client:
        x = np.arange(4)
        newer = raw(json.dumps({"type": "hello", "version": protocol.VERSION + 1, "whatever": [1]}).encode())
        assert "your program speaks version 3" in talk(service, newer)
        assert "'version' of a message is missing" in talk(service, raw(b'{"type": "hello"}'))
        assert "where 'hello' was due" in talk(service, raw(b'{"type": "submit"}'))
        assert "at most 1048576 + 1048576 are taken" in talk(service, HELLO, raw(b"{}", announced=(2, 1 << 30)))
        assert "does not speak this protocol" in talk(service, b"\0" * 64)
        assert "an unknown message" in talk(service, HELLO, raw(b'{"type": "shutdown"}'))
        assert "'call' of a message is missing" in talk(service, HELLO, raw(b'{"type": "status"}'))
        assert "stopped in the middle" in talk(service, HELLO, raw(b"{}", announced=(100, 0)))
        assert "did not send 'hello' within 0.5 s" in talk(service)
        assert client.submit(double[4], x).result(HANG_SECONDS) is None and x.tolist() == [0, 2, 4, 6]
        with pytest.raises(errors.ServiceError, match="--max-message"):
            client.submit(double[4], np.zeros(1 << 20))
        assert client.submit(double[4], x).result(HANG_SECONDS) is None  # that one was never sent


def test_a_tenant_may_hold_so_much_and_no_more(make: Made) -> None:
    service = make(max_held=10_000)
    with connect(service.path, tenant="a") as one, connect(service.path, tenant="a") as two:
        handle = one.submit(waits[1], np.zeros(1000))
        for client in (one, two):
            with pytest.raises(errors.QuotaError, match="tenant 'a' has 8000 bytes"):
                client.submit(waits[1], np.zeros(1000))
            with pytest.raises(errors.QuotaError):
                client.to_device(np.zeros(1000))
        with connect(service.path, tenant="b") as other:
            assert other.submit(double[1], np.zeros(1000)).result(HANG_SECONDS) is None
        assert handle.cancel()
        until(lambda: one.status()["held_bytes"] == 0)
        one.to_device(np.zeros(1000))
        with pytest.raises(errors.ArgumentError, match="for tenant 'a'"):
            one.submit(double[1], np.zeros(1), tenant="b")


def test_answers_that_nobody_reads_count_and_others_wait_for_them(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "ROOM", 0.3)
    size = 4_000_000  # more than sockets hold
    service = make(max_held=3 * size)
    connection = ServiceConnection(raw_socket(service), "the service", patience=20.0)
    protocol.hello(connection, tenant="a")
    connection.expect("hello")
    connection.send({"type": "put", "call": 0}, [np.zeros(size, np.uint8)])
    reply = connection.receive()
    assert reply is not None
    with connect(service.path, tenant="b") as other:
        for call in range(1, 30):
            connection.send({"type": "get", "call": call, "buffer": reply.header["buffer"]})
        until(lambda: other.status()["held_bytes"] == 3 * size)
        time.sleep(0.5)
        assert other.status()["held_bytes"] == 3 * size  # the array, and two answers
        assert other.submit(double[4], np.zeros(4)).result(HANG_SECONDS) is None
        with connect(service.path, tenant="a") as again, pytest.raises(errors.QuotaError, match="tenant 'a' has"):
            again.to_device(np.zeros(10))
        errors_, got = 0, 0
        for _ in range(29):
            message = connection.receive()
            assert message is not None
            got += bool(message.arrays)
            errors_ += "error" in message.header
        assert got >= 2 and got + errors_ == 29
        until(lambda: other.status()["held_bytes"] == size)
        connection.close()
        until(lambda: other.status()["held_bytes"] == 0)


def test_results_that_nobody_reads_are_kept_once_for_each_array(make: Made) -> None:
    service = make()
    n, x = 40, np.zeros(1_000_000, np.uint8)
    connection = ServiceConnection(raw_socket(service), "the service", patience=20.0)
    protocol.hello(connection, tenant="a")
    connection.expect("hello")
    task = {"kernel": references.reference(double), "shape": [4], "arguments": [["array", 0]]}
    for k in range(2):
        connection.send({"type": "submit", "call": k, "tasks": [task] * n}, [x + 1])
    with connect(service.path, tenant="b") as other:
        until(lambda: other.status()["requests"] == 0)
        assert 0 < other.status()["held_bytes"] <= 2 * x.nbytes
        ended = 0
        while ended < 2 * n:
            message = connection.receive()
            assert message is not None
            ended += message.kind == "ended"
        until(lambda: other.status()["held_bytes"] == 0)
    connection.close()


def test_who_connects_again_has_what_was_not_given_back(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "ROOM", 0.2)
    service = make(max_held=10_000)
    with connect(service.path, tenant="b") as other:
        with connect(service.path, tenant="a") as one:
            handle = one.submit(stays[1], np.zeros(1000))  # the owner does not say that it has ended
            until(lambda: handle.state.value == "running")
            one.close(cancel=True)
        until(lambda: other.status()["requests"] == 0)
        assert other.status()["held_bytes"] == 8000
        with connect(service.path, tenant="a") as again:
            with pytest.raises(errors.QuotaError, match="tenant 'a' has 8000 bytes"):
                again.submit(double[1], np.zeros(1000))
            os.kill(pid_of(again), signal.SIGKILL)
            until(lambda: other.status()["held_bytes"] == 0)
            until(lambda: again.status()["owner_pid"] is not None and service.broker._owner.connected)
            assert again.submit(double[1], np.zeros(1000)).result(HANG_SECONDS) is None


def test_messages_count_while_they_come(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "ROOM", 0.2)
    service = make(max_held=1 << 20)
    header = json.dumps({"type": "ping", "arrays": [["|u1", [1 << 20]]]}).encode()
    with raw_socket(service) as sock, connect(service.path, tenant="b") as other:
        sock.sendall(raw(json.dumps({"type": "hello", "version": protocol.VERSION, "tenant": "a"}).encode()))
        sock.sendall(raw(header, b"x" * 1000, announced=(len(header), 1 << 20)))
        until(lambda: other.status()["held_bytes"] == 1 << 20)
        with connect(service.path, tenant="a") as again:
            for _ in range(2):  # what is refused is read and dropped, and the connection goes on
                with pytest.raises(errors.QuotaError, match="tenant 'a' has 1048576 bytes"):
                    again.to_device(np.zeros(1000))
            sock.sendall(b"x" * ((1 << 20) - 1000))
            until(lambda: other.status()["held_bytes"] == 0)  # it has all come, and was answered
            assert again.submit(double[4], np.zeros(4)).exception(HANG_SECONDS) is None
        sock.sendall(raw(header, b"x" * 1000, announced=(len(header), 1 << 20)))
        until(lambda: other.status()["held_bytes"] == 1 << 20)
        sock.close()
        until(lambda: other.status()["held_bytes"] == 0)


@pytest.mark.parametrize("rounds", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_nothing_is_held_for_those_who_have_gone(make: Made, monkeypatch: pytest.MonkeyPatch, rounds: int) -> None:
    """Whatever clients and owners do in which order: in the end nobody has anything."""
    monkeypatch.setattr(ledger_module, "ROOM", 0.05)
    monkeypatch.setattr(broker, "ALONE", 0.05)
    service = make(max_held=600_000)

    def client(number: int) -> None:
        chance = np.random.default_rng((rounds, number))
        for _ in range(rounds):
            there: list[Any] = []
            handles: list[Any] = []
            with contextlib.suppress(errors.WarpwellError), connect(service.path, tenant="ab"[number % 2]) as mine:

                def some() -> NDArray[Any]:
                    return np.zeros(int(chance.integers(1, 30_000)))

                acts: list[Callable[[], Any]] = [
                    lambda: there.append(mine.to_device(some())),
                    lambda: there.pop().free(),
                    lambda: there[-1].numpy(),
                    lambda: handles.append(mine.submit(waits[4], some())),
                    lambda: handles.append(mine.submit(double[4], there[-1])),
                    lambda: handles.pop().cancel(),
                    lambda: mine.submit_many([(double[4], some())] * 3)[-1].result(HANG_SECONDS),
                    lambda: mine.log(),
                    lambda: mine.submit(kills[4], some()) if rounds > 1 and chance.random() < 0.1 else None,
                ]
                for _ in range(12):
                    with contextlib.suppress(errors.WarpwellError, CancelledError, IndexError, FutureTimeout):
                        acts[chance.integers(len(acts))]()
                mine.close(cancel=True)

    threads = [threading.Thread(target=client, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
        assert not thread.is_alive()
    until(lambda: service.broker.status()["held_bytes"] == 0 == service.broker.status()["requests"])
    assert not any(service.broker._holdings._unread.values())
    ledger = service.broker._ledger
    assert not any([*ledger.held.values(), ledger._pieces, ledger._followers, ledger._ready, ledger._suspects])
    assert not ledger.buffers


def raw_socket(service: Service) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(os.fspath(service.path))
    return sock


def pretend(monkeypatch: pytest.MonkeyPatch, uid: int) -> None:
    """Make the next clients processes of another user, as far as the service can tell."""
    monkeypatch.setattr(protocol, "credentials", lambda sock: (1, uid))


def test_other_users_do_not_get_in(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    service = make()
    pretend(monkeypatch, os.getuid() + 1)
    with pytest.raises(errors.ServiceError, match=f"for user {os.getuid()} alone, and you are user {os.getuid() + 1}"):
        connect(service.path)


def test_users_of_a_group_are_tenants_with_kernels_that_were_allowed(
    make: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = os.getuid() + 1
    service = make(
        group=str(os.getgid()), users={foreign: "guest"}, allow=["warpwell.scheduler"], tenants={"guest": 1, "mine": 1}
    )
    assert service.path.stat().st_mode & 0o777 == 0o660 and service.path.stat().st_gid == os.getgid()
    assert service.path.parent.stat().st_mode & 0o777 == 0o750
    x = np.zeros(4)
    with connect(service.path, tenant="mine") as own:
        assert own.submit(double[4], x).result(HANG_SECONDS) is None  # the owner's user may launch anything
        pretend(monkeypatch, foreign)
        with pytest.raises(errors.ServiceError, match="is tenant 'guest' of this service, not 'mine'"):
            connect(service.path, tenant="mine")
        with connect(service.path) as guest:
            assert guest.tenant == "guest"
            with pytest.raises(errors.ServiceError, match=r"may not be launched .* those of warpwell\.scheduler may"):
                guest.submit(double[4], x)
            named = {"module": "warpwell.scheduler.x", "name": "double", "sha256": ""}
            monkeypatch.setattr(references, "reference", lambda _: named)
            with pytest.raises(errors.ServiceError, match=r"that module alone; --allow 'warpwell\.scheduler\.\*'"):
                guest.submit(double[4], x)
            named["module"] = "warpwell.scheduler"
            assert guest.submit(double[4], x).result(HANG_SECONDS) is None
            # what others do is not his business
            assert {e.tenant for e in guest.log()} == {"guest"} and "mine" not in guest.metrics()
            assert {e.tenant for e in own.log()} == {"guest", "mine"} and 'tenant="mine"' in own.metrics()
        pretend(monkeypatch, foreign + 1)
        with pytest.raises(errors.ServiceError, match=f"user {foreign + 1} is not a tenant"):
            connect(service.path)


def test_only_who_may_do_anything_lends_memory(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handle may name memory of the service's user, or of another tenant."""
    module = "warpwell.scheduler"
    task = {"kernel": {"module": module, "name": "double", "sha256": ""}, "shape": [4], "arguments": [["lent", 0]]}
    lent = [{"handle": 64 * "ab", "offset": 0, "dtype": "<i8", "shape": [4]}]
    for trusts in (False, True):
        service = make(group=str(os.getgid()), allow=[module], trust_group=trusts)
        with monkeypatch.context() as patch:
            for own in (True, False):
                if not own:
                    pretend(patch, os.getuid() + 1)
                with connect(service.path) as client:
                    call = {"type": "submit", "tasks": [task], "lent": lent}
                    if own or trusts:
                        client.call(call)
                    else:
                        with pytest.raises(errors.ServiceError, match="only processes of the service's user lend"):
                            client.call(call)
        service.close()


def test_where_settings_name_tenants_nobody_else_gets_in(
    make: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    service = make(tenants={"a": 1, "b": {"weight": 2}})
    for name in ("c", "default", "A"):
        with pytest.raises(errors.ServiceError, match=f"tenant '{name}' has no setting .* as one of a, b"):
            connect(service.path, tenant=name)
    with connect(service.path, tenant="b") as client:
        assert client.submit(double[4], np.zeros(4)).result(HANG_SECONDS) is None
    with connect(service.path) as looker:  # as `sched status` does: it sees, and submits nothing
        assert looker.status()["clients"] == 1
        for refused in (lambda: looker.submit(double[4], np.zeros(4)), lambda: looker.to_device(np.zeros(4))):
            with pytest.raises(errors.QuotaError, match="tenant 'default' has no setting"):
                refused()
    service.close()
    grouped = make(path=tmp_path / "group" / "s.sock", tenants={"a": 1}, group=str(os.getgid()))
    pretend(monkeypatch, 4_000_000)
    with pytest.raises(errors.ServiceError, match="tenant 'user-4000000' has no setting"):
        connect(grouped.path)
    with pytest.raises(errors.ArgumentError, match="users are tenants x, for which tenants= has no setting"):
        make(tenants={"a": 1}, group=str(os.getgid()), users={4_000_000: "x", 4_000_001: "a"})


def test_a_group_without_a_list_of_users(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    service = make(group=str(os.getgid()))
    pretend(monkeypatch, 4_000_000)
    with connect(service.path) as guest:
        assert guest.tenant == "user-4000000"
        with pytest.raises(errors.ServiceError, match="none may"):
            guest.submit(double[4], np.zeros(4))
    service.close()
    trusting = make(group=str(os.getgid()), trust_group=True)
    with connect(trusting.path) as guest:
        assert guest.submit(double[4], np.zeros(4)).result(HANG_SECONDS) is None


def test_a_service_that_dies_or_stops_is_noticed(make: Made, tmp_path: Path) -> None:
    with pytest.raises(errors.ServiceError, match=r"no scheduler service listens at .*warpwell sched serve"):
        connect(tmp_path / "absent" / "s.sock")
    service = make()
    client = connect(service.path)
    handle = client.submit(waits[4], np.zeros(4))
    service.close()
    with pytest.raises(errors.ServiceError, match="was stopped"):
        handle.result(HANG_SECONDS)
    for call in (client.metrics, client.status, lambda: client.submit(double[4], np.zeros(4))):
        with pytest.raises(errors.ServiceError):
            call()
    client.close()
    with pytest.raises(errors.ServiceError, match="no scheduler service"):
        connect(service.path)


@pytest.mark.timing
def takes_a_task(listener: socket.socket) -> ServiceConnection:
    """Be a service for who comes next, until it has taken a task in, whose number is 1; return the connection."""
    server = ServiceConnection(listener.accept()[0], "the client")
    server.expect("hello")
    protocol.hello(server, tenant="t", about={}, max_message=1 << 20)
    server.receive()
    server.send({"type": "reply", "call": 1, "tasks": [1]})
    return server


def test_a_service_that_says_nothing_is_noticed(tmp_path: Path) -> None:
    """A server that greets and then sleeps: every wait ends, within twice the time-out and a little."""
    path = tmp_path / "s.sock"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(os.fspath(path))
    with pytest.raises(errors.ServiceError, match="no scheduler service"):  # a socket that nobody listens at
        connect(path)
    listener.listen(4)
    with listener:
        with pytest.raises(errors.ServiceError, match=r"did not send 'hello' within 0\.3 s"):
            connect(path, timeout=0.3)
        listener.accept()[0].close()

        def greet() -> None:
            server = takes_a_task(listener)
            time.sleep(1.5)
            server.close()

        thread = threading.Thread(target=greet)
        thread.start()
        client = connect(path, timeout=0.3)
        handle = client.submit(waits[4], np.zeros(4))
        with pytest.raises(errors.ServiceError, match=r"has not answered for 0\.6 s"):
            handle.result(HANG_SECONDS)
        # DROP  # before the other side closes
        with pytest.raises(errors.ServiceError):
            client.status()
        client.close()
        thread.join(HANG_SECONDS)


def test_a_client_does_not_wait_for_ever_for_memory_to_be_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service that lives, and never says that memory of an ended task is closed: what keeps it is kept for ever."""
    left: list[Any] = []
    kept = threading.Event()
    monkeypatch.setattr(client_module, "_left", left)
    monkeypatch.setattr(ipc, "CLOSING", 0.5)
    path = tmp_path / "s.sock"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(os.fspath(path))
    listener.listen(4)

    def serve() -> None:
        server = takes_a_task(listener)
        kept.wait(HANG_SECONDS)
        server.send({"type": "ended", "task": 1, "open": True})
        with contextlib.suppress(EOFError, errors.WarpwellError):
            while True:
                server.receive()
                server.send({"type": "pong"})
        server.close()

    with listener:
        serves = threading.Thread(target=serve, daemon=True)
        serves.start()
        client = connect(path, timeout=0.3)
        handle = client.submit(waits[4], np.zeros(4))
        handle.kept.append("memory")
        kept.set()
        handle.result(HANG_SECONDS)
        closes = threading.Thread(target=client.close, daemon=True)
        closes.start()
        closes.join(HANG_SECONDS)
        assert not closes.is_alive() and left == ["memory"]
        serves.join(HANG_SECONDS)


def test_a_crowd_that_nobody_lets_in_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(os.fspath(path))
        listener.listen(0)
        crowd = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        crowd.connect(os.fspath(path))
        with pytest.raises(errors.ServiceError, match="does not take connections: is it stopped"):
            connect(path, timeout=0.3)


@pytest.mark.parametrize(
    ("hello", "refusal"),
    [({"version": 99}, "the service speaks version 99"), ({"version": protocol.VERSION}, "field 'tenant'")],
)
def test_a_client_refuses_services_that_it_does_not_understand(
    tmp_path: Path, hello: dict[str, Any], refusal: str
) -> None:
    closed: list[bool] = []
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(os.fspath(tmp_path / "s.sock"))
    listener.listen(1)

    def greet() -> None:
        server = ServiceConnection(listener.accept()[0], "the client")
        server.expect("hello")
        server.send({"type": "hello", **hello})
        try:
            server.receive()  # for its patience
        except EOFError:
            closed.append(True)
        server.close()

    thread = threading.Thread(target=greet)
    thread.start()
    with listener, pytest.raises(errors.ServiceError, match=refusal) as caught:
        connect(tmp_path / "s.sock")
    thread.join(HANG_SECONDS)
    assert closed, caught  # while its error, and with it the client, is still there


def test_a_log_on_a_full_disk_has_whole_lines_and_says_that_some_are_missing(tmp_path: Path) -> None:
    class Full(io.FileIO):
        room = 100

        def write(self, text: Any) -> int:
            self.room, written = max(0, self.room - len(text)), min(self.room, len(text))
            if not written:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(text[:written])

    settings = {"policy": "lanes", "tenants": {}}
    service = broker.Broker(settings, allow=(), trust=False, max_held=1, log=tmp_path / "log", silence=1.0, command=())
    with Full(tmp_path / "log", "ab") as service._file:
        for task in range(3):
            service._append({"task": task, "text": "x" * 50})
        assert service.unlogged == "No space left on device"
        service._file.room = 1000
        service._append({"task": 3})
    assert [json.loads(line)["task"] for line in (tmp_path / "log").read_text().splitlines()] == [0, 3]


def test_places_where_a_service_does_not_listen(make: Made, tmp_path: Path) -> None:
    service = make()
    with pytest.raises(errors.ServiceError, match=r"listens at .* already"):
        make()
    service.close()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(service.path))  # as if it had been killed
    with connect(make().path) as client:
        assert client.status()["clients"] == 1
    shared = tmp_path / "shared"
    shared.mkdir()
    for mode, step in ((0o777, "chmod 700 it, or name another"), (0o1777, "Name another")):  # as /tmp has it
        shared.chmod(mode)
        with pytest.raises(errors.ServiceError, match=f"others cannot write to: .*there. {step}"):
            make(path=shared / "s.sock")
    with pytest.raises(errors.ServiceError, match="chmod 750 it, or name"):
        shared.chmod(0o777)
        make(path=shared / "s.sock", group=str(os.getgid()))
    for mode in (0o700, 0o701):  # what others may counts for nobody of the group
        shared.chmod(mode)
        with pytest.raises(errors.ServiceError, match=f"closed to the group of this service: `chgrp {os.getgid()}`"):
            make(path=shared / "s.sock", group=str(os.getgid()))
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with pytest.raises(errors.ServiceError, match="others cannot write to"):
        make(path=tmp_path / "link" / "s.sock")
    with pytest.raises(errors.ArgumentError, match="too long for a socket"):
        make(path=tmp_path / ("x" * 200))
    with pytest.raises(errors.ArgumentError, match="no group 'nobody-has-this'"):
        make(group="nobody-has-this")
    with pytest.raises(errors.ArgumentError, match="no user 'nobody-has-this'"):
        make(users={"nobody-has-this": "t"})


def test_a_service_replaces_no_file_by_its_socket(make: Made, tmp_path: Path) -> None:
    run = tmp_path / "results"
    run.mkdir(mode=0o700)
    (run / "log").write_text("kept")
    (run / "link").symlink_to(run / "nothing")
    for name in ("log", "link"):
        with pytest.raises(errors.ServiceError, match=f"{name} is not a socket, and a service would replace it"):
            make(path=run / name)
    assert (run / "log").read_text() == "kept" and (run / "link").is_symlink()


def test_a_service_for_a_group_that_its_user_is_not_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "getegid", lambda: 1000)
    monkeypatch.setattr(os, "getgroups", lambda: [1000, 1001])
    assert address.own_group("1001") == 1001
    with pytest.raises(errors.ArgumentError, match=r"not in group '1002'.*next login"):
        Service(tmp_path / "run" / "s.sock", group="1002")
    assert not (tmp_path / "run").exists()


def test_owners_that_do_not_start(make: Made) -> None:
    with pytest.raises(errors.ServiceError, match="there is no policy 'bad': choose another"):
        make(policy="bad")
    with pytest.raises(errors.ServiceError, match="does not start: it exited with status 9"):
        make(policy="dies")


def test_where_a_service_of_this_user_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WARPWELL_SOCKET", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    assert address.default_path() == tmp_path / "warpwell" / "scheduler.sock"
    tmp_path.chmod(0o755)  # others can see it: not a runtime folder
    assert address.default_path().parent.name == f"warpwell-{os.getuid()}"
    monkeypatch.setenv("WARPWELL_SOCKET", "/a/b")
    assert address.default_path() == Path("/a/b")


def test_callbacks_and_forks(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    service = make()
    with connect(service.path) as client:
        seen: list[str] = []

        def callback(handle: Any) -> None:
            try:
                client.status()
            except errors.SchedulerError as error:
                seen.append(str(error))
            seen.append(handle.state.value)

        handle = client.submit(waits[4], np.zeros(4))
        handle.add_done_callback(callback)  # before its end, so that the thread that receives calls it
        assert handle.cancel()
        until(lambda: len(seen) == 2)
        assert "must not wait" in seen[0] and seen[1] == "cancelled"
        monkeypatch.setattr(os, "getpid", lambda: 1)
        with pytest.raises(errors.ForkError):
            client.submit(double[4], np.zeros(4))
        monkeypatch.undo()
    with pytest.raises(errors.ServiceError, match="this connection is closed"):
        client.submit(double[4], np.zeros(4))
    monkeypatch.setattr(references, "in_owner", True)
    with pytest.raises(errors.ServiceError, match="if __name__ == '__main__'"):
        connect(service.path)


def test_connections_that_say_nothing_shut_nobody_out(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    service = make(group=str(os.getgid()), trust_group=True)
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(raw_socket(service))]
        until(lambda: len(service._silent) == 1)
        pretend(monkeypatch, os.getuid() + 1)  # another user's crowd drops nobody else
        for _ in range(2 * MAX_CLIENTS + 10):
            socks.append(stack.enter_context(raw_socket(service)))
        with connect(service.path) as client:
            assert client.submit(double[4], np.zeros(4)).result(HANG_SECONDS) is None
        socks[-1].sendall(HELLO)
        assert socks[-1].recv(4) == MAGIC
        for sock in socks[1:60]:
            assert sock.recv(1) == b""
        assert len(service._silent) <= 1 + SILENT
        socks[0].sendall(HELLO)
        assert socks[0].recv(4) == MAGIC
    until(lambda: sum(t.is_alive() for t in service._threads) == 1)  # the one that lets in
    with connect(service.path) as client:
        assert client.submit(double[4], np.zeros(4)).result(HANG_SECONDS) is None


def test_a_client_for_whom_no_thread_starts_shuts_nobody_out(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def starts(thread: threading.Thread) -> None:
        if thread.name == "warpwell-client-1":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starts)
    service = make()
    with pytest.raises(errors.ServiceError):
        connect(service.path)
    connect(service.path).close()
    assert not service._silent


def test_who_says_a_hello_bit_by_bit_is_dropped(make: Made) -> None:
    service = make(patience=0.3)
    with raw_socket(service) as slow:
        began = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() < began + 20:
                slow.sendall(HELLO[:1])
                time.sleep(0.1)
                raw_socket(service).close()  # when somebody comes, it is seen who is late


def test_clients_of_one_tenant_leave_room_for_others(make: Made) -> None:
    service = make()
    with contextlib.ExitStack() as stack:
        for tenant in ("a", "b"):
            for _ in range(MAX_CLIENTS):
                opened = ServiceConnection(raw_socket(service), "the service")
                connection = stack.enter_context(contextlib.closing(opened))
                protocol.hello(connection, tenant=tenant)
                connection.expect("hello")
            if tenant == "a":
                with pytest.raises(errors.ServiceError, match="tenant 'a' has 64 connections"):
                    connect(service.path, tenant="a")
        with pytest.raises(errors.ServiceError, match=rf"user {os.getuid()} has 128 connections"):
            connect(service.path, tenant="c")
    until(lambda: not service.broker.sessions)
    with connect(service.path, tenant="a") as client:
        assert client.submit(double[4], np.zeros(4)).result(HANG_SECONDS) is None


def test_options_are_refused_as_a_scheduler_does_it(make: Made) -> None:
    wrong: dict[str, Any] = {"priority": 1.5, "deadline": -1.0, "memory": "1 gigabyte", "name": 5, "size": [1]}
    with connect(make().path) as client:
        for name, value in wrong.items():
            with pytest.raises(errors.ArgumentError, match=name) as caught:
                client.submit(double[4], np.zeros(4), **{name: value})
            assert caught.value.name == name
        assert (
            client.submit(double[4], np.zeros(4), priority=np.int64(1), memory=np.int32(64)).result(HANG_SECONDS)
            is None
        )


def test_numpy_reads_an_array_of_a_service(make: Made) -> None:
    with connect(make().path) as client:
        there = client.to_device(np.arange(3))
        assert np.array_equal(np.asarray(there), [0, 1, 2]) and np.asarray(there, np.float32).dtype == np.float32
        with pytest.raises(ValueError, match="copy"):
            np.array(there, copy=False)


def test_what_a_service_would_leave_is_known_until_it_is_closed(make: Made, tmp_path: Path) -> None:
    path = tmp_path / "run" / "s.sock"
    kernels = path.with_name("s.sock.kernels")
    service = make(path=path)
    # what Ctrl-C removes where a command must end before `close` has
    assert {path, kernels} <= unfinished and path.is_socket() and kernels.is_dir()
    service.close()
    assert not {path, kernels} & unfinished and [p.name for p in path.parent.iterdir()] == ["s.sock.lock"]


def test_an_owner_that_cannot_be_started_is_a_try_that_failed(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    service = make()
    popen, left = subprocess.Popen, [1]

    def start(*args: Any, **options: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return popen(*args, **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    with connect(service.path) as client:
        handle = client.submit(waits[4], np.zeros(4))
        until(lambda: handle.state.value == "running")
        os.kill(pid_of(client), signal.SIGKILL)
        until(lambda: not left[0] and handle.state.value == "running")  # in the next one
        assert handle.cancel()
        left[0] = 1000
        handle = client.submit(waits[4], np.zeros(4))
        os.kill(pid_of(client), signal.SIGKILL)
        with pytest.raises(errors.ServiceError, match="any more: it could not be started: Too many open files"):
            handle.result(HANG_SECONDS)
    assert left[0] == 1000 - TRIES


def test_interrupted_submissions_leave_nothing_that_runs(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    service = make()
    with connect(service.path) as client:

        def interrupted(reply: Any) -> None:
            reply.result()
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(client, "_answer", interrupted)
            with pytest.raises(KeyboardInterrupt):
                client.submit_many([(waits[4], np.zeros(4)), (double[4], np.zeros(4))])
        assert not client._handles
        until(lambda: client.status()["requests"] == 0)
        until(lambda: not client._calls)
        x = np.arange(4)
        assert client.submit(double[4], x).result(HANG_SECONDS) is None and x.tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize(
    "option",
    [
        {"deadline": 10**400},
        {"deadline": 0},
        {"deadline": -1.0},
        {"deadline": float("inf")},
        {"deadline": float("nan")},
        {"name": 201 * "a"},
        {"size": {201 * "a": 1}},
        {"size": {"a": "b"}},
        {"priority": 1 << 63},
    ],
)
def test_options_that_are_none(option: dict[str, Any]) -> None:
    good = {"type": "submit", "deadline": 1e9, "size": {200 * "a": 1}}
    assert wire.options(protocol.ServiceMessage(good))["deadline"] == 1e9
    with pytest.raises(errors.ServiceError):
        wire.options(protocol.ServiceMessage({"type": "submit", **option}))


def test_an_answer_that_is_too_large_is_told(make: Made) -> None:
    service = make(max_message=10_000)
    with connect(service.path) as client:
        waiting = client.submit(waits[4], np.zeros(4))
        client.submit_many([(double[4], np.zeros(4)) for _ in range(100)])[-1].result(HANG_SECONDS)
        with pytest.raises(errors.MessageSizeError, match="--max-message"):
            client.log()
        assert waiting.state.value == "running" and waiting.cancel()


def test_a_header_that_grows_on_its_way_to_the_owner(make: Made) -> None:
    service = make()
    named = {"module": "m", "name": "double", "sha256": ""}
    tasks = [{"kernel": named, "shape": [1], "arguments": 256 * [["float", 1.5]]}] * 256
    header = json.dumps({"type": "submit", "call": 1, "tasks": tasks}, separators=(",", ":")).replace("1.5", "1e15")
    assert len(header) < protocol.MAX_HEADER < len(json.dumps(json.loads(header), separators=(",", ":")))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(os.fspath(service.path))
        connection = ServiceConnection(sock.dup(), "the service", patience=20.0)
        sock.sendall(HELLO + raw(header.encode()))
        kinds = []
        while kinds.count("ended") < 256:
            message = connection.receive()
            assert message is not None and "error" not in message.header
            kinds.append(message.kind)
        connection.close()
    assert service.broker.status()["owner_restarts"] == 0


def test_what_ends_the_owner_before_it_runs(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker, "ALONE", 0.1)
    service = make()
    with connect(service.path) as client, connect(service.path, tenant="other") as other:
        innocent = client.submit(waits[4], np.zeros(4))
        with pytest.raises(errors.TaskLostError, match=r"because of task 'aborts': it exited with status 9"):
            other.submit(aborts[4], np.zeros(4)).result(HANG_SECONDS)
        until(lambda: innocent.state.value == "running")
        assert client.status()["owner_restarts"] == 2
        assert [e.kind for e in client.log() if e.name == "waits"].count("stop") == 1  # it was repeated once
        assert innocent.cancel()


Away = Callable[[], contextlib.AbstractContextManager[None]]


@pytest.fixture
def away(make: Made, monkeypatch: pytest.MonkeyPatch) -> tuple[Service, Away]:
    """A service, and a block in which its owner has died and the next one does not start."""
    service, popen = make(), subprocess.Popen
    starts = threading.Event()

    def start(*args: Any, **options: Any) -> Any:
        assert starts.wait(HANG_SECONDS)
        return popen(*args, **options)

    @contextlib.contextmanager
    def gone() -> Iterator[None]:
        owner = service.broker._owner
        assert owner.process is not None
        monkeypatch.setattr(subprocess, "Popen", start)
        os.kill(owner.process.pid, signal.SIGKILL)
        until(lambda: not owner.connected)
        try:
            yield
        finally:
            starts.set()

    return service, gone


def test_cancelling_while_there_is_no_owner(away: tuple[Service, Away]) -> None:
    service, gone = away
    x = np.arange(4)
    with connect(service.path) as client:
        with gone():
            first, second, third = client.submit_many([(double[4], x), (double[4], x), (double[4], x)])
            assert second.cancel() and third.cancelled()
        assert first.result(HANG_SECONDS) is None and second.cancelled() and x.tolist() == [0, 2, 4, 6]
        assert client.status()["requests"] == 0


def test_what_was_cancelled_when_the_owner_died_does_not_run_again(away: tuple[Service, Away]) -> None:
    service, gone = away
    with connect(service.path) as client:
        handle, follows = client.submit_many([(stays[4], np.zeros(4)), (waits[4], np.zeros(4))])
        until(handle.running)
        assert handle.cancel() and not handle.done()
        with gone():
            for one in (handle, follows):
                with pytest.raises(CancelledError):
                    one.result(HANG_SECONDS)
            assert client.status()["requests"] == 0
        assert [e.kind for e in client.log() if e.name == "stays"] == ["arrive", "launch", "cancel"]


def test_a_client_that_goes_while_there_is_no_owner_leaves_no_metrics(away: tuple[Service, Away]) -> None:
    service, gone = away
    with connect(service.path) as watcher:
        with connect(service.path) as client:
            handle = client.submit(waits[4], np.zeros(4))
            until(lambda: handle.state.value == "running")
            with gone():
                until(lambda: any(e.kind == "stop" for e in watcher.log()))
                client.close(cancel=True)
                until(lambda: watcher.status()["clients"] == 1)
        for state in ("running", "waiting"):
            assert f'warpwell_tasks{{policy="p",state="{state}",tenant="default"}} 0' in watcher.metrics()
