"""Device functions from 64-bit integers to a 64-bit integer as object files that LLVM loads without Numba.

Code that Numba stores needs Numba and its types before it can be loaded, which takes a process half a second of
processor time. An object file needs only the C library, the names in `symbols.py` and the linked functions that it
calls.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import llvmlite.binding as llvm

from ..device import linked_functions
from ..shipped import find_object, host_features
from . import symbols
from .code_cache import cache_folder, cache_key, read_or_make

SYMBOL = "warpwell_function"
"""Name of the C function in each object file."""
_PROVIDED = symbols.TLS_KEY, symbols.COPY, symbols.CLOCK_OFFSET  # registered with LLVM before code that names them
_engines: list[Any] = []  # a thread may run their code until the process ends
_addresses: dict[Callable[..., int], int] = {}
_linked: set[str] = set()


class Processor(NamedTuple):
    """The instructions that code may use."""

    name: str
    """LLVM's name of the processor."""
    features: str
    """Features in LLVM's notation, in addition to the features of the name."""

    @property
    def digest(self) -> str:
        """A short digest for file names."""
        return hashlib.sha256(f"{self.name} {self.features}".encode()).hexdigest()[:8]

    def machine(self) -> Any:
        """Return a new LLVM target machine."""
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        return llvm.Target.from_default_triple().create_target_machine(
            cpu=self.name, features=self.features, opt=3, jit=True, codemodel="jitdefault"
        )


def host_processor() -> Processor:
    """Return the processor of this host."""
    return Processor(llvm.get_host_cpu_name(), str(host_features().flatten()))


Compile = Callable[[Callable[..., int], Processor], bytes]
"""Compiles a device function to an object file for a processor. A parameter, because this module imports no Numba."""


def load_address(function: Callable[..., int], compile_object: Compile) -> int:
    """Return the C address of a device function, which is loaded or compiled once in a process.

    The function must not raise, because no caller can catch it.

    Parameters
    ----------
    function : device function
        Takes 64-bit integers and returns one, a boolean or None, which becomes 0.
    compile_object : callable
    """
    if function not in _addresses:
        processor = host_processor()
        code = object_file(function, processor, compile_object)
        link_callees(code, compile_object, function)
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), processor.machine())
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        _engines.append(engine)
        _addresses.setdefault(function, int(engine.get_function_address(SYMBOL)))
    return _addresses[function]


def load_symbol(function: Callable[..., int], compile_object: Compile) -> str:
    """Register the address of a device function with LLVM; return the symbol by which compiled code calls it."""
    symbol = symbol_of(function)
    if symbol not in _linked:
        llvm.add_symbol(symbol, load_address(function, compile_object))
        _linked.add(symbol)
    return symbol


def symbol_of(function: Callable[..., Any]) -> str:
    """Return the linker symbol of a device function."""
    return f"{function.__module__}.{function.__qualname__}".replace(".", "_")


def link_callees(code: bytes, compile_object: Compile, caller: Callable[..., int] | None = None) -> None:
    """Load the linked functions that object code names, because LLVM ends the process if a symbol is unknown."""
    for function in linked_functions():
        if function is not caller and symbol_of(function).encode() + b"\0" in code:
            load_symbol(function, compile_object)


def object_file(function: Callable[..., int], processor: Processor, compile_object: Compile) -> bytes:
    """Return the object file of a device function: from the wheel, from the disk cache, or compiled."""
    return stored_code(function, find_object, f"{processor.digest}.o", lambda: compile_object(function, processor))


def stored_code(
    function: Callable[..., int], find: Callable[[str], bytes | None], suffix: str | None, make: Callable[[], bytes]
) -> bytes:
    """Return the code of a function: from the wheel (``find(name)``), from the disk cache, or compiled.

    Without a suffix for the name of the file, the disk cache is not used.
    """
    name = object_name(function)
    found = None if name is None else find(name)
    if found is not None or name is None or suffix is None:
        return found or make()
    return read_or_make(cache_folder() / f"{name}.{suffix}", make)


def object_name(function: Callable[..., int]) -> str | None:
    """Return the file name of a device function's code without a suffix, or None if the code cannot be kept."""
    key = cache_key(function)
    return None if key is None else f"{function.__module__}.{function.__name__}.{key[:12]}"
