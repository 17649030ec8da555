"""`Buffer`: an array in the memory of a device of the pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from .. import errors
from .agent.protocol import Op, pack_dtype
from .copy import copying
from .ids import new_id

if TYPE_CHECKING:
    from .device import Device
    from .stream import Stream


class Buffer:
    """An array on a device, C-ordered. Devices make them: ``device.to_device``, ``empty``, ``zeros``, ``full``.

    It is passed to kernels as an array is. ``buffer[a:b]`` and ``buffer[i]`` are views, which share its memory; the
    memory lasts as long as one of them, and until what was asked of it is done.

    Attributes
    ----------
    device : Device
    shape : tuple of int
    dtype : numpy.dtype
    size, nbytes, ndim : int
    """

    def __init__(self, device: Device, handle: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._handle = 0  # until all is well: __del__ sees what was begun
        self.device = device
        self.shape = shape
        self.dtype = dtype
        self.ndim = len(shape)
        self.size = int(np.prod(shape, dtype=np.int64))
        self.nbytes = self.size * dtype.itemsize
        self._root = handle
        self._offset = 0
        self._freed = device.connection.finalizer
        self._handle = handle

    @property
    def handle(self) -> int:
        """The number by which its agent knows it.

        Raises
        ------
        ClosedError
            It was freed.
        """
        if not self._handle:
            raise errors.ClosedError("the buffer was freed")
        return self._handle

    @property
    def warpwell_place(self) -> Device:
        """Where launches with it run."""
        return self.device

    def copy_to_host(self, out: NDArray[Any] | None = None, stream: Stream | None = None) -> NDArray[Any]:
        """Return its contents, behind everything that the stream was given before.

        Parameters
        ----------
        out : ndarray, optional
            Where to put them: of the same shape and dtype, contiguous or not.
        stream : Stream, optional
            Of its device; the default one's otherwise.

        Raises
        ------
        RemoteError
            An earlier call of the stream failed, or this one did.
        DeviceLostError
            The device is gone.
        ArgumentError
            `out` does not fit.
        """
        if out is None:
            out = np.empty(self.shape, self.dtype)
        elif not isinstance(out, np.ndarray) or out.shape != self.shape or out.dtype != self.dtype:
            raise errors.ArgumentError(
                f"out is {_kind(out)}, and the buffer {self.dtype} {self.shape}: they must be alike", name="out"
            )
        elif not out.flags.writeable:
            raise errors.ArgumentError("out is read-only", name="out")
        copying.download(self, out, stream)
        return out

    def copy_from(self, source: ArrayLike | Buffer, stream: Stream | None = None) -> None:
        """Set its contents: from an array, which may change as soon as this returns, or from a buffer of any device.

        Parameters
        ----------
        source : array-like or Buffer
            Of the same shape and dtype.
        stream : Stream, optional
        """
        if isinstance(source, Buffer):
            copying.between(self, source, stream)
            return
        array = np.asarray(source)
        if array.shape != self.shape or array.dtype != self.dtype:
            raise errors.ArgumentError(
                f"the source is {_kind(array)}, and the buffer {self.dtype} {self.shape}: they must be alike",
                name="source",
            )
        copying.upload(self, array, stream)

    def fill(self, value: Any, stream: Stream | None = None) -> None:
        """Set every item."""
        try:
            item = b"" if value is None else np.array(value).astype(self.dtype).tobytes()
        except (TypeError, ValueError):  # a text for numbers
            item = b""
        if len(item) != self.dtype.itemsize or np.ndim(value):
            raise errors.ArgumentError(f"{value!r:.60} is not one item of {self.dtype}", name="value")
        self.device.connection.post(self.device.channel(stream), Op.FILL, self.handle, item)

    def free(self) -> None:
        """Give the memory back, behind what was asked of it. The buffer cannot be used again; views of it can."""
        if self._handle and self.device.connection.lost is None:
            self.device.connection.tell(Op.FREE, self._handle)
        self._handle = 0  # behind it: after Ctrl-C the finalizer frees it, and twice does no harm

    def __getitem__(self, index: Any) -> Buffer:
        if not self.ndim:
            raise IndexError("a buffer of no dimensions has no items")
        row = self.nbytes // self.shape[0] if self.shape[0] else 0
        if isinstance(index, int | np.integer) and not isinstance(index, bool):
            first = int(index) + (self.shape[0] if index < 0 else 0)
            if not 0 <= first < self.shape[0]:
                raise IndexError(f"index {index} of {self.shape[0]}")
            shape = self.shape[1:]
        elif isinstance(index, slice) and index.step in (None, 1):
            first, last, _ = index.indices(self.shape[0])
            shape = (max(0, last - first), *self.shape[1:])
        else:
            raise errors.ArgumentError(f"a view [{index!r:.40}] of a buffer: give an integer, or a slice of step 1")
        view = Buffer(self.device, new_id(), shape, self.dtype)
        view._root, view._offset = self._root, self._offset + first * row
        self.device.connection.tell(Op.VIEW, view.handle, self.handle, first * row, pack_dtype(self.dtype), shape, None)
        return view

    def part(self, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...]) -> Buffer:
        """Return another array in this buffer's memory, for kernels; only of contiguous ones bytes can be copied."""
        view = Buffer(self.device, new_id(), shape, dtype)
        view._root, view._offset = self._root, self._offset + offset
        self.device.connection.tell(Op.VIEW, view.handle, self.handle, offset, pack_dtype(dtype), shape, strides)
        return view

    def __setitem__(self, index: Any, value: Any) -> None:
        view = self[index]
        if np.ndim(value) or isinstance(value, Buffer):
            view.copy_from(value if isinstance(value, Buffer) else np.asarray(value, self.dtype))
        else:
            view.fill(value)

    def overlaps(self, other: Buffer) -> bool:
        """Tell whether it shares bytes with another."""
        return (
            self._root == other._root
            and self._offset < other._offset + other.nbytes
            and other._offset < self._offset + self.nbytes
        )

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("a buffer of no dimensions has no length")
        return self.shape[0]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("a buffer is on a device: an array of it is a copy")
        host = self.copy_to_host()
        return host if dtype is None else host.astype(dtype, copy=False)

    def __repr__(self) -> str:
        state = "" if self._handle else ", freed"
        return f"<Buffer {self.dtype} {self.shape} on device {self.device.index}{state}>"

    def __reduce__(self) -> NoReturn:  # a copy of this object would free what both stand for
        raise TypeError("a buffer stays on its device: use copy_to_host, or Device.copy to a new one")

    def __del__(self) -> None:
        handle = getattr(self, "_handle", 0)
        if handle:
            self._freed(handle)


def _kind(thing: Any) -> str:
    return f"{thing.dtype} {thing.shape}" if isinstance(thing, np.ndarray) else f"a {type(thing).__name__}"
