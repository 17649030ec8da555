"""History: measurements of kernels that ran solo, and of pairs, in a file of the user's cache folder."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..._settings import settings
from ...replacing import replacing
from .pairs import Pairs
from .record import MEASURED, KernelRecord, is_persistent

FORMAT = "warpwell-history/2"
AVERAGE_WEIGHT = 0.25
"""Weight of a new measurement in the average; older measurements lose a quarter of their weight. Chosen, not fitted."""

SHORTER_TIME_WEIGHT = 0.75
"""Weight of a time that is shorter than the average: disturbances, as in a first run, only lengthen times. Chosen, not
fitted."""

MAX_RECORDS = 4096
"""Maximum number of records, also in the file; the oldest is deleted first. Chosen: about 1 MiB of JSON."""

MAX_FILE_BYTES = 64 << 20
"""Maximum size of a file that is read, in bytes. Protection: `MAX_RECORDS` need far less."""

STALE_FILE_SECONDS = 60.0
"""Age at which an unfinished file is deleted, because its process was killed. A save takes far less than a second."""


def default_path(device: str) -> Path:
    """Return the path of the history of a device.

    Its folder is in ``WARPWELL_CACHE_DIR`` if that is set, otherwise in ``XDG_CACHE_HOME`` or ``~/.cache``.
    """
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "device"
    return settings.cache_root / "warpwell" / "scheduler" / f"{name}.json"


class History:
    """Measurements of one device.

    Times of one kernel and size enter an exponentially weighted moving average, so that it follows changes of the clock
    and of the driver. `identity` names a kernel by its code. Several processes may save to one file: the file is
    complete at any time, and saving keeps the measurements that other processes have saved.

    Parameters
    ----------
    device : str
        Name of the device: times of another device differ.
    path : str or os.PathLike, optional
        File to save to; `default_path` by default.
    """

    def __init__(self, device: str = "unknown", path: str | os.PathLike[str] | None = None) -> None:
        self.device = device
        self.path = Path(path) if path is not None else default_path(device)
        self.pairs = Pairs()
        self._records: dict[str, KernelRecord] = {}

    @property
    def records(self) -> list[KernelRecord]:
        """All records, the least recently measured first."""
        return list(self._records.values())

    def record(self, record: KernelRecord) -> KernelRecord:
        """Add a measurement of a solo kernel; return the average with it."""
        old = self._records.pop(record.key, None)
        if old is not None:
            averages = {name: _average(getattr(old, name), getattr(record, name)) for name in MEASURED}
            if old.seconds is not None and record.seconds is not None and record.seconds < old.seconds:
                averages["seconds"] = _average(old.seconds, record.seconds, SHORTER_TIME_WEIGHT)
            record = replace(record, **averages, moving=record.moving or old.moving, times=old.times + record.times)
        self._records[record.key] = record
        while len(self._records) > MAX_RECORDS:
            del self._records[next(iter(self._records))]
        return record

    def find(self, record: KernelRecord) -> KernelRecord | None:
        """Return the record of the same kernel and size, or None."""
        return self._records.get(record.key)

    def save(self) -> None:
        """Write the file atomically, with the measurements that other processes have saved in it.

        Other threads may add measurements concurrently. Raise OSError if the file cannot be written; it is then
        unchanged.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        stored = History.load(self.device, self.path)
        # Other threads may add records: copy the dictionary in one step, as `Pairs.update` does.
        records = {**stored._records, **self._records}
        stored.pairs.update(self.pairs)
        content = {
            "format": FORMAT,
            "device": self.device,
            "samples": [r.as_json() for r in list(records.values())[-MAX_RECORDS:] if is_persistent(r.kernel)],
            "pairs": stored.pairs.as_json(),
        }
        for part in self.path.parent.glob(f".{self.path.name}.*"):
            with contextlib.suppress(OSError):
                if time.time() - part.stat().st_mtime > STALE_FILE_SECONDS:
                    part.unlink()
        with replacing(self.path) as part:
            part.touch(mode=0o600)
            part.write_text(json.dumps(content), encoding="utf-8")

    @classmethod
    def load(cls, device: str = "unknown", path: str | os.PathLike[str] | None = None) -> History:
        """Return the history of a device. It is empty if its file does not exist, is damaged or cannot be read."""
        history = cls(device, path)
        with contextlib.suppress(Exception):  # a lost history only costs new measurements
            if history.path.stat().st_size <= MAX_FILE_BYTES:
                content = json.loads(history.path.read_text(encoding="utf-8"))
                if (content["format"], content["device"]) == (FORMAT, device):
                    records = [KernelRecord.from_json(entry) for entry in content["samples"]]
                    history.pairs = Pairs.from_json(content["pairs"])
                    for record in records:
                        history.record(record)
        return history


def _average(old: float | None, new: float | None, weight: float = AVERAGE_WEIGHT) -> Any:
    if old is None or new is None:
        return old if new is None else new
    return old + weight * (new - old)
