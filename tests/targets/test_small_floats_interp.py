"""Items of float16 and bfloat16 on `interp`: what holds on every device."""

from tests.harness.arrays.small_floats import SmallFloatConformance


class TestSmallFloats(SmallFloatConformance):
    DEVICE = "interp"
    ALL = False
