"""An agent is killed while it has tasks: those with arrays of this process run elsewhere, the others are lost."""

import os
import signal
import time

import numpy as np

import warpwell as ww
from warpwell import gpu
from warpwell.scheduler import Profile
from warpwell.scheduler.extend import State


@ww.kernel
def spin(x, rounds):
    i = gpu.grid(1)
    s = x[i]
    for k in range(rounds):
        s = (s * 1103515245 + k) & 0x7FFFFFFF
    x[i] = s


def main() -> None:
    devices = ww.devices()
    victim = devices[1]
    array = np.arange(2000)
    np.save("a.npy", array)
    opened = victim.open("a.npy")
    with ww.scheduler.Scheduler(devices=devices, policy="first-come", limit=1) as scheduler:
        remote = victim.zeros(4096, np.int64)
        slow = scheduler.submit(spin[4096], remote, 50_000_000)
        host_arrays = [np.ones(64, np.int64) for _ in range(6)]
        profile = Profile(seconds=1.0)
        moved = [scheduler.submit(spin[64], x, 1000, profile=profile) for x in host_arrays]
        until = time.monotonic() + 60
        while slow.state is not State.RUNNING and time.monotonic() < until:
            time.sleep(0.02)
        os.kill(victim.query_agent()["pid"], signal.SIGKILL)
        print("lost", type(slow.exception(30)).__name__)
        for handle in moved:
            handle.result(30)
        assert len({int(x[0]) for x in host_arrays}) == 1
        print("moved", sorted({handle.tries for handle in moved}))
    try:
        opened[3]
    except ww.errors.DeviceLostError:
        print("array lost")
    opened.close()


if __name__ == "__main__":
    main()
