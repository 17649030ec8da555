"""History: what kernels took alone and together, as measured, kept in a file of the user's cache folder."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import errors
from .matrix import Matrix, Pair
from .rate_model import RateModel
from .sample import MEASURED, Sample

FORMAT = "warpwell-history/1"
WEIGHT = 0.25
"""Weight of a new measurement in the average; older ones fade by a quarter with each."""
KEPT = 20_000
"""Samples that are kept at most; the oldest go first."""


def default_path(device: str) -> Path:
    """Return where the history of a device is kept.

    In ``WARPWELL_CACHE_DIR`` where that is set, else in ``XDG_CACHE_HOME`` or ``~/.cache``.
    """
    root = os.environ.get("WARPWELL_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "device"
    return Path(root).expanduser() / "warpwell" / "scheduler" / f"{name}.json"


class History:
    """Measurements of one device.

    Times of one kernel and size are averaged, newer ones counting more (an exponentially weighted moving average), so
    that they follow the clock and the driver. Only one process should write a file: the last one to save wins.

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
        self._samples: dict[tuple[str, str], Sample] = {}
        self._pairs: dict[tuple[str, str, tuple[float, float], float | None], Pair] = {}

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def samples(self) -> list[Sample]:
        """All kernels and sizes that were measured, longest unseen first."""
        return list(self._samples.values())

    @property
    def pairs(self) -> list[Pair]:
        """All pairs that were measured."""
        return list(self._pairs.values())

    def record(self, sample: Sample) -> Sample:
        """Add a measurement of a kernel alone; return the average that it is now part of."""
        old = self._samples.pop(sample.key, None)
        if old is not None:
            known = {name: _average(getattr(old, name), getattr(sample, name)) for name in MEASURED}
            merged = {name: getattr(sample, name) or getattr(old, name) for name in ("static", "app", "family")}
            sample = replace(sample, **known, **merged, times=old.times + sample.times)
        self._samples[sample.key] = sample
        while len(self._samples) > KEPT:
            del self._samples[next(iter(self._samples))]
        return sample

    def find(self, sample: Sample) -> Sample | None:
        """Return what was measured of the same kernel and size."""
        return self._samples.get(sample.key)

    def record_pair(self, pair: Pair) -> Pair:
        """Add the rates of two kernels that ran together; return the average."""
        key = pair.first, pair.second, pair.shares, pair.partition
        old = self._pairs.get(key)
        if old is not None:
            first, second = (_average(a, b) for a, b in zip(old.rates, pair.rates, strict=True))
            pair = replace(pair, rates=(first, second))
        self._pairs[key] = pair
        return pair

    def matrix(self, otherwise: RateModel | None = None) -> Matrix:
        """Return the measured pairs as rates for a scheduler; other pairs have the rates of `otherwise`."""
        return Matrix(self.pairs, otherwise, device=self.device)

    def extend(self, samples: Iterable[Sample]) -> None:
        """Add several measurements."""
        for sample in samples:
            self.record(sample)

    def save(self) -> None:
        """Write the file: whole, or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {"format": FORMAT, "device": self.device, "samples": [s.as_json() for s in self.samples],
                   "pairs": [p.__dict__ for p in self.pairs]}  # fmt: skip
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(content, file)
            os.replace(name, self.path)
        except BaseException:
            os.unlink(name)
            raise

    @classmethod
    def load(cls, device: str = "unknown", path: str | os.PathLike[str] | None = None) -> History:
        """Read a device's history; empty where there is no file yet.

        Raises
        ------
        FormatError
            The file is no history, or of another device.
        """
        history = cls(device, path)
        try:
            content = json.loads(history.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return history
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise errors.FormatError(_damaged(history.path, str(error)), path=history.path) from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise errors.FormatError(_damaged(history.path, f'its format is not "{FORMAT}"'), path=history.path)
        if content.get("device") != device:
            raise errors.FormatError(
                f"{history.path} is of {content.get('device')!r}, not of {device!r}: give each device its own file",
                path=history.path,
            )
        for number, entry in enumerate(_list(content, "samples", history.path)):
            history.record(Sample.from_json(entry, f"{history.path}: sample {number}"))
        for number, entry in enumerate(_list(content, "pairs", history.path)):
            try:
                rates, shares = tuple(entry["rates"]), tuple(entry["shares"])
                history.record_pair(Pair(entry["first"], entry["second"], rates, shares, entry["partition"]))
            except (TypeError, KeyError) as error:
                raise errors.FormatError(_damaged(history.path, f"pair {number}"), path=history.path) from error
        return history


def _average(old: float | None, new: float | None) -> Any:
    if old is None or new is None:
        return old if new is None else new
    return old + WEIGHT * (new - old)


def _damaged(path: Path, what: str) -> str:
    return f"{path} is no history of a scheduler ({what}): delete it, or give another file"


def _list(content: dict[str, Any], name: str, path: Path) -> list[Any]:
    found = content.get(name, [])
    if not isinstance(found, list):
        raise errors.FormatError(_damaged(path, f"{name} is no list"), path=path)
    return found
