"""What a kernel of Jupyter does with its process: interrupts end cells, descriptors are read, a message ends it."""

import os
import signal
import sys
import time

import warpwell as ww

devices = ww.devices()


def cell(number, run):
    print("cell", number, flush=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run()
        how = "done"
    except KeyboardInterrupt:
        how = "interrupted"
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # between cells there is nothing to interrupt
    print("was", how, flush=True)


def spin():
    while True:
        pass


def ask_slowly():
    devices[1].call(time.sleep, 1)
    devices[1].synchronize()


def interrupt_the_group():
    os.killpg(0, signal.SIGINT)
    time.sleep(30)


def printed():
    """What an agent prints, as it comes out of this process's own stdout."""
    kept = os.dup(1)
    reading, writing = os.pipe()
    os.dup2(writing, 1)
    devices[0].call(print, "from an agent").get()
    found = os.read(reading, 100)
    os.dup2(kept, 1)
    return found.decode().strip()


signal.signal(signal.SIGINT, signal.SIG_IGN)
print("up", os.getpid(), *sys.argv[1:], flush=True)
for number, run in enumerate([lambda: time.sleep(30), spin, ask_slowly, lambda: time.sleep(30), interrupt_the_group]):
    cell(number, run)
time.sleep(0.5)
cell("last", lambda: print("sums", *(d.call(sum, [d.index, 1]).get() for d in devices), flush=True))
print("seen", printed(), flush=True)
if "wait" in sys.argv:
    time.sleep(60)
