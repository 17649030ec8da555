"""`DoorbellForwarder`: copies the doorbell words of rings to the doorbell registers of a controller.

The doorbells of a ring are 64-bit words in memory, far apart, which many threads store. The doorbells of a controller
are adjacent registers of 32 bits; a 64-bit store to one would clear the next. So device code stores its words as for
Warpwell's own controller, and one I/O thread (`warpwell.storage.io_threads`) copies each changed word to its register,
without the interpreter lock. The forwarder also serves a GPU, with words in pinned memory.

- A word is loaded with acquire order, and `Transport.native_store` orders its store after earlier loads: the controller
  finds the entries that the word announces. The thread records the value that it stored; the next round finds a later
  one.
- Words change only within launches. The loop checks for launches *before* it loads the words. If it then finds no
  launch and no change, no word is left to forward, and the thread leaves. `begin` counts a launch before it submits the
  forwarder to the I/O threads. If the loop has not seen a launch, even one that has ended, the forwarder still needs a
  thread.
- Every `WATCH_SECONDS` the loop returns to Python to check the controller. An error there fails the controller, so that
  launches end instead of waiting for doorbells.
- `stop` returns when no thread forwards any more. Only then may the controller be reset: a mapped register vanishes
  with its device, and an access raises SIGBUS.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Sequence
from typing import Any

from .. import errors
from .._os import clock
from ..storage import WorkerSlots, current_io_threads
from ..targets import Block, device, native, private_block
from ..targets.primitives import SYSTEM, backoff, call_native, clock_ns, load_acquire, load_relaxed, store_relaxed
from .transport import WATCH_SECONDS, Transport

SPIN_ROUNDS = 64
"""Rounds without a change after which the thread leaves if no launch runs: another launch often follows soon."""
_STOP_SECONDS = 5.0

# -- record of a forwarder --------------------------------------------------------------------------------------------
R_STOP = 0
R_LAUNCHES = 1
R_STORE = 2
"""Address of the native function that stores to a register (`Transport.native_store`)."""
R_STATE = 3
"""First argument of that function."""
R_WORDS = 4
"""Number of words."""
R_FORWARDED = 5
"""Number of stores so far."""
R_TABLE = 8

# -- each word in the table -------------------------------------------------------------------------------------------
W_ADDRESS = 0
W_SENT = 1
"""The value that was forwarded last."""
W_REGISTER = 2
"""Offset of the doorbell among the controller's registers."""
W_MASK = 3
"""The word is forwarded when one of these bits has changed."""
WORD_WORDS = 4

STOPPED, PARK, LOOK, STORE_FAILED = 0, 1, 2, 3
"""Why the native loop returned."""


