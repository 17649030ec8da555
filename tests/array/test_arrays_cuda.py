"""Arrays on `cuda`: what holds on every device."""

from tests.harness.arrays.conformance import ArrayConformance


class TestArrays(ArrayConformance):
    DEVICE = "cuda"
    SCALE = 8
