"""Submission and completion rings that device threads and a controller share.

Files, in the order in which a command meets them:

- submission.py  take a command id, put a command in the ring, ring the doorbell
- completion.py  drain the ring, hand each completion to its waiter, give up waiting
- loss.py        a controller that is gone or lies: the latch, and the way to queues that can be used again
- layout.py      the words of queue, id and port records
- pair.py        `QueuePairs`, which owns the memory of rings, ids and staging (host)
"""

from .loss import Loss
from .pair import QueuePairs

__all__ = ["Loss", "QueuePairs"]
