"""The superblock of a namespace that holds an array."""

import io
import subprocess

import numpy as np
import pytest

from warpwell import errors
from warpwell._npy import read_header
from warpwell.drives.superblock import BYTES, DATA_AT, NPY_AT, Superblock, head_of

CAPACITY = 64 << 20


def test_any_program_reads_the_array(tmp_path) -> None:
    items = np.arange(6000, dtype="<u4").reshape(2, 3000)
    disk = tmp_path / "disk"
    disk.write_bytes(head_of(items.shape, items.dtype) + items.tobytes() + bytes(4096))
    subprocess.run(["dd", f"if={disk}", "bs=4K", "skip=255", f"of={tmp_path}/a.npy", "status=none"], check=True)
    assert np.array_equal(np.load(tmp_path / "a.npy"), items)


@pytest.mark.parametrize("dtype", ["<i8", "<f2", [("a", "<i4"), ("Ω", "<f8", (3,))], "V2"])
def test_head_and_back(dtype) -> None:
    head = head_of((7, 5), np.dtype(dtype))
    found = Superblock.parse(head[:BYTES], "nvme:x/1", CAPACITY)
    assert len(head) == DATA_AT and found is not None and found.npy_at == NPY_AT and len(found.identity) == 16
    file = io.BytesIO(head[found.npy_at :])
    assert read_header(file, "x") == ((7, 5), np.dtype(dtype))
    assert file.tell() == DATA_AT - NPY_AT and found.nbytes == file.tell() + 35 * np.dtype(dtype).itemsize
    assert head_of((7, 5), np.dtype(dtype))[:BYTES] != head[:BYTES]  # each superblock has its own identity


def test_foreign_namespaces_are_not_ours() -> None:
    for raw in (bytes(BYTES), b"EFI PART".ljust(BYTES, b"\1"), b"WARPWELM".ljust(BYTES)):
        assert Superblock.parse(raw, "nvme:x/1", CAPACITY) is None


def test_damage_is_found() -> None:
    head = bytearray(head_of((7,), np.dtype("<i8"))[:BYTES])
    for at in (8, 12, 16, 24, 40, BYTES - 1):
        broken = bytearray(head)
        broken[at] ^= 1
        with pytest.raises(errors.FormatError, match="nvme:x/1"):
            Superblock.parse(bytes(broken), "nvme:x/1", CAPACITY)
    with pytest.raises(errors.FormatError, match="larger"):
        Superblock.parse(bytes(head), "nvme:x/1", DATA_AT + 55)
    assert Superblock.parse(bytes(head), "nvme:x/1", DATA_AT + 56) is not None


def test_too_many_fields() -> None:
    with pytest.raises(errors.ArgumentError, match="fewer fields"):
        head_of((1,), np.dtype([(f"field{k:04}", "<i4") for k in range(300)]))
