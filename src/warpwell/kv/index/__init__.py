"""The index of a store in memory, and the native code that reads values through it.

In the order in which a look-up meets them:

    index.py   the hash table of later records; epochs that readers enter and leave
    sealed.py  the file of a snapshot's records, a hash table or an array, which all processes map
    reader.py  values by location, with their checksums: one, rows of one size, a list; mapped files
    serve.py   the Retrieve command of a controller
"""
