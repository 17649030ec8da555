"""The tests of page sets for all devices, on `interp`."""

from tests.harness.arrays.page_sets import PageSetConformance


class TestPageSets(PageSetConformance):
    DEVICE = "interp"
