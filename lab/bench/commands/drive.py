"""``warpwell drive bench``: how fast kernels read from a drive; nothing on it is changed."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator

import numpy as np

from ...cache.sizes import parse_page_size, parse_size
from ...drives import Namespace
from ...drives.opened import open_namespace
from ...errors import ArgumentError, checked_integer
from ...study.bench.drives import drive_reads
from ...testing.qemu import QemuDrive
from ..output import Output


def run(arguments: argparse.Namespace) -> int:
    """Measure random reads."""
    output = Output(arguments.json)
    page = parse_page_size(arguments.page_size)
    nbytes = parse_size(arguments.bytes, "--bytes")
    runs = checked_integer(arguments.runs, "--runs", least=1)
    with _opened(arguments, nbytes) as namespace, output.progress() as report:
        found = drive_reads(namespace, page=page, nbytes=nbytes, runs=runs, report=report)
        name = namespace.name
    if arguments.json:
        output.result("", {"command": "bench", "drive": name, "page_size": page, **found.as_dict()})
        return 0
    output.table(
        f"random reads of {page} B from {name} ({found.where}), by kernels on cpu",
        ("threads, and who serves them", "thousand reads/s", "MB/s", "us each"),
        [
            (row.what, f"{row.rate:,.1f}", f"{row.notes['MB_a_second']:,.0f}", f"{row.notes['us_each']:,.0f}")
            for row in found.rows
        ],
    )
    if arguments.qemu:
        output.screen.print("The drive is QEMU's, over memory: these figures are of this machine's processors.")
    return 0


@contextlib.contextmanager
def _opened(arguments: argparse.Namespace, nbytes: int) -> Iterator[Namespace]:
    if arguments.qemu == (arguments.namespace is not None):
        raise ArgumentError("name a drive and its namespace, such as 0000:01:00.0/1, or give --qemu for a virtual one")
    if arguments.qemu:
        with QemuDrive([max(nbytes, 1 << 20)]) as qemu, qemu.open() as drive:
            namespace = drive.namespace(1)
            namespace.write(0, np.random.default_rng(0).integers(0, 256, nbytes // 512 * 512, np.uint8))
            yield namespace
        return
    namespace, give_up = open_namespace(arguments.namespace)
    try:
        yield namespace
    finally:
        give_up()
