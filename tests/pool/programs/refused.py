"""Copies refused by a full receiver: they release their memory, and no thread waits for them."""

import os
import signal
import tempfile
import weakref
from pathlib import Path

import numpy as np
from tests.harness.gate_file import gate_file, wait_for_file
from tests.harness.threads import when_blocked
from tests.harness.until import until

import warpwell as ww
from warpwell import errors
from warpwell.pool.transport.transport import TAGS

NBYTES = 32 << 20


def no_room() -> None:
    from warpwell.pool.agent.runtime import Runtime

    def allocate(self: object, nbytes: int) -> None:
        if nbytes == NBYTES:
            raise MemoryError("no room")
        return allocated(self, nbytes)

    allocated, Runtime.allocate = Runtime.allocate, allocate  # type: ignore[method-assign,assignment]


first, second = ww.devices()
for device in (first, second):
    device.transfers.direct = False
source = first.empty(NBYTES, np.uint8)
target = second.empty(NBYTES, np.uint8)
second.call(no_room).get()
arrays = []
for _ in range(3):
    array = np.ones(NBYTES, np.uint8)
    arrays.append(weakref.ref(array))
    try:
        second.to_device(array)
        second.synchronize()
    except errors.RemoteError as error:
        print("upload:", "no room" in str(error))
    del array
stream = first.stream()
for _ in range(3):
    second.empty(NBYTES, np.uint8).copy_from(source, stream=stream)
    for waiting_stream in (stream, second):
        try:
            waiting_stream.synchronize()
        except errors.RemoteError as error:
            print("copy:", "no room" in str(error))
until(lambda: all(array() is None for array in arrays))

array = np.ones(NBYTES, np.uint8)
with tempfile.TemporaryDirectory() as folder, gate_file(Path(folder)) as gate:
    held = second.call(wait_for_file, str(gate))
    try:
        when_blocked(lambda: os.kill(os.getpid(), signal.SIGINT))
        target.copy_from(array)
    except KeyboardInterrupt:
        print("interrupted")
    gate.touch()
    held.get()
second.synchronize()
print("told: no thread")
for _ in range(TAGS // 2 - 1):  # as if this number of copies used up the tags
    first.caller.tags.new(0, 2)
target.copy_from(np.full(NBYTES, 2, np.uint8))
print("the same tag:", bool((target.copy_to_host() == 2).all()))
