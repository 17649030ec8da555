"""One device for several processes: a service starts the device process and hands over the connections of clients.

In the order in which a submission uses them::

    address.py          path and lock of the socket, and the checks of its folder
    client.py           connect, Client: packs launches and copies results back; ServiceHandle, ServiceArray, Packer
    references.py       names of kernels; which kernels are allowed; how the device process imports them
    messages.py         Connection, Message: JSON over SOCK_SEQPACKET, with arrays in sealed memfds
    service.py          Service: accepts connections, identifies their users, starts the device process again
    device_process.py   DeviceProcess: serves the clients, and runs the Scheduler
    recovery.py         StatusPage, Verdicts, Quarantine: the order of requests after a death of the device process
"""
