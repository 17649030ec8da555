"""The log of a store: its files on disk, and the order in which they are written.

In the order in which a record meets them:

    log.py         append, commit, snapshot, close; the order of writes that makes a commit durable
    format.py      the bytes of records, superblocks and locations
    checksum.py    CRC-32C of values and records, in native code
    segments.py    files of values, and the offset of the next value
    shards.py      the shard of each key; the folders of segments, even of a store that was moved or copied
    journal.py     chained records of puts and deletes, in atomic groups; COMMITTED: the last record known to be durable
    snapshot.py    all live records in one file, the index that processes map
    manifest.py    MANIFEST: which files a store consists of
    files.py       every system call that changes a file, and the handling of its errors
    lock.py        LOCK: one writer at a time; refuse file systems whose locks do nothing
    opening.py     create a log; open one for writing
    recovery.py    recover live records from files; follow a writer as a reader; repair after a crash
    compaction.py  reclaim the space of dead values
    verify.py      check every committed byte
"""
