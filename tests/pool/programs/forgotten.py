"""Ends without closing its transport."""

from warpwell.pool.transport.mpi_transport import MpiTransport

transport = MpiTransport()
for peer in transport.peers:
    transport.send(peer, b"a word")
for _ in transport.peers:
    assert transport.receive(20.0)
