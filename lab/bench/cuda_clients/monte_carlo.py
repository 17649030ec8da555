"""The price of an Asian option by random paths: an ordinary numba-cuda program, which knows nothing of this library.

``python monte_carlo.py`` uses this machine's GPU, ``warpwell run monte_carlo.py`` one of the pool's; both print the
same.
"""

import argparse
import math

from numba import cuda
from numba.cuda.random import create_xoroshiro128p_states, xoroshiro128p_normal_float32

BLOCKS, THREADS = 512, 128
STEPS, PATHS = 64, 4
START, STRIKE, RATE, VOLATILITY = 100.0, 105.0, 0.03, 0.25


@cuda.jit
def pay_offs(states, sums):
    i = cuda.grid(1)
    total = 0.0
    drift = (RATE - 0.5 * VOLATILITY * VOLATILITY) / STEPS
    for _ in range(PATHS):
        logarithm = mean = 0.0
        for _ in range(STEPS):
            logarithm += drift + VOLATILITY / math.sqrt(float(STEPS)) * xoroshiro128p_normal_float32(states, i)
            mean += START * math.exp(logarithm)
        total += max(mean / STEPS - STRIKE, 0.0)
    sums[i] = total


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=int, default=300, help="rounds")
    rounds = parser.parse_args().work
    states = create_xoroshiro128p_states(BLOCKS * THREADS, seed=1)
    total = 0.0
    for _ in range(rounds):
        sums = cuda.device_array(BLOCKS * THREADS)
        pay_offs[BLOCKS, THREADS](states, sums)
        total += sums.copy_to_host().sum()
    paths = rounds * BLOCKS * THREADS * PATHS
    print(f"{paths} paths: the option is worth {math.exp(-RATE) * total / paths:.6f}")


if __name__ == "__main__":
    main()
