"""Short CUDA programs of two devices that use each other's memory and wait for each other's events.

python -m tests.harness.driver.peer_acts NAME
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time

from tests.harness.driver.acts import report, stuck, works
from tests.harness.driver.calls import NON_BLOCKING, NOT_READY, Cuda
from tests.harness.driver.checks import Held
from tests.harness.driver.graphs import FUNCTION, Graph
from tests.harness.until import HANG_SECONDS, until

NO_FLAGS = ctypes.c_uint(0)
MIB = 1 << 20


def started() -> Cuda:
    """Return the driver with two devices."""
    cuda = Cuda()
    cuda.start(2)
    return cuda


def enable(cuda: Cuda, device: int) -> int:
    """Let kernels of a device use the other's memory; return the code."""
    cuda.use(device)
    return cuda.code("cuCtxEnablePeerAccess", cuda.contexts[1 - device], NO_FLAGS)


def filled(cuda: Cuda, device: int, address: int, value: int, count: int = 1024) -> None:
    """Fill words of a device's memory, and wait."""
    cuda.use(device)
    cuda.launch(device, 0, "fill", address, count, value)
    cuda.cuCtxSynchronize()


def distinct_words(cuda: Cuda, device: int, address: int, count: int = 1024) -> set[int]:
    """Return the different words of a device's memory."""
    cuda.use(device)
    return set(memoryview(cuda.read(address, 4 * count)).cast("I"))


def access() -> None:
    """Enable peer access between devices, and copy with it and without."""
    cuda = started()
    pair = ctypes.c_int(0), ctypes.c_int(1)
    can = cuda.out("cuDeviceCanAccessPeer", *pair, kind=ctypes.c_int)
    attributes = [cuda.out("cuDeviceGetP2PAttribute", ctypes.c_int(k), *pair, kind=ctypes.c_int) for k in (1, 2, 3, 4)]
    report("can", can, attributes, cuda.out("cuDeviceCanAccessPeer", pair[0], pair[0], kind=ctypes.c_int))
    cuda.use(0)
    peer, own = cuda.contexts[1], cuda.contexts[0]
    wrong = [("cuCtxEnablePeerAccess", peer, ctypes.c_uint(1)), ("cuCtxEnablePeerAccess", own, NO_FLAGS)]
    wrong += [("cuCtxEnablePeerAccess", 77, NO_FLAGS), ("cuCtxDisablePeerAccess", peer)]
    report("wrong", *(cuda.code(*call) for call in wrong))
    report("enabled", enable(cuda, 0), enable(cuda, 0), enable(cuda, 1))
    cuda.use(0)
    report("disabled", cuda.code("cuCtxDisablePeerAccess", peer), cuda.code("cuCtxDisablePeerAccess", peer))
    source = cuda.alloc(4096)
    filled(cuda, 0, source, 5)
    cuda.use(1)
    target = cuda.alloc(4096)
    cuda.cuMemcpyDtoD_v2(target, source, 4096)
    report("copied", distinct_words(cuda, 1, target))
    if not can:
        return
    for k in range(6):  # memory that was mapped later
        cuda.use(0)
        grown = cuda.alloc(MIB << k)
        end = grown + (MIB << k) - 4096
        filled(cuda, 0, end, k)
        cuda.use(1)
        cuda.launch(1, 0, "copy", target, end, 4096)
        assert distinct_words(cuda, 1, target) == {k}, k
    report("grown")


def frees() -> None:
    """A free waits for a copy of the other device that reads the block; its next owner does not change that copy."""
    cuda = started()
    cuda.use(0)
    block = cuda.alloc(8 * MIB)
    filled(cuda, 0, block, 7)
    stream, word = stuck(cuda, 1)
    cuda.use(1)
    target = cuda.alloc(8 * MIB)
    cuda.cuMemcpyPeerAsync(target, cuda.contexts[1], block, cuda.contexts[0], 8 * MIB, stream)
    freed = threading.Event()

    def free() -> None:
        cuda.use(0)
        cuda.cuMemFree_v2(block)
        freed.set()

    thread = threading.Thread(target=free)
    thread.start()
    report("waits", not freed.wait(0.2))
    cuda.use(0)
    again = cuda.alloc(8 * MIB)
    filled(cuda, 0, again, 9)
    report("another", again != block)
    cuda.use(1)
    cuda.cuMemsetD32Async(word, ctypes.c_uint(1), 1, cuda.stream(NON_BLOCKING))
    thread.join()
    cuda.cuStreamSynchronize(stream)
    report("right", distinct_words(cuda, 1, target) == {7}, freed.is_set())


