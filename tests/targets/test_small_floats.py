"""The tests of float16 and bfloat16 for all devices, on `cpu`."""

from typing import ClassVar

from tests.harness.arrays.small_floats import SmallFloatConformance


class TestSmallFloats(SmallFloatConformance):
    DEVICE = "cpu"
    QUICK: ClassVar = {
        "test_items_anywhere_in_any_tier": ("how0-bfloat16",),
        "test_numbers_between_go_to_the_nearest": ("bfloat16",),
    }
