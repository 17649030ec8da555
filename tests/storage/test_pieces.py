"""Fetched pieces equal the bytes of the file, and the reported reads equal the real ones."""

from __future__ import annotations

import os

import numpy as np
import pytest
from tests.harness.descriptors import open_descriptors, until_closed

from warpwell import errors
from warpwell.array.gather import fetch
from warpwell.table.extent import MappedFile

NBYTES = (1 << 20) + 777


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("pieces") / "bytes"
    data = np.random.default_rng(0).integers(0, 256, NBYTES).astype(np.uint8)
    path.write_bytes(data.tobytes())
    with open(path, "rb+") as file:
        os.fsync(file.fileno())  # the kernel does not drop dirty pages
    return path, data


@pytest.fixture(params=[True, False], ids=["direct", "cached"])
def file(written, request):
    opened = MappedFile(str(written[0]), request.param)
    yield opened
    opened.close()


def _random_pieces(random, count):
    sizes = int(random.choice([1, 2, 3, 8, 700])) if random.random() < 0.5 else random.integers(1, 9000, count)
    starts = np.sort(random.integers(0, NBYTES - (sizes if isinstance(sizes, int) else 9000) + 1, count))
    if isinstance(sizes, int):
        starts[-1] = NBYTES - sizes
    return starts, sizes


def _wrong(file, data, seed):
    """Return the number of the first of twenty fetches, some of them of dropped pages, that gave other bytes."""
    random = np.random.default_rng(seed)
    for number in range(20):
        if random.random() < 0.7:
            file._mapping.drop(0, NBYTES)
        requests = [file.pieces(*_random_pieces(random, int(random.integers(1, 300)))) for _ in range(2)]
        fetch.fetch(requests)
        for request in requests:
            sizes = np.broadcast_to(request.sizes, len(request.starts))
            expected = [data[at : at + size] for at, size in zip(request.starts, sizes, strict=True)]
            if not np.array_equal(request.items().reshape(-1), np.concatenate(expected)):
                return number
    return None


@pytest.mark.parametrize("gap", ["0", "20KiB", None])
def test_pieces_are_the_bytes_of_the_file(written, file, gap, monkeypatch):
    if gap is not None:
        monkeypatch.setenv("WARPWELL_READ_GAP_BYTES", gap)
    before = open_descriptors()
    assert _wrong(file, written[1], 1) is None
    until_closed(before)


FAULTS = {
    "runs end with the last piece": lambda s, e, u, h: _RUNS(s, np.maximum(e - 1, s), u, h),
    "a run begins where its first piece does": lambda s, e, u, h: (lambda r, b, n: (r, b + 512, n))(*_RUNS(s, e, u, h)),
    "pieces overlap with none before": lambda s, e, u, h: _shorter(s, e, u, h),
}
_RUNS = fetch.runs_of


def _shorter(starts, ends, unit, gap):
    low, high = starts // unit * unit, -(-ends // unit) * unit
    new = np.concatenate(([True], low[1:] > high[:-1] + gap))
    first = np.flatnonzero(new)
    last = np.concatenate((first[1:] - 1, [len(low) - 1]))
    return np.cumsum(new) - 1, low[first], high[last] - low[first]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(written, file, fault, monkeypatch):
    monkeypatch.setenv("WARPWELL_READ_GAP_BYTES", "0")
    monkeypatch.setattr(fetch, "runs_of", FAULTS[fault])
    try:
        assert _wrong(file, written[1], 2) is not None
    except errors.MediumError:
        pass  # the fault makes it read outside of the file


def test_what_is_read_is_counted(written, file, monkeypatch):
    monkeypatch.setenv("WARPWELL_READ_GAP_BYTES", "0")
    starts = np.arange(5, NBYTES - 8, 16_000)
    request = file.pieces(starts, 8)
    fetch.fetch([request], plan_only=True)
    unit = (file.direct and fetch._direct_unit(request)) or 4096
    assert request.read == unit * len(starts) and request.commands == len(starts)  # no chunk straddles two units
    monkeypatch.setenv("WARPWELL_READ_GAP_BYTES", "20KiB")
    fetch.fetch([request], plan_only=True)
    assert request.commands == -(-request.read // fetch.MAX_COMMAND_BYTES) and NBYTES - 16_000 < request.read <= NBYTES


def test_a_file_that_was_cut(written, file, tmp_path):
    path = tmp_path / "cut"
    path.write_bytes(written[1].tobytes())
    opened = MappedFile(str(path), file.direct)
    os.truncate(path, 300_000)
    request = opened.pieces(np.arange(0, NBYTES - 8, 10_000), 8)
    with pytest.raises(errors.MediumError, match="truncated"):
        fetch.fetch([request])
        request.items()
        opened.require()
    opened.close()
    with pytest.raises(errors.ClosedError):
        fetch.fetch([opened.pieces(np.array([0]), 8)])
