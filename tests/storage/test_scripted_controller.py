"""Launches on a controller of another process that answers wrongly: each ends with an error that names the fault.

Nothing hangs, and only bytes of the requested pages change.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import pytest
from tests.harness.arrays.kernels import read, write
from tests.harness.clock import time_passes

import warpwell as ww
from lab.drives.scripted import Answer, ScriptedController
from warpwell import errors
from warpwell._os import clock
from warpwell.queues import layout as at

N = 1 << 15
"""Items of the namespace."""
PAGE = 4096
TIMEOUT = 1000.0
"""Timeout of the drive in seconds on the clock of the test, not in real time."""


@contextmanager
def opened(
    script: Mapping[int, Answer] | None = None,
    always: Answer | None = None,
    *,
    mode: str = "r",
    page: int = PAGE,
    timeout: float = TIMEOUT,
    frames: int = 4,
) -> Iterator[tuple[ScriptedController, ww.Array]]:
    closing = threading.Event()
    with (
        ScriptedController(8 * N, script, always) as drive,
        time_passes(TIMEOUT, closing.is_set),  # closing waits for commands without an answer
        ww.Cache(frames * (page + 8), page_size=page, device="cpu", service=drive, timeout=timeout) as cache,
        ww.open(drive.namespace, mode, dtype=np.int64, cache=cache, name="scripted/1") as array,
    ):
        try:
            yield drive, array
        finally:
            closing.set()


def values(array: ww.Array, rows: np.ndarray) -> np.ndarray:
    out = np.full(len(rows), -1)
    read[len(rows)](array, rows, out)
    return out


def rows_of_pages(count: int, page: int = PAGE) -> np.ndarray:
    return np.arange(count) * (page // 8) + 3


@pytest.mark.parametrize("page", [512, 8192, 65536])
def test_lists_of_pages_say_where_data_are(page: int) -> None:
    with opened(mode="r+", page=page) as (_, array):
        rows = np.random.default_rng(page).integers(0, N, 40)
        assert (values(array, rows) == rows).all()
        write[40](array, rows, 7 * rows)
        array.flush()
        array.evict()
        assert (values(array, rows) == 7 * rows).all()
        assert (values(array, (rows + 1)[~np.isin(rows + 1, rows)] % N) >= 0).all()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Answer(cid=45), "command 45 was not in flight"),
        (Answer(cid=0xFFFF), "command 65535 was not in flight"),
        (Answer(sqid=9), "submission queue 9"),
        (Answer(sqhd=64), "head is 64 of 64"),
        (Answer(sqhd=0xFFFF), "head is 65535 of 64"),
        (Answer(times=2), "was not in flight"),
        (Answer(cid=45, status=0x281), "unrecovered read error"),
    ],
)
def test_a_completion_that_answers_nothing_ends_the_launch(answer: Answer, message: str) -> None:
    with opened({3: answer}) as (_, array):
        pairs = array.cache.pairs
        with pytest.raises(errors.DriveLostError, match=message) as caught:
            for k in range(3):
                values(array, rows_of_pages(8) + k * 8 * PAGE // 8)
        assert "scripted/1" in str(caught.value)
        states = np.concatenate([pairs._id_records(k)[:, at.ID_STATE] for k in range(pairs.count)])
        assert set((states & at.KIND).tolist()) <= {at.FREE, at.ASYNC, at.ORPHAN, at.ORPHAN | at.FOUND}
        with pytest.raises(errors.DriveLostError, match=message):
            values(array, np.array([0]))


STATUSES = (0x001, 0x00B, 0x080, 0x0FF, 0x182, 0x280, 0x281, 0x286, 0x371, 0x7C1, 0x455, 0x4281, 0x7FFF)


def test_a_status_of_each_group_is_told_in_words() -> None:
    with opened({k: Answer(status=status) for k, status in enumerate(STATUSES)}) as (_, array):
        for status in STATUSES:
            with pytest.raises(errors.MediumError, match="reading array 'scripted/1', page 5") as caught:
                values(array, np.array([5 * PAGE // 8]))
            assert caught.value.status == status and f"{status:#06x}" in str(caught.value)
        assert (values(array, rows_of_pages(6)) == rows_of_pages(6)).all()


def test_a_write_that_fails_names_the_page_and_stays_in_the_cache() -> None:
    with opened({1: Answer(status=0x280)}, mode="r+") as (_, array):
        write[1](array, np.array([7]), np.array([70]))
        with pytest.raises(errors.MediumError, match=r"writing array 'scripted/1', page 0 .*write fault"):
            array.flush()
        array.flush()
        array.evict()
        assert values(array, np.array([7])).tolist() == [70]


@pytest.mark.parametrize("answer", [Answer(times=0), Answer(stale=True)], ids=["silent", "of an old phase"])
def test_a_command_without_an_answer_stalls_the_launch(answer: Answer) -> None:
    with opened(always=answer) as (_, array):
        with time_passes(TIMEOUT), pytest.raises(errors.StallError, match="scripted/1"):
            values(array, rows_of_pages(3))
        assert array.cache.pairs.in_use() > 0


def test_an_error_does_not_keep_others_waiting_for_a_silent_controller() -> None:
    with opened({0: Answer(status=0x281)}, Answer(times=0), timeout=5.0) as (_, array):
        with pytest.raises(errors.MediumError, match="unrecovered read error"):
            values(array, rows_of_pages(4))


def test_a_late_answer_frees_what_it_held() -> None:
    with opened({0: Answer(seconds=1e9)}) as (_, array):
        with time_passes(TIMEOUT), pytest.raises(errors.StallError):
            values(array, np.array([9]))
        assert array.cache.pairs.in_use() == 1
        clock.advance(1e9)
        assert values(array, np.array([9, 9 + PAGE])).tolist() == [9, 9 + PAGE]
        array.cache._process_completions()
        assert array.cache.pairs.in_use() == 0


def test_any_head_below_the_depth_is_harmless() -> None:
    script = {k: Answer(sqhd=(7 * k + 63) % 64) for k in range(0, 300, 2)}
    with opened(script) as (_, array):
        for k in range(4):
            rows = rows_of_pages(32) + k
            assert (values(array, rows) == rows).all()


def test_a_head_that_stands_is_a_loss_when_a_thread_has_waited_for_its_turn() -> None:
    with opened(always=Answer(sqhd=0), timeout=5.0) as (_, array):
        with pytest.raises(errors.DriveLostError, match="submission queue head does not move"):
            for k in range(10):
                values(array, rows_of_pages(32) + k)


def test_a_process_that_dies_ends_the_launch_at_once_and_another_takes_its_rings() -> None:
    with opened({2: Answer(dies=True)}) as (_, array):
        with pytest.raises(errors.DriveLostError, match="ended with status 3"):
            values(array, rows_of_pages(4))
        with pytest.raises(errors.DriveLostError):
            values(array, np.array([1]))
        assert array.recover() == []
        pairs = array.cache.pairs
        assert pairs.in_use() == 0 and pairs.loss() is None
        for k in range(5):
            assert (values(array, rows_of_pages(16) + k) == rows_of_pages(16) + k).all()


def test_what_was_written_stays_in_the_cache_of_a_lost_controller() -> None:
    with opened(mode="r+") as (_, array):
        write[2](array, np.array([7, PAGE]), np.array([70, 80]))
        array.cache.pairs.lose("a test has taken it away")
        for use in (array.flush, lambda: values(array, np.array([7]))):
            with pytest.raises(errors.DriveLostError, match="taken it away"):
                use()
        assert array.recover() == []  # no page was written back and evicted
        array.flush()
        array.evict()
        assert values(array, np.array([7, 8, PAGE])).tolist() == [70, 8, 80]
