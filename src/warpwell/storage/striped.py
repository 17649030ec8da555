"""Striped: media that share one range of bytes, stripe by stripe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import errors
from ._group import STRIPED, Group
from .medium import Medium, raw_bytes


class Striped(Group):
    """Bytes spread over several media: stripe ``i`` lies on medium ``i % n``, at its stripe ``i // n``.

    A command that spans stripes is split. Closing it closes the media.

    Parameters
    ----------
    media : sequence of Medium
        1 to 60. The capacity ends with the first stripe that is not there, so the last one may be short.
    stripe_bytes : int
        A multiple of 512; best of the page size.

    Raises
    ------
    ArgumentError
    """

    def __init__(self, media: Sequence[Medium], stripe_bytes: int) -> None:
        if stripe_bytes < 512 or stripe_bytes % 512:
            raise errors.ArgumentError(
                f"stripes of {stripe_bytes} bytes: a multiple of 512, such as the page size",
                name="stripe_bytes",
            )
        self.stripe_bytes = stripe_bytes
        media = list(media)
        super().__init__(media, STRIPED, _capacity([m.nbytes for m in media], stripe_bytes), stripe_bytes)

    def read(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Return bytes; see `Medium.read`."""
        inside = self._inside(offset, nbytes)
        out = np.zeros(nbytes, np.uint8)
        for medium, at, start, stop in self._parts(offset, inside):
            out[start:stop] = medium.read(at, stop - start)
        return out

    def write(self, offset: int, data: NDArray[Any]) -> None:
        """Write bytes; see `Medium.write`."""
        self._check_writable()
        raw = raw_bytes(data)
        for medium, at, start, stop in self._parts(offset, self._inside(offset, raw.nbytes)):
            medium.write(at, raw[start:stop])

    def _parts(self, offset: int, nbytes: int) -> Iterator[tuple[Medium, int, int, int]]:
        done = 0
        while done < nbytes:
            index, inside = divmod(offset + done, self.stripe_bytes)
            row, k = divmod(index, len(self.media))
            size = min(nbytes - done, self.stripe_bytes - inside)
            yield self.media[k], row * self.stripe_bytes + inside, done, done + size
            done += size


def _capacity(sizes: list[int], stripe: int) -> int:
    rows = min(sizes, default=0) // stripe
    total = rows * stripe * len(sizes)
    for size in sizes:
        left = min(stripe, size - rows * stripe)
        total += left
        if left < stripe:
            break
    return total
