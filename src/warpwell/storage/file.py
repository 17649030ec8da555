"""FileMedium: a file or block device, read and written by the service threads: by io_uring, or pread and pwrite."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import stat
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import errors
from ..nvme import READ, WRITE
from ..nvme.status import (
    CAPACITY_EXCEEDED,
    DATA_TRANSFER_ERROR,
    INVALID_OPCODE,
    LBA_OUT_OF_RANGE,
    NAMESPACE_NOT_READY,
    NAMESPACE_WRITE_PROTECTED,
    UNRECOVERED_READ_ERROR,
    WRITE_FAULT,
)
from ..targets import bus_error, device, memory_for, native
from ..targets.primitives import SYSTEM, copy_bytes, load_acquire, pread, pwrite
from .commands import (
    ANSWER_WORDS,
    PENDING,
    R_BUFFER,
    R_EXTRA,
    R_NBYTES,
    R_OFFSET,
    R_OP,
    R_TAG,
    decode_command,
    fill_slot,
    record_of,
    release_slot,
    set_word,
    try_slot,
    word,
    write_answer,
    zero_fill,
)
from .medium import Medium, NativeMedium, complete_nothing, raw_bytes
from .page_cache import LOOKUP_WORDS, enable_lookup, page_cache_lookup
from .uring import BATCH, G_SLOTS, Ring, allowed, poll_completions, queue, queued, submit

FD = 0
DIRECT_FD = 1
ALIGNMENT = 2
NBYTES = 3
WRITABLE = 4
LAST_ERRNO = 5
"""The last errno: 0 for none, `SHORT` for a file that ended too early."""
PROBE = 6
"""A byte for a read that only checks the length of the file."""
RING = 7
"""Address of the ring (`uring`), or 0."""
MAPPED = 8
"""Address of the file's bytes in memory, or 0."""
CUT = 9
"""Address of a word that is not 0 once the mapping has failed."""
LOOKUP = 10
"""First word of `page_cache`; its other words follow."""

SYSTEM_PAGE = 4096
"""Bytes of a page of the system's cache."""
SHORT = -1


