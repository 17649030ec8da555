"""Messages and bulk data between the processes of a pool.

The interface, what all transports have in common, the transports, and what they need:

    transport.py        Transport: the interface; how much may wait, and how long
    bulk.py             Region, Transfer: memory of a bulk copy, and one side of it
    tags.py             Tags: numbers of copies between two processes
    peers.py            PeerTransport: sends, bounds and receives messages; Losses: peers that are gone
    local_transport.py  between threads of one process
    mpi_transport.py    between the processes of an MPI job
    mpi_progress.py     Progress: the thread that calls MPI; notices a peer's death
    mpi_loop.py         what it runs: native code, without the interpreter lock
    emulated_link.py    a transport that is as slow as a network, and emulated_loop.py, what it runs
    table.py            TransferTable: the transfers that a native loop serves
    signal.py           Signal: a word that threads sleep on (futex)
    milestone.py        Milestone: what others wait for; `limit`, how long
    handshake.py        Hello: versions, which processes compare first
"""
