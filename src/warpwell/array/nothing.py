"""`Nothing`: the namespace of an array that lives in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..storage.medium import Medium


class Nothing(Medium):
    """No pages, no commands; it only has the name of the medium behind it."""

    def __init__(self, behind: Medium) -> None:
        self.nbytes = 0
        self.writable = False
        self.name = behind.name
        self.emulated = False
        self.description = behind.description

    def native(self) -> Any:
        """Say that there is nothing to serve."""
        return None

    def read(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Return zeros."""
        return np.zeros(nbytes, np.uint8)

    def write(self, offset: int, data: NDArray[Any]) -> None:
        """Write nothing: nothing is ever asked to."""

    def sync(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
