"""Graphs by the driver's interface: the structs of their nodes, and helpers that build, launch and inspect graphs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from tests.harness.driver.calls import EITHER_SIDE, HOST_SIDE, KERNELS, MANY, TYPES, Cuda

FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
KERNEL_NODE, COPY_NODE, SET_NODE, HOST_NODE, CHILD_NODE, EMPTY_NODE, WAIT_NODE, RECORD_NODE = range(8)
ALLOC_NODE, FREE_NODE, CONDITION_NODE = 10, 11, 13
IF, WHILE, SWITCH = range(3)
DEVICE_LOCATION, HOST_LOCATION = 1, 2


class Kernel(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS, second version."""

    _fields_ = [
        ("function", ctypes.c_uint64),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("params", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_uint64),
        ("context", ctypes.c_uint64),
    ]


class Set(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS, second version."""

    _fields_ = [
        ("to", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("width", ctypes.c_uint),
        ("columns", ctypes.c_size_t),
        ("rows", ctypes.c_size_t),
        ("context", ctypes.c_uint64),
    ]


class Side(ctypes.Structure):
    """One side of a copy of boxes."""

    _fields_ = [
        ("x", ctypes.c_size_t),
        ("y", ctypes.c_size_t),
        ("z", ctypes.c_size_t),
        ("level", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("host", ctypes.c_uint64),
        ("device", ctypes.c_uint64),
        ("array", ctypes.c_uint64),
        ("unused", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    ]


class Boxes(ctypes.Structure):
    """A copy of boxes: CUDA_MEMCPY3D."""

    _fields_ = [
        ("source", Side),
        ("to", Side),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
        ("depth", ctypes.c_size_t),
    ]


class Host(ctypes.Structure):
    """CUDA_HOST_NODE_PARAMS."""

    _fields_ = [("run", ctypes.c_void_p), ("data", ctypes.c_void_p)]


class Pool(ctypes.Structure):
    """CUmemPoolProps."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", ctypes.c_int),
        ("id", ctypes.c_int),
        ("unused", ctypes.c_void_p),
        ("most", ctypes.c_size_t),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 54),
    ]


