"""Return codes of every served call of the driver, with null, stale and wrong arguments, and before there is a context.

    python -m tests.harness.driver.codes

Prints a line for each call and state: `symbol state: codes`. In the state `arguments` the codes follow in the order of
`variants`: the valid call, each argument replaced by each of its other values, then each pair of them. A call that
succeeds may change what the next one meets, so all objects are made again after it.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
import tempfile
from collections.abc import Iterator

from tests.harness.driver.calls import IMAGE, NOT_READY, Cuda

from warpwell.driver import table

HUGE, FIELDS = 1 << 62, 4096
SCRATCH = 0x7000_0000_0000
"""Memory at a fixed address. All of its fields point to its middle, so each run reads the same values."""
COUNT = SCRATCH + FIELDS * 8 - 64
"""Memory that contains a small number."""
CHANGES = (
    *("Destroy", "Free", "Unload", "Reset", "Release", "Pop", "Push", "SetCurrent", "Capture", "Unregister", "Update"),
    *("Remove", "GraphAdd", "Set", "Instantiate", "Retain", "Clone", "Enable", "Disable", "Trim", "CtxCreate"),
)
"""Parts of the names of calls that change what others meet."""
HANDLES = ("stream", "event", "func", "kernel", "library", "module", "graph", "node", "exec", "pool")


class Objects:
    """A valid object of each type of handle, and one that has been destroyed."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.valid = dict.fromkeys((*HANDLES, "dptr", "host"), 0)
        self.stale = dict(self.valid)
        self.context = 0
        self.text = ctypes.create_string_buffer(b"nap")

    def make(self) -> dict[str, int]:
        """Return new objects."""
        cuda, made = self.cuda, {}
        made["stream"] = cuda.stream()
        made["event"] = cuda.event()
        made["module"] = cuda.out("cuModuleLoadData", IMAGE)
        made["func"] = cuda.out("cuModuleGetFunction", made["module"], b"nap")
        made["library"] = cuda.out("cuLibraryLoadData", IMAGE, None, None, 0, None, None, 0)
        made["kernel"] = cuda.out("cuLibraryGetKernel", made["library"], b"nap")
        made["dptr"] = cuda.alloc(4096)
        made["host"] = cuda.pinned(4096)[0]
        made["graph"] = cuda.out("cuGraphCreate", 0)
        made["node"] = cuda.out("cuGraphAddEmptyNode", made["graph"], None, 0)
        made["exec"] = cuda.out("cuGraphInstantiateWithFlags", made["graph"], 0)
        made["pool"] = cuda.out("cuMemPoolCreate", ctypes.byref((ctypes.c_uint32 * 32)(1, 0, 1, 0)))
        return made

    def drop(self, made: dict[str, int]) -> None:
        """Destroy objects; some may be gone already."""
        calls = {"stream": "cuStreamDestroy_v2", "event": "cuEventDestroy_v2", "module": "cuModuleUnload"}
        calls |= {"library": "cuLibraryUnload", "dptr": "cuMemFree_v2", "host": "cuMemFreeHost"}
        calls |= {"exec": "cuGraphExecDestroy", "graph": "cuGraphDestroy", "pool": "cuMemPoolDestroy"}
        for name, call in calls.items():
            self.cuda.code(call, made[name])

    def renew(self, reset: bool = False) -> None:
        """Start with one context on the stack and new objects; with `reset`, in a new life of the devices."""
        self.cuda.code("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(0)))
        if self.context:
            self.drop(self.valid)
        while self.cuda.code("cuCtxPopCurrent_v2", None) == 0:
            pass
        while self.cuda.code("cuCtxDestroy_v2", self.context) == 0:
            pass
        for device in range(2) if reset else ():
            while self.cuda.code("cuDevicePrimaryCtxRelease_v2", device) == 0:
                pass
        if reset:
            self.context = self.cuda.out("cuDevicePrimaryCtxRetain", 0)
        self.cuda.code("cuCtxPushCurrent_v2", self.context)
        self.stale = self.make()
        self.drop(self.stale)
        self.valid = self.make()


class Scratch:
    """The memory at `SCRATCH`."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        address = ctypes.c_void_p(SCRATCH)
        if libc.mmap(address, ctypes.c_size_t(FIELDS * 8), 3, 0x100022, -1, ctypes.c_long(0)) != SCRATCH:
            raise OSError("the fixed address is taken")
        self.fields = (ctypes.c_uint64 * FIELDS).from_address(SCRATCH)
        self.fresh = bytes((ctypes.c_uint64 * FIELDS)(*[SCRATCH + FIELDS * 4] * FIELDS))
        self.refill()

    def refill(self) -> None:
        """Write the words again."""
        ctypes.memmove(SCRATCH, self.fresh, len(self.fresh))
        ctypes.c_uint64.from_address(COUNT).value = 2


def handle_type(symbol: str, index: int, roles: tuple[str, ...]) -> str:
    """Return the type of the handle that an argument with the role ``ptr`` is, or nothing."""
    inputs = [i for i, role in enumerate(roles) if role == "ptr"]
    position = inputs.index(index)
    if symbol.startswith(("cuMemPool", "cuDeviceSetMemPool", "cuMemAllocFromPool")):
        return "pool" if position == 0 and "Create" not in symbol else ""
    if symbol == "cuMemSetMemPool":
        return "pool" if position == 1 else ""
    if not symbol.startswith("cuGraph"):
        return "graph" if symbol == "cuStreamBeginCaptureToGraph" and position == 0 else ""
    if symbol.startswith(("cuGraphExec", "cuGraphLaunch", "cuGraphUpload", "cuGraphNodeSetEnabled")) or (
        symbol == "cuGraphNodeGetEnabled"
    ):
        second = "graph" if "Update" in symbol else "node" if "Node" in symbol else ""
        return "exec" if position == 0 else second if position == 1 else ""
    if position == 0:
        return "node" if "Node" in symbol and "Nodes" not in symbol and "Add" not in symbol else "graph"
    return (
        "graph" if symbol == "cuGraphNodeFindInClone" or (symbol.endswith("ChildGraphNode") and position == 2) else ""
    )


def values(symbol: str, index: int, roles: tuple[str, ...], objects: Objects, function: int) -> list[int]:
    """Return the values of an argument: the valid one first."""
    role, scratch = roles[index], SCRATCH + 256 * index
    if role == "ptr":
        role = handle_type(symbol, index, roles) or role
    if role in HANDLES:
        wrong = "event" if role == "stream" else "stream"
        return [objects.valid[role], 0, objects.stale[role], objects.valid[wrong]]
    match role:
        case "dev":
            return [0, 99, -1]
        case "ctx":
            return [objects.context, 0, SCRATCH]
        case "dptr":
            return [objects.valid["dptr"], 0, SCRATCH]
        case "host":
            return [objects.valid["host"], 0, scratch]
        case "str":
            return [ctypes.addressof(objects.text), 0, SCRATCH]
        case "ptr" if symbol in ("cuLaunchHostFunc", "cuStreamAddCallback", "cuUserObjectCreate"):
            return [function, 0]
        case "ptr" if symbol.startswith(("cuGraphGet", "cuGraphNodeGetDep")) and index == len(roles) - 1:
            return [COUNT, 0]
        case "ptr" if symbol.startswith("cuOccupancyMaxPotentialBlock"):
            return [0]
        case "enum":
            return [1, 0, 77, -1]
        case "u8" | "u16":
            return [1]
        case "u32" | "u64" | "i32":
            return [1, 0, 0xFFFFFFFF] if symbol.startswith(("cuLaunch", "cuOccupancy")) else [0, 1, 2, 0xFFFFFFFF]
        case "size":
            return [1, 0, HUGE]
        case "out_host" if symbol.startswith("cuLaunchKernel") and index == len(roles) - 1 and "Coop" not in symbol:
            return [0, scratch]
        case _:
            return [scratch, 0]


def variants(choices: list[list[int]]) -> Iterator[list[int]]:
    """Yield the valid arguments, then those with one value and with two values of others."""
    valid = [choice[0] for choice in choices]
    yield valid
    for count in (1, 2):
        for positions in itertools.combinations(range(len(choices)), count):
            for chosen in itertools.product(*(range(1, len(choices[position])) for position in positions)):
                arguments = list(valid)
                for position, which in zip(positions, chosen, strict=True):
                    arguments[position] = choices[position][which]
                yield arguments


def squeeze(codes: list[int]) -> str:
    """Return codes as text, with a count where one follows itself."""
    groups = [(code, len(list(group))) for code, group in itertools.groupby(codes)]
    return " ".join(f"{code}x{count}" if count > 1 else str(code) for code, count in groups)


def is_change(call: table.Call) -> bool:
    """Return True if a successful call may change what later calls meet."""
    return any(part in call.symbol for part in CHANGES)


class Recorder:
    """Makes the calls and prints their codes."""

    def __init__(self, calls: list[table.Call]) -> None:
        self.calls, self.cuda, self.scratch = calls, Cuda(), Scratch()
        self.objects = Objects(self.cuda)
        self.function = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p).value or 0

    def choices(self, call: table.Call) -> list[list[int]]:
        """Return the values of each argument."""
        return [values(call.symbol, i, call.roles, self.objects, self.function) for i in range(len(call.roles))]

    def code(self, call: table.Call, arguments: list[int]) -> int:
        """Return the code of a call; one that is not ready in time counts as success."""
        self.scratch.refill()
        result = self.cuda.code(call.symbol, *(argument & (1 << 64) - 1 for argument in arguments))
        return 0 if result == NOT_READY else result

    def valid_code(self, call: table.Call) -> int:
        """Return the code of the call with valid arguments."""
        return self.code(call, [choice[0] for choice in self.choices(call)])

    def renew(self, call: table.Call) -> None:
        """Make all objects again after a call."""
        self.objects.renew(reset="PrimaryCtx" in call.symbol or "CtxDestroy" in call.symbol)

    def run(self) -> None:
        """Print the codes of all calls in all states."""
        cuda, objects = self.cuda, self.objects
        for call in self.calls:
            print(call.symbol, "start:", self.valid_code(call))
        cuda.cuInit(0)
        objects.renew(reset=True)
        for event in [cuda.event() for _ in range(4000)]:  # handles are reused in the order in which they were dropped
            cuda.cuEventDestroy_v2(event)
        objects.renew()
        cuda.code("cuCtxPopCurrent_v2", None)
        for call in self.calls:
            if not any(part in call.symbol for part in ("PrimaryCtx", "CtxPush", "CtxSet", "CtxPop")):
                result = self.valid_code(call)
                print(call.symbol, "no context:", result)
                if not result and is_change(call):
                    objects.renew()
                    cuda.code("cuCtxPopCurrent_v2", None)
        objects.renew()
        for call in self.calls:
            print(call.symbol, "arguments:", squeeze(self.argument_codes(call)), flush=True)
        for call in self.calls:
            cuda.cuStreamBeginCapture_v2(objects.valid["stream"], ctypes.c_int(0))
            print(call.symbol, "capture:", self.valid_code(call), flush=True)
            self.renew(call)

    def argument_codes(self, call: table.Call) -> list[int]:
        """Return the codes of all variants of a call."""
        found = []
        for number in range(len(list(variants(self.choices(call))))):
            arguments = next(itertools.islice(variants(self.choices(call)), number, None))
            found.append(self.code(call, arguments))
            if not found[-1] and is_change(call):
                self.renew(call)
        self.renew(call)
        return found


def main() -> None:
    """Print the codes of the calls whose names are arguments, or of all."""
    symbols = set(sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # refusals
        calls = [call for call in table.calls().values() if call.kind != "inner" and call.symbol != "cuInit"]
        Recorder([call for call in calls if not symbols or call.symbol in symbols]).run()


if __name__ == "__main__":
    main()
