"""`fetch`: pieces of files, as addresses in memory.

The address of a piece whose pages are in the page cache is in the mapping of the file. The other pieces are merged to
runs over gaps that are cheaper to read than another command (`read_gap`), and `THREADS` threads read the runs to
private memory, each one command at a time. Sparse pieces are read directly, past the page cache, in multiples of the
drive's block, 512 bytes or 4 KiB; other pieces in pages of 4 KiB through the page cache, where the next fetch finds
them. Files are read through descriptors of this module, so that closing a file, or a fork, disturbs no fetch.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ...storage import is_in_page_cache
from ...storage.commands import set_word, word
from ...targets import device, native
from ...targets.primitives import SYSTEM, fetch_add, load_relaxed, load_weak_as, pread
from ..mapping import Mapping
from .host import MAX_COMMAND_BYTES, commands_of, copy_small, read_gap, runs_of
from .tasks import ChunkedTask, worker_group

THREADS = 32
DIRECT, PAGE = 512, mmap.PAGESIZE
SPARSE_FRACTION = 4
"""Pieces are sparse if they take less than one part in this many of the pages that they touch."""
WARM_FRACTION = 4
"""If fewer than one piece in this many is absent, absent pieces are read through the page cache: the next fetch finds
them."""
STALL_SECONDS = 60.0
"""Time without the end of a command after which a drive is given up."""

W_TABLE, W_COUNT, W_NEXT, W_STOP, W_ERROR, W_FAILED, W_DONE, STATE_WORDS = range(8)
R_FD, R_OFFSET, R_NBYTES, R_NEEDED, R_BUFFER, ROW_WORDS = range(6)
SHORT = 1 << 20
"""Not an errno: the file ended too early."""
I8 = np.dtype(np.int64)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


@dataclass
class Pieces:
    """Pieces of a file: piece k has ``sizes[k]`` bytes from byte ``starts[k]``.

    Attributes
    ----------
    mapping : Mapping
    fileno : callable
        Returns the descriptor of the file, or raises.
    path : str
    nbytes : int
        Size of the file.
    starts : ndarray of int64
    sizes : int or ndarray of int64
        Not 0.
    direct : bool or None
        Whether the file is read past the page cache, if that is possible; None: if the pieces are sparse, unless the
        page cache has nearly all of them.
    parts : sequence of int
        First pieces of parts of the file, if starts ascend. Pages between parts are not looked up in the page cache.
    addresses : ndarray of int64
        Addresses of the pieces after `fetch`, as long as this object lives.
    read, commands : int
        Bytes of the runs of all pieces, and the number of commands that read them.
    from_storage : int
        Bytes of the runs of the pieces that are not in the page cache.
    """

    mapping: Mapping
    fileno: Callable[[], int]
    path: str
    nbytes: int
    starts: NDArray[np.int64]
    sizes: Any
    direct: bool | None = False
    parts: Sequence[int] = (0,)
    addresses: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    read: int = 0
    commands: int = 0
    from_storage: int = 0
    keep: Any = None

    def items(self) -> NDArray[np.uint8]:
        """Return a copy of the pieces, one after another; shape (pieces, size) if they have one size."""
        count = len(self.starts)
        sizes = np.ascontiguousarray(np.broadcast_to(self.sizes, count), np.int64)
        out = np.empty(int(sizes.sum()), np.uint8)
        _copy_pieces(self.addresses.ctypes.data, sizes.ctypes.data, out.ctypes.data, count)
        return out.reshape(count, self.sizes) if isinstance(self.sizes, int) else out


def fetch(requests: Sequence[Pieces], *, plan_only: bool = False, is_counted: bool = True) -> None:
    """Load pieces into memory, or with `plan_only` only count the bytes and commands of the reads.

    Without `is_counted`, bytes and commands are not counted if the page cache has all pieces.

    Raises
    ------
    MediumError
        A file was truncated, or cannot be read.
    """
    plans = []
    for pieces in requests:
        if len(pieces.starts):
            plans.append((pieces, *_plan(pieces, is_counted)))
    if plan_only:
        return
    total = sum(int(lengths.sum()) for *_, lengths in plans)
    if not total:
        return
    room = np.empty(total + PAGE, np.uint8)
    at = -(-int(room.ctypes.data) // PAGE) * PAGE
    rows, opened = [], dict[int, str]()
    try:
        for pieces, absent, is_direct, run_of, begins, lengths in plans:
            if not len(absent):
                continue
            buffers = at + np.cumsum(lengths) - lengths
            pieces.addresses[absent] = buffers[run_of] + pieces.starts[absent] - begins[run_of]
            pieces.keep = room
            descriptor = _descriptor(pieces, is_direct)
            opened[descriptor] = pieces.path
            rows.append(_rows(descriptor, pieces.nbytes, begins, lengths, buffers))
            at += int(lengths.sum())
        wrong = _read(np.concatenate(rows), room)
    finally:
        for descriptor in opened:
            os.close(descriptor)
    if wrong is not None:
        code, where = wrong
        path, offset = opened[where[R_FD]], int(where[R_OFFSET])
        reason = "it was truncated while it was open: restore it" if code == SHORT else os.strerror(code)
        raise errors.MediumError(f"{path}: reading byte {offset} failed: {reason}", lba=offset // 512)


def read_ahead(requests: Sequence[Pieces], *, is_counted: bool = True) -> None:
    """Have the system begin to read pieces into its page cache; count as `fetch` does."""
    for pieces in requests:
        pieces.direct = False
        if len(pieces.starts):
            _, _, _, begins, lengths = _plan(pieces, is_counted)
            _, offsets, sizes = commands_of(begins, lengths) if len(begins) else (begins,) * 3
            for offset, nbytes in zip(offsets.tolist(), sizes.tolist(), strict=True):
                os.posix_fadvise(pieces.fileno(), offset, nbytes, os.POSIX_FADV_WILLNEED)


def _plan(pieces: Pieces, is_counted: bool) -> tuple[Any, ...]:
    """Return the pieces that are not in memory; whether they are read directly; their runs; starts, bytes of runs."""
    pieces.addresses = pieces.mapping.address + pieces.starts
    starts, ends, order = pieces.starts, pieces.starts + pieces.sizes, None
    if (starts[1:] < starts[:-1]).any():
        order = np.argsort(starts, kind="stable")
        starts, ends, pieces.parts = starts[order], ends[order], (0,)
    absent = np.flatnonzero(_absent(pieces, starts, ends))
    if not (len(absent) or is_counted):
        return absent, False, absent, absent, absent
    direct_unit = 0
    if pieces.direct or (pieces.direct is None and _are_sparse(starts, ends)):
        direct_unit = _direct_unit(pieces)
    unit, gap = direct_unit or PAGE, read_gap(direct=direct_unit > 0)
    run_of, begins, lengths = runs_of(starts, ends, unit, gap)
    pieces.read, pieces.commands = _bytes_of(pieces, begins, lengths), int((-(-lengths // MAX_COMMAND_BYTES)).sum())
    if not len(absent):
        return absent, direct_unit > 0, absent, absent, absent
    if len(absent) < len(ends):
        if pieces.direct is None and WARM_FRACTION * len(absent) < len(ends):
            direct_unit, unit, gap = 0, PAGE, read_gap(direct=False)
        run_of, begins, lengths = runs_of(starts[absent], ends[absent], unit, gap)
    pieces.from_storage = _bytes_of(pieces, begins, lengths)
    return absent if order is None else order[absent], direct_unit > 0, run_of, begins, lengths


def _are_sparse(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> bool:
    """Return True if pieces take a small part of the pages of the page cache that they touch."""
    _, _, lengths = runs_of(starts, ends, PAGE, 0)
    return bool(SPARSE_FRACTION * (ends - starts).sum() < lengths.sum())


def _bytes_of(pieces: Pieces, begins: NDArray[np.int64], lengths: NDArray[np.int64]) -> int:
    return int((np.minimum(begins + lengths, pieces.nbytes) - begins).sum())


def _rows(
    descriptor: int, nbytes: int, begins: NDArray[np.int64], lengths: NDArray[np.int64], buffers: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the commands of runs, as rows of the table of `read_share`."""
    run, offsets, sizes = commands_of(begins, lengths)
    rows = np.empty((len(run), ROW_WORDS), np.int64)
    rows[:, R_FD] = descriptor
    rows[:, R_OFFSET], rows[:, R_NBYTES] = offsets, sizes
    rows[:, R_NEEDED] = np.minimum(sizes, nbytes - offsets)
    rows[:, R_BUFFER] = buffers[run] + offsets - begins[run]
    return rows


