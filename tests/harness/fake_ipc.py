"""A driver that lends memory between processes, without a GPU: `FakeIpc`; run as a program, an owner with one.

Its memory is files of a folder, mapped where the driver would map an allocation. Who uses what was closed dies of it.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

GPU = "gpu-fake"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class FakeIpc:
    """The driver's functions that `warpwell.scheduler.service.ipc` calls, and what they were called for (`log`)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mapped: dict[int, tuple[int, str]] = {}
        self._lendable: dict[str, bool] = {}
        self.log: list[str] = []

    def array(self, values: Any, *, lendable: bool = True, before: int = 0, after: int = 0) -> FakeArray:
        """Return an array in memory of the device, with so many bytes of its allocation before and after it."""
        host = np.asarray(values)
        name = secrets.token_hex(16)
        path = self.folder / name
        path.write_bytes(bytes(before) + host.tobytes() + bytes(after))
        self._lendable[name] = lendable
        return FakeArray(self._map(path) + before, host.shape, host.dtype)

    def _map(self, path: Path) -> int:
        size = path.stat().st_size
        with open(path, "r+b") as file:
            address = _libc.mmap(None, size, 3, 1, file.fileno(), 0)
        assert address not in (None, ctypes.c_void_p(-1).value)
        self._mapped[address] = size, path.name
        return int(address)

    def name_of(self, array: FakeArray) -> str:
        """Return what the log calls the memory of an array."""
        found = self._at(array.address)
        assert found is not None
        return found[2]

    def _at(self, address: int) -> tuple[int, int, str] | None:
        found = [(b, *about) for b, about in self._mapped.items() if b <= address < b + about[0]]
        return found[0] if found else None

    def _note(self, what: str) -> None:
        self.log.append(what)
        with open(self.folder / f"log-{os.getpid()}", "a") as file:
            file.write(what + "\n")

    def cuPointerGetAttribute(self, out: Any, attribute: int, address: int) -> int:
        found = self._at(address)
        if found is None:
            return 1
        out._obj.value = 0 if attribute == 9 else self._lendable.get(found[2], False)
        return 0

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, address: int) -> int:
        found = self._at(address)
        if found is None:
            return 1
        base._obj.value, size._obj.value = found[:2]
        return 0

    def cuIpcGetMemHandle(self, out: Any, base: Any) -> int:
        ctypes.memmove(out, self._mapped[base][1].encode().ljust(64, b"\0"), 64)
        return 0

    def cuIpcOpenMemHandle_v2(self, out: Any, handle: Any, flags: int) -> int:
        name = bytes(handle.bytes).rstrip(b"\0").decode("latin-1")
        if name in [n for _, n in self._mapped.values()]:
            return 208  # once is enough
        if not name.isalnum() or not (self.folder / name).exists():
            return 201
        out._obj.value = self._map(self.folder / name)
        self._note(f"open {name}")
        return 0

    def cuIpcCloseMemHandle(self, address: int) -> int:
        size, name = self._mapped[address]
        until = time.monotonic() + 300
        while (self.folder / f"runs-{name}").exists() and time.monotonic() < until:
            time.sleep(0.01)  # as the driver waits for all that runs
        del self._mapped[address]
        self._note(f"close {name}")
        _libc.munmap(address, size)
        return 0

    def cuCtxSynchronize(self) -> int:
        self._note("synchronize")
        return 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cu"):  # of contexts: there is one
            return lambda *_: 0
        raise AttributeError(name)


class FakeArray:
    """An array in memory of the fake driver, as CuPy and Numba would tell of theirs."""

    def __init__(self, address: int, shape: tuple[int, ...], dtype: Any) -> None:
        self.address, self.shape, self.dtype = address, shape, np.dtype(dtype)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": self.shape, "typestr": self.dtype.str, "data": (self.address, False), "version": 3}

    def __getitem__(self, rows: slice) -> FakeArray:
        first, last, _ = rows.indices(self.shape[0])
        return FakeArray(self.address + first * self.dtype.itemsize, (last - first,), self.dtype)

    def __setitem__(self, index: int, value: int) -> None:
        ctypes.memmove(self.address + index * 8, int(value).to_bytes(8, "little"), 8)

    def numpy(self) -> NDArray[Any]:
        """Return a copy."""
        nbytes = int(np.prod(self.shape)) * self.dtype.itemsize
        return np.frombuffer(ctypes.string_at(self.address, nbytes), self.dtype).reshape(self.shape)


def main() -> None:
    """Be an owner on the CPU, whose GPU is the fake; arguments: a folder, and the descriptor of the socket."""
    from warpwell.scheduler.service import ipc, owner, protocol

    fake, hello = FakeIpc(Path(sys.argv[1])), protocol.hello
    ipc.driver = lambda: fake  # type: ignore[assignment]
    protocol.hello = lambda connection, about, **f: hello(connection, about={**about, "gpu": GPU}, **f)
    owner.main(sys.argv[2:])


if __name__ == "__main__":
    main()
