"""What CUDA promises of memory pools, and of memory that streams allocate and free."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import threading
from pathlib import Path

import numpy as np
from tests.harness.driver.calls import INVALID_VALUE, NON_BLOCKING, NOT_SUPPORTED, OUT_OF_MEMORY, PER_THREAD, Cuda
from tests.harness.driver.checks import Held, fresh, words
from tests.harness.driver.graphs import DEVICE_LOCATION, FUNCTION, HOST_LOCATION, Alloc, Graph, Pool
from tests.harness.until import until

MIB = 1 << 20
FOLLOW, OPPORTUNISTIC, INTERNAL, THRESHOLD, RESERVED, RESERVED_HIGH, USED, USED_HIGH = range(1, 9)
NO_FLAGS = ctypes.c_uint(0)


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", ctypes.c_int), ("id", ctypes.c_int), ("access", ctypes.c_int)]


def pool(cuda: Cuda, most: int = 0, device: int = 0, location: int = DEVICE_LOCATION) -> int:
    """Return a new pool."""
    return cuda.out("cuMemPoolCreate", ctypes.byref(Pool(1, 0, location, device, None, most)))


def get(cuda: Cuda, of: int, which: int) -> int:
    """Return an attribute."""
    value = ctypes.c_uint64(0)
    cuda.cuMemPoolGetAttribute(of, ctypes.c_int(which), ctypes.byref(value))
    return value.value


def put(cuda: Cuda, of: int, which: int, value: int) -> int:
    """Set an attribute; return the code."""
    return cuda.code("cuMemPoolSetAttribute", of, ctypes.c_int(which), ctypes.byref(ctypes.c_uint64(value)))


def take(cuda: Cuda, of: int, nbytes: int, stream: int) -> int:
    """Allocate from a pool; return the address, 0: there is no room."""
    address = ctypes.c_uint64()
    code = cuda.code("cuMemAllocFromPoolAsync", ctypes.byref(address), nbytes, of, stream)
    assert code in (0, OUT_OF_MEMORY), code
    return 0 if code else address.value


def quota(cuda: Cuda) -> None:
    """A pool gives no more than its most, whoever asks; what is freed is there again. So it is with the device's."""
    small, stream, other = pool(cuda, 4 * MIB), cuda.stream(), cuda.stream(NON_BLOCKING)
    first = take(cuda, small, 3 * MIB, stream)
    assert first and not take(cuda, small, 2 * MIB, other)
    second = take(cuda, small, MIB, other)
    assert second and not take(cuda, small, 1, stream)
    assert take(cuda, pool(cuda, 4 * MIB), 3 * MIB, stream)  # another's affair
    cuda.cuMemFreeAsync(first, stream)
    third = take(cuda, small, 3 * MIB, other)
    assert third
    cuda.cuMemFree_v2(third)
    cuda.cuMemFreeAsync(second, stream)
    assert get(cuda, small, USED) == 0
    free, total = ctypes.c_uint64(), ctypes.c_uint64()
    cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    large = pool(cuda)
    assert not take(cuda, large, total.value + MIB, stream)
    assert get(cuda, large, USED) == 0
    address = ctypes.c_uint64(1)
    cuda.cuMemAllocAsync(ctypes.byref(address), 0, stream)
    assert address.value == 0


