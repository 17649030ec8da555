"""The stopwatch of tests: seconds that a machine in use took from them do not count."""

import time

import pytest
from tests.harness import until
from tests.harness.until import Stopwatch


@pytest.mark.parametrize(("waited", "counted"), [(0.0, 0.3), (0.1, 0.2), (5.0, 0.1)])
def test_seconds_without_a_processor_do_not_count(
    monkeypatch: pytest.MonkeyPatch, waited: float, counted: float
) -> None:
    told = [0.0]
    monkeypatch.setattr(until, "_waited", lambda: told[0])
    clock = [50.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    watch = Stopwatch()
    clock[0], told[0] = 50.3, waited
    assert watch.seconds == pytest.approx(counted), "a third at least: what hangs is found"


def test_the_kernel_tells_of_waits_or_none_are_known() -> None:
    assert until._waited() >= 0.0
    watch = Stopwatch()
    time.sleep(0.05)
    assert 0.05 / 3 <= watch.seconds
