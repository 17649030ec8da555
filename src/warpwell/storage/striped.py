"""Striped and Replicated: several media as one; commands are split among them, or sent to each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import errors
from .._check import checked_nbytes
from ..nvme import READ, WRITE
from ..nvme.status import COMMAND_INTERRUPTED, INVALID_OPCODE, LBA_OUT_OF_RANGE, NAMESPACE_WRITE_PROTECTED
from ..targets import device, native, private_block
from ..targets.primitives import SYSTEM, compare_exchange, div, fetch_add, fetch_or, rem, scratch, seat
from .commands import (
    A_STATUS,
    A_TAG,
    COMMAND_BYTES,
    PENDING,
    R_BUFFER,
    R_EXTRA,
    R_NBYTES,
    R_OFFSET,
    R_OP,
    R_REMAINING,
    R_STATUS,
    R_TAG,
    SEATS,
    SlotTable,
    call_complete,
    call_start,
    decode_command,
    encode_command,
    fill_slot,
    record_of,
    release_slot,
    set_word,
    take_slot,
    word,
    write_answer,
    zero_fill,
)
from .medium import Medium, NativeMedium, raw_bytes

STRIPED = 0
REPLICATED = 1

KIND = 0
COUNT = 1
STRIPE = 2
NBYTES = 3
TABLE = 4
"""Address of the slot table, or 0 if no command of any medium is ever pending."""
WRITABLE = 5
TURN = 6
"""Replica of the next read."""
STALE = 7
"""Bit of each replica that missed a write."""
MEDIA = 16
M_START = 0
M_COMPLETE = 1
M_STATE = 2
M_WORDS = 4

MAX_MEDIA = 60
TURNS = MEDIA + M_WORDS * MAX_MEDIA
"""Medium that a service thread polls first: a word for each thread, in its own cache line."""
TURN_WORDS = 16
STATE_WORDS = TURNS + TURN_WORDS * SEATS

DIRECT = 0
"""Last bit of the tag of a command that is one part; the other bits are the tag of the group's command. Such a command
needs no slot."""
PART = 1
"""Last bit of the tag of a part; the other bits are slot << 6 | number of the medium."""
START_BIAS = 1 << 40
"""A number above the parts of a command. The starting thread adds it, so that no completion finishes the command before
all parts are started."""


class MediumGroup(Medium):
    """A medium of several others."""

    def __init__(self, media: list[Medium], kind: int, nbytes: int, stripe: int) -> None:
        if not 1 <= len(media) <= MAX_MEDIA:
            raise errors.ArgumentError(f"{len(media)} media: pass 1 to {MAX_MEDIA}", name="media")
        self.media = media
        self.nbytes = nbytes
        self.writable = all(m.writable for m in media)
        self.emulated = any(m.emulated for m in media)
        self.block = max(m.block for m in media)
        verb = "striped" if kind == STRIPED else "replicated"
        self.name = f"{verb} over {len(media)}"
        self.description = f"{verb} over {_description(media)}"
        self._kind = kind
        self._native: NativeMedium | None = None
        self._state = private_block(8 * STATE_WORDS)
        words = self._state.words
        words[KIND], words[COUNT], words[STRIPE] = kind, len(media), stripe
        words[NBYTES], words[WRITABLE] = nbytes, self.writable

    def native(self) -> NativeMedium | None:
        """Return the native functions."""
        if self._native is None:
            natives = [n for m in self.media if (n := m.native()) is not None]
            if len(natives) < len(self.media):
                return None
            complete = 0
            if any(n.complete for n in natives):
                complete = group_complete.address
                self._table = SlotTable()
                self._state.words[TABLE] = self._table.address
            for k, n in enumerate(natives):
                self._state.words[MEDIA + M_WORDS * k :][:3] = (n.start, n.complete, n.state)
            # a read that failed on one replica is tried on another, which may take long
            non_blocking = self._kind == STRIPED and all(n.non_blocking or not n.complete for n in natives)
            self._native = NativeMedium(group_start.address, complete, self._state.address, non_blocking=non_blocking)
        return self._native

    def sync(self) -> None:
        """Sync every medium."""
        for m in self.media:
            m.sync()

    def close(self) -> None:
        """Close every medium."""
        for m in self.media:
            m.close()

    def last_error(self) -> str | None:
        """Return a description of the last failure of one of the media, or None."""
        return next((text for m in self.media if (text := m.last_error()) is not None), None)

    def failure(self) -> Exception | None:
        """Return why commands cannot reach the media any more (any striped medium or all replicas failed), or None."""
        found = [m.failure() for m in self.media]
        failed = [error for error in found if error is not None]
        return failed[0] if failed and (self._kind == STRIPED or len(failed) == len(found)) else None


def _description(media: list[Medium]) -> str:
    """Describe several media in one line, each kind once."""
    texts = [m.description for m in media]
    return texts[0] if len(texts) == 1 else f"{len(texts)} media ({', '.join(dict.fromkeys(texts))})"


class Striped(MediumGroup):
    """Several media as one: stripe ``i`` is stored on medium ``i % n``, as its stripe ``i // n``.

    A command that spans stripes is split. Closing this medium closes the media.

    Parameters
    ----------
    media : sequence of Medium
        1 to 60 media. The capacity ends at the first stripe that is missing on a medium, so the last media may be
        smaller.
    stripe_bytes : int or str
        Bytes of a stripe, also as text such as "4KiB": a multiple of 512, preferably of the page size.

    Raises
    ------
    ArgumentError
    """

    def __init__(self, media: Sequence[Medium], stripe_bytes: int | str) -> None:
        stripe_bytes = checked_nbytes(stripe_bytes, "stripe_bytes", minimum=512)
        self.stripe_bytes = stripe_bytes
        media = list(media)
        super().__init__(media, STRIPED, _capacity([m.nbytes for m in media], stripe_bytes), stripe_bytes)
        if stripe_bytes % self.block:
            raise errors.ArgumentError(
                f"stripe_bytes must be a multiple of {self.block}, the bytes of a block, got {stripe_bytes}",
                name="stripe_bytes",
            )

    def read(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Return bytes; see `Medium.read`."""
        inside = self._inside(offset, nbytes)
        out = np.zeros(nbytes, np.uint8)
        for medium, at, start, stop in self._parts(offset, inside):
            out[start:stop] = medium.read(at, stop - start)
        return out

    def write(self, offset: int, data: NDArray[Any]) -> None:
        """Write bytes; see `Medium.write`."""
        self._check_writable()
        raw = raw_bytes(data)
        for medium, at, start, stop in self._parts(offset, self._inside(offset, raw.nbytes)):
            medium.write(at, raw[start:stop])

    def _parts(self, offset: int, nbytes: int) -> Iterator[tuple[Medium, int, int, int]]:
        done = 0
        while done < nbytes:
            index, inside = divmod(offset + done, self.stripe_bytes)
            row, k = divmod(index, len(self.media))
            size = min(nbytes - done, self.stripe_bytes - inside)
            yield self.media[k], row * self.stripe_bytes + inside, done, done + size
            done += size


