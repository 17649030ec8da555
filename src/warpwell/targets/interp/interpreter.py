"""The ``interp`` target: device code as plain Python, one seeded interleaving on weak memory for each run.

Every shared access is a point where the scheduler may run another thread, and a load may return any value
that coherence and happens-before permit, so a missing fence or recheck fails here where it would hold on most
hardware.  A failing seed replays exactly.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from warpwell.targets.interp.accesses import i64
from warpwell.targets.interp.primitives import Primitives, native_handle
from warpwell.targets.interp.threads import InterpStallError

if TYPE_CHECKING:
    from ..fault import LaunchFlag

__all__ = ["InterpStallError", "Interpreter", "current", "i64", "launch", "native_handle"]

_local = threading.local()


def current() -> Interpreter:
    """Return the interpreter that runs the calling device code.

    Raises RuntimeError where there is none: device code was called as a Python function, outside of a launch.
    """
    try:
        running: Interpreter = _local.running
    except AttributeError:
        raise RuntimeError(
            "device code was called outside of a launch; launch a kernel with it instead"
        ) from None
    return running


class Interpreter(Primitives):
    """Runs device functions as greenlets on weak memory; its methods are the primitives of device code.

    Parameters
    ----------
    seed : int
        Decides every choice.
    switch_probability, max_steps
        As for `Scheduler`.
    fresh : float, optional
        Probability with which a load takes the newest of several values; left out, the seed selects it.
    coarse_copies : bool
        One switch point for each copy instead of one for each 8-byte word; the values stay weak.
    trace : int
        Number of last accesses to keep (0: none); they are added to an exception's notes.
    flag : LaunchFlag, optional
        What `warpwell.failed` reads.
    """

    def __init__(
        self,
        seed: int,
        *,
        switch_probability: float | None = None,
        max_steps: int = 1_000_000,
        fresh: float | None = None,
        coarse_copies: bool = False,
        trace: int = 0,
        flag: LaunchFlag | None = None,
    ) -> None:
        from ..fault import LaunchFlag

        super().__init__(seed, switch_probability, max_steps, fresh, trace)
        self.coarse_copies = coarse_copies
        self.flag = flag or LaunchFlag("interp")

    @property
    def trace_hash(self) -> int:
        """Hash of all accesses so far: who accessed which word and which of its values; no addresses."""
        return hash((self.memory.digest, self.steps, self.skipped))

    def announce(self, address: int, nbytes: int) -> None:
        """Name a range as memory; once one is named, access outside of all is a ValueError, not a crash."""
        self.memory.ranges.append((int(address), int(address) + nbytes))

    def run(self) -> None:
        """Run until all threads but the daemons have ended.

        An exception of a thread ends the run; its notes name seed, step and thread.  `InterpStallError` after
        `max_steps`.  What host code did to the memory before is seen; during a run only `write_bytes` is.
        """
        if getattr(_local, "running", None) is not None:
            raise RuntimeError("an interpreted launch from device code of another one")
        if self.shape == (0,):
            self.shape = (sum(not t.daemon for t in self.threads),)
        self.memory.forget()
        _local.running = self
        try:
            self._run()
        except BaseException as error:
            if self._trace:
                error.add_note("interp: last accesses\n" + self.format_trace())
            raise
        finally:
            del _local.running
            self.memory.forget()
            self.shape = (0,)

    def format_trace(self) -> str:
        """The kept accesses, one a line: step, thread, access, address, value."""
        return "\n".join(f"  {s:8d} {t:20s} {op:18s} {a:#x} {v}" for s, t, op, a, v in self._trace or ())

    def _stores(self) -> int:
        return self.memory.stores

    def _stall_notes(self) -> str:
        foreign = self.memory.foreign_writes()
        return (
            f"\n  host code changed {foreign[0]:#x} during the run, unseen (use write_bytes)"
            if foreign
            else ""
        )

    # launches

    def launch(
        self,
        fn: Callable[..., object],
        n: int | tuple[int, ...],
        args: Sequence[Any] = (),
        *,
        live: int = 64,
        services: Sequence[Callable[[], object]] = (),
    ) -> None:
        """Call ``fn(*args)`` in as many logical threads as `n` says, at most `live` of them at a time.

        `n` is a count or a shape of up to 3 extents.  The `services` run beside them until all have ended:
        each is called again and again, with back-off where it returns nothing or 0 (no work was there).  A
        logical thread starts where one has ended, and knows of memory what that one knew.
        """
        shape = (n,) if isinstance(n, int) else tuple(n)
        if not 1 <= len(shape) <= 3 or min(shape) < 0:
            raise ValueError(f"launch shape {shape}: 1 to 3 extents, none negative")
        self.shape = shape
        total = self.gridsize(1)
        indices = iter(range(total))
        for slot in range(min(live, total)):
            self.spawn(self._logical, fn, args, indices, name=f"{getattr(fn, '__name__', 'thread')}[{slot}]")
        for step in services:
            self.spawn(self._serve, step, name=getattr(step, "__name__", "service"), daemon=True)
        self.run()

    def _serve(self, step: Callable[[], object]) -> None:
        attempt = 0
        thread = self.thread
        while not self._ending:
            # A step that began is also finished: half a step would leave a ring or a lock unusable.
            thread.busy = True
            worked = step()
            thread.busy = False
            attempt = 0 if worked else attempt + 1
            self.backoff(attempt)

    def _logical(self, fn: Callable[..., object], args: Sequence[Any], indices: Iterator[int]) -> None:
        name = getattr(fn, "__name__", "thread")
        for index in indices:
            if self.flag.interrupted:
                return
            self.thread.index = index
            self.thread.name = f"{name}[{index}]"
            fn(*args)


def launch(
    fn: Callable[..., object],
    n: int | tuple[int, ...],
    args: Sequence[Any] = (),
    seed: int = 0,
    *,
    live: int = 64,
    services: Sequence[Callable[[], object]] = (),
    **options: Any,
) -> Interpreter:
    """Launch `fn` on a new `Interpreter` made with `seed` and `options`, and return it when all is done."""
    interpreter = Interpreter(seed, **options)
    interpreter.launch(fn, n, args, live=live, services=services)
    return interpreter
