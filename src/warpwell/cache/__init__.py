"""The page cache: frames in device memory that arrays on storage share.

Files, in the order of an access (all are device code, except cache.py and the files after it):

- access.py       read, write or add to an item of a page, if ``a[i]`` is not a hit
- hit.py          code that is inlined in kernels: read an item of a cached page, validate the read, pin the page
- word.py         the page word: state, pins, generation and frame in 64 bits
- lookup.py       addresses of a page's word, queue, owner and array; counters
- paging.py       a miss: pin a page, read it from storage, prefetch it; evict a page on request
- frames.py       evict a page to free a frame: the clock picks the frame, a dirty page is written back first
- stash.py        the free list of frames that were returned unused
- transfer.py     start, wait for and settle commands; copy pages; publish or abandon a page
- pins.py         long pins of kernels and of the host
- latch.py        the first error of a launch (latched for the host); the watchdog that ends waits (timeouts)
- maintenance.py  kernels that the host launches: flush, pin, evict, settle
- known_pages.py  publish pages that the host has read, while kernels read and write the same pages
- layout.py       the fields of all records
- cache.py        `Cache` on the host: arrays, launches, maintenance, closing
- prefetch.py     `Bulk`: prefetches, and reads past the cache
- partition.py    how a cache's memory is split into records, page table and frames
- written.py      pages written since the last flush, which a lost drive may have lost
- launches.py     the record of each launch, and the exception for its latched error
- statistics.py   counters: hits, misses, evictions, bytes; sizes such as "256MiB"; batches of items that have sizes
"""

from .access import (
    copy_run,
    fault_in,
    pin_run,
    prefetch_pages,
    read_pinned,
    store_groups,
)
from .cache import Cache, choose_page_size, default_queues
from .hit import (
    PIN_FUNCTIONS,
    copy_part,
    count_read,
    item_adder,
    item_reader,
    item_writer,
    load_word,
    mark_referenced,
    pin_to_store,
    unpin_stored,
    validate_read,
)
from .latch import latch_index, latch_read_only
from .lookup import queue_of, word_address
from .paging import unpin
from .prefetch import Prefetch, PrefetchCounts
from .statistics import Statistics, batches_of, format_size
from .transfer import frame_address
from .word import READABLE, VALID, frame_of

__all__ = ["Cache", "Statistics", "format_size"]
