"""Loss: a controller that is gone, or that answers what cannot be, and how its queues become usable again.

The protocol, from the loss to the next command:

1. *Latch.* Who finds that the controller is gone (a relay, the host) or posts what cannot be (`completion.drain`)
   stores a kind into the loss record, in shared memory; any kind but ALIVE means lost. Device code stores only, because
   many buses have no atomics: its first finder is chosen in device memory.
2. *End.* Waiters look once a millisecond. They give up as after a stall: TAKEN becomes ORPHAN, ASYNC stays. No page is
   published or freed and no id is released without a completion, so no staging byte that the controller may still write
   to is used again, and no thread waits for a turn. The host begins no launch on lost queues.
3. *Silence.* With no launch in flight the host makes sure that the controller writes no more (reset, bus master off,
   its process dead). Until then rings, lists and staging are left as they are. If it cannot, they are never freed.
4. *Abort.* `QueuePairs.abort` clears the rings and posts "aborted by host" (0x371) for each id in flight, as the
   controller would have: completions that no thread has drained are dropped with the rings. Kernels settle them like
   any failure: a page that was being read is INVALID again, one that was being written is DIRTY again.
5. *Rewind.* When no id is in use, `QueuePairs.rewind` makes the queues what they were when they were made: rings (with
   their phases), doorbells, tickets, tails, heads, turns, marks, locks, the ready ring, the loss record. A word that is
   forgotten makes an old completion new, or a new one old. Only then the next controller gets the rings.

Where a drive serves the queues (`warpwell.drives.Drive.recover`, `warpwell.cache.Cache.recover`), 3 and 5 are made of:

a. *Leave.* The loss is latched for all users of the drive: none begins a launch, a command or a queue. Relays are
   joined, native threads of media are seen outside of their queues, commands of the host have ended with an error. A
   user that does not leave keeps the drive from being recovered.
b. *Disable*, or reset the function; RDY is 0. From here on the drive does not write to the arena.
c. *A new generation* begins, before the drive is enabled, and before it counts as there again. An object of an older
   one (queue, namespace, medium, rings of another cache) refuses from then on in any state of the drive: its latched
   loss, and its late threads, do not lose the drive of now; it deletes no queue: another one may have the id.
d. *Enable*, and look whether it is the same drive with the same limits and namespaces. Only now the loss is lifted.
e. Each cache, for itself and with no launch in flight: abort, settle, rewind; create queues; a new relay; and last of
   all it takes over the generation, under the lock under which others ask whether it is lost.
f. *Flush.* A Flush acknowledges what was written in its own generation alone: it is refused in another one, under the
   lock that `recover` holds. Writes that a flushed drive has never acknowledged are repeated, or named
   (`cache.written`).

Commands in flight are known by ids in use, never by words that a controller writes. An entry is believed only if its
sqid is the ring's, its sqhd is below the depth, and its cid, with its generation, names a command in flight. Then the
worst that a lie can do is to complete a command early, which no check can detect. A duplicate completion is noticed,
even if its id has a new command.
"""

from __future__ import annotations

from ..nvme import word1_cid, word1_sqhd, word1_sqid, word1_status
from ..nvme.status import describe
from ..targets import device
from ..targets.primitives import (
    DEVICE,
    SYSTEM,
    compare_exchange,
    load_relaxed,
    load_weak_as,
    store_relaxed,
    store_release,
)
from . import layout as at
from .layout import I8


@device
def lost(queue: int) -> bool:
    """Return whether the controller of a queue is lost (thread; reads shared memory: look rarely)."""
    return load_relaxed(load_weak_as(queue + 8 * at.Q_LOSS, I8) + 8 * at.LOSS_KIND, SYSTEM) != 0


@device
def accuse(queue: int, kind: int, entry: int) -> None:
    """Latch that a controller did what none may do (thread); `entry` is word 1 of its completion, or 0."""
    if compare_exchange(load_weak_as(queue + 8 * at.Q_PROGRESS, I8) + 8, 0, 1, DEVICE) == 0:
        record = load_weak_as(queue + 8 * at.Q_LOSS, I8)
        store_relaxed(record + 8 * at.LOSS_QUEUE, load_weak_as(queue + 8 * at.Q_SQID, I8), SYSTEM)
        store_relaxed(record + 8 * at.LOSS_ENTRY, entry, SYSTEM)
        store_release(record + 8 * at.LOSS_KIND, kind, SYSTEM)


def describe_impossible(entry: int, queue: int, depth: int) -> str:
    """Return why a completion (word 1) in the ring of a queue answers no command, for messages."""
    cid, sqid, sqhd = word1_cid(entry), word1_sqid(entry), word1_sqhd(entry)
    if sqid != queue:
        wrong = f"it names submission queue {sqid}"
    elif sqhd >= depth:
        wrong = f"its submission queue head is {sqhd} of {depth} entries"
    else:
        wrong = f"command {cid} was not in flight"
    status = describe(word1_status(entry))
    return f"it posted a completion to queue {queue} that answers no command: {wrong} (its status: {status})"
