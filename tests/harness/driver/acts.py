"""Short CUDA programs that fork, wait, fail and die, for tests of their outcomes.

python -m tests.harness.driver.acts NAME
"""

from __future__ import annotations

import atexit
import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.harness.driver.calls import (
    CONTEXT_IS_DESTROYED,
    DEINITIALIZED,
    INVALID_CONTEXT,
    INVALID_HANDLE,
    NON_BLOCKING,
    NOT_INITIALIZED,
    PER_THREAD,
    Cuda,
    CudaError,
)
from tests.harness.until import HANG_SECONDS, until

ZERO = ctypes.c_uint(0)


def report(*values: object) -> None:
    """Print a line for the test, and flush it."""
    print(*values, flush=True)


def works(cuda: Cuda, ordinal: int = 0) -> bool:
    """Return whether memory of a device keeps written data, and a kernel runs."""
    cuda.use(ordinal)
    address = cuda.alloc(4096)
    data = os.urandom(4096)
    cuda.write(address, data)
    good = cuda.read(address, 4096) == data
    cuda.launch(ordinal, 0, "fill", address, 1024, 0x01020304)
    good &= cuda.read(address, 4096) == bytes([4, 3, 2, 1]) * 1024
    cuda.cuMemFree_v2(address)
    return good


def child(act: Callable[[], object]) -> int:
    """Run something in a forked child; return its exit code, 99 after `HANG_SECONDS`."""
    pid = os.fork()
    if not pid:
        try:
            os._exit(int(bool(act())))
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(98)
    end = time.monotonic() + HANG_SECONDS
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return 99


def stuck(cuda: Cuda, ordinal: int = 0, flags: int = NON_BLOCKING) -> tuple[int, int]:
    """Return a stream that never becomes ready, and the address of the word that would release it with 1."""
    cuda.use(ordinal)
    word = cuda.alloc(4)
    cuda.write(word, bytes(4))
    stream = cuda.stream(flags)
    cuda.launch(ordinal, stream, "flag", word, 1)
    return stream, word


# -- forks ---------------------------------------------------------------------------------------------------


def fork_before() -> None:
    """A child that is forked before cuInit connects itself."""

    def act() -> bool:
        cuda = Cuda()
        cuda.start()
        return works(cuda)

    cuda = Cuda()  # the library is loaded before
    report("child", child(act))
    cuda.start()
    report("parent", works(cuda), works(cuda, 1))


def fork_after() -> None:
    """A child forked after cuInit can call nothing and harms no process; a program that it executes is a new client."""
    cuda = Cuda()
    cuda.start()
    address, (pinned, view), stream = cuda.alloc(64), cuda.pinned(4096), cuda.stream()
    cuda.write(address, bytes(range(64)))

    def act() -> bool:
        value = ctypes.c_uint64()
        out = ctypes.byref(value)
        codes = {
            cuda.code("cuInit", 0),
            cuda.code("cuMemAlloc_v2", out, 64),
            cuda.code("cuMemFree_v2", address),
            cuda.code("cuMemFreeHost", pinned),
            cuda.code("cuStreamSynchronize", stream),
            cuda.code("cuStreamDestroy_v2", stream),
            cuda.code("cuCtxSynchronize"),
            cuda.code("cuCtxGetCurrent", out),
            cuda.code("cuDeviceGetCount", out),
        }
        return codes == {NOT_INITIALIZED} or bool(report(codes))

    report("child", child(act))
    report("executes", child(lambda: os.execv(sys.executable, [sys.executable, "-m", __spec__.name, "plain"])))
    report("parent", cuda.read(address, 64) == bytes(range(64)), works(cuda), works(cuda, 1))
    view[:3] = b"abc"
    cuda.cuMemcpyHtoD_v2(address, pinned, 3)
    report("pinned", cuda.read(address, 3))


def fork_among_threads() -> None:
    """Children are forked while threads post, wait and allocate: no child and no parent hangs."""
    cuda = Cuda()
    cuda.start()
    end = threading.Event()
    wrong: list[str] = []

    def work() -> None:
        try:
            while not end.is_set():
                if not works(cuda, 1):
                    wrong.append("bytes")
        except CudaError as error:
            wrong.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    codes = [child(lambda: cuda.code("cuCtxSynchronize") == NOT_INITIALIZED) for _ in range(20)]
    end.set()
    for thread in threads:
        thread.join()
    report("children", set(codes), "wrong", wrong, "parent", works(cuda))


