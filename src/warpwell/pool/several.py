"""`several`: lists of which a message shows the first ones."""

from __future__ import annotations

from collections.abc import Sequence

SHOWN = 4


def several(texts: Sequence[str], between: str = ", ") -> str:
    """Return texts joined; of many, the first ones and the number of the others."""
    if len(texts) <= SHOWN + 1:
        return between.join(texts)
    return f"{between.join(texts[:SHOWN])}{between}and {len(texts) - SHOWN} more"
