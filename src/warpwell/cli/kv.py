"""``warpwell kv``: fills, reads and checks key-value stores."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError
from ._common import (
    DAMAGED,
    Commands,
    Report,
    Run,
    add_command,
    add_group,
    describe_key,
    json_option,
    new_file,
    output_of,
    print_problems,
    problem_values,
    split_names,
)

if TYPE_CHECKING:
    from ..kv import Schema, Store
    from ..kv.convert.importers import LoadReport, Source

    LoadProgress = Callable[[LoadReport], object]


def add(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add ``kv`` and its commands."""
    verbs = add_group(commands, "kv", "fill, read and check key-value stores")
    _add_load(verbs)

    parser = _store_command(verbs, "get", get, "write the value of a key to stdout")
    parser.add_argument("key", metavar="KEY", help="an integer (8-byte key) or text")
    text = "type of KEY (default: int if KEY is an integer, unless only its text is a key; else text)"
    parser.add_argument("--type", choices=("auto", "int", "text", "hex"), default="auto", help=text)
    parser.add_argument("--field", metavar="NAME", help="write only this field, as raw items")
    parser.add_argument("--out", metavar="FILE", help="write to a file instead of stdout")

    parser = _store_command(verbs, "dump", dump, "write all records to a Parquet file that `kv load` can read")
    parser.add_argument("out", metavar="OUT", help="the file, usually NAME.parquet")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")

    _store_command(verbs, "stats", stats, "show the size and the schema of a store")

    _store_command(verbs, "verify", verify, "read and check all data (exit code 1: some data is damaged)")

    _store_command(verbs, "seal", seal, "write the index to a file, so that processes open the store faster")

    text = "copy the undamaged records of a damaged store into a new one (exit code 1: some records are lost)"
    parser = _store_command(verbs, "salvage", salvage, text)
    parser.add_argument("target", metavar="NEW", help="folder of the new store; STORE is only read")

    parser = _store_command(verbs, "compact", compact, "free the space of replaced and deleted values")
    text = "rewrite value files with at least this share of dead bytes (default: 0.5)"
    parser.add_argument("--threshold", type=float, default=0.5, metavar="SHARE", help=text)


def _add_load(verbs: Commands[argparse.ArgumentParser]) -> None:
    parser = add_command(verbs, "load", load, "load records into a store, in bounded memory")
    text = (
        "folder of classes of images or of other files, tar archives of samples, Parquet or Arrow files, data set of "
        "Hugging Face, LMDB environment or .npz"
    )
    parser.add_argument("source", metavar="SRC", nargs="+", help=text)
    parser.add_argument("store", metavar="STORE", help="folder of the store, usually NAME.kv")
    text = "key of a record: its name, its number, or a 16-byte hash of its name"
    parser.add_argument("--keys", choices=("name", "number", "hash"), help=text)
    parser.add_argument("--key-field", metavar="NAME", help="array or column of keys (of .npz, default: keys)")
    parser.add_argument("--fields", metavar="A,B", help="arrays, columns or members to load (default: all)")
    parser.add_argument("--database", metavar="NAME", help="named database of an LMDB environment")
    text = "meaning of the folders in SRC (default: classes if they contain only images)"
    parser.add_argument("--layout", choices=("classes", "files"), help=text)
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument("--append", action="store_true", help="continue a load of the same source")
    existing.add_argument("--overwrite", action="store_true", help="replace an existing store")
    text = "when writes of the new store become durable (default: commit)"
    parser.add_argument("--durability", choices=("commit", "always", "none"), default="commit", help=text)
    parser.add_argument("--segment-bytes", default="256MiB", metavar="SIZE", help="value file size (default: 256MiB)")
    json_option(parser)


def _store_command(verbs: Commands[argparse.ArgumentParser], name: str, run: Run, text: str) -> argparse.ArgumentParser:
    parser = add_command(verbs, name, run, text)
    parser.add_argument("store", metavar="STORE", help="folder of the store")
    json_option(parser)
    return parser


# -- load --------------------------------------------------------------------------------------------------------------