def attributes(cuda: Cuda) -> None:
    """What is in use is counted exactly, with marks; what can be set is what was set."""
    one, stream = pool(cuda), cuda.stream()
    blocks = [take(cuda, one, nbytes, stream) for nbytes in (100, 3 * MIB, 5000)]
    whole = 3 * MIB + 5100
    assert [get(cuda, one, which) for which in (USED, USED_HIGH)] == [whole] * 2
    assert whole <= get(cuda, one, RESERVED) == get(cuda, one, RESERVED_HIGH) < whole + 4 * MIB
    for block in blocks[:2]:
        cuda.cuMemFreeAsync(block, stream)
    assert (get(cuda, one, USED), get(cuda, one, USED_HIGH)) == (5000, whole)
    assert [put(cuda, one, which, 1) for which in (USED_HIGH, RESERVED_HIGH, USED, RESERVED, 99)] == [INVALID_VALUE] * 5
    assert [put(cuda, one, which, 0) for which in (USED_HIGH, RESERVED_HIGH)] == [0, 0]
    assert get(cuda, one, USED_HIGH) == 5000 and get(cuda, one, RESERVED_HIGH) == get(cuda, one, RESERVED)
    for which in (FOLLOW, OPPORTUNISTIC, INTERNAL):
        assert get(cuda, one, which) == 1 and put(cuda, one, which, 0) == 0 and get(cuda, one, which) == 0
    assert get(cuda, one, THRESHOLD) == 0
    assert cuda.code("cuMemPoolGetAttribute", one, ctypes.c_int(0), ctypes.byref(ctypes.c_uint64())) == INVALID_VALUE
    assert cuda.code("cuMemPoolGetAttribute", 77, ctypes.c_int(1), ctypes.byref(ctypes.c_uint64())) == INVALID_VALUE
    found = ctypes.c_uint64()
    cuda.cuPointerGetAttribute(ctypes.byref(found), ctypes.c_int(17), blocks[2])
    assert found.value == one
    default = cuda.out("cuDeviceGetDefaultMemPool", ctypes.c_int(0))
    assert cuda.out("cuDeviceGetMemPool", ctypes.c_int(0)) == default
    cuda.cuDeviceSetMemPool(ctypes.c_int(0), one)
    assert cuda.out("cuDeviceGetMemPool", ctypes.c_int(0)) == one
    block = cuda.out("cuMemAllocAsync", 1000, stream)
    assert get(cuda, one, USED) == 6000
    cuda.cuMemPoolDestroy(one)  # what is allocated stays
    assert cuda.out("cuDeviceGetMemPool", ctypes.c_int(0)) == default
    cuda.cuMemsetD32Async(block, ctypes.c_uint(3), 250, stream)
    cuda.cuStreamSynchronize(stream)
    assert set(words(cuda, block, 250)) == {3}
    cuda.cuMemFreeAsync(block, stream)
    cuda.cuMemFree_v2(blocks[2])
    wrong = [("cuMemPoolDestroy", default), ("cuMemPoolDestroy", one), ("cuMemPoolTrimTo", one, 0)]
    assert {cuda.code(*call) for call in wrong} == {INVALID_VALUE}


def trim(cuda: Cuda) -> None:
    """What is kept beyond what is in use is given back, down to the size that is named."""
    one, stream = pool(cuda), cuda.stream()
    assert put(cuda, one, THRESHOLD, 64 * MIB) == 0 and get(cuda, one, THRESHOLD) == 64 * MIB
    blocks = [take(cuda, one, 6 * MIB, stream) for _ in range(4)]
    for block in blocks[1:]:
        cuda.cuMemFreeAsync(block, stream)
    cuda.cuStreamSynchronize(stream)
    assert (get(cuda, one, USED), get(cuda, one, RESERVED)) == (6 * MIB, 24 * MIB)  # the threshold keeps it
    for keep, left in ((100 * MIB, 24), (16 * MIB, 16), (2 * MIB, 6), (0, 6)):
        cuda.cuMemPoolTrimTo(one, keep)
        assert get(cuda, one, RESERVED) == left * MIB, keep
    cuda.cuMemsetD8Async(blocks[0], ctypes.c_ubyte(1), 6 * MIB, stream)
    assert put(cuda, one, THRESHOLD, 0) == 0
    cuda.cuMemFreeAsync(blocks[0], stream)
    assert (get(cuda, one, USED), get(cuda, one, RESERVED)) == (0, 0)


def order_of_reuse(cuda: Cuda) -> None:
    """What a stream frees is another one's when it has got there, not before; without room an allocation waits."""
    held, other = Held(cuda), cuda.stream(NON_BLOCKING)
    block = cuda.out("cuMemAllocAsync", 60 * MIB, held.stream)
    cuda.cuMemsetD32Async(block, ctypes.c_uint(7), 256, held.stream)
    cuda.cuMemFreeAsync(block, held.stream)
    beside = cuda.out("cuMemAllocAsync", 3 * MIB, other)
    assert beside != block and held.waits()
    cuda.cuMemsetD32Async(beside, ctypes.c_uint(8), 256, other)
    timer = threading.Timer(0.05, held.let_go)
    timer.start()
    again = cuda.out("cuMemAllocAsync", 60 * MIB, other)  # there is room for one
    timer.join()
    cuda.cuStreamSynchronize(other)
    assert abs(again - block) < 60 * MIB and set(words(cuda, beside, 256)) == {8}
    for _ in range(20):  # a stream that frees and allocates in turn needs one block, however late it gets there
        cuda.cuMemsetD32Async(again, ctypes.c_uint(9), 256, other)
        cuda.cuMemFreeAsync(again, other)
        again = cuda.out("cuMemAllocAsync", 60 * MIB, other)
    cuda.cuMemFree_v2(again)
    cuda.cuMemFree_v2(beside)


