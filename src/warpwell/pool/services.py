"""`Remote`: an object on an agent, called from the application; and the names of what can be made there."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .. import errors
from .agent.parts import Arguments
from .agent.protocol import Op
from .agent.reply import Reply
from .result import Result

if TYPE_CHECKING:
    from .device import Device
    from .stream import Stream

_PROVIDERS = ("warpwell.remote.array", "warpwell.remote.store", "warpwell.remote.scheduler")
"""Modules that register something, imported by name where one is asked for that is not known yet."""

_paths: dict[str, str] = {}
_stand_ins: dict[str, str] = {}


def register(name: str, path: str, stand_in: str | None = None, *, provided: bool = False) -> None:
    """Give what agents can make a name: ``register("store", "warpwell.kv:open")``.

    Parameters
    ----------
    name : str
    path : str
        ``"module:callable"``. The agent imports it when it is first asked for.
    stand_in : str, optional
        ``"module:class"`` of what stands for it in the application, a `Remote`.
    provided : bool
        It comes with Warpwell: a name that is somebody's already stays so.
    """
    if provided and name in _paths:
        return
    for given in (path, stand_in):
        if given is not None and given.count(":") != 1:
            raise errors.ArgumentError(f"{given!r}: give 'module:callable'", name="path")
    _paths[name] = path
    if stand_in is not None:
        _stand_ins[name] = stand_in


def stand_in(device: Device, handle: int, service: str) -> Any:
    """Return what stands in the application for an object that an agent makes: a `Remote`, or a class of its own."""
    cls = find(_stand_ins[service]) if service in _stand_ins else Remote
    return cls(device, handle, path_of(service))


def path_of(service: str) -> str:
    """Return the path of a registered name; a path stays as it is."""
    if not isinstance(service, str) or service.count(":") > 1:
        raise errors.ArgumentError(f"{service!r:.60}: give the name of a service, or 'module:callable'", name="service")
    if ":" in service:
        return service
    for provider in () if service in _paths else _PROVIDERS:
        importlib.import_module(provider)
    try:
        return _paths[service]
    except KeyError:
        known = ", ".join(sorted(_paths))
        raise errors.ArgumentError(f"there is no service {service!r}: choose one of {known}", name="service") from None


def find(path: str) -> Any:
    """Import what a path names."""
    module, _, name = path.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


class Remote:
    """What stands here for an object on an agent. ``device.create(...)`` makes it.

    It is passed to kernels in the object's place, where the object can be (an array on storage can). Other methods are
    called by name: ``remote.call("put", b"key", b"value")``.

    Attributes
    ----------
    device : Device
    path : str
    """

    def __init__(self, device: Device, handle: int, path: str) -> None:
        self.device = device
        self.path = path
        self._freed = device.connection.finalizer
        self._handle = handle

    @property
    def handle(self) -> int:
        """The number by which its agent knows it."""
        if not self._handle:
            raise errors.ClosedError(f"the {self.path} was let go")
        return self._handle

    @property
    def warpwell_place(self) -> Device:
        """Where launches with it run."""
        return self.device

    def call(self, method: str, *args: Any, stream: Stream | None = None, **options: Any) -> Result:
        """Call a method, and do not wait; buffers among the arguments arrive as arrays."""
        with Arguments(self.device, self.device.channel(stream)) as arguments:
            data, handles = arguments.pack((args, options))
            return self._ask(method, handles, data, stream)

    def attribute(self, name: str) -> Any:
        """Return an attribute; waits."""
        return self._ask(f".{name}", (), b"", None).get()

    def free(self) -> None:
        """Let the object go, behind the calls so far. It is not closed: call its own method for that."""
        if self._handle and self.device.connection.lost is None:
            self.device.connection.tell(Op.FREE, self._handle)
        self._handle = 0  # behind it, as for buffers

    def _ask(self, name: str, handles: tuple[int, ...], data: bytes, stream: Stream | None) -> Result:
        connection, channel = self.device.connection, self.device.channel(stream)
        reply = connection.ask(
            channel, Op.METHOD, self.handle, name, Reply, handles, data, cost=len(data), keep=True
        )
        return Result(reply, channel, f"{name!r} of {self.path!r} on {connection.label}")

    def __repr__(self) -> str:
        return f"<Remote {self.path} on device {self.device.index}>"

    def __del__(self) -> None:
        handle = getattr(self, "_handle", 0)
        if handle:
            self._freed(handle)
