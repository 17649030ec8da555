"""Devices "of other hosts": a communicator and agents as threads of this process, over any transport."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.harness.until import HANG_SECONDS

from lab.driver import build
from lab.driver.serve import client_environ
from warpwell.driver.environment import make_library_folder
from warpwell.driver.server import DriverServer
from warpwell.errors import ClosedError
from warpwell.pool.agent.protocol import Op, unpack
from warpwell.pool.cuda.far import FarEnd
from warpwell.pool.cuda.near import NearServer
from warpwell.pool.transport.bulk import Transfer
from warpwell.pool.transport.local_transport import LocalTransport, local_transports
from warpwell.pool.transport.transport import Transport

Wrap = Callable[[Transport], Transport]

LATE_SECONDS = 3e-3
"""How much later than a message bulk data arrives with `delay_data`; the fake driver takes less for most calls."""


def delay_data(transport: Transport) -> Transport:
    """Let bulk data arrive `LATE_SECONDS` after its copy has started, as it may over a network.

    The threads of one process would otherwise copy it before the message that announces it is sent.
    """
    assert isinstance(transport, LocalTransport)
    start = transport._start

    def start_later(transfer: Transfer, outgoing: bool) -> None:
        if outgoing:
            start(transfer, outgoing)
            return
        timer = threading.Timer(LATE_SECONDS, start, (transfer, outgoing))
        timer.daemon = True
        timer.start()

    transport._start = start_later  # type: ignore[method-assign]
    return transport


class Hosts:
    """Fake devices of agents on other hosts, served by a communicator; the last `here` are of this host.

    Attributes
    ----------
    folder : Path
        Of the sockets.
    transports : list of Transport
        The communicator's, then the agents'.
    """

    def __init__(self, parts: build.Built, devices: int, local: int, wrap: Wrap) -> None:
        self.parts = parts
        self.folder = Path(tempfile.mkdtemp(prefix="ww-hosts-"))
        make_library_folder(self.folder, parts.layer)
        away = devices - local
        self.transports = [wrap(transport) for transport in local_transports(1 + away)]
        self.servers: dict[int, DriverServer] = {}
        self.fars = [FarEnd(self.transports[1 + k], k, lambda k=k: self.serve(k)) for k in range(away)]
        names = {k: (1 + k, f"agent {1 + k} (on host {k})") for k in range(away)}
        for transport, far in zip(self.transports[1:], self.fars, strict=True):
            self.receive(transport, far)
        self.near = NearServer(names, self.folder, parts.relay)
        self.near.begin(self.transports[0])
        self.receive(self.transports[0], self.near)
        for k in range(away, devices):
            self.servers[k] = DriverServer(str(k), k, parts, driver=parts.fake, folder=self.folder)

    def serve(self, k: int) -> tuple[DriverServer, Path]:
        """Start the server of an agent."""
        made = DriverServer(str(k), k, self.parts, driver=self.parts.fake)
        self.servers[k] = made
        return made, self.parts.relay

    @staticmethod
    def receive(transport: Transport, end: NearServer | FarEnd) -> None:
        """Hand what comes to one end, in a thread, as the process of a rank does."""

        def work() -> None:
            with contextlib.suppress(ClosedError):
                while True:
                    got = transport.receive(0.5)
                    if got is not None:
                        op, *message = unpack(got[1])
                        assert op == Op.CUDA
                        end.handle(got[0], *message)

        threading.Thread(target=work, daemon=True).start()

    @property
    def workers(self) -> list[int]:
        """Process ids of the workers that are alive."""
        return [pid for server in self.servers.values() for pid in server.workers]

    def environ(self) -> dict[str, str]:
        """Return the environment of a client."""
        return client_environ(self.folder, os.environ)

    def lose(self, k: int) -> None:
        """End the agent of a device as if its process were killed."""
        self.transports[1 + k].close(0.1)
        self.servers[k].close()

    def close_near(self) -> None:
        """End the server of the communicator, and all of its clients."""
        for remote in self.near.remotes.values():
            remote.close()
        clients = list(self.near.served.values())
        for client in clients:
            client.stop()
        for client in clients:
            client.thread.join(HANG_SECONDS)

    def close(self) -> None:
        """End everything."""
        self.close_near()
        for client in [client for far in self.fars for client in list(far.served.values())]:
            client.close()
        for transport in self.transports:
            transport.close(0.1)
        for server in self.servers.values():
            server.close()
        shutil.rmtree(self.folder)


@contextlib.contextmanager
def hosts(
    parts: build.Built, devices: int = 2, local: int = 0, wrap: Wrap = lambda transport: transport
) -> Iterator[Hosts]:
    """Yield devices of other hosts; nothing of them is left after."""
    made = Hosts(parts, devices, local, wrap)
    try:
        yield made
    finally:
        made.close()
