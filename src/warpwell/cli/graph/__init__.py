"""The ``warpwell graph`` commands.

arguments.py  the options of all commands
make.py       ``convert`` and ``generate``: make a graph on disk
info.py       ``info``: what a graph holds
run.py        ``bfs``, ``cc``, ``sssp``, ``pagerank``, ``triangles``: traverse a graph, and report what was read
"""