def _absent(pieces: Pieces, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which pieces have a page that is not in the page cache."""
    if not pieces.mapping.reports_residency:
        return np.ones(len(ends), np.bool_)
    edges = [*pieces.parts, len(ends)]
    found = [_absent_part(pieces, starts[first:end], ends[first:end]) for first, end in pairwise(edges)]
    return found[0] if len(found) == 1 else np.concatenate(found)


def _absent_part(pieces: Pieces, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.bool_]:
    low = int(starts[0]) // PAGE * PAGE
    count = -(-int(ends.max()) // PAGE) - low // PAGE
    if is_in_page_cache(pieces.fileno(), low, count):
        return np.zeros(len(ends), np.bool_)
    residency = np.zeros(count, np.uint8)
    if _libc.mincore(pieces.mapping.address + low, count * PAGE, residency.ctypes.data):
        return np.ones(len(ends), np.bool_)
    first, last = (starts - low) // PAGE, np.maximum(ends - 1 - low, 0) // PAGE
    absent_before = np.concatenate(([0], np.cumsum(residency & 1 == 0)))
    return np.asarray(absent_before[last + 1] > absent_before[first])


# -- how a file is read -------------------------------------------------------------------------------------------

_direct_units: dict[int, int] = {}


def _direct_unit(pieces: Pieces) -> int:
    """Return the shortest read past the page cache on the file's device, 512 bytes or 4 KiB, or 0; tried once."""
    device_number = os.fstat(pieces.fileno()).st_dev
    if device_number not in _direct_units:
        if pieces.nbytes < 2 * PAGE:
            return 0
        _direct_units[device_number] = next((unit for unit in (DIRECT, PAGE) if _reads_directly(pieces, unit)), 0)
    return _direct_units[device_number]


def _reads_directly(pieces: Pieces, unit: int) -> bool:
    try:
        descriptor = _descriptor(pieces, is_direct=True)
    except OSError:
        return False
    try:
        with mmap.mmap(-1, 2 * PAGE) as room, memoryview(room) as view, view[unit : 2 * unit] as part:
            return os.preadv(descriptor, [part], unit) == unit
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _descriptor(pieces: Pieces, is_direct: bool) -> int:
    """Return a new descriptor of the file, so that no other code closes it and advice affects only it."""
    flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if is_direct else 0)
    try:
        descriptor = os.open(f"/proc/self/fd/{pieces.fileno()}", flags)
    except OSError:  # no /proc
        if is_direct:
            raise
        return os.dup(pieces.fileno())
    if not is_direct:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # nothing is read ahead
    return descriptor


