"""Create and open stores: options, shards, replacing an existing store, pickling."""

from __future__ import annotations

import contextlib
import copyreg
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from .. import errors
from .._check import checked_callable, checked_device, checked_flag, checked_nbytes, checked_path, extra
from ..targets import has_cuda
from . import lifetime
from .device.device_store import DeviceStore, MakeMedium
from .device.engine import DeviceOptions
from .log.files import Files, WriterLock
from .log.log import Log
from .log.manifest import read_manifest
from .log.shards import MAX_SHARDS, home_of, own_shards
from .records import Records
from .schema import Schema, as_schema
from .store import Store

Path = str | os.PathLike[str]
T = TypeVar("T")

_LOCKED_SECONDS = 60.0
"""Maximum time in seconds to wait until dropped stores are closed, if a store to open is locked."""


def create(
    path: Path,
    schema: Mapping[str, Any] | Schema | None = None,
    *,
    durability: str = "commit",
    segment_bytes: int | str = "256MiB",
    shards: Sequence[Path] | None = None,
    overwrite: bool = False,
    metadata: Mapping[str, Any] | None = None,
) -> Store:
    """Create an empty store and open it for writing.

    Parameters
    ----------
    path : path-like
        A folder that does not exist yet, or is empty. Its parent must exist.
    schema : mapping of str to (dtype, shape), optional
        The fields of every value: ``{"image": ("uint8", (None,)), "y": "int64", "name": "str"}``; see `Schema`.
        Default: values are bytes of any length below 2 GiB.
    durability : {"commit", "always", "none"}
        When changes become durable: at `Store.commit`, at each change, or whenever the system writes them.
    segment_bytes : int or str
        Size of the files that hold values.
    shards : sequence of path-like, optional
        Folders among which to divide the records, for example on several drives. Like `path`, each one must be empty or
        not exist yet. Shards in the same parent folder as `path` may be moved and copied together with it.
    overwrite : bool
        Replace an existing store and its shards. Other files are never replaced.
    metadata : mapping, optional
        Information about the records for readers, for example the names of classes, as JSON values.
        `Store.metadata` returns it.

    Returns
    -------
    Store

    Raises
    ------
    ArgumentError
        `path` already exists, or an option is not valid.
    SchemaError, MissingFileError, StorageFullError, SharingError
        Nothing was created.
    """
    path, overwrite = checked_path(path), checked_flag(overwrite, "overwrite")
    new_schema = as_schema(schema)
    meta: dict[str, Any] = {"schema": None if new_schema is None else new_schema.to_json(), **_as_metadata(metadata)}
    options: dict[str, Any] = {
        "durability": durability,
        "segment_bytes": checked_nbytes(segment_bytes, "segment_bytes"),
    }
    if isinstance(shards, str | bytes | os.PathLike) or not isinstance(shards, Iterable | None):
        raise errors.ArgumentError(f"shards is {shards!r}: pass a list of folders", name="shards")
    folders = None if shards is None else [os.path.abspath(checked_path(folder, "shards")) for folder in shards]
    _check_shards(os.path.abspath(path), folders)

    def new_log() -> tuple[Log, Callable[[], None] | None]:
        with contextlib.ExitStack() as undo:
            finish = put_aside(os.path.abspath(path), folders or [], undo) if overwrite else None
            log = Log.create(path, schema_json=meta, shards=folders or (), **options)
            undo.pop_all()
        return log, finish

    log, finish = _after_dropped(new_log)
    if finish is not None:
        finish()
    return Store(Records(log))


def _after_dropped(make_log: Callable[[], T]) -> T:
    """Wait until dropped stores are closed, longer if the store is locked; return the result of `make_log`."""
    lifetime.wait_until_closed()
    try:
        return make_log()
    except errors.SharingError:  # the lock of a dropped store, perhaps, whose commit takes long
        lifetime.wait_until_closed(_LOCKED_SECONDS)
        return make_log()


def _as_metadata(metadata: Any) -> dict[str, Any]:
    """Return the metadata of a new store as a part of its manifest."""
    try:
        return {"metadata": json.loads(json.dumps(dict(metadata)))} if metadata else {}
    except (TypeError, ValueError) as error:
        raise errors.ArgumentError(
            f"metadata cannot be written as JSON ({error}): pass a dict of text, numbers, lists and dicts",
            name="metadata",
        ) from None


