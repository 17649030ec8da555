"""Messages and bulk data between the processes of a pool.

The interface, the base of all transports, the transports, and their parts:

    transport.py        Transport: the interface; bounds of waiting messages, and timeouts
    bulk.py             Region, Transfer: memory of a bulk copy, and one side of it
    tags.py             Tags: numbers of copies between two processes
    peers.py            PeerTransport: sends, bounds and receives messages; counts; lost peers
    local_transport.py  between threads of one process
    mpi_transport.py    between the processes of an MPI job
    mpi_progress.py     Progress: the thread that calls MPI; notices a peer's death
    mpi_loop.py         the native loop of that thread, without the GIL
    table.py            TransferTable: the transfers that a native loop serves
    signal.py           Signal: a word that threads sleep on (futex)
    milestone.py        Milestone: an event that threads wait for; `limit`: the default timeout
    handshake.py        Hello: the first message, in which processes compare versions
"""
