"""Spans on `cpu`: what holds on every device."""

from tests.harness.arrays.spans import SpanConformance


class TestSpans(SpanConformance):
    DEVICE = "cpu"
    SIZE = 20_000
