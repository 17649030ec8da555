"""`Tags`: numbers of copies between two processes."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import defaultdict

from .bulk import Transfer
from .transport import TAGS


class Tags:
    """Gives each copy from one rank to another a tag that no other has that may still be under way.

    Tags go round. One whose transfer this process has begun is passed over while that is not done: what was sent
    with it, and nobody has taken, would be taken for the new copy's data.

    Parameters
    ----------
    half : {0, 1}
        The application chooses from the first half of all tags, agents, for their answers, from the second.
    """

    def __init__(self, half: int = 0) -> None:
        self._first = half * (TAGS // 2)
        self._next: dict[tuple[int, int], itertools.count[int]] = defaultdict(itertools.count)
        # a transport holds what is not done, so that nothing has to be taken out again
        self._begun: weakref.WeakValueDictionary[tuple[int, int, int], Transfer] = weakref.WeakValueDictionary()
        self._lock = threading.RLock()  # a signal handler may copy, too

    def new(self, source: int, destination: int) -> int:
        """Return a tag."""
        with self._lock:
            while True:
                tag = self._first + next(self._next[source, destination]) % (TAGS // 2)
                begun = self._begun.get((source, destination, tag))
                if begun is None or begun.done:
                    return tag

    def begun(self, source: int, destination: int, transfer: Transfer) -> None:
        """Note this process's side of a copy."""
        with self._lock:
            self._begun[source, destination, transfer.tag] = transfer
