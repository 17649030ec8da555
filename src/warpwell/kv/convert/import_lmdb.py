"""The records of an LMDB environment: ``LmdbSource``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..._check import imported
from ...errors import FormatError
from .sources import Batch, Record, Source, check_value, in_batches

_DATABASE_BYTES = 48
"""Size of the record of the unnamed database that describes a named one."""


class LmdbSource(Source):
    """All records of one database, in the order of their keys, read in one transaction.

    Parameters
    ----------
    path : pathlib.Path
        Folder with ``data.mdb``, or the file of an environment without a folder.
    rule : str, optional
        One of `KEY_RULES`; names are LMDB's keys, and the default.
    database : str, optional
        A named database; the unnamed one by default.

    Raises
    ------
    ArgumentError
        The package ``lmdb`` is missing.
    FormatError
        Not an LMDB environment, it does not have this database, or it is the unnamed one and holds named ones.
    """

    kind = "lmdb"

    def __init__(self, path: Path, rule: str | None, database: str | None) -> None:
        super().__init__(path, rule or "name")
        self._lmdb: Any = imported("lmdb", "lmdb")
        self.path, self._is_unnamed = path, database is None
        try:
            self._environment = self._open()
        except self._lmdb.Error as error:
            raise FormatError(f"{path} cannot be read as an LMDB environment ({error})", path=path) from None
        try:
            name = None if database is None else database.encode()
            self._database = self._environment.open_db(name, create=False)
            with self._environment.begin(self._database) as transaction:
                self.records: int = transaction.stat(self._database)["entries"]
                several = self._database.flags(transaction).get("dupsort", False)
        except self._lmdb.Error as error:
            self.close()
            raise FormatError(f"{path} has no database {database!r} ({error})", path=path) from None
        if several and rule != "number":
            self.close()
            raise FormatError(
                f"{path} has several values for one key, and a store holds one value a key: use --keys number to "
                "keep all",
                path=path,
            )

    def batches(self, start: int = 0) -> Iterator[Batch]:
        """Read all records from number `start` on."""
        return in_batches(self._records(start), self, start)

    def close(self) -> None:
        """Close the environment."""
        self._environment.close()

    def _records(self, start: int) -> Iterator[Record]:
        try:
            # views into the mapped file: the records before `start` are not copied
            with self._environment.begin(self._database, buffers=True) as transaction:
                for number, (name, value) in enumerate(transaction.cursor(self._database)):
                    if number < start:
                        continue
                    if self._is_unnamed and len(value) == _DATABASE_BYTES:
                        self._require_record(transaction, bytes(name))
                    check_value(len(value), f"{self.path}: {bytes(name[:40])!r}")
                    yield Record(bytes(name), bytes(value), len(value), (number + 1) / self.records)
        except self._lmdb.Error as error:
            raise FormatError(f"{self.path} is damaged ({error})", path=self.path) from None

    def _require_record(self, transaction: Any, name: bytes) -> None:
        """Raise FormatError if a record describes a named database."""
        try:
            self._environment.open_db(name, txn=transaction, create=False)
        except self._lmdb.IncompatibleError:
            return
        shown = name.decode(errors="replace")
        raise FormatError(
            f"{self.path} holds named databases, such as {shown!r}: give the one to load, as in --database {shown}",
            path=self.path,
        )

    def _open(self) -> Any:
        options = {"readonly": True, "subdir": self.path.is_dir(), "max_dbs": 1, "readahead": True, "create": False}
        try:
            return self._lmdb.open(str(self.path), **options)
        except (self._lmdb.ReadonlyError, OSError, self._lmdb.Error) as error:
            # a folder that cannot be written to has no place for the lock of readers, and no writer either
            if "ermission" not in str(error) and "ead-only" not in str(error):
                raise
            return self._lmdb.open(str(self.path), lock=False, **options)
