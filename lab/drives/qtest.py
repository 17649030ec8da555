"""QtestTransport: the NVMe controller of a QEMU whose processors never start.

QEMU's test protocol reads and writes its bus by lines of text over a socket: ``readl ADDRESS`` is answered with
``OK 0x...``, ``writel ADDRESS VALUE`` with ``OK``. The arena is the second BAR of an `ivshmem-plain` device, placed at
the address that it has in this process: an address of the controller is a pointer.

Rules of the socket, which native threads use as well:

- A lock in memory (`pthread_mutex_t`, at the start of the state words) owns it.
- Sends never wait and raise no signal. At most 64 requests are not answered at a time: QEMU stops reading
  until its answers are read, so that both sides would deadlock.
- Answers arrive in order and without identifiers, so they are counted by their ends of line. A native store leaves the
  count of pending answers in the state words, and the next access skips that number.
- After an interrupted access (by an exception of a signal handler), the count of pending answers is unknown. The next
  access stores a new number in the port of configuration addresses, and skips all answers before
  that number.
- Every access has a deadline. A stopped QEMU never answers, so the drive is lost.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from warpwell import errors
from warpwell.drives import DmaArena, Transport
from warpwell.targets import Block, private_block

from . import qtest_store as at

SECONDS = 20.0
"""Timeout of a register access. Other programs may occupy QEMU's processors."""

BAR0 = 0xC000_0000
"""Address of the controller's registers in QEMU's address space."""
NVME_SLOT = 4
"""PCI slot of the controller."""
ARENA_SLOT = 5
"""PCI slot of the arena."""
NVME_IDS = (0x00101B36, 0x58458086)
"""Vendor and device ids of QEMU's controller, by default and with use-intel-id."""
ARENA_IDS = 0x11101AF4

_ENDED = "its QEMU has ended: start a new one"
_EXIT_MILLISECONDS = 100

_marks = itertools.count()

_ERRORCHECK = 2
"""PTHREAD_MUTEX_ERRORCHECK: releasing a lock of another thread has no effect."""

