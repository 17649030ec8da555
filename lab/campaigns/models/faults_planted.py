"""Planted faults: small changes of device code. The scenarios must find each of them.

A fault replaces the code of functions by compiled code of a changed source. So every module that has imported the
function runs the changed code, and nothing is registered twice. The old text must occur in the module exactly once:
without it, planting the fault raises, so that no fault is silently absent.

Some faults that suggest themselves are harmless in this protocol. `HARMLESS` has these changes, and a similar harmful
change is planted as a fault:

*DIRTY set before the store.* The page is pinned while the group stores, and write-backs and flushes skip pinned pages,
so DIRTY may be set at any time before the unpinning. It is harmful to release the pin, with DIRTY, before the store.

*Mark cleared early.* The mover may clear marks long before it rings the doorbell, because a cleared mark does not stand
for a rung doorbell. It is harmful to clear a mark before the tail has reached it.

*Entry released before its key is read.* The thread that reads the entry fetches no other entry in the meantime. There
are half as many ids as entries, so no submitter reaches this entry again.

*Turns kept by a rewind.* Threads are admitted to entries that the controller has not fetched. They overwrite nothing,
because there are half as many ids as entries.

A generation of 2 bits needs a reader that sleeps through four evictions of its page, so its `Focus` has one frame, two
pages and threads that only read.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

from .adversary import LONG, MIDDLE
from .cache_model import Focus


@dataclass(frozen=True)
class Edit:
    """A change of one function of ``warpwell.<module>``: `old`, which occurs once in the module, becomes `new`.

    The name of a method includes its class.
    """

    module: str
    function: str
    old: str
    new: str


@dataclass(frozen=True)
class Fault:
    """A fault: its name, the scenario that finds it, a description, and the edits that plant it.

    Tests start with `seed`, which found the fault.
    """

    name: str
    scenario: str
    description: str
    edits: tuple[Edit, ...]
    focus: Focus = field(default_factory=Focus)
    seed: int = 0


_SUBMIT = "queues.submission"
_DRAIN = "queues.completion"
_PAIR = "queues.pair"
_SERVE = "storage.serve"
_POOL = "storage.io_threads"
_DRIVE = "drives.medium"
_ID_FREED = "    write_answer(answer, word(record, I_TAG), status, 0)\n    release_id(queue, cid)\n"
_WRITTEN = "cache.written"
_NOTED = "    store_relaxed(stats + 8 * (at.STATS_WORDS + (position & (at.WRITTEN_WORDS - 1))), page, DEVICE)\n"
_RINGS = "drives.controller"
_GPU = "scheduler.executors.cuda_executor"
_SERVED = "queues, generation\n            drive"
_RELAY = "drives.doorbell_forwarder"
_LAUNCHES_FIRST = """        launches = load_acquire(record + 8 * R_LAUNCHES, SYSTEM)
        work = forward(record)
"""
_WORDS_FIRST = "\n".join(reversed(_LAUNCHES_FIRST.splitlines())) + "\n"
_LAUNCH_COUNTED = """        with self._lock:
            self._record[R_LAUNCHES] += 1
            self._launch_count += 1
        try:
            self._pool.submit(self._slots)
        except BaseException:
            self.end()
            raise
"""
_LAUNCH_SUBMITTED = """        self._pool.submit(self._slots)
        with self._lock:
            self._record[R_LAUNCHES] += 1
            self._launch_count += 1
"""
_REQUESTS = "kv.device.requests"
_DEVICE_CACHE = "kv.device.device_cache"
_TICKETS = "kv.device.kernel_view"
_HIT = "cache.hit"
_WORDS_OF = "array.spans.words"
_SPAN_UNPINNED = "        if lane == leader and frame >= 0:\n            unpin(word, DIRTY)\n"
_ROW_KERNELS = "array.gather.kernels"
_UNITS_LOADED = "load_units(source, second_source, unit)\n"

_PULL = """        page_shift = field(core, at.C_PAGE_SHIFT)
        for k in range(pages):
            # frames"""
_FREED = """            release_id(queue, cid)
        return frame
    if lane == leader:
        _read_failed("""
_ENTRY_WRITTEN = """    store_relaxed(entry, word0, SYSTEM)
    store_relaxed(entry + 24, prp1, SYSTEM)
    if prp2 != 0:
        store_relaxed(entry + 32, prp2, SYSTEM)
    store_relaxed(entry + 40, slba, SYSTEM)
    store_relaxed(entry + 48, control, SYSTEM)
"""
_MARK = """    mark(queue, ticket, mask)
"""
_BELL = """            fence(SYSTEM)
            store_relaxed(field(queue, at.Q_SQ_DOORBELL), tail & mask, SYSTEM)
"""
_TAIL = """            store_release(queue + 8 * at.Q_TAIL, tail, DEVICE)
"""
_PHASE = """        word1 = load_acquire(entry_of(queue, position, shift) + 8, SYSTEM)
"""
_RESULT = "store_result(queue, cid, load_relaxed(entry_of(queue, position, shift), SYSTEM))"
_TURNED = """            self._device.write(self._areas[k], np.zeros(2 * self.depth, np.int64))  # turns and marks
"""
_EMPTIED = """            self._shared.words[rings : rings + (80 * self.depth + 2 * LINE) // 8] = 0
"""
_BEST = "        # the last entry has the newest"
_KEEP_LATE = """        if has_entry and results != 0:
            store_relaxed(id_record(queue, cid) + 8 * at.ID_RESULT,
                          load_relaxed(entry_of(queue, position, shift), SYSTEM), DEVICE)
"""
_TAKEN_HEAD = """    if count > 0:
        # release order, because submitters see from this value that the entries were read
        store_release(port + 8 * at.P_SQ_HEAD, head + count, SYSTEM)
"""
_FETCHING = """    lock = port + 8 * at.P_FETCH_LOCK
    if load_relaxed(lock, SYSTEM) != 0 or exchange(lock, 1, SYSTEM) != 0:
"""
_FETCHED = """    store_release(lock, 0, SYSTEM)
    return count


@device
def window_capacity"""
_LINGERED = """                    timed_out = not self._changed.wait(IDLE_TIMEOUT)
                    self._parked -= 1
"""
_THREAD_EXITS = """                    timed_out = not self._changed.wait(IDLE_TIMEOUT)
                    self._parked -= 1
                    if timed_out:
                        self.threads -= 1
                        return
"""
_ALONE = """            if new < 1 and not woken and not slots.occupied:
                new = 1
"""
_EACH_TAKEN = """    for k in range(count):
        entry = field(port, at.P_SQ)"""
