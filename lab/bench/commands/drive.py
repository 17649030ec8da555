"""``python -m lab bench drive``: random reads of a drive by kernels, without writes."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator

import numpy as np

from lab.bench.micro.drives import drive_reads
from lab.cli import parser_of, run_command
from lab.drives.qemu import QemuDrive
from warpwell._check import checked_integer, checked_nbytes
from warpwell.cache import choose_page_size
from warpwell.cli._common import json_option, output_of
from warpwell.drives import Namespace, open_namespace
from warpwell.errors import ArgumentError


def main(argv: list[str]) -> int:
    """Run the command."""
    parser = parser_of("bench drive", "Measure how fast kernels read from a drive, without writing to it.")
    parser.add_argument(
        "namespace", metavar="DRIVE/NAMESPACE", nargs="?", help="PCI address and id, such as 0000:01:00.0/1"
    )
    parser.add_argument("--qemu", action="store_true", help="use a drive that QEMU emulates, without hardware and root")
    parser.add_argument("--page-size", default="4KiB", metavar="SIZE", help="size of a read (default 4KiB)")
    parser.add_argument("--bytes", default="32MiB", metavar="SIZE", help="size of the range to read (default 32MiB)")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="runs; figures are medians (default 3)")
    json_option(parser)
    return run_command(run, parser, argv)


def run(arguments: argparse.Namespace) -> int:
    """Measure random reads."""
    output = output_of(arguments)
    page = choose_page_size(arguments.page_size, "cpu", 0)
    nbytes = checked_nbytes(arguments.bytes, "--bytes")
    runs = checked_integer(arguments.runs, "--runs", minimum=1)
    with _opened(arguments, nbytes) as namespace, output.progress() as report:
        found = drive_reads(namespace, page=page, nbytes=nbytes, runs=runs, report=report)
        name = namespace.name
    if arguments.json:
        output.result("", {"drive": name, "page_size": page, **found.as_dict()})
        return 0
    output.table(
        f"random reads of {page} B from {name} ({found.where}), by kernels on cpu",
        ("threads, and their backend", "thousand reads/s", "MB/s", "us each"),
        [
            (row.name, f"{row.rate:,.1f}", f"{row.notes['MB_a_second']:,.0f}", f"{row.notes['us_each']:,.0f}")
            for row in found.rows
        ],
    )
    if arguments.qemu:
        output.screen.print("QEMU emulates the drive in memory, so these figures depend on this machine's processors.")
    return 0


@contextlib.contextmanager
def _opened(arguments: argparse.Namespace, nbytes: int) -> Iterator[Namespace]:
    if arguments.qemu == (arguments.namespace is not None):
        raise ArgumentError("pass a drive and its namespace, such as 0000:01:00.0/1, or --qemu for an emulated drive")
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
