"""The tests of spans for all devices, on `cuda`."""

from tests.harness.arrays.spans import SpanConformance


class TestSpans(SpanConformance):
    DEVICE = "cuda"
    SIZE = 100_000
