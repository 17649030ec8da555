"""NVRTC: CUDA C++ to machine code. No GPU is needed.

This module calls `cuda.bindings.nvrtc`, because ``cuda.core.Program`` does not accept NVRTC's own text of options.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from ... import errors
from ..._check import extra


class SourceError(Exception):
    """A program does not compile; NVRTC's log is the message."""


class Compiled(NamedTuple):
    """Machine code and PTX of a program, and the symbol of its function."""

    cubin: bytes
    ptx: str
    symbol: str


def compile_source(text: str, name: str, options: Sequence[str], function: str) -> Compiled:
    """Compile a program.

    Parameters
    ----------
    text : str
    name : str
        Name of the program in messages.
    options : sequence of str
        Of NVRTC. CUDA's own headers are found without one.
    function : str
        Expression that names the function.

    Raises
    ------
    ArgumentError
        NVRTC is not installed, or refuses the options.
    SourceError
    """
    try:
        from cuda.bindings import nvrtc
    except ImportError as missing:
        raise errors.ArgumentError(
            f"CUDA C++ source needs NVRTC, which is not installed: install {extra('cuda')}"
        ) from missing

    def call(operation: Any, *args: Any) -> Any:
        result = operation(*args)
        if int(result[0]) != 0:
            raise errors.ArgumentError(f"NVRTC refused {operation.__name__} ({result[0]}) of CUDA source {name!r}")
        return result[1] if len(result) > 1 else None

    def read(size: Any, get: Any) -> bytes:
        room = b" " * int(call(size, program))
        call(get, program, room)
        return room

    flags = [o.encode() for o in (*options, *(f"-I{folder}" for folder in headers()))]
    program = call(nvrtc.nvrtcCreateProgram, text.encode(), f"{name}.cu".encode(), 0, [], [])
    try:
        call(nvrtc.nvrtcAddNameExpression, program, function.encode())
        if int(nvrtc.nvrtcCompileProgram(program, len(flags), flags)[0]) != 0:
            log = read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
            raise SourceError(log.decode(errors="replace").rstrip("\0 \n"))
        return Compiled(
            read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN),
            read(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX).decode().rstrip("\0"),
            call(nvrtc.nvrtcGetLoweredName, program, function.encode()).decode(),
        )
    finally:
        nvrtc.nvrtcDestroyProgram(program)


@functools.cache
def headers() -> tuple[str, ...]:
    """Return folders of CUDA's own headers, if they are installed with NVRTC."""
    try:
        from cuda.pathfinder import find_nvidia_header_directory
    except ImportError:
        return ()
    return tuple(str(f) for f in map(find_nvidia_header_directory, ("cudart", "cccl")) if f)
