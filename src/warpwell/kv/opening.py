"""Creating and opening stores."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..cache.sizes import parse_size
from .log import Log
from .part import Part
from .schema import Schema, as_schema
from .store import Store

Path = str | os.PathLike[str]


def create(
    path: Path,
    schema: Mapping[str, Any] | Schema | None = None,
    *,
    durability: str = "commit",
    segment_bytes: int | str = "256MiB",
) -> Store:
    """Create an empty store and open it for writing.

    Returns
    -------
    Store
    """
    given = as_schema(schema)
    meta = {"schema": None if given is None else given.to_json()}
    log = Log.create(path, schema_json=meta, durability=durability, segment_bytes=parse_size(segment_bytes))
    return Store(Part(log, log.path), schema=given, writable=True, durability=log.durability)


def open_store(path: Path, mode: str = "r") -> Store:
    """Open a store."""
    log = Log.open(path, writable=mode == "r+")
    meta = log.schema_json or {}
    fields = meta.get("schema")
    schema = None if fields is None else Schema.from_json(fields)
    return Store(Part(log, log.path), schema=schema, writable=log.writable, durability=log.durability)
