"""Open and create arrays."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import pathlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import closing, errors
from .._check import checked_device, checked_integer, checked_nbytes
from .._npy import npy_header
from ..cache import Cache, choose_page_size, default_queues
from ..drives import DriveController, DriveMedium, DriveRings, Namespace, NamespaceMedium, open_namespace
from ..replacing import NO_SPACE
from ..storage import FileMedium, Medium, QueueBackend
from ..targets import default_device
from ..targets.gpu import require_gpu
from .array import TIERS, Array
from .attachment import Attachment
from .header import Header, check_dtype, check_extents, is_bfloat16, is_npy, read_npy, read_superblock
from .items import BFLOAT16, code_of
from .mapping import Mapping

DEFAULT_CACHE = "256MiB"

_writers: dict[tuple[Any, int], list[str]] = {}
"""Files and namespaces that are open for writing. Each has its path in a list, whose identity is that of the writer."""

_SETTLE_SECONDS = 10.0
"""Longest wait for dropped arrays that are still being closed: one of them may have the file open."""


def open_array(
    path: str | os.PathLike[str] | Medium | Namespace,
    mode: str = "r",
    *,
    dtype: Any = None,
    shape: int | tuple[int, ...] | None = None,
    offset: int | str = 0,
    device: str | None = None,
    tier: str = "auto",
    cache: int | str | Cache | None = None,
    page_size: int | str | None = None,
    stats: str | None = None,
    share: float | None = None,
    read_once: bool = False,
    timeout: float | None = None,
    name: str | None = None,
    **options: Any,
) -> Array:
    """Open an array on storage. No data is loaded, except in tiers that hold all data in memory.

    Parameters
    ----------
    path : path, Medium or Namespace
        A ``.npy`` file, or with `dtype` a raw file, block device or medium. Or a namespace of a drive,
        ``Drive.namespace(1)`` or ``"nvme:ADDRESS/NAMESPACE"``: the drive then executes the commands of kernels itself.
        The namespace was formatted by ``warpwell drive format-array``; with `dtype` it is raw, and read-only.
    mode : {"r", "r+"}
        Read-only, or writable.
    dtype, shape, offset : optional
        Layout of a raw file: the type of its items ("bfloat16" is allowed), its shape (by default one dimension), and
        the position of its first item in bytes (also text such as "4KiB").
    device : {"cuda", "cpu", "interp"}, optional
        The device whose kernels use the array; default: "cuda" if there is a GPU, else "cpu".
    tier : {"auto", "mapped", "storage", "host-cached", "host", "device"}
        Where the data lives: in a mapping of the file, on storage behind a cache, in pinned host memory behind a cache,
        in pinned host memory read directly, or all in device memory. "auto" is "mapped" if `path` names a file, the
        device is "cpu" and no option of a cache is given; otherwise "storage".
    cache : int, str or Cache, optional
        Bytes of the array's own cache (default "256MiB"), or a `Cache` to share.
    page_size : int or str
        Bytes of a page, a power of two of at least 512; also text such as "4KiB" (own cache only). Default: 4096, or
        16384 on "cpu" if the cache has at least 16 MiB.
    stats : {"basic", "full"}
        "full" also counts hits and bytes requested (own cache only).
    share : float, optional
        Fraction of a shared cache's frames for this array alone.
    read_once : bool
        Whether each page is used only once, as by a scan. The cache then evicts pages without a second chance.
    timeout : float
        Timeout of kernels that wait for storage, in seconds without any completion; default 30 (own cache only).
    name : str, optional
        Name in messages; default: the path.
    **options
        ``queues``, ``depth``, ``threads``, ``merge`` of the array's own `Cache`.

    Returns
    -------
    Array

    Raises
    ------
    MissingFileError, FormatError, DTypeError, ArgumentError, SharingError, DeviceNotFoundError, DriveError
        Nothing is left open.
    """
    cache_options = {"page_size": page_size, "stats": stats, "timeout": timeout, **options}
    chosen = _checked_device(mode, tier, device, cache, cache_options)
    offset = checked_nbytes(offset, "offset", minimum=0)
    is_mapped = _is_mapped(path, tier, chosen, [cache, share, read_once or None, *cache_options.values()])
    # afterwards, dropped arrays are written, and their files, frames and shares are free
    closing.wait_until_closed(_SETTLE_SECONDS)
    with contextlib.ExitStack() as on_failure:
        opening = _Opening(
            path, mode == "r+", (dtype, shape, offset), chosen, tier, cache, cache_options, is_mapped, on_failure
        )
        part = opening.attach(name, share)
        on_failure.pop_all()
    return Array(part, read_once=read_once)


@dataclass
class _Opening:
    """An array that is being opened; `on_failure` closes what was opened if an error follows."""

    path: Any
    writable: bool
    layout: tuple[Any, int | tuple[int, ...] | None, int]
    """Data type, shape and offset of a raw file."""
    device: str
    tier: str
    cache: int | str | Cache | None
    cache_options: dict[str, Any]
    is_mapped: bool
    on_failure: contextlib.ExitStack
    claims: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Functions to call when the array is closed."""

    def attach(self, name: str | None, share: float | None) -> Attachment:
        """Open the medium, and map it or attach it to a cache."""
        self.on_failure.callback(self.claims.close)
        is_namespace = isinstance(self.path, Namespace) or _is_drive(self.path)
        medium, header, label = self._open_namespace() if is_namespace else self._open_medium()
        label = name or label
        mapping = _mapping(medium, label, self.tier) if self.is_mapped else None
        tier = "mapped" if mapping else "storage" if self.tier == "auto" else self.tier
        cache = self.cache
        owns_cache = not isinstance(cache, Cache)
        if not isinstance(cache, Cache):
            service = DriveRings(medium.namespace.drive) if type(medium) is NamespaceMedium else None
            cache = _own_cache(cache, self.device, tier, medium.nbytes, self.cache_options, service)
            self.on_failure.callback(cache.close)
        return Attachment(
            medium,
            header,
            cache=cache,
            owns_cache=owns_cache,
            tier=tier,
            writable=self.writable,
            name=label,
            share=share,
            on_close=self.claims.close,
            mapping=mapping,
        )

    def _open_medium(self) -> tuple[Medium, Header, str]:
        """Return a medium, the array's layout, and the name."""
        path, (dtype, shape, offset) = self.path, self.layout
        if isinstance(path, Medium):
            if self.writable and not path.writable:
                raise errors.ReadOnlyError(f"medium {path.name!r} is read-only")
            return path, _raw_header(path.nbytes, path.name, dtype, shape, offset), path.name
        target, is_device = _checked_file(path)
        if is_device and dtype is None:
            raise errors.ArgumentError(f"{target} is a block device: pass dtype= (and shape=, offset=)", name="dtype")
        if dtype is None and (shape is not None or offset):
            raise errors.ArgumentError("shape and offset describe a raw file: pass dtype as well")
        # header, data and the claim of the writer belong to the same file, even if the path is replaced concurrently
        medium = FileMedium(target, writable=self.writable, direct=False if self.is_mapped else None)
        self.on_failure.callback(medium.close)
        has_header = not offset and not is_device and is_npy(medium.fileno())
        if dtype is None or (has_header and shape is None and is_bfloat16(dtype)):
            header = read_npy(target, medium.fileno(), bfloat16=dtype is not None)
        else:
            header = _raw_header(medium.nbytes, str(target), dtype, shape, offset)
            if has_header:
                raise errors.ArgumentError(
                    f"{target} is a .npy file, which has a dtype and a shape of its own: leave dtype= out (it is raw "
                    f"data only with offset=)",
                    name="dtype",
                )
        if self.writable:
            status = os.fstat(medium.fileno())
            self.claims.callback(_claim((status.st_dev, status.st_ino), str(target)))
        return medium, header, target.name

    def _open_namespace(self) -> tuple[Medium, Header, str]:
        """Return the medium of a namespace, the array's layout, and the name.

        The drive serves the rings of the cache itself if it can; otherwise its namespace is a medium like others.
        """
        cache, namespace = self.cache, self.path
        if isinstance(cache, Cache):
            page = cache.page_size
        else:
            page = choose_page_size(self.cache_options["page_size"], self.device, cache or DEFAULT_CACHE)
        if isinstance(namespace, str):
            namespace, release = open_namespace(namespace)
            self.claims.callback(release)
        host = NamespaceMedium(namespace, writable=self.writable)
        has_rings = _serves_rings(self.device, self.tier, cache)
        header = self._layout(host, page if has_rings else namespace.block)
        medium = host if has_rings else DriveMedium(namespace, writable=self.writable)
        self.on_failure.callback(medium.close)
        if self.writable:
            self.claims.callback(_claim((namespace.drive, namespace.nsid), host.name))
        return medium, header, host.name

    def _layout(self, medium: NamespaceMedium, page: int) -> Header:
        """Return the layout of an array that Warpwell formatted on a namespace, or of raw data."""
        dtype, shape, offset = self.layout
        header = read_superblock(medium, dtype=dtype, shape=shape, writable=self.writable)
        # a command past the end fails, so the last blocks are out of reach if they do not fill a page
        reach = medium.nbytes // page * page
        if header is None:
            remainder = (reach - offset) % check_dtype(dtype, medium.name).itemsize if shape is None else 0
            return _raw_header(reach - remainder, medium.name, dtype, shape, offset)
        if header.origin + header.nbytes > reach:
            raise errors.ArgumentError(
                f"{medium.name} has {medium.nbytes} bytes, of which pages of {page} reach {reach}, and its array ends "
                f"at {header.origin + header.nbytes}: take a smaller page_size",
                name="page_size",
            )
        return header


