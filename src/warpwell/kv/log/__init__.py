"""The log of a store: its files on disk, and the order in which they are written.

In the order in which a record meets them:

    log.py         create, open, append, commit, snapshot, close; the order of the writes of a commit
    format.py      the bytes of records, superblocks and locations
    checksum.py    CRC-32C of values and records, in native code
    segments.py    files of values, and the offset of the next value
    shards.py      the shard of each key; the folders of segments, even of a store that was moved or copied
    journal.py     chained records of puts and deletes, in atomic groups; COMMITTED: the last record known to be durable
    staged.py      single puts as a group: journal records and values of Python objects in one native call
    manifest.py    MANIFEST: which files a store consists of; snapshots: all live records, the index that processes map
    files.py       every system call that changes a file, and the handling of its errors; LOCK: one writer at a time
    recovery.py    recover live records from files; follow a writer as a reader; repair after a crash
"""
