"""Upper bounds, measured in the same run as a benchmark: a medium's own reads and writes, NumPy, a pinned copy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpwell.errors import WarpwellError
from warpwell.nvme import READ, WRITE
from warpwell.storage import PENDING, Medium, word
from warpwell.storage.commands import (
    A_STATUS,
    A_TAG,
    ANSWER_BYTES,
    COMMAND_BYTES,
    call_complete,
    call_start,
    encode_command,
)
from warpwell.targets import kernel, memory_for
from warpwell.targets.primitives import (
    DEVICE,
    backoff,
    clock_ns,
    fetch_add,
    grid,
    load_acquire,
    scratch,
    store_relaxed,
    store_release,
)

from .figures import seconds
from .setting import Setting

IN_FLIGHT = 256
"""Commands of a thread that may be pending at a time."""
PATIENCE = 30 * 10**9
"""Timeout of a medium without completions, in nanoseconds."""


@kernel
def _commands(start, complete, state, opcode, order, nbytes, buffers, flags, in_flight, threads, failed):
    """Submit commands for the pages `order` to a medium, a part by each thread; wait until all have completed."""
    t = grid(1)
    command = scratch(COMMAND_BYTES)
    answer = scratch(ANSWER_BYTES)
    k = t
    slot = 0
    idle = 0
    waiting = 1
    since = clock_ns()
    while k < order.size or waiting != 0:
        waiting = 0
        if k < order.size:
            waiting = 1  # also after the last command: the next round counts the pending ones
            tag = t * in_flight + slot
            if load_acquire(flags + 8 * tag, DEVICE) == 0:
                store_relaxed(flags + 8 * tag, 1, DEVICE)
                encode_command(command, opcode, order[k] * nbytes, nbytes, buffers + tag * nbytes)
                status = call_start(start, state, command, tag)
                if status != PENDING:
                    store_relaxed(flags + 8 * tag, 0, DEVICE)
                    if status != 0:
                        fetch_add(failed, 1, DEVICE)
                k += threads
            slot = (slot + 1) & (in_flight - 1)
        else:
            for command in range(in_flight):
                waiting += load_acquire(flags + 8 * (t * in_flight + command), DEVICE)
        if complete != 0:
            if call_complete(complete, state, answer):
                idle = 0
                since = clock_ns()
                if word(answer, A_STATUS) != 0:
                    fetch_add(failed, 1, DEVICE)
                store_release(flags + 8 * word(answer, A_TAG), 0, DEVICE)
            else:
                if waiting != 0:
                    backoff(idle)
                idle += 1
                if idle & 1023 == 0 and clock_ns() - since > PATIENCE:
                    fetch_add(failed, 1, DEVICE)
                    return


def medium_rate(setting: Setting, data: NDArray[Any], pages: NDArray[np.int64], *, write: bool = False) -> float:
    """Return the pages per second of a setting's medium when native threads only submit commands of pages.

    The medium is a separate object, so that no completions of other commands are counted.
    """
    with setting.medium_of(data, writable=write) as medium:
        return _medium_rate(setting, medium, pages, write)


def _medium_rate(setting: Setting, medium: Medium, pages: NDArray[np.int64], write: bool) -> float:
    nbytes, threads = setting.page_size, setting.service_threads
    native = medium.native()
    if native is None:
        raise WarpwellError(f"{medium.description} is written in Python: its own rate cannot be measured")
    in_flight = IN_FLIGHT if native.complete else 1
    host = memory_for("cpu")
    buffers = host.allocate(threads * in_flight * nbytes + 4096)
    flags = host.allocate(8 * (threads * in_flight + 1))
    failed = flags.address + 8 * threads * in_flight
    base = -(-buffers.address // 4096) * 4096

    def launch(opcode: int) -> None:
        _commands[threads](
            native.start,
            native.complete,
            native.state,
            opcode,
            pages,
            nbytes,
            base,
            flags.address,
            in_flight,
            threads,
            failed,
            device="cpu",
        )

    times = seconds(lambda: launch(WRITE if write else READ), setting.runs)
    if flags.words[: threads * in_flight].any():
        raise WarpwellError(f"commands of {medium.description} were still in flight when the measurement ended")
    if flags.words[threads * in_flight]:
        raise WarpwellError(f"commands of {medium.description} failed, or were not answered in {PATIENCE / 1e9:g} s")
    return len(pages) / times


def numpy_rate(call: Any, nbytes: int, runs: int) -> float:
    """Return the bytes a second of a NumPy call over `nbytes` bytes."""
    return nbytes / seconds(call, runs)
