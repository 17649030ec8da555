"""Arrays and stores that devices open, and tasks of a scheduler on them: the same with any number of devices."""

import sys
import tempfile
from concurrent.futures import wait
from pathlib import Path

import numpy as np

import warpwell as ww
from warpwell import gpu


@ww.kernel
def total(edges, out):
    i = gpu.grid(1)
    if i < edges.size:
        gpu.atomic_add(out, 0, edges[i])


@ww.kernel
def double(x):
    i = gpu.grid(1)
    x[i] = 2 * x[i]


def main() -> None:
    devices = ww.devices()
    with tempfile.TemporaryDirectory() as folder:
        values = np.arange(20_000)
        np.save(Path(folder) / "a.npy", values)
        with ww.kv.create(Path(folder) / "s.kv") as store:
            store.put_many([b"a", b"b"], [b"1", b"2"])
        arrays = [device.open(Path(folder) / "a.npy", cache="64KiB") for device in devices]
        outs = [device.zeros(1, np.int64) for device in devices]
        for array, out in zip(arrays, outs, strict=True):
            total[array.size](array, out)
        print("sums", {int(out.copy_to_host()[0]) for out in outs}, "items", {int(a[7]) for a in arrays})
        for array in arrays:
            array.close()
        stores = [device.open_store(Path(folder) / "s.kv") for device in devices]
        print("records", {s["b"] for s in stores}, {len(s) for s in stores})
        for store in stores:
            store.close()
        try:
            devices[-1].open(Path(folder) / "nothing.npy")
        except ww.errors.RemoteError as error:
            print("refused", type(error.__cause__).__name__)

    with devices.lease(len(devices), timeout=60) as lease, ww.scheduler.Scheduler(devices=lease) as scheduler:
        inputs = [np.full(500, k) for k in range(10)]
        wait([scheduler.submit(double[500], x) for x in inputs], 60)
        print("tasks", [int(x[3]) for x in inputs])
    sys.stdout.flush()


if __name__ == "__main__":
    main()
