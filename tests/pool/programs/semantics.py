"""A program that prints how it was started. Its output is the same under python and under warpwell run."""

import atexit
import os
import pickle
import subprocess
import sys
import threading

import numpy as np

import __main__
import warpwell as ww
from warpwell import gpu

if len(sys.argv) > 1 and sys.argv[1] == "syntax":
    exec(compile("a b", "a.py", "exec"))


@ww.kernel
def scale(x, y, a):
    i = gpu.grid(1)
    y[i] = a * x[i] + helper(x[i])


@gpu.function
def helper(v):
    return v / 4


class Pickled:
    pass


print(__name__, __file__ == os.path.abspath(sys.argv[0]), sys.argv[1:], __main__.scale is scale)
print(__spec__ and __spec__.name, __doc__)
print(os.path.basename(sys.path[0]), os.getcwd() == os.environ["PWD"], sys.stdin.readline().strip())
print(type(pickle.loads(pickle.dumps(Pickled()))), sorted(n for n in globals() if n.startswith("__")))
print(subprocess.run([sys.executable, "-c", "import os; print('PMIX_RANK' in os.environ)"], capture_output=True).stdout)
x = np.arange(100.0)
devices = ww.devices()
with devices[0] as device:
    source = ww.to_device(x)
    target = ww.empty_like(source)
    scale[x.size](source, target, 2.0)
    print(target.copy_to_host().sum(), device.index)
atexit.register(print, "the end")
timer = threading.Timer(0.2, print, ["a thread that is waited for"])
timer.start()
sys.stderr.write("to stderr\n")
sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 else None)
