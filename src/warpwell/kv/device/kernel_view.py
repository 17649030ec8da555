"""KernelStore: the struct that kernels receive for a store, and the device code of its methods."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from warpwell import errors
from warpwell.nvme.status import KV_KEY_DOES_NOT_EXIST
from warpwell.queues import field, id_record, orphan, release_id, result_of, staging_of
from warpwell.queues import poll as poll_id
from warpwell.queues.layout import (
    DONE,
    ID_COUNT,
    ID_OPCODE,
    ID_PAGE,
    ID_STATE,
    ID_USER,
    ORPHAN,
    Q_N_IDS,
    Q_PROGRESS,
    TAKEN,
)
from warpwell.storage import free_return_slot, return_slot_of
from warpwell.targets import DeviceStruct, device, linked
from warpwell.targets.primitives import (
    DEVICE,
    activemask,
    ballot,
    clock_ns,
    compare_exchange,
    element_address,
    fetch_add,
    ffs,
    i64,
    items_at,
    lane_id,
    load_acquire,
    load_relaxed,
    rem,
    shfl,
    store_relaxed,
    store_release,
    syncwarp,
)

from ..index.sealed import hash_of
from ..native import UINT32
from ..schema import LENGTH_BYTES, Schema
from .device_cache import copy_each, look_up
from .requests import (
    BAD_BUFFER,
    BAD_TICKET,
    K_CACHE,
    K_CHUNK,
    K_FAILED,
    K_N_QUEUES,
    K_QUEUES,
    K_RETURNS,
    K_STATUS,
    K_TIMEOUT,
    LOST_TIMEOUTS,
    N_COMMANDS,
    N_HITS,
    NO_SLOT,
    TIMED_OUT,
    begin,
    execute,
    queue_at,
    serve,
    should_stop,
    start,
)

ABSENT = -1
FAILED = -2
"""Result of `retrieve` and `exists` if the device failed or did not answer in time."""

# Words of an id's record while a ticket holds the id.
ID_USE = ID_PAGE
"""Twice the number of tickets that had this id, plus 1 while a ticket is held."""
ID_SEEN = ID_COUNT
"""Number of completions of all queues at a poll, followed by the time of its last change (0 before the first poll)."""
ID_SINCE = ID_OPCODE
ID_BEGUN = ID_USER + 3
"""Time of the first poll of the command."""
USES = (1 << 31) - 1


@device
def record_failure(core, status):
    """Record a failure for the host, which raises it after the launch (thread)."""
    if status != 0 and status != KV_KEY_DOES_NOT_EXIST:
        store_relaxed(core + 8 * K_STATUS, status, DEVICE)
        fetch_add(core + 8 * K_FAILED, 1, DEVICE)


@device
def size_of_answer(answer):
    """Return the size of an answer, or `ABSENT` or `FAILED` (thread)."""
    status = answer & 0xFFFF
    if status == 0:
        return answer >> 16
    if status == KV_KEY_DOES_NOT_EXIST:
        return ABSENT
    return FAILED


@linked
def retrieve_for_lanes(core, key0, key1, length, at, nbytes):
    """Retrieve a value for each lane and wait for it; return ``status | size << 16`` (any set of lanes).

    With 0 bytes only the value's size is requested. Lanes with different stores execute one after another.
    """
    mask = activemask()
    lane = lane_id()
    open_ = True
    out = 0
    while True:
        todo = ballot(mask, open_)
        if todo == 0:
            return out
        leader = ffs(todo) - 1
        home = shfl(mask, core, leader)
        want = open_ and core == home
        queue = queue_at(home, shfl(mask, hash_of(key0, key1, length), leader) & 0x7FFFFFFF)
        if want:
            open_ = False
        cache = field(home, K_CACHE)
        if cache != 0:
            size = look_up(cache, want, key0, key1, length, at, nbytes, mask, lane)
            if want and size >= 0:
                fetch_add(home + 8 * N_HITS, 1, DEVICE)
                out = size << 16
                want = False
        if want:
            fetch_add(home + 8 * N_COMMANDS, 1, DEVICE)
        answer = execute(home, queue, want, key0, key1, length, at, nbytes, mask, lane, leader)
        if want:
            out = answer
            record_failure(home, answer & 0xFFFF)


@linked
def submit_ticket(core, key0, key1, length):
    """Submit a Retrieve for the first piece of a value; return a ticket, or -1 if no id is free (thread)."""
    number = rem(hash_of(key0, key1, length) & 0x7FFFFFFF, field(core, K_N_QUEUES))
    cid = start(core, queue_at(core, number), key0, key1, length, field(core, K_CHUNK))
    if cid < 0:
        return -1
    fetch_add(core + 8 * N_COMMANDS, 1, DEVICE)
    # `poll_ticket` needs the key if it has to submit the command again
    record = id_record(queue_at(core, number), cid) + 8 * ID_USER
    store_relaxed(record, key0, DEVICE)
    store_relaxed(record + 8, key1, DEVICE)
    store_relaxed(record + 16, length, DEVICE)
    record -= 8 * ID_USER
    use = ((load_relaxed(record + 8 * ID_USE, DEVICE) >> 1) + 1) & USES
    store_relaxed(record + 8 * ID_SINCE, 0, DEVICE)
    # A release: a thread that receives the ticket must not see the state that the previous owner left.
    store_release(record + 8 * ID_USE, (use << 1) | 1, DEVICE)
    return (use << 32) | (number << 16) | cid


@device
def record_of(core, ticket):
    """Return the id record of a ticket, or 0 if the ticket is invalid or no longer held (thread).

    Acquires the writes of `submit_ticket`: the id is taken, and its key is stored.
    """
    number = (ticket >> 16) & 0xFFFF
    if ticket < 0 or number >= field(core, K_N_QUEUES):
        return 0
    queue = queue_at(core, number)
    cid = ticket & 0xFFFF
    if cid >= field(queue, Q_N_IDS):
        return 0
    record = id_record(queue, cid)
    if load_acquire(record + 8 * ID_USE, DEVICE) != use_of(ticket):
        return 0
    return record


@device
def use_of(ticket):
    """Return the word `ID_USE` of a ticket that is held (thread)."""
    return ((ticket >> 32) << 1) | 1


@device
def end_ticket(record, ticket):
    """End a ticket; return False if another thread already ended it (thread)."""
    use = use_of(ticket)
    return compare_exchange(record + 8 * ID_USE, use, use - 1, DEVICE) == use


@device
def expire_overdue(core, queue, record, ticket):
    """Time a ticket out if for too long no command, or only other commands, completed; return whether it timed out."""
    count = load_relaxed(field(queue, Q_PROGRESS), DEVICE)
    since = load_relaxed(record + 8 * ID_SINCE, DEVICE)
    if since == 0 or count != load_relaxed(record + 8 * ID_SEEN, DEVICE):
        now = clock_ns()
        if since == 0:
            store_relaxed(record + 8 * ID_BEGUN, now, DEVICE)
        store_relaxed(record + 8 * ID_SEEN, count, DEVICE)
        store_relaxed(record + 8 * ID_SINCE, now, DEVICE)
        if now - load_relaxed(record + 8 * ID_BEGUN, DEVICE) <= LOST_TIMEOUTS * field(core, K_TIMEOUT):
            return False
    elif not should_stop(core, since):
        return False
    if end_ticket(record, ticket):
        if orphan(queue, ticket & 0xFFFF, ORPHAN) >= 0:
            # the completion has just arrived: the ticket keeps the id and stays valid
            store_release(record + 8 * ID_USE, use_of(ticket), DEVICE)
            return False
        record_failure(core, TIMED_OUT)
    return True


@linked
def poll_ticket(core, ticket):
    """Return the status of a ticket's command, or -1 while it is in flight; never waits (any set of lanes)."""
    mask = activemask()
    lane = lane_id()
    record = record_of(core, ticket)
    queue = field(core, K_QUEUES)
    status = BAD_TICKET
    if record != 0:
        queue = queue_at(core, (ticket >> 16) & 0xFFFF)
        status = poll_id(queue, ticket & 0xFFFF)
    open_ = status < 0
    while True:
        todo = ballot(mask, open_)
        if todo == 0:
            break
        leader = ffs(todo) - 1
        current = shfl(mask, queue, leader)
        serve(current, mask, lane, leader)
        if queue == current:
            open_ = False
    if status < 0:
        status = poll_id(queue, ticket & 0xFFFF)
    if status == NO_SLOT and field(core, K_RETURNS) != 0:
        return resubmit(core, queue, ticket & 0xFFFF)
    if status < 0 and expire_overdue(core, queue, record, ticket):
        return TIMED_OUT
    return status