def fork_inside_init() -> None:
    """A child is forked while another thread starts the driver: both have it.

    The worker makes the file `started` in the folder of the argument and then waits for the file `forked`.
    """
    cuda, folder = Cuda(), Path(sys.argv[2])
    thread = threading.Thread(target=cuda.code, args=("cuInit", 0))
    thread.start()
    until((folder / "started").exists)
    inside = thread.is_alive()

    def continue_start() -> bool:
        (folder / "forked").touch()
        return cuda.start(1) and works(cuda)

    code = child(continue_start)
    thread.join()
    report("inside", inside, "child", code, "parent", cuda.start(1) and works(cuda))


def little_space() -> None:
    """A program whose addresses are used up gets an error for the first device, and the device when there are more."""
    cuda = Cuda()
    cuda.cuInit(0)

    def leave(mebibytes: int) -> None:
        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (mebibytes << 20), resource.RLIM_INFINITY))

    leave(40)
    out = ctypes.c_uint64()
    codes = [cuda.code("cuDevicePrimaryCtxRetain", ctypes.byref(out), ctypes.c_int(0)) for _ in range(2)]
    leave(400)
    report("codes", *codes, "then", cuda.start(1) and works(cuda))


def plain() -> None:
    """A whole small program; exits with 1 where it works."""
    cuda = Cuda()
    cuda.start()
    sys.exit(int(works(cuda) and works(cuda, 1)))


def executes() -> None:
    """A program that becomes another one, with work under way."""
    cuda = Cuda()
    cuda.start()
    stuck(cuda)
    os.execv(sys.executable, [sys.executable, "-m", __spec__.name, "plain"])


# -- loss ------------------------------------------------------------------------------------------------------


