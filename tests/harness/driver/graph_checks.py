"""Checks of CUDA's promises for graphs that are built node by node."""

from __future__ import annotations

import ctypes
import random
import threading

from tests.harness.driver.calls import INVALID_VALUE, NON_BLOCKING, NOT_READY, NOT_SUPPORTED, Cuda
from tests.harness.driver.checks import Held, fresh, read_words
from tests.harness.driver.graphs import (
    COPY_NODE,
    EMPTY_NODE,
    FUNCTION,
    Graph,
    Kernel,
    Made,
    Set,
    Update,
    copied,
    filled,
)
from tests.harness.until import until

UPDATE_FAILED, TOPOLOGY, TYPE, PARAMETERS = 910, 2, 3, 5
AUTO_FREE, DEVICE_LAUNCH = 1, 4
USED, USED_HIGH, RESERVED, RESERVED_HIGH = range(4)


def launch(cuda: Cuda, exec_: int, stream: int, times: int = 1) -> None:
    """Launch a graph, and wait."""
    for _ in range(times):
        cuda.cuGraphLaunch(exec_, stream)
    cuda.cuStreamSynchronize(stream)


def every_kind(cuda: Cuda) -> None:
    """Nodes of each kind do their work in the order of their edges, in each of many launches."""
    x, y, z, stream, event = cuda.alloc(1024), cuda.alloc(1024), cuda.alloc(1024), cuda.stream(), cuda.event()
    address, view = cuda.pinned(1024)
    snapshots, numbers = [], view.cast("I")

    def doubles() -> None:
        snapshots.append(set(numbers))
        for k in range(256):
            numbers[k] *= 2

    graph, child = Graph(cuda), Graph(cuda)
    child.kernel([], "add", y, x, 256)
    a = graph.fill([], x, 3, 256)
    b = graph.kernel([a], "copy", y, x, 1024)
    deps = ctypes.c_uint64(b)
    node = ctypes.c_uint64()
    cuda.cuGraphAddChildGraphNode(ctypes.byref(node), graph.handle, ctypes.byref(deps), 1, child.handle)
    child.destroy()  # the node has a clone
    c = graph.copy([node.value], address, y, 1024)
    d = graph.host([c], doubles)
    e = graph.copy([d], z, address, 1024)
    block, memory = graph.alloc([e], 1024)
    f = graph.kernel([block], "copy", memory, z, 1024)
    g = graph.kernel([f], "add", z, memory, 256)
    freed = graph.free([g], memory)
    h = graph.add("cuGraphAddEventRecordNode", [freed], event)
    i = graph.add("cuGraphAddEventWaitNode", [h], event)
    graph.add("cuGraphAddEmptyNode", [i])
    exec_ = graph.executable()
    graph.destroy()
    for times in (1, 2, 7):
        snapshots.clear()
        for _ in range(times):
            cuda.cuGraphLaunch(exec_, stream)
        cuda.cuStreamSynchronize(stream)
        assert snapshots == [{6}] * times
        cuda.cuEventSynchronize(event)
        assert set(read_words(cuda, z, 256)) == {24}
    cuda.cuGraphExecDestroy(exec_)


def edges_are_the_order(cuda: Cuda) -> None:
    """Nodes run in the order of their edges, independent of the order of their creation."""
    increment, x, stream = cuda.alloc(4), cuda.alloc(4), cuda.stream()
    cuda.write(increment, bytes([1, 0, 0, 0]))
    for seed in range(4):
        rng = random.Random(seed)
        steps = [rng.choice(["double", "add"]) for _ in range(20)]
        graph, nodes = Graph(cuda), {}
        for k in rng.sample(range(20), 20):
            nodes[k] = graph.kernel([], "add", x, x if steps[k] == "double" else increment, 1)
        for k in range(19):
            assert graph.link(nodes[k], nodes[k + 1]) == 0
            assert graph.link(nodes[k], nodes[k + 1]) == INVALID_VALUE  # they are linked
            for successor in rng.sample(range(k + 2, 20), min(2, 18 - k)):
                assert graph.link(nodes[k], nodes[successor]) == 0
        first = graph.fill([], x, 1, 1)
        assert graph.link(first, nodes[0]) == 0
        want = 1
        for step in steps:
            want = want * 2 if step == "double" else want + 1
        assert graph.nodes("cuGraphGetRootNodes") == [first]
        assert nodes[0] in graph.nodes("cuGraphNodeGetDependencies", nodes[1])
        assert nodes[1] in graph.nodes("cuGraphNodeGetDependentNodes", nodes[0])
        exec_ = graph.executable()
        launch(cuda, exec_, stream, 3)
        assert read_words(cuda, x, 1) == [want]


