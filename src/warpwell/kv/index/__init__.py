"""The index of a store in memory, and the native code that reads values through it.

In the order in which a look-up meets them:

    layout.py       words of the state block, tables and locations; epochs that readers enter and leave
    index.py        the hash table as the host changes it
    slots.py        the hash table as device code: hash, look-up, put
    fetch.py        values by location as native code, with their checksums
    reader.py       values for the host: one, rows of one size, a list
    mapped_file.py  segments in memory, where they are in the page cache
    serve.py        the Retrieve command of a controller
"""
