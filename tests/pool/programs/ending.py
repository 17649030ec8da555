"""A program with devices that ends in the way that its first argument names."""

import os
import signal
import sys
import time

from warpwell.pool.devices import devices

print("up", os.getpid(), *(d.info["pid"] for d in devices()), flush=True)
how = sys.argv[1]
if how == "raise":
    raise ValueError("on purpose")
if how == "exit":
    sys.exit(int(sys.argv[2]))
if how == "message":
    sys.exit("a message")
if how == "_exit":
    os._exit(int(sys.argv[2]))
if how == "signal":
    os.kill(os.getpid(), getattr(signal, sys.argv[2]))
if how == "wait":
    time.sleep(100)
if how == "spin":
    while True:
        pass
if how == "deaf":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("deaf", flush=True)
    time.sleep(100)
