"""Loss: a controller that fails or posts invalid completions, and the protocol that makes its queues usable again.

The protocol, from the loss to the next command:

1. *Latch.* A relay or the host that finds that the controller has failed, or a drain that finds an invalid completion
   (`completion.drain`), stores a kind into the loss record in shared memory; every kind except ALIVE means lost. Device
   code only stores, because many buses have no atomics: the first thread to store is chosen in device memory.
2. *End.* Waiters poll the record once a millisecond. They give up as after a stall: TAKEN becomes ORPHAN, ASYNC does
   not change. Without a completion, no page is published or freed and no id is released, so no staging byte is reused
   to which the controller may still write. No thread waits for a turn. The host begins no launch on lost queues.
3. *Silence.* When no launch is in flight, the host ensures that the controller no longer writes (by a reset, by
   disabling bus mastering, or because its process has exited). Until then, rings, lists and staging do not change. If
   the host cannot ensure it, they are never freed.
4. *Abort.* `QueuePairs.abort` clears the rings and posts "aborted by host" (0x371) for each id in flight, as the
   controller would have: completions that no thread has drained are dropped with the rings. Kernels handle these
   completions like any failure: a page that was being read is INVALID again, a page that was being written is DIRTY
   again.
5. *Rewind.* When no id is in use, `QueuePairs.rewind` resets the queues to their initial state: rings (with their
   phases), doorbells, tickets, tails, heads, turns, marks, locks, the ready ring, the loss record. If a word were not
   reset, an old completion could seem new, or a new one old. Only then the next controller receives the rings.

If a drive serves the queues (`warpwell.drives.Drive.recover`, `warpwell.cache.Cache.recover`), steps 3 to 5 are:

a. *Leave.* The loss is latched for all users of the drive, so that none begins a launch, a command or a queue. The host
   joins relays, waits until native threads of media have left their queues, and until its own commands have ended with
   an error. If a user does not leave, the drive cannot be recovered.
b. *Disable* the controller, or reset the function, until RDY is 0. From then on, the drive does not write to the arena.
c. *A new generation* begins before the drive is enabled and before it counts as available. From then on, objects of
   older generations (queues, namespaces, media, rings of other caches) raise errors in any state of the drive. Their
   latched losses and late threads do not mark the new generation as lost. They delete no queue, because another queue
   may have the same id.
d. *Enable* the controller, and check that it is the same drive with the same limits and namespaces. Only then the loss
   is cleared.
e. *Rebuild.* Each cache, when it has no launch in flight, aborts, settles and rewinds, creates queues, and starts a new
   relay. As the last step it adopts the generation, under the lock that other threads hold to check for a loss.
f. *Flush.* A Flush acknowledges only writes of its own generation: it is refused in another generation, under the lock
   that `recover` holds. Writes that no Flush has acknowledged are repeated, or reported as possibly lost
   (`cache.written`).

The ids in use determine which commands are in flight, never words that a controller writes. An entry is valid only if
its sqid is the ring's, its sqhd is below the depth, and its cid, with its generation, names a command in flight. So the
worst effect of a wrong entry is that a command completes early, which no check can detect. A duplicate completion is
detected, even if its id has a new command.
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
    """Return whether the controller of a queue is lost (thread; reads shared memory, so poll rarely)."""
    return load_relaxed(load_weak_as(queue + 8 * at.Q_LOSS, I8) + 8 * at.LOSS_KIND, SYSTEM) != 0


@device
def latch_violation(queue: int, kind: int, entry: int) -> None:
    """Latch that a controller violated the protocol (thread); `entry` is word 1 of its completion, or 0."""
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
