"""Messages and bulk data between the processes of a pool.

In the order in which to read it:

    transport.py        Transport: the interface, flow control, counts, lost peers; Tags
    bulk.py             Region, Transfer: memory of a bulk copy, and one side of the copy
    local_transport.py  LocalTransport: between threads of one process
    mpi_transport.py    MpiTransport: between the processes of an MPI job
    mpi_loop.py         the native loop of its thread, without the GIL
    table.py            TransferTable: the transfers that a native loop serves
    signal.py           Signal: a condition word for threads and native code (futex)
    milestone.py        Milestone: an event with a value; `limit`: the default timeout
"""
