"""CUDA programs, unmodified, on the pool's GPUs: a layer under the driver's name, and workers that replay its calls.

- table: names, versions and roles of the driver's interface, and how each call is served
- generate: the C sources that follow from the table
- board: the file that the programs of a shared GPU and their arbiter communicate through
- build: the native parts, built once into the cache folder
- environment: variables and folders by which a program finds the layer instead of the driver
- passthrough: the environment of programs on this machine's own driver, with the pass-through driver in front of it
- elf: reads the file of a compiled program before the program starts
- hook: code that Python programs run at their start, for a few functions of NVIDIA's runtime
- clients: accepts clients of devices and passes them to a server
- server: starts a worker for each client and device

The native sources (``native/``): ``cu.h`` has the interface's types, ``wire.h`` and ``calls.h`` the protocol between
layer and worker, and ``relay.c`` connects them if they are on two hosts (``pool/cuda``). ``layer.h``, ``worker.h``,
``runtime.h`` (the CUDA runtime) and ``passthrough.h`` (the pass-through driver) describe one part each.
"""

from typing import TYPE_CHECKING

from .. import registry

if TYPE_CHECKING:
    from .board import Board
    from .clients import DEVICE_UNAVAILABLE, MISMATCH, Client, ClientListener, RefusedError, receive, refuse
    from .elf import examine_program, is_compiled, uses_cuda
    from .environment import make_library_folder
    from .passthrough import machine_driver, passthrough_environ, uses_driver_directly
    from .server import DriverServer

_FROM = {
    "server": "DriverServer",
    "board": "Board",
    "clients": "Client ClientListener RefusedError refuse receive DEVICE_UNAVAILABLE MISMATCH",
    "elf": "examine_program is_compiled uses_cuda",
    "environment": "make_library_folder",
    "passthrough": "machine_driver passthrough_environ uses_driver_directly",
}
"""Names of modules that are imported when a name is first used."""

if not TYPE_CHECKING:
    _HOMES = {name: f"{module}:" for module, names in _FROM.items() for name in names.split()}
    __getattr__, __dir__ = registry.on_first_use(__name__, _HOMES)
