"""A CUDA program that does not import Warpwell, for `pool_faults`: it works, waits, fails, forks, or exits.

`pool_faults` runs it as a file, ``cuda_client.py ACT [ARGUMENT ..]``. With ``CLIENT_NUMBA`` in its environment it
computes with numba-cuda. Otherwise it copies and adds through the driver API, which the stub driver implements, too.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

IMAGE = Path(__file__).parents[1] / "driver" / "kernels.ptx"
_PARAMETERS = {"add": "QQQ", "flag": "QI", "fault": "", "fail": "", "nap": "I"}
_TYPES = {"Q": ctypes.c_uint64, "I": ctypes.c_uint32}
_NON_BLOCKING = 1


class CudaError(Exception):
    """A call of the driver returned a code."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call}: {code}")
        self.code = code


class Device:
    """The primary context of a device, current in the calling thread, and the kernels of the image."""

    driver: Any = None

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.context = self.out("cuDevicePrimaryCtxRetain", ctypes.c_int(ordinal))
        self.use()
        image = ctypes.create_string_buffer(IMAGE.read_bytes() + b"\0")
        module = self.out("cuModuleLoadData", image)
        self.kernels = {n: self.out("cuModuleGetFunction", module, n.encode()) for n in _PARAMETERS}

    @classmethod
    def all(cls) -> list[Device]:
        """Return all devices."""
        cls.driver = ctypes.CDLL("libcuda.so.1")
        cls.call("cuInit", 0)
        return [cls(k) for k in range(cls.out("cuDeviceGetCount"))]

    @classmethod
    def call(cls, name: str, *arguments: Any) -> None:
        """Call the driver; raise if it returns a code."""
        converted = (ctypes.c_uint64(a) if type(a) is int else a for a in arguments)
        if code := getattr(cls.driver, name)(*converted):
            raise CudaError(name, code)

    @classmethod
    def out(cls, name: str, *arguments: Any) -> int:
        """Return the value that a call stores through its first argument."""
        value = ctypes.c_uint64()
        cls.call(name, ctypes.byref(value), *arguments)
        return value.value

    def use(self) -> None:
        """Make its context current."""
        self.call("cuCtxSetCurrent", self.context)

    def launch(self, name: str, *arguments: int, stream: int = 0, threads: int = 1) -> None:
        """Launch a kernel of one block."""
        values = [_TYPES[letter](value) for letter, value in zip(_PARAMETERS[name], arguments, strict=True)]
        pointers = (ctypes.c_void_p * (len(values) + 1))(*(ctypes.addressof(value) for value in values))
        sizes = [ctypes.c_uint(n) for n in (1, 1, 1, threads, 1, 1, 0)]
        self.call("cuLaunchKernel", self.kernels[name], *sizes, stream, pointers, None)

    def round(self, number: int) -> bool:
        """Copy and add; return True if the result is right."""
        self.use()
        n = 1 + number * 977 % 70_000
        random_bytes, values = (
            ctypes.create_string_buffer(os.urandom(4 * n), 4 * n),
            (ctypes.c_uint32 * n)(*([number] * n)),
        )
        first, second = self.out("cuMemAlloc_v2", 4 * n), self.out("cuMemAlloc_v2", 4 * n)
        self.call("cuMemcpyHtoD_v2", first, random_bytes, 4 * n)
        self.call("cuMemcpyHtoD_v2", second, values, 4 * n)
        self.launch("add", first, second, n, threads=256)
        self.call("cuMemcpyDtoH_v2", values, first, 4 * n)
        terms = (ctypes.c_uint32 * n).from_buffer(random_bytes)
        right = all((terms[i] + number) & 0xFFFFFFFF == values[i] for i in range(0, n, 1 + n // 500))
        self.call("cuMemFree_v2", first)
        self.call("cuMemFree_v2", second)
        return right

    def stick(self) -> int:
        """Return a stream that never becomes ready."""
        self.use()
        word = self.out("cuMemAlloc_v2", 4)
        self.call("cuMemsetD32_v2", word, ctypes.c_uint(0), 1)
        self.call("cuCtxSynchronize")
        stream = self.out("cuStreamCreate", ctypes.c_uint(_NON_BLOCKING))
        self.launch("flag", word, 1, stream=stream)
        for _ in range(2000):
            self.launch("nap", 0, stream=stream)
        return stream

    def reset_lost(self, seconds: float) -> bool:
        """Reset a lost device until it works or `seconds` have passed; return True if it works."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                self.call("cuDevicePrimaryCtxReset_v2", ctypes.c_int(self.ordinal))
                vars(self).update(vars(Device(self.ordinal)))
                return self.round(1)
            except CudaError:
                time.sleep(0.05)
        return False


def numba_rounds() -> Callable[[Device, int], bool]:
    """Return a round that numba-cuda computes."""
    import numpy as np
    from numba import cuda

    @cuda.jit(cache=True)
    def add(x: Any, value: Any) -> None:
        i = cuda.grid(1)
        if i < x.size:
            x[i] += value

    computes = b"fake" not in name_of(0)

    def right(number: int) -> bool:
        data = np.arange(1 + number * 977 % 300_000, dtype=np.int64)
        copy = cuda.to_device(data)
        if computes:
            add.forall(data.size)(copy, number)
        return bool(np.array_equal(copy.copy_to_host(), data + (number if computes else 0)))

    def act(device: Device, number: int) -> bool:
        with cuda.gpus[device.ordinal]:
            return right(number)  # frees its memory inside this block: after it, the context may not be current

    return act


def name_of(ordinal: int) -> bytes:
    """Return the name of a device."""
    name = ctypes.create_string_buffer(256)
    Device.call("cuDeviceGetName", name, ctypes.c_int(256), ctypes.c_int(ordinal))
    return name.value.lower()


def report(*values: object) -> None:
    """Print a line at once."""
    print(*values, flush=True)


def rounds(seconds: str = "1", reset_seconds: str = "") -> int:
    """Work on all devices for `seconds`; report losses, and whether a lost device works within `reset_seconds`."""
    devices = Device.all()
    act = numba_rounds() if "CLIENT_NUMBA" in os.environ else Device.round
    counts, lost = [0] * len(devices), set()
    end = time.monotonic() + float(seconds)
    while True:
        for device in devices:
            if device.ordinal in lost:
                continue
            try:
                if not act(device, counts[device.ordinal]):
                    report("wrong", device.ordinal, counts[device.ordinal])
                    return 1
                counts[device.ordinal] += 1
            except Exception as error:  # numba raises its own types
                lost.add(device.ordinal)
                report("lost", device.ordinal, type(error).__name__, str(error).replace("\n", " ")[:150])
                if reset_seconds:
                    report("back", device.ordinal, device.reset_lost(float(reset_seconds)))
                end = time.monotonic() + 0.5
        if sum(counts) == len(devices):
            report("ready", len(devices))
        if time.monotonic() > end or len(lost) == len(devices):
            report("rounds", *counts)
            return 0


def block() -> int:
    """Wait in the driver for a stream that never becomes ready."""
    device = Device.all()[0]
    stream = device.stick()
    report("ready")
    device.call("cuStreamSynchronize", stream)
    return 1


def ends(how: str) -> int:
    """Exit in the way `how` while the devices execute work."""
    for device in Device.all():
        device.stick()
    report("ready")
    if how == "raise":
        raise ValueError("on purpose")
    if how == "abort":
        os.abort()
    if how == "_exit 3":
        os._exit(3)
    if how == "thread":
        threading.Timer(0.05, os._exit, (3,)).start()
        device.call("cuCtxSynchronize")
    if how == "exec":
        os.execv(sys.executable, [sys.executable, __file__, "rounds", "0.2"])
    return 3 if how == "status 3" else 0


def dies(kernel: str) -> int:
    """Lose a device by a kernel, and report the code."""
    device = Device.all()[0]
    device.round(1)
    report("ready")
    try:
        device.launch(kernel)
        device.call("cuCtxSynchronize")
    except CudaError as error:
        report("code", error.code)
    return 0


def share(kernel: str) -> int:
    """Work while other clients lose the same device by a kernel."""
    devices = Device.all()
    act = numba_rounds() if "CLIENT_NUMBA" in os.environ else Device.round
    number = 0
    for _ in range(2):
        line = [sys.executable, __file__, "dies", kernel]
        child = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        after = 0
        while after < 5:
            after += child.poll() is not None
            number += 1
            for device in devices:
                if not act(device, number):
                    report("wrong", device.ordinal, number)
                    return 1
        assert child.stdout is not None
        report(" ".join(child.stdout.read().split()))
    report("rounds", number)
    return 0


def children(seconds: str) -> int:
    """Start child processes that use the devices, one of them in its own session, and wait for them."""
    line = [sys.executable, __file__, "rounds", seconds]
    found = [subprocess.Popen(line, start_new_session=k == 1) for k in range(2)]
    for child in found:
        child.wait()
    return max(child.returncode for child in found)


ACTS: dict[str, Callable[..., int]] = {
    "rounds": rounds,
    "waits": block,
    "ends": ends,
    "dies": dies,
    "share": share,
    "children": children,
}


if __name__ == "__main__":
    signal.alarm(100)  # the process must not outlive its job
    sys.exit(ACTS[sys.argv[1]](*sys.argv[2:]))
