"""Managed memory: with one device it is shared by program and kernels; with several devices it is not supported."""

from __future__ import annotations

import ctypes

from tests.harness.driver.calls import INVALID_DEVICE, INVALID_VALUE, NON_BLOCKING, NOT_SUPPORTED, SUCCESS, Cuda
from tests.harness.driver.checks import fresh
from tests.harness.driver.graphs import DEVICE_LOCATION, HOST_LOCATION, Alloc, Graph, Pool
from tests.harness.driver.pool_checks import USED, get, take

MANAGED_MEMORY, CONCURRENT = 83, 89
MEMORY_TYPE, DEVICE_POINTER, HOST_POINTER, IS_MANAGED, ORDINAL = 2, 3, 4, 8, 9
MANAGED = 2
ON_HOST, ON_DEVICE = ctypes.c_int(-1), ctypes.c_int(0)


def managed(cuda: Cuda, nbytes: int, flags: int = 1) -> tuple[int, memoryview]:
    """Return the address of managed memory, and its bytes as the program reads and writes them."""
    address = cuda.out("cuMemAllocManaged", nbytes, ctypes.c_uint(flags))
    return address, memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B").cast("I")


def serves(cuda: Cuda) -> bool:
    """Return whether the devices' attributes promise it."""
    is_single = len(cuda.contexts) == 1
    for attribute in (MANAGED_MEMORY, CONCURRENT):
        assert cuda.out("cuDeviceGetAttribute", ctypes.c_int(attribute), ON_DEVICE, kind=ctypes.c_int) == is_single
    return is_single


def both_sides(cuda: Cuda) -> None:
    """The program, kernels, copies and memsets read what the others wrote, at one address."""
    if not serves(cuda):
        return
    for flags in (1, 2):
        address, view = managed(cuda, 8192, flags)
        stream, device_copy = cuda.stream(NON_BLOCKING), cuda.alloc(4096)
        view[0] = 7
        cuda.launch(0, stream, "add", address + 4, address, 1)
        cuda.launch(0, stream, "fill", address + 8, 10, 5)
        cuda.cuStreamSynchronize(stream)
        assert view[:13].tolist() == [7, 7, *[5] * 10, 0]
        cuda.cuMemcpyDtoD_v2(device_copy, address, 4096)
        cuda.cuMemsetD32_v2(address, ctypes.c_uint(9), 3)
        assert view[:4].tolist() == [9, 9, 9, 5] and cuda.read(device_copy, 4) == bytes([7, 0, 0, 0])
        cuda.write(address + 4096, bytes([3, 0, 0, 0] * 4))
        assert view[1024:1028].tolist() == [3] * 4 and cuda.read(address, 4) == bytes([9, 0, 0, 0])
        cuda.cuMemFree_v2(address)
        assert cuda.code("cuMemFree_v2", address) == INVALID_VALUE


def into_pinned_memory(cuda: Cuda) -> None:
    """The program finds in pinned memory the data that a synchronous call has copied there from plain memory."""
    for nbytes in (64, 100_000, 3 << 20):
        address, view = cuda.pinned(nbytes)
        cuda.write(address, b"\7" * nbytes)
        assert view[0] == view[-1] == 7, nbytes
        cuda.cuMemFreeHost(address)


def while_kernels_run(cuda: Cuda) -> None:
    """A kernel sees what the program writes while it runs; a free waits for it."""
    if not serves(cuda):
        return
    address, view = managed(cuda, 4096)
    stream = cuda.stream(NON_BLOCKING)
    cuda.launch(0, stream, "flag", address, 1)
    cuda.launch(0, stream, "fill", address + 4, 1, 6)
    assert view[1] == 0
    view[0] = 1
    cuda.cuStreamSynchronize(stream)
    assert view[1] == 6


def pointer_attribute(cuda: Cuda, address: int, attribute: int) -> int:
    """Return an attribute of a pointer."""
    value = ctypes.c_uint64()
    cuda.cuPointerGetAttribute(ctypes.byref(value), ctypes.c_int(attribute), address)
    return value.value


def what_it_is(cuda: Cuda) -> None:
    """Pointer attributes report managed memory, its device, and both addresses; it does not count as pinned."""
    if not serves(cuda):
        return
    address, _ = managed(cuda, 64)
    pinned, _ = cuda.pinned(64)
    attributes = [
        pointer_attribute(cuda, address, a) for a in (MEMORY_TYPE, DEVICE_POINTER, HOST_POINTER, IS_MANAGED, ORDINAL)
    ]
    assert attributes == [2, address, address, 1, 0]
    assert [pointer_attribute(cuda, pinned, a) for a in (MEMORY_TYPE, IS_MANAGED)] == [1, 0]
    assert cuda.code("cuMemFreeHost", address) == INVALID_VALUE
    assert cuda.code("cuMemHostGetFlags", ctypes.byref(ctypes.c_uint()), address) == INVALID_VALUE
    for nbytes, flags in ((0, 1), (64, 0), (64, 3)):
        wrong = ctypes.byref(ctypes.c_uint64()), nbytes, ctypes.c_uint(flags)
        assert cuda.code("cuMemAllocManaged", *wrong) == INVALID_VALUE
    cuda.cuMemFree_v2(address)


