"""Compilation of a `CudaSource` by NVRTC: the kernel alone, and its workers (see ``warpwell.cuh``)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from ... import errors
from ..compiler.compiling import compiling
from ..gpu import nvrtc

_ARCHITECTURE = ("-arch", "--gpu-architecture")
_PARAMETER = re.compile(r"\.param(?: \.align \d+)? \.([a-z])(\d+)(?: \.ptr[ .\w]*?)? \w+(?:\[(\d+)\])?\s*(?:,|$)")


def build(source: Any, architecture: str, registers: int | None = None) -> nvrtc.Compiled:
    """Return a `CudaSource` compiled by NVRTC; no GPU is needed.

    Parameters
    ----------
    source : CudaSource
    architecture : str
        Such as ``"sm_90"``.
    registers : int, optional
        Maximum number of registers per thread. If given, the workers are compiled, else the kernel alone.

    Raises
    ------
    ArgumentError
        NVRTC is not installed, the source does not compile (the message has the log), or its kernel has parameters
        other than the declared ones.
    TransformError
        The kernel compiles alone, but not its workers.
    """
    alone = registers is None
    options = [o for o in source.options if alone or "maxrregcount" not in o]
    if not any(o.startswith(_ARCHITECTURE) for o in options):
        options.append(f"--gpu-architecture={architecture}")
    options.append(f"-I{Path(__file__).parent}")
    function = source.name
    if not alone:
        options += [f"--maxrregcount={registers}", "-DWARPWELL_WORKERS"]
        function = f"warpwell::workers_of<decltype(&{source.name}), &{source.name}>::entry"
    try:
        with compiling(f"CUDA source {source.name!r}"):
            built = nvrtc.compile_source(source.code, source.name, options, function)
    except nvrtc.SourceError as error:
        if alone:
            message = f"CUDA source {source.name!r} does not compile:\n{error}"
            raise errors.ArgumentError(message, name="code") from None
        raise errors.TransformError(
            f"CUDA source {source.name!r} compiles alone, but not with WARPWELL_WORKERS; include warpwell.cuh before "
            f"all other text, or run it without a scheduler:\n{error}",
            construct="source",
        ) from None
    if alone:
        _check_parameters(source, built)
    return built


def _check_parameters(source: Any, built: nvrtc.Compiled) -> None:
    """Raise ArgumentError if the compiled kernel has parameters other than the declared ones."""
    entry = re.search(rf"\.entry {re.escape(built.symbol)}\s*\((.*?)\)", built.ptx, re.DOTALL)
    assert entry is not None, "NVRTC returned a kernel without an entry"
    compiled = _PARAMETER.findall(re.sub(r"\s*\n\s*", "", entry[1]).replace("\t", ""))
    where = f"CUDA kernel {source.name!r}"
    if len(compiled) != len(source.parameters):
        raise errors.ArgumentError(
            f"{where} has {len(compiled)} parameters, but {len(source.parameters)} are declared "
            f"({', '.join(map(str, source.parameters))}); declare each in the order of the source",
            name="parameters",
        )
    for parameter, (letter, bits, count) in zip(source.parameters, compiled, strict=True):
        dtype = np.dtype(np.uint64) if parameter.pointer else parameter.dtype
        nbytes = int(bits) // 8 * int(count or 1)
        if nbytes != dtype.itemsize or (letter in "usf" and (letter == "f") != (dtype.kind == "f")):
            raise errors.ArgumentError(
                f"parameter {parameter.name!r} of {where} is declared as {parameter.declaration!r}, but compiles to "
                f"{nbytes} bytes of type {letter}{bits}; declare the type in the source",
                name="parameters",
            )


def ptx(source: Any, form: str = "plain", *, cc: tuple[int, int] = (9, 0), registers: int = 255) -> str:
    """Return the PTX of the kernel alone ("plain") or of its workers; no GPU is needed."""
    return build(source, f"sm_{cc[0]}{cc[1]}", None if form == "plain" else registers).ptx