def _capacity(sizes: list[int], stripe: int) -> int:
    rows = min(sizes, default=0) // stripe
    total = rows * stripe * len(sizes)
    for size in sizes:
        left = min(stripe, size - rows * stripe)
        total += left
        if left < stripe:
            break
    return total


class Replicated(MediumGroup):
    """The same bytes on several media. Reads are sent to the media in turn, and writes to all media.

    A failed read is tried on the other replicas. A write fails if it fails on any replica. A replica that missed a
    write serves no more reads, unless all replicas have missed a write. Closing this medium closes the media.

    Parameters
    ----------
    media : sequence of Medium
        1 to 60 media of one size, which already have the same bytes.

    Raises
    ------
    ArgumentError
        The sizes of the media differ.
    """

    def __init__(self, media: Sequence[Medium]) -> None:
        media = list(media)
        sizes = {m.nbytes for m in media}
        if len(sizes) > 1:
            raise errors.ArgumentError(
                f"replicas of {sorted(sizes)} bytes differ in size: copy one to the others", name="media"
            )
        super().__init__(media, REPLICATED, sizes.pop() if sizes else 0, 0)

    @property
    def stale(self) -> list[int]:
        """Numbers of the replicas that missed a write."""
        return [k for k in range(len(self.media)) if self._state.words[STALE] >> k & 1]

    def read(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Return bytes; see `Medium.read`."""
        self._state.words[TURN] += 1
        turn, stale = int(self._state.words[TURN]), self.stale
        fresh = [k for k in range(len(self.media)) if k not in stale] or list(range(len(self.media)))
        last: errors.MediumError | errors.DriveError | None = None
        for attempt in range(len(fresh)):
            try:
                return self.media[fresh[(turn + attempt) % len(fresh)]].read(offset, nbytes)
            except (errors.MediumError, errors.DriveError) as error:
                last = error
        assert last is not None
        raise last

    def write(self, offset: int, data: NDArray[Any]) -> None:
        """Write bytes; see `Medium.write`."""
        self._check_writable()
        raw = raw_bytes(data)
        failed: Exception | None = None
        for k, medium in enumerate(self.media):
            try:
                medium.write(offset, raw)
            except (errors.MediumError, errors.StorageFullError, errors.DriveError) as error:
                self._state.words[STALE] |= 1 << k
                failed = failed or error
        if failed is not None:
            raise failed


@device
def start_part(state: int, k: int, command: int, tag: int) -> int:
    """Start a part on medium `k`."""
    at = MEDIA + M_WORDS * k
    return call_start(word(state, at), word(state, at + M_STATE), command, tag)


@device
def part_tag(slot: int, k: int) -> int:
    """Return the tag of the part of a command on medium `k`."""
    return (slot << 7) | (k << 1) | PART


@native
def group_start(state: int, command: int, tag: int) -> int:
    """Start all parts; return PENDING if one is pending."""
    op, offset, nbytes, buffer = decode_command(command)
    part = scratch(COMMAND_BYTES)
    if op != READ and op != WRITE:
        return INVALID_OPCODE
    if offset < 0 or nbytes < 0:
        return LBA_OUT_OF_RANGE
    if op == WRITE and word(state, WRITABLE) == 0:
        return NAMESPACE_WRITE_PROTECTED
    table = word(state, TABLE)
    slot = -1
    record = 0
    if word(state, KIND) == STRIPED:
        stripe = word(state, STRIPE)
        index = div(offset, stripe)
        inside = rem(offset, stripe)
        if inside + nbytes <= stripe and offset < word(state, NBYTES):
            count = word(state, COUNT)
            at = div(index, count) * stripe + inside
            encode_command(part, op, at, nbytes, buffer)
            return start_part(state, rem(index, count), part, (tag << 1) | DIRECT)
    if table != 0:
        slot = take_slot(table)
        if slot < 0:
            return COMMAND_INTERRUPTED
        record = fill_slot(table, slot, tag, op, offset, nbytes, buffer, START_BIAS)
    if op == READ and word(state, KIND) == REPLICATED:
        first = rem(fetch_add(state + 8 * TURN, 1, SYSTEM), word(state, COUNT))
        status = read_replica(state, record, slot, command, first, 0)
        if status != PENDING and slot >= 0:
            release_slot(table, slot)
        return status
    made = start_parts(state, op, offset, nbytes, buffer, slot, part)
    status = made & 0xFFFF
    if slot < 0:
        return status
    if status != 0:
        compare_exchange(record + 8 * R_STATUS, 0, status, SYSTEM)
    settled = (made >> 16) - START_BIAS
    if fetch_add(record + 8 * R_REMAINING, settled, SYSTEM) + settled != 0:
        return PENDING
    status = word(record, R_STATUS)
    release_slot(table, slot)
    return status


@device
def start_parts(state: int, op: int, offset: int, nbytes: int, buffer: int, slot: int, part: int) -> int:
    """Start every part of a command; return the number of pending ones << 16 | the first error.

    `part` is memory for a command.
    """
    count = word(state, COUNT)
    pending = 0
    status = 0
    if word(state, KIND) == REPLICATED:
        encode_command(part, op, offset, nbytes, buffer)
        for k in range(count):
            got = start_part(state, k, part, part_tag(slot, k))
            if got == PENDING:
                pending += 1
            elif got != 0:
                part_failed(state, op, k)
                if status == 0:
                    status = got
        return (pending << 16) | status
    stripe = word(state, STRIPE)
    done = 0
    while done < nbytes:
        at = offset + done
        if at >= word(state, NBYTES):
            # the media differ in size: bytes past the end of the group are not used
            if op == READ:
                zero_fill(buffer + done, nbytes - done)
            break
        index = div(at, stripe)
        inside = rem(at, stripe)
        size = min(nbytes - done, stripe - inside)
        k = rem(index, count)
        encode_command(part, op, div(index, count) * stripe + inside, size, buffer + done)
        got = start_part(state, k, part, part_tag(slot, k))
        if got == PENDING:
            pending += 1
        elif got != 0 and status == 0:
            status = got
        done += size
    return (pending << 16) | status


@device
def part_failed(state: int, op: int, k: int) -> None:
    """Mark a replica that missed a write: it serves no reads while another replica has the data."""
    if op == WRITE and word(state, KIND) == REPLICATED:
        fetch_or(state + 8 * STALE, 1 << k, SYSTEM)


@device
def read_replica(state: int, record: int, slot: int, command: int, first: int, tried: int) -> int:
    """Read from the replica at `first` plus `tried`, then from others; return PENDING or the last status."""
    count = word(state, COUNT)
    stale = word(state, STALE)
    if stale == (1 << count) - 1:
        stale = 0
    status = -2
    for attempt in range(tried, count):
        k = rem(first + attempt, count)
        if (stale >> k) & 1 != 0:
            continue
        if record != 0:
            # store this before the start: once the command is pending, another thread owns the record
            set_word(record, R_EXTRA, (first << 8) | (attempt + 1))
        status = start_part(state, k, command, part_tag(slot, k))
        if status == PENDING or status == 0:
            return status
    return status


@native
def group_complete(state: int, answer: int) -> bool:
    """Take completions of the media until one completes a command; return whether one did."""
    command = scratch(COMMAND_BYTES)
    count = word(state, COUNT)
    turn = TURNS + TURN_WORDS * (seat() & (SEATS - 1))
    k = word(state, turn)
    for _ in range(count):
        k += 1
        if k >= count:
            k = 0
        at = MEDIA + M_WORDS * k
        function = word(state, at + M_COMPLETE)
        while function != 0 and call_complete(function, word(state, at + M_STATE), answer):
            tag = word(answer, A_TAG)
            is_done = True
            if tag & 1 == DIRECT:
                set_word(answer, A_TAG, tag >> 1)
            else:
                is_done = part_done(state, tag >> 7, k, answer, command)
            if is_done:
                set_word(state, turn, k)
                return True
    return False


@device
def part_done(state: int, slot: int, k: int, answer: int, command: int) -> bool:
    """Count a part that completed; answer the command if it was the last, and return whether it was.

    `command` is memory for a command.
    """
    table = word(state, TABLE)
    record = record_of(table, slot)
    op = word(record, R_OP)
    status = word(answer, A_STATUS)
    if op == READ and word(state, KIND) == REPLICATED:
        if status != 0:
            extra = word(record, R_EXTRA)
            encode_command(command, op, word(record, R_OFFSET), word(record, R_NBYTES), word(record, R_BUFFER))
            again = read_replica(state, record, slot, command, extra >> 8, extra & 0xFF)
            if again == PENDING:
                return False
            if again >= 0:  # otherwise there was no other replica
                status = again
    else:
        if status != 0:
            part_failed(state, op, k)
            compare_exchange(record + 8 * R_STATUS, 0, status, SYSTEM)
        if fetch_add(record + 8 * R_REMAINING, -1, SYSTEM) != 1:
            return False
        status = word(record, R_STATUS)
    write_answer(answer, word(record, R_TAG), status, 0)
    release_slot(table, slot)
    return True