def launches_keep_their_place(cuda: Cuda) -> None:
    """A launch comes after what its stream had to do, before what comes behind, and after the last one of its graph."""
    step, x, y = cuda.alloc(4), cuda.alloc(4), cuda.alloc(4)
    cuda.write(step, bytes([1, 0, 0, 0]))
    cuda.write(x, bytes(4))
    held, other_stream, plain = Held(cuda), cuda.stream(NON_BLOCKING), cuda.stream(NON_BLOCKING)
    graph = Graph(cuda)
    graph.kernel([graph.kernel([], "add", x, step, 1)], "add", x, x, 1)
    exec_, unordered = graph.executable(), graph.executable()
    cuda.cuGraphLaunch(exec_, held.stream)
    cuda.cuMemcpyDtoDAsync_v2(y, x, 4, held.stream)
    assert read_words(cuda, x, 1) == [0]
    held.release()
    cuda.cuStreamSynchronize(held.stream)
    assert read_words(cuda, y, 1) == [2]
    held.hold()
    cuda.cuGraphLaunch(exec_, held.stream)
    cuda.cuGraphLaunch(exec_, other_stream)
    launch(cuda, unordered, plain)  # another executable graph: its launch waits for no other launch
    assert read_words(cuda, x, 1) == [6]
    assert cuda.code("cuStreamQuery", other_stream) == NOT_READY
    held.release()
    cuda.cuStreamSynchronize(other_stream)
    assert read_words(cuda, x, 1) == [30]


def updates(cuda: Cuda) -> None:
    """An update applies to later launches only; an invalid update changes nothing."""
    x, y, held = cuda.alloc(64), cuda.alloc(64), Held(cuda)
    old, new, longer, other_type = (Graph(cuda) for _ in range(4))
    for graph, value in ((old, 5), (new, 6)):
        graph.copy([graph.fill([], x, value, 16)], y, x, 64)
    longer.copy([longer.fill([longer.fill([], x, 1, 16)], x, 7, 16)], y, x, 64)
    other_type.fill([other_type.fill([], x, 7, 16)], y, 7, 16)
    exec_ = old.executable()
    cuda.cuGraphLaunch(exec_, held.stream)
    info = Update()
    cuda.cuGraphExecUpdate_v2(exec_, new.handle, ctypes.byref(info))
    assert info.result == 0
    held.release()
    cuda.cuStreamSynchronize(held.stream)
    assert set(read_words(cuda, y, 16)) == {5}
    for graph, why in ((longer, TOPOLOGY), (other_type, TYPE)):
        assert cuda.code("cuGraphExecUpdate_v2", exec_, graph.handle, ctypes.byref(info)) == UPDATE_FAILED
        assert info.result == why
    launch(cuda, exec_, held.stream)
    assert set(read_words(cuda, y, 16)) == {6}
    cuda.use(1)
    elsewhere = Graph(cuda)
    far = cuda.alloc(64)
    elsewhere.copy([elsewhere.fill([], far, 8, 16, 1)], far, far, 64, 1)
    cuda.use(0)
    assert cuda.code("cuGraphExecUpdate_v2", exec_, elsewhere.handle, ctypes.byref(info)) == UPDATE_FAILED
    assert info.result == PARAMETERS
    fill, copy = old.nodes()
    assert cuda.code("cuGraphExecMemsetNodeSetParams", exec_, copy, ctypes.byref(filled(x, 1, 1)), 0) == INVALID_VALUE
    cuda.cuGraphExecMemsetNodeSetParams(exec_, fill, ctypes.byref(filled(x, 9, 8)), cuda.contexts[0])
    cuda.cuGraphExecMemcpyNodeSetParams(exec_, copy, ctypes.byref(copied(y, x, 48)), cuda.contexts[0])
    launch(cuda, exec_, held.stream)
    assert read_words(cuda, y, 16) == [9] * 8 + [6] * 8
    cuda.cuGraphNodeSetEnabled(exec_, copy, ctypes.c_uint(0))
    cuda.cuGraphExecMemsetNodeSetParams(exec_, fill, ctypes.byref(filled(x, 3, 16)), cuda.contexts[0])
    launch(cuda, exec_, held.stream)
    assert read_words(cuda, y, 16) == [9] * 8 + [6] * 8 and set(read_words(cuda, x, 16)) == {3}
    enabled = ctypes.c_uint(7)
    cuda.cuGraphNodeGetEnabled(exec_, copy, ctypes.byref(enabled))
    assert enabled.value == 0
    back = old.executable()  # the graph itself is as it was
    launch(cuda, back, held.stream)
    assert set(read_words(cuda, y, 16)) == {5}


