"""Bulk reads by cuFile, over a fake library: faults, the choice of the reader, the fallback, and registrations."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness.clock import time_passes
from tests.harness.cufile import file_of, install_fake
from tests.harness.until import HANG_SECONDS, until

import warpwell as ww
from lab.fake_cufile import FakeCuFile
from warpwell import errors, storage
from warpwell.array import host_access
from warpwell.cache import prefetch
from warpwell.storage import cufile, gpudirect
from warpwell.storage.cufile import CuFileReads
from warpwell.targets import memory_for

PAGE = 4096
PAGES = 300
VALUES = np.arange(PAGES * PAGE // 8 - 100)
"""The last page is not full."""
SLOT = 64 * PAGE
FAULTS = {
    "none": {},
    "out of order": {"out_of_order": True},
    "short": {"short_every": 3},
    "EAGAIN": {"again_every": 2},
    "all": {"out_of_order": True, "short_every": 3, "again_every": 4},
    "few buffers in compatibility mode": {"p2p": False, "compat": True, "out_of_order": True, "short_every": 3},
}


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", "warpwell")
    monkeypatch.setitem(prefetch.SLOT_BYTES, "cpu", SLOT)
    monkeypatch.setattr(prefetch, "COMMAND_BYTES", 2 * PAGE)


def open_array(medium: Any, mode: str = "r", **options: Any) -> ww.Array:
    options = {"cache": 200 * (PAGE + 8), "page_size": PAGE, **options}
    return ww.open(medium, mode, dtype="i8", device="cpu", **options)


def to_host(a: ww.Array) -> Any:
    return to_memory(a, None).view(np.int64)


def to_memory(a: ww.Array, memory: Any) -> Any:
    return host_access.read_bulk(a, host_access.runs_of(a, slice(None)), memory)


# -- the reader -----------------------------------------------------------------------------------------------------


def reader(fake: FakeCuFile, path: Path) -> tuple[CuFileReads, Any, storage.FileMedium]:
    medium = file_of(path, VALUES)
    memory = memory_for("cpu").allocate(2 * SLOT)
    memory.view(np.dtype(np.uint8))[:] = 7

    def zero(address: int, nbytes: int) -> None:
        start = address - memory.address
        memory.view(np.dtype(np.uint8))[start : start + nbytes] = 0

    reads = CuFileReads(fake, memory, slots=2, slot_bytes=SLOT, allow_compat=not fake.p2p, zero=zero)
    reads.open_file(1, medium.direct_fileno(), medium.nbytes)
    return reads, memory, medium


def start(reads: CuFileReads, memory: Any, slot: int, first: int, count: int) -> None:
    pages = np.arange(count)
    reads.start(slot, 1, (first + pages) * 8, np.full(count, 8), memory.address + slot * SLOT + pages * PAGE)


@pytest.mark.parametrize("fault", FAULTS)
def test_two_slots_hold_the_bytes_of_the_file(fault: str, tmp_path: Path) -> None:
    fake = FakeCuFile(3, **FAULTS[fault])
    reads, memory, medium = reader(fake, tmp_path / "x")
    expected = medium.read(0, PAGES * PAGE)
    for first in range(0, PAGES - 80, 50):
        start(reads, memory, 0, first, 40)
        start(reads, memory, 1, PAGES - 40, 40)  # to the end of the file, and past it
        for slot, page in ((1, PAGES - 40), (0, first)):
            assert reads.wait(slot, 60, lambda: False) and not reads.statuses(slot).any()
            np.testing.assert_array_equal(
                memory.read(slot * SLOT, 40 * PAGE), expected[page * PAGE : (page + 40) * PAGE]
            )
    assert reads.left() == 0
    reads.close()
    medium.close()
    assert fake.registrations == 0


def test_a_failed_read_has_a_status_and_others_succeed(tmp_path: Path) -> None:
    fake = FakeCuFile(fail_every=5)
    reads, memory, medium = reader(fake, tmp_path / "x")
    start(reads, memory, 0, 0, 10)
    assert reads.wait(0, 60, lambda: False) and reads.statuses(0).astype(bool).tolist() == ([False] * 4 + [True]) * 2
    reads.close()
    medium.close()
    assert fake.registrations == 0


def test_a_file_that_was_cut_fails(tmp_path: Path) -> None:
    reads, memory, medium = reader(FakeCuFile(), tmp_path / "x")
    os.truncate(tmp_path / "x", 5 * PAGE)
    start(reads, memory, 0, 0, 10)
    assert reads.wait(0, 60, lambda: False) and reads.statuses(0).astype(bool).tolist() == [False] * 5 + [True] * 5
    reads.close()
    medium.close()


def test_eagain_without_end_fails(tmp_path: Path) -> None:
    reads, memory, medium = reader(FakeCuFile(again_every=1), tmp_path / "x")
    start(reads, memory, 0, 0, 4)
    assert reads.wait(0, 600, lambda: False) and reads.statuses(0).all()
    reads.close()
    medium.close()


def test_waits_are_bounded_and_what_may_be_written_to_stays_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    abandoned: list[CuFileReads] = []
    monkeypatch.setattr(cufile, "_abandoned", abandoned)
    fake = FakeCuFile(silent_after=3)
    reads, memory, medium = reader(fake, tmp_path / "x")
    start(reads, memory, 0, 0, 8)
    assert not reads.wait(0, 1e9, lambda: True)
    with time_passes(60.0):
        assert not reads.wait(0, 60, lambda: False)
        reads.close()
    assert abandoned == [reads] and reads.left() == 5 and fake.registrations == 5
    fake.silent_after = None  # the drive answers the abandoned reads now
    reads.close()
    medium.close()
    assert fake.registrations == 0


def test_memory_stays_registered_if_the_library_does_not_report_its_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    abandoned: list[CuFileReads] = []
    monkeypatch.setattr(cufile, "_abandoned", abandoned)
    fake = FakeCuFile()
    reads, memory, medium = reader(fake, tmp_path / "x")
    start(reads, memory, 0, 0, 8)
    fake.errors["batch_io_get_status"] = 0
    reads.close()
    assert abandoned == [reads] and fake.registrations == 5
    reads.close()
    medium.close()
    assert fake.registrations == 0


@pytest.mark.parametrize(
    ("function", "calls"), [("buf_register", 0), ("buf_register", 1), ("batch_io_set_up", 1), ("driver_open", 0)]
)
def test_a_failed_registration_leaves_none(function: str, calls: int) -> None:
    fake = FakeCuFile(errors={function: calls})
    with pytest.raises(Exception, match=f"planted error of {function}"):
        CuFileReads(
            fake, memory_for("cpu").allocate(2 * SLOT), slots=2, slot_bytes=SLOT, allow_compat=False, zero=print
        )
    assert fake.registrations == 0


def test_what_is_dropped_is_deregistered(tmp_path: Path) -> None:
    fake = FakeCuFile()
    reads, _, medium = reader(fake, tmp_path / "x")
    assert fake.registrations == 5
    del reads
    gc.collect()
    assert fake.registrations == 0
    medium.close()


def test_a_failed_deregistration_is_logged_and_the_rest_is_done(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeCuFile(errors={"buf_deregister": 0})
    reads, _, medium = reader(fake, tmp_path / "x")
    reads.close()
    medium.close()
    assert len(fake.buffers) == 1 and not fake.handles and not fake.batches
    assert "failed to deregister" in caplog.text


# -- arrays over it -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", FAULTS)
def test_prefetched_and_bulk_read_pages_are_right(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuFile(5, **FAULTS[fault])
    install_fake(monkeypatch, fake, allow_compat=not fake.p2p)
    with open_array(file_of(tmp_path / "x", VALUES)) as a:
        assert a.prefetch(0, 150 * PAGE // 8).result(250).loaded == 150
        np.testing.assert_array_equal(a[: 150 * PAGE // 8], VALUES[: 150 * PAGE // 8])
        a.evict()
        assert fake.bytes_read >= 150 * PAGE and a.stats.misses == 0
        assert a.medium.description.endswith("bulk reads by cuFile)")
        a.prefetch(200 * PAGE // 8).result(250)
        np.testing.assert_array_equal(a[200 * PAGE // 8 :], VALUES[200 * PAGE // 8 :])
    assert fake.registrations == 0


def test_copies_to_device_memory_come_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install_fake(monkeypatch, FakeCuFile(out_of_order=True))
    out = np.zeros_like(VALUES)
    with open_array(file_of(tmp_path / "x", VALUES)) as a:
        out_memory = type("Memory", (), {"__cuda_array_interface__": {"data": (out.ctypes.data, False)}})()
        assert to_memory(a, out_memory) is out_memory
        np.testing.assert_array_equal(out, VALUES)
        read = fake.bytes_read
        np.testing.assert_array_equal(to_host(a), VALUES)
        assert fake.bytes_read == read > a.nbytes, "reads into host memory are not its business"
    assert fake.registrations == 0


ENDS = {
    "a failed read": ({"fail_every": 70}, "a read failed"),
    "a submission": ({"errors": {"batch_io_submit": 6}}, "batch_io_submit"),
    "a poll": ({"errors": {"batch_io_get_status": 6}}, "batch_io_get_status"),
}


@pytest.mark.parametrize("end", ENDS)
def test_an_error_falls_back_for_good_and_loses_no_request(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    planted, reason = ENDS[end]
    fake = install_fake(monkeypatch, FakeCuFile(**planted))
    with open_array(file_of(tmp_path / "x", VALUES), cache=400 * (PAGE + 8)) as a:
        counts = a.prefetch().result(250)
        assert (counts.loaded, counts.failed, counts.skipped) == (PAGES, 0, 0)
        assert 0 < fake.completions < PAGES // 2
        assert reason in a.medium.description and "staged, because" in a.medium.description
        (record,) = [each for each in caplog.records if each.levelno == logging.WARNING and "bulk" in each.message]
        assert record.name == "warpwell.storage" and reason in record.message
        before = fake.calls
        a.evict()
        a.prefetch().result(250)
        np.testing.assert_array_equal(a[:], VALUES)
        assert fake.calls == before and a.stats.misses == 0 and fake.registrations == 0


def test_silent_reads_end_by_the_time_out_and_are_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    abandoned: list[CuFileReads] = []
    monkeypatch.setattr(cufile, "_abandoned", abandoned)
    fake = install_fake(monkeypatch, FakeCuFile(silent_after=60))
    with open_array(file_of(tmp_path / "x", VALUES), cache=400 * (PAGE + 8), timeout=1000.0) as a:
        with time_passes(2000.0, lambda: fake.completions == 60 and not abandoned):
            future = a.prefetch()
            assert until(future.done)
        assert future.result().loaded == PAGES and "no read completed" in caplog.text
        np.testing.assert_array_equal(a[:], VALUES)
        assert len(abandoned) == 1 and len(fake.buffers) == prefetch.SLOTS, "the drive may still write to this memory"
        fake.silent_after = None
        abandoned[0].close()


@pytest.mark.parametrize("function", ["handle_register", "buf_register", "driver_open"])
def test_what_cannot_be_registered_is_staged(function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install_fake(monkeypatch, FakeCuFile(errors={function: 0}))
    with open_array(file_of(tmp_path / "x", VALUES)) as a:
        a.prefetch(0, 1000).result(250)
        assert f"planted error of {function}" in a.medium.description
    assert fake.registrations == 0 and fake.bytes_read == 0


def test_other_bytes_than_pread_are_found_at_the_first_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install_fake(monkeypatch, FakeCuFile(corrupt=True))
    with open_array(file_of(tmp_path / "x", VALUES)) as a:
        a.prefetch().result(250)
        np.testing.assert_array_equal(a[:], VALUES)
        assert "other bytes than pread" in a.medium.description and fake.registrations == 0


@pytest.mark.parametrize(
    ("fake", "options", "reason"),
    [
        ({"p2p": False}, {}, "no support for P2PDMA"),
        ({"compat": True}, {}, "compatibility mode"),
        ({}, {"device": "cuda"}, ""),
    ],
)
def test_the_choice_needs_the_system(
    fake: Any, options: Any, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = install_fake(monkeypatch, FakeCuFile(**fake), **options)
    with open_array(file_of(tmp_path / "x", VALUES)) as a:
        a.prefetch().result(250)
        assert reason in a.medium.description and ("bulk reads" in a.medium.description) == bool(reason)
    assert library.bytes_read == library.registrations == 0


def test_compatibility_mode_can_be_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install_fake(monkeypatch, FakeCuFile(p2p=False, compat=True), allow_compat=True)
    with open_array(file_of(tmp_path / "x", VALUES)) as a:
        a.prefetch().result(250)
        assert fake.bytes_read > PAGE


def test_the_choice_needs_a_file_with_o_direct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install_fake(monkeypatch)
    VALUES.tofile(tmp_path / "x")
    with open_array(storage.FileMedium(tmp_path / "x", direct=False)) as a, open_array(storage.RamMedium(VALUES)) as b:
        a.prefetch().result(250)
        b.prefetch().result(HANG_SECONDS)
        assert "staged, because it is not a file that Warpwell reads with O_DIRECT" in a.medium.description
        assert b.medium.description == "ram" and fake.calls == 0


def test_short_runs_are_staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install_fake(monkeypatch, min_run_bytes=2 * PAGE)
    with open_array(file_of(tmp_path / "x", VALUES)) as a:
        pages = a.page_set()
        for page in range(0, PAGES, 3):
            pages.add(page * PAGE // 8)
        assert list(pages.waves()) and fake.calls == 0
        a.evict()
        a.prefetch().result(250)
        assert fake.bytes_read > 0


@pytest.mark.parametrize("value", ["off", "on", "auto"])
def test_the_setting_decides(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARPWELL_GPUDIRECT", value)
    fake = install_fake(monkeypatch)
    with open_array(file_of(tmp_path / "x", VALUES)) as a:
        assert bool(fake.registrations) == (value == "on"), "the others do not register before the first read"
        a.prefetch().result(250)
        assert (fake.bytes_read == 0) == (value == "off")
        assert ("WARPWELL_GPUDIRECT is off" in a.medium.description) == (value == "off")
    assert fake.registrations == 0


def test_on_raises_where_the_system_does_not_support_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARPWELL_GPUDIRECT", "on")
    fake = install_fake(monkeypatch, FakeCuFile(p2p=False))
    with ww.Cache(200 * (PAGE + 8), page_size=PAGE, device="cpu") as cache:
        options: dict[str, Any] = {"cache": cache, "page_size": None}
        with pytest.raises(errors.ArgumentError, match=r"is on, but cuFile cannot read .*x: .*P2PDMA.*set it to auto"):
            open_array(file_of(tmp_path / "x", VALUES), **options)
        assert fake.registrations == 0
        with open_array(storage.RamMedium(VALUES), **options) as b:
            assert b[5] == 5


def test_the_host_is_asked_before_the_library_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvme = tmp_path / "nvme_core"
    monkeypatch.setattr(gpudirect, "NVME_MODULE", nvme)
    assert "no NVMe driver" in gpudirect.host_obstacle()
    nvme.mkdir()
    assert not gpudirect.host_obstacle()
    (nvme / "parameters").mkdir()
    for text, found in (("Y\n", True), ("N\n", False)):
        (nvme / "parameters" / "multipath").write_text(text)
        assert ("multipath=Y" in gpudirect.host_obstacle()) == found
    monkeypatch.setattr(os, "uname", lambda: type("Uname", (), {"release": "5.15.0-generic"}))
    assert "5.15.0-generic is older than 6.2" in gpudirect.host_obstacle()


# -- registrations --------------------------------------------------------------------------------------------------


def test_arrays_of_a_cache_register_and_deregister_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install_fake(monkeypatch)
    with ww.Cache(400 * (PAGE + 8), page_size=PAGE, device="cpu") as cache:
        options: dict[str, Any] = {"cache": cache, "page_size": None}
        a = open_array(file_of(tmp_path / "a", VALUES), **options)
        b = open_array(file_of(tmp_path / "b", -VALUES), **options)
        a.prefetch(0, 5000).result(250)
        b.prefetch(0, 5000).result(HANG_SECONDS)
        assert len(fake.handles) == 2
        a.close()
        assert len(fake.handles) == 1 and len(fake.buffers) == prefetch.SLOTS
        np.testing.assert_array_equal(b[:5000], -VALUES[:5000])
        c = open_array(file_of(tmp_path / "c", 2 * VALUES), **options)
        c.prefetch(0, 5000).result(250)
        assert len(fake.handles) == 2
        np.testing.assert_array_equal(c[:5000], 2 * VALUES[:5000])
    assert fake.registrations == 0


def test_a_dropped_array_leaves_no_registration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install_fake(monkeypatch)
    a = open_array(file_of(tmp_path / "x", VALUES))
    a.prefetch().result(250)
    assert fake.registrations
    del a
    assert until(lambda: gc.collect() >= 0 and fake.registrations == 0)


def test_a_forked_child_leaves_the_registrations_of_its_parent_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = install_fake(monkeypatch)
    a = open_array(file_of(tmp_path / "x", VALUES))
    a.prefetch().result(250)
    registrations, calls = fake.registrations, fake.calls
    child = os.fork()
    if child == 0:
        code = 1
        try:
            a.close()
            del a
            gc.collect()
            alone = (fake.registrations, fake.calls) == (registrations, calls)
            fresh = install_fake(monkeypatch)
            with open_array(file_of(tmp_path / "y", VALUES)) as b:
                b.prefetch().result(250)
                assert fresh.registrations
            code = 0 if alone and not fresh.registrations else 2
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert fake.registrations == registrations
    a.close()
    assert fake.registrations == 0


def test_ctrl_c_during_a_read_leaves_nothing_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install_fake(monkeypatch, FakeCuFile(out_of_order=True))
    out = np.zeros_like(VALUES)
    memory = type("Memory", (), {"__cuda_array_interface__": {"data": (out.ctypes.data, False)}})()
    with open_array(file_of(tmp_path / "x", VALUES)) as a:
        a.prefetch(0, 100).result(250)
        poll, main = fake.batch_io_get_status, threading.get_ident()

        def interrupt(*args: Any) -> None:
            if threading.get_ident() == main and fake.completions > 40 and not interrupted:
                interrupted.append(True)
                signal.raise_signal(signal.SIGINT)
            poll(*args)

        interrupted: list[bool] = []
        monkeypatch.setattr(fake, "batch_io_get_status", interrupt)
        with pytest.raises(KeyboardInterrupt):
            to_memory(a, memory)
        assert interrupted and not fake._in_flight()
        assert to_memory(a, memory) is memory
        np.testing.assert_array_equal(out, VALUES)
    assert fake.registrations == 0


# -- the real library's structures ------------------------------------------------------------------------------------


def test_structures_have_the_layout_of_the_bindings() -> None:
    bindings = pytest.importorskip("cuda.bindings.cufile")
    read, event, descriptor = np.zeros(1, cufile.READ), np.zeros(1, cufile.EVENT), np.zeros(1, cufile.DESCRIPTOR)
    for number, name in enumerate(cufile.READ.names, 1):
        read[name] = number
    assert read.view(bindings.io_params_dtype)[0].tolist() == (1, ((2, 3, 4, 5),), 6, 7, 8)
    event["cookie"], event["status"], event["result"] = 3, 16, 7
    assert event.view(bindings.io_events_dtype)[0].tolist() == (3, 16, 7)
    descriptor["type"], descriptor["fd"] = 1, 77
    same = descriptor.view(bindings.descr_dtype)[0]
    assert (same["type"], same["handle"]["fd"], same["fs_ops"]) == (1, 77, 0)


def test_numbers_are_those_of_the_bindings() -> None:
    bindings = pytest.importorskip("cuda.bindings.cufile")
    assert cufile.USE_PCI_P2PDMA == bindings.BoolConfigParameter.USE_PCIP2PDMA
    assert cufile.ALLOW_COMPAT_MODE == bindings.BoolConfigParameter.PROPERTIES_ALLOW_COMPAT_MODE
    assert cufile.ALLOW_COMPAT_MODE == bindings.DriverControlFlags.ALLOW_COMPAT_MODE
    assert cufile.NVME_P2P_SUPPORTED == bindings.DriverStatusFlags.NVME_P2P_SUPPORTED
    assert cufile.DRIVER_ALREADY_OPEN == bindings.OpError.DRIVER_ALREADY_OPEN
    assert cufile.COMPLETE == bindings.Status.COMPLETE
