"""Structures of key-value logs on disk, and the placement of values."""

import numpy as np
import pytest

from lab.campaigns.crash.kv_load import names_in
from warpwell.kv.log import format as layout
from warpwell.kv.log.checksum import crc32c
from warpwell.kv.log.format import crc_of, file_name, first_word, key_len_of, low_size, offset_of, segment_of, size_of
from warpwell.kv.log.journal import new_records
from warpwell.kv.log.recovery import live
from warpwell.kv.log.segments import ValueBuffers


def test_structures_have_the_documented_sizes():
    assert layout.RECORD.itemsize == 64 and layout.SUPER.itemsize == 4096
    assert layout.RECORD.fields["crc"][1] == 60 and layout.SUPER.fields["crc"][1] == 4092


def test_a_location_keeps_its_parts():
    offsets = np.array([4096, 4160, layout.MAX_SEGMENT_BYTES - 64], np.int64)
    crcs = np.array([0, 0xFFFFFFFF, 0x80000001], np.int64)
    lens = np.array([1, 8, 16], np.uint8)
    sizes = np.array([0, 100, layout.MAX_VALUE], np.int64)
    locs = locations(offsets, crcs, lens, sizes)
    assert (locs[:, 0] > 0).all()
    assert (segment_of(locs[:, 0]) == layout.MAX_SEGMENT).all()
    assert offset_of(locs[:, 0]).tolist() == offsets.tolist()
    assert crc_of(locs[:, 1]).tolist() == crcs.tolist()
    assert key_len_of(locs[:, 1]).tolist() == lens.tolist()
    assert size_of(*locs.T).tolist() == sizes.tolist() and layout.MAX_VALUE == 2**31 - 1


def locations(offsets, crcs, lens, sizes):
    """Return locations in the last segment."""
    second = crcs << layout.CRC_SHIFT | lens.astype(np.int64) << layout.KEY_LEN_SHIFT | low_size(sizes)
    return np.column_stack([first_word(layout.MAX_SEGMENT, offsets, sizes), second])


@pytest.mark.parametrize("seed", range(20))
def test_values_are_aligned_and_do_not_overlap(seed):
    rng = np.random.default_rng(seed)
    sizes = rng.choice([0, 1, 63, 64, 65, 4095, 4096, 4097, 20000], rng.integers(0, 40))
    end = int(rng.integers(4096, 20000))
    values = [rng.bytes(n) for n in sizes]
    lens = rng.integers(1, 17, len(sizes)).astype(np.uint8)
    locs = np.empty((len(sizes), 2), np.int64)
    contents, at, buffers = b"", 0, ValueBuffers.of(values)
    while at < len(sizes):
        chunk = buffers.encode(lens, locs, 3, end + len(contents), 1 << 30)
        gap = chunk.offset - end - len(contents)
        contents += bytes(gap) + chunk.contents[: chunk.nbytes].tobytes()
        at += chunk.count
    assert crc_of(locs[:, 1]).tolist() == [crc32c(value) for value in values]
    assert key_len_of(locs[:, 1]).tolist() == lens.tolist() and set(segment_of(locs[:, 0]).tolist()) <= {3}
    assert size_of(*locs.T).tolist() == sizes.tolist()
    offsets = offset_of(locs[:, 0])
    for k, offset in enumerate(offsets.tolist()):
        assert contents[offset - end : offset - end + sizes[k]] == values[k]
        assert offset % 64 == 0
        before = end if k == 0 else offsets[k - 1] + sizes[k - 1]
        assert before <= offset < before + 64


def test_the_last_record_of_a_key_is_live():
    keys = [b"a", b"a\0", b"b", b"a", b"b", b"c"]
    padded = np.frombuffer(b"".join(k.ljust(16, b"\0") for k in keys), np.uint8).reshape(-1, 16)
    lens = np.array([len(k) for k in keys], np.uint8)
    locs = locations(np.arange(6) * 64 + 4096, np.zeros(6, np.int64), lens, np.ones(6, np.int64))
    locs[4, 0] = layout.TOMBSTONE
    found = live(np.column_stack([padded.view(np.int64), locs]))
    assert names_in(found) == [b"a\0", b"a", b"c"]
    assert offset_of(found[:, 2]).tolist() == [4160, 4096 + 192, 4096 + 320]


def test_deletes_name_no_place():
    records = new_records(layout.DELETE, np.zeros((2, 16), np.uint8), np.array([3, 16], np.uint8))
    assert records["loc"][:, 0].tolist() == [-1, -1]
    assert key_len_of(records["loc"][:, 1]).tolist() == [3, 16]


def test_file_names():
    assert file_name(layout.SEGMENT_FILE, 7) == "00000007.val"
    assert file_name(layout.JOURNAL_FILE, 123456789) == "123456789.jnl"
