"""`convert` and `append` that are killed or interrupted at each step: the old table or the new one, nothing else."""

import multiprocessing
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.harness.until import HANG_SECONDS
from tests.table.test_table_arrow import mixed

import warpwell as ww
from warpwell._os import file_lock
from warpwell.errors import SharingError

NAMES = ["i4", "f8", "text"]
OLD = mixed(900).select(NAMES)
MORE = mixed(1111).select(NAMES)
WATCHED = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"}

step: Callable[[], None] | None = None
"""Callback of each step during a watched operation."""


def _see(event: str, arguments: tuple[Any, ...]) -> None:
    if step is not None and event in WATCHED:
        step()


sys.addaudithook(_see)


@contextmanager
def steps(end: int, act: Callable[[], None]) -> Iterator[list[int]]:
    """Count steps: names that change, files that are opened or made durable; at number `end` call `what`."""
    global step
    count = [0]

    def count_step() -> None:
        count[0] += 1
        if count[0] == end:
            act()

    def fsync(fd: int, real: Callable[[int], None] = os.fsync) -> None:
        count_step()
        real(fd)

    real, os.fsync, step = os.fsync, fsync, count_step
    try:
        yield count
    finally:
        os.fsync, step = real, None


def stored(*tables: Any) -> Any:
    complete = pa.concat_tables(tables)
    codes = complete["i4"].combine_chunks().dictionary_encode().cast(pa.dictionary(pa.uint16(), pa.int32()))
    return complete.set_column(0, "i4", codes)


def begin(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    ww.table.convert(OLD, folder / "t.ww", codes=["i4"]).close()
    return folder / "t.ww"


def append(path: Path) -> None:
    ww.table.append(path, MORE)


def replace(path: Path) -> None:
    ww.table.convert(MORE, path, codes=["i4"], overwrite=True).close()


def create(path: Path) -> None:
    ww.table.convert(MORE, path.with_name("new.ww"), codes=["i4"]).close()


def states(act: Callable[[Path], None], path: Path) -> tuple[str, bool]:
    """Return which of the two tables is there: "old" or "new"."""
    if act is create:
        created = path.with_name("new.ww")
        if not created.exists():
            return "old", True
        path = created
    with ww.table.open(path) as t:
        found = t.arrow()
    assert ww.table.check(path).sound
    new = stored(OLD, MORE) if act is append else stored(MORE)
    is_new = found.to_pydict() == new.to_pydict()
    assert found.schema == new.schema
    assert is_new or (act is not create and found.to_pydict() == stored(OLD).to_pydict())
    return ("new" if is_new else "old"), True


def killed_at_each_step(folder: Path, act: Callable[[Path], None]) -> None:
    path = begin(folder / "d")
    shutil.copytree(path, folder / "kept")
    contents = []
    for end in range(1, 1000):
        child = os.fork()
        if child == 0:
            with steps(end, lambda: os._exit(9)):
                act(path)
            os._exit(0)
        done = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        contents.append(states(act, path)[0])
        if done == 0:
            break
        assert done == 9
        if act is append and end % 4 == 0:  # leftovers do not stop the next append
            append(path)
            assert "parts.json" in os.listdir(path)
            assert not [p for p in path.iterdir() if p.name.startswith(".")]
        if contents[-1] == "new" or end % 4 == 0:
            for entry in path.parent.iterdir():
                shutil.rmtree(entry)
            shutil.copytree(folder / "kept", path)
    assert contents[0] == "old" and contents[-1] == "new" and len(contents) > 20
    assert contents == sorted(contents, key=["old", "new"].index)


@pytest.mark.quick("append")
@pytest.mark.parametrize("act", [append, create])
def test_killed_at_each_step(tmp_path: Path, act: Callable[[Path], None]) -> None:
    """A folder that replaces another has no one step: see `warpwell.replacing`."""
    # forks of a process with all that other tests have compiled take a quarter of a second each
    campaign = multiprocessing.get_context("spawn").Process(target=killed_at_each_step, args=(tmp_path, act))
    campaign.start()
    campaign.join(HANG_SECONDS)
    campaign.kill()
    campaign.join()
    assert campaign.exitcode == 0, "its assertion is on standard error"


@pytest.mark.parametrize("act", [append, create, replace])
def test_interrupted_at_each_step(tmp_path: Path, act: Callable[[Path], None]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    path = begin(tmp_path / "d")
    shutil.copytree(path, tmp_path / "kept")
    contents = []
    for end in range(1, 1000):
        try:
            with steps(end, interrupt) as count:
                act(path)
        except KeyboardInterrupt:
            pass
        contents.append(states(act, path)[0])
        names = {"t.ww", "new.ww"} if act is create and contents[-1] == "new" else {"t.ww"}
        assert {p.name for p in path.parent.iterdir()} == names, end
        parts = {"0", "1"} if act is append and contents[-1] == "new" else {"0"}
        files = {f"{part}.arrow{ending}" for part in parts for ending in ("", ".zones")}
        assert set(os.listdir(path)) == {*files, "parts.json"}, end
        if count[0] < end:
            break
        if contents[-1] == "new":
            for entry in path.parent.iterdir():
                shutil.rmtree(entry)
            shutil.copytree(tmp_path / "kept", path)
    assert contents[0] == "old" and contents[-1] == "new" and len(contents) > 20


def test_two_that_append(tmp_path: Path) -> None:
    path = begin(tmp_path / "d")

    def batches() -> Iterator[Any]:
        yield from MORE.to_batches()
        with pytest.raises(SharingError, match="another process is appending"):
            ww.table.append(path, MORE, timeout=0.05)

    assert ww.table.append(path, pa.RecordBatchReader.from_batches(MORE.schema, batches())) == 1111
    assert states(append, path)[0] == "new"


def test_who_waits_to_append_is_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that appends repeatedly cannot overtake it."""
    waiting = threading.current_thread()
    counts: list[int] = []  # number of appends when `waiting` becomes the next one, and when it appends

    @contextmanager
    def counting_lock(*arguments: Any) -> Iterator[bool]:
        with file_lock(*arguments) as is_held:
            if threading.current_thread() is waiting:
                counts.append(len(appended))
            yield is_held

    monkeypatch.setattr(sys.modules["warpwell.table.convert"], "file_lock", counting_lock)
    path = begin(tmp_path / "d")
    few = MORE.slice(0, 3)
    began, ended, appended = threading.Event(), threading.Event(), []

    def again_and_again() -> None:
        while not ended.is_set() and len(appended) < 500:
            appended.append(ww.table.append(path, few))
            began.set()

    greedy = threading.Thread(target=again_and_again)
    greedy.start()
    assert began.wait(HANG_SECONDS)
    for _ in range(3):
        counts.clear()
        ww.table.append(path, few)
        assert counts[1] - counts[0] <= 1
    ended.set()
    greedy.join(HANG_SECONDS)
    with ww.table.open(path) as t:
        assert t.rows == 900 + 3 * (len(appended) + 3)


def test_a_source_that_fails_in_the_middle(tmp_path: Path) -> None:
    path = begin(tmp_path / "d")

    def batches() -> Iterator[Any]:
        yield from MORE.to_batches()
        raise RuntimeError("the source broke")

    for act in (lambda s: ww.table.append(path, s), lambda s: ww.table.convert(s, path.with_name("new.ww"))):
        with pytest.raises((RuntimeError, ww.errors.FormatError), match="the source broke"):
            act(pa.RecordBatchReader.from_batches(MORE.schema, batches()))
    assert states(append, path)[0] == "old"
    assert [p.name for p in path.parent.iterdir()] == ["t.ww"] and not (path / "1.arrow").exists()
