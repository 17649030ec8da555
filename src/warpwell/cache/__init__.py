"""The page cache: frames in device memory that arrays on storage share.

Files, in the order in which an access meets them (all but the host's are device code):

- access.py       read, write or add to an item of a page, where ``a[i]`` is no plain hit
- word.py         the page word: state, pins, generation and frame in 64 bits
- lookup.py       where the word, queue, owner and array of a page lie; counters
- paging.py       the miss: pin a page, bring it in, prefetch it, evict it
- frames.py       pick a frame to reuse (clock with second chance); write a dirty page back
- stash.py        frames that were given back unused
- transfer.py     start, wait for and settle commands; copy pages; publish or abandon a page
- pins.py         pages that kernels or the host hold for long
- latch.py        the first error of a launch, and the watchdog that ends waits
- maintenance.py  kernels that the host runs: flush, prefetch, hold, evict, settle
- layout.py       the words of all records
- cache.py        `Cache` on the host: arrays, launches, maintenance, life
- partition.py    how a cache's memory is split into records, page table and frames
- launches.py     what is kept for each launch, and the exception for what it latched
- statistics.py   what a cache did so far
- sizes.py        sizes in bytes, as people write them
"""

from .cache import Cache
from .sizes import format_size, parse_size
from .statistics import Statistics

__all__ = ["Cache", "Statistics", "format_size", "parse_size"]
