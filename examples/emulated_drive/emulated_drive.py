"""Read at random from an emulated SSD: the limits are those of a drive, the bytes lie in memory.

Run it with ``python emulated_drive.py``; it needs no input and no GPU.
"""

import time

import numpy as np

import warpwell as ww
from warpwell.storage import RamMedium
from lab.media import Latency


@ww.kernel
def pick(data, positions, out):
    i = ww.grid(1)
    out[i] = data[positions[i]]


def main():
    content = np.arange(1 << 20)  # 8 MiB
    positions = np.random.default_rng(0).permutation(content.size)[:4000]
    out = np.zeros_like(positions)

    drive = Latency(RamMedium(content), "P5800X")
    with ww.open(drive, dtype=np.int64, cache="512KiB") as data:
        pick[1](data, positions, out)  # compiles; brings one page in
        before = data.stats
        started = time.perf_counter()
        pick[positions.size](data, positions, out)
        seconds = time.perf_counter() - started
        stats = data.stats - before
        emulated = data.medium.emulated

    rate = stats.read_commands / seconds
    print(f"medium: {drive.description}")
    print(f"EMULATED: {stats.read_commands:,} read commands in {seconds:.3f} s, {rate:,.0f} a second")
    print("A P5800X does 1.5 million reads of 4 KiB a second; a machine with few cores asks for less than that.")

    assert np.array_equal(out, content[positions])
    assert emulated and "emulated" in drive.description
    assert stats.misses > 1000
    # no faster than the drive: its rate, and one latency for the last read
    assert seconds >= stats.read_commands / 1.5e6


if __name__ == "__main__":
    main()
