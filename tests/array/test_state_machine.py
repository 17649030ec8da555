"""Everything that a host may do with an array, in any order, against a NumPy model."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.harness.arrays.kernels import add, read, write
from tests.harness.examples import examples

import warpwell as ww
from warpwell import errors

PAGE = 512
N = 9 * PAGE // 8 + 5
ROWS = st.lists(st.integers(0, N - 1), min_size=1, max_size=12)
RANGES = st.tuples(st.integers(0, N), st.integers(0, N)).map(sorted)


class ArrayMachine(RuleBasedStateMachine):
    """One writable array; `pins` counts what is pinned, as ranges."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.path = self.folder / "a.npy"
        self.model = np.arange(N) * 3
        np.save(self.path, self.model)
        self.a: ww.Array | None = None
        self.pins: list[tuple[int, int]] = []

    @initialize(frames=st.integers(1, 12), tier=st.sampled_from(["storage", "storage", "storage", "host-cached"]))
    def start(self, frames: int, tier: str) -> None:
        self.options = {"cache": frames * (PAGE + 8), "tier": tier, "page_size": PAGE, "device": "cpu"}
        self.open()

    def open(self) -> None:
        self.a = ww.open(self.path, "r+", **self.options)
        self.pins = []

    def teardown(self) -> None:
        if self.a is not None:
            self.a.close()
            np.testing.assert_array_equal(np.load(self.path), self.model)
        shutil.rmtree(self.folder)

    @rule(rows=ROWS)
    def read(self, rows: list[int]) -> None:
        out = np.full(len(rows), -1)
        read[len(rows)](self.a, np.array(rows), out)
        np.testing.assert_array_equal(out, self.model[rows])

    @rule(rows=ROWS.map(lambda r: sorted(set(r))), value=st.integers(-(2**63), 2**63 - 1))
    def write(self, rows: list[int], value: int) -> None:
        values = np.full(len(rows), value)
        write[len(rows)](self.a, np.array(rows), values)
        self.model[rows] = values

    @rule(rows=ROWS, amount=st.integers(-5, 5))
    def add(self, rows: list[int], amount: int) -> None:
        amounts = np.full(len(rows), amount)
        add[len(rows)](self.a, np.array(rows), amounts)
        np.add.at(self.model, rows, amounts)

    @rule(rows=ROWS)
    def gather(self, rows: list[int]) -> None:
        np.testing.assert_array_equal(self.a[rows], self.model[rows])

    @rule(rows=RANGES, value=st.integers(-99, 99))
    def assign(self, rows: list[int], value: int) -> None:
        self.a[rows[0] : rows[1]] = value
        self.model[rows[0] : rows[1]] = value

    @rule()
    def flush(self) -> None:
        self.a.flush()
        np.testing.assert_array_equal(np.load(self.path), self.model)

    @rule(rows=RANGES)
    def prefetch(self, rows: list[int]) -> None:
        self.a.prefetch(*rows)

    @rule(rows=RANGES)
    def evict(self, rows: list[int]) -> None:
        requested = self.pages(rows)
        pinned = {p for r in self.pins for p in self.pages(r)}
        if requested & pinned:
            with pytest.raises(errors.KernelError):
                self.a.evict(*rows)
        else:
            self.a.evict(*rows)
            assert not {p for p in requested if self.a.cache.page_words(self.a._nsid)[p] & 2}

    @rule(rows=RANGES)
    def pin(self, rows: list[int]) -> None:
        pinned = {p for r in self.pins for p in self.pages(r)}
        more = len(self.pages(rows) | pinned) > self.a.cache.frames - 1 and self.pages(rows) - pinned
        if more and not self.resident():
            with pytest.raises(errors.KernelError, match="more fit"):
                self.a.pin(*rows)
            return
        self.a.pin(*rows)
        if self.pages(rows):
            self.pins.append(tuple(rows))

    @precondition(lambda self: self.pins)
    @rule(which=st.integers(0, 10))
    def unpin(self, which: int) -> None:
        self.a.unpin(*self.pins.pop(which % len(self.pins)))

    @rule()
    def reopen(self) -> None:
        self.a.close()
        np.testing.assert_array_equal(np.load(self.path), self.model)
        self.open()

    @invariant()
    def pages_have_frames_of_their_own(self) -> None:
        if self.a is None:
            return
        page_words = self.a.cache.page_words(self.a._nsid)
        frames = [int(w) >> 36 for w in page_words if w & 2]
        assert len(frames) == len(set(frames)) and all(0 <= f < self.a.cache.frames for f in frames)
        pinned = {p for r in self.pins for p in self.pages(r)}
        assert self.a.cache._count_pinned(1) == len(pinned)
        pins = np.zeros(len(page_words), int)
        if not self.resident():
            pins[list(pinned)] = 1  # all holders of a page share one pin in its page word
        np.testing.assert_array_equal((page_words >> 4) & 0xFFF, pins)

    def resident(self) -> bool:
        """Return True if each page has a separate frame; pins then need no page word."""
        return self.a.cache.frames >= len(self.pages((0, N)))

    def pages(self, rows) -> set[int]:
        if rows[1] <= rows[0]:
            return set()
        return set(range((128 + 8 * rows[0]) // PAGE, -(-(128 + 8 * rows[1]) // PAGE)))


TestArrayMachine = ArrayMachine.TestCase
# No shrinking: it exceeds the time limit of the test, and the failed check would not be reported.
TestArrayMachine.settings = settings(
    max_examples=examples(30),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
