"""The helpers of page words give the same on every target, and keep to the fields."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import warpwell as ww
from warpwell import gpu
from warpwell.cache import word as w
from warpwell.targets import has_cuda

PAGE_WORDS = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([0, -1, 2**63 - 1, -(2**63), 2**36 - 1, 2**36, 2**35, 0xFFFF0000F]),
)


@ww.kernel
def apply_helpers(page_words, frames, states, out):
    i = gpu.grid(1)
    word = page_words[i]
    out[i, 0] = w.pack(frames[i], w.generation_of(word), states[i])
    out[i, 1] = w.state_of(word)
    out[i, 2] = w.pins_of(word)
    out[i, 3] = w.frame_of(word)
    out[i, 4] = w.generation_of(word)
    out[i, 5] = w.with_state(word, states[i])
    out[i, 6] = w.evicted(word)
    out[i, 7] = w.loaded(word, frames[i], states[i])


def signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def expected(word: int, frame: int, state: int) -> list[int]:
    """The same from unbounded integers."""
    unsigned = word % 2**64
    generation = unsigned >> 16 & 0xFFFFF
    return [
        signed(frame << 36 | generation << 16 | state),
        unsigned & 3,
        unsigned >> 4 & 0xFFF,
        unsigned >> 36,
        generation,
        signed(unsigned & ~3 | state),
        (generation + 1 & 0xFFFFF) << 16,
        signed(frame << 36 | generation << 16 | 2 | state << 4),
    ]


@pytest.mark.parametrize("device", ["interp", "cpu", "cuda"])
def test_every_helper_agrees(device: str) -> None:
    if device == "cuda" and not has_cuda():
        pytest.skip("needs a GPU")
    compare(device)


def compare(device: str) -> None:
    @settings(max_examples=50)
    @given(st.lists(st.tuples(PAGE_WORDS, st.integers(0, w.FRAME_MAX), st.integers(0, 3)), min_size=1, max_size=40))
    def check(cases: list[tuple[int, int, int]]) -> None:
        page_words, frames, states = (np.array(column, np.int64) for column in zip(*cases, strict=True))
        out = np.zeros((len(cases), 8), np.int64)
        apply_helpers[len(cases)](page_words, frames, states, out, device=device)
        assert out.tolist() == [expected(*case) for case in cases]

    check()


@given(PAGE_WORDS, st.integers(0, w.FRAME_MAX), st.integers(0, 5))
def test_fields_do_not_touch_one_another(word: int, frame: int, pins: int) -> None:
    assert w.IDENTITY & (w.STATE | w.DIRTY | w.REF | w.PINS) == 0
    assert w.FRAME_MAX << w.FRAME_SHIFT | w.GEN_MAX << w.GEN_SHIFT | w.PINS | w.DIRTY | w.REF | w.STATE == 2**64 - 1
    fields = expected(word, frame, 2)
    assert fields[0] & 2**36 - 1 & ~(w.GEN_MAX << w.GEN_SHIFT) == 2
