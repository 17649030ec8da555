"""The CUDA runtime library: its exported functions, and the C sources that are generated from them.

``native/runtime_calls.txt`` lists the functions of releases 12 and 13, ``native/runtime_properties.txt`` the fields of
their device properties. `sources` returns the generated C code; hand-written code is in ``native/runtime_*.c``. The
library calls public functions of the driver only, so it works with the driver layer and with NVIDIA's driver.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from . import table
from .generate import NATIVE

RELEASES = (12, 13)
"""Major versions of the runtime: each is a library ``libcudart.so.MAJOR``."""
ROLES = {
    **{role: c_type for role, c_type in table.ROLES.items() if role != "dptr"},
    "dim3": "struct cuda_dim3",
    "extent": "struct cuda_extent",
    "pitched": "struct cuda_pitched",
}
"""Role of an argument to its C type; see `table.ROLES`."""
LOCALS = {
    "config": "struct cu_launch_config",
    "copy": "struct cu_copy3",
    "device": "int",
    "function": "CUfunction",
    "here": "CUcontext",
    "kernel": "CUkernel",
    "params": "struct cu_node_params",
    "rows": "struct cu_copy2",
    "there": "CUcontext",
    "work": "struct cu_node_kernel",
}
"""Local variable of a generated function to its C type."""
_SUFFIX = {"z": "_ptsz", "d": "_ptds"}
_FIRST_PROPERTY = 296
"""Offset of the first field of ``runtime_properties.txt`` in ``struct cudaDeviceProp``, in bytes."""


@dataclass(frozen=True)
class Function:
    """An exported function of one release.

    Parameters
    ----------
    name : str
        Exported name, with ``_v2`` where the release has it.
    how : str
        ``hand``, ``own``, ``refused``, or steps after ``=`` or ``~``, as ``runtime_calls.txt`` describes them.
    roles : tuple of str
        Roles of the arguments; empty if `how` is ``own`` or ``refused``.
    variant : str
        ``z`` or ``d`` if there is a variant for per-thread streams, else empty.
    """

    name: str
    how: str
    roles: tuple[str, ...] = ()
    variant: str = ""

    @property
    def exports(self) -> tuple[str, ...]:
        """Exported symbols."""
        return (self.name, self.name + _SUFFIX[self.variant]) if self.variant else (self.name,)

    @property
    def c_types(self) -> tuple[str, ...]:
        """C types of the arguments."""
        return tuple(ROLES[role[4:]] + " *" if role.startswith("out_") else ROLES[role] for role in self.roles)


def _read_data(file: str) -> Iterator[str]:
    for line in (NATIVE / file).read_text().replace("\n    ", " ").splitlines():
        if line and not line.startswith("#"):
            yield line


_LINE = re.compile(r"(?:(?P<only>12|13|v2|v3) )?(?P<name>\w+)(?:\+(?P<variant>[zd]))?\((?P<roles>.*?)\) (?P<how>.*)")
_LIST = re.compile(r"(?:(?P<only>12|13) )?(?P<how>own|refused) (?P<names>.*)")


@cache
def functions(release: int) -> tuple[Function, ...]:
    """Return the exported functions of a release, in the order of the file."""
    found = []
    for line in _read_data("runtime_calls.txt"):
        if line.startswith("errors "):
            continue
        if listed := _LIST.fullmatch(line):
            for word in listed["names"].split() if listed["only"] in (None, str(release)) else ():
                name, _, variant = word.partition("+")
                found.append(Function(name, listed["how"], (), variant))
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise AssertionError(f"unreadable line in runtime_calls.txt: {line}")
        only = match["only"] or ""
        if only in ("12", "13") and only != str(release):
            continue
        suffix = f"_{only}" if only.startswith("v") and release == RELEASES[0] else ""
        roles = tuple(match["roles"].split(", ")) if match["roles"] else ()
        found.append(Function(match["name"] + suffix, match["how"], roles, match["variant"] or ""))
    return tuple(found)


@cache
def errors() -> dict[int, str]:
    """Return the names of the error codes."""
    entries = [
        word for line in _read_data("runtime_calls.txt") if line.startswith("errors ") for word in line.split()[1:]
    ]
    named = {int(code): f"cudaError{name}" for code, _, name in (word.partition(":") for word in entries)}
    return named | {0: "cudaSuccess"}


def properties(release: int) -> list[tuple[str, int, int, int]]:
    """Return (name, offset, size in bytes, driver attribute) of the numbers in the device properties of a release."""
    found = []
    offset = _FIRST_PROPERTY
    for line in _read_data("runtime_properties.txt"):
        fields = line.split()
        only = int(fields.pop(0)) if fields[0].isdigit() else release
        for word in fields if only == release else ():
            name, _, attributes = word.partition(":")
            size = 8 if name.endswith("*") else 4
            offset = (offset + size - 1) // size * size
            for attribute in attributes.split(","):
                found.append((name.rstrip("*"), offset, size, int(attribute)))
                offset += size
    return found


# -- generated C code --------------------------------------------------------------------------------------------------


def sources() -> dict[str, str]:
    """Return the text of each generated file, by name."""
    found = {}
    for release in RELEASES:
        found[f"gen_runtime_{release}.h"] = _header(release)
        found[f"gen_runtime_{release}.c"] = _code(release)
        found[f"gen_runtime_{release}.map"] = _version_script(release)
    return found


def _version_script(release: int) -> str:
    names = " ".join(f"{name};" for function in functions(release) for name in function.exports)
    return f"libcudart.so.{release} {{ global: {names} local: *; }};\n"


def _prototype(function: Function, name: str) -> str:
    named = [f"{c}a{i}" if c.endswith("*") else f"{c} a{i}" for i, c in enumerate(function.c_types)]
    return f"CUDART_API int {name}({', '.join(named) or 'void'})"


def _header(release: int) -> str:
    text = ["/* Generated: functions of the CUDA runtime, and driver calls that the layer's table does not have. */"]
    for function in functions(release):
        if function.how not in ("own", "refused"):
            text += [f"{_prototype(function, name)};" for name in function.exports]
        if _is_flagged(function):
            flagged = replace(function, roles=(*function.roles, "i32"))
            text.append(f"{_prototype(flagged, f'rt_{function.name}').removeprefix('CUDART_API ')};")
    declared = set(table.calls())
    for function in functions(release):
        if function.how[0] in "=~" and (symbol := _driver_call(function)[0]) not in declared:
            declared.add(symbol)
            text.append(f"CUresult {symbol}({', '.join(function.c_types)});")
    return "\n".join([*text, ""])


def _code(release: int) -> str:
    text = ["/* Generated: forwards, variants for per-thread streams, refusals, names of errors, properties. */"]
    text.append('#include "runtime.h"')
    for function in functions(release):
        if function.how == "refused":
            for name in function.exports:
                text.append(f"CUDART_API int {name}(void);")
                text.append(f'int {name}(void)\n{{\n    return rt_refuse("{name}");\n}}')
            continue
        if function.how[0] in "=~":
            text.append(_steps(function))
        if function.variant and function.how != "own":
            text.append(_per_thread(function))
    text.append("const struct rt_error rt_errors[] = {")
    text += [f'    {{{code}, "{name}", "{_error_text(name)}"}},' for code, name in errors().items()]
    text += ["    {0, NULL, NULL}};", "const struct rt_property rt_properties[] = {"]
    text += [f"    {{{offset}, {size}, {attribute}}}, /* {n} */" for n, offset, size, attribute in properties(release)]
    return "\n".join([*text, "    {0, 0, 0}};", ""])


def _steps(function: Function) -> str:
    """Return a function that carries out the steps of its line."""
    *steps, _ = re.sub(r"\$(\d)", r"a\1", function.how[2:]).split("; ")
    symbol, arguments = _driver_call(function)
    text = [f"{_prototype(function, function.name)}\n{{"]
    text += [f"    {LOCALS[name]} {name};" for name in sorted(set(re.findall(r"&(\w+)", function.how)))]
    text.append(f"    int error = {'rt_enter' if function.how[0] == '=' else 'rt_start'}();")
    for step in steps:
        word, _, condition = step.partition(" ")
        if word == "if":
            text.append(f"    if (!error && !({condition}))\n        return 0;")
        elif word == "need":
            text.append(f"    error = error || ({condition}) ? error : CUDA_ERROR_INVALID_VALUE;")
        else:
            text.append(f"    error = error ? error : (int){step};")
    return "\n".join([*text, f"    return rt_result(error ? error : (int){symbol}({', '.join(arguments)}));\n}}"])


def _driver_call(function: Function) -> tuple[str, list[str]]:
    """Return the symbol and the arguments of the driver call that serves a function."""
    match = re.fullmatch(r"(\w+)(?:\((.*)\))?", function.how[2:].split("; ")[-1])
    if match is None:
        raise AssertionError(f"unreadable driver call of {function.name}: {function.how}")
    symbol, written = match.groups()
    values = re.split(r", (?![^(]*\))", written) if written else [f"${i}" for i in range(len(function.roles))]
    arguments = [f"a{word[1:]}" if word.startswith("$") else word for word in values]
    if symbol in table.calls():
        types = table.calls()[symbol].c_types
        arguments = [f"({c.strip()}){_number(c, a)}" for c, a in zip(types, arguments, strict=True)]
    return symbol, arguments


def _number(c_type: str, argument: str) -> str:
    return f"(uintptr_t){argument}" if c_type == table.ROLES["dptr"] else argument


def _per_thread(function: Function) -> str:
    """Return the variant that uses the calling thread's stream instead of the legacy stream."""
    names = [f"a{i}" for i in range(len(function.roles))]
    head = _prototype(function, function.exports[1])
    if function.variant == "d":
        names.append("CU_STREAM_PER_THREAD")
        target = f"{function.name}Async({', '.join(names)})"
        wait = "" if "Memset" in function.name else "error ? error : cudaStreamSynchronize(CU_STREAM_PER_THREAD)"
        return f"{head}\n{{\n    int error = {target};\n    return {wait or 'error'};\n}}"
    if _is_flagged(function):
        plain = _prototype(function, function.name)
        bodies = [(plain, "0"), (head, "1")]
        return "\n".join(f"{h}\n{{\n    return rt_{function.name}({', '.join([*names, f])});\n}}" for h, f in bodies)
    for i, role in enumerate(function.roles):
        names[i] = f"a{i} ? a{i} : CU_STREAM_PER_THREAD" if role == "stream" else names[i]
    return f"{head}\n{{\n    return {function.name}({', '.join(names)});\n}}"


def _is_flagged(function: Function) -> bool:
    """Return True if the variants have the same arguments, so that the hand-written body takes a flag."""
    return function.variant == "z" and "stream" not in function.roles and function.how == "hand"


def _error_text(name: str) -> str:
    """Return the description of an error code, made from its name."""
    if name == "cudaSuccess":
        return "no error"
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name.removeprefix("cudaError")).lower()