@device
def resubmit(core, queue, cid):
    """Submit a command again that found no free slot; return -1, or the status if that failed (thread)."""
    record = id_record(queue, cid)
    if compare_exchange(record + 8 * ID_STATE, DONE | (NO_SLOT << 8), TAKEN, DEVICE) != DONE | (NO_SLOT << 8):
        return -1  # another thread that polls the ticket has submitted it
    # the refusal was an answer, so the timeout starts again
    store_relaxed(record + 8 * ID_SINCE, 0, DEVICE)
    key = record + 8 * ID_USER
    key0 = load_relaxed(key, DEVICE)
    key1 = load_relaxed(key + 8, DEVICE)
    if begin(core, queue, cid, key0, key1, load_relaxed(key + 16, DEVICE), field(core, K_CHUNK), 0):
        return -1
    return TIMED_OUT


@linked
def ticket_size(core, ticket):
    """Return the size of the value of a completed ticket, or `ABSENT` or `FAILED` (thread)."""
    if record_of(core, ticket) == 0:
        return FAILED
    queue = queue_at(core, (ticket >> 16) & 0xFFFF)
    status = poll_id(queue, ticket & 0xFFFF)
    if status == 0:
        return result_of(queue, ticket & 0xFFFF)
    if status == KV_KEY_DOES_NOT_EXIST:
        return ABSENT
    return FAILED