def parameters_of_nodes(cuda: Cuda) -> None:
    """A node's parameters are read back, and changed parameters apply to later instantiations."""
    x, stream, made = cuda.alloc(64), cuda.stream(), Made(cuda)
    graph = Graph(cuda)
    a = graph.fill([], x, 1, 16)
    b = graph.kernel([a], "fill", x, 8, 2)
    calls: list[int] = []
    c = graph.host([b], lambda: calls.append(1))
    before = graph.executable()
    read = Kernel()
    cuda.cuGraphKernelNodeGetParams_v2(b, ctypes.byref(read))
    pointers = (ctypes.c_void_p * 3).from_address(read.params or 0)
    assert read.function == cuda.functions[0, "fill"] and tuple(read.block) == (256, 1, 1)
    assert ctypes.c_uint64.from_address(pointers[0] or 0).value == x
    assert ctypes.c_uint32.from_address(pointers[2] or 0).value == 2
    found = Set()
    cuda.cuGraphMemsetNodeGetParams(a, ctypes.byref(found))
    assert (found.to, found.value, found.width, found.columns, found.rows) == (x, 1, 4, 16, 1)
    assert cuda.code("cuGraphMemsetNodeGetParams", b, ctypes.byref(found)) == INVALID_VALUE
    cuda.cuGraphKernelNodeSetParams_v2(b, ctypes.byref(made.kernel(0, "fill", x, 4, 9)))
    cuda.cuGraphMemsetNodeSetParams(a, ctypes.byref(filled(x, 3, 12)))
    cuda.cuGraphHostNodeSetParams(c, ctypes.byref(made.host(lambda: calls.append(2))))
    after = graph.executable()
    launch(cuda, before, stream)
    assert read_words(cuda, x, 16) == [2] * 8 + [1] * 8
    launch(cuda, after, stream)
    assert read_words(cuda, x, 16) == [9] * 4 + [3] * 8 + [1] * 4
    assert calls == [1, 2]
    cuda.cuGraphExecKernelNodeSetParams_v2(before, b, ctypes.byref(made.kernel(0, "fill", x, 1, 7)))
    cuda.cuGraphExecHostNodeSetParams(before, c, ctypes.byref(made.host(lambda: calls.append(3))))
    launch(cuda, before, stream)
    assert read_words(cuda, x, 2) == [7, 1] and calls == [1, 2, 3]


def clones(cuda: Cuda) -> None:
    """A clone is a graph of its own, with nodes of its own, and outlives the original."""
    x, stream = cuda.alloc(64), cuda.stream()
    graph = Graph(cuda)
    a = graph.fill([], x, 1, 16)
    b = graph.fill([a], x, 2, 4)
    clone = Graph(cuda, cuda.out("cuGraphClone", graph.handle))
    cloned = cuda.out("cuGraphNodeFindInClone", b, clone.handle)
    assert cloned != b and cloned in clone.nodes()
    out = ctypes.c_uint64()
    assert cuda.code("cuGraphNodeFindInClone", ctypes.byref(out), cloned, graph.handle) == INVALID_VALUE
    cuda.cuGraphMemsetNodeSetParams(b, ctypes.byref(filled(x, 9, 16)))
    cuda.cuGraphDestroyNode(a)
    assert len(graph.nodes()) == 1 and len(clone.nodes()) == 2
    graph.destroy()
    assert cuda.code("cuGraphNodeGetType", b, ctypes.byref(ctypes.c_int())) == INVALID_VALUE
    launch(cuda, clone.executable(), stream)
    assert read_words(cuda, x, 16) == [2] * 4 + [1] * 12