def load(arguments: argparse.Namespace) -> int:
    """Load records into a new or an existing store."""
    import time

    from .. import kv
    from ..errors import StorageFullError, WarpwellError
    from ..kv.convert.importers import open_source
    from ..kv.schema import as_schema

    output = output_of(arguments)
    started = time.perf_counter()
    path = Path(arguments.store)
    exists = path.exists() and not (path.is_dir() and not any(path.iterdir()))
    if exists and not (arguments.append or arguments.overwrite):
        raise ArgumentError(f"{path} already exists; use --append to continue its load, or --overwrite to replace it")
    options = {name: getattr(arguments, name) for name in ("keys", "key_field", "database", "layout")}
    opened = open_source(arguments.source, fields=split_names(arguments.fields), **options)
    run = _append if arguments.append and (path / "MANIFEST").exists() else _create
    with contextlib.closing(opened) as source, output.progress() as report:
        if source.kind in ("folder", "classes") and path.resolve().is_relative_to(Path(source.where).resolve()):
            raise ArgumentError(f"{path} is in the source folder; give a path outside of {source.where}")
        schema = as_schema(source.schema)
        try:
            done, disk_bytes = run(arguments, source, schema, _progress(report))
        except (KeyboardInterrupt, StorageFullError):
            if exists and arguments.overwrite:  # the old store is unchanged
                raise
            with contextlib.suppress(WarpwellError), kv.open(arguments.store) as store:
                print(f"warpwell: {path} opens, with {len(store):,} records; continue with --append", file=sys.stderr)
            raise
    if source.note and not output.as_json:
        output.notes.print(source.note)
    if source.skipped and not output.as_json:
        output.notes.print(
            f"skipped {len(source.skipped):,} files that are not images of classes, such as {source.skipped[0]}"
        )
    if done.skipped and not done.records and not output.as_json:
        output.notes.print(f"nothing to add: {path} already has all {done.skipped:,} records of {source.where}")
    seconds = time.perf_counter() - started
    values = {
        "store": str(path),
        "source": " ".join(arguments.source),
        "format": source.kind,
        "fields": _fields(schema),
        "records_read": done.records,
        "records": done.skipped + done.records,
        "value_bytes": done.nbytes,
        "disk_bytes": disk_bytes,
        "seconds": seconds,
        "records_per_second": done.records / seconds,
    }
    output.result(str(path), values, {"fields": None, "schema": _schema_text(schema)})
    return 0


def _progress(report: Report) -> LoadProgress:
    """Return a function that shows the records and bytes of a load, their rate, and the time left."""
    import datetime
    import time

    from ..cache import format_size

    started = time.perf_counter()

    def show(done: LoadReport) -> None:
        seconds = time.perf_counter() - started
        loaded = done.share * done.records / (done.skipped + done.records)
        left = datetime.timedelta(seconds=round(seconds * (1 - done.share) / max(loaded, 1e-9)))
        rate = f"{format_size(done.nbytes)}, {format_size(round(done.nbytes / seconds))}/s"
        text = f"{done.skipped + done.records:,} records, {rate}, {left} left"
        report("load", round(1000 * done.share), 1000, text)

    return show


def _create(
    arguments: argparse.Namespace, source: Source, schema: Schema | None, progress: LoadProgress
) -> tuple[LoadReport, int]:
    """Fill a new store. Bad input changes no old store; an interrupt or a full disk keeps the committed records."""
    import shutil

    from .. import kv
    from .._check import checked_nbytes
    from ..errors import CorruptionError, StorageFullError, StoreVersionError
    from ..replacing import temporary_name, unfinished

    path = Path(arguments.store)
    segment_bytes = checked_nbytes(arguments.segment_bytes, "segment-bytes")
    # the old store exists until the new store is complete
    target = path
    if arguments.overwrite and path.is_dir() and any(path.iterdir()):
        with contextlib.suppress(CorruptionError, StoreVersionError):
            kv.open(path, mode="r+").close()  # raises if the folder is not a store, or is in use
        target = temporary_name(path)
    existed = target.is_dir()
    options = {"durability": arguments.durability, "overwrite": arguments.overwrite, "metadata": source.metadata}
    store = kv.create(target, schema=schema, segment_bytes=segment_bytes, **options)
    if target != path:
        unfinished.add(target)
    try:
        done = _fill(source, store, progress)
        unfinished.discard(target)  # complete: an interrupt must not remove its files while it replaces the old store
        if target != path:
            _replace(path, target)
    except BaseException as error:
        store.close()
        if target != path or (isinstance(error, Exception) and not isinstance(error, StorageFullError)):
            shutil.rmtree(target, ignore_errors=True)  # `_replace` may have moved the folder already
            if existed:
                target.mkdir()
        raise
    finally:
        unfinished.discard(target)
    return done


def _replace(path: Path, new: Path) -> None:
    """Replace an old store by a new one. After any interruption, one of the two exists."""
    from ..kv.opening import put_aside

    with contextlib.ExitStack() as undo:
        finish = put_aside(os.path.abspath(path), [], undo)  # raises if the store was opened in the meantime
        new.rename(path)
        undo.pop_all()
    finish()


def _append(
    arguments: argparse.Namespace, source: Source, schema: Schema | None, progress: LoadProgress
) -> tuple[LoadReport, int]:
    from .. import kv
    from ..errors import SchemaError

    def described(schema: Schema | None) -> str:
        return "no schema" if schema is None else f"the schema {schema!r}"

    with kv.open(arguments.store, mode="r+") as store:
        if store.schema != schema:
            raise SchemaError(
                f"{arguments.store} has {described(store.schema)}, but {source.where} has {described(schema)}; "
                "load the source into a new store"
            )
        if store.metadata != source.metadata:
            raise SchemaError(f"{source.where} has other classes than {arguments.store}; load into a new store")
        return _fill(source, store, progress)