def _read(rows: NDArray[np.int64], keep: Any) -> tuple[int, NDArray[np.int64]] | None:
    """Carry out commands; return the errno and the row of the first that failed, or None.

    Ctrl-C is raised here; threads that are in a command then end it, and keep the memory to which it writes.
    """
    state = np.zeros(STATE_WORDS, np.int64)
    state[W_TABLE], state[W_COUNT] = rows.ctypes.data, len(rows)
    share = _read_share.load()

    def run(chunk: int, references: Any = (rows, keep)) -> None:
        share(state.ctypes.data)

    task = ChunkedTask(min(THREADS, len(rows)), run, worker_group(Pieces, THREADS))
    done = -1
    try:
        while not task.done():
            with contextlib.suppress(TimeoutError):
                task.exception(STALL_SECONDS)
            if not task.done() and done == state[W_DONE]:
                raise errors.StallError(f"a drive completed no read for {STALL_SECONDS:g} s: check the system log")
            done = int(state[W_DONE])
    except BaseException:
        state[W_STOP] = 1
        task.cancel()
        concurrent.futures.wait([task], 1.0)  # no read should start when the caller closes descriptors
        raise
    task.result()
    return (int(state[W_ERROR]), rows[state[W_FAILED]]) if state[W_ERROR] else None


@device
def read_share(state: int) -> int:
    """Carry out commands of the table until none is left (thread; several share a table)."""
    while load_relaxed(state + 8 * W_STOP, SYSTEM) == 0:
        k = fetch_add(state + 8 * W_NEXT, 1, SYSTEM)
        if k >= word(state, W_COUNT):
            break
        row = word(state, W_TABLE) + 8 * ROW_WORDS * k
        needed = load_weak_as(row + 8 * R_NEEDED, I8)
        done = 0
        while done < needed:
            done = done & -512  # direct reads begin there
            got = pread(
                load_weak_as(row + 8 * R_FD, I8),
                load_weak_as(row + 8 * R_BUFFER, I8) + done,
                load_weak_as(row + 8 * R_NBYTES, I8) - done,
                load_weak_as(row + 8 * R_OFFSET, I8) + done,
            )
            if got == -4:  # EINTR
                continue
            if got < 0 or (got & -512 == 0 and done + got < needed):
                set_word(state, W_FAILED, k)
                set_word(state, W_ERROR, -got if got < 0 else SHORT)
                set_word(state, W_STOP, 1)
                break
            done += got
        fetch_add(state + 8 * W_DONE, 1, SYSTEM)
    return 0


_read_share = native(read_share)


@device
def copy_pieces(addresses: int, sizes: int, out: int, count: int) -> int:
    """Copy pieces, one after another (thread)."""
    to = out
    for k in range(count):
        nbytes = load_weak_as(sizes + 8 * k, I8)
        copy_small(to, load_weak_as(addresses + 8 * k, I8), nbytes)
        to += nbytes
    return 0


_copy_pieces = native(copy_pieces)