def open_store(
    path: Path,
    mode: str = "r",
    *,
    device: str | None = None,
    cache: int | str | None = None,
    queues: int = 4,
    depth: int = 1024,
    threads: int | None = None,
    value_bytes: int | str | None = None,
    timeout: float = 10.0,
    window: int = 0,
    weight: int = 1,
    returns: str = "request",
    beside: DeviceStore | None = None,
    drive: MakeMedium | None = None,
) -> Store:
    """Open a store.

    Parameters
    ----------
    path : path-like
        Its folder.
    mode : {"r", "r+"}
        "r" opens the store for reading, along with other readers and one writer; "r+" for reading and writing, as the
        only writer. A reader sees what was committed before it opened the store, and later commits after
        `Store.refresh`.
    device : str, optional
        "cuda" (or "cuda:1"), "cpu" or "interp": the device of kernels that fetch records, and of the results of
        `DeviceStore.get_async`. Default: only the host reads. All options below need a device.
    cache : int or str, optional
        Bytes of device memory that caches values, for example "1GiB".
    queues, depth : int
        Number of queue pairs, and of the entries of each one (a power of two). At most half as many commands as entries
        are in flight.
    threads : int, optional
        Maximum number of the process's native service threads that serve the queues at once.
    value_bytes : int or str, optional
        Maximum size in bytes of a value in the cache, and size of the pieces in which larger values are read (default
        4096). If the store has a schema without ragged fields, this is always the size of a record.
    timeout : float
        Timeout of a request of device code, in seconds without any answer. While other commands are answered, a command
        times out after four times as long.
    window, weight : int
        See `warpwell.storage.Controller`.
    returns : {"request", "queue"}
        Where the device writes values: "request" is a region of each request; "queue" is a return value queue, which
        assigns slots as values arrive. With a queue, larger values arrive in one piece, but fewer values arrive at a
        time.
    beside : DeviceStore, optional
        A store of the same folder on another device. Its controller also serves this store's queues.
    drive : callable, optional
        Called with the native functions (`NativeMedium`) of each shard; returns a wrapper with a method `native`, which
        returns the functions to use instead. For example, an emulated drive.

    Returns
    -------
    Store
        A `DeviceStore` if `device` is given.

    Raises
    ------
    MissingFileError, FormatError
        The path does not exist, or is not a store.
    StoreVersionError
        The store was written by a newer version of Warpwell.
    CorruptionError
        Committed data is damaged or missing. Nothing was changed.
    SharingError
        The store is open for writing in this or another process; or the store is a copy, and its shards belong to
        another one.
    """
    if mode not in ("r", "r+"):
        raise errors.ArgumentError(f'mode is {mode!r}: choose "r" to read, or "r+" to read and write', name="mode")
    path = checked_path(path)
    queueing = {"queues": queues, "depth": depth, "threads": threads, "window": window, "weight": weight}
    options = _device_options(device, cache, value_bytes, timeout=timeout, returns=returns, **queueing)
    _check_device_options(device, options, beside, drive)
    log = _after_dropped(lambda: Log.open(path, writable=mode == "r+"))
    return _store_of(log, options if device is not None else None, beside, drive)


def _store_of(
    log: Log, options: DeviceOptions | None, controller_store: DeviceStore | None, drive: MakeMedium | None
) -> Store:
    """Return the store of an open log; close the log on an error."""
    try:
        records = Records(log)
        if options is None:
            return Store(records)
        return DeviceStore(records, options=options, beside=controller_store, drive=drive)
    except BaseException:
        with contextlib.suppress(Exception):
            log.close()
        raise


def seal(path: Path) -> None:
    """Write the index of a store to a file that all processes share; see `Store.seal`.

    Stores of earlier formats get the newest format.

    Parameters
    ----------
    path : path-like
        The store's folder; no process may have it open for writing.

    Raises
    ------
    MissingFileError, FormatError, CorruptionError, SharingError
        See `open_store`.
    StorageFullError
        There is no space for the index; the store is unchanged.
    """
    with open_store(path, "r+") as store:
        store.seal()


# -- stores that are sent to another process, which opens them again ------------------------------------------


def _reduced(store: Store) -> tuple[Any, ...]:
    """Return the function and arguments that open a store again (`pickle`)."""
    _check_sendable(store)
    return open_store, (store.path,)