@linked
def take_ticket(core, ticket, to, room):
    """Copy a completed ticket's value and release the ticket; return the value's size, or `ABSENT`, `FAILED`.

    Any set of lanes, which copy together.
    """
    mask = activemask()
    lane = lane_id()
    queue = field(core, K_QUEUES)
    cid = 0
    status = BAD_TICKET
    record = record_of(core, ticket)
    if room >= 0 and record != 0:
        queue = queue_at(core, (ticket >> 16) & 0xFFFF)
        cid = ticket & 0xFFFF
        status = poll_id(queue, cid)
        if status == NO_SLOT and field(core, K_RETURNS) != 0:
            status = -1
        # if several threads take a ticket, one thread gets it
        if status >= 0 and not end_ticket(record, ticket):
            status = BAD_TICKET
    size = 0
    count = 0
    source = 0
    if status == 0:
        size = result_of(queue, cid)
        count = min(size, min(room, field(core, K_CHUNK)))
        source = staging_of(queue, cid)
        if field(core, K_RETURNS) != 0:
            source = return_slot_of(queue, cid)
    copying_lanes = ballot(mask, count > 0)
    syncwarp(mask)
    copy_each(copying_lanes, to, source, count, mask, lane)
    syncwarp(mask)
    if status < 0:
        return FAILED
    if room < 0:
        record_failure(core, BAD_BUFFER)
        return FAILED
    record_failure(core, status)
    if status == BAD_TICKET:
        return FAILED
    free_return_slot(queue, cid)
    release_id(queue, cid)
    return size_of_answer(status | (size << 16))


# -- methods -------------------------------------------------------------------------------------------------


@device
def words_of_integer(key):
    """Return the two words and the length of an integer's key (thread)."""
    return i64(key), 0, 8


@device
def words_of_tuple(key):
    """Return the two words and the length of a key, which is passed as a tuple of these (thread)."""
    return i64(key[0]), i64(key[1]), i64(key[2])


@device
def capacity_of(data):
    """Return the bytes of an array, or -1 if it is not contiguous (thread)."""
    last = data.size - 1
    if last > 0 and element_address(data, last) - element_address(data, 0) != last * data.itemsize:
        return -1
    return data.size * data.itemsize


@device
def _submit(view, key0, key1, length):
    return submit_ticket(view.core, key0, key1, length)


@device
def _exists(view, key0, key1, length):
    status = retrieve_for_lanes(view.core, key0, key1, length, 0, 0) & 0xFFFF
    if status == 0:
        return 1
    if status == KV_KEY_DOES_NOT_EXIST:
        return 0
    return FAILED


@device
def _retrieve(view, key0, key1, length, data):
    room = capacity_of(data)
    if room < 0:
        record_failure(view.core, BAD_BUFFER)
        return FAILED
    return size_of_answer(retrieve_for_lanes(view.core, key0, key1, length, element_address(data, 0), room))


@device
def _poll(view, ticket):
    return poll_ticket(view.core, i64(ticket))


@device
def _length(view, ticket):
    return ticket_size(view.core, i64(ticket))


@device
def _take(view, ticket, data):
    return take_ticket(view.core, i64(ticket), element_address(data, 0), capacity_of(data))


