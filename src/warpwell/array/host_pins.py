"""`HostPins`: how often the host holds each page of an array."""

from __future__ import annotations

import threading
from collections.abc import Iterable


class HostPins:
    """Counts of pages; of a page that is counted at all the cache has one pin.

    Attributes
    ----------
    lock : threading.RLock
        Held by whoever looks at the counts and changes the cache's pins accordingly; taken before the cache's lock.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._counts: dict[int, int] = {}

    def __contains__(self, page: int) -> bool:
        return page in self._counts

    def fresh(self, first: int, end: int) -> list[tuple[int, int]]:
        """Return the pages of [first, end) that are not counted yet, as ranges."""
        return _ranges(page for page in range(first, end) if page not in self._counts)

    def add(self, first: int, end: int) -> None:
        """Count each page of [first, end) once more."""
        for page in range(first, end):
            self._counts[page] = self._counts.get(page, 0) + 1

    def remove(self, first: int, end: int) -> list[tuple[int, int]]:
        """Count each page of [first, end) once less; return those that are not counted any more, as ranges."""
        gone = []
        for page in range(first, end):
            self._counts[page] -= 1
            if not self._counts[page]:
                del self._counts[page]
                gone.append(page)
        return _ranges(gone)

    def clear(self) -> list[tuple[int, int]]:
        """Count nothing any more; return what was counted, as ranges."""
        pages = sorted(self._counts)
        self._counts.clear()
        return _ranges(pages)


def _ranges(pages: Iterable[int]) -> list[tuple[int, int]]:
    """Join ascending pages to ranges [first, end)."""
    out: list[tuple[int, int]] = []
    for page in pages:
        if out and out[-1][1] == page:
            out[-1] = out[-1][0], page + 1
        else:
            out.append((page, page + 1))
    return out