def _serves_rings(device: str, tier: str, cache: int | str | Cache | None) -> bool:
    """Return whether a drive serves the rings of an array's cache, instead of being a medium like others."""
    is_other = isinstance(cache, Cache) and not isinstance(cache.controller, DriveController)
    return device != "interp" and tier in ("auto", "storage") and not is_other


def _is_drive(path: Any) -> bool:
    """Return whether a path names a namespace of a drive."""
    return isinstance(path, str) and path.startswith("nvme:") and not os.path.exists(path)


def _is_mapped(path: Any, tier: str, device: str, cache_options: list[Any]) -> bool:
    """Return whether to map the file; an option of a cache that was not passed is None."""
    why = (
        f"kernels on {device!r} cannot read a mapping"
        if device != "cpu"
        else "a Medium is not a file of the system"
        if isinstance(path, Medium)
        else "a drive is not a file of the system"
        if isinstance(path, Namespace) or _is_drive(path)
        else "a block device is read through a cache"
        if _is_block_device(path)
        else "a mapping has no cache of its own: leave cache=, page_size= and other options of a cache out"
        if any(option is not None for option in cache_options)
        else None
    )
    if tier == "mapped" and why:
        raise errors.ArgumentError(f'tier="mapped": {why}', name="tier")
    return tier in ("auto", "mapped") and why is None


