"""The last rank dies in the middle of endless copies in both directions; the others notice, and continue.

Arguments: how ("kill", "exit" or "stop"), and a folder. Each survivor writes into its file there what it saw:
mpiexec may end before it has forwarded all output of a job that has lost a process.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
from tests.harness.transports.checks import CHECKS, Party
from tests.harness.until import HANG_SECONDS, until

from warpwell.errors import DeviceLostError
from warpwell.pool.transport.bulk import Region, Transfer
from warpwell.pool.transport.mpi_transport import MpiTransport

how, folder = sys.argv[1], Path(sys.argv[2])
transport = MpiTransport()
party = Party(transport)
last = max(transport.rank, *transport.peers)
CHUNK = 1 << 20


def go_on(number: int, transfer: Transfer) -> None:
    """Let a copy run until it fails."""
    try:
        while True:
            transfer.allow(chunks[number] + 4)
            transfer.wait(chunks[number] + 1, HANG_SECONDS)
            chunks[number] += 1
    except DeviceLostError:
        ended.append(number)


def endless(peer: int) -> list[Transfer]:
    """Start a copy of a tebibyte to a peer, and one from it."""
    memory = [np.zeros(4 * CHUNK, np.uint8) for _ in range(2)]
    regions = [Region(int(m.ctypes.data), 1 << 40, CHUNK, 4, m) for m in memory]
    low = min(transport.rank, peer)
    outgoing, back = (1, 2) if transport.rank == low else (2, 1)
    return [transport.put(peer, outgoing, regions[0]), transport.get(peer, back, regions[1])]


ended: list[int] = []
lost_peers: list[int] = []
transport.on_lost(lambda peer, reason: lost_peers.append(peer))
if transport.rank == last:
    party.send(0, str(os.getpid()).encode())
process = int(party.take(last)) if transport.rank == 0 else 0
party.barrier()
copies = [copy for peer in (party.peers if transport.rank == last else [last]) for copy in endless(peer)]
chunks = [0] * len(copies)
threads = [threading.Thread(target=go_on, args=each, daemon=True) for each in enumerate(copies)]
for thread in threads:
    thread.start()
if transport.rank == last:
    until(lambda: min(chunks) > 0)
    if how == "exit":
        os._exit(3)
    os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
for thread in threads:
    thread.join()
try:
    transport.send(last, b"?")
    sent = "sent"
except DeviceLostError as error:
    sent = str(error)
until(lambda: lost_peers)
# The others continue as before.
party.peers = tuple(peer for peer in party.peers if peer != last)
for check in ("bulk_data_of_every_size", "large_messages_in_both_directions_do_not_wait_for_each_other"):
    CHECKS[check](party)
(folder / f"survivor-{transport.rank}").write_text(f"{len(ended)} {lost_peers} {sent}")
party.barrier()  # mpiexec may end the job when another rank has exited
transport.close()
if transport.rank == 0 and how == "stop":
    time.sleep(0.5)
    os.kill(process, signal.SIGKILL)
assert last in transport.lost()
os._exit(0)
