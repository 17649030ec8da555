"""Key-value scenario: the queue scenario with keys, values and their sizes."""

from __future__ import annotations

import itertools
from random import Random

from warpwell.nvme import KV_RETRIEVE, KV_STORE, key_value_word5, word0_opc
from warpwell.queues import result_of, staging_of
from warpwell.queues.submission import submit_entry
from warpwell.storage import PENDING, NativeMedium, word, write_answer
from warpwell.targets import memory_for
from warpwell.targets.interp.interpreter import current
from warpwell.targets.primitives import DEVICE, SYSTEM, fetch_add, load_relaxed

from .adversary import Violation, native_handle
from .queue_model import DATA_WORDS, QueueModel, Request

_models: dict[int, ScriptedStore] = {}
_numbers = itertools.count(1)


class ScriptedStore:
    """Completes the commands of a `KeyValueModel` at once or late, and out of order.

    Parameters
    ----------
    model : KeyValueModel
    seed : int
        Selects the pending commands and the times of their completion.
    """

    def __init__(self, model: KeyValueModel, seed: int) -> None:
        self._model = model
        self._random = Random(seed)
        self._pending_share = self._random.choice((0.0, 0.5, 1.0, 1.0))
        self._lazy = self._random.choice((0.0, 0.5, 0.9))
        self._waiting: list[tuple[Request, int, int]] = []
        # Orders threads as a store's own queue does: the completing thread sees all stores of the starting thread.
        self.order = memory_for("interp").allocate(8)
        self._number = next(_numbers)
        _models[self._number] = self

    def native(self) -> NativeMedium:
        """Return interpreted functions; compiled code cannot call them."""
        return NativeMedium(native_handle(_start), native_handle(_complete), self._number)

    def start(self, command: int, tag: int) -> int:
        """Start a command; see `NativeMedium`."""
        buffer = word(command, 3)
        request = self._model.arrived(command, tag & 0xFFFF)
        if self._random.random() >= self._pending_share:
            return self._finish(request, buffer)
        fetch_add(self.order.address, 1, SYSTEM)
        self._waiting.append((request, buffer, tag))
        return PENDING

    def _finish(self, request: Request, buffer: int) -> int:
        request.moved = True
        if request.status == 0 and request.opcode == KV_RETRIEVE:
            for k in range(request.size // 8):
                current().write_bytes(buffer + 8 * k, request.word(k).to_bytes(8, "little"))
        elif request.opcode == KV_STORE:
            found = current().read_bytes(buffer, 8 * DATA_WORDS)
            if bytes(found) != self._model.data_of(request):
                raise Violation(f"command {request.serial} stored other data than was submitted")
        return request.status | request.size << 16

    def complete(self, answer: int) -> bool:
        """Answer a finished command, as `NativeMedium` says."""
        if not self._waiting or self._random.random() < self._lazy:
            return False
        request, buffer, tag = self._waiting.pop(int(self._random.random() * len(self._waiting)))
        fetch_add(self.order.address, 1, SYSTEM)
        self._finish(request, buffer)
        return write_answer(answer, tag, request.status, request.size)

    def close(self) -> None:
        """Forget the store."""
        _models.pop(self._number, None)


class KeyValueModel(QueueModel):
    """One run of the key-value scenario.

    Parameters
    ----------
    seed : int
        Decides the scenario and the interleaving.
    trace : int
        Accesses to keep for the report.
    """

    results = True

    def _window(self, random: Random) -> int:
        return random.choice((0, 0, 1, 3))

    def _attach(self, seed: int) -> int:
        self.medium = ScriptedStore(self, seed)
        return self.controller.attach_kv(self.medium.native(), self.medium)

    def _request(self, random: Random, serial: int) -> Request:
        request = super()._request(random, serial)
        request.opcode = random.choice((KV_RETRIEVE, KV_RETRIEVE, KV_STORE))
        # each value has a size that differs from adjacent values
        request.size = 8 * (1 + serial % DATA_WORDS)
        return request

    @staticmethod
    def _key(request: Request) -> tuple[int, int]:
        return request.word(0x77) - (1 << 62), -request.serial

    def data_of(self, request: Request) -> bytes:
        """Return all the data of a command."""
        return self._bytes(request)

    def _enter(self, request: Request, word0: int, staging: int) -> bool:
        low, high = self._key(request)
        word5 = key_value_word5(8 * DATA_WORDS, 1 + request.serial % 16, request.serial & 3)
        return bool(submit_entry(self.queue, word0, low, staging, word5, 0, high))

    def arrived(self, command: int, cid: int) -> Request:
        """Compare a command with the request that was submitted under its id."""
        request = self._of(cid, "a command arrived")
        if request.started:
            raise Violation(f"command {request.serial} was fetched twice")
        request.started = True
        low, high = self._key(request)
        word5 = key_value_word5(8 * DATA_WORDS, 1 + request.serial % 16, request.serial & 3)
        expected = (request.opcode, low, staging_of(self.queue, request.cid), word5, high)
        found = (word0_opc(word(command, 0)), *(word(command, k) for k in (1, 3, 5, 7)))
        if found != expected:
            raise Violation(f"command {request.serial} arrived as {found}, not {expected}")
        return request

    def _check_data(self, request: Request, status: int) -> None:
        result = result_of(self.queue, request.cid)
        if result != request.size:
            raise Violation(f"command {request.serial} got result {result}, not its own {request.size}")
        if status != 0 or request.opcode != KV_RETRIEVE:
            return
        staging = staging_of(self.queue, request.cid)
        for k in range(DATA_WORDS):
            word = load_relaxed(staging + 8 * k, DEVICE)
            expected = request.word(k) if 8 * k < request.size else -1
            if word != expected:
                raise Violation(f"command {request.serial} read {word:#x}, not {expected:#x}")

    def _check_stored(self) -> None:
        if self.medium._waiting:
            raise Violation(f"{len(self.medium._waiting)} commands never completed")


def _start(state: int, command: int, tag: int) -> int:
    return _models[state].start(command, tag)


def _complete(state: int, answer: int) -> int:
    return _models[state].complete(answer)
