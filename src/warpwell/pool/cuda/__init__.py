"""Unmodified CUDA programs on devices of other hosts: a mirrored ring between the driver layer and its worker.

The program's process must not call MPI, so an extra rank, the communicator, runs on its host. On the near side, the
communicator acts as a worker for the program's driver layer; on the far side, an agent acts as a client of its worker:

    communicator_main.py  the communicator process: joins the job and serves clients of remote devices
    near.py               NearServer: reads the ring of each client in the communicator
    far.py                FarEnd: fills the ring of a worker in an agent
    ends.py               the messages between both sides, and their native memory (``relay.c``)

Agents on the program's host serve it without a communicator (``launch/cuda_programs.py``).
"""
