"""Arrays on `interp`: what holds on every device."""

from warpwell.testing.arrays import ArrayConformance


class TestArrays(ArrayConformance):
    DEVICE = "interp"
    SCALE = 1
