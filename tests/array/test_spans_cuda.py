"""Spans on `cuda`: what holds on every device."""

from tests.harness.arrays.spans import SpanConformance


class TestSpans(SpanConformance):
    DEVICE = "cuda"
    SIZE = 100_000
