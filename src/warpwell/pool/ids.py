"""`new_id`: numbers that are used once."""

from __future__ import annotations

import itertools

_ids = itertools.count(1)


def new_id() -> int:
    """Return a number for a buffer, a stream, an event or a request, which no other has in this process."""
    return next(_ids)