_COPIES = """    cache = field(core, K_CACHE)
"""
_FENCED = """    syncwarp(mask)
    fence(DEVICE)
"""
_FILLED = """    copy_each(filling, to, source, piece, mask, lane)
    syncwarp(mask)
    if entry != 0:
        return to  # the later copies read the device's memory: the value passes the bus once
"""
_PIECE_READ = """                offset += piece
"""
_LATER = """                if entry != 0 and not more:
                    copy_each(mask, bytes_of(field(core, K_CACHE), entry), at, size, mask, lane)
"""
_EVEN = """    store_release(entry + 8 * W_VERSION, load_relaxed(entry + 8 * W_VERSION, DEVICE) + 1, DEVICE)


@device
def abandon"""
_EARLY = """    if status >= 0:
        """
_ANSWERED = """    release_id(queue, cid)
    return -1, offset, status"""
_SLOT_FREED = """                free_return_slot(queue, cid)
                refused = False
"""
_POSTED = """    store_release(entry + 8, completion_word1("""
_STORE = """            if frame >= 0:
                load_acquire(word, DEVICE)
                if operation != LOAD:
                    # a reader that mistakes the new item for one of the frame's old page then sees that page's new word
                    fence(DEVICE)
                out = apply(frame_address(core, frame) + offset, bits, size, operation)
"""
_UNPIN = """            dirty = 0
            if changed != 0:
                dirty = DIRTY
            unpin(word, dirty)
"""

_DIRECT_MAPPED = "            if load_word(view.table + 8 * page) & READABLE == 0:\n"
_LAST = """                unpin(word_address(core, page), 0)
                return_credit(core, space, page)
"""

_WORD_RECORDED = """        word = word_address(core, page)
        if load_relaxed(word, DEVICE) == recorded:
"""
_FOLLOWING = """        store_relaxed(slot + 8 * S_NEXT, following, DEVICE)
"""
_ONE_LESS = """        store_relaxed(slot + 8 * S_LEFT, load_relaxed(slot + 8 * S_LEFT, DEVICE) - 1, DEVICE)
"""
_ONE_LESS_AT_END = """    store_relaxed(slot + 8 * S_LEFT, load_relaxed(slot + 8 * S_LEFT, DEVICE) - 1, DEVICE)
"""
_RELAXED_LOAD = Edit(_HIT, "load_word", "return load_acquire(address", "return load_relaxed(address")
_NO_VALIDATION = Edit(
    _HIT,
    "validate_read",
    "    return word & READABLE != 0 and (word ^ again) & IDENTITY == 0\n",
    "    return word & READABLE != 0\n",
)
_GROUPS = """        groups = load(view.frames + (frame_of(word) << shift) + at - (page << shift), step * size)
"""
_COPIED = """    copy_foreign(buffer, frames + (frame_of(word) << shift) + first, nbytes)
"""
_FENCE = "        fence(DEVICE)\n"
_UNFENCED_COPY = Edit(_HIT, "copy_part", _COPIED + "    fence(DEVICE)\n", _COPIED)
_FOLDED = """                if is_valid:
                    is_done, total = use_four("""

