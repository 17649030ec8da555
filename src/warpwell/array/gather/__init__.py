"""Rows by their numbers: what a batch needs is known before it is read.

- api.py         `gather`: checks, and the choice of a strategy
- batches.py     `rows`: batches of rows, gathered ahead of their use
- tensors.py     arrays of any library as addresses, and row numbers
- tasks.py       work in chunks on the process's service threads
- memory.py      rows of arrays in memory, and of mapped files, which are read ahead
- cached.py      rows of arrays behind a cache: waves of pages, and the kernel that copies
- pieces.py      bytes of files that are known piece by piece, for tables: threads that read runs of them
- in_stream.py   on a GPU: rows of memory, by one kernel in the caller's stream
- frames.py      on a GPU: rows of arrays behind a cache, from frames, by lists, or in waves
- lists.py       lists of rows that service threads copy into staging, for `frames.py`
- kernels.py     the kernels of both
"""

from .api import gather
from .batches import RowBatches, rows

__all__ = ["RowBatches", "gather", "rows"]
