"""Runs all checks of a transport, and prints what each rank found. Argument: "mpi" or "emulated"."""

import json
import os
import sys

from tests.harness.transports.conformance import run_checks

from lab.link import EmulatedLink
from warpwell.pool.transport.mpi_transport import MpiTransport
from warpwell.pool.transport.transport import Transport

transport: Transport = MpiTransport()
if sys.argv[1] == "emulated":
    transport = EmulatedLink(transport, 2e9, 50e-6)


def report(name: str, failure: str) -> None:
    os.write(1, f"check {json.dumps([transport.rank, name, failure])}\n".encode())


run_checks(transport, report)
transport.close()