def destroyed_in_use(cuda: Cuda) -> None:
    """A launch completes although its graph is destroyed; a user object is released after the last launch."""
    x, held, log = cuda.alloc(64), Held(cuda), []
    releases = [FUNCTION(lambda _, name=name: log.append(name)) for name in ("gone", "left")]

    def owned(function: object) -> Graph:
        graph, user = Graph(cuda), ctypes.c_uint64()
        cuda.cuUserObjectCreate(ctypes.byref(user), None, function, ctypes.c_uint(1), ctypes.c_uint(1))
        cuda.cuGraphRetainUserObject(graph.handle, user.value, ctypes.c_uint(1), ctypes.c_uint(1))
        return graph

    graph, plain = owned(releases[0]), owned(releases[1])
    second = graph.host([graph.fill([], x, 4, 8)], lambda: log.append("called"))
    graph.fill([second], x + 32, 5, 8)
    plain.kernel([], "nap", 1)
    execs = [plain.executable(), graph.executable()]
    for exec_ in execs:
        cuda.cuGraphLaunch(exec_, held.stream)
    graph.destroy()
    plain.destroy()
    for exec_ in execs:
        cuda.cuGraphExecDestroy(exec_)
    cuda.cuStreamDestroy_v2(held.stream)
    assert log == [] and cuda.code("cuGraphLaunch", execs[0], held.free_stream) == INVALID_VALUE
    held.release()
    cuda.cuCtxSynchronize()
    assert read_words(cuda, x, 16) == [4] * 8 + [5] * 8
    assert until(lambda: len(log) == 3, 10)
    assert sorted(log) == ["called", "gone", "left"] and log.index("called") < log.index("gone")


def frees_come_after_the_rest(cuda: Cuda) -> None:
    """Nodes behind a host function use memory that is freed after the launch."""
    held, x = Held(cuda), cuda.alloc(64)
    for call in ("cuMemFree_v2", "cuMemFreeAsync", "cuMemFreeHost"):
        source = cuda.pinned(64)[0] if call == "cuMemFreeHost" else cuda.out("cuMemAllocAsync", 64, held.free_stream)
        cuda.cuMemsetD32Async(source, ctypes.c_uint(6), 16, held.free_stream)
        cuda.cuMemsetD32Async(x, ctypes.c_uint(1), 16, held.free_stream)
        cuda.cuStreamSynchronize(held.free_stream)
        graph = Graph(cuda)
        graph.copy([graph.host([], lambda: None)], x, source, 64)
        exec_ = graph.executable()
        cuda.cuGraphLaunch(exec_, held.stream)
        timer = threading.Timer(0.05, held.release)
        timer.start()
        getattr(cuda, call)(source, *([held.stream] if call == "cuMemFreeAsync" else []))
        timer.join()
        cuda.cuStreamSynchronize(held.stream)
        assert set(read_words(cuda, x, 16)) == {6}, call
        held.hold()
        cuda.cuGraphExecDestroy(exec_)
    held.release()


