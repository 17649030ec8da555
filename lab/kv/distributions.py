"""Items that requests access, drawn as in YCSB: ``Uniform``, ``Zipfian``, ``ScrambledZipfian``,
``Latest``.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from warpwell.errors import ArgumentError

Items = NDArray[np.int64]

ZIPFIAN_CONSTANT = 0.99

# ScrambledZipfianGenerator.java draws from this number of items for every store, and contains their zeta(0.99).
SCRAMBLED_ITEMS = 10_000_000_000
SCRAMBLED_ZETA = 26.46902820178302

_FNV_OFFSET = np.uint64(0xCBF29CE484222325)
_FNV_PRIME = np.uint64(1099511628211)
_CHUNK = 1 << 20


class Distribution(Protocol):
    """Draws items."""

    def draw(self, count: Items, random: np.random.Generator) -> Items:
        """Return an item for each request.

        Parameters
        ----------
        count : int64 [N]
            Items that exist at the time of each request, at least 1 and never falling.
        random : numpy.random.Generator
            Random number generator.

        Returns
        -------
        int64 [N]
            Items, each from 0 to its count - 1.
        """


class Uniform:
    """Every item is as likely as every other."""

    def draw(self, count: Items, random: np.random.Generator) -> Items:
        """Return an item for each request (`Distribution.draw`)."""
        return random.integers(0, count, dtype=np.int64)


class Zipfian:
    """Item i is drawn with a probability proportional to 1 / (i + 1)**theta, so low items are hot.

    The approximation of Gray et al., "Quickly generating billion-record synthetic databases" (SIGMOD 1994), that
    YCSB uses: exact for the two hottest items, a power law for the others.

    Parameters
    ----------
    theta : float, default 0.99
        Skew, above 0 and below 1.

    Raises
    ------
    ArgumentError
        `theta` is out of range.
    """

    def __init__(self, theta: float = ZIPFIAN_CONSTANT) -> None:
        if not 0 < theta < 1:
            raise ArgumentError(f"the Zipfian constant must be between 0 and 1, got {theta}", name="theta")
        self.theta = theta
        self._items, self._zeta = 0, 0.0

    def draw(self, count: Items, random: np.random.Generator) -> Items:
        """Return an item for each request (`Distribution.draw`)."""
        return zipfian(random.random(count.size), count, self._zetas(count), self.theta)

    def _zetas(self, count: Items) -> NDArray[np.float64]:
        """Return zeta of each count; sums of earlier draws are cached."""
        if not count.size:
            return np.zeros(0)
        low, high = int(count[0]), int(count[-1])
        if low < self._items:  # another store, or the same store again
            self._items, self._zeta = 0, 0.0
        self._zeta += zeta(self._items, low, self.theta)
        steps = self._zeta + np.cumsum(np.arange(low + 1, high + 1, dtype=np.float64) ** -self.theta)
        zetas = np.concatenate([[self._zeta], steps])
        self._items, self._zeta = high, float(zetas[-1])
        out: NDArray[np.float64] = zetas[count - low]
        return out


class ScrambledZipfian:
    """Zipfian, with the hot items scattered over all items by a hash: YCSB's ``zipfian``.

    As in YCSB, every draw is from 10 billion items at theta 0.99; the hash folds it to the count. If the count grows,
    an item that does not exist yet is drawn again, so that hot items stay the same.

    Parameters
    ----------
    items : int
        Items that there may be at the end: those at the start and those expected to be inserted.
    """

    def __init__(self, items: int) -> None:
        self.items = items

    def draw(self, count: Items, random: np.random.Generator) -> Items:
        """Return an item for each request (`Distribution.draw`)."""
        out = np.full(count.size, np.iinfo(np.int64).max)
        missing = np.flatnonzero(out >= count)
        while missing.size:
            drawn = zipfian(random.random(missing.size), SCRAMBLED_ITEMS, SCRAMBLED_ZETA, ZIPFIAN_CONSTANT)
            out[missing] = fnv_hash(drawn) % max(self.items, int(count[-1]))
            missing = missing[out[missing] >= count[missing]]
        return out


class Latest:
    """Zipfian from the newest item backwards: the last inserted item is hottest."""

    def __init__(self) -> None:
        self._zipfian = Zipfian()

    def draw(self, count: Items, random: np.random.Generator) -> Items:
        """Return an item for each request (`Distribution.draw`)."""
        return count - 1 - self._zipfian.draw(count, random)


def zipfian(u: NDArray[np.float64], items: Items | int, zeta_items: NDArray[np.float64] | float, theta: float) -> Items:
    """Return the items, 0 the hottest, that uniform numbers `u` in [0, 1) stand for (`Zipfian`)."""
    n = np.maximum(items, 3)  # with fewer items the two hottest take all of u; keep eta finite
    uz = u * zeta_items
    eta = (1 - (2 / n) ** (1 - theta)) / (1 - (1 + 0.5**theta) / np.maximum(zeta_items, 1.001 + 0.5**theta))
    tail = (n * np.maximum(eta * u - eta + 1, 0) ** (1 / (1 - theta))).astype(np.int64)
    drawn = np.where(uz < 1, 0, np.where(uz < 1 + 0.5**theta, 1, tail))
    out: Items = np.minimum(drawn, np.asarray(items) - 1).astype(np.int64)
    return out


def zeta(begin: int, end: int, theta: float) -> float:
    """Return the sum of 1 / i**theta for i from `begin` + 1 to `end`, in bounded memory."""
    total = 0.0
    for start in range(begin, end, _CHUNK):
        total += float(np.sum(np.arange(start + 1, min(start + _CHUNK, end) + 1, dtype=np.float64) ** -theta))
    return total


def fnv_hash(numbers: Items) -> Items:
    """Return YCSB's 64-bit FNV hash of each number, from 0 to 2**63 - 1 (``Utils.hash``)."""
    value = numbers.astype(np.uint64)
    out = np.full(value.shape, _FNV_OFFSET)
    for shift in range(0, 64, 8):
        out = (out ^ ((value >> np.uint64(shift)) & np.uint64(255))) * _FNV_PRIME
    signed = out.view(np.int64)
    return np.abs(signed) & np.int64((1 << 63) - 1)  # Java's abs of the smallest integer stays negative
