"""Copy rows by their numbers: the rows of a batch are known before they are read.

- api.py         `gather`: checks, and the choice of a strategy
- batches.py     `rows`: batches of rows, gathered ahead of their use
- tensors.py     addresses of arrays of any library, and row numbers
- tasks.py       work in chunks on the service threads of the process

Strategies:

- host.py        rows of arrays in memory, and of mapped files, which are read ahead
- waves.py       rows of arrays behind a cache: waves of pages, and the kernel that copies
- fetch.py       ranges of files, for tables: threads that read the missing ones
- in_stream.py   on a GPU: rows of memory, by one kernel in the stream of the caller
- frames.py      on a GPU: rows of arrays behind a cache, from frames, by lists, or in waves
- lists.py       lists of rows that service threads copy into staging, for `frames.py`
- kernels.py     the kernels of both
"""

from .api import gather
from .batches import RowBatches, rows

__all__ = ["RowBatches", "gather", "rows"]
