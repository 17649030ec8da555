"""A process handled as by a Jupyter kernel: interrupts end cells, descriptors are read, a message ends it."""

import os
import signal
import sys
import time

import warpwell as ww

devices = ww.devices()


def cell(number, run):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        print("cell", number, flush=True)
        run()
        how = "done"
    except KeyboardInterrupt:
        how = "interrupted"
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # no cell is running
    print("was", how, flush=True)


def spin():
    while True:
        pass


def ask_slowly():
    gate = os.environ["TEST_INTERRUPTED_AFTER"] + "-cell"

    def wait_for_gate():
        while not os.path.exists(gate):
            time.sleep(0.01)

    try:
        devices[1].call(wait_for_gate)
        devices[1].synchronize()
    finally:
        open(gate, "w").close()


def interrupt_the_group():
    os.killpg(0, signal.SIGINT)
    time.sleep(30)


def printed():
    """Return an agent's output, which this process's own stdout receives."""
    saved = os.dup(1)
    reading, writing = os.pipe()
    os.dup2(writing, 1)
    devices[0].call(print, "from an agent").get()
    found = os.read(reading, 100)
    os.dup2(saved, 1)
    return found.decode().strip()


signal.signal(signal.SIGINT, signal.SIG_IGN)
print("up", os.getpid(), *sys.argv[1:], flush=True)
for number, run in enumerate([lambda: time.sleep(30), spin, ask_slowly, lambda: time.sleep(30), interrupt_the_group]):
    cell(number, run)
signal.signal(signal.SIGINT, lambda *_: print("ignored", flush=True))  # between cells
print("between", flush=True)
while not os.path.exists(os.environ["TEST_INTERRUPTED_AFTER"]):
    time.sleep(0.01)
cell("last", lambda: print("sums", *(d.call(sum, [d.index, 1]).get() for d in devices), flush=True))
print("seen", printed(), flush=True)
if "wait" in sys.argv:
    time.sleep(60)
