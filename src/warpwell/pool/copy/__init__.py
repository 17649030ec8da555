"""Copies between the program and its devices, and between two devices.

In the order in which a copy meets them:

    plan.py        Tuning, CopyPlan: the pieces of a copy
    program.py     the program's side: upload, download, between two agents; large arguments of calls
    pipelined.py   the agent's side: between the transport and device memory, through staging buffers
    lent.py        pinned arrays of the program, which an agent on the same host reads and writes itself
    exchange.py    copies between two agents: the work of each half, and their messages
    direct.py      SharedMemory: blocks that the sender writes to itself, and when they may be freed
    neighbour.py   Neighbour: the way from one device to another's memory on the same host
"""
