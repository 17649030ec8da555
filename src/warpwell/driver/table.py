"""The table of the driver's interface: names, versions, and how the layer serves each call.

The table is in ``native/driver_calls.txt``. Tests compare it with NVIDIA's headers if those are installed. `generate`
writes the C sources of layer and worker from it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

NATIVE = Path(__file__).parent / "native"
DATA = NATIVE / "driver_calls.txt"
HAND_OPERATIONS = 64
"""Number of the first operation that generated code replays."""
ROLES = {
    "u8": "uint8_t", "u16": "uint16_t", "u32": "uint32_t", "i32": "int32_t", "u64": "uint64_t", "size": "size_t",
    "f32": "float", "enum": "int32_t", "dev": "int32_t", "dptr": "uint64_t",
    "ctx": "CUcontext", "stream": "CUstream", "event": "CUevent", "func": "CUfunction", "kernel": "CUkernel",
    "library": "CUlibrary", "module": "CUmodule",
    "str": "const char *", "chars": "char *", "host": "void *", "source": "const void *", "ptr": "void *",
}  # fmt: skip
"""Role of an argument to its C type. A role with the prefix ``out_`` is a pointer to such a value, which the call
writes. ``dptr`` is an address on a device, the call writes ``host`` and reads ``source`` on the host, ``ptr`` is a
pointer to anything else."""


@dataclass(frozen=True)
class Call:
    """A served symbol: its class, its arguments' roles, and the checks and body of its generated function."""

    symbol: str
    kind: str
    roles: tuple[str, ...]
    forward: str = ""
    checks: tuple[str, ...] = ()

    @property
    def c_types(self) -> tuple[str, ...]:
        """C types of the arguments."""
        return tuple(ROLES[role[4:]] + " *" if role.startswith("out_") else ROLES[role] for role in self.roles)


@dataclass(frozen=True)
class Operation:
    """An entry of the ring that hand-written code serves."""

    name: str
    arguments: str
    steps: dict[str, tuple[str, str]]
    """Name of the worker's function without ``ww_`` and its parameters, by step; not used for ``is_node``."""
    description: str


@dataclass(frozen=True)
class Entry:
    """A variant of a base name, which ``cuGetProcAddress`` finds."""

    name: str
    version: int
    symbol: str
    per_thread: bool


@cache
def _section(name: str) -> str:
    """Return the text of a section of the data file, each entry on one line."""
    section = DATA.read_text().partition(f"\n[{name}]\n")[2].partition("\n[")[0]
    return re.sub(r"\n +", " ", section).strip()


@cache
def entries() -> tuple[Entry, ...]:
    """All variants of all names, in order of name, per-thread streams last, and version."""
    found = []
    for word in _section("names").split():
        name, _, versions = word.partition(":")
        plain, _, threads = versions.partition(";")
        first = [int(version) for version in plain.split(",")]
        symbols = [f"cu{name}" + (f"_v{i + 1}" if i else "") for i in range(len(first))]
        found += [Entry(f"cu{name}", v, symbol, False) for v, symbol in zip(first, symbols, strict=True)]
        for version in threads[1:].split(",") if threads else []:
            newest = max(i for i, v in enumerate(first) if v <= int(version))
            found.append(Entry(f"cu{name}", int(version), f"{symbols[newest]}{THREAD_SUFFIX[threads[0]]}", True))
    return tuple(found)


THREAD_SUFFIX = {"d": "_ptds", "z": "_ptsz"}


@cache
def calls() -> dict[str, Call]:
    """Served symbols, by name, in the table's order."""
    found = {}
    for line in filter(None, _section("served").splitlines()):
        head, _, forward = line.partition(" -> ")
        head, _, checks = head.partition(" | ")
        kind, _, signature = head.partition(" ")
        symbol, _, inside = signature.removesuffix(")").partition("(")
        roles = tuple(inside.split(", ")) if inside else ()
        found[symbol] = Call(symbol, kind, roles, forward, tuple(checks.split("; ")) if checks else ())
    return found


_STEP = re.compile(r"(\w+)(?:\(([\w+]+)\))?(?:=(\w+))?")


@cache
def operations() -> tuple[Operation, ...]:
    """Return the operations of hand-written code, in the order of their numbers."""
    found = []
    for line in _section("operations").splitlines():
        head, _, description = line.partition(": ")
        signature, *step_texts = head.split()
        name, _, arguments = signature.removesuffix(")").partition("(")
        steps = {}
        for step, parameters, function in (_STEP.findall(text)[0] for text in step_texts):
            function = function or name.lower() + ("" if step == "read" else f"_{step}")
            steps[step] = function, parameters or ("call+args" if arguments else "call")
        found.append(Operation(name, arguments, steps, description))
    return tuple(found)


@cache
def operation_arguments() -> dict[str, list[tuple[str, str]]]:
    """Return (role, names) of the fields of each operation's arguments, by the name of the arguments."""
    found = {}
    for line in _section("arguments").splitlines():
        name, _, fields = line.partition(" # ")[0].partition(": ")
        pairs = (field.partition(" ") for field in fields.split("; "))
        found[name] = [(role, names) for role, _, names in pairs]
    return found


@cache
def structs() -> list[tuple[str, int, str]]:
    """Return the name, the size in bytes and the C fields of each struct, in the order of the data file."""
    found = []
    for line in _section("structs").splitlines():
        head, _, fields = line.partition(" # ")[0].partition(": ")
        name, size = head.split()
        found.append((name, int(size), fields))
    return found


@cache
def errors() -> dict[int, str]:
    """Return the full names of error codes."""
    pairs = (entry.split(":") for entry in _section("errors").split())
    return {0: "CUDA_SUCCESS"} | {int(code): f"CUDA_ERROR_{name}" for code, name in pairs}


@cache
def numbers() -> dict[str, int]:
    """Return the enumerations of the driver that C code names, in the order of the data file."""
    found: dict[str, int] = {}
    for line in _section("numbers").splitlines():
        prefix, *pairs = line.partition(" # ")[0].split()
        found |= {prefix + name: int(number) for name, number in (pair.split(":") for pair in pairs)}
    return found


def sticky() -> list[str]:
    """Return the names of the errors that end a context, without ``CUDA_ERROR_``."""
    return _section("sticky").split()


def absent() -> list[str]:
    """Return the attributes of devices that are 0 for programs."""
    return _section("absent").split()


def plain_symbol(symbol: str) -> str:
    """Return a symbol without ``_ptds`` or ``_ptsz``."""
    return re.sub(r"_pt[sd][zs]$", "", symbol)
