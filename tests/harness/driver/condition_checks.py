"""Checks of CUDA's promises for graphs with conditional nodes; kernels set the handles."""

from __future__ import annotations

import ctypes

from tests.harness.driver.calls import INVALID_VALUE, NON_BLOCKING, NOT_SUPPORTED, SUCCESS, Cuda
from tests.harness.driver.checks import Held, fresh, read_words
from tests.harness.driver.graphs import IF, SWITCH, WHILE, Graph, Kernel, Update, copied

IMAGE = b"//FAKE\nkernel condition 8 4\nkernel count 8 8\n"


class Kernels:
    """Nodes that set a handle's value: `condition` to a number, `count` to a word less one."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda, self.keepalive = cuda, []  # type: ignore[var-annotated]
        self.module = cuda.out("cuModuleLoadData", IMAGE)
        self.functions = {n: cuda.out("cuModuleGetFunction", self.module, n.encode()) for n in ("condition", "count")}

    def add(self, graph: Graph, after: list[int], name: str, first: int, second: int) -> int:
        """Add a launch of such a kernel."""
        values = (ctypes.c_uint64(first), ctypes.c_uint64(second))
        pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(value) for value in values))
        node = Kernel(self.functions[name], (1, 1, 1), (1, 1, 1), 0)
        node.params = ctypes.addressof(pointers)
        self.keepalive += [values, pointers]
        return graph.add("cuGraphAddKernelNode_v2", after, ctypes.byref(node))


def launch(cuda: Cuda, exec_: int, stream: int) -> None:
    """Launch a graph, and wait."""
    cuda.cuGraphLaunch(exec_, stream)
    cuda.cuStreamSynchronize(stream)


def branches(cuda: Cuda) -> None:
    """Only the graph of the value's case is carried out, between what comes before and behind, in each launch."""
    kernels, x, stream = Kernels(cuda), cuda.alloc(16), cuda.stream()
    for kind, size, cases in (
        (IF, 1, {0: None, 1: 0, 7: 0}),
        (IF, 2, {0: 1, 1: 0}),
        (SWITCH, 3, {0: 0, 2: 2, 3: None}),
    ):
        for value, case in cases.items():
            graph = Graph(cuda)
            handle = graph.condition()
            a = graph.fill([], x, 1, 4)
            b = kernels.add(graph, [a], "condition", handle, value)
            node, bodies = graph.decide([b], handle, kind, size)
            for k, body in enumerate(bodies):
                filled = body.kernel([], "fill", x, 3, 10 + k)
                body.kernel([filled], "add", x, x, 1)
            graph.kernel([node], "copy", x + 12, x, 4)
            exec_ = graph.executable()
            want = 1 if case is None else 20 + 2 * case
            for _ in range(2):
                launch(cuda, exec_, stream)
                found = read_words(cuda, x, 4)
                assert found == [want, *[1 if case is None else 10 + case] * 2, want], (kind, value, found)
            cuda.cuGraphExecDestroy(exec_)
            graph.destroy()


def loops(cuda: Cuda) -> None:
    """A kernel ends a loop; a handle with a default is reset by each launch, a handle without one keeps its value."""
    kernels, x, step, stream = Kernels(cuda), cuda.alloc(8), cuda.alloc(4), cuda.stream()
    cuda.write(step, bytes([1, 0, 0, 0]))
    for assign in (True, False):
        graph = Graph(cuda)
        handle = graph.condition(1, assign)
        node, (body,) = graph.decide([graph.fill([], x, 5, 1)], handle, WHILE)
        kernels.add(body, [body.kernel([], "add", x + 4, step, 1)], "count", x, handle)
        graph.kernel([node], "add", x + 4, x + 4, 1)
        exec_ = graph.executable()
        cuda.write(x + 4, bytes(4))
        launch(cuda, exec_, stream)
        assert read_words(cuda, x, 2) == [0, 10]
        launch(cuda, exec_, stream)
        assert read_words(cuda, x, 2) == ([0, 30] if assign else [5, 20])


