"""``warpwell kv load``."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import time
from pathlib import Path

from ... import kv
from ...cache import parse_size
from ...errors import ArgumentError, CorruptionError, SchemaError, StoreVersionError, WarpwellError
from ...kv import Schema
from ...kv.convert.importers import LoadReport, Progress, RecordSource, load, open_source
from ...kv.opening import put_aside
from ...kv.schema import as_schema
from ...replacing import beside
from ..output import Output


def run(arguments: argparse.Namespace) -> int:
    """Load records into a new store, or into one that is there."""
    output = Output(arguments.json)
    started = time.perf_counter()
    path = Path(arguments.store)
    taken = path.exists() and not (path.is_dir() and not any(path.iterdir()))
    if taken and not (arguments.append or arguments.overwrite):
        raise ArgumentError(f"{path} already exists: use --append to add to it, or --overwrite to replace it")
    fields = None if arguments.fields is None else [name for name in arguments.fields.split(",") if name]
    with contextlib.closing(
        open_source(
            arguments.source,
            keys=arguments.keys,
            key_field=arguments.key_field,
            fields=fields,
            database=arguments.database,
        )
    ) as source:
        schema = as_schema(source.schema)
        with output.progress() as report:
            try:
                done, records = (_append if arguments.append else _create)(arguments, source, schema, report)
            except KeyboardInterrupt:
                _tell(arguments.store)
                raise
    seconds = time.perf_counter() - started
    output.result(
        str(path),
        {
            "command": "load",
            "store": str(path),
            "source": str(arguments.source),
            "format": source.kind,
            "schema": _described(schema, arguments.json),
            "records_read": done.records,
            "records": records,
            "value_bytes": done.nbytes,
            "seconds": seconds,
            "records_per_second": done.records / seconds,
        },
    )
    return 0


def _create(
    arguments: argparse.Namespace, source: RecordSource, schema: Schema | None, report: Progress
) -> tuple[LoadReport, int]:
    """Fill a new store. Bad input leaves what was there; an interrupt leaves the records up to the last commit."""
    path = Path(arguments.store)
    segment_bytes = parse_size(arguments.segment_bytes, "segment-bytes")
    # what is to be replaced stays until the new store is whole
    place = path
    if path.is_dir() and any(path.iterdir()):
        with contextlib.suppress(CorruptionError, StoreVersionError):
            kv.open(path, mode="r+").close()  # refuses what is no store, or in use
        place = beside(path)
    was_there = place.is_dir()
    store = kv.create(
        place,
        schema=schema,
        durability=arguments.durability,
        segment_bytes=segment_bytes,
        overwrite=arguments.overwrite,
    )
    try:
        done = _load(source, store, report)
        if place != path:
            _replace(path, place)
    except BaseException as error:
        store.close()
        if place != path or isinstance(error, WarpwellError):
            shutil.rmtree(place, ignore_errors=True)  # it may be in its place already
            if was_there:
                place.mkdir()
        raise
    return done


def _replace(path: Path, new: Path) -> None:
    """Put a new store in the place of an old one; one of them is there, whatever interrupts this."""
    with contextlib.ExitStack() as undo:
        finish = put_aside(os.path.abspath(path), [], undo)  # refuses one that somebody opened meanwhile
        new.rename(path)
        undo.pop_all()
    finish()


def _append(
    arguments: argparse.Namespace, source: RecordSource, schema: Schema | None, report: Progress
) -> tuple[LoadReport, int]:
    store = kv.open(arguments.store, mode="r+")
    if store.schema != schema:
        store.close()
        raise SchemaError(
            f"{arguments.store} has {_told(store.schema)}, and {arguments.source} {_told(schema)}: "
            "load it into a store of its own"
        )
    return _load(source, store, report)


def _load(source: RecordSource, store: kv.Store, report: Progress) -> tuple[LoadReport, int]:
    with store:
        return load(source, store, report), len(store)


def _tell(path: str) -> None:
    """Say what an interrupt left."""
    with contextlib.suppress(WarpwellError), kv.open(path) as left:
        print(f"warpwell: {path} opens, with {len(left):,} records", file=sys.stderr)


def _described(schema: Schema | None, as_json: bool) -> object:
    if schema is None:
        return None if as_json else "none: values are bytes"
    if as_json:
        return {f.name: [f.dtype.name, list(f.shape)] for f in schema.fields}
    return ", ".join(f"{f.name}: {f.dtype.name} {f.shape}" for f in schema.fields)


def _told(schema: Schema | None) -> str:
    return "no schema" if schema is None else f"the schema {schema!r}"
