"""Orion: kernel profiles of neural networks (EuroSys 2024, ``benchmarking/model_kernels``), measured on a V100.

Each file is one model: a line a kernel, with its class (1 compute, 0 memory, -1 not known), the multiprocessors that it
needs and its time in ns.
"""

from __future__ import annotations

import io
import math
import os
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from warpwell import errors
from warpwell.scheduler import Capacity, Kind, Profile

from . import rows
from .trace import TracedApplication, TracedKernel

COLUMNS = ("Name", "Profile", "Memory_footprint", "SM_usage", "Duration")
KINDS = {1: Kind.COMPUTE, 0: Kind.MEMORY, -1: None}
V100 = Capacity(processors=80, shared=96 << 10, memory=16 << 30, clock=1.53e9)
BLOCKS_EACH = 8
"""Blocks of 256 threads and 32 registers a thread that a multiprocessor holds: taken for all kernels."""
MISS_RATES = {Kind.MEMORY: 0.8, Kind.COMPUTE: 0.2}
PLACEHOLDERS = "_fb0"
"""Files whose name ends so hold no measurements: every duration is 7, and every class unknown."""


@dataclass(frozen=True)
class Models:
    """The contents of an archive.

    Attributes
    ----------
    applications : list of TracedApplication
        One a file.
    imputed : dict
        Fields that the files do not have, or not for all kernels, and what was taken instead.
    left_out : list of str
        Files that were not read.
    """

    applications: list[TracedApplication]
    imputed: dict[str, str]
    left_out: list[str]


@dataclass(frozen=True)
class _KernelRow:
    name: str
    kind: Kind | None
    memory: int
    processors: float
    nanoseconds: float


def read(path: str | os.PathLike[str]) -> Models:
    """Read an archive (``.tar``, ``.tar.gz``), a folder, or the file of one model.

    Raises
    ------
    MissingFileError, FormatError
        Not there; no profiles in it; an unknown column; a class, time or size that cannot be.
    """
    files: dict[str, list[_KernelRow]] = {}
    left_out = []
    for name, text in _files(path):
        if name.endswith(PLACEHOLDERS) or not text.startswith(COLUMNS[0] + ","):
            left_out.append(name)
        else:
            files[name] = _lines(text, f"{rows.name_of(path)}: {name}")
    if not files:
        message = f"{path} holds no kernel profiles: their first line is {','.join(COLUMNS)}"
        raise errors.FormatError(message, path=path)
    known = Counter((line.name, line.kind) for lines in files.values() for line in lines if line.kind is not None)
    kinds: dict[str, Kind] = {}
    for (name, kind), _ in reversed(known.most_common()):
        assert kind is not None
        kinds[name] = kind
    applications = [
        TracedApplication(name, tuple(_kernel(line, kinds) for line in lines)) for name, lines in sorted(files.items())
    ]
    everything = [line for lines in files.values() for line in lines]
    unknown = sum(line.kind is None for line in everything)
    imputed = {
        "class": f"of {unknown} of {len(everything)} kernels (Profile -1): that of most kernels of the same name, or "
        "else memory",
        "blocks": f"SM_usage times {BLOCKS_EACH}",
        "registers, shared, threads": f"32 registers a thread, none, 256: {BLOCKS_EACH} blocks a multiprocessor",
        "miss_rate": f"{MISS_RATES[Kind.MEMORY]} of memory-, {MISS_RATES[Kind.COMPUTE]} of compute-intensive kernels",
        "bandwidth, compute": "those of the class, by the multiprocessors that a kernel needs",
    }
    if not any(line.memory for line in everything):
        imputed["memory"] = "0: Memory_footprint is 0 for every kernel"
    return Models(applications, imputed, sorted(left_out))


def _files(path: str | os.PathLike[str]) -> Iterator[tuple[str, str]]:
    """Give name and text of each file."""
    place = Path(path)
    if not place.exists():
        raise errors.MissingFileError(f"{path} does not exist: give an archive of kernel profiles", path=path)
    if place.is_dir():
        for file in sorted(place.iterdir()):
            if file.is_file():
                yield file.name, _text(file.read_bytes(), file)
        return
    if not is_archive(place):
        yield place.name, _text(place.read_bytes(), place)
        return
    try:
        with tarfile.open(place, "r:*") as archive:
            for member in sorted(archive.getmembers(), key=lambda m: m.name):
                content = archive.extractfile(member) if member.isfile() else None
                if content is not None:
                    yield Path(member.name).name, _text(content.read(), path)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise errors.FormatError(f"{path} is damaged ({error}): copy it again", path=path) from error


def is_archive(path: Path) -> bool:
    """Tell whether a file is a tar archive, compressed or not."""
    try:
        return tarfile.is_tarfile(path)
    except EOFError as error:
        raise errors.FormatError(f"{path} is damaged ({error}): copy it again", path=path) from error


def _text(content: bytes, path: str | os.PathLike[str]) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise errors.FormatError(f"{path} is not text ({error}): give kernel profiles", path=path) from error


def _lines(text: str, where: str) -> list[_KernelRow]:
    found = []
    for row in rows.read(io.StringIO(text), where, COLUMNS):
        kind = row.number("Profile", least=-1, most=1)
        if kind not in KINDS:
            raise row.wrong("Profile", "1, 0 or -1")
        memory, processors, nanoseconds = row.whole("Memory_footprint"), row.number("SM_usage"), row.number("Duration")
        found.append(_KernelRow(row["Name"], KINDS[int(kind)], memory, processors, nanoseconds))
    if not found:
        raise errors.FormatError(f"{where} has no kernels: leave it out", path=where)
    return found


def _kernel(line: _KernelRow, kinds: dict[str, Kind]) -> TracedKernel:
    kind = line.kind or kinds.get(line.name, Kind.MEMORY)
    blocks = max(1, math.ceil(line.processors) * BLOCKS_EACH)
    profile = Profile(
        kind=kind,
        seconds=line.nanoseconds * 1e-9,
        resident=min(blocks, V100.processors * BLOCKS_EACH),
        miss_rate=MISS_RATES[kind],
        need=max(min(1.0, line.processors / V100.processors), 1 / V100.processors),
        source="trace" if line.kind else "imputed",
    )
    return TracedKernel(line.name, profile, blocks, line.memory)
