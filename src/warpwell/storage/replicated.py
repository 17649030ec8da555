"""Replicated: media that hold the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import errors
from ._group import REPLICATED, STALE, Group
from .medium import Medium, raw_bytes


class Replicated(Group):
    """The same bytes on several media: reads go to them in turn, writes to all.

    A read that fails is tried on the others. A write fails where it failed on any; a replica that missed it
    answers no reads from then on, unless all missed one. Closing it closes the media.

    Parameters
    ----------
    media : sequence of Medium
        1 to 60, of one size; they hold the same bytes already.

    Raises
    ------
    ArgumentError
        Their sizes differ.
    """

    def __init__(self, media: Sequence[Medium]) -> None:
        media = list(media)
        sizes = {m.nbytes for m in media}
        if len(sizes) > 1:
            raise errors.ArgumentError(
                f"replicas of {sorted(sizes)} bytes are not replicas: copy one to the others", name="media"
            )
        super().__init__(media, REPLICATED, sizes.pop() if sizes else 0, 0)
        self._turn = 0
        self._host_stale: set[int] = set()

    @property
    def stale(self) -> list[int]:
        """Numbers of the replicas that missed a write."""
        bits = int(self._keep[0].words[STALE]) if self._keep else 0
        return sorted(self._host_stale | {k for k in range(len(self.media)) if bits >> k & 1})

    def read(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Return bytes; see `Medium.read`."""
        self._turn += 1
        stale = self.stale
        fresh = [k for k in range(len(self.media)) if k not in stale] or list(range(len(self.media)))
        last: errors.MediumError | None = None
        for attempt in range(len(fresh)):
            try:
                return self.media[fresh[(self._turn + attempt) % len(fresh)]].read(offset, nbytes)
            except errors.MediumError as error:
                last = error
        assert last is not None
        raise last

    def write(self, offset: int, data: NDArray[Any]) -> None:
        """Write bytes; see `Medium.write`."""
        self._check_writable()
        raw = raw_bytes(data)
        failed: Exception | None = None
        for k, medium in enumerate(self.media):
            try:
                medium.write(offset, raw)
            except (errors.MediumError, errors.StorageFullError) as error:
                self._host_stale.add(k)
                if self._keep:
                    self._keep[0].words[STALE] |= 1 << k
                failed = failed or error
        if failed is not None:
            raise failed
