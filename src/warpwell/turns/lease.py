"""`turn`: the lease of a GPU for a block of a program, between all processes of a host that ask for it."""

from __future__ import annotations

import contextlib
import re
from types import TracebackType
from typing import Any

from .. import errors
from .._check import checked_integer, checked_timeout
from .ahead import AheadSeat, gates
from .board import Board
from .gpu_work import NO_GPU, current_context, device_name, handles
from .seat import Seat, seat_of

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MOST = 1 << 31
_BYTES = 128

_TORCH = re.compile(r"(cpu|cuda)(?::(\d+))?")
"""A device of PyTorch as text, which is how many programs name theirs."""

_names: dict[int | None, str] = {}
"""Names of GPUs, by context, and by number from -1 downwards."""


class Turn:
    """A block in which this thread alone uses a GPU, among the programs that take turns. See `turn`."""

    __slots__ = ("_ahead", "_device", "_priority", "_seat", "_stream", "_streams", "_tenant", "_timeout")

    def __init__(
        self, tenant: str, priority: int, device: Any, stream: Any, timeout: float | None, ahead: bool
    ) -> None:
        self._tenant, self._priority, self._device = tenant, priority, device
        self._stream, self._streams = stream, () if stream is None else handles(stream)  # who has them keeps them alive
        self._timeout, self._ahead = timeout, ahead
        self._seat: Seat | None = None

    def __enter__(self) -> Turn:
        # Ctrl-C may come at any point: what follows is undone wherever it stopped
        seat, before = None, 0
        try:
            name = _name_of(self._device)
            kind = AheadSeat if self._ahead and gates(Board.of(name)) else Seat
            seat = seat_of(name, kind)
            if seat.broken and not seat.depth:
                seat = seat_of(name, Seat)
            before, self._seat = seat.depth, seat
            if not before:
                seat.owner, seat.stream = id(self), self._stream
            seat.begin(self._tenant, self._priority, self._streams, self._timeout)
            return self
        except BaseException:
            if seat is not None:
                seat.cancel(before)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = None
        try:
            if self._seat is not None:
                left = self._seat.depth - 1
                self._seat.end()
        except BaseException:
            if self._seat is not None:
                left = self._seat.depth - 1 if left is None else left
                if left >= 0:
                    self._seat.cancel(left)
            raise

    def __del__(self) -> None:
        # Ctrl-C before the first line of __exit__
        with contextlib.suppress(Exception):
            if self._seat is not None and self._seat.depth and self._seat.owner == id(self):
                self._seat.cancel(0)

    def pause(self) -> None:
        """Let others have the GPU here, inside the turn, if they come first; return when it is this thread's again.

        It costs a turn without those who wait some microseconds: put it between the parts of a long turn, such as the
        forward and the backward pass.

        Raises
        ------
        TurnTimeoutError
            The lease did not come back in the turn's `timeout`. The turn is over then.
        """
        if self._seat is not None:
            self._seat.pause(self._timeout)


def turn(
    tenant: str = "default",
    *,
    priority: int = 0,
    device: Any = None,
    stream: Any = None,
    timeout: float | None = None,
    ahead: bool = False,
) -> Turn:
    """Take turns at a GPU with other threads and processes of this host, whatever library they use it by.

    Put it around a training step, or a batch of inference. Who has a turn has the GPU for itself among all who take
    turns; a program without turns is not held back. No service is needed, and nothing is intercepted. At the end of a
    turn its work may still be on the GPU: it is waited for when somebody else comes next, and never more than 2 ms of
    work, or one turn, are queued behind the one that runs.

    Parameters
    ----------
    tenant : str
        Whose turn it is: for `warpwell sched status` and `end`, and the operator's limits.
    priority : int
        Of those that wait the largest is next, as far as the operator lets it count (8). Waiting for a second counts
        like a step, so that nobody waits without end. Those of one priority share the time.
    device : int, str or device of a framework, optional
        Number of the GPU among those that this process sees (or as PyTorch writes it, ``"cuda:1"``), or a name of your
        own for something else to share; by default, and for ``"cuda"``, the GPU that the thread uses, or the first one.
        Without a GPU, and for ``"cpu"``, turns are a lease alone.
    stream : stream or sequence of streams, optional
        Streams of PyTorch, CuPy or numba, or their handles, in which the turn's work is. By default all work of the
        thread's context is waited for, and the default stream counts for what is queued.
    timeout : float, optional
        Seconds that it waits at most.
    ahead : bool, optional
        The host does not wait for the lease, neither here nor at a pause: its work does, on the GPU, at gates in the
        turn's stream, one at the beginning and one at each pause. So the GPU finds a full queue when the lease comes
        back, and others wait for one part between two gates at most, however much is enqueued. For loops that only
        enqueue, such as training. All of the turn's work must be in one stream (the default stream, or `stream`), or
        behind it; a turn in another stream than the thread's last one waits until that has ended. The host is up to
        4 ms of its own work ahead. Without a GPU, or where the driver has no operations
        on memory in streams, the turn is an ordinary one.

    Returns
    -------
    Turn
        A context manager, which can be used again, and has `pause`.

    Raises
    ------
    ArgumentError
        An argument is none of these.
    DeviceNotFoundError
        This process sees no such GPU (when the turn begins).
    SchedulerError
        The folder of the leases cannot be used (when the turn begins).
    TurnTimeoutError
        The turn did not come in time (when it begins).

    Examples
    --------
    >>> import warpwell as ww
    >>> for step in range(3):
    ...     with ww.turn("training") as its:
    ...         loss = step * 2                      # the forward pass
    ...         its.pause()
    ...         loss = -loss                         # the backward pass
    """
    if type(tenant) is not str or not tenant or len(tenant.encode(errors="replace")) > _BYTES:
        raise errors.ArgumentError(f"tenant is {tenant!r:.60}: give a string of 1 to {_BYTES} bytes", name="tenant")
    if type(priority) is not int or not -_MOST < priority < _MOST:
        priority = checked_integer(priority, "priority", minimum=-_MOST, maximum=_MOST)
    if timeout is not None:
        timeout = checked_timeout(timeout)
    made = Turn(tenant, priority, device, stream, timeout, ahead)
    if ahead and (timeout is not None or len(made._streams) > 1):
        raise errors.ArgumentError("a turn with `ahead` waits for nothing, and has one stream", name="ahead")
    return made


def _name_of(device: Any) -> str:
    """Return the name of a device, under which its users meet."""
    if device is not None and not isinstance(device, int):
        said = _TORCH.fullmatch(str(device))
        if said is not None:
            if said[1] == "cpu":
                return NO_GPU
            device = None if said[2] is None else int(said[2])
    if device is None:
        key = current_context()
    elif isinstance(device, str):
        if not _NAME.fullmatch(device):
            raise errors.ArgumentError(
                f"device is {device!r:.70}: give letters, digits, dots and dashes, 64 at most", name="device"
            )
        return device
    else:
        number = getattr(device, "index", getattr(device, "id", device))
        key = -1 - checked_integer(0 if number is None else number, "device", minimum=0, maximum=1 << 16)
    found = _names.get(key)
    if found is None:
        found = _names[key] = device_name(None if key >= 0 else -1 - key)
    return found
