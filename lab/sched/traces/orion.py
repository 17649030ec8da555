"""Orion: kernel profiles of neural networks (EuroSys 2024, ``benchmarking/model_kernels``), measured on a V100.

Each file is a model: a line for each kernel, with its class (1 compute, 0 memory, -1 unknown), the multiprocessors that
it needs and its time in ns.
"""

from __future__ import annotations

import io
import math
import os
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from warpwell import errors
from warpwell.scheduler import Profile
from warpwell.scheduler.extend import Capacity, Kind

from . import rows
from .trace import TracedApplication, TracedKernel

COLUMNS = ("Name", "Profile", "Memory_footprint", "SM_usage", "Duration")
KINDS = {"1": Kind.COMPUTE, "0": Kind.MEMORY, "-1": None}
V100 = Capacity(processors=80, shared=96 << 10, memory=16 << 30, clock=1.53e9)
BLOCKS_EACH = 8
"""Blocks of 256 threads with 32 registers a thread that a multiprocessor holds: assumed for all kernels."""
MISS_RATES = {Kind.MEMORY: 0.8, Kind.COMPUTE: 0.2}
PLACEHOLDERS = "_fb0"
"""Suffix of files without measurements: every duration is 7, and every class unknown."""


class Models(NamedTuple):
    """The contents of an archive.

    Attributes
    ----------
    applications : list of TracedApplication
        One for each file.
    imputed : dict
        Fields that the files do not have for all kernels, and their assumed values.
    left_out : list of str
        Files that were not read.
    """

    applications: list[TracedApplication]
    imputed: dict[str, str]
    left_out: list[str]


def read(path: str | os.PathLike[str]) -> Models:
    """Read an archive (``.tar``, ``.tar.gz``), a folder, or the file of one model.

    Raises
    ------
    MissingFileError, FormatError
        The path does not exist or has no profiles; a column is unknown; a class, time or size is invalid.
    """
    files: dict[str, list[rows.Row]] = {}
    left_out = []
    for name, content in _files(Path(path)):
        text = content.decode("utf-8", errors="replace")
        if name.endswith(PLACEHOLDERS) or not text.startswith(COLUMNS[0] + ","):
            left_out.append(name)
            continue
        source = f"{Path(path).name}: {name}"
        files[name] = list(rows.read(io.StringIO(text), source, COLUMNS))
        if not files[name]:
            raise errors.FormatError(f"{source} has no kernels: omit the file", path=path)
    if not files:
        message = f"{path} has no kernel profiles, whose first line is {','.join(COLUMNS)}"
        raise errors.FormatError(message, path=path)
    all_rows = [row for entries in files.values() for row in entries]
    counts = Counter((row["Name"], _kind(row)) for row in all_rows)
    kinds = {name: kind for (name, kind), _ in reversed(counts.most_common()) if kind is not None}
    unknown = sum(_kind(row) is None for row in all_rows)
    imputed = {
        "class": f"{unknown} of {len(all_rows)} kernels (Profile -1): the class of kernels of that name, or memory",
        "blocks": f"SM_usage times {BLOCKS_EACH}, of 256 threads with 32 registers each",
        "memory": "Memory_footprint, which is 0 for every kernel of the published files",
        "miss_rate": f"{MISS_RATES[Kind.MEMORY]} of memory-, {MISS_RATES[Kind.COMPUTE]} of compute-intensive kernels",
    }
    applications = [TracedApplication(n, tuple(_kernel(row, kinds) for row in files[n])) for n in sorted(files)]
    return Models(applications, imputed, sorted(left_out))


def _files(root: Path) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of each file."""
    if not root.exists():
        raise errors.MissingFileError(f"{root} does not exist: pass an archive of kernel profiles", path=root)
    if root.is_dir() or not is_archive(root):
        files = sorted(root.iterdir()) if root.is_dir() else [root]
        yield from ((file.name, file.read_bytes()) for file in files if file.is_file())
        return
    try:
        with tarfile.open(root, "r:*") as archive:
            for member in sorted(archive.getmembers(), key=lambda m: m.name):
                content = archive.extractfile(member) if member.isfile() else None
                if content is not None:
                    yield Path(member.name).name, content.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise errors.FormatError(f"{root} is damaged ({error}): copy it again", path=root) from error


def is_archive(path: Path) -> bool:
    """Return True if a file is a tar archive, compressed or not."""
    try:
        return tarfile.is_tarfile(path)
    except EOFError as error:
        raise errors.FormatError(f"{path} is damaged ({error}): copy it again", path=path) from error


def _kind(row: rows.Row) -> Kind | None:
    if row["Profile"] not in KINDS:
        raise row.error("Profile", "1, 0 or -1")
    return KINDS[row["Profile"]]


def _kernel(row: rows.Row, kinds: dict[str, Kind]) -> TracedKernel:
    measured = _kind(row)
    kind = measured or kinds.get(row["Name"], Kind.MEMORY)
    processors, seconds = row.number("SM_usage"), row.number("Duration") * 1e-9
    blocks = max(1, math.ceil(processors) * BLOCKS_EACH)
    resident = min(blocks, V100.processors * BLOCKS_EACH)
    need = max(min(1.0, processors / V100.processors), 1 / V100.processors)
    source = "trace" if measured else "imputed"
    profile = Profile(kind, seconds, resident=resident, miss_rate=MISS_RATES[kind], need=need, source=source)
    return TracedKernel(row["Name"], profile, blocks, row.integer("Memory_footprint"))
