"""Checks of CUDA's promises for streams that record a graph."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

from tests.harness.driver.calls import INVALID_VALUE, LEGACY, NON_BLOCKING, NOT_SUPPORTED, PER_THREAD, Cuda
from tests.harness.driver.checks import Held, read_words
from tests.harness.driver.graphs import FUNCTION, Graph

GLOBAL, THREAD, RELAXED = range(3)
IDLE, ACTIVE, INVALID = range(3)
ILLEGAL_STATE, UNSUPPORTED, INVALIDATED, MERGE, UNMATCHED, UNJOINED = 401, 900, 901, 902, 903, 904
ISOLATION, IMPLICIT, CAPTURED_EVENT, WRONG_THREAD = 905, 906, 907, 908
NO_FLAGS, EXTERNAL = ctypes.c_uint(0), ctypes.c_uint(1)


def begin(cuda: Cuda, stream: int, mode: int = GLOBAL) -> None:
    """Let a stream record."""
    cuda.cuStreamBeginCapture_v2(stream, ctypes.c_int(mode))


def end(cuda: Cuda, stream: int) -> Graph:
    """Return what was recorded."""
    graph = ctypes.c_uint64()
    cuda.cuStreamEndCapture(stream, ctypes.byref(graph))
    return Graph(cuda, graph.value)


def broken(cuda: Cuda, stream: int, code: int = INVALIDATED) -> None:
    """The capture gives no graph, for a reason; afterwards the stream can be used."""
    graph = ctypes.c_uint64(5)
    found = cuda.code("cuStreamEndCapture", stream, ctypes.byref(graph))
    assert (found, graph.value) == (code, 0), (found, graph.value)
    assert status(cuda, stream) == IDLE
    cuda.cuStreamSynchronize(stream)


def status(cuda: Cuda, stream: int) -> int:
    """Return the capture status of a stream."""
    value = ctypes.c_int(9)
    cuda.cuStreamIsCapturing(stream, ctypes.byref(value))
    return value.value


def launch(cuda: Cuda, graph: Graph, stream: int, times: int = 1) -> None:
    """Launch a graph, and wait."""
    exec_ = graph.executable()
    for _ in range(times):
        cuda.cuGraphLaunch(exec_, stream)
    cuda.cuStreamSynchronize(stream)
    cuda.cuGraphExecDestroy(exec_)


def in_another_thread(cuda: Cuda, act: Callable[[], object]) -> object:
    """Run something in another thread; return what it returns."""
    found: list[object] = []

    def work() -> None:
        cuda.use(0)
        found.append(act())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found[0]


def everything_is_recorded(cuda: Cuda) -> None:
    """Calls become nodes and do nothing until a launch, which reads what their sources hold then."""
    x, y, z = cuda.alloc(64), cuda.alloc(64), cuda.alloc(64)
    cuda.cuMemsetD32_v2(z, ctypes.c_uint(77), 16)
    address, view = cuda.pinned(64)
    pageable = ctypes.create_string_buffer(b"\x01\x00\x00\x00" * 8, 32)
    out = ctypes.create_string_buffer(64)
    stream, snapshots = cuda.stream(), []
    run = FUNCTION(lambda _: snapshots.append(bytes(out)))
    begin(cuda, stream)
    cuda.cuMemsetD32Async(x, ctypes.c_uint(5), 16, stream)
    cuda.cuMemcpyHtoDAsync_v2(x, address, 16, stream)
    cuda.cuMemcpyHtoDAsync_v2(x + 32, pageable, 32, stream)
    cuda.cuMemcpyDtoDAsync_v2(y, x, 64, stream)
    cuda.launch(0, stream, "add", y, x, 16)
    cuda.rows(cuda.end(z, 16), cuda.end(y, 16), 8, 4, stream)
    cuda.cuMemcpyDtoHAsync_v2(out, z, 64, stream)
    cuda.cuLaunchHostFunc(stream, run, None)
    assert status(cuda, stream) == ACTIVE
    graph = end(cuda, stream)
    assert status(cuda, stream) == IDLE and len(graph.nodes()) == 8
    assert len(graph.nodes("cuGraphGetRootNodes")) == 1
    cuda.cuStreamSynchronize(stream)
    assert set(read_words(cuda, z, 16)) == {77} and not snapshots
    for first, second in ((2, 3), (9, 4)):
        view.cast("I")[:4] = memoryview(bytes(16)).cast("I")
        view.cast("I")[0] = first
        pageable[0] = second
        launch(cuda, graph, stream, 2)
        want = [2 * first, 0, 77, 77, 10, 10, 77, 77, 2 * second, 2, 77, 77, 2, 2, 77, 77]
        assert read_words(cuda, z, 16) == want, read_words(cuda, z, 16)
        assert snapshots == [memoryview(bytes(memoryview((ctypes.c_uint * 16)(*want)))).tobytes()] * 2
        snapshots.clear()


def streams_fork_and_join(cuda: Cuda) -> None:
    """A stream that waits for an event of a capture records, too, until it is joined."""
    x, y = cuda.alloc(64), cuda.alloc(64)
    a, b, c, plain = (cuda.stream(NON_BLOCKING) for _ in range(4))
    forked, joined, last_event = cuda.event(), cuda.event(), cuda.event()
    begin(cuda, a)
    cuda.cuMemsetD32Async(x, ctypes.c_uint(5), 16, a)
    cuda.cuEventRecord(forked, a)
    cuda.cuStreamWaitEvent(b, forked, NO_FLAGS)
    cuda.cuStreamWaitEvent(c, forked, NO_FLAGS)
    assert [status(cuda, stream) for stream in (a, b, c, plain)] == [ACTIVE, ACTIVE, ACTIVE, IDLE]
    cuda.launch(0, b, "copy", y, x, 32)
    cuda.launch(0, c, "copy", y + 32, x, 32)
    cuda.launch(0, a, "nap", 100)
    cuda.cuEventRecord(joined, b)
    cuda.cuEventRecord(last_event, c)
    cuda.cuStreamWaitEvent(a, joined, NO_FLAGS)
    cuda.cuStreamWaitEvent(a, last_event, NO_FLAGS)
    cuda.launch(0, a, "add", y, x, 16)
    cuda.cuMemsetD32Async(y, ctypes.c_uint(1), 1, plain)  # not captured
    graph = end(cuda, a)
    nodes = graph.nodes()
    assert [status(cuda, stream) for stream in (a, b, c)] == [IDLE] * 3 and len(nodes) == 5
    assert len(graph.nodes("cuGraphNodeGetDependencies", nodes[4])) == 3
    assert len(graph.nodes("cuGraphNodeGetDependentNodes", nodes[0])) == 3
    cuda.cuStreamSynchronize(plain)
    for stream in (plain, b, a):
        cuda.cuMemsetD32Async(y, ctypes.c_uint(0), 16, stream)
        launch(cuda, graph, stream)
        assert set(read_words(cuda, y, 16)) == {10}
    graph.destroy()
    begin(cuda, a)
    cuda.cuEventRecord(forked, a)
    cuda.cuStreamWaitEvent(b, forked, NO_FLAGS)
    cuda.launch(0, b, "nap", 1)
    out = ctypes.c_uint64()
    assert cuda.code("cuStreamEndCapture", b, ctypes.byref(out)) == UNMATCHED
    broken(cuda, a, UNJOINED)
    assert status(cuda, b) == IDLE
    cuda.cuStreamSynchronize(b)


def captures_do_not_meet(cuda: Cuda) -> None:
    """A call that would join two captures, or a capture and posted work, is refused, and ends both."""
    a, b, plain = (cuda.stream(NON_BLOCKING) for _ in range(3))
    event, foreign_event = cuda.event(), cuda.event()
    begin(cuda, a, RELAXED)
    begin(cuda, b, RELAXED)
    cuda.cuEventRecord(event, a)
    assert cuda.code("cuStreamWaitEvent", b, event, NO_FLAGS) == MERGE
    assert [status(cuda, stream) for stream in (a, b)] == [INVALID] * 2
    assert cuda.code("cuMemsetD32Async", cuda.contexts[0], NO_FLAGS, 1, a) == INVALIDATED
    broken(cuda, a)
    broken(cuda, b)
    cuda.cuEventRecord(foreign_event, plain)
    begin(cuda, a)
    assert cuda.code("cuStreamWaitEvent", a, foreign_event, NO_FLAGS) == ISOLATION
    broken(cuda, a)
    begin(cuda, a)
    cuda.cuEventRecord(event, a)
    for call in ("cuEventQuery", "cuEventSynchronize"):
        assert cuda.code(call, event) == CAPTURED_EVENT
    if status(cuda, a) == ACTIVE:
        end(cuda, a).destroy()
    else:
        broken(cuda, a)
    assert cuda.code("cuEventSynchronize", event) == CAPTURED_EVENT
    assert cuda.code("cuStreamWaitEvent", plain, event, NO_FLAGS) == CAPTURED_EVENT
    cuda.cuEventRecord(event, plain)  # a record outside of captures makes it an ordinary event again
    cuda.cuEventSynchronize(event)
    cuda.cuStreamWaitEvent(a, event, NO_FLAGS)


def events_belong_to_their_last_record(cuda: Cuda) -> None:
    """An event belongs to the capture that recorded it last."""
    x, a, b = cuda.alloc(64), cuda.stream(NON_BLOCKING), cuda.stream(NON_BLOCKING)
    c, event = cuda.stream(NON_BLOCKING), cuda.event()
    for first, second in ((a, b), (b, a)):
        begin(cuda, a, RELAXED)
        begin(cuda, b, RELAXED)
        cuda.cuEventRecord(event, first)
        cuda.cuMemsetD32Async(x, ctypes.c_uint(4), 16, second)
        cuda.cuEventRecord(event, second)
        cuda.cuStreamWaitEvent(c, event, NO_FLAGS)
        cuda.launch(0, c, "fill", x, 8, 6)
        cuda.cuEventRecord(event, c)
        cuda.cuStreamWaitEvent(second, event, NO_FLAGS)
        assert len(end(cuda, first).nodes()) == 0
        launch(cuda, end(cuda, second), a)
        assert read_words(cuda, x, 16) == [6] * 8 + [4] * 8


def modes(cuda: Cuda) -> None:
    """The modes of capture and thread decide which threads' calls a capture forbids."""
    stream = cuda.stream(NON_BLOCKING)

    def allocates() -> int:
        address = ctypes.c_uint64()
        code = cuda.code("cuMemAlloc_v2", ctypes.byref(address), 64)
        return code or cuda.code("cuMemFree_v2", address)

    def relaxed() -> int:
        mode = ctypes.c_int(RELAXED)
        cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        assert mode.value == GLOBAL
        code = allocates()
        cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        return code

    want = {GLOBAL: (UNSUPPORTED, UNSUPPORTED), THREAD: (UNSUPPORTED, 0), RELAXED: (0, 0)}
    for mode, (own, foreign_code) in want.items():
        for code, act in ((own, allocates), (foreign_code, lambda: in_another_thread(cuda, allocates)), (0, relaxed)):
            begin(cuda, stream, mode)
            found = act()
            assert found == code, (mode, found, code)
            if code:
                broken(cuda, stream)
            else:
                end(cuda, stream).destroy()
        begin(cuda, stream, mode)
        out = ctypes.c_uint64()
        code = in_another_thread(cuda, lambda: cuda.code("cuStreamEndCapture", stream, ctypes.byref(out)))
        if mode == RELAXED:
            assert code == 0
        else:
            assert code == WRONG_THREAD
            end(cuda, stream).destroy()
    assert cuda.code("cuStreamBeginCapture_v2", stream, ctypes.c_int(3)) == INVALID_VALUE


