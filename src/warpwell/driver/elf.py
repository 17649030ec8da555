"""Reads the file of a compiled program before the program starts: its architecture and its CUDA runtime."""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import ArgumentError

_MAGIC = b"\x7fELF"
_MACHINES = {3: "i386", 21: "ppc64le", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv64"}
_RUNTIME = re.compile(r"libcudart\.so\.(\d+)")
_RUNTIME_RELEASES = ("12", "13")
_STATIC_RUNTIME = re.compile(
    r"lib(cublas|cudnn|cufft|cupti|curand|cusolver|cusparse|cutensor|nccl|npp|nvjpeg)\w*\.so(\.|$)", re.IGNORECASE
)
"""NVIDIA's libraries that contain its CUDA runtime."""
_REGISTRATION = {"__cudaRegisterFatBinary", "__cudaUnregisterFatBinary"}
"""Functions of the runtime. nvcc puts the second and a kernel section without kernels into programs of C++ alone."""
_SYSTEM_FOLDERS = ("/lib64", "/usr/lib64", "/lib", "/usr/lib")
_SHT_DYNAMIC, _SHT_DYNSYM = 6, 11
_DT_NEEDED, _DT_RPATH, _DT_RUNPATH = 1, 15, 29
_CACHE_MAGIC = b"glibc-ld.so.cache1.1"


@dataclass(frozen=True)
class Elf:
    """A program or library: its architecture, and its entries for the dynamic linker.

    Parameters
    ----------
    machine : str
    needed : list of str
        Names of libraries.
    rpath, runpath : list of str
        Folders that are searched before and after those of ``LD_LIBRARY_PATH``.
    has_runtime : bool
        Whether the file contains kernels and NVIDIA's CUDA runtime.
    """

    machine: str
    needed: list[str]
    rpath: list[str]
    runpath: list[str]
    has_runtime: bool


def read(path: str) -> Elf | None:
    """Return the properties of an ELF file, or None if the file has another type or is damaged."""
    with open(path, "rb") as stream:
        if stream.read(4) != _MAGIC:
            return None
        data = mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ)
    with data:
        try:
            return _parse(data, os.path.dirname(os.path.realpath(path)))
        except (struct.error, IndexError):
            return None