def graph_memory() -> None:
    """Memory of a graph goes when the other device is done with it; other graphs do not wait for that."""
    cuda = started()
    code = enable(cuda, 1)
    cuda.use(0)
    graph = Graph(cuda)
    graph.alloc([], 4096)
    _, word = stuck(cuda, 1)
    destroyed = threading.Event()

    def destroy() -> None:
        cuda.use(0)
        graph.destroy()
        destroyed.set()

    thread = threading.Thread(target=destroy)
    thread.start()
    is_blocked, destroyer = not destroyed.wait(0.2), threading.Thread(target=lambda: Graph(cuda).destroy())
    destroyer.start()
    destroyer.join(HANG_SECONDS)
    report("waits", is_blocked and not destroyed.is_set(), "others", destroyer.is_alive())
    cuda.use(1)
    cuda.cuMemsetD32Async(word, ctypes.c_uint(1), 1, cuda.stream(NON_BLOCKING))
    thread.join()
    destroyer.join()
    report("done", code, destroyed.is_set())


def graph_memory_behind() -> None:
    """The same where a launch's end behind a host function drops it: other host functions do not wait for that."""
    cuda = started()
    code = enable(cuda, 1)
    held = Held(cuda)
    graph, stream, ran = Graph(cuda), cuda.stream(NON_BLOCKING), threading.Semaphore(0)
    node, address = graph.alloc([], 64 * MIB)
    graph.host([graph.fill([node], address, 1, 4)], ran.release)
    exec_ = graph.executable()
    cuda.cuGraphLaunch(exec_, held.stream)
    cuda.cuGraphExecDestroy(exec_)
    graph.destroy()
    _, word = stuck(cuda, 1)
    held.release()
    acquired, run = [ran.acquire(timeout=HANG_SECONDS)], FUNCTION(lambda _: ran.release())
    for _ in range(2):  # when the first function runs, the launch has ended
        cuda.cuLaunchHostFunc(stream, run, None)
        acquired.append(ran.acquire(timeout=HANG_SECONDS))
    block = ctypes.c_uint64()
    report("ran", *acquired, "freed", cuda.code("cuMemAlloc_v2", ctypes.byref(block), 64 * MIB) == 0)
    cuda.use(1)
    cuda.cuMemsetD32Async(word, ctypes.c_uint(1), 1, cuda.stream(NON_BLOCKING))
    cuda.use(0)
    report("done", code, until(lambda: cuda.code("cuMemAlloc_v2", ctypes.byref(block), 64 * MIB) == 0))


def comes_back() -> None:
    """The other device sees memory that is freed and mapped again at the same addresses."""
    cuda = started()
    codes = enable(cuda, 0), enable(cuda, 1)
    cuda.use(1)
    target = cuda.alloc(8192)
    matches, addresses = [], set()
    for k, size in enumerate([40, 60, 30, 70, 20, 90]):
        cuda.use(0)
        block = cuda.alloc(size * MIB)
        addresses.add(block)
        end = block + size * MIB - 4096
        filled(cuda, 0, block, k)
        filled(cuda, 0, end, k + 100)
        cuda.use(1)
        cuda.launch(1, 0, "copy", target, block, 4096)
        cuda.launch(1, 0, "copy", target + 4096, end, 4096)
        matches.append(distinct_words(cuda, 1, target, 2048) == {k, k + 100})
        cuda.use(0)
        cuda.cuMemFree_v2(block)
    report("codes", *codes, "seen", all(matches), "again", len(addresses) < 6)


def waits_for_event() -> None:
    """A stream waits for the other device's event; the program and other streams do not."""
    cuda = started()
    stream, word = stuck(cuda, 0)
    event = cuda.event()
    cuda.cuEventRecord(event, stream)
    cuda.use(1)
    waiter, free = cuda.stream(NON_BLOCKING), cuda.stream(NON_BLOCKING)
    target = cuda.alloc(4096)
    filled(cuda, 1, target, 1)
    begin = time.monotonic()
    cuda.cuStreamWaitEvent(waiter, event, NO_FLAGS)
    cuda.launch(1, waiter, "fill", target, 1024, 2)
    cuda.cuStreamWaitEvent(free, cuda.event(), NO_FLAGS)  # never recorded
    cuda.cuStreamSynchronize(free)
    report(
        "posted",
        time.monotonic() - begin < 20,
        cuda.code("cuStreamQuery", waiter) == NOT_READY,
        distinct_words(cuda, 1, target),
    )
    cuda.use(0)
    cuda.cuEventDestroy_v2(event)  # the wait that was enqueued stays
    cuda.cuMemsetD32Async(word, ctypes.c_uint(1), 1, cuda.stream(NON_BLOCKING))
    cuda.use(1)
    cuda.cuStreamSynchronize(waiter)
    report("done", distinct_words(cuda, 1, target))