def _fill(source: Source, store: Store, progress: LoadProgress) -> tuple[LoadReport, int]:
    from ..kv.convert.importers import load

    with store:
        done = load(source, store, progress)
        store.seal()
        return done, store.stats.disk_bytes


def _fields(schema: Schema | None) -> dict[str, Any] | None:
    return None if schema is None else {field.name: [field.type_name, list(field.shape)] for field in schema.fields}


def _schema_text(schema: Schema | None) -> str:
    if schema is None:
        return "none: values are bytes"
    return ", ".join(f"{field.name}: {field.type_name} {field.shape}" for field in schema.fields)


# -- get ---------------------------------------------------------------------------------------------------------------


def get(arguments: argparse.Namespace) -> int:
    """Write a value: raw bytes, or a table or JSON if it has fields."""
    from .. import kv
    from ..errors import KeyMissingError
    from ..kv import as_key

    output = output_of(arguments)
    target = None if arguments.out is None else new_file(arguments.out, "--out")
    with kv.open(arguments.store) as store:
        key = _find_key(store, arguments.key, arguments.type)
        value = store.get(key)
        if value is None:
            text = f"{arguments.store} has no key {describe_key(key)}; check the key and its --type"
            raise KeyMissingError(text, key=as_key(key))
        schema = store.schema
    if arguments.field is not None:
        if schema is None:
            raise ArgumentError(f"{arguments.store} has no schema, so its values have no fields; omit --field")
        if arguments.field not in value:
            raise ArgumentError(
                f"{arguments.store} has no field {arguments.field!r}; its fields are {', '.join(value)}"
            )
        item = value[arguments.field]
        value = {arguments.field: item}
        raw = item.encode() if isinstance(item, str) else bytes(item) if isinstance(item, bytes) else item.tobytes()
    else:
        raw = value if schema is None else bytes(schema.pack_one(value))
    if target is not None:
        target.write_bytes(raw)
    values = {"store": str(arguments.store), "key": describe_key(key), "key_hex": as_key(key).hex(), "bytes": len(raw)}
    if output.print_json({**values, **_value_json(value)}):
        return 0
    if target is None and isinstance(value, dict) and arguments.field is None:
        output.result(describe_key(key), {name: _array_text(item) for name, item in value.items()})
    elif target is None:
        _write_stdout(raw)
    return 0


def _write_stdout(raw: bytes) -> None:
    """Write all bytes to stdout, which accepts only a part at a time if it is not buffered (``python -u``)."""
    sys.stdout.flush()
    unwritten = memoryview(raw)
    while unwritten:
        unwritten = unwritten[sys.stdout.buffer.write(unwritten) :]
    sys.stdout.buffer.flush()


def _parse_key(text: str, kind: str) -> int | bytes:
    """Return the key that `text` means as "int", "text" or "hex"."""
    from ..kv import as_key

    if kind == "int":
        try:
            number = int(text)
        except ValueError:
            raise ArgumentError(f"key {text!r} is not an integer; use --type text", name="key") from None
        as_key(number)
        return number
    if kind == "hex":
        try:
            raw = bytes.fromhex(text)
        except ValueError:
            raise ArgumentError(f"key {text!r} is not hexadecimal; write two digits per byte", name="key") from None
        return as_key(raw)
    return as_key(text.encode(errors="surrogateescape"))  # the bytes that the shell passed


def _find_key(store: Store, text: str, kind: str) -> int | bytes:
    import re

    if kind != "auto":
        return _parse_key(text, kind)
    if not re.fullmatch(r"[+-]?[0-9]+", text):
        return _parse_key(text, "text")
    try:
        number = _parse_key(text, "int")
    except ArgumentError:
        return _parse_key(text, "text")  # more digits than an 8-byte integer has
    raw = text.encode()
    return raw if number not in store and raw in store else number


def _value_json(value: Any) -> dict[str, Any]:
    import base64

    import numpy as np

    def as_json(item: Any) -> Any:
        if isinstance(item, bytes):
            return base64.b64encode(item).decode()
        return str(item) if isinstance(item, str) or np.asarray(item).dtype.kind == "c" else np.asarray(item).tolist()

    if isinstance(value, dict):
        return {"fields": {name: as_json(item) for name, item in value.items()}}
    try:
        text = value.decode()
    except UnicodeDecodeError:
        text = None
    return {"base64": base64.b64encode(value).decode(), "text": text}