def _is_block_device(path: Any) -> bool:
    return isinstance(path, str | os.PathLike) and pathlib.Path(path).is_block_device()


def _mapping(medium: Medium, name: str, tier: str) -> Mapping | None:
    """Map a file; return None if its file system maps none, so that tier "auto" has a cache instead."""
    assert isinstance(medium, FileMedium)
    try:
        return Mapping(medium, name)
    except OSError as error:
        if tier == "mapped":
            raise errors.ArgumentError(f'{error}: open it with tier="storage"', name="tier") from error
        return None


def _checked_device(
    mode: str, tier: str, device: str | None, cache: int | str | Cache | None, cache_options: dict[str, Any]
) -> str:
    """Check the options of an array; return the device that it is for."""
    if mode not in ("r", "r+"):
        raise errors.ArgumentError(f'mode is "r" or "r+", not {mode!r}; new files are made by create()')
    if tier not in ("auto", *TIERS):
        raise errors.ArgumentError(f"tier {tier!r} is unknown: choose one of auto, {', '.join(TIERS)}")
    chosen = require_device(device or (cache.device if isinstance(cache, Cache) else default_device()))
    if isinstance(cache, Cache):
        if cache.device != chosen:
            raise errors.ArgumentError(f"the cache is on {cache.device!r}, but device= is {chosen!r}")
        own_options = {
            "page_size": cache.page_size,
            "stats": "full" if cache.full else "basic",
            "timeout": cache.timeout,
        }
        for option, value in cache_options.items():
            if option == "page_size" and value is not None:
                value = checked_nbytes(value, "page_size")
            if value is not None and value != own_options.get(option):
                raise errors.ArgumentError(
                    f"{option}={value!r} belongs to the shared Cache: pass it to Cache() instead"
                )
    if "mmap_mode" in cache_options:
        raise errors.ArgumentError(
            f"open() has no option mmap_mode={cache_options['mmap_mode']!r}: "
            'NumPy\'s mmap_mode is mode= here, "r" or "r+"'
        )
    allowed = {"page_size", "stats", "timeout", "queues", "depth", "threads", "merge"}
    unknown = sorted(cache_options.keys() - allowed)
    if unknown:
        known = sorted(inspect.signature(open_array).parameters.keys() - {"path", "options"} | allowed)
        raise errors.ArgumentError(f"open() has no option {unknown[0]!r}; it has {', '.join(known)}")
    return chosen


