"""Copy rows by index: the rows of a batch are known before they are read.

- api.py            `gather`: checks, and the choice of a strategy
- batches.py        `rows`: batches of rows, gathered ahead of their use
- tensors.py        addresses of arrays of any library, and row indices
- tasks.py          chunked tasks on the I/O threads of the process

Strategies:

- host.py           rows of arrays in memory and of mapped files, which are read ahead
- page_batches.py   rows of arrays behind a cache: batches of pages, and the kernel that copies
- fetch.py          ranges of files, for tables: threads that read the missing ones
- gpu.py            on a GPU: rows of memory, by one kernel in the stream of the caller
- gpu_cached.py     on a GPU: rows of arrays behind a cache, from frames, from host memory, or in batches of pages
- kernels.py        the kernels of both
"""

from .api import begin, by_stream, gather, indices_of, new_result
from .batches import RowBatches, rows
from .fetch import Pieces, read_ahead
from .fetch import fetch as fetch_pieces
from .tasks import ChunkedTask, WorkerGroup, in_order
from .tensors import tensor_of

__all__ = ["RowBatches", "gather", "rows"]