def synchronous() -> None:
    """The other device sees the data of a synchronous call, which runs after earlier work of both devices."""
    cuda = started()
    codes = enable(cuda, 0), enable(cuda, 1)
    cuda.use(0)
    source = cuda.alloc(65536)
    cuda.use(1)
    target, free = cuda.alloc(65536), cuda.stream(NON_BLOCKING)
    wrong = 0
    for k in range(30):
        cuda.use(0)
        cuda.write(source, bytes([k]) * 65536)
        cuda.use(1)
        cuda.launch(1, free, "copy", target, source, 65536)
        cuda.cuStreamSynchronize(free)
        wrong += cuda.read(target, 65536) != bytes([k]) * 65536
        cuda.use(0)
        cuda.launch(0, 0, "nap", 300)
        cuda.launch(0, 0, "fill", source, 1024, k + 50)
        cuda.use(1)
        cuda.cuMemcpyPeer(target, cuda.contexts[1], source, cuda.contexts[0], 4096)
        wrong += distinct_words(cuda, 1, target) != {k + 50}
    report("codes", *codes, "wrong", wrong)


def rows() -> None:
    """All rows of a synchronous copy wait for earlier work of the other device; other copies do not."""
    cuda = started()
    codes = enable(cuda, 0), enable(cuda, 1)
    rows_found = []
    for to_other in (False, True):  # device 1 copies from device 0's memory, or to it
        cuda.use(0)
        source = cuda.alloc(8192)
        filled(cuda, 0, source, 1, 2048)
        _, word = stuck(cuda, 0, 0)
        cuda.launch(0, 0, "fill", source, 2048, 2)
        cuda.use(1)
        target = cuda.alloc(8192)
        filled(cuda, 1, target, 3, 2048)

        def release(word: int = word) -> None:
            cuda.use(0)
            cuda.cuMemsetD32Async(word, ctypes.c_uint(1), 1, cuda.stream(NON_BLOCKING))

        timer = threading.Timer(0.1, release)
        timer.start()
        ends = cuda.end(target, 1024), cuda.end(source, 1024)
        cuda.rows(*(ends[::-1] if to_other else ends), width=512, height=8)
        timer.join()
        rows_found.append(rows_of(cuda, *((0, source) if to_other else (1, target))))
    report("codes", *codes, "rows", *rows_found)


def pinned_address(cuda: Cuda, address: int) -> int:
    """Return the address of pinned memory on the current device."""
    return cuda.out("cuMemHostGetDevicePointer_v2", address, NO_FLAGS)


