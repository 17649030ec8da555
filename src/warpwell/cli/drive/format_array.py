"""``warpwell drive format-array``: makes an array on a drive, if nobody's data are there."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...array.header import check_dtype
from ...cache import format_size
from ...drives import format_array, open_namespace
from ...drives.formatting import require_empty
from ...errors import ArgumentError, FormatError, MissingFileError
from ..output import Output


def run(arguments: argparse.Namespace) -> int:
    """Format a namespace as an array."""
    output = Output(arguments.json)
    items, shape, dtype = _layout(arguments)
    namespace, give_up = open_namespace(arguments.namespace)
    try:
        drive = namespace.drive
        erase = f"{drive.serial}/{namespace.nsid}"
        if arguments.erase is None:
            require_empty(namespace)
            raise ArgumentError(
                f"this would erase namespace {namespace.nsid} of drive {drive.address} ({drive.model}, "
                f"{format_size(namespace.nbytes)}); it seems empty. If you mean it, add: --yes-destroy-data {erase}"
            )
        with output.progress() as report:
            format_array(namespace, shape, dtype, erase=arguments.erase, items=items, report=report)
        name = f"nvme:{namespace.name}"
    finally:
        give_up()
    if arguments.json:
        output.result("", {"command": "format-array", "path": name, "shape": list(shape), "dtype": dtype.str})
    else:
        output.screen.print(f'an array {shape} of {dtype} lies on {name}: ww.open("{name}", "r+")')
    return 0


def _layout(arguments: argparse.Namespace) -> tuple[NDArray[Any] | None, tuple[int, ...], np.dtype[Any]]:
    """Return the items of the file that was named, and shape and dtype; of the options without one."""
    if arguments.source is not None:
        if arguments.dtype or arguments.shape:
            raise ArgumentError("a file has a dtype and a shape of its own: leave --dtype and --shape out")
        try:
            items = np.load(arguments.source, mmap_mode="r")
        except FileNotFoundError as error:
            raise MissingFileError(
                f"{arguments.source} does not exist: check the path", path=arguments.source
            ) from error
        except ValueError as error:
            raise FormatError(
                f"{arguments.source} is no .npy file of numbers ({error}): save it with numpy.save",
                path=arguments.source,
            ) from error
        if not isinstance(items, np.ndarray):
            items.close()
            raise FormatError(
                f"{arguments.source} holds several arrays: save one with numpy.save", path=arguments.source
            )
        return items, items.shape, check_dtype(items.dtype, arguments.source)
    if not arguments.dtype or not arguments.shape:
        raise ArgumentError("say what the array is: --dtype and --shape, or --from FILE.npy")
    try:
        shape = tuple(int(part) for part in arguments.shape.split(","))
    except ValueError as error:
        raise ArgumentError(f"--shape {arguments.shape}: write 1000 or 1000,100") from error
    if not shape or min(shape) < 1:
        raise ArgumentError(f"--shape {arguments.shape}: every length is at least 1")
    return None, shape, check_dtype(arguments.dtype, "--dtype")
