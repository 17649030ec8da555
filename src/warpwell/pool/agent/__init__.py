"""The process of one device, and the calls that it answers.

Program and agent have the first two files in common:

    protocol.py       Op: the operations, and how they become messages
    code.py           Code, LoadedCode: kernels and functions that are sent, identified by the hash of their content

On the agent, in the order in which a call meets them:

    agent_main.py     the agent's program: joins the job, and serves until its end
    agent.py          Agent: the main loop; handlers of calls that it completes at once
    state.py          AgentState: the state of an agent, which handlers use; HANDLERS: the handler of each operation
    stream_calls.py   handlers of the calls of streams: allocate, copy, launch, call, events
    copies.py         handlers of copies between agents, and of pinned arrays of the application
    staged.py         receive, send: bulk data between the transport and device memory
    peer_memory.py    PeerMemory: blocks that other agents write to, and the condition for freeing them
    peer_access.py    PeerAccess: the access of one device to the memory of another
    arguments.py      large arrays among arguments and results, as the agent receives and sends them
    large_arrays.py   the choice of these arrays, and how they are sent (both sides)
    lane.py           Lane: the thread of one stream; DeferredCalls: replies that no lane sends
    timed_queue.py    TimedQueue: a queue with a reliable timeout of `get`
    memory.py         DeviceMemory, BufferView: a buffer on the agent
    spare.py          SpareDevice: a device that joins and leaves
    runtime.py        Runtime: the operations of a device, here of the CPU
    cuda_runtime.py   CudaRuntime
    memory_pool.py    MemoryPool, ImportedPool: memory that other processes may open; PoolMemory: freed behind streams
"""
