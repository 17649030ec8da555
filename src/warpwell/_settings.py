"""`settings`: the options that environment variables set. No other module reads these variables.

A variable is read at each access, so a program can set it after ``import warpwell``; an empty one counts as unset. The
page ``docs/reference/settings.md`` is `reference`; a test compares them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from ._check import checked_nbytes
from .errors import ArgumentError

T = TypeVar("T")


class Setting(Generic[T]):
    """One environment variable.

    Parameters
    ----------
    variable : str
    default : object
        Value of the setting if the variable is unset.
    parse : callable
        Converts the text of the variable; raises ValueError if the text is not a valid value.
    expected : str
        Description of a valid value for the error message, such as "a whole number".
    description : str
        One sentence for users.
    shown : str, optional
        The default in the reference page, if it is not the text of `default`.
    """

    def __init__(
        self, variable: str, default: T, parse: Callable[[str], T], expected: str, description: str, shown: str = ""
    ) -> None:
        self.variable, self.expected, self.description = variable, expected, description
        self.shown = shown or str(default)
        self._default, self._parse = default, parse

    def __get__(self, instance: Settings | None, owner: type[Settings]) -> T:
        """Read the variable.

        Raises
        ------
        ArgumentError
            The text of the variable is not a valid value.
        """
        text = os.environ.get(self.variable)
        if not text:
            return self._default
        try:
            return self._parse(text)
        except ValueError:
            raise ArgumentError(f"{self.variable} is {text!r}: give {self.expected}", name=self.variable) from None


def _positive_integer(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(text)
    return int(text)


def _integer(text: str) -> int:
    if not text.removeprefix("-").isdecimal():
        raise ValueError(text)
    return int(text)


def _positive_seconds(text: str) -> float:
    if not float(text) > 0:
        raise ValueError(text)
    return float(text)


def _finite_seconds(text: str) -> float:
    if not 0 < float(text) < 1e6:
        raise ValueError(text)
    return float(text)


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(text)
    return text == "1"


def _one_of(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(text)
        return text

    return parse


class Settings:
    """The settings of this process. To change one, set its variable: an assignment raises AttributeError."""

    __slots__ = ()

    device = Setting(
        "WARPWELL_DEVICE",
        "",
        str,
        '"cpu", "cuda" or "interp"',
        "Device of arrays, stores and launches that name none.",
        "`cuda` if there is a GPU, else `cpu`",
    )
    cpu_threads = Setting(
        "WARPWELL_THREADS",
        64,
        _positive_integer,
        "a whole number, 1 or more",
        "Threads of a launch on the CPU; more than cores, because waiting threads cost nothing.",
    )
    check = Setting(
        "WARPWELL_CHECK",
        False,
        _switch,
        "1 (or 0)",
        "1: check the indices of all kernels that are launched.",
        "0",
    )
    seed = Setting("WARPWELL_SEED", 0, _integer, "a whole number", "Seed of the interleaving of launches on `interp`.")
    cache_folder = Setting[Path | None](
        "WARPWELL_CACHE_DIR",
        None,
        lambda text: Path(text).expanduser(),
        "a folder",
        "Folder of compiled code and of the measurements of schedulers.",
        "`XDG_CACHE_HOME`, else `~/.cache`",
    )
    gpudirect = Setting(
        "WARPWELL_GPUDIRECT",
        "auto",
        _one_of("auto", "on", "off"),
        '"auto", "on" or "off"',
        "Whether long reads of files go to GPU memory by cuFile: if the system supports it; `on`: always, or opening "
        "the array raises; `off`: never.",
    )
    read_gap_bytes = Setting[int | None](
        "WARPWELL_READ_GAP_BYTES",
        None,
        lambda text: checked_nbytes(text, minimum=0),
        'a size, such as "32KiB"',
        "Longest gap between two wanted ranges of a file that one command reads as well.",
        "16 KiB; 1 KiB if the page cache is bypassed",
    )
    log_level = Setting(
        "WARPWELL_LOG_LEVEL",
        "WARNING",
        _one_of("DEBUG", "INFO", "WARNING", "ERROR"),
        '"DEBUG", "INFO", "WARNING" or "ERROR"',
        "Least severe messages of the logger `warpwell`, set at the import.",
    )
    socket = Setting[Path | None](
        "WARPWELL_SOCKET",
        None,
        Path,
        "a path",
        "Socket of the scheduler service.",
        "`warpwell/scheduler.sock` in `XDG_RUNTIME_DIR`, else in a folder of the user in `/tmp`",
    )
    turns_folder = Setting(
        "WARPWELL_TURNS",
        "",
        str,
        "an absolute path",
        "Folder of the files by which processes share a GPU.",
        "a folder of the user in `/dev/shm`",
    )
    share = Setting(
        "WARPWELL_SHARE",
        "",
        str,
        "PRIORITY:TENANT",
        "Priority and tenant of a program that shares GPUs; `warpwell share` sets it.",
        "the program shares no GPU",
    )

    pool_stall_seconds = Setting(
        "WARPWELL_POOL_STALL",
        3600.0,
        _positive_seconds,
        "seconds, more than 0",
        "Seconds that a program waits for a device of a pool, or for a lease, before it raises `StallError`.",
        "3600",
    )
    pool_silence_seconds = Setting(
        "WARPWELL_POOL_TIMEOUT",
        3.0,
        _finite_seconds,
        "seconds, more than 0",
        "Seconds without a sign of life after which a process of a pool is lost.",
        "3",
    )
    pool_chunk = Setting[int | None](
        "WARPWELL_POOL_CHUNK",
        None,
        _positive_integer,
        "a whole number of bytes",
        "Bytes of a chunk of copies to and from devices of a pool.",
        "2 MiB, for copies from 24 MiB on",
    )
    pool_buffers = Setting(
        "WARPWELL_POOL_BUFFERS",
        4,
        _positive_integer,
        "a whole number, 1 or more",
        "Staging buffers of a copy to or from a device of a pool.",
    )
    pool_pipeline = Setting(
        "WARPWELL_POOL_PIPELINE",
        True,
        _switch,
        "1 (or 0)",
        "0: receive all data of a copy before they are copied to the device.",
        "1",
    )
    pool_direct = Setting(
        "WARPWELL_POOL_DIRECT",
        True,
        _switch,
        "1 (or 0)",
        "0: devices of one host copy as if they were on different hosts.",
        "1",
    )

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        found = type(self).__dict__.get(name)
        how = f": set {found.variable} in os.environ" if isinstance(found, Setting) else ""
        raise AttributeError(f"settings.{name} cannot be assigned{how}")

    @property
    def cache_root(self) -> Path:
        """`cache_folder` or its default; the files are in the folder ``warpwell`` in it."""
        return self.cache_folder or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()


settings = Settings()
logging.getLogger("warpwell").setLevel(settings.log_level)


def reference() -> str:
    """Return the rows of the reference page."""
    found = [setting for setting in vars(Settings).values() if isinstance(setting, Setting)]
    return "\n".join(f"| `{each.variable}` | {each.shown} | {each.description} |" for each in found)
