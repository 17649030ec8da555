"""The JSON format of a benchmark result.

A result is one object: ``schema`` (1), ``benchmark``, ``commit``, ``dirty`` (uncommitted changes), ``date`` (UTC),
``busy`` (other programs used the machine), ``seconds`` (of the whole run), ``machine``, ``options`` and ``figures``.
A figure has an ``id`` that begins with the benchmark's name, ``value`` (the median of ``runs``), ``unit``, ``better``
("higher" or "lower"), ``runs``, and optionally ``goal``, ``ceiling`` (an ``id`` and a ``value`` of the same run) and
``peers`` (``name``, ``version``, ``value``).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

SCHEMA = 1
"""Version of the format."""

Result = dict[str, Any]

_RESULT: dict[str, type | tuple[type, ...]] = {
    "schema": int,
    "benchmark": str,
    "commit": str,
    "dirty": bool,
    "date": str,
    "busy": bool,
    "seconds": (int, float),
    "machine": dict,
    "options": dict,
    "figures": list,
}
_FIGURE: dict[str, type | tuple[type, ...]] = {
    "id": str,
    "value": (int, float),
    "unit": str,
    "better": str,
    "runs": list,
}
_OPTIONAL: dict[str, type | tuple[type, ...]] = {"goal": (int, float), "ceiling": dict, "peers": list}


class SchemaError(ValueError):
    """A result does not have the format."""


def _require(condition: object, message: str) -> None:
    if not condition:
        raise SchemaError(message)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_fields(value: object, fields: dict[str, type | tuple[type, ...]], where: str) -> None:
    _require(isinstance(value, dict), f"{where} must be an object")
    assert isinstance(value, dict)
    for name, kind in fields.items():
        _require(name in value, f"{where} has no field {name!r}")
        numeric = kind in (int, (int, float))
        valid = _is_number(value[name]) if numeric else isinstance(value[name], kind)
        _require(valid, f"{where}: field {name!r} has an invalid value {value[name]!r}")


def validate(result: object, where: str = "result") -> Result:
    """Return the result if it has the format.

    Raises
    ------
    SchemaError
    """
    _check_fields(result, _RESULT, where)
    assert isinstance(result, dict)
    _require(result["schema"] == SCHEMA, f"{where} has schema {result['schema']}, expected {SCHEMA}")
    ids: set[str] = set()
    for figure in result["figures"]:
        _check_fields(figure, _FIGURE, f"{where}: a figure")
        name = f"{where}: figure {figure['id']!r}"
        _check_fields(figure, {key: kind for key, kind in _OPTIONAL.items() if key in figure}, name)
        _require(figure["id"].startswith(f"{result['benchmark']}/"), f"{name} must begin with the benchmark's name")
        _require(figure["id"] not in ids, f"{name} occurs twice")
        _require(figure["better"] in ("higher", "lower"), f"{name}: 'better' must be 'higher' or 'lower'")
        _require(figure["runs"] and all(map(_is_number, figure["runs"])), f"{name}: 'runs' must be numbers")
        for peer in figure.get("peers", []):
            _check_fields(peer, {"name": str, "version": str, "value": (int, float)}, name)
        if "ceiling" in figure:
            _check_fields(figure["ceiling"], {"id": str, "value": (int, float)}, name)
        unknown = set(figure) - set(_FIGURE) - set(_OPTIONAL)
        _require(not unknown, f"{name} has unknown fields {sorted(unknown)}")
        ids.add(figure["id"])
    return result


def read(path: Path) -> list[Result]:
    """Return the results of a file with one result or a list, or of all JSON files of a folder.

    Raises
    ------
    SchemaError
    OSError
    """
    if path.is_dir():
        return [result for file in sorted(path.glob("*.json")) for result in read(file)]
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SchemaError(f"{path} is not JSON: {error}") from None
    return [validate(each, str(path)) for each in (content if isinstance(content, list) else [content])]


def write(path: Path, content: Result | list[Result]) -> None:
    """Write a result, or a list of results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
