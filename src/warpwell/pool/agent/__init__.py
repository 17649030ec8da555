"""The process of one device, and the calls that it answers.

Program and agent have the first two files in common:

    protocol.py       Op: the operations, and how they become messages
    code.py           Code, LoadedCode: kernels and functions that travel, by the hash of their content

On the agent, in the order in which a call meets them:

    agent_main.py     a program: joins the job, serves, ends
    agent.py          Agent: the main loop; handlers of calls that are done at once
    handlers.py       HANDLERS: which function handles an operation (``@handles(Op.WRITE)``)
    state.py          AgentState: what an agent holds, and what handlers use
    stream_calls.py   handlers of the calls of streams: allocate, copy, launch, call, events
    arguments.py      large arrays among arguments and results, as the agent receives and sends them
    large_arrays.py   which arrays these are, and how they travel (both sides)
    lane.py           Lane: the thread of one stream; DeferredCalls: answers that wait for no lane
    timed_queue.py    TimedQueue: a queue whose `get` keeps to its timeout
    memory.py         DeviceMemory, BufferView: what a buffer is on the agent
    runtime.py        Runtime: what a device can do; CpuRuntime
    cuda_runtime.py   CudaRuntime

Handlers of copies lie in ``pool/copy``.
"""
