"""Extremes: the streaming triad, which only moves data, and Black-Scholes, which mostly computes."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from warpwell.scheduler.extend import Kind
from warpwell.targets import device, kernel
from warpwell.targets.primitives import grid

from .application import Built, Inputs, Step, Workload

ZERO, HALF, UNIT = np.float32(0), np.float32(0.5), np.float32(1)
C1, C2, C3 = np.float32(0.31938153), np.float32(-0.356563782), np.float32(1.781477937)
C4, C5, SCALE = np.float32(-1.821255978), np.float32(1.330274429), np.float32(0.2316419)
ROOT = np.float32(0.3989422804)  # 1 / sqrt(2 pi)
MATURITIES = 16
"""Maturities that a thread of Black-Scholes prices its option for."""


@kernel
def triad(a, b, c, factor):
    """Compute a = b + factor c."""
    i = grid(1)
    a[i] = b[i] + factor * c[i]


@device
def normal(x):
    """Return the cumulative normal distribution (a polynomial of Abramowitz and Stegun, 26.2.17)."""
    k = UNIT / (UNIT + SCALE * abs(x))
    tail = ROOT * math.exp(-HALF * x * x) * (k * (C1 + k * (C2 + k * (C3 + k * (C4 + k * C5)))))
    return UNIT - tail if x > ZERO else tail


@kernel(max_registers=64)
def black_scholes(price, strike, calls, rate, volatility, year, maturities):
    """Add up the call prices of an option over maturities of one year, two years, ..."""
    i = grid(1)
    s, x = price[i], strike[i]
    ratio = math.log(s / x)
    total, years = ZERO, ZERO
    for _ in range(maturities):
        years += year
        deviation = volatility * math.sqrt(years)
        d1 = (ratio + (rate + HALF * volatility * volatility) * years) / deviation
        total += s * normal(d1) - x * math.exp(-rate * years) * normal(d1 - deviation)
    calls[i] = total


def _triad(size: int, make: Inputs) -> Built:
    b, c = make.uniform(size), make.uniform(size)
    a = make.zeros(size)
    factor = np.float32(3)
    step = Step(triad[size], (a, make.put(b), make.put(c), factor), {"n": size})
    return Built([step], {"a": a}, lambda: {"a": b + 3.0 * c.astype(np.float64)})


def _normal(x: NDArray[np.float64]) -> NDArray[np.float64]:
    k = 1 / (1 + 0.2316419 * np.abs(x))
    series = 0.31938153 + k * (-0.356563782 + k * (1.781477937 + k * (-1.821255978 + k * 1.330274429)))
    tail = 0.3989422804 * np.exp(-0.5 * x * x) * k * series
    return np.where(x > 0, 1 - tail, tail)


def _black_scholes(size: int, make: Inputs) -> Built:
    price, strike = make.uniform(size, low=5, high=30), make.uniform(size, low=1, high=100)
    calls = make.zeros(size)
    rate, volatility, year = np.float32(0.02), np.float32(0.30), np.float32(1)
    arguments = (make.put(price), make.put(strike), calls, rate, volatility, year, MATURITIES)

    def reference() -> dict[str, NDArray[np.float64]]:
        s, x, total = price.astype(np.float64), strike.astype(np.float64), np.zeros(size)
        for years in range(1, MATURITIES + 1):
            deviation = 0.30 * np.sqrt(years)
            d1 = (np.log(s / x) + (0.02 + 0.5 * 0.30 * 0.30) * years) / deviation
            total += s * _normal(d1) - x * np.exp(-0.02 * years) * _normal(d1 - deviation)
        return {"calls": total}

    step = Step(black_scholes[size], arguments, {"n": size, "maturities": MATURITIES})
    return Built([step], {"calls": calls}, reference)


WORKLOADS = (
    Workload("triad", {"triad": Kind.MEMORY}, _triad, small=5000, large=1 << 28),
    Workload("black_scholes", {"black_scholes": Kind.COMPUTE}, _black_scholes, small=3000, large=1 << 24),
)