def errors(cuda: Cuda) -> None:
    """What is wrong is refused with the driver's codes, and changes nothing."""
    x, stream = cuda.alloc(64), cuda.stream()
    graph, other_graph = Graph(cuda), Graph(cuda)
    a, foreign = graph.fill([], x, 1, 16), other_graph.fill([], x, 1, 16)
    fill = ctypes.byref(filled(x, 2, 16))
    context = cuda.contexts[0]
    wrong = [
        graph.try_add("cuGraphAddEmptyNode", [foreign])[0],
        graph.try_add("cuGraphAddEmptyNode", [a, a])[0],
        graph.try_add("cuGraphAddEmptyNode", [0])[0],
        graph.try_add("cuGraphAddMemsetNode", [], ctypes.byref(filled(x, 1, 17)), context)[0],
        graph.try_add("cuGraphAddMemsetNode", [], ctypes.byref(Set(x, 0, 1, 3, 1, 1)), context)[0],
        graph.try_add("cuGraphAddMemcpyNode", [], ctypes.byref(copied(x, x + 32, 33)), context)[0],
        graph.try_add("cuGraphAddChildGraphNode", [], graph.handle)[0],
        graph.try_add("cuGraphAddMemFreeNode", [], x)[0],
        graph.try_add("cuGraphAddHostNode", [], ctypes.byref((ctypes.c_uint64 * 2)()))[0],
        graph.link(a, foreign),
        graph.link(a, a),
        graph.link(a, foreign, "cuGraphRemoveDependencies"),
        cuda.code("cuGraphAddMemsetNode", ctypes.byref(ctypes.c_uint64()), 77, None, 0, fill, context),
        cuda.code("cuGraphInstantiateWithFlags", ctypes.byref(ctypes.c_uint64()), graph.handle, 16),
        cuda.code("cuGraphLaunch", graph.handle, stream),
    ]
    assert set(wrong) == {INVALID_VALUE}, wrong
    assert graph.nodes() == [a] and other_graph.nodes() == [foreign]
    kernel = graph.made.kernel(0, "fill", x, 16, 1)
    kernel.block[0] = 5000
    assert graph.try_add("cuGraphAddKernelNode_v2", [], ctypes.byref(kernel))[0] == INVALID_VALUE
    kernel = graph.made.kernel(0, "fill", x, 16, 1)
    kernel.function = 1234
    assert graph.try_add("cuGraphAddKernelNode_v2", [], ctypes.byref(kernel))[0] == 400
    code = cuda.code("cuGraphInstantiateWithFlags", ctypes.byref(ctypes.c_uint64()), graph.handle, DEVICE_LAUNCH)
    assert code == NOT_SUPPORTED
    b = graph.fill([a], x, 2, 16)
    assert graph.link(b, a) == 0  # a cycle, which cuGraphInstantiate finds
    out = ctypes.c_uint64()
    assert cuda.code("cuGraphInstantiateWithFlags", ctypes.byref(out), graph.handle, 0) == INVALID_VALUE
    assert graph.link(b, a, "cuGraphRemoveDependencies") == 0
    exec_ = graph.executable()
    launch(cuda, exec_, stream)
    assert set(read_words(cuda, x, 16)) == {2}
    kind = ctypes.c_int()
    cuda.cuGraphNodeGetType(graph.add("cuGraphAddEmptyNode", [a, b]), ctypes.byref(kind))
    assert kind.value == EMPTY_NODE
    cuda.cuGraphNodeGetType(graph.copy([], x, x + 32, 32), ctypes.byref(kind))
    assert kind.value == COPY_NODE
    graph.destroy()
    cuda.cuGraphExecDestroy(exec_)
    calls = [("cuGraphDestroy", graph.handle), ("cuGraphExecDestroy", exec_), ("cuGraphDestroyNode", a)]
    calls += [("cuGraphLaunch", exec_, stream), ("cuGraphClone", ctypes.byref(out), graph.handle)]
    assert {cuda.code(*call) for call in calls} == {INVALID_VALUE}
    cuda.use(1)
    far = cuda.alloc(64)
    far_graph = Graph(cuda)
    far_graph.kernel([], "fill", far, 16, 1, ordinal=1)
    exec_ = far_graph.executable()
    cuda.use(0)
    assert cuda.code("cuGraphLaunch", exec_, stream) == NOT_SUPPORTED  # as the documentation says
    cuda.cuStreamSynchronize(stream)


