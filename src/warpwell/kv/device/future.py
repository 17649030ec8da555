"""DeviceFuture: a batch whose values are being fetched to a device. `upload`: a batch that the host has read."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ...array import DeviceArray
from ...targets import Block
from ..keys import MAX_KEY, Keys, as_keys
from ..ragged import Ragged
from ..schema import Schema
from . import batch as at
from .engine import Engine


class BatchSpace:
    """Memory of one batch; reused for other batches once its arrays are dropped.

    Attributes
    ----------
    rows_at : int
        Byte of the first row.
    """

    def __init__(self, engine: Engine, capacity: int, stride: int) -> None:
        self.capacity, self.stride = capacity, stride
        self.table = 1 << max(1, 2 * capacity - 1).bit_length()
        self.keys_at = 8 * at.B_ALL
        self.lengths_at = self.keys_at + 16 * capacity
        self.copied_bytes = self.lengths_at + 8 * capacity
        self.first_at = self.copied_bytes
        self.zeroed_at = self.tickets_at = self.first_at + 8 * capacity
        self.table_at = self.tickets_at + 8 * capacity
        self.sizes_at = self.table_at + 8 * self.table
        self.found_at = self.sizes_at + 8 * capacity
        self.rows_at = -(-(self.found_at + capacity) // 256) * 256
        self.nbytes = self.rows_at + capacity * stride
        self.used = False
        self.device: Block = engine.memory.allocate(self.nbytes)
        self.host: Block = engine.memory.allocate_shared(self.copied_bytes)


_MAX_SPARE = 2
"""Number of free spaces of a size that are kept when a space of another size is allocated."""


class BatchSpaces:
    """Free spaces of an engine."""

    def __init__(self) -> None:
        self._free: dict[tuple[Any, int, int], list[Any]] = {}

    def take(self, engine: Engine, count: int, stride: int, make: type[Any] = BatchSpace) -> Any:
        """Return a space of the class `make` for `count` rows; allocate one if none is free."""
        capacity = 1 << max(5, (count - 1).bit_length())
        free = self._free.setdefault((make, capacity, stride), [])
        with contextlib.suppress(IndexError):
            return free.pop()
        # batches of other sizes may not come again
        for size, spaces in list(self._free.items()):
            if size != (make, capacity, stride):
                del spaces[_MAX_SPARE:]
        with engine.stream.on_device():
            return make(engine, capacity, stride)

    def give_back(self, space: Any) -> None:
        """Keep a space for the next batch."""
        self._free[type(space), space.capacity, space.stride].append(space)


class Lease:
    """Keeps a space in use: the arrays of a batch refer to it, and the space is released with the last of them."""

    def __init__(self, spaces: BatchSpaces, space: Any) -> None:
        self.space = space
        self.address = space.device.address
        weakref.finalize(self, spaces.give_back, space).atexit = False


class DeviceFuture:
    """A batch in flight; ``wait()`` returns the same result as `Store.get_many`, in device memory.

    The memory of the arrays is reused once all of them are dropped, in the order of the default stream: if you read
    them in another stream, keep them until that stream is done.

    Parameters
    ----------
    engine : Engine
    spaces : BatchSpaces
    keys : array or iterable
        As for `Store.get_many`, or int64 [N] in the GPU's memory.
    schema : Schema or None
    names : sequence of str, optional
        The fields to return; all by default.
    keep : object
        An object to keep alive until the values have arrived: a store that is dropped is closed.
    """

    def __init__(
        self,
        engine: Engine,
        spaces: BatchSpaces,
        keys: Any,
        schema: Schema | None,
        names: Sequence[str] | None = None,
        keep: Any = None,
    ) -> None:
        self._engine, self._schema, self._names, self._keep = engine, schema, names, keep
        self._result: Any = None
        self._failed: Exception | None = None
        self._space: Any = None
        self._lock = threading.RLock()
        on_gpu = hasattr(keys, "__cuda_array_interface__")
        if on_gpu and engine.target != "cuda":
            raise errors.ArgumentError(
                f'keys are in GPU memory, and this store is on "{engine.target}": copy them to the host, or open it'
                ' with device="cuda"',
                name="keys",
            )
        self._keys: Keys | None = None if on_gpu else as_keys(keys).copied()
        if self._keys is not None and self._keys.full is not None:
            key = next(key for key in self._keys.full if key is not None)
            raise errors.ArgumentError(
                f"key {key!r} has {len(key)} bytes, and devices find keys of at most {MAX_KEY}: use get_many, or hash"
                " longer keys",
                name="keys",
            )
        interface = checked_gpu_keys(keys) if on_gpu else None
        self.count = int(interface["shape"][0]) if interface is not None else self._keys.size  # type: ignore[union-attr]
        self.room = engine.options.value_bytes
        self._lease: Any = Lease(spaces, spaces.take(engine, max(1, self.count), -(-self.room // 16) * 16))
        engine.begin()
        space = self._lease.space
        is_started = False
        try:
            self._begin(space, interface)
            # the stream reads the keys later
            self._gpu_keys = keys if on_gpu else None
            self._has_started = engine.stream.mark()
            is_started = True
        finally:
            if not is_started:
                engine.recover(at.finish_rows, self.count, space.device.address)
                engine.end()
        self._space = space
        engine.register(self)

    def _begin(self, space: BatchSpace, interface: dict[str, Any] | None) -> None:
        engine, n = self._engine, self.count
        base = space.device.address
        fields = space.host.words
        fields[: at.B_ALL] = 0
        fields[at.B_KEYS] = base + space.keys_at
        fields[at.B_PITCH], fields[at.B_LENGTH] = 8, 8
        fields[at.B_TABLE], fields[at.B_TABLE_MASK] = base + space.table_at, space.table - 1
        fields[at.B_FIRST], fields[at.B_TICKETS] = base + space.first_at, base + space.tickets_at
        fields[at.B_SIZES], fields[at.B_FOUND] = base + space.sizes_at, base + space.found_at
        fields[at.B_ROWS], fields[at.B_STRIDE] = base + space.rows_at, space.stride
        fields[at.B_ROOM] = self.room
        fields[at.B_SALT] = id(self) >> 4 & 0xFFFF
        copied = space.keys_at
        self._unique = False
        if self._keys is not None:
            key_words, lengths, *_ = self._keys
            self._unique = key_words.ndim == 1 and np.unique(key_words).size == n
            fields[at.B_UNIQUE] = self._unique
            width = 2 if key_words.ndim == 2 else 1
            fields[at.B_PITCH] = 8 * width
            fields[space.keys_at // 8 : space.keys_at // 8 + width * n] = key_words.reshape(-1)
            copied = space.keys_at + 8 * width * n
            if lengths is not None:
                fields[at.B_LENGTHS] = base + space.lengths_at
                fields[space.lengths_at // 8 : space.lengths_at // 8 + n] = lengths
                copied = space.lengths_at + 8 * n
        stream = engine.stream
        if space.used:
            # Other kernels may still use the arrays of the previous batch in this space.
            stream.after_default()
        space.used = True
        stream.copy(base, space.host.address, copied)
        if interface is not None:
            stream.after_default(interface.get("stream"))
            stream.copy(base + space.keys_at, int(interface["data"][0]), 8 * n)
        stream.zero(base + space.zeroed_at, space.rows_at - space.zeroed_at + n * space.stride)
        if n:
            engine.launch(at.begin_rows, n, engine.core, base)

    def done(self) -> bool:
        """Return whether all values have arrived, so that `wait` returns soon."""
        if self._result is not None or self._failed is not None:
            return True
        pairs = self._engine.pairs
        return self._has_started() and pairs.announced() == 0 and pairs.outstanding() == 0

    def wait(self) -> tuple[Any, Any]:
        """Wait for the values and return them (may be called again).

        Returns
        -------
        batch : dict of arrays
            On the device: fields [N, ...] of the schema (zeros for absent keys); without a schema ``"value"``,
            uint8 [N, value_bytes], and ``"size"``, int64 [N], negative for an absent key.
        found : array
            bool [N], on the device.

        Raises
        ------
        CorruptionError
            A value is damaged.
        MediumError
            The device answered with an error status.
        StallError
            The device did not answer in time. This batch is lost; later ones may succeed.
        KernelError
            An earlier wait was interrupted by Ctrl-C.
        """
        with self._lock:
            if self._failed is not None:
                raise self._failed
            if self._result is None:
                self._failed = errors.KernelError(
                    f"the wait for a batch of {self._engine.name} was interrupted: call it again"
                )
                try:
                    self._result = self._finish()
                    self._failed = None
                except Exception as error:
                    self._failed = error
                    raise
                finally:
                    self._gpu_keys = self._keep = None
                    if self._failed is not None:
                        self._release()
            return self._result  # type: ignore[no-any-return]

    def settle(self) -> None:
        """Wait until the batch has ended; `wait` raises its errors."""
        with contextlib.suppress(Exception):
            self.wait()

    def _finish(self) -> tuple[Any, Any]:
        engine, space, n = self._engine, self._space, self.count
        base = space.device.address
        engine.check()
        finished = False
        try:
            if n:
                engine.launch(at.finish_rows, n, engine.core, base)
                if not self._unique:
                    engine.launch(at.spread_rows, n, base)
            engine.stream.copy(space.host.address, base, 8 * at.B_ALL)
            engine.stream.wait((engine,))
            finished = True
        finally:
            if not finished:
                engine.recover(at.finish_rows, n, base)
            engine.end()
        fields = space.host.words
        row, status = int(fields[at.B_FAILED]) - 1, int(fields[at.B_STATUS])
        if row >= 0:
            engine.resume()
            raise self._error(row, status)
        return self._arrays()

    def _error(self, row: int, status: int) -> Exception:
        key = "" if self._keys is None else f" of key {self._keys.row(row)!r}"
        where = f"{self._engine.name}, row {row}: the value{key}"
        return self._engine.error_of(status, where)

    def _arrays(self) -> tuple[Any, Any]:
        space, n = self._space, self.count
        if self._engine.target != "cuda":
            raw = space.device.view(np.dtype(np.uint8))
            # Copies, because arrays of the host do not hold the lease, and the space is reused.
            rows = raw[space.rows_at : space.rows_at + n * space.stride].reshape(n, space.stride)[:, : self.room].copy()
            sizes = raw[space.sizes_at : space.sizes_at + 8 * n].view(np.int64).copy()
            found = raw[space.found_at : space.found_at + n].astype(np.bool_)
            self._release()
            if self._schema is not None:
                return self._schema.unpack(rows, self._names), found
            return {"value": rows, "size": sizes}, found
        if self._schema is not None:
            return fields_of(self._lease, self._schema, n, self._names)
        batch = {
            "value": view_of(self._lease, space.rows_at, (n, self.room), np.dtype(np.uint8), space.stride),
            "size": view_of(self._lease, space.sizes_at, (n,), np.dtype(np.int64), 8),
        }
        return batch, view_of(self._lease, space.found_at, (n,), np.dtype(np.bool_), 1)

    def __del__(self) -> None:
        # Dropped without a wait: its command ids must be released. A finalizer may interrupt any other code.
        if getattr(self, "_space", None) is not None and self._result is None and self._failed is None:
            self._engine.abandon(at.finish_rows, self.count, self._lease)

    def _release(self) -> None:
        self._lease = None


def fields_of(
    lease: Lease, schema: Schema, count: int, names: Sequence[str] | None
) -> tuple[dict[str, DeviceArray], DeviceArray]:
    """Return fields of the records in a space in GPU memory, by default all, and which keys were found."""
    space = lease.space
    fields = {
        field.name: view_of(lease, space.rows_at + field.offset, (count, *field.shape), field.dtype, space.stride)
        for field in schema.fields
        if names is None or field.name in names
    }
    return fields, view_of(lease, space.found_at, (count,), np.dtype(np.bool_), 1)


def view_of(lease: Lease, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any], pitch: int) -> DeviceArray:
    """Return rows of a space in GPU memory as an array, which keeps the space in use."""
    strides = [dtype.itemsize]
    for extent in reversed(shape[2:]):
        strides.insert(0, strides[0] * extent)
    steps = (pitch, *strides) if len(shape) > 1 else (pitch,)
    return DeviceArray(lease.space.device._owner, shape, dtype, offset=offset, strides=steps, keep=lease)


def checked_gpu_keys(keys: Any) -> dict[str, Any]:
    """Return the interface of keys in GPU memory, or raise ArgumentError."""
    interface: dict[str, Any] = keys.__cuda_array_interface__
    is_contiguous = interface.get("strides") in (None, (8,))
    if len(interface["shape"]) != 1 or np.dtype(interface["typestr"]) != np.int64 or not is_contiguous:
        raise errors.ArgumentError(
            f"keys in GPU memory are a contiguous int64 [N], not {interface['typestr']} {interface['shape']}: convert"
            " them, or pass them from the host",
            name="keys",
        )
    return interface


def copied_from_gpu(engine: Engine, keys: Any) -> NDArray[np.int64]:
    """Return keys in GPU memory as an array of the host."""
    interface = checked_gpu_keys(keys)
    nbytes = 8 * int(interface["shape"][0])
    block = engine.memory.allocate_shared(max(8, nbytes))
    engine.stream.after_default(interface.get("stream"))
    engine.stream.copy(block.address, int(interface["data"][0]), nbytes)
    engine.stream.wait()
    return block.words[: nbytes // 8].copy()


# -- batches with ragged fields, which the host reads ---------------------------------------------------------------


class RaggedArrays(NamedTuple):
    """A ragged field in GPU memory.

    Attributes
    ----------
    values : DeviceArray
        [total, ...]: the items one after the other.
    offsets : DeviceArray
        int64 [N + 1]: item i is ``values[offsets[i]:offsets[i + 1]]``.
    """

    values: DeviceArray
    offsets: DeviceArray


def upload(engine: Engine, batch: dict[str, Any], found: NDArray[np.bool_]) -> tuple[dict[str, Any], DeviceArray]:
    """Return a batch of `Store.get_many` with arrays in the memory of an engine's GPU (any thread)."""
    engine.check()

    def copied(array: NDArray[Any]) -> DeviceArray:
        block = engine.memory.allocate(max(1, array.nbytes))
        block.write(0, array)
        return DeviceArray(block._owner, array.shape, array.dtype)

    with engine.stream.on_device():
        fields = {
            name: RaggedArrays(copied(field.values), copied(field.offsets))
            if isinstance(field, Ragged)
            else copied(field)
            for name, field in batch.items()
        }
        return fields, copied(found)
