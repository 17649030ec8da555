"""The tests of float16 and bfloat16 for all devices, on `interp`."""

from typing import ClassVar

from tests.harness.arrays.small_floats import SmallFloatConformance


class TestSmallFloats(SmallFloatConformance):
    DEVICE = "interp"
    ALL = False
    QUICK: ClassVar = {"test_numbers_between_go_to_the_nearest": ("bfloat16",)}
