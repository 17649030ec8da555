"""System calls that kill, interrupt or fail at a chosen call, and the judge of the store afterwards."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from warpwell import errors, kv
from warpwell.kv.log.files import Files
from warpwell.kv.log.format import offset_of, segment_of, size_of
from warpwell.kv.log.log import Log
from warpwell.kv.log.manifest import MANIFEST_NAME
from warpwell.kv.log.recovery import verify

from .kv_load import Script, State, WrongBytes, append_one, contents, index_of
from .power import RecordingFiles

CALLS = ("mkdir", "create", "pwrite", "sync", "sync_folder", "rename", "unlink", "truncate")
"""The calls that change the disk."""
MOMENTS = ("before", "within", "after")


class InterceptedFiles(Files):
    """System calls that are counted and passed to another `Files`.

    Parameters
    ----------
    inner : Files
    """

    def __init__(self, inner: Files) -> None:
        self.inner = inner
        self.count = 0

    def around(self, name: str, args: tuple[Any, ...]) -> Any:
        """Execute a call. Its number is `count`, which starts at 1."""
        return getattr(self.inner, name)(*args)

    def _call(self, name: str, *args: Any) -> Any:
        self.count += 1
        return self.around(name, args)

    def mkdir(self, path: str) -> None:
        """See `Files`."""
        self._call("mkdir", path)

    def create(self, path: str) -> int:
        """See `Files`."""
        return int(self._call("create", path))

    def pwrite(self, fd: int, data: Any, offset: int) -> None:
        """See `Files`."""
        self._call("pwrite", fd, data, offset)

    def sync(self, fd: int) -> None:
        """See `Files`."""
        self._call("sync", fd)

    def sync_all(self, fds: Sequence[int]) -> None:
        """See `Files`. One file after another, so that a seed repeats a run."""
        for fd in fds:
            self.sync(fd)

    def sync_folder(self, path: str) -> None:
        """See `Files`."""
        self._call("sync_folder", path)

    def rename(self, source: str, target: str) -> None:
        """See `Files`."""
        self._call("rename", source, target)

    def unlink(self, path: str) -> None:
        """See `Files`."""
        self._call("unlink", path)

    def truncate(self, fd: int, nbytes: int) -> None:
        """See `Files`."""
        self._call("truncate", fd, nbytes)

    def open(self, path: str, writable: bool) -> int:
        """See `Files`."""
        return self.inner.open(path, writable)

    def close(self, fd: int) -> None:
        """See `Files`."""
        self.inner.close(fd)


class KillingFiles(InterceptedFiles):
    """Kills the process at call `number`: before it, within it (half of a write is done), or after it."""

    def __init__(self, number: int, moment: str) -> None:
        super().__init__(Files())
        self.number, self.moment = number, moment

    def around(self, name: str, args: tuple[Any, ...]) -> Any:
        """See `InterceptedFiles`."""
        if self.count != self.number:
            return super().around(name, args)
        if self.moment == "within" and name == "pwrite":
            fd, data, offset = args
            view = memoryview(data).cast("B")
            os.pwrite(fd, view[: len(view) // 2], offset)
        elif self.moment == "after":
            super().around(name, args)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")


class FailingFiles(InterceptedFiles):
    """Fails call `number` with `code`: half of a write is done, and a failed fsync loses pending data."""

    def __init__(self, inner: RecordingFiles, number: int, code: int) -> None:
        super().__init__(inner)
        self.number, self.code = number, code
        self.failed = ""

    def around(self, name: str, args: tuple[Any, ...]) -> Any:
        """See `InterceptedFiles`."""
        if self.count != self.number:
            return super().around(name, args)
        self.failed = name
        if name == "pwrite":
            fd, data, offset = args
            view = memoryview(data).cast("B")
            self.inner.pwrite(fd, view[: len(view) // 2], offset)
        elif name == "sync" and isinstance(self.inner, RecordingFiles):
            self.inner.lose(args[0])
        raise OSError(self.code, os.strerror(self.code))


class InterruptingFiles(InterceptedFiles):
    """Sends SIGINT to the process before or after call `number`."""

    def __init__(self, inner: RecordingFiles, number: int, moment: str) -> None:
        super().__init__(inner)
        self.number, self.moment = number, moment
        self.failed = ""

    def around(self, name: str, args: tuple[Any, ...]) -> Any:
        """See `InterceptedFiles`."""
        if self.count != self.number:
            return super().around(name, args)
        self.failed = name
        if self.moment == "before":
            signal.raise_signal(signal.SIGINT)
        result = super().around(name, args)
        if self.moment == "after":
            signal.raise_signal(signal.SIGINT)
        return result


@dataclass(frozen=True)
class Verdict:
    """The fault of a store after a crash: `kind` is "lost", "hole", "wrong bytes", "refused" or "misjudged"."""

    kind: str
    detail: str


def judge(
    folder: str, script: Script, first: int, last: int, *, write: bool = True, salvage: bool = False
) -> Verdict | State | None:
    """Compare a store with the contents that are allowed: one of ``script.states[first : last + 1]``.

    `verify` must find no damage.

    Parameters
    ----------
    folder : str
    script : Script
    first : int
        Number of acknowledged committing steps; -1 if the creation was not acknowledged.
    last : int
        The same number, plus 1 if a step was in progress.
    write : bool, default True
        Also open it for writing, put a record, and read the store again.
    salvage : bool, default False
        Also salvage the store, and with `write` damage a value, verify the store and salvage it again.

    Returns
    -------
    Verdict
        Something is wrong.
    dict or None
        Its contents; None if no store exists and the creation was not acknowledged.
    """
    if first < 0 and not os.path.exists(os.path.join(folder, MANIFEST_NAME)):
        return _judge_absent(folder)
    try:
        with Log.open(folder, writable=False) as log:
            held = contents(log)
    except WrongBytes as error:
        return Verdict("wrong bytes", str(error))
    except (errors.FormatError, errors.MissingFileError) as error:
        return Verdict("refused", str(error))
    allowed = script.states[max(first, 0) : last + 1]
    if held not in allowed:
        return _classify(held, script, first, last)
    report = verify(folder)
    if not report.sound:
        return Verdict("misjudged", f"verify reports {report.problems[0]}")
    if salvage:
        salvaged, _ = salvage_all(folder)
        if salvaged not in allowed:
            verdict = _classify(salvaged, script, first, last)
            return Verdict("misjudged", f"salvage: {verdict.kind}: {verdict.detail}")
    if not write:
        return held
    try:
        with Log.open(folder, writable=True) as log:
            again = contents(log)
            append_one(log, b"after", b"the crash")
            log.commit()
        if again != held:
            return Verdict("hole", "a writer recovers other records than a reader")
        with Log.open(folder, writable=False) as log:
            if contents(log) != {**held, b"after": b"the crash"}:
                return Verdict("lost", "a record that was put after the recovery is absent")
        if salvage and any(held.values()):
            return _judge_damaged(folder, {**held, b"after": b"the crash"}) or held
    except WrongBytes as error:
        return Verdict("wrong bytes", f"after recovery: {error}")
    except errors.WarpwellError as error:
        return Verdict("refused", f"after recovery: {error}")
    return held


def salvage_all(folder: str) -> tuple[State, kv.SalvageReport]:
    """Salvage a store; return the records of the new store, which is deleted."""
    target = f"{folder}.salvaged"
    try:
        report = kv.salvage(folder, target)
        with Log.open(target, writable=False) as log:
            return contents(log), report
    finally:
        shutil.rmtree(target, ignore_errors=True)


def _judge_damaged(folder: str, held: State) -> Verdict | None:
    """Damage the last value of a store that was closed; return a verdict unless `verify` and `salvage` report it."""
    with Log.open(folder, writable=False) as log:
        slots = index_of(log)
        key = max((key for key in held if held[key]), key=lambda key: slots[key])
        loc0, loc1 = slots[key]
        path, offset = log.segments.path(segment_of(loc0)), offset_of(loc0)
    with open(path, "r+b") as file:
        file.seek(offset + size_of(loc0, loc1) - 1)
        file.write(bytes([held[key][-1] ^ 1]))
    problems = [(problem.path, problem.offset, problem.key) for problem in verify(folder).problems]
    if problems != [(path, offset, key)]:
        return Verdict("misjudged", f"verify reports {problems} instead of the value of {key!r} at {path}, {offset}")
    salvaged, report = salvage_all(folder)
    lost = [problem.key for problem in report.lost]
    if salvaged != {name: value for name, value in held.items() if name not in lost} or lost not in ([], [key]):
        return Verdict("misjudged", f"salvage of a store with a damaged value of {key!r} reports the loss of {lost}")
    return None


def _judge_absent(folder: str) -> Verdict | None:
    """Check that an interrupted creation left no store, and that a new store can be created at its path."""
    try:
        Log.open(folder, writable=False)
    except errors.MissingFileError:
        return None
    except errors.FormatError:
        with contextlib.suppress(errors.WarpwellError):
            Log.create(folder, segment_bytes=1 << 16).close()
            return None
        return Verdict("refused", "no store can be created after an interrupted creation")
    return Verdict("hole", "a store without a manifest opens")


def _classify(held: State, script: Script, first: int, last: int) -> Verdict:
    if held in script.states:
        at = script.states.index(held)
        return Verdict("lost" if at < first else "hole", f"state {at}, and {first} to {last} are right")
    unknown = set(held.items()) - script.versions()
    if unknown:
        return Verdict("wrong bytes", f"{len(unknown)} values that were never put, {next(iter(unknown))[0]!r} for one")
    expected = script.states[max(first, 0)]
    missing = [key for key in expected if key not in held]
    return Verdict("hole", f"no state of the trace: {len(held)} records; missing {missing[:3]}")
