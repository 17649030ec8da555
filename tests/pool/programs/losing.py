"""A program that loses device 1 and continues with the others."""

import time

import numpy as np

from warpwell.errors import DeviceLostError
from warpwell.pool.devices import devices

ds = devices()
print("up", *(d.info["pid"] for d in ds), flush=True)
began = time.monotonic()
data = np.ones(6)
try:
    while time.monotonic() < began + 60:
        ds[1].to_device(data).copy_to_host()
except DeviceLostError as error:
    when, device = time.monotonic(), error.device
sums = ",".join(str(float(ds[k].to_device(data).copy_to_host().sum())) for k in (0, 2))
print("lost", when, device, sums, flush=True)
