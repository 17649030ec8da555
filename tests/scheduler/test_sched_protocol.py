"""The service's messages, references, recovery and connections; a device process with a scripted scheduler."""

import contextlib
import errno
import fcntl
import hashlib
import importlib
import io
import json
import linecache
import os
import resource
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
from tests.harness.descriptors import open_descriptors, until_closed
from tests.harness.until import HANG_SECONDS, until

import warpwell as ww
from warpwell import errors, gpu
from warpwell.cli import main
from warpwell.replacing import unfinished
from warpwell.scheduler.service import address, device_process, messages, references
from warpwell.scheduler.service import client as client_module
from warpwell.scheduler.service import service as service_module
from warpwell.scheduler.service.client import Client, Packer, connect
from warpwell.scheduler.service.messages import Connection, Message
from warpwell.scheduler.service.recovery import Quarantine, StatusPage, Verdicts
from warpwell.scheduler.service.service import MAX_CLIENTS, MAX_SILENT, MAX_STARTS, Service
from warpwell.scheduler.task import Kind, Profile

Pair = tuple[Connection, Connection]


@contextlib.contextmanager
def pair(**options: Any) -> Iterator[Pair]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    a, b = Connection(left, "left", **options), Connection(right, "right", **options)
    try:
        yield a, b
    finally:
        a.close()
        b.close()


def exchange(array: NDArray[Any]) -> NDArray[Any]:
    with pair() as (a, b):
        a.send({"type": "x"}, [array])
        with b.receive() as message:
            assert message.kind == "x"
            (got,) = message.arrays()
        assert message.fd == -1
        return got


# messages


@settings(max_examples=40)
@given(
    dtype=st.sampled_from("|b1 |i1 <i2 <i4 <i8 |u1 <u2 <u4 <u8 <f2 <f4 <f8 <c8 <c16 >i4 >f8".split()),
    shape=st.lists(st.integers(0, 5), max_size=3),
    seed=st.integers(0, 1000),
)
def test_arrays_arrive_bit_for_bit(dtype: str, shape: list[int], seed: int) -> None:
    expected = np.dtype(dtype)
    raw = np.random.default_rng(seed).integers(
        0, 2 if expected.kind == "b" else 256, (*shape, expected.itemsize), np.uint8
    )
    array = np.ascontiguousarray(raw).view(expected).reshape(shape)
    got = exchange(array)
    assert got.shape == array.shape and got.dtype == expected.newbyteorder("<") and got.flags.writeable
    assert got.tobytes() == array.astype(expected.newbyteorder("<")).tobytes()


def test_views_and_large_arrays_arrive() -> None:
    base = np.arange(3_000_000, dtype=np.int64).reshape(1000, 3000)
    assert np.array_equal(exchange(base), base)
    assert np.array_equal(exchange(base[::7, 1::3]), base[::7, 1::3])
    assert np.array_equal(exchange(base.T), base.T)


@pytest.mark.parametrize(
    "array",
    [np.array([object()]), np.array(["text"]), np.zeros(2, "i4,f8"), np.zeros(1, "M8[s]"), np.zeros(1, np.longdouble)],
)
def test_items_that_are_not_plain_numbers_are_refused(array: NDArray[Any]) -> None:
    with pair() as (a, _), pytest.raises(errors.DTypeError, match="cannot be sent"):
        a.send({"type": "x"}, [array])


def layout(*arrays: Any) -> bytes:
    return json.dumps({"type": "x", "arrays": list(arrays)}).encode()


