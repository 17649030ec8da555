"""``warpwell kv dump``."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from ... import kv
from ...cache import format_size
from ...errors import ArgumentError, MissingFileError
from ...kv.convert.exporters import to_folder, to_npz
from ...replacing import replacing
from ..output import Output


def run(arguments: argparse.Namespace) -> int:
    """Write all records; OUT is complete at the end, or unchanged."""
    output = Output(arguments.json)
    started = time.perf_counter()
    out = Path(arguments.out)
    if not out.parent.is_dir():
        raise MissingFileError(f"{out}: the folder {out.parent} does not exist: make it first", path=out)
    if os.path.lexists(out) and not arguments.overwrite:
        raise ArgumentError(f"{out} already exists: use --overwrite to replace it")
    npz = out.suffix.lower() == ".npz"
    if npz and arguments.names != "auto":
        raise ArgumentError("--names is for files in a folder: leave it out", name="names")
    with replacing(out) as part, kv.open(arguments.store) as store, output.progress() as report:
        if out.exists() and Path(store.path).resolve().is_relative_to(out.resolve()):
            raise ArgumentError(f"{out} holds the store itself: name another place")
        if npz:
            done = to_npz(store, part, prefix=arguments.prefix, progress=report)
        else:
            done = to_folder(store, part, prefix=arguments.prefix, names=arguments.names, progress=report)
    output.result(
        str(out),
        {
            "command": "dump",
            "store": str(arguments.store),
            "out": str(out),
            "records": done.records,
            "value_bytes": done.nbytes,
            "names": done.names,
            "seconds": time.perf_counter() - started,
        }
        if arguments.json
        else {"records": done.records, "values": format_size(done.nbytes), "names": done.names},
    )
    return 0
