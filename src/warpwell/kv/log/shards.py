"""Shards: the shard of each key, and the folders of shards, even after users moved or copied them.

A shard is a folder of values, for example on its own drive. A rendezvous hash selects the shard of a key.

The manifest of a store lists its shards with their UUIDs, and the manifest of a shard names its store and the store's
folder. A path is relative if both folders have the same parent or one is inside the other, so that both can be moved
or copied together; otherwise it is absolute. A copy has the UUIDs of its original. So a store may write to a shard only
in two cases: the shard names the store's own folder, or it names a folder that no longer exists or uses another shard.
In the second case the store was moved, or copied with its shards.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ...targets import device
from ...targets.primitives import i64, store_weak_as
from ..index.index import key_at
from ..index.sealed import hash_of
from ..keys import Keys
from ..native import UINT8, compiled
from .files import Files
from .manifest import Manifest, read_manifest
from .segments import SegmentFolder

MAX_SHARDS = 255
_SPREAD = -0x61C8864680B583EB
_MIX = -0x40A7B892E31B1A47
_LOW = 0x7FFFFFFF


@device
def shard_of(key0: int, key1: int, length: int, count: int) -> int:
    """Return the shard of a key, 0 to `count` - 1: of all shards, its number and the key have the largest hash.

    If a shard is added at the end, a key stays or moves to the new shard. This function is part of the format: it never
    changes.
    """
    key = hash_of(key0, key1, length)
    shard = 0
    largest = 0
    for k in range(count):
        weight = i64((key ^ i64((k + 1) * _SPREAD)) * _MIX)
        weight = i64((weight ^ ((weight >> 32) & _LOW)) * _SPREAD)
        weight = weight ^ ((weight >> 29) & _LOW)
        if k == 0 or weight > largest:
            shard = k
            largest = weight
    return shard


def _shards_of(keys, lengths, count, shards, out):  # type: ignore[no-untyped-def]
    for k in range(count):
        key0, key1, length = key_at(keys, lengths, k)
        store_weak_as(out + k, shard_of(key0, key1, length, shards), UINT8)
    return 0


def shards_of(keys: Keys, count: int) -> NDArray[np.uint8]:
    """Return the shard of each key, uint8 [N]."""
    out = np.empty(keys.size, np.uint8)
    lengths = 0 if keys.lengths is None else keys.lengths.ctypes.data
    compiled(_shards_of)(keys.words.ctypes.data, lengths, keys.size, count, out.ctypes.data)
    return out


# -- folders ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShardFolder:
    """A shard that was found.

    Attributes
    ----------
    path : str
    manifest : Manifest
        The shard's own.
    """

    path: str
    manifest: Manifest

    @property
    def home(self) -> str:
        """The folder of its store, from its manifest."""
        return home_of(self.path, self.manifest.schema or {})

    def check_writer(self, main: str, uuid: str) -> bool:
        """Return whether the shard's manifest must be updated because its store, `main`, was moved.

        Raises
        ------
        SharingError
            `main` is a copy, and the shard belongs to its original.
        """
        if _same(self.home, main):
            return False
        with contextlib.suppress(errors.MissingFileError, errors.FormatError):
            original = read_manifest(self.home)
            shards = find_shards(self.home, original) if original.uuid == uuid else []
            if any(_same(shard.path, self.path) for shard in shards):
                raise errors.SharingError(
                    f"{main} is a copy of {self.home}, and {self.path} is a shard of that store: writing would change "
                    f"it. Open {self.home}, or make a store with shards of its own (`warpwell kv dump`, then `load`)",
                    path=main,
                )
        return True


def segment_folders(folder: str, manifest: Manifest) -> list[SegmentFolder]:
    """Return the folders that hold a store's segments: its shards, or its own folder.

    Raises
    ------
    FormatError
        The folder is a shard of another store, or the folder at a shard's path is another shard or not a shard.
    MissingFileError
        A shard is not at its path.
    """
    folders, missing = locate_segments(folder, manifest)
    for error in missing.values():
        raise error
    return folders


def locate_segments(folder: str, manifest: Manifest) -> tuple[list[SegmentFolder], dict[int, Exception]]:
    """Return the folders that hold a store's segments, and the errors of shards that are missing or damaged."""
    meta = manifest.schema or {}
    if "shard" in meta:
        raise errors.FormatError(
            f"{folder} is shard {meta['shard']} of the store {home_of(folder, meta)}: open that store", path=folder
        )
    missing: dict[int, Exception] = {}
    if not manifest.shards:
        return [SegmentFolder(folder, manifest.uuid_bytes)], missing
    folders = []
    for number, listed in enumerate(manifest.shards):
        try:
            path = find_shard(folder, number, listed).path
        except (errors.MissingFileError, errors.FormatError) as error:
            path, missing[number] = resolved(listed["path"], folder), error
        folders.append(SegmentFolder(path, bytes.fromhex(listed["uuid"])))
    return folders, missing


