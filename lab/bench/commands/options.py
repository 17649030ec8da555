"""The arguments of ``warpwell bench``."""

from __future__ import annotations

import argparse

from ..arguments import Commands, command, json_option


def add(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add ``bench``."""
    bench = command(commands, "bench", "bench.run", "measure reads, writes and sums beside their ceilings")
    bench.add_argument("name", nargs="*", metavar="NAME", help="a benchmark; without one they are listed")
    bench.add_argument("--all", action="store_true", help="run all of them")
    bench.add_argument("--quick", action="store_true", help="little data, few runs: all of them in a few minutes")
    bench.add_argument("--out", metavar="FILE", help="draw the figures (.png, .svg, .pdf); of all: bench.png")
    json_option(bench)

    how = bench.add_argument_group("how to run")
    how.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU")
    how.add_argument(
        "--tier",
        choices=("storage", "host-cached", "host", "device", "mapped"),
        default="storage",
        help="where the data live (default storage)",
    )
    how.add_argument(
        "--medium",
        default="ram",
        metavar="NAME",
        help="what the data lie on: ram (default), file, or a drive to emulate over host memory: P5800X, "
        "PM1735, 980Pro; 980Pro/16 has a sixteenth of its rates",
    )
    how.add_argument("--drives", type=int, default=1, metavar="N", help="emulated drives, striped (default 1)")
    how.add_argument("--bytes", metavar="SIZE", help="of data (default 1GiB on cuda, 64MiB on cpu)")
    how.add_argument("--cache", metavar="SIZE", help="where data exceed the cache (default: a quarter of the data)")
    how.add_argument("--page-size", default="4KiB", metavar="SIZE", help="default 4KiB")
    how.add_argument("--threads", type=int, metavar="N", help="of kernels (default 262144 on cuda, 64 on cpu)")
    how.add_argument("--service-threads", type=int, metavar="N", help="host threads that serve commands")
    how.add_argument("--runs", type=int, metavar="N", help="each figure is the median of so many (default 3)")