class FileMedium(Medium):
    """A file or block device.

    Aligned reads, and writes of whole 4 KiB pages, bypass the page cache (O_DIRECT) if the file system allows it. All
    other transfers use the page cache, and so do reads of cached pages if the file is opened read-only (Linux 6.5). A
    read-only file in memory (tmpfs) is mapped, and reads copy from the mapping, at least twice as fast as pread.

    Parameters
    ----------
    path : path-like
        The file must exist; its size never changes. A writable block device is claimed, so that no program can
        mount it.
    writable : bool
    direct : bool, optional
        False: use the page cache. True: raise an error if the file system does not support O_DIRECT, and read from the
        drive even data that is in the page cache. Default: O_DIRECT if possible.
    ring : bool
        True: direct transfers use io_uring, if it is allowed and the file is not in memory (tmpfs). False: they use
        pread and pwrite.
    nbytes : int, optional
        Minimum size of the file, which is also the medium's capacity.

    Attributes
    ----------
    direct : bool
        Whether O_DIRECT is in use.
    alignment : int
        Direct transfers are multiples of this number of bytes; 1 without O_DIRECT.
    ring : bool
        Whether commands go through io_uring.
    bulk_reads : str
        Method of long reads into GPU memory, known after the first such read; part of the description.

    Raises
    ------
    MissingFileError
        The file does not exist.
    FormatError
        The path is a directory or a pipe, the file is shorter than `nbytes`, or no medium is in the device.
    SharingError
        `writable` is true, and the block device is mounted or claimed by another program.
    ReadOnlyError
        `writable` is true, and the block device is read-only.
    ArgumentError
        `direct` is True and not possible.
    OSError
        The file cannot be opened.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        writable: bool = False,
        direct: bool | None = None,
        *,
        nbytes: int | None = None,
        ring: bool = True,
    ) -> None:
        self.path = os.fspath(path)
        self.name = self.path
        self.writable = writable
        self.bulk_reads = ""
        self._absolute_path = os.path.abspath(self.path)  # the program may change its directory
        self._fd = self._direct_fd = -1
        self._ring: Ring | None = None
        self._process = os.getpid()
        self._state = memory_for("cpu").allocate(8 * (LOOKUP + LOOKUP_WORDS))
        try:
            self._fd = _open(self.path, writable)
        except FileNotFoundError:
            raise errors.MissingFileError(
                f"{self.path} does not exist: create it first, or check the path", path=self.path
            ) from None
        except IsADirectoryError:
            raise errors.FormatError(f"{self.path} is a directory: pass a file in it", path=self.path) from None
        try:
            mode = os.fstat(self._fd).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
                raise errors.FormatError(f"{self.path} must be a file or a block device", path=self.path)
            size = self._size()
            if stat.S_ISBLK(mode) and size == 0:
                raise errors.FormatError(
                    f"{self.path} has no bytes: no medium is in it, or nothing is attached", path=self.path
                )
            if nbytes is not None and size < nbytes:
                raise errors.FormatError(
                    f"{self.path} has {size} bytes, but {nbytes} are expected: it is truncated",
                    path=self.path,
                )
            self.nbytes = size if nbytes is None else nbytes
            self.alignment = 1 if direct is False else self._open_direct()
            self.direct = self._direct_fd >= 0
            if direct and not self.direct:
                raise errors.ArgumentError(
                    f"{self.path}: its file system does not support O_DIRECT, or the file is too small: leave "
                    "direct out",
                    name="direct",
                )
            is_in_memory = _in_memory(self._fd)
            self.ring = ring and self.direct and not is_in_memory and allowed() is None
        except BaseException:
            self.close()
            raise
        words = self._state.words
        words[FD], words[DIRECT_FD], words[ALIGNMENT] = self._fd, self._direct_fd, self.alignment
        words[NBYTES], words[WRITABLE] = self.nbytes, writable
        # reading the mapping of a sparse file would allocate its gaps
        is_allocated = 512 * os.fstat(self._fd).st_blocks >= self.nbytes > 0
        is_read_by_default = direct is None and not writable
        self._maps = is_read_by_default and is_allocated and is_in_memory
        # a writable file is not read through the page cache: direct writes would have to drop pages that readers use
        if self.direct and is_read_by_default and not is_in_memory:
            enable_lookup(self._fd, words[LOOKUP:])

    @property
    def description(self) -> str:  # type: ignore[override]
        """One line: the path, and how it is read and written."""
        method = "page cache" if not self.direct else "O_DIRECT, io_uring" if self.ring else "O_DIRECT, pread"
        method = "in memory" if self._maps else method
        return f"file {self.path} ({method}{'; bulk reads ' * bool(self.bulk_reads)}{self.bulk_reads})"

    def native(self) -> NativeMedium:
        """Return the native functions."""
        if self.ring and self._ring is None and self._fd >= 0:
            try:
                self._ring = Ring()
            except OSError:
                self.ring = False  # no memory or descriptors for a ring; a later call may succeed
            else:
                self._state.words[RING] = self._ring.address
        if self._maps and not self._state.words[MAPPED] and self._fd >= 0:
            self._map()
        complete = 0 if self._ring is None else ring_complete.address
        return NativeMedium(file_start.address, complete, self._state.address)

    def _map(self) -> None:
        """Map the file for native reads, as long as this object lives."""
        address = bus_error.map_guarded(self._fd, self.nbytes, bus_error.REST_OF_ZEROS)
        if address is None:
            self._maps = False
            return
        self._state.words[CUT] = bus_error.failure_word(address)
        self._state.words[MAPPED] = address
        weakref.finalize(self, bus_error.unmap, address, self.nbytes).atexit = False

    def host_memory(self) -> int:
        """Return the address of the mapped file if it is in memory (tmpfs) and read-only; else 0."""
        if not self._maps or self._fd < 0:
            return 0
        self.native()
        return int(self._state.words[MAPPED])

    def require_memory(self) -> None:
        """Raise MediumError if the file was truncated while its mapping was read."""
        cut = int(self._state.words[CUT])
        if cut and ctypes.c_int64.from_address(cut).value:
            raise self._failed(READ, 0, SHORT)

    def read(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Read with pread."""
        self._check_open()
        inside = self._inside(offset, nbytes)
        out = np.zeros(nbytes, np.uint8)
        self.read_into(offset, out[:inside])
        return out

    def read_into(self, offset: int, out: NDArray[np.uint8]) -> None:
        """Fill an array with the bytes from byte `offset` on, which are in the file."""
        self._check_open()
        view, done = out.data, 0
        while done < len(view):
            try:
                got = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                self._check_open()
                raise self._failed(READ, offset, error.errno or errno.EIO) from error
            self._check_open()  # after a close in another thread, the descriptor may belong to another file
            if got == 0:
                raise self._failed(READ, offset, SHORT)
            done += got

    def fileno(self) -> int:
        """Return the descriptor of the file; transfers through it use the page cache."""
        self._check_open()
        return self._fd

    def direct_fileno(self) -> int:
        """Return the descriptor that bypasses the page cache, or -1 if commands do not use O_DIRECT."""
        return -1 if self._maps else self._direct_fd

    def write(self, offset: int, data: NDArray[Any]) -> None:
        """Write with pwrite; raise if the file has been truncated."""
        self._check_open()
        self._check_writable()
        raw = raw_bytes(data)
        raw = raw[: self._inside(offset, raw.nbytes)]
        if raw.nbytes and self._size() < self.nbytes:
            raise self._failed(WRITE, offset, SHORT)
        done = 0
        while done < raw.nbytes:
            try:
                done += os.pwritev(self._fd, [raw[done:].data], offset + done)
            except OSError as error:
                raise self._failed(WRITE, offset, error.errno or errno.EIO) from error

    def sync(self) -> None:
        """Call fdatasync, then check that the file still exists and was not truncated."""
        self._check_open()
        if self.writable:
            try:
                os.fdatasync(self._fd)
            except OSError as error:
                raise self._failed(WRITE, 0, error.errno or errno.EIO) from error
            self._check_path()
        size = self._size()
        if size < self.nbytes:
            raise errors.FormatError(
                f"{self.path} was truncated from {self.nbytes} to {size} bytes while it was open: restore it",
                path=self.path,
            )

    def close(self) -> None:
        """Close the file; first wait up to 30 s for commands in flight. A forked process only closes descriptors."""
        # a forked process shares the state and the ring with the process that opened the file
        is_owner = os.getpid() == self._process
        if self._ring is not None and is_owner:
            ring, self._ring = self._ring, None
            answer = np.zeros(ANSWER_WORDS, np.int64)
            ring.drain(lambda: bool(ring_complete(self._state.address, answer.ctypes.data)), 30.0)
            self._state.words[RING] = 0  # clear this first: no thread may find an unmapped ring
            ring.close()
        elif self._ring is not None:
            self._ring.unmap()
            self._ring = None
        descriptors = [fd for fd in (self._fd, self._direct_fd) if fd >= 0]
        self._fd = self._direct_fd = -1
        if is_owner:
            # do this before the descriptors can belong to other files
            self._state.words[[FD, DIRECT_FD]], self._state.words[MAPPED] = -1, 0
        for fd in descriptors:
            os.close(fd)

    def last_error(self) -> str | None:
        """Return a description of the last failure, or None."""
        code = int(self._state.words[LAST_ERRNO])
        if code == 0:
            return None
        if code == SHORT:
            return f"{self.path} ended before byte {self.nbytes}: it was truncated while it was open, restore it"
        advice = ": free some space" if code in (errno.ENOSPC, errno.EDQUOT) else ""
        return f"{self.path}: {os.strerror(code)}{advice}"

    def _size(self) -> int:
        # Unlike fstat, this is correct for block devices too. The file position is not used.
        return os.lseek(self._fd, 0, os.SEEK_END)

    def _check_open(self) -> None:
        if self._fd < 0:
            raise errors.ClosedError(f"{self.path} is closed: open it again")

    def _check_path(self) -> None:
        """Raise if another file has replaced this one at its path: writes would be lost."""
        try:
            now = os.stat(self._absolute_path)
        except OSError:
            return
        opened = os.fstat(self._fd)
        if (now.st_dev, now.st_ino) != (opened.st_dev, opened.st_ino):
            raise errors.FormatError(
                f"{self.path} was replaced by another file while it was open: writes to the old file are lost "
                "when it is closed; copy it first",
                path=self.path,
            )

    def _open_direct(self) -> int:
        """Open the file with O_DIRECT; return the required alignment, or 1 if O_DIRECT is not possible."""
        try:
            mode = os.O_RDWR if self.writable else os.O_RDONLY
            fd = os.open(self.path, mode | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:
            return 1
        with mmap.mmap(-1, 8192) as raw, memoryview(raw) as page:
            for alignment in (512, 4096):
                if self.nbytes < 2 * alignment:
                    break
                try:
                    got = os.preadv(fd, [page[alignment : 2 * alignment]], alignment)
                except OSError:
                    continue
                if got == alignment:
                    self._direct_fd = fd
                    return alignment
        os.close(fd)
        return 1

    def _failed(self, op: int, offset: int, code: int) -> Exception:
        self._state.words[LAST_ERRNO] = code
        status = file_status(op, code)
        text = self.last_error() or ""
        if status == CAPACITY_EXCEEDED:
            return errors.StorageFullError(text, path=self.path)
        return errors.MediumError(text, lba=offset // 512, status=status)


@device
def file_status(op: int, code: int) -> int:
    """Return the NVMe status for an errno (or `SHORT`)."""
    if code == 28 or code == 122 or code == 27:  # ENOSPC, EDQUOT, EFBIG
        return CAPACITY_EXCEEDED
    if code == 9 or code == 19 or code == 6:  # EBADF, ENODEV, ENXIO: closed, or the drive was removed
        return NAMESPACE_NOT_READY
    if code == 14:  # EFAULT
        return DATA_TRANSFER_ERROR
    if op == READ:
        return UNRECOVERED_READ_ERROR
    if code == 1 or code == 13 or code == 30:  # EPERM, EACCES, EROFS
        return NAMESPACE_WRITE_PROTECTED
    return WRITE_FAULT


@device
def file_failed(state: int, op: int, code: int) -> int:
    """Store the errno for the host and return the status."""
    set_word(state, LAST_ERRNO, code)
    return file_status(op, code)


@device
def extent_mask(state: int, op: int) -> int:
    """Return the mask of the bits that must be 0 in offset and length of a direct transfer.

    A direct write covers whole pages of the system's cache. If it covered a part of a page and a write through that
    cache covered the rest, the system could not drop the page, and would report EIO at the next fdatasync.
    """
    mask = word(state, ALIGNMENT) - 1
    if op == WRITE:
        mask |= SYSTEM_PAGE - 1
    return mask


@device
def transfer(state: int, op: int, buffer: int, nbytes: int, offset: int, direct: int) -> int:
    """Transfer all bytes; return 0, -errno, or 1 if the file ends too early. `direct`: DIRECT_FD or -1."""
    mask = extent_mask(state, op)
    done = 0
    while done < nbytes:
        fd = word(state, FD)
        count = nbytes - done
        aligned = (offset + done) & mask == 0 and (buffer + done) & (word(state, ALIGNMENT) - 1) == 0 and count > mask
        if direct >= 0 and aligned:
            fd = direct
            count = count & ~mask
        got = 0
        if op == READ:
            got = pread(fd, buffer + done, count, offset + done)
        else:
            got = pwrite(fd, buffer + done, count, offset + done)
        if got > 0:
            done += got
        elif got == -22 and fd == direct:  # EINVAL: the file needs more alignment than the probe found
            direct = -1
        elif got == 0:
            return 1
        elif got != -4:  # EINTR
            return got
    return 0


def _open(path: str, writable: bool) -> int:
    """Open a file; claim a block device that is to be written."""
    flags = os.O_CLOEXEC | (os.O_RDWR if writable else os.O_RDONLY)
    device = writable and os.path.exists(path) and stat.S_ISBLK(os.stat(path).st_mode)
    if device and _is_read_only(path):  # some kernels open a read-only device for writing anyway
        raise errors.ReadOnlyError(f'{path} is a read-only device: open it with mode "r"')
    try:
        # without O_CREAT, O_EXCL claims a block device: it is not mounted, not swap space, and in no volume
        return os.open(path, flags | (os.O_EXCL if device else 0))
    except OSError as error:
        if device and error.errno == errno.EBUSY:
            raise errors.SharingError(
                f'{path} is {_user_of(path)}: writing to it would destroy its data; open it with mode "r", or '
                "free it first"
            ) from None
        raise


def _numbers(path: str) -> str:
    found = os.stat(path).st_rdev
    return f"{os.major(found)}:{os.minor(found)}"


def _user_of(path: str) -> str:
    """Return a description of the user of a block device, for messages."""
    disk = os.path.realpath(f"/sys/dev/block/{_numbers(path)}")
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8") as mounts:
        for line in mounts:
            fields = line.split()
            # a mounted partition is also a user of its disk
            if (os.path.realpath(f"/sys/dev/block/{fields[2]}") + "/").startswith(disk + "/"):
                return f"mounted at {fields[4]}"
    return "in use: by the system, by another program, or by an array of this program"


def _is_read_only(path: str) -> bool:
    try:
        with open(f"/sys/dev/block/{_numbers(path)}/ro", encoding="ascii") as file:
            return file.read().strip() == "1"
    except OSError:
        return False


@device
def was_cut(state: int) -> bool:
    """Return whether the file became shorter: a write would restore its length, with zeros in place of data."""
    return pread(word(state, FD), state + 8 * PROBE, 1, word(state, NBYTES) - 1) == 0


def _in_memory(fd: int) -> bool:
    """Return whether a file is stored in memory: on tmpfs, ramfs or hugetlbfs."""
    found = (ctypes.c_long * 64)()
    if ctypes.CDLL(None).fstatfs(fd, found) != 0:
        return False
    return found[0] in (0x01021994, 0x858458F6, 0x958458F6)


@device
def transfer_at_once(state: int, command: int, tag: int) -> int:
    """Transfer the bytes before returning (never pending): the interpreter models no other system calls."""
    op, offset, nbytes, buffer = decode_command(command)
    return run_command(state, op, offset, nbytes, buffer, word(state, DIRECT_FD))


@device
def choose_path(state: int, op: int, offset: int, nbytes: int) -> int:
    """Return the descriptor for a transfer: DIRECT_FD, or -1 for cached pages."""
    inside = min(nbytes, word(state, NBYTES) - offset)
    if op == READ and offset >= 0 and inside > 0 and page_cache_lookup(state + 8 * LOOKUP, offset, inside):
        return -1
    return word(state, DIRECT_FD)


@device
def run_command(state: int, op: int, offset: int, nbytes: int, buffer: int, direct: int) -> int:
    """Transfer all bytes of a command in the calling thread; return the status."""
    if op != READ and op != WRITE:
        return INVALID_OPCODE
    if offset < 0 or nbytes < 0:
        return LBA_OUT_OF_RANGE
    size = word(state, NBYTES)
    inside = max(0, min(nbytes, size - offset))
    if op == WRITE:
        if word(state, WRITABLE) == 0:
            return NAMESPACE_WRITE_PROTECTED
        if inside > 0 and was_cut(state):
            return file_failed(state, op, SHORT)
    got = 0
    if op != READ or inside == 0 or not copied(state, offset, inside, buffer):
        got = transfer(state, op, buffer, inside, offset, direct)
    if got != 0:
        return file_failed(state, op, SHORT if got > 0 else -got)
    if op == READ:
        zero_fill(buffer + inside, nbytes - inside)
    return 0


@device
def copied(state: int, offset: int, nbytes: int, buffer: int) -> bool:
    """Copy bytes of a mapped file; return False if the file is not mapped or was truncated."""
    base = word(state, MAPPED)
    if base == 0:
        return False
    copy_bytes(buffer, base + offset, nbytes)
    return load_acquire(word(state, CUT), SYSTEM) == 0


@device
def for_ring(state: int, op: int, offset: int, inside: int, buffer: int) -> bool:
    """Return whether the ring can carry a command."""
    if word(state, RING) == 0:
        return False
    if op != READ and (op != WRITE or word(state, WRITABLE) == 0):
        return False
    aligned = (offset | inside) & extent_mask(state, op) == 0 and buffer & (word(state, ALIGNMENT) - 1) == 0
    return offset >= 0 and inside > 0 and aligned and word(state, DIRECT_FD) >= 0


@native(interpreted=transfer_at_once)
def file_start(state: int, command: int, tag: int) -> int:
    """Queue a command and return PENDING, or run it if the ring cannot carry it."""
    op, offset, nbytes, buffer = decode_command(command)
    inside = max(0, min(nbytes, word(state, NBYTES) - offset))
    direct = choose_path(state, op, offset, nbytes)
    if direct < 0 or not for_ring(state, op, offset, inside, buffer):
        return run_command(state, op, offset, nbytes, buffer, direct)
    if op == WRITE and was_cut(state):
        return file_failed(state, op, SHORT)
    ring = word(state, RING)
    table = word(ring, G_SLOTS)
    slot = try_slot(table)
    if slot < 0:
        return run_command(state, op, offset, nbytes, buffer, direct)
    record = fill_slot(table, slot, tag, op, offset, inside, buffer, 1)
    set_word(record, R_EXTRA, nbytes - inside)
    queue(ring, word(state, DIRECT_FD), slot)
    if queued(ring) >= BATCH:
        submit(ring)
    return PENDING


@device
def settle(state: int, slot: int, result: int, answer: int) -> bool:
    """Answer a command that the kernel completed with `result`; transfer the rest of it. Return True."""
    table = word(word(state, RING), G_SLOTS)
    record = record_of(table, slot)
    op = word(record, R_OP)
    inside = word(record, R_NBYTES)
    buffer = word(record, R_BUFFER)
    offset = word(record, R_OFFSET)
    tag = word(record, R_TAG)
    padding = word(record, R_EXTRA)
    release_slot(table, slot)
    status = 0
    again = result == -4 or result == -11 or result == -22 or result == -125  # EINTR, EAGAIN, EINVAL, ECANCELED
    if result < 0 and not again:
        status = file_failed(state, op, -result)
    elif result == 0:
        status = file_failed(state, op, SHORT)
    elif result < inside:
        done = max(0, result)
        got = transfer(state, op, buffer + done, inside - done, offset + done, word(state, DIRECT_FD))
        if got != 0:
            status = file_failed(state, op, SHORT if got > 0 else -got)
    if op == READ and status == 0:
        zero_fill(buffer + inside, padding)
    return write_answer(answer, tag, status, 0)


@native(interpreted=complete_nothing)
def ring_complete(state: int, answer: int) -> bool:
    """Submit queued commands to the kernel, and answer one that has completed; return whether there was one."""
    ring = word(state, RING)
    if ring == 0:
        return False
    submit(ring)
    found = poll_completions(ring)
    if found < 0:
        return False
    result = found & 0xFFFFFFFF
    if result >= 0x80000000:
        result -= 0x100000000
    return settle(state, found >> 32, result, answer)
