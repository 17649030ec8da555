"""Page sets on a GPU: what holds on every device."""

from tests.harness.arrays.page_sets import PageSetConformance


class TestPageSets(PageSetConformance):
    DEVICE = "cuda"
