"""A program whose device 1 exits by itself in the middle of its work, during a copy that another device waits for."""

import os
import tempfile
import time

import numpy as np

import warpwell as ww
from warpwell.errors import DeviceLostError, PoolError

devices = ww.devices()
target, source = devices[2].zeros(1000), devices[1].to_device(np.ones(1000))
devices.synchronize()
gate = f"{tempfile.mkdtemp()}/gate"


def wait_for_gate():
    while not os.path.exists(gate):
        time.sleep(0.01)


devices[1].call(wait_for_gate)
devices[1].call(os._exit, 3)
target.copy_from(source)
open(gate, "w").close()
try:
    devices[1].synchronize()
except DeviceLostError as error:
    print("told", error, flush=True)
try:
    devices[2].synchronize()
except PoolError as error:
    print("copied", error, flush=True)
print("others", *(float(d.to_device(np.ones(6)).copy_to_host().sum()) for d in (devices[0], devices[2])), flush=True)
