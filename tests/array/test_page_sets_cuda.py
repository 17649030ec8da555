"""The tests of page sets for all devices, on a GPU."""

from tests.harness.arrays.page_sets import PageSetConformance


class TestPageSets(PageSetConformance):
    DEVICE = "cuda"
