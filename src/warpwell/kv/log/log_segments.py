"""LogSegments: the segments of a log as others see them, and how those go that nobody needs any more."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

from .files import Files
from .guard import Guard
from .lock import check_process
from .segments import Segments


class LogSegments:
    """A part of `warpwell.kv.log.log.Log`."""

    path: str
    writable: bool
    lock: threading.RLock
    _files: Files
    _guard: Guard
    _segments: Segments
    _emptied: set[int]
    _retired: set[int]
    _pid: int

    def segment_fd(self, segment: int) -> int:
        """Return the descriptor of a segment (KeyError: it is not open)."""
        return self._segments.fd(segment)

    def segment_path(self, segment: int) -> str:
        """Return the file of a segment."""
        return self._segments.path(segment)

    def segments(self) -> list[int]:
        """Return the open segments."""
        return self._segments.ids()

    def on_segment(self, callback: Any) -> None:
        """Call ``callback(segment, fd)`` for every segment that is or will be opened; fd is -1 when it is closed."""
        with self.lock:
            self._segments.on_segment(callback)

    @property
    def head(self) -> int:
        """The segment that values are appended to."""
        return self._segments.head

    def emptied(self, segments: Sequence[int]) -> None:
        """Note segments that the index does not name any more: the manifest forgets them with the next snapshot."""
        with self.lock:
            self._emptied |= set(segments)

    def to_be_dropped(self) -> set[int]:
        """Return segments that are still open but hold nothing that the index names: see `emptied` and `retired`."""
        return self._emptied | self._retired

    def retired(self) -> list[int]:
        """Return segments that no location names any more, but whose descriptors are still open."""
        with self.lock:
            return sorted(self._retired)

    def release(self, segments: Sequence[int]) -> None:
        """Close retired segments once nobody reads from them; a writer deletes their files, too."""
        with self.lock:
            going = [s for s in segments if s in self._retired]
            self._segments.close(going)
            self._retired.difference_update(going)
            if self.writable and not self._guard.failed:
                check_process(self._pid, self.path)
                with self._guard.writing():
                    for segment in going:
                        with contextlib.suppress(FileNotFoundError):
                            self._files.unlink(self._segments.path(segment))
