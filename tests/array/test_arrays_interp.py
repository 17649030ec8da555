"""The tests of arrays for all devices, on `interp`."""

from tests.harness.arrays.conformance import ArrayConformance


class TestArrays(ArrayConformance):
    DEVICE = "interp"
    SCALE = 1
