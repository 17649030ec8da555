"""Relay: a native thread that forwards the doorbell words of rings to the doorbells of a controller.

A ring's doorbells are 64-bit words in memory, far apart, which many threads store; a controller's are neighbouring
registers of 32 bits, and a 64-bit store to one would zero the next. So device code stores its words as for our own
controller, and one thread without the interpreter lock copies each that changed to its register. It serves a GPU as
well, whose words lie in pinned memory.

- A word is loaded with acquire, and `Transport.native_store` orders its store after what was loaded: the controller
  finds the entries that the word tells of. The value stored is remembered; a later one is found by the next round.
- Words change only within launches. The thread looks for launches *before* it looks at the words: if it then finds no
  launch and no change, nothing can be left to forward, and it parks. `begin` counts a launch and wakes it, under the
  lock under which it parks; if one has begun since before that look, even if it has ended, the thread looks again.
- Every `LOOK_NS` it comes back to Python to see whether the controller is still there. However it ends, it declares the
  controller lost unless it was told to stop: launches end instead of waiting for doorbells that nobody rings.
- `stop` returns when it forwards nothing more: only then may the controller be reset (a mapped register is gone with
  its device, and who touches it dies of SIGBUS).
"""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from .. import errors
from .._os import clock
from ..targets import (
    SYSTEM,
    backoff,
    call_native,
    clock_ns,
    device,
    load_acquire,
    load_relaxed,
    native,
    private_block,
    store_relaxed,
)
from .transport import Transport

LOOK_NS = 10 * 10**6
"""Time between two looks at the controller's process while launches run."""
STATUS_SECONDS = 0.1
"""Time between two reads of the controller's status register while launches run."""
LINGER = 64
"""Rounds without a change after which the thread parks, where no launch runs: another one often follows."""
_STOP_SECONDS = 5.0

# -- record of a relay ------------------------------------------------------------------------------------------------
R_STOP = 0
R_LAUNCHES = 1
R_STORE = 2
"""Address of the native function that stores to a register (`Transport.native_store`)."""
R_STATE = 3
"""Its first argument."""
R_WORDS = 4
"""Number of words."""
R_FORWARDED = 5
"""Stores so far."""
R_TABLE = 8

# -- each word in the table -------------------------------------------------------------------------------------------
W_ADDRESS = 0
W_SENT = 1
"""What was forwarded last."""
W_REGISTER = 2
"""Offset of the doorbell among the controller's registers."""
WORD_WORDS = 4

STOPPED, PARK, LOOK, GONE = 0, 1, 2, 3
"""Why the native loop returned."""


