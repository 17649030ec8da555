"""Arrays on `cuda`: what holds on every device."""

from warpwell.testing.arrays import ArrayConformance


class TestArrays(ArrayConformance):
    DEVICE = "cuda"
    SCALE = 8
