"""Model of a disk that loses power: the states in which a file system may leave unsynced writes and names.

`RecordingFiles` executes and records every call. `Disk` replays the recorded calls up to a chosen call, and draws a
state that a power cut may leave at that moment. Synced data survives. Each sector of an unsynced write may have reached
the disk or not, in any order, and a sector may be torn. A file's length may have grown without its bytes. Created,
renamed and deleted names may be on disk or not, in order or in any order.

The model assumes that writing some bytes of a sector damages no other bytes of that sector. SQLite assumes the same
("power-safe overwrite").
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from warpwell.kv.log.files import Files

SECTORS = (512, 4096)
SHARD = "shard"
"""Prefix of the names of shard folders, which have the same parent as the store's folder."""


@dataclass(frozen=True)
class Event:
    """One call: its kind, the inode that it changes, and the arguments that replaying it needs."""

    kind: str
    inode: int = 0
    offset: int = 0
    data: bytes = b""
    name: str = ""
    target: str = ""


@dataclass
class _Inode:
    durable: bytearray = field(default_factory=bytearray)
    pending: list[Event] = field(default_factory=list)


class RecordingFiles(Files):
    """System calls that are executed, and recorded in `events`.

    Parameters
    ----------
    folder : str
        The store's folder. Existing files count as durable, unless `events` records them.
    events : list of Event, optional
        Calls of an earlier process that was killed; `Disk.keep` created `folder` from them.
    """

    def __init__(self, folder: str, events: list[Event] | None = None) -> None:
        self.folder = os.path.abspath(folder)
        self.events: list[Event] = list(events or ())
        self._inodes: dict[str, int] = {}
        self._open: dict[int, int] = {}
        self._count = 0
        for event in self.events:
            if event.kind in ("create", "rename", "unlink"):
                _rename(self._inodes, event)
                self._count = max(self._count, event.inode)
        if events is None and os.path.isdir(self.folder):
            parent = os.path.dirname(self.folder)
            shards = sorted(name for name in os.listdir(parent) if name.startswith(SHARD))
            for path in [self.folder, *(os.path.join(parent, name) for name in shards)]:
                self.events.append(Event("mkdir", name=self._name(path)))
                for name in sorted(os.listdir(path)):
                    with open(os.path.join(path, name), "rb") as file:
                        inode = self._new(self._name(file.name))
                        self.events.append(Event("write", inode, 0, file.read()))
                        self.events.append(Event("sync", inode))
                self.events.append(Event("sync_folder", name=self._name(path)))
            self.events.append(Event("sync_folder", name=".."))

    def mkdir(self, path: str) -> None:
        """See `Files`."""
        super().mkdir(path)
        self.events.append(Event("mkdir", name=self._name(path)))

    def create(self, path: str) -> int:
        """See `Files`."""
        fd = super().create(path)
        self._open[fd] = self._new(self._name(path))
        return fd

    def open(self, path: str, writable: bool) -> int:
        """See `Files`."""
        fd = super().open(path, writable)
        self._open[fd] = self._inodes[self._name(path)]
        return fd

    def pwrite(self, fd: int, data: Any, offset: int) -> None:
        """See `Files`."""
        contents = bytes(memoryview(data).cast("B"))
        self.events.append(Event("write", self._open[fd], offset, contents))
        super().pwrite(fd, contents, offset)

    def sync(self, fd: int) -> None:
        """See `Files`. Only recorded: the stores of the campaigns are in a file system in memory."""
        self.events.append(Event("sync", self._open[fd]))

    def sync_all(self, fds: Sequence[int]) -> None:
        """See `Files`. One file after another, so that a seed repeats a run."""
        for fd in fds:
            self.sync(fd)

    def sync_folder(self, path: str) -> None:
        """See `Files`."""
        self.events.append(Event("sync_folder", name=self._name(path)))

    def rename(self, source: str, target: str) -> None:
        """See `Files`."""
        super().rename(source, target)
        old, new = self._name(source), self._name(target)
        inode = self._inodes[new] = self._inodes.pop(old)
        self.events.append(Event("rename", inode, name=old, target=new))

    def unlink(self, path: str) -> None:
        """See `Files`."""
        super().unlink(path)
        name = self._name(path)
        self.events.append(Event("unlink", self._inodes.pop(name), name=name))

    def truncate(self, fd: int, nbytes: int) -> None:
        """See `Files`."""
        super().truncate(fd, nbytes)
        self.events.append(Event("truncate", self._open[fd], nbytes))

    def close(self, fd: int) -> None:
        """See `Files`."""
        self._open.pop(fd, None)
        super().close(fd)

    def lose(self, fd: int) -> None:
        """Record a failed fsync: pending data never becomes durable unless it is written again."""
        self.events.append(Event("lose", self._open[fd]))

    def mark(self, name: str, number: int) -> None:
        """Record a mark between two calls, such as the number of acknowledged steps."""
        self.events.append(Event("mark", number, name=name))

    def _name(self, path: str) -> str:
        return os.path.relpath(path, self.folder)

    def _new(self, name: str) -> int:
        self._count += 1
        self._inodes[name] = self._count
        self.events.append(Event("create", self._count, name=name))
        return self._count


