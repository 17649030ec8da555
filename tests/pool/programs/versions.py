"""The last rank runs another version."""

import os
import sys

from mpi4py import MPI

import warpwell
from warpwell.errors import PoolVersionError
from warpwell.pool.transport.mpi_transport import MpiTransport

if MPI.COMM_WORLD.Get_rank() == MPI.COMM_WORLD.Get_size() - 1:
    sys.modules["warpwell"].__version__ = "0.0.old"
assert warpwell
try:
    MpiTransport()
except PoolVersionError as error:
    os.write(1, f"refused {error}\n".encode())
