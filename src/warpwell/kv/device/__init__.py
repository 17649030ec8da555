"""How kernels fetch records.

In the order in which a request meets them:

    device_store.py   the store as the host sees it: `get_async`, an argument of kernels
    engine.py         sets up one device: options (the timeout of a Get is set here), queues, controller, device cache
    upload.py         a batch with ragged fields that the host has read, copied to the GPU; keys in its memory
    gather.py         a batch that host threads read into pinned memory, from which the GPU copies it
    kernel_view.py    methods that kernels call: submit, poll, length, take, retrieve, exists
    requests.py       a Get of a thread, from its command id to its value: pieces, retries, until the timeout
    device_cache.py   values that are kept in device memory; copies by all lanes of a group
"""