def frees_in_other_streams(cuda: Cuda) -> None:
    """A block is freed in the stream that is named: by then others must be done, and later calls of it come after."""
    x, held, last = cuda.alloc(1024), Held(cuda), cuda.stream(NON_BLOCKING)
    event = cuda.event()
    block = cuda.out("cuMemAllocAsync", 1024, held.stream)
    cuda.cuMemsetD32Async(block, ctypes.c_uint(5), 256, held.stream)
    cuda.cuMemcpyDtoDAsync_v2(x, block, 1024, held.stream)
    cuda.cuEventRecord(event, held.stream)
    cuda.cuStreamWaitEvent(last, event, NO_FLAGS)
    cuda.cuMemFreeAsync(block, last)
    assert cuda.code("cuMemFreeAsync", block, last) == INVALID_VALUE
    assert cuda.code("cuMemFree_v2", block) == INVALID_VALUE
    taken = [cuda.out("cuMemAllocAsync", 1024, stream) for stream in (held.other, PER_THREAD)]
    assert block not in taken  # the streams that free and use it have not got there
    for address in taken:
        cuda.cuMemsetD32Async(address, ctypes.c_uint(9), 256, held.other)
    held.let_go()
    cuda.cuCtxSynchronize()
    assert set(words(cuda, x, 256)) == {5}
    cuda.cuMemFreeAsync(0, last)
    assert cuda.code("cuMemFreeAsync", x + 4, last) == INVALID_VALUE
    cuda.cuMemFreeAsync(x, last)  # of cuMemAlloc: allowed
    cuda.use(1)
    far = cuda.out("cuMemAllocAsync", 1024, 0)
    cuda.cuMemsetD32_v2(far, ctypes.c_uint(4), 256)
    cuda.use(0)
    cuda.cuMemFreeAsync(far, last)
    assert cuda.code("cuMemFreeAsync", far, last) == INVALID_VALUE


def who_may_use_a_pool(cuda: Cuda) -> None:
    """Pools of another device and of the host, and what may be asked of their access."""
    stream = cuda.stream()
    far = pool(cuda, 0, 1)
    block = take(cuda, far, 4096, stream)
    device = ctypes.c_int(9)
    cuda.cuPointerGetAttribute(ctypes.byref(device), ctypes.c_int(9), block)
    assert device.value == 1
    flags = ctypes.c_int(9)
    for which, want in ((1, 3), (0, 0)):
        cuda.cuMemPoolGetAccess(ctypes.byref(flags), far, ctypes.byref((ctypes.c_int * 2)(DEVICE_LOCATION, which)))
        assert flags.value == want
    codes = []
    for which, access in ((1, 3), (1, 0), (0, 1), (0, 3), (0, 0), (9, 3)):
        codes.append(cuda.code("cuMemPoolSetAccess", far, ctypes.byref(Access(DEVICE_LOCATION, which, access)), 1))
        cuda.cuMemPoolGetAccess(ctypes.byref(flags), far, ctypes.byref((ctypes.c_int * 2)(DEVICE_LOCATION, 0)))
        assert flags.value == (3 if (which, access) == (0, 3) else 0)
    assert codes == [0, INVALID_VALUE, INVALID_VALUE, 0, 0, INVALID_VALUE], codes
    cuda.cuMemFreeAsync(block, stream)
    assert get(cuda, far, USED) == 0
    assert cuda.code("cuDeviceSetMemPool", ctypes.c_int(0), far) == INVALID_VALUE
    host = pool(cuda, 0, 0, HOST_LOCATION)
    address = take(cuda, host, 1000, stream)
    view = (ctypes.c_uint * 250).from_address(address)
    cuda.cuMemsetD32Async(address, ctypes.c_uint(6), 250, stream)
    cuda.cuStreamSynchronize(stream)
    assert set(view) == {6} and get(cuda, host, USED) == 4096
    held = Held(cuda)
    cuda.cuMemsetD32Async(address, ctypes.c_uint(7), 250, held.stream)
    cuda.cuMemFreeAsync(address, held.stream)  # goes when the stream gets there
    assert set(view) == {6}
    held.let_go()
    cuda.cuStreamSynchronize(held.stream)
    created = ctypes.byref(ctypes.c_uint64())
    wrong = [Pool(2, 0, 1, 0), Pool(1, 1, 1, 0), Pool(1, 0, 1, 5), Pool(1, 0, 9, 0), Pool(7, 0, 1, 0)]
    codes = [cuda.code("cuMemPoolCreate", created, ctypes.byref(one)) for one in wrong]
    assert codes == [NOT_SUPPORTED, NOT_SUPPORTED, INVALID_VALUE, INVALID_VALUE, INVALID_VALUE], codes