def take_shards(files: Files, folder: str, manifest: Manifest) -> None:
    """Check that a store may write to its shards, and update shards whose store was moved."""
    moved = [shard for shard in find_shards(folder, manifest) if shard.check_writer(folder, manifest.uuid)]
    for path, own in ((shard.path, shard.manifest) for shard in moved):
        own.with_changes(schema={**(own.schema or {}), "store": written(folder, path)}).publish(files, path)
        files.sync_folder(path)


def written(path: str, base: str) -> str:
    """Return the path of another folder in the form that the manifest in `base` stores."""
    path, base = os.path.realpath(path), os.path.realpath(base)
    parent = os.path.dirname(base)
    is_inside = parent != os.sep and os.path.commonpath([parent, path]) == parent
    return os.path.relpath(path, base) if is_inside else path


def resolved(path: str, base: str) -> str:
    """Return the folder of a path that the manifest in `base` stores."""
    return os.path.normpath(os.path.join(os.path.realpath(base), path))


def find_shard(main: str, number: int, listed: dict[str, str]) -> ShardFolder:
    """Find a shard of the store `main`.

    Raises
    ------
    MissingFileError, FormatError
        The shard is not at its path.
    """
    path = resolved(listed["path"], main)
    if not os.path.lexists(path):
        raise errors.MissingFileError(
            f"shard {number} of {main} is not at {path}: put it back there (move and copy a store together"
            " with its shards in the same parent folder)",
            path=path,
        )
    try:
        manifest = read_manifest(path)
    except errors.CorruptionError:
        raise
    except errors.FormatError as error:
        error.args = (f"shard {number} of {main}: {error.args[0]}",)
        raise
    if manifest.uuid != listed["uuid"] or "shard" not in (manifest.schema or {}):
        raise errors.FormatError(
            f"{path} is not the folder that {main} was created with as shard {number}: put the original folder back",
            path=path,
        )
    return ShardFolder(path, manifest)


def find_shards(main: str, manifest: Manifest) -> list[ShardFolder]:
    """Find all shards of a store; see `find_shard`."""
    return [find_shard(main, number, shard) for number, shard in enumerate(manifest.shards)]


def own_shards(main: str) -> list[str]:
    """Return the folders of the shards that belong to the store at `main`, if there is one."""
    out: list[str] = []
    with contextlib.suppress(errors.MissingFileError, errors.FormatError):
        manifest = read_manifest(main)
        for number, shard in enumerate(manifest.shards):
            with contextlib.suppress(errors.MissingFileError, errors.FormatError, errors.SharingError):
                folder = find_shard(main, number, shard)
                folder.check_writer(main, manifest.uuid)
                out.append(folder.path)
    return out


def home_of(path: str, meta: dict[str, Any]) -> str:
    """Return the folder of a shard's store, from the shard's manifest."""
    return resolved(str(meta.get("store", "")), path)


def _same(first: str, second: str) -> bool:
    try:
        return os.path.samefile(first, second)
    except OSError:
        return False
