"""One device for several processes: clients connect to a service, whose owner process alone touches the device.

In the order in which a submission meets them::

    client.py          connect, Client: packs launches, and receives their ends; ServiceHandle, ServiceArray, Packer
    references.py      how a kernel is named; which kernels are allowed; how the owner imports them
    protocol.py        ServiceConnection, ServiceMessage: framed messages on a Unix socket, and the bounds of their size
    wire.py            checks of launches and options that came from a peer; errors and profiles as plain data
    ipc.py             lend, Borrowed: memory of a GPU that the owner uses in place
    address.py         where the socket lies, who may write there, and the lock of the place
    service.py         Service: accepts connections, and decides which tenant a user is
    broker.py          Session: one client; Broker: handlers of what clients and the owner say; who is owed what
    ledger.py          Ledger: requests that have not ended, device arrays, and what runs again when the owner dies;
                       Holdings: whether a tenant may have more
    owner_process.py   OwnerProcess: starts the owner, notices its death, starts it again; SendQueue
    owner.py           Owner: the process that imports kernels and runs the Scheduler
"""
