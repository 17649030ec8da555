"""``warpwell kv get``."""

from __future__ import annotations

import argparse
import base64
import re
import sys
from typing import Any

import numpy as np

from ... import kv
from ...errors import ArgumentError, KeyLengthError, KeyMissingError
from ...kv.keys import as_key
from ..arguments import new_file
from ..output import Output


def run(arguments: argparse.Namespace) -> int:
    """Write a value: raw, or as a table or JSON where it has fields."""
    output = Output(arguments.json)
    target = None if arguments.out is None else new_file(arguments.out, "--out")
    with kv.open(arguments.store) as store:
        key = _find(store, arguments.key, arguments.type)
        value = store.get(key)
        if value is None:
            raise KeyMissingError(
                f"{arguments.store} has no key {describe_key(key)}: check it, and its --type", key=as_key(key)
            )
        schema = store.schema
    if arguments.field is not None:
        if schema is None:
            raise ArgumentError(f"{arguments.store} has no schema, so its values have no fields: leave --field out")
        if arguments.field not in value:
            raise ArgumentError(f"{arguments.store} has no field {arguments.field!r}: it has {', '.join(value)}")
        value = {arguments.field: np.asarray(value[arguments.field])}
        raw = value[arguments.field].tobytes()
    else:
        raw = value if schema is None else schema.pack_one(value).tobytes()
    if target is not None:
        target.write_bytes(raw)
    if arguments.json:
        output.result(
            "",
            {
                "command": "get",
                "store": str(arguments.store),
                **_key_values(key),
                "bytes": len(raw),
                **_value_values(value),
            },
        )
    elif target is None and isinstance(value, dict) and arguments.field is None:
        output.result(describe_key(key), {name: _shown(item) for name, item in value.items()})
    elif target is None:
        _write(raw)
    return 0


def _write(raw: bytes) -> None:
    """Write all bytes to stdout, which takes only a part at a time where it is not buffered (``python -u``)."""
    sys.stdout.flush()
    rest = memoryview(raw)
    while rest:
        rest = rest[sys.stdout.buffer.write(rest) :]
    sys.stdout.buffer.flush()


def parse_key(text: str, kind: str) -> int | bytes:
    """Return the key that `text` means as "int", "text" or "hex".

    Raises
    ------
    KeyLengthError, ArgumentError
        It is no such key.
    """
    if kind == "int":
        try:
            number = int(text)
        except ValueError:
            raise ArgumentError(f"key {text!r} is not an integer: use --type text", name="key") from None
        as_key(number)
        return number
    if kind == "hex":
        try:
            return as_key(bytes.fromhex(text))
        except ValueError as error:
            if isinstance(error, KeyLengthError):
                raise
            raise ArgumentError(f"key {text!r} is not hexadecimal: write two digits a byte", name="key") from None
    return as_key(text.encode(errors="surrogateescape"))  # the bytes that the shell gave


def describe_key(key: int | bytes) -> str:
    """Return a key for people."""
    if isinstance(key, int):
        return str(key)
    text = key.decode("utf-8", "replace")
    return text if text.isprintable() and "\ufffd" not in text else f"0x{key.hex()}"


def _find(store: kv.Store, text: str, kind: str) -> int | bytes:
    if kind != "auto":
        return parse_key(text, kind)
    if not re.fullmatch(r"[+-]?[0-9]+", text):
        return parse_key(text, "text")
    try:
        number = parse_key(text, "int")
    except KeyLengthError:
        return parse_key(text, "text")  # more digits than an integer has
    raw = text.encode()
    if len(raw) <= 16 and number not in store and raw in store:
        return raw
    return number


def _key_values(key: int | bytes) -> dict[str, Any]:
    raw = as_key(key)
    return {"key": describe_key(key), "key_hex": raw.hex()}


def _value_values(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return {
            "fields": {
                name: np.asarray(item).tolist() if np.asarray(item).dtype.kind != "c" else str(item)
                for name, item in value.items()
            }
        }
    out: dict[str, Any] = {"base64": base64.b64encode(value).decode()}
    try:
        out["text"] = value.decode()
    except UnicodeDecodeError:
        out["text"] = None
    return out


def _shown(item: Any) -> str:
    array = np.asarray(item)
    shape = "x".join(map(str, array.shape))
    return f"{array.dtype}{f' [{shape}]' if shape else ''}  {np.array2string(array, threshold=64)}"