def worker(ordinal: int) -> int:
    """Return the process of a device's worker: a child of who started this program."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes()
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == os.getppid() and f"--ordinal\0{ordinal}\0".encode() in line:
            return int(folder.name)
    raise AssertionError("no worker")


def the_worker_dies(cuda: Cuda) -> None:
    """Frees fail with the code of a lost device, the pool stays; after a reset it is empty and can be used."""
    one, stream = pool(cuda, 4 * MIB), cuda.stream()
    blocks = [take(cuda, one, MIB, stream) for _ in range(3)]
    default = cuda.out("cuDeviceGetDefaultMemPool", ctypes.c_int(0))
    before = get(cuda, default, USED)
    cuda.out("cuMemAllocAsync", MIB, stream)
    os.kill(worker(0), signal.SIGKILL)
    assert until(lambda: cuda.code("cuStreamQuery", stream) not in (0, 600), 10)
    lost = cuda.code("cuStreamSynchronize", stream)
    assert lost and cuda.code("cuMemFreeAsync", blocks[0], stream) == lost
    assert cuda.code("cuMemFree_v2", blocks[1]) == lost
    address = ctypes.c_uint64(5)
    assert cuda.code("cuMemAllocFromPoolAsync", ctypes.byref(address), MIB, one, stream) == lost
    cuda.use(1)
    other = cuda.out("cuMemAllocAsync", MIB, 0)  # the other device is as it was
    cuda.cuMemFreeAsync(other, 0)
    cuda.use(0)
    fresh(cuda)
    cuda.use(0)
    assert get(cuda, one, USED) == 0 and get(cuda, default, USED) <= before
    stream = cuda.stream()
    block = take(cuda, one, 4 * MIB, stream)
    cuda.cuMemsetD32Async(block, ctypes.c_uint(2), 256, stream)
    cuda.cuStreamSynchronize(stream)
    assert set(words(cuda, block, 256)) == {2} and get(cuda, one, USED) == 4 * MIB
    cuda.cuMemPoolDestroy(one)
    cuda.cuMemFreeAsync(block, stream)


def freed_beside_a_stream_that_is_stuck(cuda: Cuda) -> None:
    """What a stream frees of the host's memory goes when it gets there; host functions behind it run meanwhile."""
    held, stream, ran = Held(cuda), cuda.stream(NON_BLOCKING), threading.Semaphore(0)
    run = FUNCTION(lambda _: ran.release())
    cuda.cuMemFreeAsync(take(cuda, pool(cuda, location=HOST_LOCATION), 4096, stream), stream)
    seen = []
    for _ in range(2):  # when the first one runs the memory is due
        cuda.cuLaunchHostFunc(stream, run, None)
        seen.append(ran.acquire(timeout=5))
    held.let_go()
    assert seen == [True, True]
    cuda.cuCtxSynchronize()


def memory_of_the_host_stays_pinned(cuda: Cuda) -> None:
    """What a stream has freed is the next block of its size, at once, and not before; a trim gives it back."""
    one, held, stream = pool(cuda, location=HOST_LOCATION), Held(cuda), cuda.stream(NON_BLOCKING)
    first = take(cuda, one, 8192, held.stream)
    cuda.cuMemsetD32Async(first, ctypes.c_uint(3), 2048, held.stream)
    cuda.cuMemFreeAsync(first, held.stream)
    assert take(cuda, one, 8192, stream) != first  # its stream is not there yet
    held.let_go()
    cuda.cuStreamSynchronize(held.stream)
    stuck, found = Held(cuda), []
    assert until(lambda: found.append(take(cuda, one, 8192, stream)) or found[-1] == first, 5)
    assert take(cuda, one, 4096, stream) != first
    cuda.cuMemsetD32Async(first, ctypes.c_uint(4), 2048, stream)
    cuda.cuStreamSynchronize(stream)
    assert set((ctypes.c_uint * 2048).from_address(first)) == {4}
    cuda.cuMemFreeAsync(first, stream)
    cuda.cuStreamSynchronize(stream)
    stuck.let_go()
    cuda.cuCtxSynchronize()
    cuda.cuMemPoolTrimTo(one, 0)
    assert take(cuda, one, 8192, stream) != first
    cuda.cuCtxSynchronize()