_libc: Any = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class QtestTransport(Transport):
    """The controller of a QEMU.

    Parameters
    ----------
    end : socket.socket
        This process's end of QEMU's test socket; the object owns it.
    arena : DmaArena
        The memory that QEMU maps, too.
    pidfd : int
        QEMU's process; the caller owns the descriptor and keeps it open.
    address : str
        Name of the drive in messages.
    kill : callable
        ``kill()`` ends QEMU and returns after its exit.
    seconds : float
        Deadline of one access.

    Raises
    ------
    DriveLostError
        QEMU does not answer, or has no controller in the expected slot.
    """

    def __init__(
        self,
        end: socket.socket,
        arena: DmaArena,
        pidfd: int,
        *,
        address: str,
        kill: Callable[[], None],
        seconds: float = SECONDS,
    ) -> None:
        super().__init__(address, arena)
        self._socket = end
        self._socket.setblocking(False)
        self._pidfd = pidfd
        self._kill = kill
        self._seconds = seconds
        self._received = b""
        self._in_step = False  # the socket may have been used before
        self._closed = False
        self._state: Block = private_block(8 * at.STATE_WORDS)
        self._state_words = self._state.words
        self._state_words[at.S_SOCKET] = end.fileno()
        self._state_words[at.S_BAR0] = BAR0
        self._state_words[at.S_NANOSECONDS] = int(seconds * 1e9)
        for function, address_of in at.FUNCTIONS.items():
            self._state_words[function] = address_of
        text = self._state.view(np.dtype(np.uint8))[8 * at.S_TEXT :]
        text[:29] = np.frombuffer(b"writel 0x00000000 0x00000000\n", np.uint8)
        self._mutex = ctypes.c_void_p(self._state.address)
        _initialize(self._mutex)
        _all.add(self)
        # One Python thread at a time. If a signal handler takes this lock again, the lock in memory refuses it.
        self._one_thread = threading.RLock()
        try:
            self._place_devices()
        except BaseException:
            self._socket.close()
            raise

    def _place_devices(self) -> None:
        """Assign addresses to registers and arena, as a machine's firmware does."""
        for slot, accepted_ids in ((NVME_SLOT, NVME_IDS), (ARENA_SLOT, (ARENA_IDS,))):
            if (found := self._configuration(slot, 0)) not in accepted_ids:
                raise self.fail(f"slot {slot} of this QEMU has device {found:#010x}: start it by lab.drives.qemu")
        for slot, register, value in (
            (NVME_SLOT, 0x10, BAR0),
            (NVME_SLOT, 0x14, 0),
            (NVME_SLOT, 0x04, 0x0406),  # memory, bus master, no interrupts
            (ARENA_SLOT, 0x18, self.arena.address & 0xFFFFFFFF),
            (ARENA_SLOT, 0x1C, self.arena.address >> 32),
            (ARENA_SLOT, 0x04, 0x0402),
        ):
            self._configure(slot, register, value)

    def _configuration(self, slot: int, register: int) -> int:
        return int(self._request(f"outl 0xcf8 {0x80000000 | slot << 11 | register:#x}", "inl 0xcfc"), 16)

    def _configure(self, slot: int, register: int, value: int) -> None:
        self._request(f"outl 0xcf8 {0x80000000 | slot << 11 | register:#x}", f"outl 0xcfc {value:#x}")

    def set_bus_master(self, on: bool) -> None:
        """Enable or disable the controller's access to memory (tests)."""
        self._configure(NVME_SLOT, 0x04, 0x0406 if on else 0x0402)

    def read32(self, offset: int) -> int:
        return int(self._request(f"readl {BAR0 + offset:#x}"), 16)

    def write32(self, offset: int, value: int) -> None:
        self._request(f"writel {BAR0 + offset:#x} {value:#x}")

    def native_store(self) -> tuple[int, int]:
        return at.store.address, self._state.address

    def examine(self) -> None:
        self._check_process()
        super().examine()

    def _check_process(self) -> None:
        generation = self.generation
        refused = not self._closed and bool(self._state_words[at.S_LOST])
        # The sockets of an exiting process close before its exit is visible.
        if self.failure is None and _readable(self._pidfd, _EXIT_MILLISECONDS if refused else 0):
            self.fail(_ENDED, generation)
        if self.failure is None and refused:
            self.fail("its QEMU did not accept a store to a doorbell", generation)

    def _disable_stores(self) -> None:
        self._state_words[at.S_LOST] = 1

    def _enable_stores(self) -> None:
        self._state_words[at.S_LOST] = self._closed

    def restore(self) -> None:
        if _readable(self._pidfd):
            raise self.fail(_ENDED)
        self._place_devices()

    def reset(self) -> None:
        """End QEMU, and with it its memory and its controller."""
        self.fail("it was reset, which ends its QEMU: start a new one")
        self._kill()
        self.arena.end_quarantine()

    def close(self) -> None:
        with self._one_thread:
            if not self._closed:
                self._closed = True
                self._state_words[at.S_LOST] = 1
                try:
                    with contextlib.suppress(errors.DriveLostError):
                        # A native thread in the middle of a store gives up soon.
                        self._lock(time.monotonic() + 2 * self._seconds)
                finally:
                    self._socket.close()
                    _libc.pthread_mutex_unlock(self._mutex)

    @property
    def closed(self) -> bool:
        """Whether this transport was closed."""
        return self._closed

    def check(self) -> None:
        super().check()
        self._require_open()

    def _require_open(self) -> None:
        if self._closed:
            raise errors.ClosedError(f"drive {self.address} is closed: open it again")

    # -- the socket -----------------------------------------------------------------------------------------------

    def _request(self, *requests: str) -> str:
        """Send requests, each after the previous answer; return the last answer.

        A signal's handler may raise between any two instructions. So the lock is taken inside the ``try`` whose
        ``finally`` releases it. If the thread did not get the lock, the release has no effect.
        """
        self.check()
        with self._one_thread:
            until = time.monotonic() + self._seconds
            try:
                self._lock(until)
                self.check()
                if not self._in_step:
                    self._get_in_step(until)
                self._in_step = False
                while self._state_words[at.S_OWED] > 0:
                    self._line(until)  # a native thread may have read the start of the line
                    self._state_words[at.S_OWED] -= 1
                answer = ""
                for request in requests:
                    self._send(request)
                    answer = self._answer(until)
                self._in_step = True
                return answer
            finally:
                _libc.pthread_mutex_unlock(self._mutex)

    def _lock(self, until: float) -> None:
        left = max(0.0, until - time.monotonic())
        end = time.time() + left  # the C library takes the time of day
        when = _Timespec(int(end), int(end % 1 * 1e9))
        if _libc.pthread_mutex_timedlock(self._mutex, ctypes.byref(when)):
            raise self.fail(
                f"its socket was in use for {left:.1f} s, or by an access that a signal handler interrupted"
            )

    def _get_in_step(self, until: float) -> None:
        self._state_words[at.S_OWED] = 0
        mark = 0x80F0_0000 | (next(_marks) & 0x3FFFF) << 2  # a PCI address on a bus that does not exist
        self._send(f"outl 0xcf8 {mark:#x}")
        self._send("inl 0xcf8")
        while not (line := self._line(until)).startswith("OK 0x") or int(line[3:], 16) != mark:
            pass

    def _answer(self, until: float) -> str:
        line = self._line(until)
        if not line.startswith("OK"):
            raise self.fail(f"its QEMU answers {line!r}")
        return line[3:]

    def _send(self, request: str) -> None:
        self._require_open()
        data = request.encode() + b"\n"
        try:
            if self._socket.send(data, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT) == len(data):
                return
            why = "its QEMU does not read its socket"
        except BlockingIOError:
            why = "its QEMU does not read its socket"
        except OSError as error:
            why = f"its QEMU has ended ({error.strerror}): start a new one"
        raise self.fail(why)

    def _line(self, until: float) -> str:
        """Return the next line that answers a request."""
        while True:
            self._require_open()  # a signal handler may close the transport
            line, end, remaining = self._received.partition(b"\n")
            if end:
                self._received = remaining
                if line.startswith(b"IRQ"):  # an unsolicited report of an interrupt
                    continue
                return line.decode("ascii", "replace")
            self._receive(until)

    def _receive(self, until: float) -> None:
        left = until - time.monotonic()
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLIN)
        except ValueError:
            self._require_open()
            raise
        if left <= 0 or not poll.poll(left * 1000):
            self._check_process()  # the earlier error has a better reason
            raise self.fail_timeout("a register access was", self._seconds)
        try:
            got = self._socket.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            got = b""
        if not got:
            raise self.fail(_ENDED)
        self._received += got


def _initialize(mutex: ctypes.c_void_p) -> None:
    """Initialize a lock that only its owner can release."""
    kind = (ctypes.c_char * 64)()
    _libc.pthread_mutexattr_init(kind)
    _libc.pthread_mutexattr_settype(kind, _ERRORCHECK)
    _libc.pthread_mutex_init(mutex, kind)
    _libc.pthread_mutexattr_destroy(kind)


_all: weakref.WeakSet[QtestTransport] = weakref.WeakSet()


def _after_fork() -> None:
    """Keep native threads of the child from the parent's doorbells, and from a lock that is never released."""
    for transport in list(_all):
        transport._state_words[at.S_LOST] = 1
        _initialize(transport._mutex)


os.register_at_fork(after_in_child=_after_fork)


def _readable(fd: int, milliseconds: int = 0) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(milliseconds))