def _own_cache(
    nbytes: int | str | None,
    device: str,
    tier: str,
    file_bytes: int,
    options: dict[str, Any],
    service: QueueBackend | None,
) -> Cache:
    """Return a cache for one array, with the number of queues that it can use."""
    if tier == "mapped":
        nbytes = 1 << 16  # the cache only latches errors of launches, and has no pages
    nbytes = DEFAULT_CACHE if nbytes is None else nbytes
    if tier in ("mapped", "host", "device"):
        options = {"queues": 1, "depth": 4, "threads": 1, **options}
    elif options.get("queues") is None:
        # a small array needs queues only for its pages: rings and staging buffers take pinned memory
        page = choose_page_size(options["page_size"], device, nbytes)
        options = {**options, "queues": default_queues(device, -(-file_bytes // page))}
    return Cache(nbytes, device=device, service=service, **{k: v for k, v in options.items() if v is not None})


def create(
    path: str | os.PathLike[str], shape: int | tuple[int, ...], dtype: Any = np.float64, **options: Any
) -> Array:
    """Create a ``.npy`` file of zeros and open it writable.

    Parameters
    ----------
    path : path
        Path of the new file; it must not exist.
    shape : int or tuple of int
    dtype : dtype-like
    **options
        As for `open`.

    Raises
    ------
    ArgumentError
        The file exists, or the shape is negative.
    StorageFullError
        No space is left; no file remains.
    """
    target = pathlib.Path(path)
    checked = check_dtype(dtype, str(target))
    extents = _extents(shape)
    check_extents(extents, checked, str(target))
    require_device(options.get("device") or default_device())
    special = code_of(checked) == BFLOAT16
    header = npy_header("<V2" if special else np.lib.format.dtype_to_descr(checked), extents)
    try:
        file = target.open("xb")
    except FileExistsError:
        raise errors.ArgumentError(f'{target} exists: open it with ww.open(path, "r+"), or remove it first') from None
    except FileNotFoundError:
        message = f"the folder of {target} does not exist: create it first"
        raise errors.MissingFileError(message, path=str(target)) from None
    try:
        with file:
            file.write(header)
            nbytes = len(header) + math.prod(extents) * checked.itemsize
            file.flush()
            # allocate the space now: otherwise a kernel could run out of space later
            if nbytes > len(header):
                os.posix_fallocate(file.fileno(), 0, nbytes)
        return open_array(target, "r+", dtype=BFLOAT16 if special else None, **options)
    except BaseException as error:
        target.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            raise errors.StorageFullError(
                f"there is no room for {math.prod(extents) * checked.itemsize} bytes of {target}: free some, or "
                "choose another",
                path=str(target),
            ) from error
        raise


def require_device(device: str) -> str:
    """Return the normalized name of a device; raise unless it can be used here."""
    chosen = checked_device(device)
    if chosen == "cuda":
        require_gpu()
    return chosen


def _checked_file(path: Any) -> tuple[pathlib.Path, bool]:
    """Return the path of a file or block device, and whether it is a block device."""
    if not isinstance(path, str | os.PathLike):
        raise errors.ArgumentError(
            f"{type(path).__name__} is not a path: pass the path of a file, or a Medium (kernels take NumPy arrays as "
            "they are, without open())",
            name="path",
        )
    target = pathlib.Path(path)
    if not target.exists():
        raise errors.MissingFileError(f"{target} does not exist: check the path", path=str(target))
    is_device = target.is_block_device()
    if not (is_device or target.is_file()):
        raise errors.FormatError(f"{target} is not a file: pass the .npy file inside", path=str(target))
    return target, is_device


def _extents(shape: Any) -> tuple[int, ...]:
    """Return a shape as a tuple; `shape` is an integer or a tuple or list of integers, none negative."""
    if isinstance(shape, np.ndarray) and shape.ndim:
        raise errors.ArgumentError(
            f"shape is an integer or a tuple of integers, not an array of shape {shape.shape}: to keep its items, "
            'np.save(path, items) and then open(path, "r+")',
            name="shape",
        )
    extents = shape if isinstance(shape, tuple | list) else (shape,)
    return tuple(checked_integer(n, "each extent of a shape", minimum=0) for n in extents)


def _raw_header(size: int, name: str, dtype: Any, shape: Any, offset: int) -> Header:
    if dtype is None:
        raise errors.ArgumentError(f"{name} is raw data: pass dtype= (and shape=)")
    checked = check_dtype(dtype, name)
    if offset > size:
        raise errors.ArgumentError(f"offset {offset} is outside of {name}, which has {size} bytes")
    if shape is None:
        if (size - offset) % checked.itemsize:
            raise errors.FormatError(
                f"{name}: {size - offset} bytes are not a whole number of {checked} items of {checked.itemsize}: "
                "check dtype, or pass shape=",
                path=name,
            )
        extents: tuple[int, ...] = ((size - offset) // checked.itemsize,)
    else:
        extents = _extents(shape)
    check_extents(extents, checked, name)
    header = Header(checked, extents, offset)
    if offset + header.nbytes > size:
        raise errors.FormatError(
            f"{name} has {size} bytes, too few for shape {extents} of {checked} at byte {offset}", path=name
        )
    return header


def _claim(key: tuple[Any, int], target: str) -> Callable[[], None]:
    """Record that this process writes to a file or namespace; return the function that removes the record.

    Acquires no lock: a finalizer that closes an array could interrupt the thread that holds the lock.
    """
    writer = [target]
    holder = _writers.setdefault(key, writer)
    if holder is not writer:
        raise errors.SharingError(
            f"{target} is already open for writing in this process (as {holder[0]}): use that array or close it"
        )

    def release() -> None:
        if _writers.get(key) is writer:
            del _writers[key]

    return release


# the files are open in the parent, not here
os.register_at_fork(after_in_child=_writers.clear)
