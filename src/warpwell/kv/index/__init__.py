"""The index of a store in memory, and the native code that reads values through it.

In the order in which a look-up meets them:

    index.py   the hash table; epochs that readers enter and leave
    reader.py  values by location, with their checksums: one, rows of one size, a list; mapped files
    serve.py   the Retrieve command of a controller
"""
