"""Arrays on `cpu`: what holds on every device."""

from warpwell.testing.arrays import ArrayConformance


class TestArrays(ArrayConformance):
    DEVICE = "cpu"
    SCALE = 8
