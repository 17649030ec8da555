"""Checks of CUDA's promises for memory pools, and for memory that streams allocate and free."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import threading
from pathlib import Path

import numpy as np
from tests.harness.driver.calls import (
    INVALID_DEVICE,
    INVALID_VALUE,
    NON_BLOCKING,
    NOT_SUPPORTED,
    OUT_OF_MEMORY,
    PER_THREAD,
    Cuda,
)
from tests.harness.driver.checks import Held, fresh, read_words
from tests.harness.driver.graphs import DEVICE_LOCATION, FUNCTION, HOST_LOCATION, Alloc, Graph, Pool
from tests.harness.until import until

MIB = 1 << 20
FOLLOW, OPPORTUNISTIC, INTERNAL, THRESHOLD, RESERVED, RESERVED_HIGH, USED, USED_HIGH = range(1, 9)
NO_FLAGS = ctypes.c_uint(0)


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", ctypes.c_int), ("id", ctypes.c_int), ("access", ctypes.c_int)]


def pool(cuda: Cuda, capacity: int = 0, device: int = 0, location: int = DEVICE_LOCATION) -> int:
    """Return a new pool."""
    return cuda.out("cuMemPoolCreate", ctypes.byref(Pool(1, 0, location, device, None, capacity)))


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
    """A pool never exceeds its capacity; freed memory is available again. The device's pool behaves likewise."""
    small, stream, other_stream = pool(cuda, 4 * MIB), cuda.stream(), cuda.stream(NON_BLOCKING)
    first = take(cuda, small, 3 * MIB, stream)
    assert first and not take(cuda, small, 2 * MIB, other_stream)
    second = take(cuda, small, MIB, other_stream)
    assert second and not take(cuda, small, 1, stream)
    assert take(cuda, pool(cuda, 4 * MIB), 3 * MIB, stream)  # another pool has its own limit
    cuda.cuMemFreeAsync(first, stream)
    third = take(cuda, small, 3 * MIB, other_stream)
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
    """Used bytes and their high-water marks are exact; attributes that can be set return the set value."""
    created, stream = pool(cuda), cuda.stream()
    blocks = [take(cuda, created, nbytes, stream) for nbytes in (100, 3 * MIB, 5000)]
    total = 3 * MIB + 5100
    assert [get(cuda, created, which) for which in (USED, USED_HIGH)] == [total] * 2
    assert total <= get(cuda, created, RESERVED) == get(cuda, created, RESERVED_HIGH) < total + 4 * MIB
    for block in blocks[:2]:
        cuda.cuMemFreeAsync(block, stream)
    assert (get(cuda, created, USED), get(cuda, created, USED_HIGH)) == (5000, total)
    assert [put(cuda, created, which, 1) for which in (USED_HIGH, RESERVED_HIGH, USED, RESERVED, 99)] == [
        INVALID_VALUE
    ] * 5
    assert [put(cuda, created, which, 0) for which in (USED_HIGH, RESERVED_HIGH)] == [0, 0]
    assert get(cuda, created, USED_HIGH) == 5000 and get(cuda, created, RESERVED_HIGH) == get(cuda, created, RESERVED)
    for which in (FOLLOW, OPPORTUNISTIC, INTERNAL):
        assert get(cuda, created, which) == 1 and put(cuda, created, which, 0) == 0 and get(cuda, created, which) == 0
    assert get(cuda, created, THRESHOLD) == 0
    assert (
        cuda.code("cuMemPoolGetAttribute", created, ctypes.c_int(0), ctypes.byref(ctypes.c_uint64())) == INVALID_VALUE
    )
    assert cuda.code("cuMemPoolGetAttribute", 77, ctypes.c_int(1), ctypes.byref(ctypes.c_uint64())) == INVALID_VALUE
    found = ctypes.c_uint64()
    cuda.cuPointerGetAttribute(ctypes.byref(found), ctypes.c_int(17), blocks[2])
    assert found.value == created
    default = cuda.out("cuDeviceGetDefaultMemPool", ctypes.c_int(0))
    assert cuda.out("cuDeviceGetMemPool", ctypes.c_int(0)) == default
    cuda.cuDeviceSetMemPool(ctypes.c_int(0), created)
    assert cuda.out("cuDeviceGetMemPool", ctypes.c_int(0)) == created
    block = cuda.out("cuMemAllocAsync", 1000, stream)
    assert get(cuda, created, USED) == 6000
    cuda.cuMemPoolDestroy(created)  # allocations stay valid
    assert cuda.out("cuDeviceGetMemPool", ctypes.c_int(0)) == default
    cuda.cuMemsetD32Async(block, ctypes.c_uint(3), 250, stream)
    cuda.cuStreamSynchronize(stream)
    assert set(read_words(cuda, block, 250)) == {3}
    cuda.cuMemFreeAsync(block, stream)
    cuda.cuMemFree_v2(blocks[2])
    wrong = [("cuMemPoolDestroy", default), ("cuMemPoolDestroy", created), ("cuMemPoolTrimTo", created, 0)]
    assert {cuda.code(*call) for call in wrong} == {INVALID_VALUE}