def _reduced_on_device(store: DeviceStore) -> tuple[Any, ...]:
    """Return the function and arguments that open a store on a device again (`pickle`)."""
    _check_sendable(store)
    if store.is_bound_to_process:
        raise errors.ForkError(
            f"{store.path} cannot be sent to another process, because it is on a GPU, uses the controller of "
            "another store, or is on an emulated drive: open it in the other process",
            path=store.path,
        )
    arguments = {**asdict(store.options), "cache": store.options.cache or None}
    return partial(open_store, **arguments), (store.path,)


def _check_sendable(store: Store) -> None:
    store.check_open()
    if store.writable:
        raise errors.ForkError(
            f"{store.path} cannot be sent to another process, as it is open for writing: open it with mode='r', or"
            " send its path",
            path=store.path,
        )


copyreg.pickle(Store, _reduced)
copyreg.pickle(DeviceStore, _reduced_on_device)


# -- steps of `create` and `open_store` ----------------------------------------------------------------------------


def _device_options(
    device: str | None, cache: int | str | None, value_bytes: int | str | None, **others: Any
) -> DeviceOptions:
    return DeviceOptions(
        device="cpu" if device is None else _device(device),
        cache=0 if cache is None else checked_nbytes(cache, "cache"),
        value_bytes=4096 if value_bytes is None else checked_nbytes(value_bytes, "value_bytes"),
        **others,
    )


def _device(device: Any) -> str:
    name = checked_device(device, every_gpu=True)
    if name.startswith("cuda") and not has_cuda():
        raise errors.DeviceNotFoundError(f'device "{name}" needs an NVIDIA GPU and {extra("cuda")}: use "cpu"')
    return name


def _check_device_options(device: str | None, options: DeviceOptions, controller_store: Any, drive: Any) -> None:
    """Check the options of a device store, and raise ArgumentError if they are passed without a device."""
    checked_callable(drive, "drive")
    if controller_store is not None and not isinstance(controller_store, DeviceStore):
        raise errors.ArgumentError(
            f"beside is {controller_store!r}: pass a store that was opened with device=", name="beside"
        )
    if device is None and (options != DeviceOptions(device="cpu") or controller_store is not None or drive is not None):
        raise errors.ArgumentError(
            "cache, queues, depth, threads, value_bytes, timeout, window, weight, returns, beside and drive need a"
            " device: pass device=",
            name="device",
        )


def _check_shards(path: str, folders: list[str] | None) -> None:
    """Raise ArgumentError if there are too many folders, or one is named twice."""
    if folders is None:
        return
    if not 1 <= len(folders) <= MAX_SHARDS:
        raise errors.ArgumentError(f"{len(folders)} shards: pass 1 to {MAX_SHARDS} folders", name="shards")
    if len({path, *folders}) != len(folders) + 1:
        raise errors.ArgumentError("path and shards name a folder twice: pass different folders", name="shards")


def put_aside(main: str, folders: list[str], undo: contextlib.ExitStack) -> Callable[[], None]:
    """Rename a store and its shards; return the function that deletes them. `undo` renames them back."""
    moved: list[str] = []
    # `main` is renamed first and restored last: without it, the other folders are not a store
    own = [os.path.realpath(path) for path in own_shards(main)]
    new_folders = [path for path in folders if os.path.realpath(path) not in own]
    for path in [main, *own, *new_folders]:
        if not os.path.lexists(path) or (os.path.isdir(path) and not os.listdir(path)):
            continue
        # Raises for a folder that does not hold a store, and for a store that another process has open for writing.
        with contextlib.suppress(errors.CorruptionError, errors.StoreVersionError):
            meta = read_manifest(path).schema or {}
            if "shard" in meta and path not in own:
                raise errors.SharingError(
                    f"{path} is shard {meta['shard']} of the store {home_of(path, meta)}, which would lose this"
                    " shard: choose another folder, or remove that store first",
                    path=path,
                )
        lock = WriterLock(Files(), path)
        aside = f"{path}.replaced-{uuid.uuid4().hex[:8]}"
        try:
            os.rename(path, aside)
        finally:
            lock.release(opened=False)
        moved.append(aside)
        undo.callback(_put_back, aside, path)

    def finish() -> None:
        for aside in moved:
            shutil.rmtree(aside, ignore_errors=True)

    return finish


def _put_back(aside: str, path: str) -> None:
    if not os.path.lexists(path):
        os.rename(aside, path)
