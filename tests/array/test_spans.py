"""The tests of spans for all devices, on `cpu`."""

from typing import ClassVar

from tests.harness.arrays.spans import SpanConformance


class TestSpans(SpanConformance):
    DEVICE = "cpu"
    SIZE = 20_000
    QUICK: ClassVar = {
        "test_folds_of_every_shape": ("shape0",),
        "test_a_fold_takes_items_in_order": ("i2-options0",),
        "test_warps_share_runs": ("1", "2", "9"),
        "test_arrays_among_the_arguments": (),
        "test_rows_of_arrays_in_memory": ("mapped", "part"),
        "test_fields_and_odd_places": (),
    }
