"""Commands of direct files copy what the page cache holds, and leave the rest to the drive."""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from warpwell.nvme import READ, UNRECOVERED_READ_ERROR
from warpwell.storage import FileMedium, page_cache
from warpwell.storage.file import DIRECT_FD, LOOKUP
from warpwell.testing.media import HostBytes, drive

pytestmark = pytest.mark.skipif(
    not page_cache.allowed(), reason="the kernel does not report the content of its page cache"
)

PAGES = 256


def has_lookup(medium: FileMedium) -> bool:
    """Return whether commands look for pages in the page cache."""
    return bool(medium._state.words[LOOKUP + page_cache.L_SYSCALL])


def held(path: Path, first: int, count: int) -> int:
    """Return how many of these pages the page cache holds."""
    arguments = (ctypes.c_uint64 * 7)(4096 * first, 4096 * count)
    with path.open("rb") as file:
        assert (
            ctypes.CDLL(None).syscall(page_cache.CACHESTAT, file.fileno(), arguments, ctypes.byref(arguments, 16), 0)
            == 0
        )
    return int(arguments[2])


def keep(path: Path, *pages: int) -> None:
    """Have only these pages in the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for page in pages:
            os.pread(file.fileno(), 4096, 4096 * page)
    if held(path, 0, PAGES) != len(pages):
        pytest.skip("the page cache of this file system ignores advice")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    np.arange(PAGES * 512, dtype=np.int64).tofile(tmp_path / "file.bin")
    return tmp_path / "file.bin"


@pytest.fixture
def blind(path: Path) -> Iterator[FileMedium]:
    """Yield a medium whose direct descriptor fails, so that it reads from the page cache."""
    with FileMedium(path) as medium:
        if not has_lookup(medium):
            pytest.skip("transfers of this file system are not direct")
        medium.native()
        state = medium._state.words
        own_fd, state[DIRECT_FD] = int(state[DIRECT_FD]), os.open("/dev/null", os.O_RDONLY)
        yield medium
        os.close(int(state[DIRECT_FD]))
        state[DIRECT_FD] = own_fd


def reads(buffer: HostBytes, pages: Any, count: int = 1) -> list[tuple[int, int, int, int]]:
    return [(READ, 4096 * page, 4096 * count, buffer.address + 4096 * page) for page in pages]


def looks_again(medium: FileMedium) -> None:
    medium._state.words[LOOKUP + page_cache.L_SKIP] = 0


def test_what_it_holds_is_not_read_from_the_drive(path: Path, blind: FileMedium) -> None:
    buffer = HostBytes(4096 * PAGES)
    assert drive(blind, reads(buffer, range(PAGES)), threads=2) == [0] * PAGES
    assert (buffer.bytes.view(np.int64) == np.arange(PAGES * 512)).all()


def test_what_it_does_not_hold_is_and_stays_out(path: Path, blind: FileMedium) -> None:
    buffer = HostBytes(4096 * PAGES)
    keep(path, 0, 1, 2, 3, 5)
    for first, count, status in ((0, 4, 0), (2, 4, UNRECOVERED_READ_ERROR), (4, 1, UNRECOVERED_READ_ERROR), (5, 1, 0)):
        looks_again(blind)
        assert drive(blind, reads(buffer, [first], count)) == [status], f"{count} pages from {first} on"
    assert held(path, 0, PAGES) == 5  # a read through the page cache would have cached more pages


def test_looks_become_rare_where_nothing_is_found(path: Path) -> None:
    buffer = HostBytes(4096 * PAGES)
    with FileMedium(path) as medium:
        if not has_lookup(medium):
            pytest.skip("transfers of this file system are not direct")
        state = medium._state.words
        keep(path)
        gaps = []
        for page in range(200):
            assert drive(medium, reads(buffer, [page])) == [0]
            gaps.append(int(state[LOOKUP + page_cache.L_GAP]))
        assert gaps[-1] == page_cache.GAP_MAX == max(gaps) and len(set(gaps)) == 6
        keep(path, *range(PAGES))
        for page in range(page_cache.GAP_MAX + 1):
            assert drive(medium, reads(buffer, [page])) == [0]
        assert state[LOOKUP + page_cache.L_GAP] == 0
    assert (buffer.bytes.view(np.int64)[: 200 * 512] == np.arange(200 * 512)).all()


def test_who_looks(path: Path) -> None:
    with FileMedium(path, writable=True) as medium:  # direct writes drop pages that a reader may be copying
        assert not has_lookup(medium)
    with FileMedium(path, direct=True) as medium:
        assert not has_lookup(medium)
    with FileMedium(path, direct=False) as medium:
        assert not has_lookup(medium)


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="/dev/shm cannot be written")
def test_files_in_memory_are_not_looked_for() -> None:
    file = Path("/dev/shm") / f"warpwell-look-{os.getpid()}"
    try:
        file.write_bytes(bytes(1 << 16))
        with FileMedium(file) as medium:
            assert not has_lookup(medium)
    finally:
        file.unlink()


def test_a_file_that_was_cut_says_so(path: Path, blind: FileMedium) -> None:
    buffer = HostBytes(4096 * PAGES)
    os.truncate(path, 4096 * 8)
    looks_again(blind)
    assert drive(blind, reads(buffer, [20])) == [UNRECOVERED_READ_ERROR]