def one_in_another(cuda: Cuda) -> None:
    """A conditional node within a loop, with a handle of the outer graph; two of them behind each other."""
    kernels, x, y, z, stream = Kernels(cuda), cuda.alloc(4), cuda.alloc(8), cuda.alloc(4), cuda.stream()
    graph = Graph(cuda)
    loop, odd, last = graph.condition(1), graph.condition(), graph.condition(1)
    node, (body,) = graph.decide([graph.fill([], x, 3, 1)], loop, WHILE)
    counted = kernels.add(body, [], "count", x, loop)
    set_ = kernels.add(body, [counted], "condition", odd, 1)
    inner, (then,) = body.decide([set_], odd, IF)
    then.kernel([], "add", y, y, 1)
    body.kernel([inner], "add", y + 4, y + 4, 1)
    _, (end,) = graph.decide([graph.kernel([node], "copy", z, y, 4)], last, IF)
    end.kernel([], "add", y, y, 1)
    own = end.condition(1)  # of a conditional node's graph
    _, (more,) = end.decide(end.nodes(), own, IF)
    more.kernel([], "add", y, y, 1)
    exec_ = graph.executable()
    for _ in range(2):
        cuda.write(y, bytes([1, 0, 0, 0] * 2))
        launch(cuda, exec_, stream)
        assert read_words(cuda, y, 2) == [32, 8] and read_words(cuda, z, 1) == [8]


def made_again(cuda: Cuda) -> None:
    """A launch keeps its work; the changed graph is instantiated again, and updates an executable graph."""
    kernels, x, held = Kernels(cuda), cuda.alloc(4), Held(cuda)
    graph = Graph(cuda)
    handle = graph.condition(1)
    first = graph.fill([], x, 1, 1)
    node, (body,) = graph.decide([first], handle, IF)
    two = body.fill([], x, 2, 1)
    exec_ = graph.executable()
    cuda.cuMemsetD32_v2(x, ctypes.c_uint(9), 1)
    cuda.cuGraphLaunch(exec_, held.stream)
    cuda.cuGraphDestroyNode(two)
    body.kernel([body.fill([], x, 3, 1)], "add", x, x, 1)
    again = graph.executable()
    result = Update()
    cuda.cuGraphExecDestroy(exec_)
    assert read_words(cuda, x, 1) == [9]
    held.release()
    cuda.cuStreamSynchronize(held.stream)
    assert read_words(cuda, x, 1) == [2]
    launch(cuda, again, held.stream)
    assert read_words(cuda, x, 1) == [6]
    assert graph.cuda.code("cuGraphExecUpdate_v2", again, graph.handle, ctypes.byref(result)) == SUCCESS
    kernels.add(graph, [first], "condition", handle, 0)  # created after the node, but without an edge to it
    assert graph.cuda.code("cuGraphExecUpdate_v2", again, graph.handle, ctypes.byref(result)) == 910
    launch(cuda, again, held.stream)
    assert read_words(cuda, x, 1) == [6]
    cuda.cuGraphDestroyNode(node)
    graph.destroy()
    launch(cuda, again, held.stream)
    assert read_words(cuda, x, 1) == [6]


def with_memory_and_functions(cuda: Cuda) -> None:
    """Memory of the graph is there in all of it. Before its first kernel and behind the last such node all works."""
    kernels, stream, event = Kernels(cuda), cuda.stream(NON_BLOCKING), cuda.event()
    address, view = cuda.pinned(4)
    plain, values = (ctypes.c_uint32 * 1)(), []
    graph = Graph(cuda)
    block, memory = graph.alloc([], 64)
    handle = graph.condition()
    before = graph.host([graph.fill([block], memory, 4, 1)], lambda: values.append(1))
    recorded = graph.add("cuGraphAddEventRecordNode", [before], event)
    set_ = kernels.add(graph, [graph.copy([recorded], memory + 4, memory, 4)], "condition", handle, 1)
    node, (body,) = graph.decide([set_], handle, IF)
    body.kernel([], "add", memory, memory + 4, 1)
    a = graph.copy([node], address, memory, 4)
    b = graph.host([a], lambda: values.append(view.cast("I")[0]))
    c = graph.copy([b], ctypes.addressof(plain), memory, 4)
    graph.free([c], memory)
    exec_ = graph.executable()
    for _ in range(3):
        launch(cuda, exec_, stream)
    assert values == [1, 8] * 3 and plain[0] == 8
    cuda.cuEventSynchronize(event)


