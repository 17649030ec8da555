"""Manifest: the list of a store's files; replaced as a whole, by a rename."""

from __future__ import annotations

import contextlib
import json
import os
import uuid as uuids
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ... import errors
from .checksum import crc32c
from .files import Files, write_new
from .format import FORMAT_VERSION, newer

MANIFEST_NAME = "MANIFEST"
NEW_NAME = "MANIFEST.new"
IDENTITY_NAME = "IDENTITY"
"""A copy of the first manifest: what never changes, for `salvage`."""
TITLE = "warpwell-kv"
DURABILITIES = ("commit", "always", "none")


@dataclass(frozen=True)
class Manifest:
    """The files of a store and its fixed properties.

    Attributes
    ----------
    uuid : str
        32 hexadecimal digits; every file of the store carries them.
    durability : {"commit", "always", "none"}
    segment_bytes : int
    journal : int
        The journal's id.
    snapshot : int or None
        The snapshot that the journal continues.
    segments : tuple of int
        In the order of their creation; values are appended to the last one.
    next_segment, next_file : int
        The next unused ids, of segments and of other files.
    floor_seq, floor_crc : int
        A record that was durable when the manifest was written, and its checksum.
    schema : dict, optional
        JSON of the store above, such as its schema.
    kinds : bool
        Whether locations mark keys that were given as integers. False in stores of format 1.
    previous : tuple, optional
        The previous snapshot (or None) and journal: together they hold the records of the current snapshot.
    """

    uuid: str
    durability: str
    segment_bytes: int
    journal: int
    snapshot: int | None
    segments: tuple[int, ...]
    next_segment: int
    next_file: int
    floor_seq: int = 0
    floor_crc: int = 0
    schema: dict[str, Any] | None = field(default=None)
    kinds: bool = False
    previous: tuple[int | None, int] | None = None

    @property
    def uuid_bytes(self) -> bytes:
        """The 16 bytes in superblocks."""
        return uuids.UUID(self.uuid).bytes

    def journals(self) -> list[int]:
        """Return the journals that are kept, the current one last."""
        return [*([] if self.previous is None else [self.previous[1]]), self.journal]

    def snapshots(self) -> list[int]:
        """Return the snapshots that are kept, the current one last."""
        before = None if self.previous is None else self.previous[0]
        return [id for id in (before, self.snapshot) if id is not None]

    def pack(self) -> bytes:
        """Return the file: a line with version, length and CRC-32C, then JSON."""
        body = json.dumps(asdict(self), indent=1, sort_keys=True).encode() + b"\n"
        return _title(FORMAT_VERSION, body) + body

    def publish(self, files: Files, folder: str) -> None:
        """Make this the store's manifest; it is durable once the folder is synced.

        Every file that it names must be durable, and so must their names. Nothing has changed when it raises.
        """
        new = os.path.join(folder, NEW_NAME)
        with contextlib.suppress(FileNotFoundError):
            files.unlink(new)  # a crash left it
        files.close(write_new(files, new, [self.pack()]))
        try:
            files.rename(new, os.path.join(folder, MANIFEST_NAME))
        except OSError:
            with contextlib.suppress(OSError):
                files.unlink(new)
            raise

    def with_changes(self, **changes: Any) -> Manifest:
        """Return a copy with other values."""
        return replace(self, **changes)


def read_identity(folder: str) -> Manifest | None:
    """Return the copy of a store's first manifest, or None if it is missing or damaged."""
    try:
        return read_manifest(folder, IDENTITY_NAME)
    except (errors.MissingFileError, errors.FormatError):
        return None


def read_manifest(folder: str, name: str = MANIFEST_NAME) -> Manifest:
    """Return a store's manifest.

    Raises
    ------
    MissingFileError
        `folder` does not exist.
    FormatError
        It is not a store, or its creation was interrupted.
    StoreVersionError
        Its format is newer.
    CorruptionError
        The manifest is damaged.
    """
    path = os.path.join(folder, name)
    try:
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        if not os.path.lexists(folder):
            raise errors.MissingFileError(
                f"{folder} does not exist: create a store there with warpwell.kv.create, or check the path", path=folder
            ) from None
        raise errors.FormatError(
            f"{folder} is not a key-value store (it has no {MANIFEST_NAME}): check the path, or create a store there",
            path=folder,
        ) from None
    except NotADirectoryError:
        raise errors.FormatError(
            f"{folder} is a file, and a key-value store is a folder: check the path", path=folder
        ) from None
    except IsADirectoryError:
        raise errors.FormatError(
            f"{path} is a folder: this is not a key-value store; check the path", path=path
        ) from None
    title, _, body = data.partition(b"\n")
    words = title.split(b" ")
    if words[0] != TITLE.encode() or len(words) != 4:
        raise errors.CorruptionError(
            f"{path} does not start with '{TITLE}': it is damaged or belongs to another program; restore it from "
            "a copy",
            path=path,
            offset=0,
        )
    version = int(words[1]) if words[1].isdigit() else 0
    if data != _title(version, body) + body:
        raise errors.CorruptionError(
            f"{path} is damaged or was edited: restore it from a copy, or see `warpwell kv salvage`",
            path=path,
            offset=0,
        )
    if version > FORMAT_VERSION:
        raise newer(path, version)
    try:
        fields = json.loads(body)
        fields["segments"] = tuple(fields["segments"])
        if fields.get("previous") is not None:
            fields["previous"] = tuple(fields["previous"])
        return Manifest(**fields)
    except (ValueError, TypeError, KeyError) as error:
        raise errors.CorruptionError(
            f"{path} has other fields than format {version} ({error}): restore it from a copy",
            path=path,
            offset=0,
        ) from None


def _title(version: int, body: bytes) -> bytes:
    # The checksum covers the version too, or a damaged one would read as "newer".
    crc = crc32c(body, crc32c(str(version).encode()))
    return f"{TITLE} {version} {len(body)} {crc:08x}\n".encode()
