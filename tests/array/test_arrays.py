"""The tests of arrays for all devices, on `cpu`."""

from typing import ClassVar

from tests.harness.arrays.conformance import ArrayConformance
from tests.harness.arrays.items import ItemConformance

# Each type of item is compiled separately. All types run on `interp`.
QUICK = {
    "test_kernels_read_and_write_items": ("i8", "u2", "?"),
    "test_unaligned_items_may_straddle_pages": ("f4-1",),
    "test_kernels_name_fields_of_records": ("storage",),
    "test_subscripts_of_several_dimensions": ("shape1-transfer3",),
    "test_additions_are_atomic": ("i8", "f4"),
    "test_record_arrays_and_their_fields": ("shape0-True",),
}


class TestArrays(ArrayConformance):
    DEVICE = "cpu"
    SCALE = 8
    QUICK: ClassVar = QUICK | {
        "test_a_cache_very_small_for_its_data": (),
        "test_all_tiers_give_the_same_results": (),
        "test_empty_arrays_and_arrays_without_dimensions": (),
        "test_full_statistics_add_up": (),
    }


class TestMappedItems(ItemConformance):
    DEVICE = "cpu"
    SCALE = 8
    TIER = "mapped"
    QUICK: ClassVar = {name: () for name in QUICK} | {"test_kernels_read_and_write_items": ("i8",)}