FAULTS = (
    Fault(
        "recheck-removed",
        "cache",
        "a reader does not validate the page word after the read",
        (Edit(_HIT, "item_reader", "            if validate_read(address, word):", "            if True:"),),
        seed=90,
    ),
    Fault(
        "fence-removed",
        "frame",
        "nothing orders INVALID before the new bytes of the frame",
        (Edit("cache.transfer", "fill", "    syncwarp(mask)\n    fence(DEVICE)\n", "    syncwarp(mask)\n"),),
    ),
    Fault(
        "store-fence-removed",
        "cache",
        "nothing orders the old page's INVALID before a store under a pin",
        (Edit("cache.access", "access", "                    fence(DEVICE)\n", "                    pass\n"),),
        Focus(frames=1, pages=2, readers=True, naps=MIDDLE, writers=True),
        seed=1631,
    ),
    Fault(
        "mark-cleared-early",
        "queue",
        "the mover clears the mark after the tail before the tail has reached it",
        (Edit(_SUBMIT, "ring", _TAIL, _TAIL + "            exchange(marks + 8 * ((tail + 1) & mask), 0, DEVICE)\n"),),
        seed=51,
    ),
    Fault(
        "mark-set-early",
        "queue",
        "the mark is set before the 64 bytes are written",
        (Edit(_SUBMIT, "submit", _ENTRY_WRITTEN + _MARK, _MARK + _ENTRY_WRITTEN),),
    ),
    Fault(
        "second-look-removed",
        "queue",
        "the mover does not load the mark of the new tail again",
        (Edit(_SUBMIT, "ring", _TAIL + "            moved = False\n", _TAIL + "            return\n"),),
        seed=123,
    ),
    Fault(
        "mark-not-put-back",
        "ring",
        "marks after a mark that another thread owns are cleared and lost",
        (Edit(_SUBMIT, "take_marks", "    if run < 1 and b != 0:\n        exchange(second, b, DEVICE)\n", ""),),
        seed=69,
    ),
    Fault(
        "run-not-acquired",
        "ring",
        "nothing orders the entries of a run before the doorbell",
        (Edit(_SUBMIT, "ring", _BELL, _BELL.replace("            fence(SYSTEM)\n", "").replace("relaxed", "release")),),
    ),
    Fault(
        "run-over-a-hole",
        "ring",
        "the mover takes the marks of a run without checking that all are set",
        (Edit(_SUBMIT, "take_marks", "        if a == 0 or b == 0 or c == 0 or d == 0:\n            break\n", ""),),
        seed=69,
    ),
    Fault(
        "tail-before-doorbell",
        "queue",
        "the tail is stored first, so two movers ring out of order",
        (Edit(_SUBMIT, "ring", _BELL + _TAIL, _TAIL + _BELL),),
    ),
    Fault(
        "doorbell-relaxed",
        "queue",
        "the doorbell does not release the ring entries",
        (Edit(_SUBMIT, "ring", _BELL, _BELL.replace("fence(SYSTEM)", "pass")),),
    ),
    Fault(
        "phase-relaxed",
        "queue",
        "the consumer reads the phase word without acquire",
        (Edit(_DRAIN, "drain", "word1 = load_acquire(entry_of(", "word1 = load_relaxed(entry_of("),),
    ),
    Fault(
        "other-queue-believed",
        "lies",
        "a completion for another queue completes a command of this queue",
        (Edit(_DRAIN, "is_of_queue", "word1_sqid(word1) == field(queue, at.Q_SQID)", "True"),),
    ),
    Fault(
        "any-cid-believed",
        "lies",
        "a completion with an old generation completes the command of an id",
        (
            Edit(
                _DRAIN,
                "deliver",
                "    use = state_word(queue, cid, 0)\n    found =",
                "    use = load_relaxed(record + 8 * at.ID_STATE, DEVICE) & ~at.KIND\n    found =",
            ),
        ),
    ),
    Fault(
        "cid-used-again",
        "lies",
        "an id has the same cid at each use, and a completion of an earlier use completes it",
        (Edit(_SUBMIT, "release_id", "state_word(queue, after, at.FREE)", "state_word(queue, cid, at.FREE)"),),
    ),
    Fault(
        "any-head-believed",
        "lies",
        "a completion with a head beyond the ring completes a command",
        (Edit(_DRAIN, "is_of_queue", "word1_sqhd(word1) >> shift == 0", "True"),),
    ),
    Fault(
        "head-not-masked",
        "lies",
        "turns are raised up to a head outside of the ring",
        (Edit(_DRAIN, "_admit_next_lap", "    fetched &= mask\n", ""),),
    ),
    Fault(
        "turn-overtaken",
        "lies",
        "a thread waits for exactly its turn, and misses it if a later turn has started",
        (
            Edit(
                _SUBMIT,
                "take_entry",
                "while load_acquire(turn, DEVICE) < ticket >> shift:",
                "while load_acquire(turn, DEVICE) != ticket >> shift:",
            ),
        ),
    ),
    Fault(
        "completed-twice",
        "lies",
        "a completion of an id that is free or done goes into the ready ring",
        (
            Edit(
                _DRAIN,
                "deliver",
                "    return NOT_IN_FLIGHT\n",
                "    store_relaxed(record + 8 * at.ID_STATUS, status, DEVICE)\n    return NO_WAITER\n",
            ),
        ),
        seed=40,
    ),
    Fault(
        "lie-not-latched",
        "lies",
        "an entry that completes no command is skipped without latching the loss",
        (Edit(_DRAIN, "drain", "            if fate == NOT_IN_FLIGHT:\n", "            if False:\n"),),
    ),
    Fault(
        "orphans-not-aborted",
        "loss",
        "commands of waiters that gave up are not aborted",
        (Edit(_PAIR, "QueuePairs.abort", "kinds <= at.ORPHAN", "kinds < at.ORPHAN"),),
    ),
    Fault(
        "old-entries-kept",
        "loss",
        "completions of the lost controller stay in the rings, and look new",
        (Edit(_PAIR, "QueuePairs._clear", _EMPTIED, "            pass\n"),),
    ),
    Fault(
        "marks-kept",
        "loss",
        "a mark of a killed thread passes for the mark of an entry",
        (Edit(_PAIR, "QueuePairs._clear", _TURNED, _TURNED.replace("2 * self.depth", "self.depth")),),
    ),
    *(
        Fault(
            f"{name}-kept",
            "loss",
            f"the rewind keeps the previous {name}",
            (Edit(_PAIR, "QueuePairs._clear", old, new),),
        )
        for name, old, new in (
            ("ticket", "[at.Q_TICKET, at.Q_TAIL", "[at.Q_TAIL"),
            ("tail", "at.Q_TICKET, at.Q_TAIL,", "at.Q_TICKET,"),
            ("drain-lock", "at.Q_TAIL, at.Q_CQ_LOCK,", "at.Q_TAIL,"),
            ("completion-head", "at.Q_CQ_HEAD, at.Q_SQ_HEAD", "at.Q_SQ_HEAD"),
            ("submission-head", "at.Q_CQ_HEAD, at.Q_SQ_HEAD", "at.Q_CQ_HEAD"),
            ("controller-s-head", "[at.P_SQ_HEAD, at.P_CQ_TAIL", "[at.P_CQ_TAIL"),
        )
    ),
    Fault(
        "loss-kept",
        "loss",
        "the next controller is reported as lost",
        (Edit(_PAIR, "QueuePairs.rewind", "        self._loss[:] = 0\n", ""),),
    ),
    Fault(
        "staging-freed-at-sqhd",
        "cache",
        "the id and its staging buffer are free before the page is pulled",
        (
            Edit(
                "cache.paging",
                "load_page",
                _PULL,
                "        if lane == leader:\n            release_id(queue, cid)\n" + _PULL,
            ),
            Edit("cache.paging", "load_page", _FREED, _FREED.replace("release_id(queue, cid)", "pass", 1)),
        ),
        seed=515,
    ),
    Fault(
        "unpinned-before-store",
        "cache",
        "the pin is released, and DIRTY set, before the store (see the module's docstring)",
        (
            Edit(
                "cache.access",
                "access",
                _STORE,
                "            if frame >= 0:\n"
                "                unpin(word, DIRTY if operation != LOAD else 0)\n"
                "                out = apply(frame_address(core, frame) + offset, bits, size, operation)\n",
            ),
            Edit("cache.access", "access", _UNPIN, "            pass\n"),
        ),
    ),
    Fault(
        "filler-pin-removed",
        "cache",
        "a page is published without the pin of the group that loaded it",
        (
            Edit("cache.paging", "load_page", "                if k == 0:\n                    pins = 1\n", ""),
            Edit("cache.paging", "unpin", "(old - PIN) | dirty", "(old - PIN if old & PINS else old) | dirty"),
        ),
    ),
    Fault(
        "generation-of-2-bits",
        "cache",
        "the generation is the same again after four evictions",
        (Edit("cache.word", "evicted", "(generation_of(word) + 1) & GEN_MAX", "(generation_of(word) + 1) & 3"),),
        Focus(frames=1, pages=2, readers=True, naps=LONG),
        seed=95,
    ),
    Fault(
        "hole-published",
        "known",
        "a page is published although other threads have written it since its word was loaded",
        (
            Edit(
                "cache.known_pages",
                "publish_known",
                _WORD_RECORDED,
                _WORD_RECORDED.replace(
                    "        if load_relaxed(word, DEVICE) == recorded:\n",
                    "        recorded = load_relaxed(word, DEVICE)\n        if state_of(recorded) == INVALID:\n",
                ),
            ),
        ),
        seed=267,
    ),
    Fault(
        "generation-kept",
        "known",
        "an eviction does not increment the generation",
        (Edit("cache.word", "evicted", "(generation_of(word) + 1) & GEN_MAX", "generation_of(word)"),),
        seed=539,
    ),
    Fault(
        "wave-over-its-bound",
        "known",
        "the clock continues until it finds a frame",
        (Edit("cache.frames", "try_alloc_frame", "load_relaxed(pool + 8 * at.F_HAND, DEVICE) < limit", "True"),),
    ),
    Fault(
        "staging-taken-early",
        "known",
        "a read counts as done when it is submitted",
        (
            Edit("storage.host_reads", "finish_row", _ONE_LESS_AT_END, ""),
            Edit("storage.host_reads", "submit_rows", _FOLLOWING, _FOLLOWING + _ONE_LESS),
        ),
    ),
    Fault(
        "run-lost",
        "known",
        "a second completion is taken and lost while a row is marked as done",
        (
            Edit(
                "storage.host_reads",
                "take_rows",
                "        done += 1\n        cid = take_ready(queue)\n",
                "        done += 1\n        cid = take_ready(queue)\n        cid = take_ready(queue)\n",
            ),
        ),
    ),
    Fault(
        "result-before-phase",
        "key-value",
        "dw0 is read before the phase word is checked",
        (
            Edit(
                _DRAIN,
                "drain",
                _PHASE,
                "        early = load_relaxed(entry_of(queue, position, shift), SYSTEM)\n" + _PHASE,
            ),
            Edit(_DRAIN, "drain", _RESULT, "store_result(queue, cid, early)"),
        ),
    ),
    Fault(
        "result-after-done",
        "key-value",
        "the id is marked as done before its dw0 is stored",
        (Edit(_DRAIN, "drain", _RESULT, "True"), Edit(_DRAIN, "drain", _BEST, _KEEP_LATE + _BEST)),
    ),
    Fault(
        "completion-before-value",
        "key-value",
        "the phase word does not release the value",
        (Edit(_SERVE, "write_completion", _POSTED, _POSTED.replace("release", "relaxed")),),
    ),
    Fault(
        "fetch-unlocked",
        "queue",
        "two service threads fetch from one port at a time",
        (Edit(_SERVE, "fetch_from_port", _FETCHING, _FETCHING.replace("exchange(lock, 1, SYSTEM) != 0", "False")),),
    ),
    Fault(
        "fetch-lock-relaxed",
        "queue",
        "the next fetching thread does not see the head of the previous one",
        (Edit(_SERVE, "fetch_from_port", _FETCHED, _FETCHED.replace("release", "relaxed")),),
    ),
    Fault(
        "ring-unlocked",
        "queue",
        "two service threads post to one ring at a time",
        (Edit("storage.commands", "lock", "while exchange(address, 1, SYSTEM) != 0:", "while False:"),),
        seed=5,
    ),
    Fault(
        "thread-ends-without-a-look",
        "service",
        "a thread exits after its wait without checking for free slots",
        (Edit(_POOL, "IOThreadPool._work", _LINGERED, _THREAD_EXITS),),
    ),
    Fault(
        "thread-called-twice",
        "service",
        "two controllers count on the same parked thread",
        (Edit(_POOL, "IOThreadPool.submit", "self._parked - self._woken", "self._parked"),),
        seed=1100,
    ),
    Fault(
        "call-lost",
        "service",
        "a controller is submitted, and no thread is woken",
        (Edit(_POOL, "IOThreadPool.submit", "            self._changed.notify(woken)\n", ""),),
    ),
    Fault(
        "silence-starves",
        "service",
        "media that never complete commands occupy all threads",
        (Edit(_POOL, "IOThreadPool.submit", _ALONE, ""),),
    ),
    Fault(
        "launches-after-words",
        "relay",
        "the relay loads the launch count after it has loaded the words",
        (Edit(_RELAY, "serve", _LAUNCHES_FIRST, _WORDS_FIRST),),
    ),
    Fault(
        "parks-past-launch",
        "relay",
        "the thread leaves although a launch has begun and ended since its last check",
        (
            Edit(
                _RELAY,
                "DoorbellForwarder._serve",
                "self._seen_launches = launch_count",
                "self._seen_launches = self._launch_count",
            ),
        ),
    ),
    Fault(
        "launch-begins-late",
        "relay",
        "a launch is counted after the forwarder was submitted, so no thread serves it",
        (Edit(_RELAY, "DoorbellForwarder.begin", _LAUNCH_COUNTED, _LAUNCH_SUBMITTED),),
    ),
    Fault(
        "sent-read-again",
        "relay",
        "the forwarded value is read from the word again, which may have changed",
        (
            Edit(
                _RELAY,
                "forward",
                "store_relaxed(word + 8 * W_SENT, value, SYSTEM)",
                "store_relaxed(word + 8 * W_SENT, load_relaxed(load_relaxed(word + 8 * W_ADDRESS, SYSTEM), SYSTEM), "
                "SYSTEM)",
            ),
        ),
    ),
    Fault(
        "withdrawn-early",
        "service",
        "a controller is closed while a thread serves it",
        (Edit(_POOL, "IOThreadPool.remove", "while slots.occupied and", "while False and"),),
    ),
    Fault(
        "version-recheck-removed",
        "store",
        "a reader does not check the version again after it has copied a value",
        (Edit(_DEVICE_CACHE, "look_up", "if load_acquire(address + 8 * W_VERSION, DEVICE) != version:", "if False:"),),
        seed=177,
    ),
    Fault(
        "version-relaxed",
        "store",
        "loading the version does not acquire the value",
        (Edit(_DEVICE_CACHE, "look_up", "version = load_acquire(", "version = load_relaxed("),),
    ),
    Fault(
        "reader-fence-removed",
        "store",
        "the second load of the version may precede the copy",
        (Edit(_DEVICE_CACHE, "look_up", "    fence(DEVICE)\n    syncwarp(mask)\n", "    syncwarp(mask)\n"),),
        seed=1413,
    ),
    Fault(
        "filler-fence-removed",
        "store",
        "nothing orders the odd version before the new bytes",
        (Edit(_REQUESTS, "fill_entries", _FENCED, _FENCED.replace("fence(DEVICE)", "pass")),),
        seed=1911,
    ),
    Fault(
        "odd-version-not-set",
        "store",
        "the version stays even while a value is being filled in",
        (
            Edit(_DEVICE_CACHE, "claim", "before, before + 1, DEVICE) == before", "before, before, DEVICE) == before"),
            Edit(_DEVICE_CACHE, "publish", _EVEN, _EVEN.replace("+ 1", "+ 2")),
        ),
    ),
    Fault(
        "filled-from-the-kernel",
        "store",
        "the cache takes a value from the kernel's own memory",
        (Edit(_REQUESTS, "fill_entries", _FILLED, ""), Edit(_REQUESTS, "execute", _PIECE_READ, _PIECE_READ + _LATER)),
        seed=307,
    ),
    Fault(
        "version-ignored",
        "store",
        "pieces of different versions are joined to a value",
        (Edit(_REQUESTS, "piece_of", "if status == 0 and offset > 0 and not stale:", "if False:"),),
        seed=12,
    ),
    Fault(
        "rest-left",
        "store",
        "bytes of the previous version remain after the value",
        (Edit(_REQUESTS, "after_piece", "        wipe(at, offset)\n", ""),),
        seed=12,
    ),
    Fault(
        "id-released-before-copy",
        "store",
        "the id, and its staging buffer, are free before the value is copied",
        (
            Edit(_REQUESTS, "pull_pieces", _COPIES, _EARLY + "release_id(queue, cid)\n" + _COPIES),
            Edit(_REQUESTS, "after_piece", _ANSWERED, _ANSWERED.replace("release_id(queue, cid)", "pass")),
        ),
    ),
    Fault(
        "place-given-before-copy",
        "store",
        "the slot of the return value queue is free before the value is copied",
        (
            Edit(_REQUESTS, "pull_pieces", _COPIES, _EARLY + "free_return_slot(queue, cid)\n" + _COPIES),
            Edit(_REQUESTS, "execute", _SLOT_FREED, "                refused = False\n"),
        ),
        seed=56,
    ),
    Fault(
        "ticket-taken-twice",
        "store",
        "a thread takes a ticket without checking that it was not taken before",
        (
            Edit(
                _TICKETS,
                "end_ticket",
                "    return compare_exchange(record + 8 * ID_USE, use, use - 1, DEVICE) == use\n",
                "    compare_exchange(record + 8 * ID_USE, use, use - 1, DEVICE)\n    return True\n",
            ),
        ),
        seed=1898,
    ),
    Fault(
        "no-id-left",
        "store",
        "tickets may hold all ids, and their holders wait for another id",
        (Edit(_REQUESTS, "start", "take_id(queue, field(core, K_RESERVE))", "take_id(queue, 0)"),),
    ),
    Fault(
        "first-acquire-relaxed",
        "resident",
        "a thread that loads the word of a VALID page need not load the page's bytes",
        (
            Edit(
                _HIT,
                "item_reader",
                _DIRECT_MAPPED,
                "            if load_relaxed(view.table + 8 * page, DEVICE) & READABLE == 0:\n",
            ),
        ),
        seed=42,
    ),
    Fault(
        "not-its-own-frame",
        "resident",
        "a loaded page takes any frame instead of its own frame",
        (Edit("cache.frames", "alloc_frame", "    if own >= 0:\n        return own\n", ""),),
    ),
    Fault(
        "present-counted-twice",
        "resident",
        "all pages are counted as cached too early",
        (Edit("cache.transfer", "publish", "at.F_PRESENT, 1, I8)", "at.F_PRESENT, 2, I8)"),),
    ),
    Fault(
        "pins-erased",
        "resident",
        "publishing a page erases pins that overtook it",
        (
            Edit(
                "cache.transfer",
                "publish",
                "    if load_relaxed(owner, DEVICE) & at.OWNER_PAGE != page + 1:",
                "    if True:",
            ),
        ),
    ),
    Fault(
        "credit-lost",
        "pins",
        "a thread that fails to pin keeps its credit",
        (
            Edit(
                "cache.pins",
                "pin_present_long",
                "    return_credit(core, space, page)\n    return NOT_HELD\n",
                "    return NOT_HELD\n",
            ),
        ),
    ),
    Fault(
        "credit-too-many",
        "pins",
        "a credit is taken from a word without credits",
        (Edit("cache.pins", "take_credit", "(word, -1, I8) > 0:", "(word, -1, I8) >= 0:"),),
    ),
    Fault(
        "credit-returned-by-each",
        "pins",
        "each holder of a page returns a credit, not only the last",
        (
            Edit(
                "cache.pins",
                "unpin_page_long",
                _LAST,
                _LAST + "            else:\n                return_credit(core, space, page)\n",
            ),
        ),
    ),
    Fault(
        "pin-of-the-word-kept",
        "pins",
        "a thread that becomes another holder of a page keeps its short pin",
        (Edit("cache.pins", "make_pin_long", "    unpin(word, 0)\n    return attempt", "    return attempt"),),
    ),
    Fault(
        "long-pin-without-the-word",
        "pins",
        "a page is held although its word does not have the pin",
        (Edit("cache.pins", "pin_present_long", "pin_valid(address, word, 0)", "True"),),
    ),
    Fault(
        "span-stores-without-a-pin",
        "cache",
        "a span stores into an unpinned frame",
        (
            Edit("cache.access", "pin_present", "pin_valid(word, old, 0)", "True"),
            Edit("cache.access", "store_groups", _SPAN_UNPINNED, _SPAN_UNPINNED.replace("DIRTY", "DIRTY - PIN")),
        ),
    ),
    Fault(
        "span-dirty-forgotten",
        "cache",
        "the page of a stored span is not marked as dirty",
        (Edit("cache.access", "store_groups", _SPAN_UNPINNED, _SPAN_UNPINNED.replace("DIRTY", "0")),),
    ),
    Fault(
        "run-without-a-pin",
        "in-place",
        "a run is stored into unpinned frames",
        (
            Edit(_HIT, "pin_to_store", "pin_valid(address, word, DIRTY)", "True"),
            Edit(_HIT, "unpin_stored", "fetch_add_as(address, -PIN, I8)", "fetch_or_as(address, DIRTY, I8)"),
        ),
    ),
    Fault(
        "run-dirty-forgotten",
        "in-place",
        "the pages of a stored run are not marked as dirty",
        (Edit(_HIT, "pin_to_store", "pin_valid(address, word, DIRTY)", "pin_valid(address, word, 0)"),),
    ),
    Fault(
        "run-unpinned-relaxed",
        "in-place",
        "a thread that sees the pin released need not see the stores under the pin",
        (
            Edit(
                _WORDS_OF,
                "_storing_now",
                "        fence(DEVICE)\n        unpin_stored(address)\n",
                "        unpin_stored(address)\n",
            ),
        ),
    ),
    Fault(
        "span-without-a-fence",
        "spans",
        "nothing orders the validation after the loads of the page",
        (Edit(_WORDS_OF, "_reading", _GROUPS + _FENCE, _GROUPS),),
        seed=42,
    ),
    Fault(
        "copy-without-a-fence",
        "spans",
        "nothing orders the validation after the copy of the page",
        (_UNFENCED_COPY,),
        seed=17,
    ),
    Fault(
        "span-first-look-relaxed",
        "spans",
        "a thread that loads the word of a VALID page need not load the page's bytes",
        (_RELAXED_LOAD,),
    ),
    Fault(
        "span-without-a-second-look",
        "spans",
        "the page word is not validated",
        (_NO_VALIDATION,),
    ),
    Fault(
        "span-escapes",
        "spans",
        "items are folded before the validation, and remain in the total",
        (Edit(_WORDS_OF, "_walking", _FOLDED, _FOLDED.replace("if is_valid", "if True")),),
    ),
    Fault(
        "row-without-a-fence",
        "gather",
        "nothing orders the validation after the copy of a part of a row",
        (_UNFENCED_COPY,),
    ),
    Fault(
        "row-first-look-relaxed",
        "gather",
        "a thread that loads the word of a VALID page need not load the page's bytes",
        (_RELAXED_LOAD,),
    ),
    Fault(
        "row-without-a-second-look",
        "gather",
        "the page word is not validated",
        (_NO_VALIDATION,),
    ),
    Fault(
        "units-without-a-fence",
        "units",
        "no order between the loads of units and the validation",
        (Edit(_ROW_KERNELS, "read_units", _UNITS_LOADED + "    fence(DEVICE)\n", _UNITS_LOADED),),
    ),
    Fault(
        "units-first-look-relaxed",
        "units",
        "a thread that loads the word of a VALID page need not load the page's bytes",
        (_RELAXED_LOAD,),
    ),
    Fault(
        "units-without-validation",
        "units",
        "a unit is used although the page word has changed",
        (_NO_VALIDATION,),
    ),
    Fault(
        "units-of-one-word",
        "units",
        "only the page word of the first unit is validated",
        (Edit(_ROW_KERNELS, "read_units", "validate_read(second_address, second_word)", "is_valid"),),
    ),
    Fault(
        "units-generation-ignored",
        "units",
        "a unit is used if its page was evicted and loaded into the same frame again",
        (Edit(_HIT, "validate_read", "& IDENTITY == 0", "& -(1 << 36) == 0"),),
    ),
    Fault(
        "drive-doorbells-unlocked",
        "drive",
        "two threads forward the doorbells of a drive",
        (
            Edit(
                _DRIVE,
                "ring_doorbells",
                "exchange(state + 8 * M_DOORBELL_LOCK, 1, SYSTEM) == 0",
                "load_relaxed(state + 8 * M_DOORBELL_LOCK, SYSTEM) == 0",
            ),
        ),
    ),
    Fault(
        "drive-waiting-unlocked",
        "drive",
        "two threads submit one waiting command",
        (
            Edit(
                _DRIVE,
                "start_waiting",
                "exchange(state + 8 * M_WAIT_LOCK, 1, SYSTEM) == 0",
                "load_relaxed(state + 8 * M_WAIT_LOCK, SYSTEM) == 0",
            ),
        ),
    ),
    Fault(
        "drive-answered-early",
        "drive",
        "a command is completed with its first part",
        (Edit(_DRIVE, "finish_part", "left = word(record, I_NBYTES) - nbytes", "left = 0"),),
    ),
    Fault(
        "drive-answered-twice",
        "drive",
        "an aborted command is completed again when its completion arrives",
        (Edit(_DRAIN, "take_async_id", "use ^ at.ASYNC ^ at.TAKEN", "use ^ at.ASYNC ^ at.ORPHAN"),),
    ),
    Fault(
        "drive-waiting-left",
        "drive",
        "commands that wait for ids of a lost drive are not completed",
        (Edit(_DRIVE, "abort_one", "is_waiting = head != word(state, M_WAIT_TAIL)", "is_waiting = False"),),
    ),
    Fault(
        "drive-id-early",
        "drive",
        "an id is freed before its tag is read",
        (Edit(_DRIVE, "finish_part", _ID_FREED, "".join(reversed(_ID_FREED.splitlines(keepends=True)))),),
        seed=511,
    ),
    Fault(
        "written-not-noted",
        "recover",
        "the numbers of written pages are not recorded",
        (Edit("cache.lookup", "record_written", _NOTED, "    if False:\n    " + _NOTED),),
        seed=12,
    ),
    Fault(
        "mark-after-flush",
        "recover",
        "a page that is written during a Flush counts as flushed",
        (
            Edit(
                _WRITTEN,
                "UnflushedLog.flushing",
                "        count = self.count()\n        yield\n",
                "        yield\n        count = self.count()\n",
            ),
        ),
        seed=375,
    ),
    Fault(
        "mark-of-a-failed-flush",
        "recover",
        "a failed Flush acknowledges written pages",
        (
            Edit(
                _WRITTEN,
                "UnflushedLog.flushing",
                "        yield\n        self._marks[nsid] = count\n",
                "        self._marks[nsid] = count\n        yield\n",
            ),
        ),
        seed=296,
    ),
    Fault(
        "kept-not-dirty",
        "recover",
        "recovery does not write cached pages again",
        (Edit(_WRITTEN, "_redirty_cached", "word | DIRTY", "word"),),
        seed=786,
    ),
    Fault(
        "gone-not-named",
        "recover",
        "recovery does not report evicted pages",
        (Edit(_WRITTEN, "UnflushedLog.record_loss", "ranges_of(np.flatnonzero(is_suspect))", "[]"),),
        seed=7,
    ),
    Fault(
        "aborted-write-is-clean",
        "recover",
        "a page counts as written although the loss aborted its write",
        (Edit("cache.transfer", "redirty", "VALID | DIRTY", "VALID"),),
    ),
    Fault(
        "old-loss-believed",
        "revive",
        "a thread that has seen a controller fail marks the next controller as lost",
        (Edit("drives.transport", "Transport.fail", "if generation not in (None, self.generation):", "if False:"),),
    ),
    Fault(
        "old-rings-believed",
        "revive",
        "rings of an earlier generation count as lost only while the drive is lost",
        (
            Edit(
                _RINGS,
                "DriveController.failure",
                "            if generation == transport.generation and transport",
                "            if transport",
            ),
        ),
        seed=1055,
    ),
    Fault(
        "queue-of-another-deleted",
        "revive",
        "closing rings of an earlier generation deletes a queue of another user",
        (
            Edit(
                "drives.drive",
                "Drive.delete_pair",
                "if generation not in (None, self.transport.generation):",
                "if False:",
            ),
        ),
        seed=28,
    ),
    Fault(
        "flush-of-another-time",
        "revive",
        "a Flush of the current controller acknowledges writes to the previous controller",
        (Edit("drives.drive", "Drive.io", "            if generation is not None:\n", "            if False:\n"),),
    ),
    Fault(
        "there-too-early",
        "revive",
        "the loss is cleared before the controller is started",
        (
            Edit(
                "drives.drive",
                "Drive._silence",
                "        transport.pass_generation()\n",
                "        transport.pass_generation()\n        transport.revive()\n",
            ),
        ),
        seed=103,
    ),
    Fault(
        "generation-too-late",
        "revive",
        "new rings belong to the generation before the loss",
        (Edit(_RINGS, "DriveController._start", _SERVED, _SERVED.replace("generation", "0")),),
    ),
    Fault(
        "claim-forgotten",
        "workers",
        "a worker that has claimed a block checks the stop flag again, and leaves",
        (
            Edit(
                "targets.blocks.cuda",
                "claim",
                "        put_claim(first)\n",
                "        put_claim(first if load_pair(control + STOP)[0] <= worker else -1)\n",
            ),
        ),
    ),
    Fault(
        "progress-of-claims",
        "workers",
        "claimed blocks that have not ended are reported to the host as ended",
        (Edit("targets.blocks.cuda", "claim", "-64, before + ended, SYSTEM", "-64, first + chunk, SYSTEM"),),
    ),
    Fault(
        "first-left-is-all",
        "workers",
        "a kernel is reported as left when its first launch has left",
        (
            Edit(
                _GPU,
                "CudaExecutor._poll_queues",
                "                if not run.rows:\n",
                "                if run.runs:\n",
            ),
        ),
    ),
    Fault(
        "grown-beside-relieved",
        "workers",
        "workers are added before the re-issued workers have left",
        (Edit(_GPU, "CudaExecutor._launch_more", "if floor > run.exited:", "if floor > run.exited + run.floor:"),),
    ),
    Fault(
        "behind-the-oldest",
        "workers",
        "a queued kernel waits only for the first workers of its predecessor, not for later ones",
        (Edit(_GPU, "CudaExecutor._launch_more", "reversed(self._followers(run))", "()"),),
    ),
    Fault(
        "wait-before-launch",
        "workers",
        "a stream waits for workers that are launched after it",
        (Edit(_GPU, "CudaExecutor._next_queue", " if run.is_launched() else None", ""),),
    ),
)

