"""`several`: lists of which a message shows the first ones."""

from __future__ import annotations

from collections.abc import Sequence

SHOWN = 4


def several(texts: Sequence[str], between: str = ", ") -> str:
    """Return texts on end, of many the first ones and how many more there are."""
    if len(texts) <= SHOWN + 1:
        return between.join(texts)
    return f"{between.join(texts[:SHOWN])}{between}and {len(texts) - SHOWN} more"
