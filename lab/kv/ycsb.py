"""YCSB: ``YcsbWorkload`` (property files, or built in) and ``Requests`` (the operations drawn from one)."""

from __future__ import annotations

import dataclasses
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from warpwell.errors import ArgumentError, FormatError, MissingFileError

from .distributions import Distribution, Items, Latest, ScrambledZipfian, Uniform, fnv_hash

#: Kinds of operations, as in `Operations.kinds`. There is no scan: a hash index has no order.
READ, UPDATE, INSERT, READ_MODIFY_WRITE = range(4)
KIND_NAMES = ("read", "update", "insert", "read-modify-write")

DISTRIBUTIONS = ("zipfian", "latest", "uniform")
NAMES = ("ycsb-a", "ycsb-b", "ycsb-c", "ycsb-d", "ycsb-f")

_LONGEST_FILE = 1 << 20


@dataclass(frozen=True)
class YcsbWorkload:
    """A workload, as in a YCSB property file.

    Attributes
    ----------
    name : str
        ``"ycsb-a"`` or the name of the file.
    records : int
        Records before the run (``recordcount``).
    operations : int
        Operations of the run (``operationcount``).
    read, update, insert, read_modify_write : float
        Proportions of operations in any unit, because YCSB divides by their sum.
    distribution : {"zipfian", "latest", "uniform"}
        Distribution of the records of operations. "zipfian" scatters its hot records, as YCSB does.
    value_bytes : int
        Size of a record, ``fieldcount`` times ``fieldlength``. A record is one value here, read and written whole.
    """

    name: str
    records: int = 1000
    operations: int = 1000
    read: float = 0.95
    update: float = 0.05
    insert: float = 0.0
    read_modify_write: float = 0.0
    distribution: str = "uniform"
    value_bytes: int = 1000

    @classmethod
    def named(cls, name: str, properties: str | Path | None = None) -> YcsbWorkload:
        """Return one of the core workloads.

        Parameters
        ----------
        name : str
            ``"ycsb-a"``, b, c, d or f.
        properties : path-like, optional
            YCSB's file of the workload, or a folder or tar archive that contains it as ``workloada`` and so on. The
            built-in workloads equal the files of YCSB.

        Raises
        ------
        ArgumentError
            The workload is unknown, or has scans (``"ycsb-e"``).
        MissingFileError, FormatError
            As for `read_file`.
        """
        if name == "ycsb-e":
            raise _no_scans("ycsb-e")
        if name not in NAMES:
            raise ArgumentError(f"unknown workload {name!r}: choose one of {', '.join(NAMES)}", name="workload")
        if properties is None:
            return _BUILT_IN[name]
        return cls.from_properties(name, read_file(properties, f"workload{name[-1]}"), str(properties))

    @classmethod
    def from_properties(cls, name: str, properties: dict[str, str], path: str) -> YcsbWorkload:
        """Return the workload that properties describe, with YCSB's defaults for missing properties.

        Raises
        ------
        FormatError
            A value is invalid; the message names `path`.
        ArgumentError
            The workload has scans.
        """
        take = _Taker(properties, path)
        if take.number("scanproportion", 0.0):
            raise _no_scans(path)
        read, update = take.number("readproportion", 0.95), take.number("updateproportion", 0.05)
        insert, modify = take.number("insertproportion", 0.0), take.number("readmodifywriteproportion", 0.0)
        if not read + update + insert + modify > 0:
            raise FormatError(f"{path}: no operation has a proportion above 0", path=path)
        distribution = properties.get("requestdistribution", "uniform")
        if distribution not in DISTRIBUTIONS:
            names = ", ".join(DISTRIBUTIONS)
            raise FormatError(f"{path}: requestdistribution={distribution} is not one of {names}", path=path)
        if "recordcount" not in properties:
            raise FormatError(f"{path}: recordcount is missing: expected a YCSB workload", path=path)
        return cls(
            name,
            take.positive_integer("recordcount", 1000),
            take.positive_integer("operationcount", 1000),
            read,
            update,
            insert,
            modify,
            distribution,
            take.positive_integer("fieldcount", 10) * take.positive_integer("fieldlength", 100),
        )

    def sized(self, records: int | None, operations: int | None, value_bytes: int | None = None) -> YcsbWorkload:
        """Return the same mix with other sizes; None does not change a size.

        Raises
        ------
        ArgumentError
            A size is not positive.
        """
        sizes = {"records": records, "operations": operations, "value_bytes": value_bytes}
        for name, value in sizes.items():
            if value is not None and value < 1:
                raise ArgumentError(f"{name} {value}: take at least 1", name=name)
        return dataclasses.replace(self, **{k: v for k, v in sizes.items() if v is not None})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Operations:
    """Operations, in the order of their execution.

    Attributes
    ----------
    kinds : uint8 [N]
        READ, UPDATE, INSERT or READ_MODIFY_WRITE.
    keys : int64 [N]
        The key of each operation.
    """

    kinds: NDArray[np.uint8]
    keys: Items