def _parse(data: mmap.mmap, origin: str) -> Elf:
    (number,) = struct.unpack_from("<H", data, 18)
    machine = _MACHINES.get(number, f"machine {number}")
    if data[4:6] != b"\2\1":  # 64 bits, little-endian
        return Elf(machine, [], [], [], False)
    (offset,) = struct.unpack_from("<Q", data, 40)
    size, count, names = struct.unpack_from("<HHH", data, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, offset + k * size) for k in range(count)]

    def text(table: int, position: int) -> str:
        start = sections[table][4] + position
        return data[start : data.find(b"\0", start)].decode(errors="replace")

    tags: dict[int, list[str]] = {_DT_NEEDED: [], _DT_RPATH: [], _DT_RUNPATH: []}
    is_dynamic = False  # whether the runtime is in another file
    for _, section_type, _, _, start, nbytes, link, *_ in sections:
        if section_type == _SHT_DYNAMIC:
            for tag, value in struct.iter_unpack("<qQ", data[start : start + nbytes // 16 * 16]):
                if tag in tags:
                    tags[tag].append(text(link, value))
        elif section_type == _SHT_DYNSYM:
            symbols = struct.iter_unpack("<IBBHQQ", data[start : start + nbytes // 24 * 24])
            undefined = (text(link, name) for name, _, _, section, *_ in symbols if section == 0)
            is_dynamic = not _REGISTRATION.isdisjoint(undefined)
    has_kernels = any(text(names, section[0]) == ".nvFatBinSegment" for section in sections)
    rpath, runpath = (
        [re.sub(r"\$ORIGIN|\$\{ORIGIN\}", origin, folder) for folders in tags[tag] for folder in folders.split(":")]
        for tag in (_DT_RPATH, _DT_RUNPATH)
    )
    return Elf(machine, tags[_DT_NEEDED], [] if runpath else rpath, runpath, has_kernels and not is_dynamic)


def is_compiled(path: str) -> bool:
    """Return True if a file is compiled or a script of another interpreter than Python, so that it starts by itself.

    Raises
    ------
    ArgumentError
        This host and Python cannot execute the file.
    """
    if os.path.isdir(path):
        if not os.path.exists(os.path.join(path, "__main__.py")):
            raise ArgumentError(
                f"{path} is a folder without __main__.py; give a Python file or a program", name="program"
            )
        return False
    if path.endswith((".py", ".pyw", ".pyz")):
        return False
    with open(path, "rb") as stream:
        start = stream.read(128)
    if start.startswith((_MAGIC, b"#!")) and not (start[:2] == b"#!" and b"python" in start.partition(b"\n")[0]):
        elf, machine = read(path), os.uname().machine
        if elf is not None and elf.machine != machine:
            raise ArgumentError(
                f"{path} is built for {elf.machine}, and this host is {machine}: rebuild it", name="program"
            )
        if not os.access(path, os.X_OK):
            raise ArgumentError(f"{path} is not executable; run chmod +x {path}", name="program")
        return True
    if b"\0" in start and start[:4] != b"PK\3\4":
        raise ArgumentError(f"{path} is not a Python file or a program for Linux: pass one", name="program")
    has_suffix = os.path.splitext(path)[1] != ""
    if has_suffix and start and not start.startswith((b"#!", b"PK\3\4")) and not os.access(path, os.X_OK):
        text = f"{path} is not a Python file (.py), and not executable; give a Python file or a program"
        raise ArgumentError(text, name="program")
    return False


def examine_program(path: str, library_path: str = "") -> tuple[str | None, list[str]]:
    """Return the reason why a program cannot use pooled GPUs, and the libraries to preload because of its DT_RPATH.

    Parameters
    ----------
    path : str
        The program. This function also reads the libraries that the program needs, but not the libraries that those
        need.
    library_path : str
        Folders in which the dynamic linker looks for libraries, separated by colons.

    Returns
    -------
    refusal : str or None
        A line that names the library and the next step, or None.
    preload : list of str
        Names of libraries.
    """
    name = os.path.basename(path)
    files, needed = _read_all(path, library_path)
    for each in [name, *needed]:
        if _has_static_runtime(each, files):
            rebuild = "Rebuild it with `nvcc -cudart shared` (CMake: -DCMAKE_CUDA_RUNTIME_LIBRARY=Shared), or use"
            return (
                f"{each} has NVIDIA's CUDA runtime linked in, which works only with NVIDIA's own driver library. "
                f"{rebuild if each == name else 'Use'} `--cuda local` for this machine's GPUs."
            ), []
        if (release := _RUNTIME.match(each)) and release[1] not in _RUNTIME_RELEASES:
            return f"{name} is built for CUDA {release[1]} ({each}): rebuild it with CUDA 12 or 13", []
    is_hidden = any(file.rpath for file in files.values())
    return None, [library for library in needed if _is_supplied(library)] if is_hidden else []


def uses_cuda(path: str, library_path: str = "") -> bool:
    """Return True if a program is linked with CUDA's driver, its runtime or a library that contains the runtime.

    The parameters are those of `examine_program`.
    """
    files, needed = _read_all(path, library_path)
    return any(_is_supplied(each) or _has_static_runtime(each, files) for each in [*files, *needed])


def _read_all(path: str, library_path: str) -> tuple[dict[str, Elf], list[str]]:
    """Return a program and the libraries that it needs by name, and all names that these files need."""
    program = read(path)
    if program is None:
        return {}, []
    files = {os.path.basename(path): program}
    for library in program.needed:
        dependency = None if _is_supplied(library) else _find(library, program, library_path)
        if dependency is not None:
            files[library] = dependency
    return files, list(dict.fromkeys(library for file in files.values() for library in file.needed))


def _has_static_runtime(name: str, files: Mapping[str, Elf]) -> bool:
    return _STATIC_RUNTIME.match(name) is not None or (name in files and files[name].has_runtime)


def _is_supplied(library: str) -> bool:
    return library == "libcuda.so.1" or _RUNTIME.match(library) is not None


def _find(library: str, program: Elf, library_path: str) -> Elf | None:
    """Return the library that the dynamic linker loads for a program, or None if it is missing."""
    folders = [*program.rpath, *library_path.split(":"), *program.runpath]
    paths = [os.path.join(folder, library) for folder in folders if folder]
    paths += _cached_libraries().get(library, []) + [os.path.join(folder, library) for folder in _SYSTEM_FOLDERS]
    for path in paths:
        with contextlib.suppress(OSError, ValueError):
            if (elf := read(path)) is not None and elf.machine == program.machine:
                return elf
    return None


@functools.cache
def _cached_libraries() -> dict[str, list[str]]:
    """Return the paths of libraries by name in the cache of the dynamic linker."""
    paths: dict[str, list[str]] = {}
    with contextlib.suppress(OSError, struct.error):
        data = Path("/etc/ld.so.cache").read_bytes()
        data = data[data.index(_CACHE_MAGIC) :] if _CACHE_MAGIC in data else b""
        (count,) = struct.unpack_from("<I", data, len(_CACHE_MAGIC))
        for _, name, file, _, _ in struct.iter_unpack("<iIIIQ", data[48 : 48 + 24 * count]):
            key, value = (data[start : data.index(b"\0", start)].decode(errors="replace") for start in (name, file))
            paths.setdefault(key, []).append(value)
    return paths