def illegal_calls(cuda: Cuda) -> None:
    """A query of a stream that records, or a wait for it, is refused, and ends the capture."""
    x, stream, data = cuda.alloc(64), cuda.stream(), ctypes.create_string_buffer(64)
    free = cuda.stream(NON_BLOCKING)
    calls = [
        (UNSUPPORTED, "cuStreamSynchronize", stream),
        (UNSUPPORTED, "cuStreamQuery", stream),
        (UNSUPPORTED, "cuCtxSynchronize"),
        (IMPLICIT, "cuMemcpyHtoD_v2", x, data, 64),
        (IMPLICIT, "cuMemsetD32Async", x, ctypes.c_uint(1), 1, 0),
        (IMPLICIT, "cuEventRecord", cuda.event(), LEGACY),
        (IMPLICIT, "cuStreamSynchronize", 0),
        (UNSUPPORTED, "cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), 64),
        (UNSUPPORTED, "cuMemFree_v2", x),
        (UNSUPPORTED, "cuMemHostAlloc", ctypes.byref(ctypes.c_uint64()), 64, NO_FLAGS),
    ]
    for code, *call in calls:
        begin(cuda, stream)
        cuda.cuMemsetD32Async(x, ctypes.c_uint(1), 1, stream)
        found = cuda.code(*call)
        assert found == code, (call, found)
        assert status(cuda, stream) == INVALID, call
        assert cuda.code("cuMemsetD32Async", x, ctypes.c_uint(1), 1, stream) == INVALIDATED
        broken(cuda, stream)
    cuda.write(x, bytes(64))  # was not freed
    begin(cuda, free, RELAXED)  # a capture of a nonblocking stream does not affect the legacy stream
    cuda.write(x, b"\x03\x00\x00\x00" * 16)
    cuda.cuStreamSynchronize(0)
    cuda.cuMemsetD32Async(x, ctypes.c_uint(4), 8, free)
    launch_ = end(cuda, free)
    assert set(read_words(cuda, x, 16)) == {3}
    launch(cuda, launch_, free)
    assert read_words(cuda, x, 16) == [4] * 8 + [3] * 8
    out = ctypes.c_uint64()
    assert cuda.code("cuStreamBeginCapture_v2", 0, ctypes.c_int(GLOBAL)) == UNSUPPORTED
    assert cuda.code("cuStreamEndCapture", stream, ctypes.byref(out)) == ILLEGAL_STATE
    begin(cuda, stream)
    assert cuda.code("cuStreamBeginCapture_v2", stream, ctypes.c_int(GLOBAL)) == ILLEGAL_STATE
    wrong = [cuda.code("cuMemcpyDtoDAsync_v2", x, 0, 8, stream), cuda.code("cuMemcpyHtoDAsync_v2", 77, data, 8, stream)]
    assert wrong == [INVALID_VALUE] * 2 and status(cuda, stream) == ACTIVE
    assert cuda.code("cuStreamWaitEvent", stream, 77, NO_FLAGS) == 400
    cuda.cuMemsetD32Async(x, ctypes.c_uint(8), 16, stream)
    graph = end(cuda, stream)
    begin(cuda, stream)
    assert cuda.code("cuGraphLaunch", graph.executable(), stream) == NOT_SUPPORTED  # as the documentation says
    cuda.code("cuStreamEndCapture", stream, ctypes.byref(out))
    launch(cuda, graph, stream)
    assert set(read_words(cuda, x, 16)) == {8}


def each_threads_own_stream(cuda: Cuda) -> None:
    """A thread records its default stream; another thread's is another one."""
    x = cuda.alloc(64)
    cuda.cuMemsetD32_v2(x, ctypes.c_uint(1), 16)
    begin(cuda, PER_THREAD, THREAD)
    cuda.cuMemsetD32Async(x, ctypes.c_uint(2), 8, PER_THREAD)

    def capture_again() -> list[int]:
        cuda.cuMemsetD32Async(x + 32, ctypes.c_uint(3), 8, PER_THREAD)
        cuda.cuStreamSynchronize(PER_THREAD)
        return [status(cuda, PER_THREAD), *words_async(cuda, x, 16, PER_THREAD)]

    assert in_another_thread(cuda, capture_again) == [IDLE] + [1] * 8 + [3] * 8
    assert cuda.code("cuStreamSynchronize", PER_THREAD) == UNSUPPORTED
    broken(cuda, PER_THREAD)
    begin(cuda, PER_THREAD, THREAD)
    data = ctypes.create_string_buffer(4)
    assert cuda.code("cuMemcpyDtoH_v2_ptds", data, x, 4) == UNSUPPORTED
    cuda.cuMemsetD32Async(x, ctypes.c_uint(2), 8, PER_THREAD)
    graph = end(cuda, PER_THREAD)
    launch(cuda, graph, PER_THREAD)
    assert read_words(cuda, x, 16) == [2] * 8 + [3] * 8


def words_async(cuda: Cuda, address: int, count: int, stream: int) -> list[int]:
    """Return words of memory, read by a stream: the legacy one may not be used while a blocking one records."""
    data = ctypes.create_string_buffer(4 * count)
    cuda.cuMemcpyDtoHAsync_v2(data, address, 4 * count, stream)
    cuda.cuStreamSynchronize(stream)
    return memoryview(data.raw).cast("I").tolist()


def threads_capture_beside_each_other(cuda: Cuda) -> None:
    """Captures of several threads, and work outside captures, do not affect each other."""
    wrong: list[object] = []
    blocks = [cuda.alloc(64) for _ in range(4)]

    def work(k: int) -> None:
        try:
            cuda.use(0)
            stream = cuda.stream(NON_BLOCKING)
            for i in range(1, 13):
                begin(cuda, stream, THREAD)
                cuda.cuMemsetD32Async(blocks[k], ctypes.c_uint(1000 * k + i), 16, stream)
                cuda.launch(0, stream, "add", blocks[k], blocks[k], 8)
                graph = end(cuda, stream)
                nodes = len(graph.nodes())
                launch(cuda, graph, stream, 2)
                found = words_async(cuda, blocks[k], 16, stream)
                want = [2000 * k + 2 * i] * 8 + [1000 * k + i] * 8
                if found != want or nodes != 2:
                    wrong.append((k, i, nodes, found))
                graph.destroy()
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[:3]


def what_a_capture_is_about_goes(cuda: Cuda) -> None:
    """Streams, events and graphs that are destroyed while they are recorded, and memory that is allocated and freed."""
    x, a, b, event = cuda.alloc(64), cuda.stream(), cuda.stream(), cuda.event()
    begin(cuda, a)
    cuda.cuMemsetD32Async(x, ctypes.c_uint(1), 16, a)
    cuda.cuStreamDestroy_v2(a)  # ends its capture
    cuda.write(x, bytes(64))
    a = cuda.stream()
    begin(cuda, a)
    cuda.cuEventRecord(event, a)
    cuda.cuStreamWaitEvent(b, event, NO_FLAGS)
    cuda.cuMemsetD32Async(x, ctypes.c_uint(2), 16, b)
    cuda.cuEventRecord(event, b)
    cuda.cuStreamDestroy_v2(b)
    cuda.cuStreamWaitEvent(a, event, NO_FLAGS)
    cuda.cuEventDestroy_v2(event)
    graph = end(cuda, a)
    launch(cuda, graph, a)
    assert set(read_words(cuda, x, 16)) == {2}
    own = Graph(cuda)
    first = own.fill([], x, 3, 16)
    deps = ctypes.c_uint64(first)
    cuda.cuStreamBeginCaptureToGraph(a, own.handle, ctypes.byref(deps), None, 1, ctypes.c_int(GLOBAL))
    cuda.cuMemsetD32Async(x, ctypes.c_uint(4), 8, a)
    assert end(cuda, a).handle == own.handle and len(own.nodes()) == 2
    launch(cuda, own, a)
    assert read_words(cuda, x, 16) == [4] * 8 + [3] * 8
    cuda.cuStreamBeginCaptureToGraph(a, own.handle, None, None, 0, ctypes.c_int(GLOBAL))
    cuda.cuMemsetD32Async(x, ctypes.c_uint(4), 8, a)
    cuda.cuStreamEndCapture(a, None)
    assert len(own.nodes()) == 3
    begin(cuda, a)
    assert cuda.code("cuStreamEndCapture", a, None) == INVALID_VALUE
    end(cuda, a)
    cuda.cuStreamBeginCaptureToGraph(a, own.handle, None, None, 0, ctypes.c_int(GLOBAL))
    own.destroy()
    assert cuda.code("cuMemsetD32Async", x, ctypes.c_uint(4), 8, a) == INVALIDATED
    broken(cuda, a)
    begin(cuda, a)
    memory = cuda.out("cuMemAllocAsync", 4096, a)
    cuda.cuMemsetD32Async(memory, ctypes.c_uint(9), 16, a)
    cuda.cuMemcpyDtoDAsync_v2(x, memory, 64, a)
    cuda.cuMemFreeAsync(memory, a)
    assert cuda.code("cuMemFreeAsync", x, a) == INVALID_VALUE
    launch(cuda, end(cuda, a), a, 3)
    assert set(read_words(cuda, x, 16)) == {9}


def events_that_are_nodes(cuda: Cuda) -> None:
    """With the flag for it, records and waits are nodes, which others outside wait for, and which wait for others."""
    x, held, stream, later = cuda.alloc(64), Held(cuda), cuda.stream(NON_BLOCKING), cuda.stream(NON_BLOCKING)
    before, after = cuda.event(), cuda.event()
    begin(cuda, stream)
    cuda.cuStreamWaitEvent(stream, before, EXTERNAL)
    cuda.cuMemsetD32Async(x, ctypes.c_uint(6), 16, stream)
    cuda.cuEventRecordWithFlags(after, stream, EXTERNAL)
    graph = end(cuda, stream)
    exec_ = graph.executable()
    cuda.cuMemsetD32Async(x, ctypes.c_uint(5), 16, held.stream)
    cuda.cuEventRecord(before, held.stream)
    cuda.cuGraphLaunch(exec_, stream)
    cuda.cuStreamWaitEvent(later, after, NO_FLAGS)
    cuda.launch(0, later, "add", x, x, 8)
    assert cuda.code("cuStreamQuery", later) == cuda.code("cuStreamQuery", stream) == 600
    held.release()
    cuda.cuStreamSynchronize(later)
    assert read_words(cuda, x, 16) == [12] * 8 + [6] * 8
    assert cuda.code("cuEventRecordWithFlags", after, stream, EXTERNAL) == INVALID_VALUE


CHECKS = (
    everything_is_recorded,
    streams_fork_and_join,
    captures_do_not_meet,
    events_belong_to_their_last_record,
    modes,
    illegal_calls,
    each_threads_own_stream,
    threads_capture_beside_each_other,
    what_a_capture_is_about_goes,
    events_that_are_nodes,
)
