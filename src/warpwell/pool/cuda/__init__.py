"""CUDA programs, unmodified, on devices of other hosts: what is between the driver layer and its worker there.

The application may never call MPI, so a process of its own stands beside it, the communicator, one more rank:

    communicator_main.py  a program: joins the job, serves clients of remote devices
    near.py               NearServer: in the communicator; a worker to the layer, whose ring it reads
    far.py                FarEnd: in an agent; a client of the agent's own workers, whose rings it fills
    ends.py               what both have in common: the messages, and the native part's memory (``relay.c``)

Agents on the application's host serve without it (``launch/cuda_programs.py``).
"""