def hints(cuda: Cuda) -> None:
    """Prefetches and advice are taken for managed memory and places that are there, and change nothing."""
    if not serves(cuda):
        return
    address, view = managed(cuda, 64)
    view[3] = 4
    unmanaged, no_location = cuda.alloc(64), ctypes.c_uint(0)
    host, device, absent = HOST_LOCATION, DEVICE_LOCATION, DEVICE_LOCATION | 7 << 32
    for at, nbytes, location, code in (
        (address, 64, host, SUCCESS),
        (address + 8, 8, device, SUCCESS),
        (address, 64, absent, INVALID_DEVICE),
        (address, 0, host, INVALID_VALUE),
        (address, 65 << 12, host, INVALID_VALUE),
        (unmanaged, 64, device, INVALID_VALUE),
    ):
        assert cuda.code("cuMemPrefetchAsync_v2", at, nbytes, location, no_location, 0) == code, (
            at - address,
            nbytes,
            location,
        )
        assert cuda.code("cuMemAdvise_v2", at, nbytes, ctypes.c_int(3), location) == code, (
            at - address,
            nbytes,
            location,
        )
    for ordinal, code in ((ON_HOST, SUCCESS), (ON_DEVICE, SUCCESS), (ctypes.c_int(1), INVALID_DEVICE)):
        assert cuda.code("cuMemPrefetchAsync", address, 64, ordinal, 0) == code
        assert cuda.code("cuMemAdvise", address, 64, ctypes.c_int(5), ordinal) == code
    assert cuda.code("cuMemAdvise", address, 64, ctypes.c_int(9), ON_HOST) == INVALID_VALUE
    assert view[3] == 4
    cuda.cuMemFree_v2(address)


def pools(cuda: Cuda) -> None:
    """Pools of managed memory, and nodes of graphs, give such memory in the order of streams."""
    if not serves(cuda):
        return
    default = cuda.out("cuMemGetDefaultMemPool", ctypes.byref(ctypes.c_uint64(0)), ctypes.c_int(MANAGED))
    own = cuda.out("cuMemPoolCreate", ctypes.byref(Pool(MANAGED, 0, 0, 0, None, 2 << 20)))
    stream = cuda.stream(NON_BLOCKING)
    for pool in (default, own):
        cuda.launch(0, stream, "nap", 20_000)
        address = take(cuda, pool, 5000, stream)
        cuda.launch(0, stream, "fill", address, 4, 8)
        cuda.cuMemFreeAsync(address, stream)
        block = take(cuda, pool, 4096, stream)
        cuda.launch(0, stream, "fill", block, 2, 3)
        cuda.cuStreamSynchronize(stream)
        assert ctypes.c_uint.from_address(block + 4).value == 3 and pointer_attribute(cuda, block, IS_MANAGED) == 1
        assert get(cuda, pool, USED) == 4096
        cuda.cuMemFreeAsync(block, stream)
        assert get(cuda, pool, USED) == 0
    assert not take(cuda, own, 3 << 20, 0)
    cuda.cuMemPoolDestroy(own)
    graph = Graph(cuda)
    node = Alloc(Pool(MANAGED, 0, DEVICE_LOCATION, 0), nbytes=64)
    made = graph.add("cuGraphAddMemAllocNode", [], ctypes.byref(node))
    graph.fill([made], node.address, 11, 1)
    exec_ = graph.executable()
    cuda.cuGraphLaunch(exec_, 0)
    cuda.cuCtxSynchronize()
    assert ctypes.c_uint.from_address(node.address).value == 11
    cuda.cuGraphExecDestroy(exec_)
    graph.destroy()


def refused(cuda: Cuda) -> None:
    """With several devices, calls and attributes report that managed memory is not supported."""
    if serves(cuda):
        return
    pool = ctypes.byref(Pool(MANAGED, 0, 0, 0, None, 0))
    assert cuda.code("cuMemAllocManaged", ctypes.byref(ctypes.c_uint64()), 64, ctypes.c_uint(1)) == NOT_SUPPORTED
    assert cuda.code("cuMemPoolCreate", ctypes.byref(ctypes.c_uint64()), pool) == NOT_SUPPORTED
    arguments = ctypes.byref(ctypes.c_uint64()), ctypes.byref(ctypes.c_uint64(0)), ctypes.c_int(MANAGED)
    assert cuda.code("cuMemGetDefaultMemPool", *arguments) == NOT_SUPPORTED


def a_worker_is_lost(cuda: Cuda) -> None:
    """A reset frees managed memory; allocations after it work."""
    if not serves(cuda):
        return
    address, _ = managed(cuda, 4096)
    fresh(cuda)
    assert cuda.code("cuMemFree_v2", address) == INVALID_VALUE
    both_sides(cuda)


CHECKS = (both_sides, into_pinned_memory, while_kernels_run, what_it_is, hints, pools, refused, a_worker_is_lost)