def a_graph_ends_beside_a_stream_that_is_stuck(cuda: Cuda) -> None:
    """Host functions run, though the last launch of a graph that is no more has ended in their thread."""
    held, stuck, stream, ran = Held(cuda), Held(cuda), cuda.stream(NON_BLOCKING), threading.Semaphore(0)
    graph, run = Graph(cuda), FUNCTION(lambda _: ran.release())
    wanted = Alloc(Pool(1, 0, HOST_LOCATION), None, 0, 4096)
    node = graph.add("cuGraphAddMemAllocNode", [], ctypes.byref(wanted))
    graph.host([graph.fill([node], wanted.address, 1, 4)], ran.release)
    exec_ = graph.executable()
    cuda.cuGraphLaunch(exec_, held.stream)
    cuda.cuGraphExecDestroy(exec_)
    graph.destroy()
    held.let_go()
    seen = [ran.acquire(timeout=5)]
    for _ in range(2):  # when the first one runs the graph has ended
        cuda.cuLaunchHostFunc(stream, run, None)
        seen.append(ran.acquire(timeout=5))
    stuck.let_go()
    assert seen == [True, True, True]
    cuda.cuCtxSynchronize()


def calls_free_host_memory_of_a_graph(cuda: Cuda) -> None:
    """As they free a graph's memory on a device: once for each launch; and it is no memory of cuMemHostAlloc."""
    stream = cuda.stream(NON_BLOCKING)
    wanted = Alloc(Pool(1, 0, HOST_LOCATION), None, 0, 4096)
    graph = Graph(cuda)
    node = graph.add("cuGraphAddMemAllocNode", [], ctypes.byref(wanted))
    graph.fill([node], wanted.address, 5, 4)
    exec_ = graph.executable()
    assert cuda.code("cuMemFreeAsync", wanted.address, stream) == INVALID_VALUE  # no launch has allocated it
    for call in (("cuMemFreeAsync", wanted.address, stream), ("cuMemFree_v2", wanted.address)):
        cuda.cuGraphLaunch(exec_, stream)
        cuda.cuStreamSynchronize(stream)
        assert (ctypes.c_uint * 4).from_address(wanted.address)[:] == [5] * 4
        assert cuda.code("cuMemFreeHost", wanted.address) == INVALID_VALUE
        assert [cuda.code(*call) for _ in range(2)] == [0, INVALID_VALUE]
    other = Graph(cuda)  # another graph frees it, too
    other.add("cuGraphAddMemFreeNode", [], wanted.address)
    frees = other.executable()
    cuda.cuGraphLaunch(exec_, stream)
    cuda.cuGraphLaunch(frees, stream)
    cuda.cuStreamSynchronize(stream)
    assert cuda.code("cuMemFreeAsync", wanted.address, stream) == INVALID_VALUE
    for one in (exec_, frees):
        cuda.cuGraphExecDestroy(one)
    graph.destroy()
    other.destroy()


def registered_pages_are_the_programs_own_again(cuda: Cuda) -> None:
    """After the end of their registration a forked child does not share them, and they can be registered again."""
    pages = mmap.mmap(-1, 1 << 14, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held = np.frombuffer(pages, np.uint32)
    held[:] = np.arange(held.size)
    address, mapped, copied = ctypes.c_void_p(held.ctypes.data), ctypes.c_uint(2), np.zeros_like(held)
    for turn in range(2):
        cuda.cuMemHostRegister_v2(address, ctypes.c_size_t(held.nbytes), mapped)
        device = cuda.out("cuMemHostGetDevicePointer_v2", address, ctypes.c_uint(0))
        cuda.cuMemsetD32Async(device, ctypes.c_uint(70 + turn), ctypes.c_size_t(turn + 1), None)
        cuda.cuCtxSynchronize()
        cuda.cuMemHostUnregister(address)
        if (child := os.fork()) == 0:
            held[5] = 0
            os._exit(0)
        os.waitpid(child, 0)
        copied[:] = held
        assert copied[0] == 70 + turn and copied[5] == 5 and copied[-1] == held.size - 1, copied


CHECKS = (
    freed_beside_a_stream_that_is_stuck,
    calls_free_host_memory_of_a_graph,
    memory_of_the_host_stays_pinned,
    a_graph_ends_beside_a_stream_that_is_stuck,
    quota,
    attributes,
    trim,
    order_of_reuse,
    frees_in_other_streams,
    who_may_use_a_pool,
    registered_pages_are_the_programs_own_again,
    the_worker_dies,
)