def trim(cuda: Cuda) -> None:
    """A trim releases reserved memory that is not in use, down to the given size."""
    created, stream = pool(cuda), cuda.stream()
    assert put(cuda, created, THRESHOLD, 64 * MIB) == 0 and get(cuda, created, THRESHOLD) == 64 * MIB
    blocks = [take(cuda, created, 6 * MIB, stream) for _ in range(4)]
    for block in blocks[1:]:
        cuda.cuMemFreeAsync(block, stream)
    cuda.cuStreamSynchronize(stream)
    assert (get(cuda, created, USED), get(cuda, created, RESERVED)) == (6 * MIB, 24 * MIB)  # the threshold keeps it
    for keep, left in ((100 * MIB, 24), (16 * MIB, 16), (2 * MIB, 6), (0, 6)):
        cuda.cuMemPoolTrimTo(created, keep)
        assert get(cuda, created, RESERVED) == left * MIB, keep
    cuda.cuMemsetD8Async(blocks[0], ctypes.c_ubyte(1), 6 * MIB, stream)
    assert put(cuda, created, THRESHOLD, 0) == 0
    cuda.cuMemFreeAsync(blocks[0], stream)
    assert (get(cuda, created, USED), get(cuda, created, RESERVED)) == (0, 0)


def order_of_reuse(cuda: Cuda) -> None:
    """Another stream reuses a block after the freeing stream has reached the free; without room it waits."""
    held, other_stream = Held(cuda), cuda.stream(NON_BLOCKING)
    block = cuda.out("cuMemAllocAsync", 60 * MIB, held.stream)
    cuda.cuMemsetD32Async(block, ctypes.c_uint(7), 256, held.stream)
    cuda.cuMemFreeAsync(block, held.stream)
    neighbor = cuda.out("cuMemAllocAsync", 3 * MIB, other_stream)
    assert neighbor != block and held.is_pending()
    cuda.cuMemsetD32Async(neighbor, ctypes.c_uint(8), 256, other_stream)
    timer = threading.Timer(0.05, held.release)
    timer.start()
    # Memory for only one of these blocks: this call waits for the free.
    again = cuda.out("cuMemAllocAsync", 60 * MIB, other_stream)
    timer.join()
    cuda.cuStreamSynchronize(other_stream)
    assert abs(again - block) < 60 * MIB and set(read_words(cuda, neighbor, 256)) == {8}
    for _ in range(20):  # a stream that frees and allocates alternately needs one block, however late it runs
        cuda.cuMemsetD32Async(again, ctypes.c_uint(9), 256, other_stream)
        cuda.cuMemFreeAsync(again, other_stream)
        again = cuda.out("cuMemAllocAsync", 60 * MIB, other_stream)
    cuda.cuMemFree_v2(again)
    cuda.cuMemFree_v2(neighbor)


def frees_in_other_streams(cuda: Cuda) -> None:
    """A block is freed in the given stream, after the work of others, and before later calls of the stream."""
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
    allocated = [cuda.out("cuMemAllocAsync", 1024, stream) for stream in (held.free_stream, PER_THREAD)]
    assert block not in allocated  # the streams that free and use it have not run these calls
    for address in allocated:
        cuda.cuMemsetD32Async(address, ctypes.c_uint(9), 256, held.free_stream)
    held.release()
    cuda.cuCtxSynchronize()
    assert set(read_words(cuda, x, 256)) == {5}
    cuda.cuMemFreeAsync(0, last)
    assert cuda.code("cuMemFreeAsync", x + 4, last) == INVALID_VALUE
    cuda.cuMemFreeAsync(x, last)  # cuMemFreeAsync may free memory of cuMemAlloc
    cuda.use(1)
    far = cuda.out("cuMemAllocAsync", 1024, 0)
    cuda.cuMemsetD32_v2(far, ctypes.c_uint(4), 256)
    cuda.use(0)
    cuda.cuMemFreeAsync(far, last)
    assert cuda.code("cuMemFreeAsync", far, last) == INVALID_VALUE


