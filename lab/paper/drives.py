"""Emulated drives at a fraction of their rates, so that two cores do not saturate before the drives do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.media import DRIVES, Latency
from warpwell.array import Array, open_array
from warpwell.storage import Medium, RamMedium, Replicated, Striped

P5800X = DRIVES[0]
"""The drive of most of BaM's figures."""

STRIPE = 1 << 16
"""Bytes of a stripe."""


def bandwidth(slower: int) -> float:
    """Return the bytes a second of one drive at 1/`slower` of its rates."""
    return P5800X.bandwidth / slower


def slowed(medium: Medium, slower: int, latency_us: float | None = None) -> Latency:
    """Return a P5800X at 1/`slower` of its rates, with the contents of a medium."""
    return Latency(
        medium,
        P5800X.name,
        read_iops=(P5800X.read_iops[0] / slower, P5800X.read_iops[1] / slower),
        write_iops=(P5800X.write_iops[0] / slower, P5800X.write_iops[1] / slower),
        bandwidth=bandwidth(slower),
        latency_us=latency_us,
    )


def striped(data: NDArray[Any], drives: int, slower: int) -> Medium:
    """Return drives among which the items of an array are striped."""
    if drives == 1:
        return slowed(RamMedium(data), slower)
    share = -(-data.nbytes // (STRIPE * drives)) * STRIPE
    parts = [RamMedium(share) for _ in range(drives)]
    Striped(parts, STRIPE).write(0, data)  # the data is placed before the drives are slow
    return Striped([slowed(part, slower) for part in parts], STRIPE)


def replicated(data: NDArray[Any], drives: int, slower: int) -> Medium:
    """Return drives that each hold all items of an array."""
    copies: list[Medium] = [slowed(RamMedium(data), slower) for _ in range(drives)]
    return copies[0] if drives == 1 else Replicated(copies)


@contextmanager
def opened(medium: Medium, data: NDArray[Any], cache: int, page_size: int, **options: Any) -> Iterator[Array]:
    """Yield an array on a medium; a miss is one command, as in the document."""
    defaults: dict[str, Any] = {"merge": 1, "threads": 2, "stats": "full"} | options
    with open_array(
        medium,
        dtype=data.dtype,
        shape=data.shape,
        device="cpu",
        tier="storage",
        cache=max(cache, 16 * page_size),
        page_size=page_size,
        **defaults,
    ) as array:
        yield array


def items(count: int) -> NDArray[np.int64]:
    """Return distinct numbers, so that a sum shows whether each was read once."""
    return np.arange(count, dtype=np.int64) * 0x9E3779B1 + 12345
