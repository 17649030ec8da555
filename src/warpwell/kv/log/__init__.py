"""The log of a store: its files on disk, and the order in which they are written.

In the order in which a record meets them:

    log.py         append, commit, snapshot, close; the order of writes that makes a commit durable
    format.py      the bytes of records, superblocks and locations
    checksum.py    CRC-32C of values and records, as native code
    segments.py    files of values, and where the next value goes
    journal.py     chained records of puts and deletes, in groups of which all count or none
    floor.py       COMMITTED: the last record that is known to be durable
    snapshot.py    all live records in one file
    manifest.py    MANIFEST: which files a store consists of
    catalog.py     changes of the manifest: a new segment, a snapshot with the journal that follows it
    files.py       every system call that changes a file, and what a failed one means
    lock.py        LOCK: one writer at a time, also where file locks do nothing
    opening.py     creates a log; opens one for writing
    recovery.py    from files to live records; readers that follow a writer; repair after a crash
    compaction.py  gives the space of dead values back
    verify.py      checks every byte that is committed
"""
