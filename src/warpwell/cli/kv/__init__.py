"""``warpwell kv``.

arguments.py  the options of all commands
load.py       fills a store from another format
get.py        one value; how a key is written on the command line
dump.py       writes a store to another format
stats.py      what a store holds
verify.py     what is damaged, and how it is printed
salvage.py    copies the undamaged records into a new store
compact.py    gives the space of dead values back
"""
