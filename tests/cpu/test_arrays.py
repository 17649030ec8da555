"""Arrays on `cpu`: what holds on every device."""

from tests.harness.arrays.conformance import ArrayConformance


class TestArrays(ArrayConformance):
    DEVICE = "cpu"
    SCALE = 8
