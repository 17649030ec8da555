"""The tests of arrays for all devices, on `cuda`."""

from tests.harness.arrays.conformance import ArrayConformance


class TestArrays(ArrayConformance):
    DEVICE = "cuda"
    SCALE = 8