BAD: dict[str, tuple[bytes, str]] = {
    "another protocol": (b"GET / HTTP/1.1\r\n\r\n", "not JSON"),
    "too long": (b"x" * 70_000, "more than 65536 bytes"),
    "no JSON": (b"\xff\xfe{", "not JSON"),
    "deep JSON": (b"[" * 60_000, "not JSON"),
    "huge number": (b"1" * 60_000, "not JSON"),
    "no object": (b"[1]", "'type' of a message is missing"),
    "no type": (b'{"version": 1}', "'type' of a message is missing"),
    "pickle": (b"\x80\x04\x95", "not JSON"),
    "objects": (layout(["|O", [1]]), "list of arrays"),
    "text": (layout(["<U2", [1]]), "list of arrays"),
    "void": (layout(["|V8", [1]]), "list of arrays"),
    "a dtype that is a list": (layout([[["a", "<i8"]], [1]]), "list of arrays"),
    "negative": (layout(["<i8", [-1, -1]]), "list of arrays"),
    "overflow": (layout(["<i8", [1 << 40, 1 << 40]]), "list of arrays"),
    "over the limit": (layout(["<i8", [1 << 20]]), "more than 1048576 bytes"),
    "float": (layout(["<i8", [1.0]]), "list of arrays"),
    "true": (layout(["<i8", [True]]), "list of arrays"),
    "33 dimensions": (layout(["<i8", [1] * 33]), "list of arrays"),
    "too many arrays": (layout(*[["<i8", [0]]] * 1025), "list of arrays"),
    "arrays is a number": (b'{"type": "x", "arrays": 7}', "list of arrays"),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_messages_are_refused(name: str) -> None:
    data, text = BAD[name]
    with pair(max_bytes=1 << 20) as (a, b):
        a.sock.send(data)
        with pytest.raises(errors.ServiceError, match=text):
            b.receive()


def memfd(nbytes: int, seals: int = messages.SEALS, *, holes: bool = False) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    if holes:
        os.truncate(fd, nbytes)
    else:
        os.pwrite(fd, bytes(nbytes), 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def file_of(path: Path, nbytes: int) -> int:
    path.write_bytes(bytes(nbytes))
    return os.open(path, os.O_RDWR)


def test_arrays_come_only_from_sealed_memfds(tmp_path: Path) -> None:
    """A file that can shrink, or that cannot provide a page, would end its reader by SIGBUS."""
    size = 1 << 20
    text = layout(["|u1", [size]])
    wrong = [
        memfd(size, seals=messages.SEALS & ~fcntl.F_SEAL_SHRINK),
        memfd(size, seals=messages.SEALS & ~fcntl.F_SEAL_WRITE),
        memfd(size, seals=messages.SEALS & ~fcntl.F_SEAL_SEAL),
        memfd(size - 1),
        memfd(size + 1),
        memfd(size, holes=True),
        file_of(tmp_path / "file", size),
        os.open("/dev/zero", os.O_RDWR),
        os.open(tmp_path, os.O_RDONLY),
    ]
    with pair() as (a, b):
        for fd in (*wrong, -1):
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", fd))] if fd >= 0 else []
            a.sock.sendmsg([text], rights)
            with b.receive() as message, pytest.raises(errors.ServiceError, match="not in a sealed memfd"):
                message.arrays()
        right = memfd(size)
        a.sock.sendmsg([text], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", right))])
        with b.receive() as message:
            assert message.arrays()[0].nbytes == size
        with pytest.raises(PermissionError):
            os.pwrite(right, b"x", 0)
    for fd in (*wrong, right):
        os.close(fd)


def test_descriptors_do_not_pile_up() -> None:
    before = open_descriptors()
    with pair() as (a, b):
        fd = memfd(8)
        for count in (2, 200):
            a.sock.sendmsg(
                [layout()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{count}i", *[fd] * count))]
            )
            with pytest.raises(errors.ServiceError, match="more than 65536 bytes or one descriptor"):
                b.receive()
        a.sock.sendmsg([b"no JSON"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", fd))])
        with pytest.raises(errors.ServiceError, match="not JSON"):
            b.receive()
        os.close(fd)
        for n in (10, 1 << 20):  # copied, and mapped
            for _ in range(20):
                a.send({"type": "x"}, [np.zeros(n)])
                with b.receive() as message:
                    message.arrays()
    until_closed(before)


def test_mappings_leave_descriptors_for_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAPPED_BYTES", 4096)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pair() as (a, b):
        before = open_descriptors()
        limit = 2 * max(number for number, _ in before) + 40
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            received: list[Any] = []
            for k in range(limit):
                a.send({"type": "x"}, [np.full(1000, k)])
                with b.receive() as message:
                    received += message.arrays()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        # Mappings take all numbers below half of the limit.
        assert max(number for number, _ in open_descriptors() - before) == limit // 2 - 1
        assert all((array == k).all() for k, array in enumerate(received)) and len(received) == limit


def test_a_peer_that_reads_nothing_does_not_block() -> None:
    with pair() as (a, b):
        with pytest.raises(BlockingIOError):
            while True:
                a.send({"type": "x", "text": "x" * 30_000}, wait=False)
        assert b.receive().kind == "x"
        b.close()
        with pytest.raises(OSError, match=r"pipe|reset"):
            a.send({"type": "x"})
            a.send({"type": "x"})


def test_arrays_are_not_copied_for_a_peer_that_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair() as (a, b):
        with pytest.raises(BlockingIOError):
            while True:
                a.send({"type": "x", "text": "x" * 30_000}, wait=False)
        with monkeypatch.context() as patch:
            patch.setattr(messages, "_seal", lambda _: pytest.fail("the arrays were copied"))
            with pytest.raises(BlockingIOError):
                a.send({"type": "y"}, [np.zeros(1000)], wait=False)
        while b.receive(wait=False).kind == "x":
            with contextlib.suppress(BlockingIOError):
                a.send({"type": "y"}, [np.zeros(1000)], wait=False)


def test_messages_of_a_peer_that_has_closed_are_received() -> None:
    with pair() as (a, b):
        a.send({"type": "x"})
        b.send({"type": "y"})  # a does not read it, so the close resets the connection
        b.close()
        with pytest.raises(EOFError):
            while True:
                a.receive()
    with pair() as (a, b):
        b.send({"type": "y"})
        a.send({"type": "x"})
        b.close()
        assert a.receive().kind == "y"
        with pytest.raises(EOFError):
            a.receive()


def test_too_large_messages_are_not_sent() -> None:
    with pair(max_bytes=1000) as (a, b):
        with pytest.raises(errors.MessageSizeError, match="--max-message"):
            a.send({"type": "x"}, [np.zeros(1000)])
        with pytest.raises(errors.MessageSizeError, match="too large"):
            a.send({"type": "x", "text": "x" * (1 << 16)})
        a.send({"type": "y"})
        assert b.receive().kind == "y"


# references and launches


@ww.kernel
def double(x: Any) -> None:
    x[gpu.grid(1)] *= 2


@ww.kernel
def wait_forever(x: Any) -> None:
    x[gpu.grid(1)] = 0


@ww.kernel
def kills(x: Any) -> None:
    x[gpu.grid(1)] = 0


@ww.kernel
def aborts(x: Any) -> None:
    x[gpu.grid(1)] = 0


@ww.kernel
def ignore_cancel(x: Any) -> None:
    x[gpu.grid(1)] = 0


@ww.kernel
def copies(x: Any, y: Any) -> None:
    y[gpu.grid(1)] = x[gpu.grid(1)]


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


def test_allowed_modules() -> None:
    named = {"module": "lab.sched.workloads.dense", "name": "gemm"}
    assert references.is_allowed(named, ["lab.sched.workloads.dense"])
    assert references.is_allowed(named, ["lab.sched.*"]) and references.is_allowed(named, ["x", "lab.*"])
    assert not references.is_allowed(named, ["lab.sched.workloads", "lab.sched.work", "dense"])
    assert not references.is_allowed(named, ["lab.sched.work.*", "lab.sched.workloads.dense.*"])
    assert not references.is_allowed({"path": "/warpwell.py", "name": "gemm"}, ["warpwell.*", "/warpwell.py"])
    main = {"module": "ourlab.kernels.__main__", "name": "x"}  # importing it runs a program
    assert not references.is_allowed(main, ["ourlab.kernels", "ourlab.kernels.*", "ourlab.*"])
    assert references.is_allowed(main, ["ourlab.kernels.__main__"])
    below = {"module": "ourlab.kernels.__main__.x", "name": "x"}  # importing it imports the program first
    assert not references.is_allowed(below, ["ourlab.kernels.*", "ourlab.*"])
    assert references.checked_patterns(["a.b", "a.b.*"]) == ("a.b", "a.b.*")


@pytest.mark.parametrize("pattern", ["", "*", ".*", "a.*.b", "a*", "a/b", "a.py.*x"])
def test_patterns_that_name_no_module(pattern: str) -> None:
    with pytest.raises(errors.ArgumentError, match="is not a module"):
        references.checked_patterns(["fine", pattern])


def test_what_a_module_imports_is_not_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "__init__.py").write_text("")
    (tmp_path / "theirs" / "private.py").write_text("import warpwell as ww\n@ww.kernel\ndef k(x):\n    x[0] = 1\n")
    (tmp_path / "theirs" / "public.py").write_text("from .private import k\n")
    monkeypatch.syspath_prepend(tmp_path)
    kernels = references.Kernels()
    try:
        assert kernels.load({"module": "theirs.private", "name": "k", "sha256": ""}) is not None
        with pytest.raises(errors.SchedulerError, match="is not a kernel"):
            kernels.load({"module": "theirs.public", "name": "k", "sha256": ""})
    finally:
        for name in ("theirs", "theirs.private", "theirs.public"):
            sys.modules.pop(name, None)


def test_files_of_kernels(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("import warpwell as ww\nruns = []\n@ww.kernel\ndef k(x):\n    x[0] = 1\nnone = 3\n")
    named = {"path": str(path), "name": "k", "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    kernels = references.Kernels()
    kernel = kernels.load(named)
    assert kernel is kernels.load(named) and kernel.function.__name__ == "k"
    import inspect

    # The kernel was loaded from the hashed bytes: the compiler reads these, not the file.
    path.write_text("raise SystemExit(3)\n")
    assert kernels.load(named) is kernel and "x[0] = 1" in inspect.getsource(kernel.function)
    with pytest.raises(errors.SchedulerError, match="has changed since your program read it"):
        references.Kernels().load(named)
    with pytest.raises(errors.SchedulerError, match="is not a kernel"):
        kernels.load({**named, "name": "none"})
    with pytest.raises(errors.SchedulerError, match=r"SystemExit: 3.*__main__"):
        kernels.load({**named, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()})
    with pytest.raises(errors.SchedulerError, match="cannot read"):
        kernels.load({**named, "path": str(tmp_path / "absent.py")})
    with pytest.raises(errors.SchedulerError, match="could not import no_such_module"):
        kernels.load({"module": "no_such_module", "name": "k", "sha256": ""})
    with pytest.raises(errors.SchedulerError, match="differs between the device process"):
        kernels.load({"module": "warpwell.scheduler.service.messages", "name": "k", "sha256": "0" * 64})


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
        os.utime(path, (1, 1))  # as if the file had been written again with the same bytes
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
    kernels = references.Kernels()
    named = {"module": "package_of_kernels.other", "name": "k"}
    try:
        kernels.load({"module": "package_of_kernels.first", "name": "k", "sha256": ""})
        (package / "other.py").write_text(text + "# changed\n")
        with pytest.raises(errors.SchedulerError, match="differs between the device process"):
            kernels.load({**named, "sha256": hashlib.sha256((package / "other.py").read_bytes()).hexdigest()})
        assert kernels.load({**named, "sha256": hashlib.sha256(text.encode()).hexdigest()})
    finally:
        for name in [m for m in sys.modules if m.startswith("package_of_kernels")]:
            del sys.modules[name]


def test_threads_that_load_the_same_kernels_import_them_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slowly").mkdir()
    (tmp_path / "slowly" / "__init__.py").write_text("")
    text = "import time, warpwell as ww\ntime.sleep(0.3)\n@ww.kernel\ndef k(x):\n    x[0] = 1\n"
    (tmp_path / "slowly" / "mod.py").write_text(text)
    (tmp_path / "file.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    kernels, found = references.Kernels(), []
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


def test_arguments_that_cannot_be_sent() -> None:
    a = np.zeros(8)
    read_only = np.arange(8.0)
    read_only.flags.writeable = False
    for wrong in ("text", [1], None, 1 << 64, 1j, {}, np.ma.array([1.0, 2.0], mask=[0, 1])):
        with pytest.raises(errors.ArgumentError, match="cannot be sent"):
            Packer().launch(double[8], [wrong])
    query = type("Query", (), {"__repr__": lambda _: pytest.fail("an object of another library was printed")})()
    with pytest.raises(errors.ArgumentError, match="is a Query, which cannot be sent"):
        Packer().launch(double[8], [query])
    with pytest.raises(errors.ArgumentError, match="overlap"):
        Packer().launch(double[8], [a[:5], a[3:]])
    graph = type("CUDAGraph", (), {"__module__": "torch.cuda.graphs"})()
    for work in (lambda stream: None, graph):
        with pytest.raises(errors.ArgumentError, match="is a function or a graph, but a service runs only kernels"):
            Packer().launch(work, [])
    Packer().launch(double[8], [*a.reshape(4, 2).T])  # the columns of a matrix interleave in memory, but do not overlap
    packer = Packer()
    task = packer.launch(double[8], [a, a, read_only, read_only[2:], np.float32(0.1), 3, True, 0.5, -1])
    assert len(packer.arrays) == 4 and [t is a for t in packer.targets] == [True, False, False, False]
    got = messages.arguments_of(json.loads(json.dumps(task)), packer.arrays, lambda n: None)
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
        {"arguments": [["value", 1 << 63]]},
        {"arguments": [["pickle", "gA=="]]},
        {"arguments": [["value", "nan"]]},
        {"arguments": [[["int"], 1]]},
        {"arguments": [7]},
        {"arguments": [["value", 0]] * 257},
        {"arguments": {}},
    ],
)
def test_invalid_launches(change: dict[str, Any]) -> None:
    def check(task: dict[str, Any]) -> None:
        messages.checked_shape(task)
        messages.arguments_of(task, [np.zeros(8)], {}.__getitem__)

    good = {"shape": [8], "arguments": [["array", 0]]}
    check(good)
    with pytest.raises(errors.ServiceError):
        check({**good, **change})


def test_profiles_are_sent() -> None:
    profile = Profile(Kind.MEMORY, seconds=0.5, miss_rate=0.25, resident=7)
    assert messages.profile_of(json.loads(json.dumps(messages.profile_fields(profile)))) == profile
    assert messages.profile_of(messages.profile_fields(None)) is None
    for wrong in ({"kind": "neither"}, {"seconds": -1.0}, {"miss_rate": 2}, {"unknown": 1}, [1]):
        with pytest.raises(errors.ServiceError, match="the profile of a request is invalid"):
            messages.profile_of(wrong)


def test_errors_come_back_as_what_they_were() -> None:
    sent = errors.IndexRangeError("index 9", array="a", index=9, size=3)
    got = messages.error_of(json.loads(json.dumps(messages.error_fields(sent))))
    assert type(got) is errors.IndexRangeError and vars(got) == vars(sent) and str(got) == "index 9"
    got = messages.error_of(messages.error_fields(ZeroDivisionError("by zero")))
    assert type(got) is errors.SchedulerError and str(got) == "ZeroDivisionError: by zero"
    # The name is only looked up among the error classes.
    for name in ("SystemExit", "os", "__all__", "annotations", "errno"):
        assert type(messages.error_of({"class": name, "message": "m"})) is errors.SchedulerError
    attributes = {"__class__": "x", "args": "y", "task": "t"}
    odd = messages.error_of({"class": "TaskLostError", "message": "m", "attributes": attributes})
    assert vars(odd) == {"task": "t"} and odd.args == ("m",)


# recovery


def token(session: int, number: int) -> int:
    return session << 32 | number


def test_a_status_page_outlives_the_process_that_wrote_it() -> None:
    page = StatusPage()
    with open("/proc/self/status"):  # any process with the descriptor
        shared_page = StatusPage(os.dup(page.fd))
    for number in (1, 2, 3):
        shared_page.add(token(7, number))
    shared_page.add(token(7, 1))
    shared_page.discard(token(7, 2))
    shared_page.discard(token(7, 9))
    shared_page.alone = token(7, 3)
    assert shared_page.reserve_numbers(5) == 0 and shared_page.reserve_numbers(1) == 5
    assert page.alone == token(7, 3) and sorted(page.clear()) == [token(7, 1), token(7, 3)]
    assert page.alone == 0 and page.clear() == [] and StatusPage(os.dup(page.fd)).reserve_numbers(1) == 6
    with pytest.raises(OSError, match="not permitted"):
        os.truncate(page.fd, 8)  # a kernel that shrinks it would end the service by SIGBUS
    page._values[0] = 2**64 - 1  # a kernel wrote to it
    page.clear()
    assert page.reserve_numbers(1) < 2**53


class Simulated:
    """A service whose device processes die as the test decides."""

    def __init__(self) -> None:
        self.page, self.verdicts = StatusPage(), Verdicts()
        self.unfinished: dict[int, set[int]] = {}  # requests of clients in order, each with the requests before it
        self.started: dict[int, None] = {}  # started in the device process
        self.lost: set[int] = set()
        self.cancelled: set[int] = set()
        self.quarantine = Quarantine()

    def submit(self, number: int, after: set[int]) -> None:
        self.unfinished[number] = after
        self._start(self.quarantine.admit(number, after, lambda: self._begin(number)))

    def _start(self, starts: Any) -> None:
        self.page.alone = self.quarantine.alone
        for start in starts:
            start()

    def _begin(self, number: int) -> None:
        assert not self.quarantine.alone or self.quarantine.alone == number
        assert not any(before in self.quarantine for before in self.unfinished[number])
        self.started[number] = None
        self.page.add(number)

    def mark_waiting(self, number: int) -> None:
        """The scheduler has it, and has not launched it."""
        self.page.discard(number)

    def launch(self, number: int) -> None:
        self.page.add(number)

    def end(self, number: int) -> None:
        del self.unfinished[number]
        self.started.pop(number, None)
        self.page.discard(number)
        self._start(self.quarantine.end(number))

    def die(self, named: int | None = None) -> None:
        alone = self.page.alone
        self.verdicts.judge(
            self.page.clear(), alone, None if named is None else (named, {"message": "stuck"}), "killed"
        )
        self.started.clear()
        self.quarantine, self.page = Quarantine(self.verdicts.suspects), StatusPage(os.dup(self.page.fd))
        for number, after in list(self.unfinished.items()):  # clients resubmit in order
            if number in self.verdicts.culprits:
                self._cancel_after(number)
                self.lost.add(number)
                del self.unfinished[number]
            elif number in self.unfinished:
                self._start(
                    self.quarantine.admit(number, after & self.unfinished.keys(), lambda n=number: self._begin(n))
                )
        self._start(self.quarantine.expire())

    def _cancel_after(self, number: int) -> None:
        for later in [n for n, after in self.unfinished.items() if number in after]:
            self._cancel_after(later)
            self.cancelled.add(later)
            if self.unfinished.pop(later, None) is not None:
                self._start(self.quarantine.end(later))


def test_suspects_run_alone_and_the_culprit_never_again() -> None:
    world = Simulated()
    for number in (1, 2, 3, 4):
        world.submit(number, set())
    world.mark_waiting(4)
    assert list(world.started) == [1, 2, 3, 4]
    world.die()
    assert list(world.started) == [1] and sorted(world.verdicts.suspects) == [1, 2, 3]
    world.end(1)
    assert list(world.started) == [2]
    world.die()
    assert world.lost == {2} and list(world.started) == [3, 4]  # The culprit is known: there are no suspects.


def test_a_named_culprit_makes_no_suspects() -> None:
    world = Simulated()
    for number in (1, 2):
        world.submit(number, set())
    world.die(named=1)
    assert world.lost == {1} and list(world.started) == [2]


def test_a_death_without_a_running_request_keeps_earlier_suspects() -> None:
    verdicts = Verdicts()
    verdicts.judge([1, 2], 0, None, "killed")
    verdicts.judge([], 0, None, "killed")
    assert verdicts.suspects == [1, 2] and not verdicts.culprits


def test_suspects_that_nobody_resubmits_delay_no_one_for_long() -> None:
    started: list[int] = []
    quarantine = Quarantine([token(1, 1), token(1, 2), token(2, 1)])
    assert quarantine.admit(token(3, 1), (), lambda: started.append(1)) == []
    assert quarantine.expire(1) == []
    starts = quarantine.admit(token(2, 1), (), lambda: started.append(2))
    assert len(starts) == 1 and quarantine.alone == token(2, 1)
    assert quarantine.expire() == []
    for start in (*starts, *quarantine.end(token(2, 1))):
        start()
    assert started == [2, 1] and quarantine.expire() == [] and len(quarantine.admit(5, (), lambda: None)) == 1
    quarantine = Quarantine([1])
    assert quarantine.admit(2, (), lambda: started.append(3)) == [] and len(quarantine.expire()) == 1


def test_requests_that_a_suspect_comes_after_run_before_it() -> None:
    started: list[int] = []
    quarantine = Quarantine([3])
    for number, after in ((1, ()), (2, (1,)), (3, (2,)), (4, ())):
        for start in quarantine.admit(number, after, lambda n=number: started.append(n)):
            start()
    for number in (1, 2, 3):
        assert started[-1:] == ([number - 1] if number > 1 else []) or started[-1] == number
        starts = quarantine.expire() if number == 1 else []
        for start in starts:
            start()
        for start in quarantine.end(number) if quarantine.alone == number else ():
            start()
    assert started == [1, 2, 3, 4]


def test_a_cancelled_suspect_is_no_longer_awaited() -> None:
    started: list[int] = []
    quarantine = Quarantine([1, 2])
    (start,) = quarantine.admit(1, (), lambda: started.append(1))
    start()
    assert quarantine.admit(2, (), lambda: started.append(2)) == [] and quarantine.admit(3, (), lambda: None) == []
    assert quarantine.end(2) == [] and len(quarantine.end(1)) == 1 and started == [1]


def test_a_request_that_runs_alone_is_resubmitted_to_the_same_device_process() -> None:
    started: list[int] = []
    quarantine = Quarantine([1])
    for number in (1, 2):
        for start in quarantine.admit(1, (), lambda n=number: started.append(n)):
            start()
    assert started == [1, 2] and quarantine.alone == 1 and 1 not in quarantine


def test_requests_start_in_order_whatever_thread_starts_them() -> None:
    process: Any = object.__new__(device_process.DeviceProcess)
    process._lock, process._page, process._quarantine = threading.RLock(), StatusPage(), Quarantine()
    started: list[int] = []
    has_begun = threading.Event()

    def slow() -> None:
        has_begun.set()
        time.sleep(0.2)
        started.append(1)

    thread = threading.Thread(target=process._start, args=(lambda: [slow],))
    thread.start()
    assert has_begun.wait(HANG_SECONDS)
    process._start(lambda: [lambda: started.append(2)])
    thread.join(HANG_SECONDS)
    assert started == [1, 2]


def test_signs_of_life_do_not_block_messages_to_a_stopped_service() -> None:
    process: Any = object.__new__(device_process.DeviceProcess)
    process._scheduler, process._imports = types.SimpleNamespace(failure=None), {}
    process._reports, process._sessions = types.SimpleNamespace(put=lambda _: None), {}
    with pair() as (process._control, _):
        for _ in range(2000):
            process._check(0.0)
        for key in range(MAX_CLIENTS):
            process._control.send({"type": "left", "key": key}, wait=False)


def test_calls_of_a_client_do_not_pile_up() -> None:
    process: Any = object.__new__(device_process.DeviceProcess)
    process._lock = threading.RLock()
    with pair() as (a, _):
        session = device_process.Session(a, 1, 1, "t", True)
        session.calls = device_process.MAX_CALLS
        with pytest.raises(errors.QuotaError, match="1024 unanswered calls"):
            process._in_worker(session, 1, lambda: ({}, []))


@pytest.mark.parametrize("seed", range(100))
def test_innocent_requests_survive_whatever_ends_the_device_process(seed: int) -> None:
    """Requests in random orders; some end their device process when they are prepared, or some time after."""
    chance, world = np.random.default_rng(seed), Simulated()
    share = chance.random() / 3
    killers: set[int] = set()
    ended: set[int] = set()
    deaths = submitted = 0
    launched: set[int] = set()
    for _ in range(5000):
        if submitted < 25 and chance.random() < 0.2:
            submitted += 1
            if chance.random() < share:
                killers.add(submitted)
            world.submit(submitted, {n for n in world.unfinished if chance.random() < 0.05})
        elif submitted == 25 and not world.unfinished:
            break
        ready = [n for n in world.started if not world.unfinished[n] & world.unfinished.keys()]
        if not ready:
            continue
        chosen = ready[chance.integers(min(3, len(ready)))]
        if chosen not in launched and chance.random() < 0.5:
            world.mark_waiting(chosen) if world.quarantine.alone != chosen else None
            launched.add(chosen)
            world.launch(chosen)
        if chosen in killers and chance.random() < 0.3:
            deaths += 1
            launched.clear()
            world.launch(chosen)
            world.die()
        elif chosen in launched and chosen not in killers and chance.random() < 0.5:
            ended.add(chosen)
            world.end(chosen)
    assert not world.unfinished, "some requests wait"
    assert world.lost == killers - world.cancelled and not ended & killers
    assert ended | world.lost | world.cancelled == set(range(1, 26)) and deaths <= 2 * len(killers) + 1


# a service whose device process has a scripted scheduler

DEVICE_PROCESS = """
import os, sys, time, types
import numpy as np
from warpwell import errors
from warpwell.scheduler.events import Event
from warpwell.scheduler.handle import TaskFuture
from warpwell.scheduler.service import device_process, references
from warpwell.scheduler.task import State

device_process.BEAT_SECONDS, device_process.TIMEOUT_SECONDS = 0.05, 2.0
device_process.RESUME_SECONDS, device_process.METRICS_SECONDS = 20.0, 0.05
class Kernel:
    def __init__(self, name): self.name = name
    def __getitem__(self, shape): return self
def load(self, named):
    if named["name"] == "aborts": os._exit(9)
    if named["name"] == "absent": raise errors.SchedulerError("absent:absent is not a kernel")
    return Kernel(named["name"])
references.Kernels.load = load
nothing = types.SimpleNamespace
executor = nothing(now=lambda: 0.0, capacity=nothing(memory=1, processors=1))
core = nothing(policy=nothing(name="p"), limit=2, executor=executor,
    admission=nothing(reserve=lambda *_: None, release=lambda *_: None))
class Runner:
    def __init__(self, log): self.log, self.done = log, False
    def cancel(self, handle):
        if handle.name != "ignore_cancel": handle.request.end(handle.k, None, True)
        return True
    def state_of(self, handle): return State.RUNNING if handle.launched else State.WAITING
class Running:
    def __init__(self, scheduler, request):
        self.log, self.request = scheduler.log, request
        self.handles = []
        for k, task in enumerate(request.tasks):
            handle = TaskFuture(scheduler.runner, task.name)
            handle.request, handle.k, handle.launched = self, k, False
            self.handles.append(handle)
    def note(self, k, kind, **why):
        task = self.request.tasks[k]
        self.log.add(Event(1.0, kind, self.request.first + k, task.name, task.tenant, why))
    def begin(self, k):
        task, handle = self.request.tasks[k], self.handles[k]
        self.note(k, "arrive")
        handle.launched = True
        self.note(k, "launch")
        if task.name == "double":
            for a in task.values:
                if isinstance(a, np.ndarray) and a.flags.writeable: a *= 2
            self.end(k, None)
        elif task.name == "fails": self.end(k, errors.IndexRangeError("index 9", index=9))
        elif task.name == "kills": os._exit(9)
        elif task.name == "sticks": self.end(k, errors.StallError("it was stuck"))
    def end(self, k, error, cancelled=False):
        self.note(k, "cancel" if cancelled else "fail" if error else "end")
        rest = self.handles[k + 1:]
        self.handles[k].settle(error, cancelled)
        for other in rest:
            if (error or cancelled) and not other.done(): other.settle(None, True)
        if not error and not cancelled and rest: self.begin(k + 1)
        elif all(h.done() for h in self.handles):
            for h in self.handles: h.request = None  # a cycle would keep the arguments
class Scheduler:
    device, failure = "script", None
    def __init__(self, device, policy, *, log, **_):
        if policy == "bad": raise errors.ArgumentError("there is no policy 'bad': choose another")
        if policy == "dies": os._exit(9)
        if policy == "slow metrics": device_process.METRICS_SECONDS = 1000.0
        if policy == "slow after results": device_process.Connection.send = send
        self.log, self.runner = log, Runner(log)
    def inspect(self, function): return function(core)
    def task(self, launch, *values, tenant, **options):
        return nothing(name=launch.name, values=values, tenant=tenant, memory=0, resident_bytes=0)
    def submit_request(self, request, after):
        running = Running(self, request)
        left = [f for f in after if not f.done()]
        def ready(_=None):
            if any(f.done() and (f.cancelled() or f.exception()) for f in after):
                if not running.handles[0].done():
                    running.note(0, "cancel", rule="a task before it did not succeed")
                    for handle in running.handles: handle.settle(None, True)
            elif all(f.done() for f in after): running.begin(0)
        if left:
            for f in left: f.add_done_callback(ready)
        else: ready()
        return running.handles
plain_send = device_process.Connection.send
def send(self, header, *args, **options):
    plain_send(self, header, *args, **options)
    if args and len(args[0]): time.sleep(0.3)
device_process.to_device = lambda device, values: values.copy()
device_process.to_host = lambda values: values
device_process.device_name = lambda _: ""
device_process.Learner = lambda **_: nothing(save=lambda: None)
device_process.main(sys.argv[1:], Scheduler)
os._exit(0)
"""

Made = Callable[..., Service]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Made]:
    """Make services that end with the test; where they leave a process or a thread behind, the test fails."""
    script = tmp_path / "device_process.py"
    script.write_text(DEVICE_PROCESS)
    made: list[Service] = []
    before = set(threading.enumerate())

    def start(**options: Any) -> Service:
        path = options.pop("path", tmp_path / "run" / "s.sock")
        hello_seconds = options.pop("hello_seconds", HANG_SECONDS)
        service = Service(path, **{"policy": "p", "device": "cpu", **options})
        service.command, service.silence_seconds = (sys.executable, "-P", str(script)), 60.0
        service.hello_seconds = hello_seconds
        made.append(service)
        return service.start(HANG_SECONDS)

    yield start
    for service in made:
        service.close()
        assert service.process is None or service.process.poll() is not None
    assert not any(service.path.is_socket() for service in made)
    until(lambda: not set(threading.enumerate()) - before)


def pid_of(client: Client) -> int:
    return int(client.status()["owner_pid"])


def opened(service: Service) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(os.fspath(service.path))
    return sock


def greeted(service: Service, **fields: Any) -> Connection:
    """Return a connection of a client that the test writes itself, after its hello."""
    connection = Connection(opened(service), "the service")
    connection.send({"type": "hello", "version": messages.VERSION, **fields})
    with answer(connection) as message:
        assert message.kind == "hello", message.header
    return connection


def answer(connection: Connection) -> Message:
    """Return the next message but "starting", sent once a second until the service knows that the client has joined."""
    while (message := connection.receive()).kind == "starting":
        pass
    return message


def test_results_come_into_the_callers_arrays(make: Made) -> None:
    service = make()
    mode = service.path.stat().st_mode
    assert mode & 0o777 == 0o600 and service.path.parent.stat().st_mode & 0o777 == 0o700
    with connect(service.path) as client:
        assert client.tenant == "default" and client.properties["device"] == "script"
        x, y, keep = np.arange(8), np.arange(4.0)[::2], np.arange(3)
        keep.flags.writeable = False
        handle = client.submit(double[8], x, y, keep)
        assert handle.result(HANG_SECONDS) is None and handle.done() and handle.state.value == "done"
        assert x.tolist() == [0, 2, 4, 6, 8, 10, 12, 14] and y.tolist() == [0, 4] and keep.tolist() == [0, 1, 2]
        large = np.arange(2_000_000)  # mapped
        client.submit_many([(double[8], large), (double[8], large)]).result(HANG_SECONDS)
        assert np.array_equal(large, 4 * np.arange(2_000_000))
        with pytest.raises(errors.IndexRangeError, match="index 9") as caught:
            client.submit(fails[8], x).result(HANG_SECONDS)
        assert caught.value.index == 9
        device = client.to_device(np.arange(3))
        assert device.numpy().tolist() == [0, 1, 2]
        device.free()
        with pytest.raises(errors.ArgumentError, match="it was freed"):
            device.numpy()
        assert 'warpwell_launches_total{policy="p",tenant="default"} 4' in client.metrics()
        assert [e.kind for e in client.log()] == ["arrive", "launch", "end"] * 3 + ["arrive", "launch", "fail"]
        assert [e.task for e in client.log()] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
        status = client.status()
        assert status["held_bytes"] == 0 == status["requests"]


def test_cancelling_and_order(make: Made) -> None:
    service = make()
    x, y = np.zeros(8), np.zeros(8)
    with connect(service.path) as client:
        waiting = client.submit(wait_forever[8], x)
        until(waiting.running)
        with pytest.raises(FutureTimeout):
            waiting.result(0.05)
        delayed = client.submit(double[8], np.zeros(8), after=waiting)
        free = client.submit(double[8], y)
        assert client.submit(double[8], y, after=[free]).result(HANG_SECONDS) is None
        assert delayed.state.value == "waiting" and not delayed.done()
        assert waiting.cancel() and not free.cancel()
        for handle in (waiting, delayed):
            with pytest.raises(CancelledError):
                handle.result(HANG_SECONDS)
        rules = [e.why.get("rule") for e in client.log() if e.kind == "cancel"]
        assert rules == [None, "a task before it did not succeed"]
        failed = client.submit(fails[8], x)
        assert failed.exception(HANG_SECONDS) is not None
        for before in (waiting, [waiting], failed):  # A request after these is cancelled.
            with pytest.raises(CancelledError):
                client.submit(double[8], x, after=before).result(HANG_SECONDS)
        failing = client.submit(fails[8], x)
        for before in (failed, failing):
            with pytest.raises(CancelledError, match="because task 'fails' failed") as caught:
                client.submit(double[8], np.ones(8), after=before).result(HANG_SECONDS)
            assert caught.value.__cause__ is before.exception()
        for odd in (failed, "handle", 3):
            with connect(service.path) as other_client, pytest.raises((errors.ArgumentError, TypeError)):
                other_client.submit(double[8], x, after=odd)


def test_requests_with_the_same_array_run_in_order(make: Made) -> None:
    x, y = np.ones(8), np.ones(8)
    with connect(make().path) as client:
        handles = [client.submit(double[8], array) for _ in range(5) for array in (x, x[2:], y)]
        for handle in handles:
            handle.result(HANG_SECONDS)
        assert x.tolist() == [32.0] * 2 + [1024.0] * 6 and y.tolist() == [32.0] * 8
        waiting = client.submit(wait_forever[8], x)
        later: list[Any] = []
        thread = threading.Thread(target=lambda: later.append(client.submit(double[4], x[4:])))
        thread.start()
        assert client.submit(double[8], y).result(HANG_SECONDS) is None and not later
        assert waiting.cancel()
        thread.join(HANG_SECONDS)
        later[0].result(HANG_SECONDS)
        assert x[3:5].tolist() == [1024.0, 2048.0]
        with pytest.raises(errors.IndexRangeError):
            client.submit(fails[8], x).result(HANG_SECONDS)
        until(lambda: not client._writers)


def test_requests_that_read_the_same_array_run_together(make: Made) -> None:
    with connect(make().path) as client:
        x = np.ones(8)
        handles = [client.submit(copies[8], x, np.zeros(8)) for _ in range(3)]
        until(lambda: all(handle.running() for handle in handles))
        assert all(handle.cancel() for handle in handles)


def test_an_interrupted_submission_leaves_its_array_free(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.ones(4)

    def interrupted(call: Any, timeout: float | None = None) -> Any:
        raise KeyboardInterrupt

    with connect(make().path) as client:
        with monkeypatch.context() as patch:
            patch.setattr(client_module.PendingCall, "result", interrupted)
            with pytest.raises(KeyboardInterrupt):
                client.submit(ignore_cancel[4], x)
        assert client.submit(double[4], x).result(HANG_SECONDS) is None


def test_the_quota_of_a_request_is_free_when_its_result_arrives(make: Made) -> None:
    with connect(make(max_held=10_000, policy="slow after results").path) as client:
        x = np.ones(1000)
        on_device = client.to_device(np.ones(200))
        for _ in range(3):
            assert client.submit(double[1000], x).result(HANG_SECONDS) is None
        for _ in range(6):
            assert on_device.numpy().size == 200
        assert x[0] == 8


def test_a_closed_socket_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Closed(socket.socket):
        def connect(self, _: Any) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(client_module.socket, "socket", Closed)
    with pytest.raises(errors.ServiceError, match="the socket or its folder allows only its user, or a group without"):
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
            assert len(service._clients) == 1
            program.kill()
            until(lambda: not service._clients)
            os.kill(child, 0)  # it lives
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_handle_of_a_service_is_no_use_to_a_forked_child(make: Made) -> None:
    with connect(make().path) as client:
        waiting = client.submit(wait_forever[8], np.zeros(8))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads: it is what is tested
            child = os.fork()
        if child == 0:
            code = 1
            signal.alarm(10)
            try:
                waiting.result(HANG_SECONDS)
            except errors.ForkError:
                client._lock.acquire()  # A thread of the parent may have held it.
                client.close()  # as the end of a `with` block does
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert client.submit(double[8], np.ones(8)).result(HANG_SECONDS) is None  # the connection lives
        with pytest.raises(errors.ArgumentError, match="timeout"):
            waiting.result(float("nan"))
        with pytest.raises(errors.ArgumentError, match="give handles"):
            client.submit(double[8], np.ones(8), after=3)
        assert waiting.cancel()


def test_what_is_in_flight_when_the_device_process_dies(make: Made) -> None:
    service = make()
    x, y = np.arange(4), np.arange(4)
    with connect(service.path) as client, connect(service.path, tenant="other") as other_client:
        device = client.to_device(np.arange(3))
        first = pid_of(client)
        uses = client.submit(wait_forever[4], device)
        until(uses.running)
        killer = other_client.submit(kills[4], y)
        with pytest.raises(errors.TaskLostError, match=r"because of task 'kills': it exited with status 9"):
            killer.result(HANG_SECONDS)  # It ran twice, the second time alone.
        with pytest.raises(errors.TaskLostError, match="to_device"):
            uses.result(HANG_SECONDS)
        for use in (device.numpy, lambda: client.submit(double[4], device)):
            with pytest.raises(errors.TaskLostError, match="to_device"):
                use()
        device.free()
        innocent = client.submit(wait_forever[4], x)
        assert client.submit(double[4], y).result(HANG_SECONDS) is None and y.tolist() == [0, 2, 4, 6]
        assert client.status()["owner_restarts"] == 2 and pid_of(client) != first
        assert [(e.kind, e.name) for e in other_client.log() if e.kind == "lost"] == [("lost", "kills")]
        stuck = other_client.submit(sticks[4], x)
        with pytest.raises(errors.StallError, match="it was stuck"):
            stuck.result(HANG_SECONDS)
        until(innocent.running)
        assert client.status()["owner_restarts"] == 3  # An innocent request does not run alone if the culprit is known.
        assert innocent.cancel()
        with pytest.raises(errors.TaskLostError, match=r"because of task 'aborts': it exited with status 9"):
            other_client.submit(aborts[4], np.zeros(4)).result(HANG_SECONDS)


def test_results_are_not_repeated_and_order_is_kept_after_a_death(make: Made) -> None:
    service = make()
    x, y, z = np.ones(4), np.ones(4), np.ones(4)
    with connect(service.path) as client:
        done = client.submit(double[4], x)
        done.result(HANG_SECONDS)
        blocker = client.submit(wait_forever[4], np.zeros(4))
        behind = client.submit(double[4], y, after=[blocker, done])
        cancelled = client.submit(ignore_cancel[4], np.zeros(4))
        until(lambda: cancelled.running() and blocker.running())
        assert cancelled.cancel() and not cancelled.done()
        os.kill(pid_of(client), signal.SIGKILL)
        with pytest.raises(CancelledError):  # cancel() of this task had returned True.
            cancelled.result(HANG_SECONDS)
        until(blocker.running)
        assert (x == 2).all() and behind.state.value == "waiting"
        free = client.submit(double[4], z)
        time.sleep(0.2)
        assert not free.done()  # The suspect runs alone.
        assert blocker.cancel() and free.result(HANG_SECONDS) is None
        with pytest.raises(CancelledError):
            behind.result(HANG_SECONDS)
        assert (z == 2).all() and (y == 1).all()
        numbers = [e.task for e in client.log() if e.kind == "launch"]
        assert min(numbers) >= 4  # Numbers of tasks are not used twice.


def test_many_requests_survive_a_death(make: Made) -> None:
    service = make()
    arrays = [np.full(3, k) for k in range(150)]
    with connect(service.path) as client, connect(service.path, tenant="watcher") as watcher:
        gate = client.submit(wait_forever[1], np.zeros(1))
        handles = [client.submit(double[3], array, after=gate) for array in arrays[::3]]
        until(gate.running)
        os.kill(pid_of(watcher), signal.SIGKILL)
        free = [client.submit(double[3], array) for array in arrays[1::3]]
        assert gate.cancel()
        for handle in free:
            handle.result(HANG_SECONDS)
        for handle in handles:
            with pytest.raises(CancelledError):
                handle.result(HANG_SECONDS)
        assert all((a == (2 * k if k % 3 == 1 else k)).all() for k, a in enumerate(arrays))
        assert client.status()["owner_restarts"] == 1


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


def talk(service: Service, *sent: bytes) -> str:
    """Send bytes as a client would; return why the service or the device process refuses them."""
    connection = Connection(opened(service), "the service")
    with contextlib.closing(connection):
        for data in sent:
            connection.sock.send(data)
        while True:
            with connection.receive() as got:
                if got.kind == "refused":
                    return str(got.header["message"])


HELLO = json.dumps({"type": "hello", "version": messages.VERSION}).encode()


def test_invalid_clients_are_refused_and_others_served(make: Made) -> None:
    service = make(max_message=1 << 20)
    with connect(service.path) as client:
        x = np.arange(4)
        newer = json.dumps({"type": "hello", "version": messages.VERSION + 1, "whatever": [1]}).encode()
        assert f"your program has version {messages.VERSION + 1}" in talk(service, newer)
        assert "'version' of a message is missing" in talk(service, b'{"type": "hello"}')
        assert "'submit' instead of 'hello'" in talk(service, b'{"type": "submit"}')
        assert "more than 65536 bytes" in talk(service, b"x" * 70_000)
        assert "not JSON" in talk(service, b"\0" * 64)
        patience, service.hello_seconds = service.hello_seconds, 0.5
        assert "did not send 'hello' within 0.5 s" in talk(service)
        service.hello_seconds = patience
        assert "more than 65536 bytes" in talk(service, HELLO, b"x" * 70_000)
        assert "more than 1048576 bytes" in talk(service, HELLO, layout(["|u1", [1 << 30]]))
        assert "not a message of this protocol" in talk(service, HELLO, b'{"type": "shutdown", "call": 1}')
        assert "'call' of a message is missing" in talk(service, HELLO, b'{"type": "status"}')
        for call in (0, -1, 1 << 32):
            assert "not a message" in talk(service, HELLO, json.dumps({"type": "status", "call": call}).encode())
        assert client.submit(double[4], x).result(HANG_SECONDS) is None and x.tolist() == [0, 2, 4, 6]
        with pytest.raises(errors.ServiceError, match="--max-message"):
            client.submit(double[4], np.zeros(1 << 20))
        # The request that was interrupted was not sent.
        assert client.submit(double[4], x).result(HANG_SECONDS) is None
        assert client.status()["owner_restarts"] == 0


def test_invalid_requests_fail_alone(make: Made) -> None:
    service = make()
    named = {"path": "/k.py", "name": "double", "sha256": 64 * "0"}
    good: dict[str, Any] = {"kernel": named, "shape": [1], "arguments": [["value", 1]]}
    owner = service.properties["owner_pid"]
    connection = greeted(service)
    connection.send({"type": "status", "call": 1})
    answer(connection)
    before = open_descriptors(owner)
    at_once: list[dict[str, Any]] = [
        {"tasks": []},
        {"tasks": [good] * 257},
        {"tasks": [7]},
        {"tasks": [{**good, "kernel": {"module": "os;x", "name": "a", "sha256": ""}}]},
        {"tasks": [good], "arrays": [["|u1", [10]]]},
    ]
    later: list[dict[str, Any]] = [
        {"tasks": [{**good, "shape": [0]}]},
        {"tasks": [{**good, "arguments": [["array", 0]]}]},
        {"tasks": [{**good, "arguments": [["buffer", 7]]}]},
        {"tasks": [good], "size": {"a": "b"}},
        {"tasks": [good], "name": 201 * "a"},
        {"tasks": [good], "profile": {"kind": "neither"}},
        {"tasks": [{**good, "kernel": {**named, "name": "absent"}}]},
    ]
    for number, fields in enumerate([*at_once, *later], 2):
        connection.send({"type": "submit", "call": number, **fields})
        with answer(connection) as reply:
            assert reply.header["call"] == number and ("error" in reply.header) == (number < 2 + len(at_once))
        if number >= 2 + len(at_once):
            with answer(connection) as ended:
                assert ended.kind == "ended" and ended.header["request"] == number and "error" in ended.header
    connection.send({"type": "submit", "call": 99, "tasks": [good]})
    kinds = [answer(connection).kind for _ in range(2)]
    assert kinds == ["reply", "ended"]
    until_closed(before, owner)
    connection.close()
    with connect(service.path) as client:
        status = client.status()
        assert status["owner_restarts"] == 0 == status["held_bytes"] and status["requests"] == 0


def test_a_slow_reader_is_dropped_and_delays_no_one(make: Made) -> None:
    service = make()
    connection = greeted(service)
    x = np.ones(4)
    with connect(service.path, tenant="other") as other_client:
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            for call in range(1, 1_000_000):
                try:
                    connection.send({"type": "metrics", "call": call}, wait=False)
                except BlockingIOError:
                    assert other_client.submit(double[4], x).result(HANG_SECONDS) is None
        until(lambda: other_client.status()["clients"] == 1)
        assert other_client.status()["held_bytes"] == 0
    connection.close()


def test_a_tenant_may_hold_a_maximum(make: Made) -> None:
    service = make(max_held=10_000)
    with connect(service.path, tenant="a") as first_client, connect(service.path, tenant="a") as two:
        handle = first_client.submit(wait_forever[1], np.zeros(1000))
        for client in (first_client, two):
            with pytest.raises(errors.QuotaError, match="tenant 'a' has 8000 bytes"):
                client.submit(wait_forever[1], np.zeros(1000))
            with pytest.raises(errors.QuotaError):
                client.to_device(np.zeros(1000))
        with connect(service.path, tenant="b") as other_client:
            assert other_client.submit(double[1], np.zeros(1000)).result(HANG_SECONDS) is None
            on_device = other_client.to_device(np.zeros(1000))
            with pytest.raises(errors.QuotaError, match="tenant 'b' has 8000 bytes"):
                on_device.numpy()
        assert handle.cancel()
        until(lambda: first_client.status()["held_bytes"] == 0)
        first_client.to_device(np.zeros(1000))
        with pytest.raises(errors.ArgumentError, match="for tenant 'a'"):
            first_client.submit(double[1], np.zeros(1), tenant="b")


def test_a_client_that_connects_again_has_what_was_not_freed(make: Made) -> None:
    service = make(max_held=10_000)
    with connect(service.path, tenant="b") as other_client:
        with connect(service.path, tenant="a") as first_client:
            # The task does not end when it is cancelled.
            handle = first_client.submit(ignore_cancel[1], np.zeros(1000))
            until(lambda: handle.state.value == "running")
            first_client.close(cancel=True)
        until(lambda: other_client.status()["requests"] == 0)
        assert other_client.status()["held_bytes"] == 8000
        with connect(service.path, tenant="a") as again:
            with pytest.raises(errors.QuotaError, match="tenant 'a' has 8000 bytes"):
                again.submit(double[1], np.zeros(1000))
            os.kill(pid_of(again), signal.SIGKILL)
            assert again.submit(double[1], np.zeros(1000)).result(HANG_SECONDS) is None
            assert other_client.status()["held_bytes"] == 0


@pytest.mark.parametrize("rounds", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_nothing_is_held_for_clients_that_are_gone(make: Made, rounds: int) -> None:
    """After random acts of clients, and deaths of device processes, the service holds nothing for any client."""
    service = make(max_held=600_000)

    def client(number: int) -> None:
        chance = np.random.default_rng((rounds, number))
        for _ in range(rounds):
            on_device: list[Any] = []
            handles: list[Any] = []
            with (
                contextlib.suppress(errors.WarpwellError),
                connect(service.path, tenant="ab"[number % 2]) as connection,
            ):

                def random_array() -> NDArray[Any]:
                    return np.zeros(int(chance.integers(1, 30_000)))

                acts: list[Callable[[], Any]] = [
                    lambda: on_device.append(connection.to_device(random_array())),
                    lambda: on_device.pop().free(),
                    lambda: on_device[-1].numpy(),
                    lambda: handles.append(connection.submit(wait_forever[4], random_array())),
                    lambda: handles.append(connection.submit(double[4], on_device[-1])),
                    lambda: handles.pop().cancel(),
                    lambda: connection.submit_many([(double[4], random_array())] * 3).result(HANG_SECONDS),
                    lambda: connection.log(),
                    lambda: connection.submit(kills[4], random_array()) if chance.random() < 0.1 else None,
                ]
                for _ in range(12):
                    with contextlib.suppress(errors.WarpwellError, CancelledError, IndexError, FutureTimeout):
                        acts[chance.integers(len(acts))]()
                connection.close(cancel=True)

    threads = [threading.Thread(target=client, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
        assert not thread.is_alive()
    with connect(service.path) as last:
        until(lambda: (status := last.status())["held_bytes"] == 0 == status["requests"])


def pretend(monkeypatch: pytest.MonkeyPatch, uid: int) -> None:
    """Make the next clients processes of another user for the service."""
    monkeypatch.setattr(service_module, "socket_peer", lambda sock: (1, uid))


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
        assert own.submit(double[4], x).result(HANG_SECONDS) is None  # The user of the service may launch anything.
        pretend(monkeypatch, foreign)
        with pytest.raises(errors.ServiceError, match="is tenant 'guest', not 'mine': omit tenant="):
            connect(service.path, tenant="mine")
        with connect(service.path) as guest:
            assert guest.tenant == "guest"
            with pytest.raises(
                errors.ServiceError, match=r"may not be launched .* only kernels of warpwell\.scheduler may"
            ):
                guest.submit(double[4], x)
            named = {"module": "warpwell.scheduler.x", "name": "double", "sha256": ""}
            monkeypatch.setattr(references, "reference", lambda _: named)
            with pytest.raises(errors.ServiceError, match=r"that module alone; --allow 'warpwell\.scheduler\.\*'"):
                guest.submit(double[4], x)
            named["module"] = "warpwell.scheduler"
            assert guest.submit(double[4], x).result(HANG_SECONDS) is None
            # A guest sees only events of its own tenant.
            assert {e.tenant for e in guest.log()} == {"guest"} and "mine" not in guest.metrics()
            assert {e.tenant for e in own.log()} == {"guest", "mine"} and 'tenant="mine"' in own.metrics()
        pretend(monkeypatch, foreign + 1)
        with pytest.raises(errors.ServiceError, match=f"user {foreign + 1} is not a tenant"):
            connect(service.path)


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
    with pytest.raises(errors.ArgumentError, match="users are tenants x, which have no setting in tenants="):
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
    handle = client.submit(wait_forever[4], np.zeros(4))
    service.close()
    with pytest.raises(errors.ServiceError, match="was stopped"):
        handle.result(HANG_SECONDS)
    for call in (client.metrics, client.status, lambda: client.submit(double[4], np.zeros(4))):
        with pytest.raises(errors.ServiceError):
            call()
    client.close()
    with pytest.raises(errors.ServiceError, match="no scheduler service"):
        connect(service.path)


def answers(path: Path, serve: Callable[[Connection], None]) -> tuple[socket.socket, threading.Thread]:
    """Listen as a service that serves one client by a function."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(os.fspath(path))
    listener.listen(4)

    def accept() -> None:
        connection = Connection(listener.accept()[0], "the client")
        with contextlib.closing(connection), contextlib.suppress(EOFError, OSError):
            serve(connection)

    thread = threading.Thread(target=accept)
    thread.start()
    return listener, thread


GREETING = {
    "type": "hello",
    "version": messages.VERSION,
    "tenant": "t",
    "properties": {},
    "session": 1,
    "max_message": 1 << 20,
}


def test_a_service_that_is_silent_is_noticed(tmp_path: Path) -> None:
    """A server that greets and then sleeps: every wait ends."""
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as unused:
        unused.bind(os.fspath(path))
        with pytest.raises(errors.ServiceError, match="no scheduler service"):
            connect(path)
    path.unlink()
    over = threading.Event()

    def serve(connection: Connection) -> None:
        connection.receive()
        connection.send(GREETING)
        connection.receive()
        connection.send({"type": "reply", "call": 1})
        over.wait(HANG_SECONDS)

    listener, thread = answers(path, serve)
    with listener:
        client = connect(path, timeout=2.0)
        handle = client.submit(wait_forever[4], np.zeros(4))
        with pytest.raises(errors.ServiceError, match="did not send 'hello' within 2 s"):
            handle.result(HANG_SECONDS)
        with pytest.raises(errors.ServiceError):
            client.status()
        client.close()
        over.set()
        thread.join(HANG_SECONDS)


def test_requests_that_must_not_run_again_are_not_sent_again(tmp_path: Path) -> None:
    """The device process dies when a request has failed, and before the end of the requests after it is sent."""
    sent: list[dict[str, Any]] = []

    def serve(connection: Connection) -> None:
        connection.receive()
        connection.send(GREETING)
        for number in (1, 2, 3, 4):
            sent.append(connection.receive().header)
            connection.send({"type": "reply", "call": number})
        error = messages.error_fields(errors.KernelError("wrong"))
        connection.send({"type": "ended", "request": 1, "error": error})
        connection.send({"type": "ended", "request": 2, "changed": []})

    def serve_again(connection: Connection) -> None:
        assert connection.receive().header["session"] == 1
        connection.send(GREETING)
        while sent[-1]["type"] != "resumed":
            sent.append(connection.receive().header)
        connection.send({"type": "ended", "request": 4, "cancelled": True})
        with contextlib.closing(connection), contextlib.suppress(EOFError):
            connection.receive()

    listener, first = answers(tmp_path / "s.sock", serve)
    with listener:
        client = connect(tmp_path / "s.sock", timeout=HANG_SECONDS)
        first_handle = client.submit(wait_forever[4], np.zeros(4))
        two = client.submit(wait_forever[4], np.zeros(4))
        three = client.submit(wait_forever[4], np.zeros(4), after=first_handle)
        four = client.submit(wait_forever[4], np.zeros(4), after=two)
        assert isinstance(first_handle.exception(HANG_SECONDS), errors.KernelError)
        first.join(HANG_SECONDS)
        second = threading.Thread(target=lambda: serve_again(Connection(listener.accept()[0], "the client")))
        second.start()
        for handle in (three, four):
            with pytest.raises(CancelledError):
                handle.result(HANG_SECONDS)
        assert [(m["type"], m.get("call")) for m in sent[4:]] == [("submit", 4), ("resumed", 5)]
        client.close()
        second.join(HANG_SECONDS)


def test_a_full_backlog_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(os.fspath(path))
        listener.listen(0)
        crowd = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        crowd.connect(os.fspath(path))
        with pytest.raises(errors.ServiceError, match="does not accept connections: is it stopped"):
            connect(path, timeout=0.3)


@pytest.mark.parametrize(
    ("hello", "refusal"),
    [({"version": 99}, "the service has version 99"), ({"version": messages.VERSION}, "field 'tenant'")],
)
def test_a_client_refuses_services_that_it_does_not_understand(
    tmp_path: Path, hello: dict[str, Any], refusal: str
) -> None:
    closed: list[bool] = []

    def serve(connection: Connection) -> None:
        connection.receive()
        connection.send({"type": "hello", **hello})
        try:
            connection.receive()
        except EOFError:
            closed.append(True)

    listener, thread = answers(tmp_path / "s.sock", serve)
    with listener, pytest.raises(errors.ServiceError, match=refusal) as caught:
        connect(tmp_path / "s.sock")
    thread.join(HANG_SECONDS)
    assert closed, caught  # the error still exists, and refers to the client


def test_a_log_on_a_full_disk_has_whole_lines_and_reports_that_some_are_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(io.FileIO):
        room = 100

        def write(self, text: Any) -> int:
            self.room, written = max(0, self.room - len(text)), min(self.room, len(text))
            if not written:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(text[:written])

    process: Any = object.__new__(device_process.DeviceProcess)
    process._unwritable = set()
    with Full(tmp_path / "log", "ab") as process._file:
        for task in range(4):
            process._append({"task": task, "text": "x" * 50})
        assert caplog.text.count(f"events are missing from {tmp_path / 'log'}: No space left on device; `sched") == 1
        process._file.room = 1000
        process._append({"task": 4})
    assert [json.loads(line)["task"] for line in (tmp_path / "log").read_text().splitlines()] == [0, 4]


def test_metrics_that_cannot_be_written(make: Made, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """At the start they end the service; later they are reported once, and it continues."""
    path = tmp_path / "folder" / "m.prom"
    with pytest.raises(errors.ServiceError, match=r"does not start: .*No such file or directory"):
        make(metrics=path)
    path.parent.mkdir()
    with connect(make(metrics=path).path) as client:
        assert "warpwell_clients 0" in path.read_text()
        client.submit(double[4], np.zeros(4)).result(HANG_SECONDS)
        until(lambda: "warpwell_launches_total" in path.read_text())
        for away in (tmp_path / "away", tmp_path / "away again"):
            path.parent.rename(away)
            until(lambda: f"no metrics are written to {path}: No such file" in capfd.readouterr().err)
            time.sleep(0.5)  # ten intervals
            assert "no metrics" not in capfd.readouterr().err
            assert client.submit(double[4], np.zeros(4)).result(HANG_SECONDS) is None
            path.parent.mkdir()
            until(path.exists)


def test_the_last_metrics_are_written_when_a_service_stops(make: Made, tmp_path: Path) -> None:
    service = make(metrics=tmp_path / "m.prom", policy="slow metrics")
    with connect(service.path) as client:
        client.submit(double[4], np.zeros(4)).result(HANG_SECONDS)
        assert "warpwell_launches_total" not in (tmp_path / "m.prom").read_text()
    service.close()
    assert "warpwell_launches_total" in (tmp_path / "m.prom").read_text()
    assert not list(tmp_path.glob(".*"))


def test_places_where_a_service_does_not_listen(make: Made, tmp_path: Path) -> None:
    service = make()
    with pytest.raises(errors.ServiceError, match=r"already listens at"):
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
        with pytest.raises(errors.ServiceError, match=f"closed to writes of other users: .*there. {step}"):
            make(path=shared / "s.sock")
    with pytest.raises(errors.ServiceError, match="chmod 750 it, or name"):
        shared.chmod(0o777)
        make(path=shared / "s.sock", group=str(os.getgid()))
    for mode in (0o700, 0o701):  # The permissions of others do not apply to members of the group.
        shared.chmod(mode)
        with pytest.raises(errors.ServiceError, match=f"closed to the group of this service: `chgrp {os.getgid()}`"):
            make(path=shared / "s.sock", group=str(os.getgid()))
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with pytest.raises(errors.ServiceError, match="closed to writes"):
        make(path=tmp_path / "link" / "s.sock")
    with pytest.raises(errors.ArgumentError, match="too long for a socket"):
        make(path=tmp_path / ("x" * 200))
    with pytest.raises(errors.ArgumentError, match="unknown group 'no-such-name'"):
        make(group="no-such-name")
    with pytest.raises(errors.ArgumentError, match="unknown user 'no-such-name'"):
        make(users={"no-such-name": "t"})


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


def test_device_processes_that_do_not_start(make: Made) -> None:
    with pytest.raises(errors.ServiceError, match="there is no policy 'bad': choose another"):
        make(policy="bad")
    with pytest.raises(errors.ServiceError, match="does not start: it exited with status 9"):
        make(policy="dies")


def test_where_a_service_of_this_user_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WARPWELL_SOCKET", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    assert address.default_path() == tmp_path / "warpwell" / "scheduler.sock"
    tmp_path.chmod(0o755)  # other users can read the folder, so it is not used as a runtime folder
    assert address.default_path().parent.name == f"warpwell-{os.getuid()}"
    monkeypatch.setenv("WARPWELL_SOCKET", "/a/b")
    assert address.default_path() == Path("/a/b")


def test_callbacks_and_forks(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    service = make()
    with connect(service.path) as client:
        reports: list[str] = []

        def callback(handle: Any) -> None:
            try:
                client.status()
            except errors.SchedulerError as error:
                reports.append(str(error))
            reports.append(handle.state.value)

        handle = client.submit(wait_forever[4], np.zeros(4))
        handle.add_done_callback(callback)  # before its end, so that the thread that receives calls it
        assert handle.cancel()
        until(lambda: len(reports) == 2)
        assert "must not wait" in reports[0] and reports[1] == "cancelled"
        monkeypatch.setattr(os, "getpid", lambda: 1)
        with pytest.raises(errors.ForkError):
            client.submit(double[4], np.zeros(4))
        monkeypatch.undo()
    with pytest.raises(errors.ServiceError, match="this connection is closed"):
        client.submit(double[4], np.zeros(4))
    monkeypatch.setattr(references, "in_device_process", True)
    with pytest.raises(errors.ServiceError, match="if __name__ == '__main__'"):
        connect(service.path)


def test_connections_without_a_hello_keep_no_one_out(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    service = make(group=str(os.getgid()), trust_group=True, hello_seconds=60.0)

    def silent() -> int:
        return sum(not client.tenant for client in list(service._clients.values()))

    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(opened(service))]
        until(lambda: silent() == 1)
        pretend(monkeypatch, os.getuid() + 1)  # The crowd of another user closes only connections of this user.
        for _ in range(2 * MAX_CLIENTS + 10):
            socks.append(stack.enter_context(opened(service)))
        with connect(service.path) as client:
            assert client.submit(double[4], np.zeros(4)).result(HANG_SECONDS) is None
        for sock in socks[1:60]:
            assert sock.recv(1) == b""
        assert silent() <= 1 + MAX_SILENT
        for sock in (socks[-1], socks[0]):
            sock.send(HELLO)
            while b'"starting"' in (received := sock.recv(1 << 16)):  # until the device process has the connection
                pass
            assert b'"hello"' in received
    with connect(service.path) as client:
        assert client.submit(double[4], np.zeros(4)).result(HANG_SECONDS) is None


def test_a_late_hello_is_refused(make: Made) -> None:
    service = make(hello_seconds=0.3)
    with opened(service) as silent_socket:
        assert b"did not send 'hello' within 0.3 s" in silent_socket.recv(1 << 16) and silent_socket.recv(1) == b""


def test_clients_of_one_tenant_leave_room_for_others(make: Made) -> None:
    service = make()
    with contextlib.ExitStack() as stack:
        for tenant in ("a", "b"):
            for _ in range(MAX_CLIENTS):
                stack.enter_context(contextlib.closing(greeted(service, tenant=tenant)))
            if tenant == "a":
                with pytest.raises(errors.ServiceError, match="tenant 'a' has 64 connections"):
                    connect(service.path, tenant="a")
        with pytest.raises(errors.ServiceError, match=rf"user {os.getuid()} has 128 connections"):
            connect(service.path, tenant="c")
    until(lambda: not service._clients)
    with connect(service.path, tenant="a") as client:
        assert client.submit(double[4], np.zeros(4)).result(HANG_SECONDS) is None


def test_a_session_is_continued_only_by_its_user_and_tenant(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    service = make(group=str(os.getgid()), trust_group=True)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(contextlib.closing(greeted(service, tenant="a")))
        (client,) = service._clients.values()
        stack.enter_context(contextlib.closing(greeted(service, tenant="b", session=client.session)))
        pretend(monkeypatch, os.getuid() + 1)
        stack.enter_context(contextlib.closing(greeted(service, session=client.session)))
        sessions = [c.session for c in service._clients.values()]
        assert len(set(sessions)) == 3
        first.send({"type": "status", "call": 1})
        assert answer(first).header["status"]["clients"] == 3
        monkeypatch.undo()
        stack.enter_context(contextlib.closing(greeted(service, tenant="a", session=client.session)))
        assert [c.session for c in service._clients.values() if c.tenant == "a"] == [client.session]
        with pytest.raises(EOFError):
            answer(first)


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
        on_device = client.to_device(np.arange(3))
        assert (
            np.array_equal(np.asarray(on_device), [0, 1, 2]) and np.asarray(on_device, np.float32).dtype == np.float32
        )
        with pytest.raises(ValueError, match="copy"):
            np.array(on_device, copy=False)


def test_the_socket_is_known_as_unfinished_until_it_is_removed(make: Made, tmp_path: Path) -> None:
    path = tmp_path / "run" / "s.sock"
    service = make(path=path)
    assert path in unfinished and path.is_socket()
    service.close()
    assert path not in unfinished and [p.name for p in path.parent.iterdir()] == ["s.sock.lock"]


def test_a_device_process_that_cannot_be_started_is_a_failed_start(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    service = make()
    popen, left = subprocess.Popen, [1]

    def start(*args: Any, **options: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return popen(*args, **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    with connect(service.path) as client:
        handle = client.submit(wait_forever[4], np.zeros(4))
        until(handle.running)
        os.kill(pid_of(client), signal.SIGKILL)
        until(lambda: not left[0] and handle.running())  # in the next device process
        assert handle.cancel()
        left[0] = 1000
        handle = client.submit(wait_forever[4], np.zeros(4))
        os.kill(pid_of(client), signal.SIGKILL)
        with pytest.raises(
            errors.ServiceError, match="failed to restart: it could not be started: Too many open files"
        ):
            handle.result(HANG_SECONDS)
    assert left[0] == 1000 - MAX_STARTS


def test_a_stopped_device_process_is_killed(make: Made) -> None:
    service = make()
    with connect(service.path, timeout=2.0) as client:
        handle, pid = client.submit(wait_forever[4], np.zeros(4)), pid_of(client)
        os.kill(pid, signal.SIGSTOP)
        patience, service.silence_seconds = service.silence_seconds, 2.0
        until(lambda: service.process is None or service.process.pid != pid)
        service.silence_seconds = patience  # a stalled machine may stop the next one, too
        assert client.status()["owner_restarts"] == 1
        until(handle.running)
        assert handle.cancel()


def test_interrupted_submissions_leave_nothing_that_runs(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    service = make()
    with connect(service.path) as client:
        result = client_module.PendingCall.result

        def interrupted(call: Any, timeout: float | None = None) -> Any:
            result(call, timeout)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(client_module.PendingCall, "result", interrupted)
            with pytest.raises(KeyboardInterrupt):
                client.submit_many([(wait_forever[4], np.zeros(4)), (double[4], np.zeros(4))])
            with pytest.raises(KeyboardInterrupt):
                client.to_device(np.zeros(1000))
        until(lambda: client.status()["requests"] == client.status()["held_bytes"] == 0)
        until(lambda: not client._calls)
        x = np.arange(4)
        assert client.submit(double[4], x).result(HANG_SECONDS) is None and x.tolist() == [0, 2, 4, 6]


def test_a_submission_may_be_interrupted_at_any_line(make: Made) -> None:
    x = np.ones(4)
    line_count, interrupted_at = 0, 1

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal line_count
        if frame.f_code.co_filename != client_module.__file__:
            return None
        # Python interrupts no thread between the body of a with statement and its end, which is a line event, too.
        if event == "line" and not linecache.getline(client_module.__file__, frame.f_lineno).lstrip().startswith(
            "with"
        ):
            line_count += 1
            if line_count == interrupted_at:
                raise KeyboardInterrupt
        return trace

    with connect(make().path) as client:
        handle = None
        while handle is None:
            line_count = 0
            sys.settrace(trace)
            try:
                handle = client.submit(wait_forever[4], x)
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)
            interrupted_at += 1
            if handle is None:
                until(lambda: not client._calls and not client._writers)
                # The reporter may end the task after the answer to a cancel.
                until(lambda: client.status()["requests"] == 0)
        assert line_count < interrupted_at > 50 and handle.cancel()


def test_an_answer_that_is_too_large_is_an_error(make: Made, tmp_path: Path) -> None:
    service = make(max_message=10_000)
    log_path = tmp_path / "log.jsonl"
    log_path.write_text("earlier\n")
    with connect(service.path) as client:
        waiting = client.submit(wait_forever[4], np.zeros(4))
        client.submit_many([(double[4], np.zeros(4)) for _ in range(100)]).result(HANG_SECONDS)
        with pytest.raises(errors.MessageSizeError, match="--max-message"):
            client.log()
        assert main(["sched", "status", "--socket", str(service.path), "--log", str(log_path)]) != 0
        assert log_path.read_text() == "earlier\n"
        assert waiting.state.value == "running" and waiting.cancel()


def test_silent_connections_are_closed_only_beyond_the_maximum(make: Made) -> None:
    service = make(hello_seconds=60.0)
    with contextlib.ExitStack() as stack:
        for number in range(1, MAX_SILENT + 4):
            stack.enter_context(opened(service))
            connect(service.path).close()  # The service has accepted both.
            until(lambda: not any(client.tenant for client in list(service._clients.values())))
            assert len(service._clients) == min(number, MAX_SILENT - 1)  # The client closed one when it connected.


def test_sessions_of_connected_clients_are_kept(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "MAX_SESSIONS", 2)
    service = make()
    with connect(service.path) as client:
        for _ in range(5):
            connect(service.path).close()
        assert client._session in service._sessions and len(service._sessions) < 6


def test_arrays_that_are_refused_are_not_counted(make: Made) -> None:
    service = make()
    with contextlib.closing(greeted(service)) as connection:
        for call, listed in enumerate(([["|u1", [10]]], [["|u1", [10]]] * 2, []), 1):
            connection.send({"type": "put", "call": call, "arrays": listed})
            with answer(connection) as reply:
                assert reply.header["call"] == call and reply.header["error"]["class"] == "ServiceError"
        connection.send({"type": "status", "call": 9})
        with answer(connection) as reply:
            assert reply.header["status"]["held_bytes"] == 0


def test_arrays_on_the_device_may_be_freed_while_suspects_run(make: Made) -> None:
    service = make()
    with connect(service.path) as client, connect(service.path) as other_client:
        suspect = other_client.submit(wait_forever[4], np.zeros(4))
        until(suspect.running)
        os.kill(pid_of(other_client), signal.SIGKILL)
        until(lambda: client.status()["owner_restarts"] == 1 and suspect.running())
        on_device = client.to_device(np.ones(4))
        handle = client.submit(double[4], on_device)
        on_device.free()
        assert not handle.done() and suspect.cancel()
        assert handle.result(HANG_SECONDS) is None
        until(lambda: client.status()["held_bytes"] == 0)


def test_a_client_connects_again_while_its_request_runs_alone(make: Made) -> None:
    service = make()
    kernel = {"path": "/k.py", "name": "ignore_cancel", "sha256": 64 * "0"}

    def submit(connection: Connection, name: str) -> None:
        tasks = [{"kernel": {**kernel, "name": name}, "shape": [1], "arguments": [["value", 1]]}]
        connection.send({"type": "submit", "call": 1, "tasks": tasks})
        with answer(connection) as reply:
            assert reply.kind == "reply" and "error" not in reply.header

    with connect(service.path, tenant="other") as other_client:
        first = greeted(service)
        (session,) = (client.session for client in service._clients.values() if client.tenant == "default")
        submit(first, "ignore_cancel")
        until(lambda: any(e.kind == "launch" for e in other_client.log()))
        os.kill(pid_of(other_client), signal.SIGKILL)
        until(lambda: other_client.status()["owner_restarts"] == 1)
        second = greeted(service, session=session)
        submit(second, "ignore_cancel")
        until(lambda: any(e.kind == "launch" for e in other_client.log()))
        third = greeted(service, session=session)  # The device process lives, and the first run does not end.
        submit(third, "double")
        third.sock.settimeout(HANG_SECONDS)
        with answer(third) as ended:
            assert ended.kind == "ended" and ended.header["changed"] == []
        assert other_client.submit(double[4], np.zeros(4)).result(HANG_SECONDS) is None
        for connection in (first, second, third):
            connection.close()


def resumed(listener: socket.socket, serve: Callable[[Connection], None]) -> threading.Thread:
    """Serve the next connection of a client by a function."""

    def accept() -> None:
        with contextlib.closing(Connection(listener.accept()[0], "the client")) as connection:
            with contextlib.suppress(EOFError, OSError):
                serve(connection)

    thread = threading.Thread(target=accept)
    thread.start()
    return thread


def greet(connection: Connection) -> None:
    connection.receive()
    connection.send(GREETING)


def test_requests_that_are_refused_when_they_are_resubmitted_end(tmp_path: Path) -> None:
    def serve(connection: Connection) -> None:
        greet(connection)
        connection.receive()
        connection.send({"type": "reply", "call": 1})

    def refuse(connection: Connection) -> None:
        greet(connection)
        assert connection.receive().kind == "submit"
        error = messages.error_fields(errors.QuotaError("the tenant has too much"))
        connection.send({"type": "reply", "call": 1, "error": error})
        connection.receive()
        connection.receive()

    listener, first = answers(tmp_path / "s.sock", serve)
    with listener, connect(tmp_path / "s.sock", timeout=HANG_SECONDS) as client:
        handle = client.submit(wait_forever[4], np.zeros(4))
        first.join(HANG_SECONDS)
        second = resumed(listener, refuse)
        with pytest.raises(errors.QuotaError, match="too much"):
            handle.result(HANG_SECONDS)
        client.close(cancel=True)
        second.join(HANG_SECONDS)


def test_an_array_that_ends_the_device_process_is_not_sent_again(tmp_path: Path) -> None:
    def die(connection: Connection) -> None:
        greet(connection)
        assert connection.receive().kind == "put"

    sent: list[str] = []

    def serve(connection: Connection) -> None:
        greet(connection)
        while True:
            sent.append(connection.receive().kind)

    listener, first = answers(tmp_path / "s.sock", die)
    with listener, connect(tmp_path / "s.sock", timeout=HANG_SECONDS) as client:
        second = threading.Thread(
            target=lambda: (first.join(HANG_SECONDS), resumed(listener, serve).join(HANG_SECONDS))
        )
        second.start()
        with pytest.raises(errors.TaskLostError, match="to_device"):
            client.to_device(np.zeros(4))
        until(lambda: sent)
        assert sent == ["resumed"]
        client.close(cancel=True)
        second.join(HANG_SECONDS)


def test_a_device_process_may_pause_while_a_client_resubmits(tmp_path: Path) -> None:
    count = 600  # More than a socket holds.

    def serve(connection: Connection) -> None:
        greet(connection)
        for number in range(1, count + 1):
            connection.receive()
            connection.send({"type": "reply", "call": number})

    def pause(connection: Connection) -> None:
        greet(connection)
        time.sleep(2.5)  # longer than the client's timeout
        while (kind := connection.receive().kind) != "resumed":
            assert kind == "submit"
        for number in range(1, count + 1):
            connection.send({"type": "ended", "request": number, "changed": []})
        connection.receive()

    listener, first = answers(tmp_path / "s.sock", serve)
    with listener, connect(tmp_path / "s.sock", timeout=2.0) as client:
        handles = [client.submit(wait_forever[4], np.zeros(4)) for _ in range(count)]
        second = resumed(listener, pause)
        first.join(HANG_SECONDS)
        for handle in handles:
            assert handle.result(HANG_SECONDS) is None
        client.close(cancel=True)
        second.join(HANG_SECONDS)


def test_a_request_that_a_callback_has_cancelled_is_not_sent_again(tmp_path: Path) -> None:
    def serve(connection: Connection) -> None:
        greet(connection)
        for number in (1, 2):
            connection.receive()
            connection.send({"type": "reply", "call": number})
        connection.receive()  # "state": the callback is there
        connection.send({"type": "ended", "request": 1, "changed": []})
        assert connection.receive().kind == "cancel"
        connection.send({"type": "reply", "call": 4, "cancelled": True})
        connection.send({"type": "reply", "call": 3, "state": "running"})

    sent: list[str] = []

    def serve_again(connection: Connection) -> None:
        greet(connection)
        while True:
            sent.append(connection.receive().kind)

    listener, first = answers(tmp_path / "s.sock", serve)
    with listener, connect(tmp_path / "s.sock", timeout=HANG_SECONDS) as client:
        first_handle, two = (client.submit(wait_forever[4], np.zeros(4)) for _ in range(2))
        first_handle.add_done_callback(lambda _: two.cancel())
        second = threading.Thread(target=lambda: (first.join(HANG_SECONDS), resumed(listener, serve_again).join()))
        second.start()
        assert two.state.value == "running"
        with pytest.raises(CancelledError):
            two.result(HANG_SECONDS)
        until(lambda: sent)
        assert sent == ["resumed"]
        client.close(cancel=True)
        second.join(HANG_SECONDS)
