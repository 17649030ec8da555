"""`Wrapper`, the base class of media that wrap another medium."""

from __future__ import annotations

from abc import abstractmethod

from warpwell.storage import Medium, NativeMedium


class Wrapper(Medium):
    """Base of a medium that wraps another medium, for emulation and tests. Closing it closes the wrapped medium."""

    emulated = True

    def __init__(self, medium: Medium) -> None:
        self.medium = medium
        self.nbytes = medium.nbytes
        self.writable = medium.writable
        self.block = medium.block
        self._native: NativeMedium | None = None

    @abstractmethod
    def _over(self, inner: NativeMedium) -> NativeMedium:
        """Return native functions that call the functions of the wrapped medium."""

    def native(self) -> NativeMedium | None:
        """Return native functions that call the functions of the wrapped medium."""
        if self._native is None:
            inner = self.medium.native()
            if inner is not None:
                self._native = self._over(inner)
        return self._native

    def sync(self) -> None:
        """Sync the wrapped medium."""
        self.medium.sync()

    def close(self) -> None:
        """Close the wrapped medium."""
        self.medium.close()

    def last_error(self) -> str | None:
        """Return the wrapped medium's description of its last failure."""
        return self.medium.last_error()

    def failure(self) -> Exception | None:
        """Return the reason why no command reaches the wrapped medium any more, or None."""
        return self.medium.failure()