def who_may_use_a_pool(cuda: Cuda) -> None:
    """Pools of another device and of the host, and their access attributes."""
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
    cuda.cuMemFreeAsync(address, held.stream)  # is freed when the stream reaches the call
    assert set(view) == {6}
    held.release()
    cuda.cuStreamSynchronize(held.stream)
    created = ctypes.byref(ctypes.c_uint64())
    wrong = [Pool(2, 0, 1, 0), Pool(1, 1, 1, 0), Pool(1, 0, 1, 5), Pool(1, 0, 9, 0), Pool(7, 0, 1, 0)]
    codes = [cuda.code("cuMemPoolCreate", created, ctypes.byref(properties)) for properties in wrong]
    assert codes == [NOT_SUPPORTED, NOT_SUPPORTED, INVALID_VALUE, INVALID_VALUE, INVALID_VALUE], codes


def worker(ordinal: int) -> int:
    """Return the process of a device's worker: a child of the process that started this program."""
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
    created, stream = pool(cuda, 4 * MIB), cuda.stream()
    blocks = [take(cuda, created, MIB, stream) for _ in range(3)]
    default = cuda.out("cuDeviceGetDefaultMemPool", ctypes.c_int(0))
    before = get(cuda, default, USED)
    cuda.out("cuMemAllocAsync", MIB, stream)
    os.kill(worker(0), signal.SIGKILL)
    assert until(lambda: cuda.code("cuStreamQuery", stream) not in (0, 600), 10)
    lost = cuda.code("cuStreamSynchronize", stream)
    assert lost and cuda.code("cuMemFreeAsync", blocks[0], stream) == lost
    assert cuda.code("cuMemFree_v2", blocks[1]) == lost
    address = ctypes.c_uint64(5)
    assert cuda.code("cuMemAllocFromPoolAsync", ctypes.byref(address), MIB, created, stream) == lost
    cuda.use(1)
    far_block = cuda.out("cuMemAllocAsync", MIB, 0)  # the other device is not affected
    cuda.cuMemFreeAsync(far_block, 0)
    cuda.use(0)
    fresh(cuda)
    cuda.use(0)
    assert get(cuda, created, USED) == 0 and get(cuda, default, USED) <= before
    stream = cuda.stream()
    block = take(cuda, created, 4 * MIB, stream)
    cuda.cuMemsetD32Async(block, ctypes.c_uint(2), 256, stream)
    cuda.cuStreamSynchronize(stream)
    assert set(read_words(cuda, block, 256)) == {2} and get(cuda, created, USED) == 4 * MIB
    cuda.cuMemPoolDestroy(created)
    cuda.cuMemFreeAsync(block, stream)


def freed_beside_a_stream_that_is_stuck(cuda: Cuda) -> None:
    """Host memory is freed when the stream reaches the free; host functions behind it run concurrently."""
    held, stream, ran = Held(cuda), cuda.stream(NON_BLOCKING), threading.Semaphore(0)
    run = FUNCTION(lambda _: ran.release())
    cuda.cuMemFreeAsync(take(cuda, pool(cuda, location=HOST_LOCATION), 4096, stream), stream)
    acquired = []
    for _ in range(2):  # when the first function runs, the memory can be freed
        cuda.cuLaunchHostFunc(stream, run, None)
        acquired.append(ran.acquire(timeout=5))
    held.release()
    assert acquired == [True, True]
    cuda.cuCtxSynchronize()