RARE = (
    Fault(
        "ticket-read-relaxed",
        "store",
        "loading the use of an id does not acquire its state",
        (Edit(_TICKETS, "record_of", "load_acquire(record", "load_relaxed(record"),),
    ),
    Fault(
        "earlier-launch-forgotten",
        "workers",
        "after its last launch is withdrawn, a kernel loses the progress of the launch before it",
        (Edit(_GPU, "CudaExecutor._stop", "self.claimed(run.job) > run.done:", "False:"),),
    ),
)
"""Faults that runs find too rarely: the first in 0 of 7,000 runs, the second in 0 of 9,300.

The campaign searches for them only by name.
"""

HARMLESS = (
    Fault(
        "dirty-before-store",
        "cache",
        "DIRTY is set before the store, under the same pin",
        (
            Edit(
                "cache.access",
                "access",
                _STORE,
                _STORE.replace(
                    "                out =",
                    "                if operation != LOAD:\n"
                    "                    from warpwell.targets.primitives import fetch_or\n"
                    "                    fetch_or(word, DIRTY, DEVICE)\n"
                    "                out =",
                ),
            ),
            Edit("cache.access", "access", _UNPIN, "            unpin(word, 0)\n"),
        ),
    ),
    Fault(
        "turns-kept",
        "loss",
        "turns of the previous controller admit threads too early",
        (
            Edit(
                _PAIR,
                "QueuePairs._clear",
                _TURNED,
                _TURNED.replace("self._areas[k]", "self._areas[k] + 8 * self.depth").replace(
                    "2 * self.depth, np", "self.depth, np"
                ),
            ),
        ),
    ),
    Fault(
        "head-before-key",
        "key-value",
        "entries are released before their words are read",
        (
            Edit(_SERVE, "fetch_from_port", _TAKEN_HEAD, ""),
            Edit(_SERVE, "fetch_from_port", _EACH_TAKEN, _TAKEN_HEAD + _EACH_TAKEN),
        ),
    ),
)


