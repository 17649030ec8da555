"""Gathers in stream order, as on a GPU: the tests for all devices, on `interp`."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
from tests.harness.arrays.gathers import GatherConformance

from warpwell.array.gather import api, batches


class Near:
    """An array that says that it is in a GPU's memory."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **_: Any) -> Any:
        return self.memory.__dlpack__()


@pytest.fixture(autouse=True)
def _streams(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (api, batches):
        monkeypatch.setattr(module, "by_stream", lambda array: True)


class TestGathers(GatherConformance):
    DEVICE = "interp"
    ROWS = 20
    QUICK: ClassVar[dict[str, tuple[str, ...]]] = {
        "test_rows_are_those_that_numpy_has": (
            "(3,)-storage",
            "(32, 4)-two frames",
            "(32, 4)-host-cached",
            "(3,)-device",
        ),
        "test_rows_of_host_memory_are_copied_past_the_cache": ("36", "100"),
    }

    def near(self, host: Any) -> Any:
        return Near(host)

    def far(self, array: Any) -> Any:
        return np.asarray(array.memory if isinstance(array, Near) else array)
