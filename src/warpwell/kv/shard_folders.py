"""Find the shards of a store, and the store of a shard, after users moved or copied folders.

The manifest of a store lists its shards with their UUIDs, and the manifest of a shard names its store and the store's
folder. A path is relative if one folder is beside or inside the other, so that both can be moved or copied together;
otherwise it is absolute. A copy has the UUIDs of its original. So a store may write to a shard only if the shard names
the store's own folder, or a folder that no longer exists or uses another shard: in these cases the store was moved, or
copied with its shards.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .. import errors
from .log.manifest import Manifest, read_manifest
from .log.verify import Problem, VerifyReport, verify


@dataclass(frozen=True)
class ShardFolder:
    """A shard that was found.

    Attributes
    ----------
    number : int
    path : str
    home : str
        The folder of its store, as its manifest says.
    meta : dict
        Contents of its manifest.
    """

    number: int
    path: str
    home: str
    meta: dict[str, Any]

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
            other = read_manifest(self.home)
            theirs = find_shards(self.home, other) if other.uuid == uuid else []
            if any(_same(shard.path, self.path) for shard in theirs):
                raise errors.SharingError(
                    f"{main} is a copy of {self.home}, and {self.path} is a shard of that one: writing would change it."
                    f" Open {self.home}, or make a store with shards of its own (`warpwell kv dump`, then `load`)",
                    path=main,
                )
        return True

    def meta_for(self, main: str) -> dict[str, Any]:
        """Return the contents of its manifest for a store at `main`."""
        return {**self.meta, "store": written(main, self.path)}


def written(path: str, base: str) -> str:
    """Return the path of another folder as the manifest in `base` stores it."""
    path, base = os.path.realpath(path), os.path.realpath(base)
    near = os.path.dirname(base)
    beside = near != os.sep and os.path.commonpath([near, path]) == near
    return os.path.relpath(path, base) if beside else path


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
    found = _look(path, listed["uuid"])
    if os.path.isabs(listed["path"]) and (found is None or not _same(found.home, main)):
        # Format 1 has absolute paths only: after a move or a copy the shards may have come along.
        beside = [] if found is None else [resolved(os.path.relpath(found.path, found.home), main)]
        name = os.path.basename(path)
        for other in [*beside, os.path.join(os.path.dirname(os.path.realpath(main)), name), resolved(name, main)]:
            came = _look(other, listed["uuid"])
            if came is not None:
                return ShardFolder(number, came.path, came.home, came.meta)
    if found is not None:
        return ShardFolder(number, found.path, found.home, found.meta)
    if not os.path.lexists(path):
        raise errors.MissingFileError(
            f"shard {number} of {main} is not at {path}: put it back there (a store is moved and copied together"
            " with the shards beside it)",
            path=path,
        )
    try:
        read_manifest(path)
    except errors.FormatError as error:
        error.args = (f"shard {number} of {main}: {error.args[0]}",)
        raise
    raise errors.FormatError(
        f"{path} is not the folder that {main} was created with as shard {number}: put that one back in its place",
        path=path,
    )


def find_shards(main: str, manifest: Manifest) -> list[ShardFolder]:
    """Find all shards of a store; see `find_shard`."""
    return [find_shard(main, number, shard) for number, shard in enumerate((manifest.schema or {}).get("shards") or ())]


def own_shards(main: str) -> list[str]:
    """Return the folders of the shards that belong to the store at `main`, if there is one."""
    out: list[str] = []
    with contextlib.suppress(errors.MissingFileError, errors.FormatError):
        manifest = read_manifest(main)
        for number, shard in enumerate((manifest.schema or {}).get("shards") or ()):
            with contextlib.suppress(errors.MissingFileError, errors.FormatError, errors.SharingError):
                folder = find_shard(main, number, shard)
                folder.check_writer(main, manifest.uuid)
                out.append(folder.path)
    return out


def verify_all(path: str, *, progress: Callable[[int, int], object] | None = None) -> VerifyReport:
    """Check a store and its shards, even if it is too damaged to open; see `warpwell.kv.log.verify.verify`."""
    report = verify(path, progress=progress)
    with contextlib.suppress(errors.CorruptionError):  # it is among the problems
        for number, shard in enumerate((read_manifest(report.path).schema or {}).get("shards") or ()):
            try:
                report.add(verify(find_shard(report.path, number, shard).path, progress=progress))
            except (errors.MissingFileError, errors.FormatError) as error:
                report.problems.append(Problem(resolved(shard["path"], report.path), None, str(error)))
    return report


def home_of(path: str, meta: dict[str, Any]) -> str:
    """Return the folder of a shard's store, as its manifest says."""
    return resolved(str(meta.get("store", "")), path)


def _look(path: str, uuid: str) -> ShardFolder | None:
    try:
        manifest = read_manifest(path)
    except errors.MissingFileError:
        return None
    except errors.CorruptionError:
        raise
    except errors.FormatError:
        return None
    meta = manifest.schema or {}
    if manifest.uuid != uuid or "shard" not in meta:
        return None
    return ShardFolder(int(meta["shard"]), path, home_of(path, meta), meta)


def _same(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False
