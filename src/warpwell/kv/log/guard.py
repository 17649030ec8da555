"""Guard: what a failed system call does to a log: a full disk changes nothing, all else ends the writing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from ... import errors
from .files import full, storage_full


class Guard:
    """Remembers the first failure of a log.

    After a failed fsync the system takes the pages that were not written for clean. Another fsync would return
    without an error and without having written them, so none is tried.

    Parameters
    ----------
    path : str
        For messages.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._failure: tuple[str, int | None] | None = None
        self._fenced: errors.SharingError | None = None

    @property
    def failed(self) -> bool:
        """Whether no more writes are taken."""
        return self._failure is not None

    def check(self) -> None:
        """Raise StoreFailedError if something failed, SharingError if another writer came."""
        if self._failure is not None:
            raise self._error()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turn a system's error into StorageFullError (nothing has changed) or StoreFailedError."""
        try:
            yield
        except errors.WarpwellError:
            raise
        except OSError as error:
            if full(error) and self._failure is None:
                raise storage_full(self._path) from error
            if self._failure is None:
                self._failure = (str(error), error.errno)
            raise self._error() from error

    def fence(self, check: Callable[[], object]) -> None:
        """Call what raises SharingError if another writer has come: that ends the writing, too."""
        try:
            check()
        except errors.SharingError as error:
            self._failure, self._fenced = ("another writer", None), error
            raise

    def sync(self, call: Callable[[], object]) -> None:
        """Call something that syncs; whatever its error is, it ends the writing."""
        try:
            call()
        except OSError as error:
            self._failure = (f"fsync: {error}", error.errno)
            raise

    def _error(self) -> Exception:
        if self._fenced is not None:
            return errors.SharingError(str(self._fenced), path=self._path)
        what, code = self._failure or ("", None)
        return errors.StoreFailedError(
            f"{self._path} takes no more writes since one failed ({what}): what was committed before is safe. "
            "Close it, look after the disk, and open it again",
            path=self._path,
            code=code,
        )