class DoorbellForwarder:
    """Forwards doorbell words while launches run, on one I/O thread at a time.

    Parameters
    ----------
    transport : Transport
    doorbells : sequence of (int, int)
        Address of each word, and the offset of its register. The words are 0, like the controller's doorbells.
    on_failure : callable
        Called once, in an I/O thread, after an error has failed the controller.

    Raises
    ------
    DriveError
        The processor is not x86-64: its order of stores may not suffice.
    """

    def __init__(
        self, transport: Transport, doorbells: Sequence[tuple[int, int]], on_failure: Callable[[], None]
    ) -> None:
        require_processor()
        self._transport = transport
        self._generation = transport.generation
        self._on_failure = on_failure
        self._block = doorbell_record(transport, doorbells)
        self._record = self._block.words
        self._lock = threading.Lock()
        self._launch_count = self._seen_launches = 0
        """Number of launches so far, and how many of them the loop had seen when it left last."""
        self._pool = current_io_threads()
        self._slots = WorkerSlots(self._needed_threads, self._serve, lambda: None)

    @property
    def forwarded(self) -> int:
        """Number of doorbells that were rung so far."""
        return int(self._record[R_FORWARDED])

    @property
    def parked(self) -> bool:
        """Whether no launch runs, and the doorbells of earlier ones are forwarded."""
        return not self._slots.occupied and not self._needed_threads()

    def begin(self) -> None:
        """Count a launch that begins, and let an I/O thread forward its doorbells.

        Raises
        ------
        RuntimeError
            The system cannot start a thread; nothing is counted.
        """
        _serve_loop.load()  # The launching thread compiles or loads the loop, so that doorbells do not wait for that.
        with self._lock:
            self._record[R_LAUNCHES] += 1
            self._launch_count += 1
        try:
            self._pool.submit(self._slots)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Count a launch that has ended, after its last store to a word."""
        with self._lock:
            self._record[R_LAUNCHES] -= 1

    def stop(self) -> bool:
        """Stop forwarding for good; return False if a thread still forwards after five seconds (idempotent)."""
        self._record[R_STOP] = 1
        is_stopped = self._pool.remove(self._slots, _STOP_SECONDS)
        if not is_stopped:
            _leaked.append(self)
        return is_stopped

    def _needed_threads(self) -> int:
        is_needed = self._record[R_LAUNCHES] or self._launch_count != self._seen_launches
        return int(bool(is_needed and not self._record[R_STOP]))

    def _serve(self, slot: int) -> None:
        try:
            while True:
                launch_count = self._launch_count
                reason = _serve_loop(self._block.address, watch_time_ns())
                if reason == PARK:
                    self._seen_launches = launch_count
                if reason in (PARK, STOPPED):
                    return
                self._transport.examine()
                if reason == STORE_FAILED:
                    raise errors.DriveError("a register cannot be written")
        except Exception as error:
            if not self._record[R_STOP]:
                self._record[R_STOP] = 1
                self._transport.fail(f"its doorbells cannot be rung: {error}", self._generation)
                self._on_failure()
            if not isinstance(error, errors.WarpwellError):
                raise


def doorbell_record(transport: Transport, doorbells: Sequence[tuple[int, int]], head_mask: int = -1) -> Block:
    """Return the record of `forward`.

    Parameters
    ----------
    transport : Transport
    doorbells : sequence of (int, int)
        Address of each word, and the offset of its register: in turn the head and the tail of a queue pair.
    head_mask : int
        Mask of the bits of a head whose change is forwarded.
    """
    block = private_block(8 * (R_TABLE + WORD_WORDS * len(doorbells)))
    record = block.words
    record[R_STORE], record[R_STATE] = transport.native_store()
    record[R_WORDS] = len(doorbells)
    table = record[R_TABLE : R_TABLE + WORD_WORDS * len(doorbells)].reshape(-1, WORD_WORDS)
    table[:, W_ADDRESS] = [address for address, _ in doorbells]
    table[:, W_REGISTER] = [register for _, register in doorbells]
    table[::2, W_MASK], table[1::2, W_MASK] = head_mask, -1
    return block


def require_processor() -> None:
    """Raise `DriveError` if stores to registers might not follow earlier stores to memory on this processor."""
    machine = platform.machine()
    if machine.lower() not in ("x86_64", "amd64"):
        raise errors.DriveError(
            f"drives need an x86-64 processor, but this is {machine}: use the drive through the operating system"
        )


def watch_time_ns() -> int:
    """Return the time of `clock_ns` at which the controller is checked next."""
    return clock.monotonic_ns() + int(WATCH_SECONDS * 1e9)


_leaked: list[Any] = []
"""Forwarders whose thread did not end. Their records must stay, because the thread reads them."""


@device
def serve(record, until):
    """Forward words until the thread may park, or until a time; return the reason (one native thread)."""
    idle = 0
    while True:
        if load_acquire(record + 8 * R_STOP, SYSTEM) != 0:
            return STOPPED
        # Load this before the words: a load that sees the end of a launch sees the stores of that launch.
        launches = load_acquire(record + 8 * R_LAUNCHES, SYSTEM)
        work = forward(record)
        if work < 0:
            return STORE_FAILED
        if work > 0:
            idle = 0
        else:
            idle += 1
            if launches == 0 and idle > SPIN_ROUNDS:
                return PARK
            backoff(min(idle >> 3, 24))
        if clock_ns() > until:
            if launches == 0 and work == 0:
                return PARK
            return LOOK


_serve_loop = native(serve)


@device
def forward(record):
    """Store each changed word to its register; return the count of them, or -1 if a store failed (one thread)."""
    work = 0
    function = load_relaxed(record + 8 * R_STORE, SYSTEM)
    state = load_relaxed(record + 8 * R_STATE, SYSTEM)
    for k in range(load_relaxed(record + 8 * R_WORDS, SYSTEM)):
        word = record + 8 * (R_TABLE + k * WORD_WORDS)
        value = load_acquire(load_relaxed(word + 8 * W_ADDRESS, SYSTEM), SYSTEM)
        if (value ^ load_relaxed(word + 8 * W_SENT, SYSTEM)) & load_relaxed(word + 8 * W_MASK, SYSTEM) != 0:
            if call_native(function, state, load_relaxed(word + 8 * W_REGISTER, SYSTEM), value, 0, 0, 0) != 0:
                return -1
            store_relaxed(word + 8 * W_SENT, value, SYSTEM)
            work += 1
    if work > 0:
        store_relaxed(record + 8 * R_FORWARDED, load_relaxed(record + 8 * R_FORWARDED, SYSTEM) + work, SYSTEM)
    return work
