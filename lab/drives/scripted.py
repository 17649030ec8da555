"""`ScriptedController`: serves the rings of a cache from another process, and answers according to a script, also
wrongly.

It follows only the specification: it reads prp2 and lists of pages, has its own head and phase, and shares only the
memory of the rings with the cache. Commands are numbered from 0 in the order in which it fetches them. The script has
an `Answer` for some commands; all others are executed correctly.

    with ScriptedController(1 << 20, {3: Answer(status=0x281), 7: Answer(cid=45)}) as drive:
        cache = Cache("64KiB", page_size=4096, device="cpu", service=drive, timeout=2)
        with ww.open(drive.namespace, dtype=np.int64, cache=cache) as a: ...
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpwell import errors
from warpwell._os import clock
from warpwell.drives import DmaArena
from warpwell.nvme import (
    FLUSH,
    INVALID_FIELD,
    INVALID_NAMESPACE,
    INVALID_OPCODE,
    LBA_OUT_OF_RANGE,
    READ,
    WRITE,
    word0_cid,
    word0_nsid,
    word0_opc,
    word6_nlb,
)
from warpwell.queues import QueuePairs
from warpwell.queues import layout as at
from warpwell.storage import Medium, NamespaceAddress, PythonMedium, Rings
from warpwell.targets import Allocator

BLOCK_SHIFT = 9
ARENA = 16 << 20
HANG_SECONDS = 120.0
"""Limit of waits for the start and the end of the process. It only ends hangs."""


@dataclass(frozen=True)
class Answer:
    """The scripted outcome of one command.

    Attributes
    ----------
    status : int
        Status of the completion, 15 bits. Data move only with 0.
    cid, sqid, sqhd : int or None
        Values of the completion that replace the right values.
    times : int
        Number of times that the completion is posted: 0 for a command without an answer, 2 for a duplicate.
    stale : bool
        Whether the completion has the old phase: the queue ignores it, and the next completion overwrites it.
    seconds : float
        Delay of the completion.
    dies : bool
        Whether the process exits at once instead.
    """

    status: int = 0
    cid: int | None = None
    sqid: int | None = None
    sqhd: int | None = None
    times: int = 1
    stale: bool = False
    seconds: float = 0.0
    dies: bool = False


class ScriptedController:
    """Serves the rings of one cache, ``ww.Cache(..., service=...)``, from another process, according to a script.

    The cache has at most two queue pairs of depth 64. Use it as a context manager.

    Parameters
    ----------
    nbytes : int
        Capacity of its one namespace: blocks of 512 bytes; word k of the data is k.
    script : mapping of int to Answer
        By the number of the command, from 0, in the order in which they are fetched.
    always : Answer, optional
        Answer to commands that are not in the script.

    Attributes
    ----------
    namespace : Medium
        For ``ww.open``.
    """

    lists = True

    def __init__(self, nbytes: int, script: Mapping[int, Answer] | None = None, always: Answer | None = None) -> None:
        self.arena = DmaArena(ARENA)
        self.namespace: Medium = _Numbers(nbytes)
        self._script = {number: asdict(answer) for number, answer in (script or {}).items()}
        self._always = asdict(always or Answer())
        self._process: subprocess.Popen[bytes] | None = None
        self._pairs: QueuePairs
        self._media: dict[int, Medium] = {}

    # -- QueueBackend

    def fit(self, rings: Rings, device: str, page_size: int) -> Rings:
        """Return rings of a page at least, few enough for the arena."""
        return Rings(min(rings.queues, 2), 64, rings.merge if device == "cuda" else 1)

    def memory(self, device: str) -> Allocator:
        """Return an allocator whose shared memory the process maps too."""
        return self.arena.memory(device)

    def start(self, pairs: QueuePairs, *, device: str, timeout: float) -> ScriptedController:
        """Begin to serve the pairs."""
        self._pairs = pairs
        self.serve(self._script, self._always)
        return self

    def serve(self, script: Mapping[int, Any] | None = None, always: Any = None) -> None:
        """Start a process that serves the pairs, which are new or rewound; by default, all answers are right."""
        self.stop()
        ports = self._pairs.ports[:, [at.P_SQ, at.P_CQ, at.P_SQ_DOORBELL, at.P_CQ_DOORBELL, at.P_SQID]]
        configuration = {
            "fd": self.arena.fd,
            "base": self.arena.address,
            "size": self.arena.nbytes,
            "ports": ports.tolist(),
            "depth": self._pairs.depth,
            "blocks": self.namespace.nbytes >> BLOCK_SHIFT,
            "script": dict(script or {}),
            "always": always or asdict(Answer()),
        }
        program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main()"
        process = self._process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[self.arena.fd]
        )
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(configuration).encode() + b"\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], HANG_SECONDS)
        if not ready or process.stdout.readline() != b"ready\n":
            self.stop()
            raise errors.DriveError("the process of the scripted controller did not start")
        threading.Thread(target=self._watch, args=(process, self._pairs), daemon=True).start()

    def stop(self) -> None:
        """End the process, so that it writes nothing more."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(HANG_SECONDS)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()

    def _watch(self, process: subprocess.Popen[bytes], pairs: QueuePairs) -> None:
        """Report to the queues if the process has ended by itself."""
        code = process.wait()
        if self._process is process:
            pairs.lose(f"its process ended with status {code}")

    # -- QueueServer

    def attach(self, medium: Medium, unit: int) -> int:
        """Serve the namespace; return a handle."""
        nsid = len(self._media) + 1
        self._media[nsid] = medium
        return nsid

    def detach(self, nsid: int) -> None:
        """Forget a handle."""
        self._media.pop(nsid, None)

    def medium(self, nsid: int) -> Medium:
        """Return the medium of a handle."""
        return self._media[nsid]

    def namespace_address(self, nsid: int) -> NamespaceAddress:
        """Return the namespace and unit of commands: namespace 1, whole pages."""
        return NamespaceAddress(1, BLOCK_SHIFT, self.namespace.nbytes)

    def begin(self) -> None:
        """Do nothing: the process polls."""

    def end(self) -> None:
        """Do nothing."""

    def services(self) -> list[Callable[[], int]]:
        """Return no functions."""
        return []

    def failure(self, nsid: int | None = None, *, silent: bool = False) -> None:
        """Return None, because the queues record a loss."""

    def silence(self) -> None:
        """End the process."""
        self.stop()

    def restart(self) -> None:
        """Start a process that answers all commands correctly."""
        self.serve()

    def close(self) -> None:
        """Stop the process."""
        self.stop()

    def __enter__(self) -> ScriptedController:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Numbers(PythonMedium):
    """The namespace as the host sees it: word k is k."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes, writable=True, name="scripted/1")
        self.description = "a scripted controller"

    def read(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        first, end = offset // 8, -(-(offset + nbytes) // 8)
        return np.arange(first, end).view(np.uint8)[offset - 8 * first :][:nbytes]

    def sync(self) -> None:
        self._check_open()


# -- the process ------------------------------------------------------------------------------------------------------


def main() -> None:
    """Serve the queues that standard input describes, until it is closed."""
    configuration = json.loads(sys.stdin.readline())
    memory = mmap.mmap(configuration["fd"], configuration["size"])
    drive = _Drive(memory, configuration)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    parent = os.getppid()
    idle = 0
    while idle & 1023 != 1023 or os.getppid() == parent:
        idle = 0 if drive.serve_commands() else idle + 1
        time.sleep(0 if idle < 200 else 1e-4)


class _Drive:
    """The controller of one namespace."""

    def __init__(self, memory: mmap.mmap, configuration: dict[str, Any]) -> None:
        self._memory, self._base, self._depth, self._blocks = (
            memory,
            configuration["base"],
            configuration["depth"],
            configuration["blocks"],
        )
        self._queues = [_Queue(*port) for port in configuration["ports"]]
        self._script = {int(number): Answer(**answer) for number, answer in configuration["script"].items()}
        self._always = Answer(**configuration["always"])
        self._written: dict[int, bytes] = {}
        self._delayed: list[tuple[float, _Queue, int, Answer]] = []
        self._count = 0

    def serve_commands(self) -> bool:
        """Serve the submitted commands; return True if there was a command."""
        busy = False
        for queue in self._queues:
            while queue.head != self._word(queue.tail_doorbell) & (self._depth - 1):
                self._fetch(queue)
                busy = True
        now = clock.monotonic()
        for entry in [pending for pending in self._delayed if pending[0] <= now]:
            self._delayed.remove(entry)
            self._post(*entry[1:])
            busy = True
        return busy

    def _fetch(self, queue: _Queue) -> None:
        command = struct.unpack("<8q", self._bytes(queue.submissions + 64 * queue.head, 64))
        queue.head = (queue.head + 1) % self._depth
        answer = self._script.get(self._count, self._always)
        self._count += 1
        if answer.dies:
            os._exit(3)
        status = answer.status or self._carry_out(command)
        answer = Answer(**asdict(answer) | {"status": status})
        if answer.seconds:
            self._delayed.append((clock.monotonic() + answer.seconds, queue, word0_cid(command[0]), answer))
        else:
            self._post(queue, word0_cid(command[0]), answer)

    def _post(self, queue: _Queue, cid: int, answer: Answer) -> None:
        for _ in range(answer.times):
            position, lap = queue.posted % self._depth, queue.posted // self._depth
            while (queue.posted + 1) % self._depth == self._word(queue.head_doorbell) & (self._depth - 1):
                time.sleep(1e-4)  # full
            phase = lap & 1 ^ 1 ^ answer.stale
            fields = (
                queue.head if answer.sqhd is None else answer.sqhd,
                queue.sqid if answer.sqid is None else answer.sqid,
                cid if answer.cid is None else answer.cid,
                (answer.status & 0x7FFF) << 1 | phase,
            )
            at_ = queue.completions + 16 * position - self._base
            # one store of eight bytes; the processor does not reorder it before the stores of the data
            struct.pack_into("<q", self._memory, at_, 0)
            np.frombuffer(self._memory, np.uint64)[at_ // 8 + 1] = struct.unpack("<Q", struct.pack("<4H", *fields))[0]
            queue.posted += not answer.stale

    def _carry_out(self, command: tuple[int, ...]) -> int:
        """Move the data of a command; return its status."""
        opcode, slba, blocks = word0_opc(command[0]), command[5], word6_nlb(command[6]) + 1
        if word0_nsid(command[0]) != 1:
            return INVALID_NAMESPACE
        if opcode == FLUSH:
            return 0
        if opcode not in (READ, WRITE):
            return INVALID_OPCODE
        if slba < 0 or slba + blocks > self._blocks:
            return LBA_OUT_OF_RANGE
        pieces = self._pieces(command[3], command[4], blocks << BLOCK_SHIFT)
        if pieces is None:
            return INVALID_FIELD
        if opcode == READ:
            data = b"".join(self._block(slba + k) for k in range(blocks))
            for address, first, nbytes in pieces:
                self._memory[address - self._base : address - self._base + nbytes] = data[first : first + nbytes]
        else:
            data = b"".join(self._bytes(address, nbytes) for address, _, nbytes in pieces)
            for k in range(blocks):
                self._written[slba + k] = data[k << BLOCK_SHIFT :][: 1 << BLOCK_SHIFT]
        return 0

    def _pieces(self, prp1: int, prp2: int, nbytes: int) -> list[tuple[int, int, int]] | None:
        """Return address, offset in the data and size of each piece; None if a piece is outside of the memory."""
        first = min(nbytes, 4096 - prp1 % 4096)
        page_count = -(-(nbytes - first) // 4096)
        if page_count <= 1:
            pages = [prp2] * page_count
        else:
            if prp2 % 4096 + 8 * page_count > 4096 or not self._inside(prp2, 8 * page_count):
                return None
            pages = list(struct.unpack(f"<{page_count}q", self._bytes(prp2, 8 * page_count)))
        pieces = [(prp1, 0, first)]
        for k, page in enumerate(pages):
            offset = first + 4096 * k
            pieces.append((page, offset, min(4096, nbytes - offset)))
        good = all(self._inside(address, size) for address, _, size in pieces) and not any(p % 4096 for p in pages)
        return pieces if good else None

    def _inside(self, address: int, nbytes: int) -> bool:
        return bool(0 <= address - self._base <= len(self._memory) - nbytes)

    def _block(self, number: int) -> bytes:
        if number in self._written:
            return self._written[number]
        word_count = 1 << BLOCK_SHIFT - 3
        return np.arange(word_count * number, word_count * (number + 1)).tobytes()

    def _bytes(self, address: int, nbytes: int) -> bytes:
        return self._memory[address - self._base : address - self._base + nbytes]

    def _word(self, address: int) -> int:
        return int.from_bytes(self._bytes(address, 8), "little")


class _Queue:
    """A pair of rings, and the positions of the controller in them."""

    def __init__(self, submissions: int, completions: int, tail_doorbell: int, head_doorbell: int, sqid: int) -> None:
        self.submissions, self.completions, self.sqid = submissions, completions, sqid
        self.tail_doorbell, self.head_doorbell = tail_doorbell, head_doorbell
        self.head = self.posted = 0
