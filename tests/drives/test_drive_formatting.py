"""`format_array` on drives of QEMU: existing data decide whether anything is written."""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np
import pytest
from tests.harness.drives import needs_qemu

from lab.drives.qemu import QemuDrive, QemuNamespace
from warpwell import errors
from warpwell.drives import Namespace, format_array
from warpwell.drives.superblock import DATA_AT, NPY_AT, Superblock

pytestmark = needs_qemu

ITEMS = np.arange(100_000, dtype="<i8").reshape(1000, 100)


@pytest.fixture(params=[512, 4096])
def namespace(request: pytest.FixtureRequest) -> Iterator[Namespace]:
    with QemuDrive([QemuNamespace("8MiB", block=request.param)], serial="S1") as qemu, qemu.open() as drive:
        yield drive.namespace(1)


def read_all(namespace: Namespace) -> bytes:
    return namespace.read(0, namespace.blocks).tobytes()


def make(namespace: Namespace, erase: str = "S1/1", items: np.ndarray | None = ITEMS) -> None:
    format_array(namespace, ITEMS.shape, ITEMS.dtype, erase=erase, items=items)


def test_any_program_reads_the_array(namespace: Namespace) -> None:
    make(namespace)
    raw = read_all(namespace)
    assert raw.startswith(b"WARPWELL") and raw.count(0, 4096, NPY_AT) == NPY_AT - 4096
    assert np.array_equal(np.load(io.BytesIO(raw[NPY_AT:])), ITEMS)
    make(namespace, items=ITEMS + 1)  # an array of Warpwell may be replaced
    assert np.array_equal(np.load(io.BytesIO(read_all(namespace)[NPY_AT:])), ITEMS + 1)
    make(namespace, items=None)  # keeps the items
    assert np.array_equal(np.load(io.BytesIO(read_all(namespace)[NPY_AT:])), ITEMS + 1)


@pytest.mark.parametrize("at", [0, 510, 1080, 4096, (1 << 20) - 1, -(1 << 20), -512, -1])
def test_what_holds_somebodys_data_is_left_alone(namespace: Namespace, at: int) -> None:
    at %= namespace.nbytes
    block = np.zeros(namespace.block, np.uint8)
    block[at % namespace.block] = 1
    namespace.write(at // namespace.block, block)
    before = read_all(namespace)
    with pytest.raises(errors.DriveError, match=f"byte {at} is not zero"):
        make(namespace)
    assert read_all(namespace) == before


def test_who_names_another_drive_erases_nothing(namespace: Namespace) -> None:
    before = read_all(namespace)
    for erase in ("", "S1", "S1/2", "S2/1", "s1/1", "S1/1 "):
        with pytest.raises(errors.ArgumentError, match=r"must be .S1/1. to erase"):
            make(namespace, erase)
    with pytest.raises(errors.ArgumentError, match="does not fit"):
        format_array(namespace, ((8 << 20) - DATA_AT + 1,), np.dtype(np.uint8), erase="S1/1")
    assert read_all(namespace) == before


def test_what_was_begun_and_not_ended_is_no_array(namespace: Namespace) -> None:
    make(namespace)

    large = np.full((7 << 20) // 8, 1)  # reaches into the last MiB

    def fail(stage: str, done: int, total: int) -> None:
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        format_array(namespace, large.shape, large.dtype, erase="S1/1", items=large, report=fail)
    with pytest.raises(errors.FormatError, match="format the namespace again"):
        Superblock.parse(read_all(namespace)[:4096], "S1/1", namespace.nbytes)
    make(namespace)
    assert np.array_equal(np.load(io.BytesIO(read_all(namespace)[NPY_AT : NPY_AT + 4096 + ITEMS.nbytes])), ITEMS)


def test_a_drive_that_is_write_protected_is_left_alone() -> None:
    with QemuDrive([QemuNamespace("8MiB", writable=False)], serial="S1") as qemu, qemu.open() as drive:
        namespace = drive.namespace(1)
        with pytest.raises(errors.DriveError, match="write fault"):
            make(namespace)
        namespace.writable = False  # QEMU does not report it
        with pytest.raises(errors.DriveError, match="write-protected"):
            make(namespace)
        assert not any(read_all(namespace))
