"""The layout of a page cache, in 64-bit words of device memory.

The *core record* is what a kernel's view of an array points to. *Space records* describe the arrays that
share the cache; pages are numbered through all of them. *Pool records* split the frames into shares.
"""

from __future__ import annotations

from warpwell.queues.layout import ID_USER, ID_USER_WORDS

BLOCK = 512
"""Bytes of a logical block."""

MERGE_MAX = ID_USER_WORDS
"""Largest number of pages that one command moves."""
ID_FRAMES = ID_USER
"""Words of an id record in which the frames of a command's pages are stored."""

# -- core record ---------------------------------------------------------------------------------------------
C_PAGE_SHIFT = 0
C_TABLE = 1
"""Address of the page words, one for each page."""
C_FRAMES = 3
"""Address of frame 0."""
C_OWNERS = 4
"""Address of the owner words, one a frame: page + 1 and its long-held pins; 0 free, -1 held by a group."""
C_QUEUES = 5
"""Address of the first queue record."""
C_N_QUEUES = 6
C_MERGE = 7
"""Maximum number of pages of one command, a power of two up to `MERGE_MAX`."""
C_STATS = 8
"""Address of the statistics, `STATS_WORDS` words."""
C_TIMEOUT = 10
"""Nanoseconds without any completion after which a waiter gives up."""
C_SPACES = 11
C_N_SPACES = 12
C_POOLS = 13
CORE_WORDS = 16

# -- space record: one for the cache, and a copy for each launch record ---------------------------------------
S_BASE = 0
"""First page of the array."""
S_PAGES = 1
S_NSID = 2
"""Namespace id by which the host knows the array."""
S_POOL = 3
"""Index of the pool whose frames the array uses."""
S_HOST = 4
"""Address of the data in pinned host memory ("host-cached" tier), or 0 if the queues serve the array."""
S_CORE = 6
"""Address of the core record."""
S_LAUNCH = 7
"""Address of the launch record; 0 in the cache's own."""
S_FRAME = 8
"""Frame of the array's first page in a pool that holds all its pages (see `cache.frames`), else -1."""
S_WIRE = 9
"""Namespace id in commands."""
S_BLOCK_SHIFT = 10
"""log2 of the bytes of a block in commands."""
SPACE_WORDS = 16

# -- launch record (device memory, followed by its copies of the space records) -------------------------------
R_FAILED = 0
"""1 after device code latched an error or saw the host's abort, until the launch is over."""
R_KIND = 1
"""The result of `latched`: the latch's kind, or the host's abort, as last read."""
R_NEXT_POLL = 2
"""Time at which the next thread reads the latch in host memory (`clock_ns`)."""
R_LATCH = 3
"""Address of the latch record (shared memory)."""
R_COUNT = 4
"""Count of a maintenance kernel."""
LAUNCH_WORDS = 16

# -- pool record (128 bytes apart, because threads contend) -------------------------------------------------------
F_FIRST = 0
F_COUNT = 1
F_HAND = 2
F_CREDITS = 3
"""Address of the credits for long pins: `F_CREDIT_MASK` + 1 words, `CREDIT_BYTES` apart (see `cache.pins`)."""
F_RING = 4
"""Address of the free list: a ring of frames + 1, 0 if empty (see `cache.stash`)."""
F_RING_MASK = 5
F_CREDIT_MASK = 6
F_RESIDENT = 7
"""1 if the pool has a frame for each page of its arrays."""
F_STASHED = 16
"""Frames in the free list that are not claimed (negative for a moment). Words from here on have lines of their own."""
F_STASH_HEAD = 17
F_STASH_ROOM = 32
F_STASH_TAIL = 33
F_PRESENT = 48
"""Number of pages in the cache; only resident pools count it."""
POOL_WORDS = 64
CREDIT_BYTES = 128
CREDIT_WORDS_MAX = 64
FRAMES_PER_CREDIT_WORD = 64
"""Frames for which a pool has one more word of credits: a small pool has one word, and counts exactly."""
RING_MAX = 1 << 14
"""Maximum number of frames in a free list; the clock finds other free frames."""

FREE_FRAME = 0
HELD_FRAME = -1
OWNER_PAGE = (1 << 40) - 1
"""Mask of page + 1 in an owner word; long-held pins of the page are in the bits above (see `cache.pins`)."""
HOST_PIN = 1 << 40
"""The host has pinned the page; it counts its pins itself."""
KERNEL_SHIFT = 41
KERNEL_PIN = 1 << KERNEL_SHIFT
"""One pin of a kernel."""
KERNEL_PINS_MAX = (1 << (63 - KERNEL_SHIFT)) - 1
KERNEL_PINS_SLACK = 1 << 20
"""Pins below the maximum at which a resident pool refuses one more, because threads add before they check."""

# -- latch record (shared memory): a launch's first error, for the host to raise ------------------------------
L_KIND = 0
L_ARRAY = 1
"""Array key."""
L_PAGE = 2
L_VALUE = 3
"""Index, status field or nanoseconds, by kind."""
L_FLAG = 4
"""Address of the word that `failed` reads in this launch."""
LATCH_WORDS = 8

CLEAR = 0
INDEX_ERROR = 1
"""An index out of range; L_VALUE is the index (flat)."""
READ_ERROR = 2
"""A read failed; L_VALUE is the status field."""
WRITE_ERROR = 3
READ_ONLY = 4
STALLED = 5
"""No completion for the time-out."""
ABORTED = 6
"""The host gave up (Ctrl-C)."""
NOT_PINNED = 7
"""A kernel released a pin of a page that no kernel has pinned."""
LOST = 8
"""The controller failed, or posted an impossible completion (`queues.loss`)."""

# -- statistics (64-bit counters) ----------------------------------------------------------------------------
N_MISSES = 0
N_EVICTIONS = 1
N_WRITEBACKS = 2
N_READ_COMMANDS = 3
N_WRITE_COMMANDS = 4
N_PAGES_READ = 5
N_PREFETCHED = 6
N_PREFETCH_DROPPED = 7
N_HITS = 8
N_WANTED = 9
N_RETRIES = 10
STATS_WORDS = 16
WRITTEN_WORDS = 1 << 13
"""Words of the ring after the statistics: numbers of the pages that were written last (`cache.written`)."""