class Disk:
    """The disk after the calls of `events`.

    Parameters
    ----------
    events : list of Event
    """

    def __init__(self, events: list[Event]) -> None:
        self._inodes: dict[int, _Inode] = {}
        self._names: dict[str, int] = {}
        self._pending: list[Event] = []
        self._folders: dict[str, bool] = {}  # existing folders, and whether they are durable
        for event in events:
            self._apply(event)

    def _apply(self, event: Event) -> None:
        kind = event.kind
        if kind == "mkdir":
            self._folders[event.name] = False
        elif kind in ("create", "rename", "unlink"):
            if kind == "create":
                self._inodes[event.inode] = _Inode()
            self._pending.append(event)
        elif kind == "sync_folder":
            if event.name == "..":
                self._folders = dict.fromkeys(self._folders, True)
            for change in self._pending:
                if _folder_of(change.name) == event.name:
                    _rename(self._names, change)
            self._pending = [change for change in self._pending if _folder_of(change.name) != event.name]
        elif kind in ("write", "truncate"):
            self._inodes[event.inode].pending.append(event)
        elif kind == "sync":
            inode = self._inodes[event.inode]
            for change in inode.pending:
                _write(inode.durable, change, 0, len(change.data))
            inode.pending = []
        elif kind == "lose":
            self._inodes[event.inode].pending = []

    def keep(self, folder: str) -> None:
        """Create `folder` with the contents that a process sees after the calls."""
        names = dict(self._names)
        for change in self._pending:
            _rename(names, change)
        for name in self._folders:
            os.mkdir(_path(folder, name))
        for name, inode in names.items():
            content = bytearray(self._inodes[inode].durable)
            for change in self._inodes[inode].pending:
                _write(content, change, 0, len(change.data))
            with open(_path(folder, name), "wb") as file:
                file.write(content)

    def drop(self, folder: str, survivor: Event | None = None) -> None:
        """Create `folder` with durable contents and names alone, and with one change of a name that is not durable."""
        names = dict(self._names)
        if survivor is not None:
            _rename(names, survivor)
        for name in (name for name, durable in self._folders.items() if durable):
            os.mkdir(_path(folder, name))
        for name, inode in names.items():
            if self._folders[_folder_of(name)]:
                with open(_path(folder, name), "wb") as file:
                    file.write(self._inodes[inode].durable)

    def cut(self, folder: str, rng: random.Random) -> None:
        """Create `folder` with the contents that survive if the power fails now.

        Parameters
        ----------
        folder : str
        rng : random.Random
            Selects the surviving sectors and names; the same state selects the same.
        """
        survival = rng.choice((0.0, 0.1, 0.5, 0.9, 1.0))
        survivors = {name for name, durable in self._folders.items() if durable or rng.random() < survival}
        if not survivors:
            return
        names = dict(self._names)
        if rng.random() < 0.5:  # the file system has a journal of names: a prefix of the changes survives
            changes = self._pending[: rng.randint(0, len(self._pending))]
        else:
            changes = [change for change in self._pending if rng.random() < survival]
        for change in changes:
            _rename(names, change)
        sector = rng.choice(SECTORS)
        for name in sorted(survivors):
            os.mkdir(_path(folder, name))
        for name, inode in names.items():
            if _folder_of(name) not in survivors:
                continue
            with open(_path(folder, name), "wb") as file:
                file.write(_survivors(self._inodes[inode], sector, survival, rng))


def _survivors(inode: _Inode, sector: int, survival: float, rng: random.Random) -> bytearray:
    content = bytearray(inode.durable)
    length = len(content)
    for change in inode.pending:
        if change.kind == "truncate":
            if rng.random() < survival:
                _write(content, change, 0, 0)
            continue
        length = max(length, change.offset + len(change.data))
        at = 0
        while at < len(change.data):
            until = min(len(change.data), at + sector - (change.offset + at) % sector)
            if rng.random() < survival:
                _write(content, change, at, until)
            elif rng.random() < 0.05:  # torn: a range of 512-byte parts or of bytes reached the disk
                begin, end = sorted((rng.randint(at, until), rng.randint(at, until)))
                if rng.random() < 0.7:
                    begin, end = begin - (change.offset + begin) % 512, end - (change.offset + end) % 512
                _write(content, change, max(begin, at), max(end, at))
            at = until
    if len(content) < length and rng.random() < 0.3:
        content.extend(bytes(rng.randint(0, length - len(content))))
    return content


def _write(content: bytearray, change: Event, begin: int, end: int) -> None:
    if change.kind == "truncate":
        del content[change.offset :]
        return
    if begin < end:
        first, last = change.offset + begin, change.offset + end
        if len(content) < first:
            content.extend(bytes(first - len(content)))
        content[first:last] = change.data[begin:end]


def _path(folder: str, name: str) -> str:
    return os.path.normpath(os.path.join(folder, name))  # the store's own folder may be missing


def _folder_of(name: str) -> str:
    return os.path.dirname(name) or "."


def _rename(names: dict[str, int], change: Event) -> None:
    if change.kind == "create":
        names[change.name] = change.inode
    elif change.kind == "unlink":
        if names.get(change.name) == change.inode:
            del names[change.name]
    else:
        if names.get(change.name) == change.inode:
            del names[change.name]
        names[change.target] = change.inode