def pinned() -> None:
    """Kernels and copies of both devices use pinned memory, whichever device was current when it was allocated."""
    cuda = started()
    blocks = []
    for device in (0, 1):
        cuda.use(device)
        blocks.append(cuda.pinned(8192))
        address = cuda.alloc(4096)
        filled(cuda, device, address, 10 + device)
        # On each device, a kernel writes memory of one device, and a stream of the other device then reads it.
        for user in (0, 1):
            first, view = blocks[min(user, device)]
            stream, event = cuda.stream(NON_BLOCKING), cuda.event()
            cuda.launch(device, stream, "nap", 2000)
            cuda.launch(device, stream, "fill", first, 1024, 20 + device + user)
            cuda.cuEventRecord(event, stream)
            cuda.use(1 - device)
            target, waiter = cuda.alloc(4096), cuda.stream(NON_BLOCKING)
            cuda.cuStreamWaitEvent(waiter, event, NO_FLAGS)
            cuda.cuMemcpyHtoDAsync_v2(target, first, 4096, waiter)
            cuda.launch(1 - device, waiter, "copy", first + 4096, target, 4096)
            cuda.cuStreamSynchronize(waiter)
            report(
                "block",
                set(view[:8192].cast("I")),
                distinct_words(cuda, 1 - device, target),
                pinned_address(cuda, first) == first,
            )
            cuda.use(device)
    registered = ctypes.create_string_buffer(3 * 4096)
    start = ctypes.addressof(registered) + 4095 & ~4095
    mapped = cuda.code("cuMemHostRegister_v2", start, 4096, ctypes.c_uint(2))
    cuda.use(0)
    cuda.launch(0, 0, "fill", pinned_address(cuda, start), 1024, 30)
    cuda.cuCtxSynchronize()
    report("registered", mapped, set((ctypes.c_uint32 * 1024).from_address(start)))
    for device in (0, 1):
        cuda.use(device)
        later, view = cuda.pinned(4096)
        cuda.use(1 - device)
        cuda.launch(1 - device, 0, "fill", later, 1024, 40)
        report("freed", cuda.code("cuMemFreeHost", later), works(cuda, 1 - device))
        cuda.use(device)
    cuda.cuDevicePrimaryCtxReset_v2(ctypes.c_int(1))
    cuda.contexts[1] = cuda.out("cuDevicePrimaryCtxRetain", ctypes.c_int(1))
    cuda.use(1)
    cuda.load(1)
    cuda.launch(1, 0, "fill", blocks[0][0], 1024, 50)
    cuda.cuCtxSynchronize()
    report("reset", set(blocks[0][1][:4096].cast("I")), cuda.code("cuMemFreeHost", blocks[1][0]))


def rows_of(cuda: Cuda, device: int, address: int) -> list[set[int]]:
    """Return the distinct words of the copied rows, and of the gaps between them."""
    found = [distinct_words(cuda, device, address + at, 128) for at in range(0, 8192, 512)]
    return [set[int]().union(*found[half::2]) for half in (0, 1)]


def lost() -> None:
    """The other device's worker ends while its memory is mapped here and a stream waits for its event."""
    cuda = started()
    enable(cuda, 1)
    cuda.use(0)
    block = cuda.alloc(MIB)
    filled(cuda, 0, block, 8, MIB // 4)
    stream, _ = stuck(cuda, 0)
    event = cuda.event()
    cuda.cuEventRecord(event, stream)
    busy, word = stuck(cuda, 1)
    cuda.use(1)
    target, waiter = cuda.alloc(MIB), cuda.stream(NON_BLOCKING)
    cuda.cuMemcpyDtoDAsync_v2(target, block, MIB, busy)  # begins after the owner of the memory has exited
    cuda.cuStreamWaitEvent(waiter, event, NO_FLAGS)
    cuda.launch(1, waiter, "fill", target, 4, 3)
    assert cuda.code("cuStreamQuery", waiter) == NOT_READY  # the worker has read all calls
    report("waiting")
    sys.stdin.readline()
    code = cuda.code("cuStreamSynchronize", waiter)
    report("told", code, cuda.code("cuStreamSynchronize", waiter), works(cuda, 1))
    cuda.use(1)
    codes = [cuda.code("cuMemcpyDtoDAsync_v2", target, block, 4096, waiter), cuda.code("cuStreamSynchronize", waiter)]
    report("refused", any(codes), works(cuda, 1))
    cuda.use(0)
    cuda.cuDevicePrimaryCtxReset_v2(ctypes.c_int(0))
    cuda.contexts[0] = cuda.out("cuDevicePrimaryCtxRetain", ctypes.c_int(0))
    cuda.use(0)
    cuda.load(0)
    block = cuda.alloc(MIB)
    filled(cuda, 0, block, 4)
    cuda.use(1)
    cuda.cuMemcpyDtoD_v2(target, block, 4096)  # the old memory is still in use, so the copy goes through the program
    report("by the way", distinct_words(cuda, 1, target))
    cuda.cuMemsetD32Async(word, ctypes.c_uint(1), 1, cuda.stream(NON_BLOCKING))
    cuda.use(1)
    cuda.cuStreamSynchronize(busy)
    report("copied", distinct_words(cuda, 1, target + MIB // 2))
    code = enable(cuda, 1)
    filled(cuda, 0, block, 6)
    cuda.use(1)
    cuda.launch(1, waiter, "copy", target, block, 4096)
    cuda.cuStreamSynchronize(waiter)
    report("linked again", code, distinct_words(cuda, 1, target))


if __name__ == "__main__":
    globals()[sys.argv[1]]()
