"""The last rank dies in the middle of endless copies in both directions; the others notice, and go on.

Arguments: how ("kill", "exit" or "stop"), and a folder. Each survivor prints how long it took, and what it saw.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
from tests.harness.transports.checks import CHECKS, Party

from warpwell.errors import DeviceLostError
from warpwell.pool.transport.bulk import Region, Transfer
from warpwell.pool.transport.mpi_transport import MpiTransport

how, folder = sys.argv[1], Path(sys.argv[2])
transport = MpiTransport()
party = Party(transport)
last = max(transport.rank, *transport.peers)
CHUNK = 1 << 20


def go_on(transfer: Transfer) -> str:
    """Let a copy run until it fails."""
    k = 0
    try:
        while True:
            transfer.allow(k + 4)
            transfer.wait(k + 1, 20.0)
            k += 1
    except DeviceLostError:
        return f"{time.monotonic()} {k}"


def endless(peer: int) -> list[Transfer]:
    """Start a copy of a tebibyte to a peer, and one from it."""
    memory = [np.zeros(4 * CHUNK, np.uint8) for _ in range(2)]
    regions = [Region(int(m.ctypes.data), 1 << 40, CHUNK, 4, m) for m in memory]
    low = min(transport.rank, peer)
    there, back = (1, 2) if transport.rank == low else (2, 1)
    return [transport.put(peer, there, regions[0]), transport.get(peer, back, regions[1])]


ended: list[str] = []
told: list[float] = []
transport.on_lost(lambda peer, reason: told.append(time.monotonic()) if peer == last else None)
party.barrier()
copies = [copy for peer in (party.peers if transport.rank == last else [last]) for copy in endless(peer)]
threads = [threading.Thread(target=lambda c=c: ended.append(go_on(c)), daemon=True) for c in copies]
for thread in threads:
    thread.start()
time.sleep(0.7)
if transport.rank == last:
    (folder / "dying").write_text(f"{time.monotonic()}")
    if how == "exit":
        os._exit(3)
    os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
for thread in threads:
    thread.join(15)
died = float((folder / "dying").read_text())
try:
    transport.send(last, b"?")
    sent = "sent"
except DeviceLostError as error:
    sent = str(error)
# The others go on as before.
party.peers = tuple(peer for peer in party.peers if peer != last)
for check in ("bulk_data_of_every_size", "large_messages_in_both_directions_do_not_wait_for_each_other"):
    CHECKS[check](party)
times = [float(line.split()[0]) - died for line in ended]
chunks = [int(line.split()[1]) for line in ended]
found = f"{transport.rank} {len(ended)} {min(chunks)} {max([*times, *(t - died for t in told)]):.2f} {len(told)} {sent}"
os.write(1, f"survivor {found}\n".encode())
party.barrier()  # mpiexec may end the job as soon as one more has left
before = time.monotonic()
transport.close()
assert time.monotonic() - before < 6
if transport.rank == 0 and how == "stop":
    time.sleep(0.5)
    os.kill(transport.hellos[last].process, signal.SIGKILL)
assert not transport.intact
os._exit(0)