def _field_reader(schema: Schema | None, name: str) -> Callable[..., Any]:
    """Return the device function that finds a field in a row with the bytes of a record.

    A field that exceeds the row is empty, and a scalar is 0: a row without a record may hold any numbers as lengths.
    """
    if schema is None:
        raise errors.DTypeError(f"field({name!r}) needs a store with a schema: the values of this store are bytes")
    field = next(f for f in schema.fields if f.name in schema.check_names([name]))
    dtype, offset, nbytes, record_bytes = field.dtype, field.offset, field.nbytes, schema.nbytes
    if dtype.kind == "c":
        raise errors.DTypeError(f"field {name!r} is {dtype}: kernels have no complex items, store two fields of floats")
    # The returned functions are inlined, because on a GPU a function cannot return an array that it did not receive.
    if not field.shape:
        zero = dtype.type(0)

        @device
        def load(row):
            if capacity_of(row) < record_bytes:
                return zero
            return items_at(element_address(row, 0) + offset, 1, dtype)[0]

        return lambda view, row, name: load(row)

    if field.is_ragged:
        lengths_at, position = schema.ragged[0].offset, schema.ragged.index(field)
        row_bytes = tuple(f.nbytes for f in schema.ragged)

        @device
        def locate(row):
            room = capacity_of(row)
            if room < record_bytes:
                return 0, 0
            base = element_address(row, 0)
            end = record_bytes
            for k in range(position):
                length = length_at(base + lengths_at + LENGTH_BYTES * k)
                end = min(((end + 7) & ~7) + length * row_bytes[k], room + 1)
            end = (end + 7) & ~7
            length = length_at(base + offset)
            if end + length * nbytes > room:
                length = 0
            return base + end, length

    else:
        extent = field.shape[0]

        @device
        def locate(row):
            if capacity_of(row) < record_bytes:
                return 0, 0
            return element_address(row, 0) + offset, extent

    inner_shape = field.shape[1:]

    def array(view, row, name):
        address, length = locate(row)
        return items_at(address, (length, *inner_shape), dtype)

    return array


@device
def length_at(address):
    """Return the length of a ragged field (thread)."""
    return i64(items_at(address, 1, UINT32)[0])


METHODS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "submit": (_submit, ("view", "key")),
    "exists": (_exists, ("view", "key")),
    "retrieve": (_retrieve, ("view", "key", "data")),
    "poll": (_poll, ("view", "ticket")),
    "length": (_length, ("view", "ticket")),
    "take": (_take, ("view", "ticket", "data")),
    "field": (None, ("view", "row", "name")),
}
"""The device function of each method, and its parameters."""


class KernelStore(DeviceStruct):
    """A store in device code.

    Keys are 64-bit integers, or tuples ``(key0, key1, length)`` of a longer key's words.

    - ``submit(key)`` requests a value and returns a ticket at once, or -1 if too many tickets are held: then `take` the
      values of some tickets first, or use `retrieve`, for which ids are reserved.
    - ``poll(ticket)`` returns -1 while the request is in flight, then its status, 0 for success; it never waits.
      Another status means that the command failed (then call `take` to release the ticket), that it timed out (after
      the store's timeout, or four times as long while other commands are answered), or that the ticket is not held.
    - ``length(ticket)`` returns the size of the value that arrived.
    - ``take(ticket, out)`` copies the value and releases the ticket; it returns -2 before the value has arrived. Take
      each ticket exactly once: a second `take` returns -2, and the host raises an error after the launch.
    - ``retrieve(key, out)`` submits, waits and takes; it reads from the device cache if the value is there.
    - ``exists(key)`` waits for the answer and returns 1 or 0.
    - ``field(row, name)`` returns a field of the record in a row of bytes, which `retrieve` or `take` filled: a number,
      or an array that shares the row's memory, of the field's shape or, if it is ragged, of its own length. `name` is a
      constant. If the row is too short to hold the field, the result is 0 or empty.

    Arrays must be in the device's global memory, one-dimensional and contiguous.

    `take` and `retrieve` return the size of the whole value, even if `out` is smaller, -1 for an absent key, and -2 if
    the device failed; the host then raises an error after the launch.
    """

    methods: ClassVar[Mapping[str, tuple[str, ...]]] = {name: names for name, (_, names) in METHODS.items()}

    @classmethod
    def layout(cls, static: Any) -> Sequence[tuple[str, int | None]]:
        """Return the member: address of the store's record."""
        return [("core", None)]

    @classmethod
    def implementation(cls, name: str, static: Any, key: int | str | None) -> Callable[..., Any] | None:
        """Return the device function of a method."""
        function, parameters = METHODS.get(name, (None, ()))
        return _made(name, static, key) if {"key", "name"} & set(parameters) else function


@functools.cache
def _made(name: str, schema: Schema | None, key: int | str | None) -> Callable[..., Any] | None:
    function, parameters = METHODS[name]
    if "name" in parameters:
        return _field_reader(schema, key) if isinstance(key, str) else None
    if key not in (1, 3):
        return None
    words_of = words_of_integer if key == 1 else words_of_tuple  # by the number of items in a key
    if "data" in parameters:
        return lambda view, key, data: function(view, *words_of(key), data)
    return lambda view, key: function(view, *words_of(key))
