"""KernelStore: what kernels receive in place of a store, and the paths behind its methods."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from warpwell.nvme import KV_DELETE, KV_EXIST, KV_RETRIEVE, KV_STORE
from warpwell.queues.completion import give_place, place_of, result_of
from warpwell.queues.completion import poll as poll_id
from warpwell.queues.layout import DONE, ID_FRAMES, ID_STATE, TAKEN
from warpwell.queues.submission import field, id_record, release_id, staging_of
from warpwell.targets import (
    DEVICE,
    DeviceStruct,
    activemask,
    ballot,
    compare_exchange,
    device,
    element_address,
    fetch_add,
    ffs,
    i64,
    lane_id,
    linked,
    load_relaxed,
    rem,
    shfl,
    store_relaxed,
    struct_method,
    syncwarp,
)

from .device_cache import keep, look_up
from .requests import (
    K_CACHE,
    K_CHUNK,
    K_N_QUEUES,
    K_RETURNS,
    N_COMMANDS,
    N_HITS,
    NO_PLACE,
    TIMED_OUT,
    begin,
    copy_each,
    execute,
    queue_at,
    serve,
    start,
)
from .slots import hash_of

ABSENT = -1
FAILED = -2
"""What `retrieve`, `exists` and `store` return where the device failed or did not answer in time."""
KEY_ABSENT = 0x87


@linked
def run(core, operation, key0, key1, length, at, nbytes):
    """Carry out a command for each lane and wait for it; return ``status | size << 16`` (any set of lanes).

    `operation` is an opcode. Lanes that name different stores take turns.
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
        opcode = shfl(mask, operation, leader)
        want = want and operation == opcode
        queue = queue_at(home, shfl(mask, hash_of(key0, key1, length), leader) & 0x7FFFFFFF)
        if want:
            open_ = False
        cache = field(home, K_CACHE)
        if cache != 0 and opcode == KV_RETRIEVE:
            size = look_up(cache, want, key0, key1, length, at, nbytes, mask, lane)
            if want and size >= 0:
                fetch_add(home + 8 * N_HITS, 1, DEVICE)
                out = size << 16
                want = False
        if want:
            fetch_add(home + 8 * N_COMMANDS, 1, DEVICE)
        answer = execute(home, queue, opcode, want, -1, key0, key1, length, at, nbytes, mask, lane, leader)
        if want:
            out = answer
        if cache != 0 and opcode == KV_RETRIEVE:
            fits = want and out & 0xFFFF == 0 and out >> 16 <= nbytes
            keep(cache, fits, key0, key1, length, at, out >> 16, mask, lane)


@linked
def submit_one(core, key0, key1, length):
    """Submit a Retrieve of as much as one command carries; return a ticket, -1 where no id is free (thread)."""
    number = rem(hash_of(key0, key1, length) & 0x7FFFFFFF, field(core, K_N_QUEUES))
    cid = start(core, queue_at(core, number), KV_RETRIEVE, key0, key1, length, field(core, K_CHUNK))
    if cid < 0:
        return -1
    fetch_add(core + 8 * N_COMMANDS, 1, DEVICE)
    # for `poll_one`, should the command have to be submitted again
    record = id_record(queue_at(core, number), cid) + 8 * ID_FRAMES
    store_relaxed(record, key0, DEVICE)
    store_relaxed(record + 8, key1, DEVICE)
    store_relaxed(record + 16, length, DEVICE)
    return (number << 16) | cid


@linked
def poll_one(core, ticket):
    """Return the status of a ticket's command, -1 while it is under way; never waits (any set of lanes)."""
    mask = activemask()
    lane = lane_id()
    queue = queue_at(core, ticket >> 16)
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
    if status == NO_PLACE and field(core, K_RETURNS) != 0:
        return again(core, queue, ticket & 0xFFFF)
    return status


@device
def again(core, queue, cid):
    """Submit a command once more for which no place was free; return -1, or the status if that failed (thread)."""
    record = id_record(queue, cid)
    if compare_exchange(record + 8 * ID_STATE, DONE | (NO_PLACE << 8), TAKEN, DEVICE) != DONE | (NO_PLACE << 8):
        return -1  # another thread that polls the ticket did it
    key = record + 8 * ID_FRAMES
    key0 = load_relaxed(key, DEVICE)
    key1 = load_relaxed(key + 8, DEVICE)
    if begin(core, queue, cid, KV_RETRIEVE, key0, key1, load_relaxed(key + 16, DEVICE), field(core, K_CHUNK), 0):
        return -1
    return TIMED_OUT


@linked
def size_one(core, ticket):
    """Return the size of the value that a completed ticket brought (thread)."""
    return result_of(queue_at(core, ticket >> 16), ticket & 0xFFFF)


