"""A client of a driver server that writes what it likes into the ring: for tests of workers.

Numbers of operations are read from the table, sizes from `wire.h`. Entries are not checked before they are posted.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
import select
import socket
import struct
import time
from pathlib import Path

from tests.harness.until import HANG_SECONDS

from warpwell.driver import generate, table

HELLO, FACTS, OPEN, OPENED, REFUSED, PINNED = range(1, 7)
MAGIC = 0x57574352
ENTRY = struct.Struct("=IHHIIIIII")  # size, op, flags, slot, seq, stream, place, nbytes, use
DONE = 1  # flag: answer when the stream has passed the call
NO_SLOT = 0xFFFFFFFF
DATA = 4096  # of the ring; and of the slots in the status
STAGING_RESULTS = 192  # in the status
DEFERRED, STICKY, ASLEEP, WAKE = 128, 136, 64, 64
LIBC = ctypes.CDLL(None, use_errno=True)
SECONDS = HANG_SECONDS


def numbers() -> dict[str, int]:
    """Return the numbers of the hand-written operations, by name without WW_OP_."""
    return {operation.name: number for number, operation in enumerate(table.operations())}


def constant(name: str) -> int:
    """Return a number that wire.h defines."""
    found = re.search(rf"#define {name} \(?(0x)?([0-9a-f]+)u(?: << (\d+)\))?", (generate.NATIVE / "wire.h").read_text())
    assert found, name
    return int(found[2], 16 if found[1] else 10) << int(found[3] or 0)


OPS = numbers()
RING = constant("WW_RING_BYTES")
STAGING_BYTES = constant("WW_PLACE_BYTES")


class Lost(Exception):
    """The worker has ended, or does not answer."""


class Raw:
    """A connection to the worker of a device, with the shared memory mapped."""

    def __init__(self, folder: Path, ordinal: int = 0) -> None:
        self.line = self.connect(folder, ordinal)
        with open(os.devnull, "wb") as nothing:
            socket.send_fds(self.line, [self.hello(OPEN)], [nothing.fileno()] * 2)
        packet, self.memory, _, _ = socket.recv_fds(self.line, 4096, 3)
        assert struct.unpack_from("=I", packet)[0] == OPENED, packet[:200]
        self.arena, self.arena_bytes = struct.unpack_from("=QQ", packet, 16)
        self.ring = mmap.mmap(self.memory[0], DATA + RING)
        self.status = mmap.mmap(self.memory[1], os.fstat(self.memory[1]).st_size, prot=mmap.PROT_READ)
        self.staging = mmap.mmap(self.memory[2], os.fstat(self.memory[2]).st_size)
        self.head = 0
        self.sequence = [0] * 256
        self.used = [0] * 64

    @staticmethod
    def connect(folder: Path, ordinal: int = 0) -> socket.socket:
        """Return a connection to a device's socket."""
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        line.settimeout(SECONDS)
        line.connect(str(folder / f"device-{ordinal}"))
        return line

    @staticmethod
    def hello(message: int) -> bytes:
        """Return a greeting."""
        return struct.pack("=IIQII96s", message, MAGIC, generate.protocol_hash(), os.getpid(), 0, b"")

    def close(self) -> None:
        """Hang up."""
        self.line.close()
        for descriptor in self.memory:
            os.close(descriptor)
        for memory in (self.ring, self.status, self.staging):
            with contextlib.suppress(BufferError):
                memory.close()

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- ring ---------------------------------------------------------------------------------------------

    def publish(self, head: int) -> None:
        """Store the head, and wake the worker if it sleeps."""
        self.ring[0:8] = struct.pack("=Q", head % (1 << 64))
        (word,) = struct.unpack_from("=I", self.ring, WAKE)
        self.ring[WAKE : WAKE + 4] = struct.pack("=I", (word + 1) % (1 << 32))
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.ring, WAKE))
        LIBC.syscall(202, ctypes.c_void_p(address), 1, 1 << 30, None, None, 0)

    def write(self, data: bytes, size: int | None = None) -> None:
        """Write bytes at the head and publish them, behind padding where they would not fit in one piece."""
        at = self.head % RING
        if at + len(data) > RING:
            self.ring[DATA + at : DATA + at + 8] = struct.pack("=IHH", RING - at, OPS["PAD"], 0)
            self.head += RING - at
            at = 0
        self.ring[DATA + at : DATA + at + len(data)] = data
        self.head += len(data) if size is None else size
        self.publish(self.head)

    def post(
        self,
        op: str | int,
        arguments: bytes = b"",
        slot: int | None = None,
        stream: int = 0,
        staging_index: int = 0,
        nbytes: int = 0,
        flags: int = 0,
        size: int | None = None,
        use: int | None = None,
    ) -> None:
        """Post an entry; `size` is what it says of itself, and `use` of its staging slot."""
        arguments += bytes(-len(arguments) % 32)
        seq = 0
        if slot is not None and slot < 256:
            self.sequence[slot] += 1
            seq = self.sequence[slot]
        if 0 < staging_index <= 64 and use is None:
            self.used[staging_index - 1] += 1
            use = self.used[staging_index - 1]
        number = OPS[op] if isinstance(op, str) else op
        size_field = ENTRY.size + len(arguments) if size is None else size
        slots = NO_SLOT if slot is None else slot
        self.write(
            ENTRY.pack(size_field, number, flags, slots, seq, stream, staging_index, nbytes, use or 0) + arguments
        )

    def call(self, op: str | int, arguments: bytes = b"", slot: int = 0, **more: int) -> tuple[int, bytes]:
        """Post an entry and return the code and the bytes of its answer."""
        self.post(op, arguments, slot, **more)
        at = DATA + 4096 * slot
        self.until(lambda: struct.unpack_from("=I", self.status, at)[0] == self.sequence[slot], f"{op} has no answer")
        _, code, nbytes, _ = struct.unpack_from("=IiII", self.status, at)
        return code, self.status[at + 64 : at + 64 + nbytes]

    def until(self, ready: object, text: str) -> None:
        """Wait until something is so; raise `Lost` if the worker ends before, or after some seconds."""
        assert callable(ready)
        end = time.monotonic() + SECONDS
        while not ready():
            if time.monotonic() > end or self.hung_up():
                if ready():
                    return
                raise Lost(text)
            time.sleep(0.0002)

    def hung_up(self) -> bool:
        """Return whether the worker has exited."""
        poll = select.poll()
        poll.register(self.line, select.POLLRDHUP)
        return bool(poll.poll(0))

    def wait_for_staging(self, index: int) -> int:
        """Wait until the worker is done with a staging slot; return its result."""
        at = STAGING_RESULTS + 8 * (index - 1)
        self.until(lambda: struct.unpack_from("=I", self.status, at)[0] == self.used[index - 1], f"place {index}")
        return int(struct.unpack_from("=i", self.status, at + 4)[0])

    @property
    def deferred(self) -> tuple[int, int]:
        """Code and count of errors of asynchronous calls."""
        code, count = struct.unpack_from("=II", self.status, DEFERRED)
        return code, count

    @property
    def sticky(self) -> int:
        """The code with which the context is lost, or 0."""
        return int(struct.unpack_from("=I", self.status, STICKY)[0])

    # -- calls of an honest client -------------------------------------------------------------------------

    def alloc(self, nbytes: int) -> int:
        """Return the address of device memory."""
        code, data = self.call("ALLOC", struct.pack("=Q", nbytes))
        assert code == 0, code
        return int(struct.unpack("=Q", data)[0])

    def put(self, address: int, data: bytes) -> None:
        """Copy bytes to the device."""
        self.staging[: len(data)] = data
        self.post("IN", struct.pack("=QQ", address, len(data)), stream=1, staging_index=1, nbytes=len(data))

    def get(self, address: int, nbytes: int) -> bytes:
        """Copy bytes from the device."""
        self.post("OUT", struct.pack("=QQ", address, nbytes), stream=1, staging_index=2, nbytes=nbytes)
        assert self.wait_for_staging(2) == 0
        return self.staging[STAGING_BYTES : STAGING_BYTES + nbytes]

    def load(self, image: bytes, module: int = 1) -> tuple[int, dict[str, int]]:
        """Load an image; return the code and the functions' ids."""
        self.staging[: len(image)] = image
        self.post("IMAGE", struct.pack("=QQ", 0, len(image)), staging_index=1, nbytes=len(image))
        code, data = self.call("LOAD", struct.pack("=4I", module, 0, 0, 0))
        functions = {}
        at = 16
        for _ in range(struct.unpack_from("=I", data)[0] if code == 0 else 0):
            number, params, name, _ = struct.unpack_from("=4I", data, at)
            at += 16 + 64 + 8 * params
            functions[data[at : at + name - 1].decode()] = number
            at += name + -name % 8
        return code, functions
