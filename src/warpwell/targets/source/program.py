"""The program around a CUDA C++ kernel that makes its workers, and its compilation.

The kernel's own text stays as it is. Macros before it make it a function of the device, and ``blockIdx`` and
``gridDim`` calls that read what a worker has claimed (see ``workers.cu``).
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from ... import errors
from ..compiler.compiling import compiling
from ..gpu import nvrtc

_PLACE = "/* the program */"
_ARCHITECTURE = ("-arch", "--gpu-architecture")


@functools.cache
def _template() -> str:
    return Path(__file__).with_name("workers.cu").read_text(encoding="utf-8")


def around(source: Any) -> str:
    """Return the program that has the workers of a `CudaSource`."""
    parameters = source.text.parameters
    text = _template().replace("{parameters}", "".join(f", {p.text}" for p in parameters))
    text = text.replace("{arguments}", ", ".join(p.name for p in parameters))
    return text.replace("{name}", str(source.name)).replace(_PLACE, str(source.code))


def build(source: Any, architecture: str, registers: int | None = None) -> dict[str, Any]:
    """Compile a `CudaSource` with NVRTC; no GPU is needed.

    Parameters
    ----------
    source : CudaSource
    architecture : str
        Such as ``"sm_90"``.
    registers : int, optional
        The most that a thread may have. With it, the workers are compiled, else the kernel as it is.

    Returns
    -------
    dict
        ``"cubin"`` and ``"ptx"`` (bytes, str), and ``"names"``: what each form is called there.

    Raises
    ------
    ArgumentError
        NVRTC is not installed, or the source does not compile (its log says why).
    TransformError
        It does as it is, and does not around workers.
    """
    plain = registers is None
    options = [o for o in source.options if plain or "maxrregcount" not in o]
    if not any(o.startswith(_ARCHITECTURE) for o in options):
        options.append(f"--gpu-architecture={architecture}")
    if registers is not None:
        options.append(f"--maxrregcount={registers}")
    text = source.code if plain else around(source)
    names = {"plain": source.name} if plain else {"workers": f"ww_workers_{source.name}"}
    try:
        with compiling(f"CUDA source {source.name!r}"):
            return nvrtc.build(text, source.name, options, names)
    except nvrtc.SourceError as error:
        if plain:
            message = f"CUDA source {source.name!r} does not compile:\n{error}"
            raise errors.ArgumentError(message, name="code") from None
        raise errors.TransformError(
            f"CUDA source {source.name!r} compiles, but not as blocks that workers claim; run it without a "
            f"scheduler, or change what this names:\n{error}",
            construct="source",
        ) from None


def ptx(source: Any, form: str = "plain", *, cc: tuple[int, int] = (9, 0), registers: int = 255) -> str:
    """Return the PTX of a `CudaSource` as it is ("plain"), or with its workers; no GPU is needed."""
    return str(build(source, f"sm_{cc[0]}{cc[1]}", None if form == "plain" else registers)["ptx"])
