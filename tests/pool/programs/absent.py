"""The last rank says no hello."""

import os
import time

from mpi4py import MPI

from warpwell.errors import AgentError
from warpwell.pool.transport.mpi_transport import MpiTransport

rank = MPI.COMM_WORLD.Get_rank()
if rank == 2:
    MPI.COMM_WORLD.Dup()
    time.sleep(4)
else:
    try:
        MpiTransport(start=1.5)
    except AgentError as error:
        os.write(1, f"missing {rank} {error.agent}\n".encode())
        time.sleep(2)
os._exit(0)
