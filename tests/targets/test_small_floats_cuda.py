"""The tests of float16 and bfloat16 for all devices, on `cuda`."""

from tests.harness.arrays.small_floats import SmallFloatConformance


class TestSmallFloats(SmallFloatConformance):
    DEVICE = "cuda"
