"""History: measurements of kernels that ran solo, and of pairs, kept in a file of the user's cache folder."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from ... import errors
from ..._settings import settings
from ...json_file import read_json
from ...replacing import replacing
from .pairs import Pairs
from .record import MEASURED, KernelRecord, lasts

FORMAT = "warpwell-history/2"
WEIGHT = 0.25
"""Weight of a new measurement in the average; older ones fade by a quarter with each."""
SOONER = 0.75
"""Weight of a time that is shorter than the average: disturbances, as in a first run, only lengthen it."""
MAX_RECORDS = 4096
"""Maximum number of records; the oldest are dropped first."""
LARGEST = 64 << 20
"""Maximum size of a file in bytes."""

_LEFT = 60.0
"""Age in seconds at which an unfinished file is deleted: the process that wrote it was killed."""


def default_path(device: str) -> Path:
    """Return where the history of a device is kept.

    In ``WARPWELL_CACHE_DIR`` if that is set, else in ``XDG_CACHE_HOME`` or ``~/.cache``.
    """
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "device"
    return settings.cache_root / "warpwell" / "scheduler" / f"{name}.json"


class History:
    """Measurements of one device.

    Times of one kernel and size are averaged, newer ones counting more (an exponentially weighted moving average), so
    that they follow the clock and the driver. A kernel is known by its code (`identity`). Several processes
    may save to one file: it is complete at any time, and saving keeps what other processes have measured meanwhile.

    Parameters
    ----------
    device : str
        Its name: figures of another device say little.
    path : str or os.PathLike, optional
        File to save to; `default_path` by default.
    """

    def __init__(self, device: str = "unknown", path: str | os.PathLike[str] | None = None) -> None:
        self.device = device
        self.path = Path(path) if path is not None else default_path(device)
        self.pairs = Pairs()  # how fast kernels ran together
        self._records: dict[str, KernelRecord] = {}

    def __len__(self) -> int:
        return len(self._records)

    @property
    def records(self) -> list[KernelRecord]:
        """All kernels and sizes that were measured, longest unseen first."""
        return list(self._records.values())

    def record(self, record: KernelRecord) -> KernelRecord:
        """Add a measurement of a kernel alone; return the average that it is now part of."""
        old = self._records.pop(record.key, None)
        if old is not None:
            known = {name: _average(getattr(old, name), getattr(record, name)) for name in MEASURED}
            if old.seconds is not None and record.seconds is not None and record.seconds < old.seconds:
                known["seconds"] = _average(old.seconds, record.seconds, SOONER)
            record = replace(record, **known, moving=record.moving or old.moving, times=old.times + record.times)
        self._records[record.key] = record
        while len(self._records) > MAX_RECORDS:
            del self._records[next(iter(self._records))]
        return record

    def find(self, record: KernelRecord) -> KernelRecord | None:
        """Return the measurement of the same kernel and size, or None."""
        return self._records.get(record.key)

    def save(self) -> None:
        """Write the file atomically. Measurements that other processes have saved there are kept.

        Other threads may record meanwhile.
        Raise OSError if it cannot be written; then nothing has changed.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        there = History.usable(self.device, self.path)
        records = {**there._records, **self._records}  # one step for other threads, as for pairs
        there.pairs.update(self.pairs)
        content = {
            "format": FORMAT,
            "device": self.device,
            "samples": [r.as_json() for r in list(records.values())[-MAX_RECORDS:] if lasts(r.kernel)],
            "pairs": there.pairs.as_json(),
        }
        for part in self.path.parent.glob(f".{self.path.name}.*"):
            with contextlib.suppress(OSError):
                if time.time() - part.stat().st_mtime > _LEFT:
                    part.unlink()
        with replacing(self.path) as part:
            part.touch(mode=0o600)
            part.write_text(json.dumps(content), encoding="utf-8")

    @classmethod
    def load(cls, device: str = "unknown", path: str | os.PathLike[str] | None = None) -> History:
        """Read a device's history; empty if the file does not exist.

        Raise FormatError if the file is no history, or of another device, and OSError if it cannot be read.
        """
        history = cls(device, path)
        if history.path.exists() and history.path.stat().st_size > LARGEST:
            raise _damaged(history.path, f"it has over {LARGEST} bytes")
        try:
            content = read_json(history.path, "another file, or delete it")
        except errors.MissingFileError:
            return history
        if content.get("format") != FORMAT:
            raise _damaged(history.path, f'its format is not "{FORMAT}"')
        if content.get("device") != device:
            raise errors.FormatError(
                f"{history.path} is of {content.get('device')!r}, not of {device!r}: give each device its own file",
                path=history.path,
            )
        samples = content.get("samples", [])
        if not isinstance(samples, list):
            raise _damaged(history.path, "samples is not a list")
        for number, entry in enumerate(samples):
            history.record(KernelRecord.from_json(entry, f"{history.path}: sample {number}"))
        history.pairs = Pairs.from_json(content.get("pairs", []), f"{history.path}: its pairs")
        return history

    @classmethod
    def usable(cls, device: str = "unknown", path: str | os.PathLike[str] | None = None) -> History:
        """Read a device's history, or return an empty one where that cannot be: a measurement can be made again."""
        try:
            return cls.load(device, path)
        except (errors.FormatError, OSError):
            return cls(device, path)


def _average(old: float | None, new: float | None, weight: float = WEIGHT) -> Any:
    if old is None or new is None:
        return old if new is None else new
    return old + weight * (new - old)


def _damaged(path: Path, what: str) -> errors.FormatError:
    message = f"{path} is not a history of a scheduler ({what}): delete it, or give another file"
    return errors.FormatError(message, path=path)