@contextlib.contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """Run the block with a fault in the device code (interpreted runs of this process only)."""
    changed: dict[FunctionType, CodeType] = {}
    sources: dict[str, str] = {}
    for edit in fault.edits:
        module = importlib.import_module(f"warpwell.{edit.module}")
        source = sources.get(edit.module) or inspect.getsource(module)
        if source.count(edit.old) != 1:
            raise LookupError(f"fault {fault.name}: {source.count(edit.old)} places in {edit.module}:\n{edit.old}")
        sources[edit.module] = source.replace(edit.old, edit.new)
    for edit in fault.edits:
        module = importlib.import_module(f"warpwell.{edit.module}")
        function = inspect.unwrap(operator.attrgetter(edit.function)(module))
        changed[function] = _code(sources[edit.module], edit.function, str(module.__file__))
    _swap(changed)
    try:
        yield
    finally:
        _swap(changed)


def _code(source: str, function: str, filename: str) -> CodeType:
    # the future import of the source keeps annotations as strings
    found = compile(source, filename, "exec")
    for name in function.split("."):  # a class and a method, or a function
        inside = [c for c in found.co_consts if isinstance(c, CodeType) and c.co_name == name]
        if not inside:
            raise LookupError(f"no function {function} in {filename}")
        found = inside[0]
    return found


def _swap(changed: dict[FunctionType, CodeType]) -> None:
    """Exchange the code of the functions, and drop cached views of the previous code."""
    for function, code in changed.items():
        function.__code__, changed[function] = code, function.__code__
    view: Any = importlib.import_module("warpwell.array.view")
    view._implementation.cache_clear()
    for name in ("calls", "words", "buffers"):
        for made in vars(importlib.import_module(f"warpwell.array.spans.{name}")).values():
            if hasattr(made, "cache_clear"):
                made.cache_clear()