def errors(cuda: Cuda) -> None:
    """What is wrong is refused, creates nothing, and leaves the graph as it was."""
    x, y, stream, kernels = cuda.alloc(4), cuda.alloc(4), cuda.stream(), Kernels(cuda)
    graph, other_graph = Graph(cuda), Graph(cuda)
    handle = graph.condition(1)
    assert cuda.code("cuGraphConditionalHandleCreate", None, graph.handle, 0, 0, 0) == INVALID_VALUE
    assert cuda.code("cuGraphConditionalHandleCreate", ctypes.byref(ctypes.c_uint64()), 12, 0, 0, 0) == INVALID_VALUE
    for kind, size in ((IF, 0), (IF, 3), (WHILE, 2), (SWITCH, 0), (3, 1), (SWITCH, 2000)):
        assert graph.try_decide([], handle, kind, size)[0] == INVALID_VALUE
    assert graph.try_decide([], handle + 999, IF, 1)[0] == INVALID_VALUE
    assert other_graph.try_decide([], handle, IF, 1)[0] == INVALID_VALUE
    assert graph.nodes() == []
    node, (body,) = graph.decide([], handle, IF)
    assert graph.try_decide([], handle, IF, 1)[0] == INVALID_VALUE
    body.fill([], x, 3, 1)
    assert cuda.code("cuGraphDestroy", body.handle) == INVALID_VALUE
    assert cuda.code("cuGraphClone", ctypes.byref(ctypes.c_uint64()), graph.handle) == NOT_SUPPORTED
    assert other_graph.try_add("cuGraphAddChildGraphNode", [], graph.handle)[0] == NOT_SUPPORTED
    before = graph.host([graph.kernel([], "fill", y, 1, 1)], lambda: None)
    assert graph.link(before, node) == 0
    assert cuda.code("cuGraphInstantiateWithFlags", ctypes.byref(ctypes.c_uint64()), graph.handle, 0) == NOT_SUPPORTED
    cuda.cuGraphDestroyNode(before)
    plain = (ctypes.c_uint32 * 1)(5)
    copy = body.add("cuGraphAddMemcpyNode", [], ctypes.byref(copied(x, ctypes.addressof(plain), 4)), cuda.contexts[0])
    assert cuda.code("cuGraphInstantiateWithFlags", ctypes.byref(ctypes.c_uint64()), graph.handle, 0) == NOT_SUPPORTED
    cuda.cuGraphDestroyNode(copy)
    large, out = cuda.alloc(2 << 20), ctypes.create_string_buffer(2 << 20)
    boxes = copied(ctypes.addressof(out), large, 2 << 20)
    copy = body.add("cuGraphAddMemcpyNode", [], ctypes.byref(boxes), cuda.contexts[0])
    assert cuda.code("cuGraphInstantiateWithFlags", ctypes.byref(ctypes.c_uint64()), graph.handle, 0) == NOT_SUPPORTED
    cuda.cuGraphDestroyNode(copy)
    exec_ = graph.executable()
    launch(cuda, exec_, stream)
    assert read_words(cuda, x, 1) == [3]
    # The worker's graph ids are reused: these graphs together need more ids than there are.
    for _ in range(270):
        many = Graph(cuda)
        many.decide([], many.condition(1), SWITCH, 250)
        many.destroy()
    assert kernels.module


def a_worker_is_lost(cuda: Cuda) -> None:
    """After a reset the old graph's handles are gone, it can be destroyed, and a new one works."""
    x = cuda.alloc(4)
    graph = Graph(cuda)
    handle = graph.condition(1)
    _, (body,) = graph.decide([], handle, IF)
    body.fill([], x, 1, 1)
    exec_ = graph.executable()
    fresh(cuda)
    assert cuda.code("cuGraphInstantiateWithFlags", ctypes.byref(ctypes.c_uint64()), graph.handle, 0) != 0
    assert graph.try_decide([], handle, IF, 1)[0] != 0
    assert cuda.code("cuGraphLaunch", exec_, 0) != 0
    graph.destroy()
    cuda.cuGraphExecDestroy(exec_)
    branches(cuda)


CHECKS = (branches, loops, one_in_another, made_again, with_memory_and_functions, errors, a_worker_is_lost)
