"""`read_json`: returns the JSON object in a file of the user."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .errors import FormatError, MissingFileError


def read_json(path: str | os.PathLike[str], expected: str) -> dict[str, Any]:
    """Return the JSON object in a file.

    Parameters
    ----------
    path : path
    expected : str
        The file that the user should pass, for messages.

    Raises
    ------
    MissingFileError
        The file does not exist.
    FormatError
        The file is not JSON, or not a JSON object.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise MissingFileError(f"{path} does not exist: give {expected}", path=path) from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is not JSON ({error}): give {expected}", path=path) from error
    if not isinstance(found, dict):
        raise FormatError(f"{path} is not a JSON object: give {expected}", path=path)
    return found
