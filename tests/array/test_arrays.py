"""Arrays on `cpu`: what holds on every device."""

from tests.harness.arrays.conformance import ArrayConformance
from tests.harness.arrays.items import ItemConformance


class TestArrays(ArrayConformance):
    DEVICE = "cpu"
    SCALE = 8


class TestMappedItems(ItemConformance):
    DEVICE = "cpu"
    SCALE = 8
    TIER = "mapped"
