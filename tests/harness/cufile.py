"""`install_fake`: bulk reads of the device `cpu` go through a fake libcufile."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.fake_cufile import FakeCuFile
from warpwell.cache import cache
from warpwell.cache.prefetch import Bulk
from warpwell.storage import CuFileOptions, FileMedium


def install_fake(monkeypatch: pytest.MonkeyPatch, fake: Any = None, **options: Any) -> Any:
    """Let caches that are opened later read by a fake; return it."""
    fake = FakeCuFile() if fake is None else fake
    chosen = CuFileOptions(fake, **{"device": "cpu", "min_run_bytes": 512, "alignment": 512, **options})
    monkeypatch.setattr(cache, "Bulk", functools.partial(Bulk, cufile=chosen))
    return fake


def file_of(path: Path, values: Any, writable: bool = False) -> FileMedium:
    """Return a medium of a new file with the bytes of `values`; skip the test if O_DIRECT needs more than 512 bytes."""
    np.asarray(values).tofile(path)
    medium = FileMedium(path, writable)
    if medium.direct_fileno() < 0 or medium.alignment > 512:
        medium.close()
        pytest.skip(f"{path.parent} has no O_DIRECT in units of 512 bytes")
    return medium