@linked
def take_one(core, ticket, to, room):
    """Copy a completed ticket's value and give the ticket back; return the value's size, or `ABSENT`, `FAILED`.

    Any set of lanes; all copy together.
    """
    mask = activemask()
    lane = lane_id()
    queue = queue_at(core, ticket >> 16)
    cid = ticket & 0xFFFF
    status = poll_id(queue, cid)
    size = result_of(queue, cid)
    syncwarp(mask)
    count = 0
    if status == 0:
        count = min(size, min(room, field(core, K_CHUNK)))
    source = staging_of(queue, cid)
    if status == 0 and field(core, K_RETURNS) != 0:
        source = place_of(queue, cid)
    copy_each(ballot(mask, count > 0), to, source, count, mask, lane)
    syncwarp(mask)
    if status < 0:
        return FAILED
    give_place(queue, cid)
    release_id(queue, cid)
    if status == 0:
        return size
    if status == KEY_ABSENT:
        return ABSENT
    return FAILED


# -- methods -------------------------------------------------------------------------------------------------


@device
def size_of_answer(answer):
    """Turn an answer into a size, `ABSENT` or `FAILED` (thread)."""
    status = answer & 0xFFFF
    if status == 0:
        return answer >> 16
    if status == KEY_ABSENT:
        return ABSENT
    return FAILED


def _of_key(do: Callable[..., Any], words: bool, data: bool) -> Callable[..., Any]:
    """Return a method whose key is an integer, or a tuple of the key's two words and its length."""
    if words and data:

        @device
        def with_words_and_data(view, key, data):
            return do(view, i64(key[0]), i64(key[1]), i64(key[2]), data)

        return with_words_and_data
    if words:

        @device
        def with_words(view, key):
            return do(view, i64(key[0]), i64(key[1]), i64(key[2]))

        return with_words
    if data:

        @device
        def with_integer_and_data(view, key, data):
            return do(view, i64(key), 0, 8, data)

        return with_integer_and_data

    @device
    def with_integer(view, key):
        return do(view, i64(key), 0, 8)

    return with_integer


@device
def _submit(view, key0, key1, length):
    return submit_one(view.core, key0, key1, length)


@device
def _exists(view, key0, key1, length):
    status = run(view.core, KV_EXIST, key0, key1, length, 0, 0) & 0xFFFF
    if status == 0:
        return 1
    if status == KEY_ABSENT:
        return 0
    return FAILED


@device
def _delete(view, key0, key1, length):
    return size_of_answer(run(view.core, KV_DELETE, key0, key1, length, 0, 0))


@device
def _retrieve(view, key0, key1, length, data):
    room = data.size * data.itemsize
    return size_of_answer(run(view.core, KV_RETRIEVE, key0, key1, length, element_address(data, 0), room))


@device
def _store(view, key0, key1, length, data):
    nbytes = data.size * data.itemsize
    if nbytes > view.chunk:
        return FAILED
    answer = run(view.core, KV_STORE, key0, key1, length, element_address(data, 0), nbytes)
    return size_of_answer(answer & 0xFFFF)


@device
def _poll(view, ticket):
    return poll_one(view.core, i64(ticket))


@device
def _size(view, ticket):
    return size_one(view.core, i64(ticket))


@device
def _take(view, ticket, data):
    return take_one(view.core, i64(ticket), element_address(data, 0), data.size * data.itemsize)


_KEYED = {"submit": _submit, "exists": _exists, "delete": _delete, "retrieve": _retrieve, "store": _store}
_TICKETED = {"poll": _poll, "size": _size, "take": _take}
METHODS = {
    "submit": ("view", "key"),
    "exists": ("view", "key"),
    "delete": ("view", "key"),
    "retrieve": ("view", "key", "data"),
    "store": ("view", "key", "data"),
    "poll": ("view", "ticket"),
    "size": ("view", "ticket"),
    "take": ("view", "ticket", "data"),
}


class KernelStore(DeviceStruct):
    """A store as device code sees it.

    Keys are 64-bit integers, or tuples ``(key0, key1, length)`` of a longer key's words.

    - ``submit(key)`` asks for a value and returns a ticket at once; -1 where all ids of the queue are taken.
    - ``poll(ticket)`` returns -1 while that is under way, then the status, 0 for success; it never waits.
    - ``size(ticket)`` returns the size of the value that came.
    - ``take(ticket, out)`` copies it and gives the ticket back. Each ticket must be taken once.
    - ``retrieve(key, out)`` does all of that and waits; it answers from the device cache where it can.
    - ``exists(key)``, ``store(key, value)``, ``delete(key)`` wait too.

    `take` and `retrieve` return the value's whole size, however small `out` is, -1 for an absent key, -2 where
    the device failed; the host then raises after the launch.
    """

    _methods: ClassVar[frozenset[str]] = frozenset(METHODS)

    @classmethod
    def layout(cls, static: Any) -> Sequence[tuple[str, int | None]]:
        """Return the members: address of the store's record, bytes of a command's value."""
        return [("core", None), ("chunk", None)]

    @classmethod
    def implementation(cls, name: str, static: Any, ndim: int | None) -> Callable[..., Any] | None:
        """Return the device function of a method."""
        if name in _TICKETED:
            return _TICKETED[name]
        if name in _KEYED:
            return _made(name, ndim)
        return None


@functools.cache
def _made(name: str, ndim: int | None) -> Callable[..., Any] | None:
    if ndim not in (1, 3):
        return None
    return _of_key(_KEYED[name], ndim == 3, "data" in METHODS[name])


for _name, _parameters in METHODS.items():
    struct_method(_name, *_parameters)
