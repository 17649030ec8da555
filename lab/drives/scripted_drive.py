"""A controller in Python, in this process. It answers when its doorbell is written, also wrongly if a test requests
it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from warpwell.drives import DmaArena, Transport
from warpwell.errors import DriveLostError
from warpwell.nvme import COMMAND, COMPLETION, identify, prp
from warpwell.nvme import controller as reg
from warpwell.targets.memory import view_of

CAP = 1 << 37 | 2 << 24 | 255  # the NVM command set, ready within 1 s, 256 entries


class ScriptedDrive(Transport):
    """A drive of one namespace of 64 blocks of 512 bytes.

    `registers` and the tables `controller` and `namespace` may be changed before a `Drive` is made; `bend(completion)`
    changes each completion before it is stored, and returns False to drop it.
    """

    def __init__(self, *, cap: int = CAP, arena: int = 1 << 20) -> None:
        super().__init__("scripted", DmaArena(arena))
        self.registers = {reg.CAP: cap & 0xFFFFFFFF, reg.CAP + 4: cap >> 32, reg.VS: 0x10400, reg.CC: 0, reg.CSTS: 0}
        self.controller = np.zeros((), identify.CONTROLLER)
        self.controller["sqes"], self.controller["cqes"], self.controller["vwc"] = 0x66, 0x44, 1
        self.namespace = np.zeros((), identify.NAMESPACE)
        self.namespace["nsze"] = 64
        self.namespace["lbaf"][0] = 9 << 16
        self.blocks = np.zeros(64 * 512, np.uint8)
        self.granted = 3
        self.status: dict[int, int] = {}  # by opcode, admin's and others
        self.bend: Callable[[np.ndarray], bool] = lambda completion: True
        self.obeys = True
        self.received_commands: list[tuple[int, int]] = []  # queue and opcode of each command
        self.resets = self.closes = 0
        self._rings: dict[int, list[int]] = {}  # queue: submission, completion, entries, head, tail, phase

    # -- Transport

    def read32(self, offset: int) -> int:
        self.check()
        return self.registers.get(offset, 0)

    def write32(self, offset: int, value: int) -> None:
        self.check()
        if offset >= reg.DOORBELLS:
            queue, completion = divmod((offset - reg.DOORBELLS) // 4, 2)
            if not completion:
                self._serve(queue, value)
            return
        self.registers[offset] = value
        if offset == reg.CC and self.obeys:
            status = self.registers[reg.CSTS] & ~1 & ~0xC
            if value & 1:
                entries = (self.registers[reg.AQA] & 0xFFF) + 1
                at = [self.registers[r] | self.registers[r + 4] << 32 for r in (reg.ASQ, reg.ACQ)]
                if 0 not in self._rings:
                    self._rings = {0: [*at, entries, 0, 0, 1]}
                status |= 1
            else:
                self._rings = {}
            self.registers[reg.CSTS] = status | (8 if value >> 14 & 3 else 0)

    def native_store(self) -> tuple[int, int]:
        def store(state: int, offset: int, value: int, *_: int) -> int:
            try:
                self.write32(offset, value)
            except DriveLostError:
                return -1
            return 0

        self._store = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 6)(store)
        return ctypes.cast(self._store, ctypes.c_void_p).value or 0, 0

    def reset(self) -> None:
        self.fail("it was reset")
        self.resets += 1
        self.arena.end_quarantine()

    def close(self) -> None:
        self.closes += 1

    # -- the controller

    def _serve(self, queue: int, tail: int) -> None:
        ring = self._rings[queue]
        submission, completion, entries, head, put, phase = ring
        while head != tail:
            command = view_of(submission + 64 * head, 64, np.uint8).view(COMMAND)[0].copy()
            head = (head + 1) % entries
            self.received_commands.append((queue, int(command["opc"])))
            answer = np.zeros((), COMPLETION)
            status = self.status.get(int(command["opc"]), 0)
            dw0 = 0
            if not status:
                dw0 = (self._admin if queue == 0 else self._io)(command)
            answer["dw0"], answer["sqhd"], answer["sqid"], answer["cid"] = dw0, head, queue, command["cid"]
            answer["status"] = status << 1 | phase
            if self.bend(answer):
                completion_words = np.frombuffer(answer.tobytes(), np.int64)
                view_of(completion + 16 * put, 16, np.int64)[:] = completion_words
                put += 1
                if put == entries:
                    put, phase = 0, phase ^ 1
        ring[3:] = head, put, phase

    def _admin(self, command: np.ndarray) -> int:
        opc, cdw10 = int(command["opc"]), int(command["cdw10"])
        if opc == 6:
            page = np.zeros(4096, np.uint8)
            if cdw10 == identify.CNS_CONTROLLER:
                page = np.frombuffer(self.controller.tobytes(), np.uint8)
            elif cdw10 == identify.CNS_NAMESPACE:
                page = np.frombuffer(self.namespace.tobytes(), np.uint8)
            elif cdw10 == identify.CNS_ACTIVE_NAMESPACES:
                page.view("<u4")[0] = 1 if command["nsid"] < 1 else 0
            view_of(int(command["prp1"]), 4096, np.uint8)[:] = page
        elif opc == 9:
            return (self.granted - 1) * 0x10001
        elif opc == 5:
            self._rings[cdw10 & 0xFFFF] = [0, int(command["prp1"]), (cdw10 >> 16) + 1, 0, 0, 1]
        elif opc == 1:
            self._rings[cdw10 & 0xFFFF][0] = int(command["prp1"])
        return 0

    def _io(self, command: Any) -> int:
        first, count = int(command["cdw10"]), int(command["cdw12"]) + 1
        if int(command["opc"]) in (1, 2):
            blocks = self.blocks[512 * first : 512 * (first + count)]
            pointers = int(command["prp1"]), int(command["prp2"])
            for at, size in prp_ranges(*pointers, blocks.size, lambda at, n: view_of(at, 8 * n, np.int64).tolist()):
                assert self.arena.address <= at <= at + size <= self.arena.address + self.arena.nbytes
                buffer = view_of(at, size, np.uint8)
                if command["opc"] == 2:
                    buffer[:] = blocks[:size]
                else:
                    blocks[:size] = buffer
                blocks = blocks[size:]
        return 0


def prp_ranges(prp1: int, prp2: int, nbytes: int, load: Callable[[int, int], Sequence[int]]) -> list[tuple[int, int]]:
    """Return the ``(address, bytes)`` that a controller transfers, in order.

    ``load(address, n)`` returns the `n` 64-bit words at an address. Raise ValueError if an offset is not allowed: prp1
    must be a multiple of 4, prp2 as the address of a list a multiple of 8, and other pages must be aligned.
    """
    if prp1 % 4:
        raise ValueError(f"prp1 must be a multiple of 4, got {prp1:#x}")
    found = [(prp1, min(nbytes, prp.PAGE - prp1 % prp.PAGE))]
    remaining = nbytes - found[0][1]
    pages = [prp2] if 0 < remaining <= prp.PAGE else []
    if remaining > prp.PAGE:
        offset, left = prp2, -(-remaining // prp.PAGE)
        while left:
            if offset % 8:
                raise ValueError(f"the address of a list must be a multiple of 8, got {offset:#x}")
            room = (prp.PAGE - offset % prp.PAGE) // 8
            entries = list(load(offset, min(left, room)))
            if left > room:  # the last entry of the page is the address of the next list
                offset = entries.pop()
            pages += entries
            left -= len(entries)
    for page in pages:
        if page % prp.PAGE:
            raise ValueError(f"a page must be aligned, got {page:#x}")
        found.append((page, min(remaining, prp.PAGE)))
        remaining -= found[-1][1]
    return found