def memory_of_the_host_stays_pinned(cuda: Cuda) -> None:
    """A freed block is reused for the next one of its size, but not before the stream reaches the free."""
    created, held, stream = pool(cuda, location=HOST_LOCATION), Held(cuda), cuda.stream(NON_BLOCKING)
    first = take(cuda, created, 8192, held.stream)
    cuda.cuMemsetD32Async(first, ctypes.c_uint(3), 2048, held.stream)
    cuda.cuMemFreeAsync(first, held.stream)
    assert take(cuda, created, 8192, stream) != first  # its stream has not reached the free
    held.release()
    cuda.cuStreamSynchronize(held.stream)
    stuck, found = Held(cuda), []
    assert until(lambda: found.append(take(cuda, created, 8192, stream)) or found[-1] == first, 5)
    assert take(cuda, created, 4096, stream) != first
    cuda.cuMemsetD32Async(first, ctypes.c_uint(4), 2048, stream)
    cuda.cuStreamSynchronize(stream)
    assert set((ctypes.c_uint * 2048).from_address(first)) == {4}
    cuda.cuMemFreeAsync(first, stream)
    cuda.cuStreamSynchronize(stream)
    stuck.release()
    cuda.cuCtxSynchronize()
    cuda.cuMemPoolTrimTo(created, 0)
    assert take(cuda, created, 8192, stream) != first
    cuda.cuCtxSynchronize()


def a_graph_ends_beside_a_stream_that_is_stuck(cuda: Cuda) -> None:
    """Host functions run, though the last launch of a graph that is no more has ended in their thread."""
    held, stuck, stream, ran = Held(cuda), Held(cuda), cuda.stream(NON_BLOCKING), threading.Semaphore(0)
    graph, run = Graph(cuda), FUNCTION(lambda _: ran.release())
    params = Alloc(Pool(1, 0, HOST_LOCATION), None, 0, 4096)
    node = graph.add("cuGraphAddMemAllocNode", [], ctypes.byref(params))
    graph.host([graph.fill([node], params.address, 1, 4)], ran.release)
    exec_ = graph.executable()
    cuda.cuGraphLaunch(exec_, held.stream)
    cuda.cuGraphExecDestroy(exec_)
    graph.destroy()
    held.release()
    acquired = [ran.acquire(timeout=5)]
    for _ in range(2):  # when the first function runs, the graph has ended
        cuda.cuLaunchHostFunc(stream, run, None)
        acquired.append(ran.acquire(timeout=5))
    stuck.release()
    assert acquired == [True, True, True]
    cuda.cuCtxSynchronize()


def calls_free_host_memory_of_a_graph(cuda: Cuda) -> None:
    """As they free a graph's memory on a device: once for each launch; cuMemFreeHost refuses it."""
    stream = cuda.stream(NON_BLOCKING)
    params = Alloc(Pool(1, 0, HOST_LOCATION), None, 0, 4096)
    graph = Graph(cuda)
    node = graph.add("cuGraphAddMemAllocNode", [], ctypes.byref(params))
    graph.fill([node], params.address, 5, 4)
    exec_ = graph.executable()
    assert cuda.code("cuMemFreeAsync", params.address, stream) == INVALID_VALUE  # no launch has allocated it
    for call in (("cuMemFreeAsync", params.address, stream), ("cuMemFree_v2", params.address)):
        cuda.cuGraphLaunch(exec_, stream)
        cuda.cuStreamSynchronize(stream)
        assert (ctypes.c_uint * 4).from_address(params.address)[:] == [5] * 4
        assert cuda.code("cuMemFreeHost", params.address) == INVALID_VALUE
        assert [cuda.code(*call) for _ in range(2)] == [0, INVALID_VALUE]
    freeing = Graph(cuda)  # another graph frees it, too
    freeing.add("cuGraphAddMemFreeNode", [], params.address)
    frees = freeing.executable()
    cuda.cuGraphLaunch(exec_, stream)
    cuda.cuGraphLaunch(frees, stream)
    cuda.cuStreamSynchronize(stream)
    assert cuda.code("cuMemFreeAsync", params.address, stream) == INVALID_VALUE
    for executable in (exec_, frees):
        cuda.cuGraphExecDestroy(executable)
    graph.destroy()
    freeing.destroy()


def graphs_give_no_access_to_a_device_that_does_not_exist(cuda: Cuda) -> None:
    """An allocation of a graph for such a device is refused."""
    graph = Graph(cuda)
    for number in (-1, 99):
        access = Access(DEVICE_LOCATION, number, 3)
        params, node = Alloc(Pool(1, 0, DEVICE_LOCATION), ctypes.addressof(access), 1, 4096), ctypes.c_void_p()
        made = cuda.code("cuGraphAddMemAllocNode", ctypes.byref(node), graph.handle, None, 0, ctypes.byref(params))
        assert made in (INVALID_VALUE, INVALID_DEVICE, NOT_SUPPORTED), made
    graph.destroy()


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
    graphs_give_no_access_to_a_device_that_does_not_exist,
    registered_pages_are_the_programs_own_again,
    the_worker_dies,
)
