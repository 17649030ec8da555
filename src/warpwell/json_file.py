"""`read_json`: the JSON object in a file that somebody gave, or an error that says which file to give."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .errors import FormatError, MissingFileError


def read_json(path: str | os.PathLike[str], wanted: str) -> dict[str, Any]:
    """Return the JSON object in a file.

    Parameters
    ----------
    path : path
    wanted : str
        What to give instead of a file that cannot be read, for messages.

    Raises
    ------
    MissingFileError
        There is no such file.
    FormatError
        It is not JSON, or not an object.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise MissingFileError(f"{path} does not exist: give {wanted}", path=path) from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is not JSON ({error}): give {wanted}", path=path) from error
    if not isinstance(found, dict):
        raise FormatError(f"{path} is not a JSON object: give {wanted}", path=path)
    return found