class Alloc(ctypes.Structure):
    """CUDA_MEM_ALLOC_NODE_PARAMS."""

    _fields_ = [
        ("pool", Pool),
        ("access", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
        ("nbytes", ctypes.c_size_t),
        ("address", ctypes.c_uint64),
    ]


class Condition(ctypes.Structure):
    """CUgraphNodeParams of a conditional node."""

    _fields_ = [
        ("kind", ctypes.c_int),
        ("reserved", ctypes.c_int * 3),
        ("handle", ctypes.c_uint64),
        ("type", ctypes.c_int),
        ("size", ctypes.c_uint),
        ("graphs", ctypes.POINTER(ctypes.c_uint64)),
        ("context", ctypes.c_uint64),
        ("rest", ctypes.c_ubyte * 208),
    ]


class Update(ctypes.Structure):
    """CUgraphExecUpdateResultInfo."""

    _fields_ = [("result", ctypes.c_int), ("node", ctypes.c_uint64), ("source", ctypes.c_uint64)]


def side(address: int, pitch: int = 0, height: int = 0, kind: int = EITHER_SIDE, at: Sequence[int] = (0, 0, 0)) -> Side:
    """Return one side of a copy of boxes."""
    where = {"host": address} if kind == HOST_SIDE else {"device": address}
    return Side(*at, 0, kind, pitch=pitch, height=height, **where)


class Made:
    """Keeps what calls point to: parameters of kernels, functions of the program."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.keepalive: list[object] = []

    def kernel(self, ordinal: int, name: str, *arguments: int) -> Kernel:
        """Return the parameters of a launch with one block."""
        values = [TYPES[letter](value) for letter, value in zip(KERNELS[name], arguments, strict=True)]
        pointers = (ctypes.c_void_p * (len(values) + 1))(*(ctypes.addressof(value) for value in values))
        self.keepalive += [values, pointers]
        node = Kernel(self.cuda.functions[ordinal, name], (1, 1, 1), (MANY.get(name, 1), 1, 1), 0)
        node.params = ctypes.addressof(pointers)
        return node

    def host(self, function: Callable[[], object]) -> Host:
        """Return the parameters of a call of a function."""
        called = FUNCTION(lambda _: function() and None)
        self.keepalive.append(called)
        return Host(ctypes.cast(called, ctypes.c_void_p).value, None)


def copied(to: int, source: int, nbytes: int) -> Boxes:
    """Return the parameters of a plain copy."""
    return Boxes(side(source, nbytes, 1), side(to, nbytes, 1), nbytes, 1, 1)


def filled(to: int, value: int, count: int) -> Set:
    """Return the parameters of a memset of words."""
    return Set(to, 0, value, 4, count, 1)


class Graph:
    """A graph: its methods add nodes and return their handles."""

    def __init__(self, cuda: Cuda, handle: int | None = None) -> None:
        self.cuda, self.made = cuda, Made(cuda)
        self.handle = cuda.out("cuGraphCreate", ctypes.c_uint(0)) if handle is None else handle

    def try_add(self, call: str, after: Sequence[int], *arguments: object) -> tuple[int, int]:
        """Add a node; return the code and the handle."""
        node, deps = ctypes.c_uint64(), (ctypes.c_uint64 * len(after))(*after)
        code = self.cuda.code(call, ctypes.byref(node), self.handle, deps, len(after), *arguments)
        return code, node.value

    def add(self, call: str, after: Sequence[int], *arguments: object) -> int:
        """Add a node and return its handle."""
        code, node = self.try_add(call, after, *arguments)
        assert code == 0, f"{call}: {code}"
        return node

    def kernel(self, after: Sequence[int], name: str, *arguments: int, ordinal: int = 0) -> int:
        """Add a launch."""
        params = self.made.kernel(ordinal, name, *arguments)
        return self.add("cuGraphAddKernelNode_v2", after, ctypes.byref(params))

    def copy(self, after: Sequence[int], to: int, source: int, nbytes: int, ordinal: int = 0) -> int:
        """Add a copy."""
        params = ctypes.byref(copied(to, source, nbytes))
        return self.add("cuGraphAddMemcpyNode", after, params, self.cuda.contexts[ordinal])

    def fill(self, after: Sequence[int], to: int, value: int, count: int, ordinal: int = 0) -> int:
        """Add a memset of words."""
        params = ctypes.byref(filled(to, value, count))
        return self.add("cuGraphAddMemsetNode", after, params, self.cuda.contexts[ordinal])

    def host(self, after: Sequence[int], function: Callable[[], object]) -> int:
        """Add a call of a function."""
        return self.add("cuGraphAddHostNode", after, ctypes.byref(self.made.host(function)))

    def alloc(self, after: Sequence[int], nbytes: int, ordinal: int = 0) -> tuple[int, int]:
        """Add an allocation; return the node and the address."""
        params = Alloc(Pool(1, 0, DEVICE_LOCATION, ordinal), None, 0, nbytes)
        node = self.add("cuGraphAddMemAllocNode", after, ctypes.byref(params))
        return node, params.address

    def free(self, after: Sequence[int], address: int) -> int:
        """Add a free."""
        return self.add("cuGraphAddMemFreeNode", after, address)

    def condition(self, value: int = 0, assign: bool = True) -> int:
        """Return a handle of a condition; each launch can reset its value."""
        context, flags = self.cuda.contexts[0], ctypes.c_uint(assign)
        return self.cuda.out("cuGraphConditionalHandleCreate", self.handle, context, ctypes.c_uint(value), flags)

    def try_decide(self, after: Sequence[int], handle: int, kind: int, size: int) -> tuple[int, int, Condition]:
        """Add a conditional node; return the code, the node, and its parameters."""
        params = Condition(CONDITION_NODE, handle=handle, type=kind, size=size, context=self.cuda.contexts[0])
        return *self.try_add("cuGraphAddNode", after, ctypes.byref(params)), params

    def decide(self, after: Sequence[int], handle: int, kind: int, size: int = 1) -> tuple[int, list[Graph]]:
        """Add a conditional node; return it and its graphs."""
        code, node, params = self.try_decide(after, handle, kind, size)
        assert code == 0, code
        return node, [Graph(self.cuda, params.graphs[k]) for k in range(size)]

    def link(self, source: int, to: int, call: str = "cuGraphAddDependencies") -> int:
        """Let a node come after another one; return the code."""
        ends = [(ctypes.c_uint64 * 1)(node) for node in (source, to)]
        return self.cuda.code(call, self.handle, *ends, 1)

    def nodes(self, call: str = "cuGraphGetNodes", of: int | None = None) -> list[int]:
        """Return handles of nodes."""
        count, of = ctypes.c_size_t(), self.handle if of is None else of
        getattr(self.cuda, call)(of, None, ctypes.byref(count))
        found = (ctypes.c_uint64 * max(1, count.value))()
        getattr(self.cuda, call)(of, found, ctypes.byref(count))
        return list(found)[: count.value]

    def executable(self, flags: int = 0) -> int:
        """Return an executable graph."""
        return self.cuda.out("cuGraphInstantiateWithFlags", self.handle, flags)

    def destroy(self) -> None:
        """Destroy the graph."""
        self.cuda.cuGraphDestroy(self.handle)