class Relay:
    """Forwards doorbell words while launches run.

    Parameters
    ----------
    transport : Transport
    doorbells : sequence of (int, int)
        Address of each word, and the offset of its register. The words are 0, as the controller's doorbells.
    lost : callable
        Called once, in the relay's thread, when the controller is lost.

    Raises
    ------
    DriveError
        This processor orders stores otherwise than x86-64 does.
    """

    def __init__(self, transport: Transport, doorbells: Sequence[tuple[int, int]], lost: Callable[[], None]) -> None:
        require_processor()
        self._transport = transport
        self._generation = transport.generation
        self._lost = lost
        self._block = private_block(8 * (R_TABLE + WORD_WORDS * len(doorbells)))
        self._words = self._block.words
        self._words[R_STORE], self._words[R_STATE] = transport.native_store()
        self._words[R_WORDS] = len(doorbells)
        table = self._words[R_TABLE : R_TABLE + WORD_WORDS * len(doorbells)].reshape(-1, WORD_WORDS)
        table[:, W_ADDRESS] = [address for address, _ in doorbells]
        table[:, W_REGISTER] = [register for _, register in doorbells]
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._running = False
        self._begun = 0
        """Launches so far."""
        self._status_due = 0.0

    @property
    def forwarded(self) -> int:
        """Doorbells that were rung so far."""
        return int(self._words[R_FORWARDED])

    @property
    def parked(self) -> bool:
        """Whether the thread waits for a launch."""
        return not self._running

    def begin(self) -> None:
        """Note that a launch begins: start or wake the thread.

        Raises
        ------
        RuntimeError
            The system starts no thread; nothing is counted.
        """
        _serve_loop.load()  # compiled or loaded by who launches, not while its doorbells wait
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="warpwell-relay", daemon=True)
                self._running = True
                try:
                    thread.start()
                except BaseException:
                    self._running = False
                    raise
                self._thread = thread
            self._words[R_LAUNCHES] += 1
            self._begun += 1
            if not self._running:
                self._running = True
                self._changed.notify_all()

    def end(self) -> None:
        """Note that a launch ended, after its last store to a word."""
        with self._changed:
            self._words[R_LAUNCHES] -= 1

    def stop(self) -> bool:
        """End the thread; return whether it has ended, and forwards nothing more, within five seconds (idempotent)."""
        with self._changed:
            self._words[R_STOP] = 1
            self._changed.notify_all()
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(_STOP_SECONDS)
        if thread.is_alive():
            _leaked.append(self)
            return False
        return True

    def _work(self) -> None:
        try:
            while True:
                begun = self._begun
                why = _serve_loop(self._block.address, clock_ns_after(LOOK_NS))
                if why == STOPPED:
                    return
                if why == GONE:
                    self._transport.alive()  # knows better why
                    self._transport.lose("a doorbell could not be rung", self._generation)
                    return
                if why == PARK and not self._park(begun):
                    return
                if why == LOOK and not self._look():
                    return
        finally:
            with self._changed:
                self._running = False
                told = bool(self._words[R_STOP])
            if not told:
                self._transport.lose("the thread that rings its doorbells ended", self._generation)
                self._lost()

    def _park(self, begun: int) -> bool:
        """Wait for a launch after so many; return False when told to stop."""
        with self._changed:
            while not self._words[R_STOP]:
                if self._begun != begun:
                    return True
                self._running = False
                self._changed.wait()
            return False

    def _look(self) -> bool:
        """Tell whether the controller is still there and has not failed; if not, it is lost."""
        transport = self._transport
        if transport.lost is not None or not transport.alive():
            return False
        now = time.monotonic()
        if now < self._status_due:
            return True
        self._status_due = now + STATUS_SECONDS
        try:
            transport.examine()
        except errors.WarpwellError as error:
            if transport.lost is None:
                transport.lose(f"its status cannot be read: {error}", self._generation)
        return transport.lost is None


def require_processor() -> None:
    """Raise `DriveError` where the relay's fence may not order stores to registers after stores to memory."""
    machine = platform.machine()
    if machine.lower() not in ("x86_64", "amd64"):
        raise errors.DriveError(
            f"drives are served on x86-64 alone, and this is {machine}: use the drive through the operating system"
        )


def clock_ns_after(nanoseconds: int) -> int:
    """Return a time of `clock_ns` that is so far ahead."""
    return clock.monotonic_ns() + nanoseconds


_leaked: list[Any] = []
"""Relays whose thread did not come back: what they read must outlive them."""


@device
def serve(record, until):
    """Forward words until there is nothing to forward for, or the time is over; return why (one native thread)."""
    idle = 0
    while True:
        if load_acquire(record + 8 * R_STOP, SYSTEM) != 0:
            return STOPPED
        # before the words: what a launch stored is seen once its end is
        launches = load_acquire(record + 8 * R_LAUNCHES, SYSTEM)
        work = forward(record)
        if work < 0:
            return GONE
        if work > 0:
            idle = 0
        else:
            idle += 1
            if launches == 0 and idle > LINGER:
                return PARK
            backoff(min(idle >> 3, 24))
        if clock_ns() > until:
            if launches == 0 and work == 0:
                return PARK
            return LOOK


_serve_loop = native(serve)


@device
def forward(record):
    """Store each word that changed to its register; return how many did, or -1 where a store failed (one thread)."""
    work = 0
    function = load_relaxed(record + 8 * R_STORE, SYSTEM)
    state = load_relaxed(record + 8 * R_STATE, SYSTEM)
    for k in range(load_relaxed(record + 8 * R_WORDS, SYSTEM)):
        word = record + 8 * (R_TABLE + k * WORD_WORDS)
        value = load_acquire(load_relaxed(word + 8 * W_ADDRESS, SYSTEM), SYSTEM)
        if value != load_relaxed(word + 8 * W_SENT, SYSTEM):
            if call_native(function, state, load_relaxed(word + 8 * W_REGISTER, SYSTEM), value, 0, 0, 0) != 0:
                return -1
            store_relaxed(word + 8 * W_SENT, value, SYSTEM)
            work += 1
    if work > 0:
        store_relaxed(record + 8 * R_FORWARDED, load_relaxed(record + 8 * R_FORWARDED, SYSTEM) + work, SYSTEM)
    return work