def waits_for_killed_worker() -> None:
    """Wait for a stream that never becomes ready; the worker is killed meanwhile. A reset brings a new one."""
    cuda = Cuda()
    cuda.start()
    old, event, buffer = cuda.stream(), cuda.event(), cuda.alloc(64)
    stream, _ = stuck(cuda)
    codes: list[int] = []

    def wait(call: str, *arguments: object) -> None:
        cuda.use(0)
        codes.append(cuda.code(call, *arguments))

    cuda.cuEventRecord(event, stream)
    target = ctypes.create_string_buffer(8)
    threads = [
        threading.Thread(target=wait, args=arguments)
        for arguments in (
            ("cuStreamSynchronize", stream),
            ("cuCtxSynchronize",),
            ("cuEventSynchronize", event),
            ("cuMemcpyDtoHAsync_v2", target, buffer, 8, stream),
        )
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    report("waiting")
    for thread in threads:
        thread.join()
    value = ctypes.c_uint64()
    report("codes", 0 in codes, len(set(codes)), cuda.code("cuMemAlloc_v2", ctypes.byref(value), 8) == codes[0])
    report("other device", works(cuda, 1))
    cuda.use(0)
    cuda.cuDevicePrimaryCtxReset_v2(ctypes.c_int(0))
    cuda.contexts[0] = cuda.out("cuDevicePrimaryCtxRetain", ctypes.c_int(0))
    cuda.use(0)
    cuda.load(0)
    report("after reset", works(cuda), works(cuda, 1))
    invalid_codes = (INVALID_HANDLE, CONTEXT_IS_DESTROYED, INVALID_CONTEXT)
    calls = ("cuStreamDestroy_v2", old), ("cuEventDestroy_v2", event), ("cuStreamQuery", stream)
    report(
        "old handles", all(cuda.code(*call) in invalid_codes for call in calls), cuda.code("cuMemFree_v2", buffer) != 0
    )


def hangs() -> None:
    """Wait without end for a stream."""
    cuda = Cuda()
    cuda.start()
    stream, _ = stuck(cuda)
    report("waiting")
    cuda.cuStreamSynchronize(stream)


def leaves() -> None:
    """End with work under way that never ends, and calls in exit handlers and finalizers."""
    cuda = Cuda()
    cuda.start()
    stream, word = stuck(cuda)
    event = cuda.event()
    cuda.cuEventRecord(event, stream)

    def work_at_exit() -> None:
        codes = [cuda.code("cuEventDestroy_v2", event), cuda.code("cuStreamDestroy_v2", stream)]
        codes += [cuda.code("cuMemFree_v2", word), cuda.code("cuEventDestroy_v2", event)]
        codes += [cuda.code("cuDevicePrimaryCtxRelease_v2", ctypes.c_int(0)), cuda.code("cuMemFree_v2", word)]
        report("late", codes[:3], all(code not in (0, DEINITIALIZED) for code in codes[3:4] + codes[5:]))

    atexit.register(work_at_exit)


def faults() -> None:
    """Lose a context by a kernel, and find the same code everywhere, until a reset."""
    cuda = Cuda()
    cuda.start()
    report("before", works(cuda), works(cuda, 1))
    cuda.use(0)
    buffer = cuda.alloc(64)
    cuda.launch(0, 0, sys.argv[2])
    codes = [cuda.code("cuCtxSynchronize"), cuda.code("cuMemFree_v2", buffer), cuda.code("cuStreamSynchronize", 0)]
    out = ctypes.byref(ctypes.c_uint64())
    codes += [cuda.code("cuMemAlloc_v2", out, 8), cuda.code("cuStreamCreate", out, ZERO)]
    report("codes", *codes)
    report("other device", works(cuda, 1))
    cuda.cuDevicePrimaryCtxReset_v2(ctypes.c_int(0))
    cuda.contexts[0] = cuda.out("cuDevicePrimaryCtxRetain", ctypes.c_int(0))
    cuda.use(0)
    cuda.load(0)
    report("after reset", works(cuda))


# -- order, signals, output ------------------------------------------------------------------------------------


def stuck_beside() -> None:
    """Streams that never become ready do not delay others, however many calls are posted and however many wait."""
    cuda = Cuda()
    cuda.start()
    size = int(sys.argv[2]) if len(sys.argv) > 2 else 8 << 20  # fills an eighth of the staging places
    big = cuda.alloc(size)
    stream, word = stuck(cuda)
    more = [cuda.stream(NON_BLOCKING) for _ in range(8)]
    for each in more:
        cuda.launch(0, each, "flag", word, 1)
    posted = threading.Event()
    codes: list[int] = []

    def fill(stream: int, times: int) -> None:
        cuda.use(0)
        data = ctypes.create_string_buffer(size)
        for _ in range(times):
            cuda.cuMemcpyHtoDAsync_v2(big, data, len(data), stream)
        if times > 1:
            posted.set()

    def wait() -> None:
        cuda.use(0)
        codes.append(cuda.code("cuStreamSynchronize", stream))

    def launches() -> None:
        cuda.use(0)
        for _ in range(6000):  # more calls than the layer lets a stream be ahead
            cuda.launch(0, stream, "nap", 0)

    threads = [threading.Thread(target=fill, args=(stream, 12))]  # more bytes than all staging buffers together
    threads += [threading.Thread(target=launches)]
    threads += [threading.Thread(target=fill, args=(each, 1)) for each in more]
    threads += [threading.Thread(target=wait) for _ in range(260)]  # more threads than answer slots
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    good = [works(cuda), works(cuda, 1)]
    free_stream = cuda.stream(NON_BLOCKING)
    event = cuda.event()
    data = os.urandom(3 << 20)
    cuda.use(0)
    target = ctypes.create_string_buffer(len(data))
    address = cuda.alloc(len(data))
    cuda.cuMemcpyHtoDAsync_v2(address, data, len(data), free_stream)
    cuda.cuMemcpyDtoHAsync_v2(target, address, len(data), free_stream)
    cuda.cuEventRecord(event, free_stream)
    cuda.cuEventSynchronize(event)
    good.append(target.raw[: len(data)] == data)
    report("independent", good, "still stuck", cuda.code("cuStreamQuery", stream) == 600)
    report("held back", not posted.is_set())
    ready_word = (ctypes.c_uint32 * 1)(1)
    cuda.cuMemcpyHtoDAsync_v2(word, ready_word, 4, free_stream)
    for thread in threads:
        thread.join()
    cuda.cuStreamSynchronize(stream)
    report("released", posted.is_set(), cuda.code("cuStreamQuery", stream), len(codes), {*codes})


def backlog() -> None:
    """Post more than the ring holds while the worker is stopped; nothing is lost or reordered when it continues."""
    cuda = Cuda()
    cuda.start()
    streams = [cuda.stream(NON_BLOCKING) for _ in range(int(sys.argv[2]) if len(sys.argv) > 2 else 24)]
    address = cuda.alloc(4 * len(streams) * 100)
    cuda.cuCtxSynchronize()
    # Of one stream, fewer calls than the layer lets it be ahead.
    rounds = range(int(sys.argv[3]) if len(sys.argv) > 3 else 840 // len(streams) * 100)
    count = [0]

    def post() -> None:
        cuda.use(0)
        for value in rounds:
            for i, stream in enumerate(streams):
                word = address + 4 * (100 * i + value % 100)
                cuda.cuMemsetD32Async(word, ctypes.c_uint(value), 1, stream)
                count[0] += 1

    report("stop")
    sys.stdin.readline()
    thread = threading.Thread(target=post)
    thread.start()
    last_count, least_count = -1, 0 if len(sys.argv) > 2 else 40_000
    while count[0] != last_count or last_count <= least_count:
        last_count = count[0]
        time.sleep(0.3)
    report("blocked", last_count < len(rounds) * len(streams))
    sys.stdin.readline()
    thread.join()
    cuda.cuCtxSynchronize()
    values = memoryview(cuda.read(address, 4 * len(streams) * 100)).cast("I").tolist()
    report("right", values == list(rounds[-100:]) * len(streams))


def interrupted() -> None:
    """A Ctrl-C while a call waits is the program's affair: the worker lives."""
    cuda = Cuda()
    cuda.start()
    stream = cuda.stream()
    cuda.launch(0, stream, "nap", 500_000)
    try:
        report("waiting")
        cuda.cuStreamSynchronize(stream)
        time.sleep(HANG_SECONDS)
    except KeyboardInterrupt:
        cuda.cuStreamSynchronize(stream)
        report("interrupted", cuda.code("cuStreamQuery", stream), works(cuda))


def prints() -> None:
    """Output of device code follows what C code printed before the launch, and precedes a synchronization's return."""
    cuda = Cuda()
    cuda.start()
    for value in range(3):
        ctypes.CDLL(None).printf(b"before %d\n", value)  # stays in the buffer of a redirected stdout
        cuda.launch(0, 0, "print", value)
        cuda.cuCtxSynchronize()
        report("host", value)


def threads_end() -> None:
    """Many threads with default streams of their own come and go."""
    cuda = Cuda()
    cuda.start()
    address = cuda.alloc(4 * 400)
    wrong: list[int] = []

    def work(i: int) -> None:
        cuda.use(0)
        cuda.launch(0, PER_THREAD, "fill", address + 4 * i, 1, i)
        wrong.extend(code for code in [cuda.code("cuStreamSynchronize", PER_THREAD)] if code)

    for first in range(0, 400, 20):
        threads = [threading.Thread(target=work, args=(i,)) for i in range(first, first + 20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    values = memoryview(cuda.read(address, 1600)).cast("I").tolist()
    report("right", values == list(range(400)), wrong)


def switches() -> None:
    """Push contexts of two devices 10,000 times on each of two threads, as numba-cuda does, and pop them all."""
    cuda = Cuda()
    cuda.start()
    wrong: list[str] = []

    def work() -> None:
        count = 10_000
        codes = {cuda.code("cuCtxPushCurrent_v2", cuda.contexts[i % 2]) for i in range(count)}
        popped = [cuda.out("cuCtxPopCurrent_v2") for _ in range(count)]
        if codes != {0} or popped != [cuda.contexts[i % 2] for i in reversed(range(count))]:
            wrong.append(f"codes {codes}")
        wrong.extend(f"empty {code}" for code in [cuda.code("cuCtxPopCurrent_v2", None)] if code != INVALID_CONTEXT)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report("right", works(cuda), works(cuda, 1), wrong)


def handles() -> None:
    """Invalid and destroyed handles are refused and not dereferenced."""
    cuda = Cuda()
    cuda.start()
    stream, event = cuda.stream(), cuda.event()
    cuda.cuStreamDestroy_v2(stream)
    cuda.cuEventDestroy_v2(event)
    bad = [3, 0x1000, 0xDEADBEEF000, stream, event, cuda.contexts[0], cuda.modules[0], cuda.functions[0, "nap"]]
    codes = {cuda.code("cuStreamSynchronize", handle) for handle in bad}
    codes |= {cuda.code("cuEventQuery", handle) for handle in [0, *bad]} | {
        cuda.code("cuEventRecord", handle, 0) for handle in bad
    }
    report("codes", codes <= {INVALID_HANDLE, INVALID_CONTEXT, CONTEXT_IS_DESTROYED}, sorted(codes), works(cuda))


if __name__ == "__main__":
    globals()[sys.argv[1]]()
