"""Arrays on `interp`: what holds on every device."""

from tests.harness.arrays.conformance import ArrayConformance


class TestArrays(ArrayConformance):
    DEVICE = "interp"
    SCALE = 1
