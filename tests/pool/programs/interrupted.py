"""Ctrl-C in copies, calls and waits of a pool: the call ends, and the next ones are as if there had been none."""

import os
import signal
import sys
import threading
import time

import numpy as np

import warpwell as ww

first, second = ww.devices()
array = np.ones(64 << 20, np.uint8)
remote = first.to_device(array)
first.synchronize()
for call in (
    lambda: first.to_device(array),
    lambda: remote.copy_to_host(),
    lambda: second.to_device(remote).copy_to_host(),
    lambda: first.call(time.sleep, 1).get(),
    lambda: (second.call(time.sleep, 1), second.synchronize()),
):
    timer = threading.Timer(0.03, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        call()
        time.sleep(5)
    except KeyboardInterrupt:
        timer.join()
    for device in (first, second):
        device.synchronize(30)
        print(device.zeros(3).copy_to_host().sum())
print("up", flush=True)
while sys.argv[1] == "copies":
    second.to_device(array)
while sys.argv[1] == "calls":
    first.call(np.sum, array[: 1 << 20]).get()
first.call(time.sleep, 60).get()