def _array_text(item: Any) -> str:
    import numpy as np

    if isinstance(item, str | bytes):
        return f"{type(item).__name__} [{len(item)}]  {item!r:.200}"
    array = np.asarray(item)
    shape = "x".join(map(str, array.shape))
    return f"{array.dtype}{f' [{shape}]' if shape else ''}  {np.array2string(array, threshold=64)}"


# -- dump, stats, verify, salvage, compact -----------------------------------------------------------------------------


def dump(arguments: argparse.Namespace) -> int:
    """Write all records; OUT is complete at the end, or unchanged."""
    from .. import kv
    from ..kv.convert.arrow import to_parquet
    from ..replacing import replacing

    out = new_file(arguments.out, "OUT")
    if os.path.lexists(out) and not arguments.overwrite:
        raise ArgumentError(f"{out} already exists; use --overwrite to replace it")
    with _measured(arguments, arguments.out) as (report, values, _):
        with replacing(out) as part, kv.open(arguments.store) as store:
            records, nbytes = to_parquet(store, part, report)
        values |= {"out": str(out), "records": records, "value_bytes": nbytes}
    return 0


_SINCE_OPENED = {"gets", "hits", "read_bytes", "read_errors", "puts", "deletes", "commits"}
"""Statistics that count from the opening of the store."""


def stats(arguments: argparse.Namespace) -> int:
    """Show the size and the schema of a store."""
    import dataclasses

    from .. import kv

    with kv.open(arguments.store) as store:
        values = {k: v for k, v in dataclasses.asdict(store.stats).items() if k not in _SINCE_OPENED}
        schema = store.schema
    values = {"store": str(arguments.store), **values, "fields": _fields(schema)}
    shown = {"store": None, "fields": None, "schema": _schema_text(schema)}
    output_of(arguments).result(str(arguments.store), values, shown)
    return 0


def verify(arguments: argparse.Namespace) -> int:
    """Read and check all data; return 1 if any of it is damaged."""
    from ..kv.log.recovery import verify

    with _measured(arguments) as (report, values, problems):
        found = verify(arguments.store, progress=partial(report, "verify"))
        for name in ("sound", "records", "value_bytes", "journal_records", "torn_bytes", "torn_marks"):
            values[name] = getattr(found, name)
        problems["problems"] = found.problems
    return 0 if found.sound else DAMAGED


def salvage(arguments: argparse.Namespace) -> int:
    """Copy the undamaged records of a store into a new one; return 1 if some are lost."""
    from .. import kv

    with _measured(arguments, arguments.target, " is lost") as (report, values, problems):
        done = kv.salvage(arguments.store, arguments.target, progress=partial(report, "salvage"))
        values |= {
            "target": str(arguments.target),
            "complete": done.complete,
            "records": done.records,
            "value_bytes": done.value_bytes,
            "lost_records": len(done.lost),
            "missing_records": done.missing_records,
            "unproven": done.unproven,
        }
        problems |= {"problems": done.problems, "lost": done.lost}
    return 0 if done.complete else DAMAGED


def seal(arguments: argparse.Namespace) -> int:
    """Write the index of a store."""
    from .. import kv

    with _measured(arguments) as (_, values, _):
        kv.seal(arguments.store)
        with kv.open(arguments.store) as store:
            values |= {"records": len(store), "index_bytes": store.stats.index_bytes}
    return 0


def compact(arguments: argparse.Namespace) -> int:
    """Compact a store."""
    from .. import kv

    if not 0 <= arguments.threshold <= 1:
        raise ArgumentError(f"--threshold {arguments.threshold} must be a share from 0 to 1", name="threshold")
    with _measured(arguments) as (report, values, _), kv.open(arguments.store, mode="r+") as store:
        before = store.stats.disk_bytes
        done = store.compact(threshold=arguments.threshold, progress=partial(report, "compact"))
        values |= {
            "segments_retired": len(done.segments),
            "records_moved": done.moved,
            "moved_bytes": done.moved_bytes,
            "disk_bytes_before": before,
            "disk_bytes": store.stats.disk_bytes,
        }
    return 0


@contextlib.contextmanager
def _measured(
    arguments: argparse.Namespace, title: str = "", lost: str = ""
) -> Iterator[tuple[Report, dict[str, Any], dict[str, Any]]]:
    """Yield a function that shows progress, and dicts of values and of lists of problems; print them at the end."""
    import time

    output = output_of(arguments)
    started = time.perf_counter()
    values: dict[str, Any] = {"store": str(arguments.store)}
    problems: dict[str, Any] = {}
    with output.progress() as report:
        yield report, values, problems
    values["seconds"] = time.perf_counter() - started
    if not output.print_json({**values, **{name: list(map(problem_values, each)) for name, each in problems.items()}}):
        output.result(title or str(arguments.store), values)
        for each in problems.values():
            print_problems(output, each, lost)
