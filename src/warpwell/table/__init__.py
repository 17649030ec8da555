"""Tables: columns on storage. A query reads only the parts of them that it needs.

>>> import warpwell as ww
>>> with ww.table.open("trips.arrow") as trips:
...     trips["distance"].arrow(0, 10)

Files, in the order in which a column meets them:

- arrow.py       pyarrow, imported when it is first used
- library.py     pyarrow and Polars, imported when they are first needed
- layout.py      which buffers the values of an Arrow type have; `is_valid`, for kernels
- extent.py      `Extent`: items in a file, as a view of its mapping and as an array for kernels
- column.py      `Column`, and the runs in which its rows lie
- arrow_file.py  Arrow IPC files, opened in place
- table.py       `open`, and `Table`
- sources.py     rows of Parquet, Arrow and ORC files, of folders of files, and of frames in memory
- text_files.py  rows of CSV and JSON, with types that hold all rows
- convert.py     `convert` and `append`: write Arrow files, completely or not at all
- check.py       `check`: compare a table with its checksums
- zones.py       zone maps and checksums of an Arrow file, in a second file
- predicate.py   `Condition`: pyarrow's filters and Polars' expressions as intervals of values
- where.py       `Table.where`, and `Selection`
- selecting.py   the kernel that finds the rows whose keys are in a set
- take.py        `ColumnBatch`: columns of rows by their numbers
- scan.py        `scan`: a table as a LazyFrame of Polars
- reading.py     `IoCounters`: the bytes that a query reads
"""

from .check import check
from .column import Column
from .convert import append, convert
from .layout import is_valid
from .reading import IoCounters
from .scan import scan
from .table import Table, index
from .table import open_table as open  # reads as table.open, like io.open
from .take import ColumnBatch
from .where import Selection

__all__ = [
    "Column",
    "ColumnBatch",
    "IoCounters",
    "Selection",
    "Table",
    "append",
    "check",
    "convert",
    "index",
    "is_valid",
    "open",
    "scan",
]