def memory_of_graphs(cuda: Cuda) -> None:
    """Memory that nodes allocate has one address, and must be freed before the next launch."""
    stream, y = cuda.stream(), cuda.alloc(4096)

    def account(which: int) -> int:
        value = ctypes.c_uint64()
        cuda.cuDeviceGetGraphMemAttribute(ctypes.c_int(0), ctypes.c_int(which), ctypes.byref(value))
        return value.value

    graph = Graph(cuda)
    node, memory = graph.alloc([], 4096)
    graph.copy([graph.fill([node], memory, 6, 1024)], y, memory, 4096)
    assert graph.try_add("cuGraphAddMemFreeNode", [], memory + 8)[0] == INVALID_VALUE
    assert cuda.code("cuGraphDestroyNode", node) == NOT_SUPPORTED
    assert cuda.code("cuGraphClone", ctypes.byref(ctypes.c_uint64()), graph.handle) == NOT_SUPPORTED
    cuda.cuDeviceGraphMemTrim(ctypes.c_int(0))  # memory that graphs of other checks have freed
    used = account(USED)
    exec_ = graph.executable()
    launch(cuda, exec_, stream)
    assert account(USED) == used + 4096 and set(read_words(cuda, y, 1024)) == {6}
    assert cuda.code("cuGraphLaunch", exec_, stream) == INVALID_VALUE  # not freed yet
    cuda.cuMemFreeAsync(memory, stream)
    assert cuda.code("cuMemFreeAsync", memory, stream) == INVALID_VALUE  # twice
    launch(cuda, exec_, stream)
    cuda.cuMemFree_v2(memory)
    assert cuda.code("cuMemFree_v2", memory) == INVALID_VALUE
    cuda.cuDeviceGraphMemTrim(ctypes.c_int(0))
    assert account(USED) == used and account(USED_HIGH) >= used + 4096 and account(RESERVED) >= 4096
    by_itself = graph.executable(AUTO_FREE)
    launch(cuda, by_itself, stream, 3)
    cuda.cuMemFree_v2(memory)
    freed = graph.free(graph.nodes()[-1:], memory)
    assert graph.try_add("cuGraphAddMemFreeNode", [freed], memory)[0] == INVALID_VALUE
    launch(cuda, graph.executable(), stream, 3)
    assert used + 4096 == account(USED) <= account(RESERVED) <= account(RESERVED_HIGH)
    short = Graph(cuda)
    node, short_block = short.alloc([], 512)
    short.free([node], short_block)
    exec_ = short.executable()
    launch(cuda, exec_, stream)
    cuda.cuGraphExecDestroy(exec_)
    short.destroy()
    assert account(USED) == used + 4096 + 512  # the memory counts until the trim, although its graph has been destroyed
    cuda.cuDeviceGraphMemTrim(ctypes.c_int(0))
    assert account(USED) <= used + 4096
    held = Held(cuda)
    late_graph = Graph(cuda)
    node, memory = late_graph.alloc([late_graph.host([], lambda: None)], 64)
    exec_ = late_graph.executable()
    for _ in range(2):  # freed and launched again before the stream has run the first launch
        cuda.cuGraphLaunch(exec_, held.stream)
        cuda.cuMemFreeAsync(memory, held.stream)
    assert cuda.code("cuMemFreeAsync", memory, held.stream) == INVALID_VALUE
    held.release()
    cuda.cuStreamSynchronize(held.stream)


def a_worker_is_lost(cuda: Cuda) -> None:
    """A graph of a context that was lost, or reset, fails alone; a new one works."""
    x, stream = cuda.alloc(64), cuda.stream()
    graph = Graph(cuda)
    graph.kernel([graph.fill([], x, 1, 16)], "fill", x, 4, 2)
    graph.alloc([], 4096)
    exec_ = graph.executable()
    cuda.launch(0, stream, "fault")
    assert cuda.code("cuStreamSynchronize", stream) == 700
    assert cuda.code("cuGraphLaunch", exec_, stream) == 700
    fresh(cuda)
    cuda.use(0)
    stream, x = cuda.stream(), cuda.alloc(64)
    assert cuda.code("cuGraphLaunch", exec_, stream) != 0
    cuda.code("cuCtxSynchronize")  # errors of calls before
    cuda.cuGraphExecDestroy(exec_)
    graph.destroy()
    again = Graph(cuda)
    again.kernel([again.fill([], x, 1, 16)], "fill", x, 4, 2)
    launch(cuda, again.executable(), stream, 2)
    assert read_words(cuda, x, 16) == [2] * 4 + [1] * 12


CHECKS = (
    every_kind,
    edges_are_the_order,
    launches_keep_their_place,
    updates,
    parameters_of_nodes,
    clones,
    destroyed_in_use,
    frees_come_after_the_rest,
    errors,
    memory_of_graphs,
    a_worker_is_lost,
)