class Requests:
    """The operations of a workload, drawn in order; the same seed draws the same.

    Parameters
    ----------
    workload : YcsbWorkload
        The mix.
    seed : int, default 0
        Selects the sequence.

    Examples
    --------
    >>> requests = Requests(YcsbWorkload.named("ycsb-d"), seed=1)
    >>> requests.load_keys(0, 2)
    array([6284781860667377211, 8517097267634966620])
    >>> [block.keys.size for block in requests.blocks(600)]
    [600, 400]
    """

    def __init__(self, workload: YcsbWorkload, seed: int = 0) -> None:
        self.workload = workload
        self.records = workload.records
        """Number of records after all operations that were drawn so far."""
        shares = np.array([workload.read, workload.update, workload.insert, workload.read_modify_write])
        self._edges = np.cumsum(shares / shares.sum())[:-1]
        self._random = np.random.default_rng(seed)
        # YCSB expects twice the mean of inserts, so that the hot records are likely to stay the same
        expected = int(workload.operations * workload.insert / shares.sum() * 2)
        self._chooser = _chooser(workload.distribution, workload.records + expected)

    def load_keys(self, begin: int, end: int) -> Items:
        """Return the keys of records `begin` to `end` - 1, which must exist before the operations."""
        return record_keys(np.arange(begin, end, dtype=np.int64))

    def blocks(self, size: int) -> Iterator[Operations]:
        """Draw the operations of the workload, `size` at a time."""
        for begin in range(0, self.workload.operations, size):
            yield self.draw(min(size, self.workload.operations - begin))

    def draw(self, count: int) -> Operations:
        """Draw the next `count` operations."""
        kinds = np.searchsorted(self._edges, self._random.random(count), side="right").astype(np.uint8)
        inserts = kinds == INSERT
        counts = self.records + np.cumsum(inserts) - inserts  # before each operation
        numbers = self._chooser.draw(counts, self._random)
        numbers[inserts] = counts[inserts]
        self.records += int(inserts.sum())
        return Operations(kinds, record_keys(numbers))


def record_keys(numbers: Items) -> Items:
    """Return the keys of records: YCSB's hash of the number, as an 8-byte key instead of ``user`` and digits."""
    return fnv_hash(numbers)


def read_file(path: str | Path, member: str) -> dict[str, str]:
    """Read a Java property file.

    Parameters
    ----------
    path : path-like
        The file, or a folder or tar archive that contains it.
    member : str
        Name of the file in a folder or an archive, at any depth.

    Raises
    ------
    MissingFileError
        The file does not exist, or the folder or archive does not contain it.
    FormatError
        The file is not a property file.
    """
    path = Path(path)
    if not path.exists():
        raise MissingFileError(f"{path} does not exist: pass a YCSB property file, or omit the option", path=path)
    if path.is_dir():
        found = sorted(p for p in path.rglob(member) if p.is_file())
        if not found:
            raise MissingFileError(f"{path} holds no file {member}", path=path)
        path = found[0]
    data = _from_archive(path, member) if tarfile.is_tarfile(path) else path.read_bytes()[: _LONGEST_FILE + 1]
    if len(data) > _LONGEST_FILE or b"\0" in data:
        raise FormatError(f"{path} is not a property file", path=path)
    return parse_properties(data.decode("latin-1"), str(path))


def parse_properties(text: str, path: str) -> dict[str, str]:
    """Return the keys and values of a Java property file (comments, continued lines; no escapes).

    Raises
    ------
    FormatError
        A line has no value; the message names the line.
    """
    found: dict[str, str] = {}
    joined = ""
    for number, line in enumerate([*text.splitlines(), ""], 1):
        first = not joined
        line = joined + line.strip()
        joined = ""
        if not line or (first and line[0] in "#!"):
            continue
        if line.endswith("\\"):
            joined = line[:-1]
            continue
        match = re.fullmatch(r"([^\s=:]+)\s*[=:\s]\s*(.*)", line)
        if match is None:
            raise FormatError(f"{path}, line {number}: {line!r} is not name=value", path=path)
        found[match[1]] = match[2]
    return found


def _from_archive(path: Path, member: str) -> bytes:
    with tarfile.open(path) as archive:
        for entry in archive:
            if entry.isfile() and Path(entry.name).name == member:
                file = archive.extractfile(entry)
                assert file is not None
                return file.read(_LONGEST_FILE + 1)
    raise MissingFileError(f"{path} holds no file {member}", path=path)


def _chooser(distribution: str, items: int) -> Distribution:
    if distribution == "zipfian":
        return ScrambledZipfian(items)
    return Latest() if distribution == "latest" else Uniform()


def _no_scans(where: str) -> ArgumentError:
    return ArgumentError(
        f"{where} is not supported: it scans ranges of keys, and the index is a hash table, which has no order. "
        f"Choose one of {', '.join(NAMES)}",
        name="workload",
    )


class _Taker:
    """Reads and removes numbers from properties."""

    def __init__(self, properties: dict[str, str], path: str) -> None:
        self.properties = properties
        self.path = path

    def number(self, name: str, default: float) -> float:
        text = self.properties.get(name, default)
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            raise FormatError(f"{self.path}: {name}={text} is not a number from 0 up", path=self.path)
        return value

    def positive_integer(self, name: str, default: int) -> int:
        value = self.number(name, default)
        if value != int(value) or value < 1:
            raise FormatError(
                f"{self.path}: {name}={self.properties[name]} is not a whole number from 1 up", path=self.path
            )
        return int(value)


_BUILT_IN = {
    "ycsb-a": YcsbWorkload("ycsb-a", read=0.5, update=0.5, distribution="zipfian"),
    "ycsb-b": YcsbWorkload("ycsb-b", read=0.95, update=0.05, distribution="zipfian"),
    "ycsb-c": YcsbWorkload("ycsb-c", read=1.0, update=0.0, distribution="zipfian"),
    "ycsb-d": YcsbWorkload("ycsb-d", read=0.95, update=0.0, insert=0.05, distribution="latest"),
    "ycsb-f": YcsbWorkload("ycsb-f", read=0.5, update=0.0, read_modify_write=0.5, distribution="zipfian"),
}
