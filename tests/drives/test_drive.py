"""Drives: QEMU's NVMe controller, driven by our transport, admin queue and host queues."""

import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from tests.harness.drives import needs_qemu, set_timeout
from tests.harness.native_calls import NativeCalls
from tests.harness.until import HANG_SECONDS, until

from lab.drives import qemu as testing_qemu
from lab.drives import qtest_store
from lab.drives.nbd import NbdServer
from lab.drives.qemu import QemuDrive, QemuNamespace
from warpwell import errors, nvme
from warpwell.drives import Drive, DriveMedium, HostQueue, Namespace
from warpwell.nvme import COMMAND, controller, identify
from warpwell.nvme import status as codes
from warpwell.targets.memory import view_of

pytestmark = needs_qemu

COMPARE = 0x05


def content(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


@pytest.fixture(scope="module")
def shared() -> Iterator[QemuDrive]:
    """One QEMU for tests that leave it intact: each test opens the drive."""
    with QemuDrive(["16MiB", QemuNamespace("4MiB", block=4096)], queues=8) as qemu:
        yield qemu


@pytest.fixture
def drive(shared: QemuDrive) -> Iterator[Drive]:
    with shared.open() as drive:
        yield drive


# -- reading and writing ----------------------------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path: Path) -> None:
    image = tmp_path / "image.raw"
    image.write_bytes(bytes(4 << 20))
    with QemuDrive(["16MiB", QemuNamespace(path=image, block=4096)], mdts=3) as qemu, qemu.open() as drive:
        assert drive.max_transfer == 8 * 4096 and drive.namespaces() == [1, 2]
        small, large = drive.namespace(1), drive.namespace(2)
        assert (small.block, small.nbytes, large.block, large.blocks) == (512, 16 << 20, 4096, 1024)
        data = content(300 * 4096)
        small.write(17, data)
        large.write(5, data)
        large.flush()
        assert np.array_equal(small.read(17, data.size // 512), data)
        assert np.array_equal(large.read(5, 300), data)
        assert image.read_bytes()[5 * 4096 :][: data.size] == data.tobytes()
        assert not small.read(0, 17).any()


def test_what_it_says_of_itself(drive: Drive) -> None:
    assert (drive.serial, drive.model, drive.version, drive.queues) == ("warpwell", "QEMU NVMe Ctrl", "1.4.0", 8)
    assert drive.max_transfer == 512 << 10 and drive.volatile_cache and drive.entries == 2048
    assert "8 queues of 2048" in repr(drive)


@pytest.mark.parametrize("requested", [1, 4, 8, 64, 65535])
def test_queues_are_those_granted(shared: QemuDrive, requested: int) -> None:
    with shared.open(queues=requested) as drive:
        assert drive.queues == min(requested, 8)
        made = [drive.host_queue(entries) for entries in (2, 64, 2048)[: drive.queues]]
        assert [queue.qid for queue in made] == [1, 2, 3][: len(made)]
        for queue in made:
            for _ in range(5):  # a ring of 2 wraps
                assert run(queue, nvme.FLUSH, 1) == 0


def run(queue: HostQueue, opc: int, nsid: int, **fields: int) -> int:
    command = np.zeros((), COMMAND)
    command["opc"], command["nsid"] = opc, nsid
    for name, value in fields.items():
        command[name] = value
    return queue.run(command, "a command", seconds=HANG_SECONDS, nsid=nsid).status


def test_statuses_are_those_of_the_specification(drive: Drive) -> None:
    queue = drive.host_queue()
    at = drive.arena.allocate(4096).address
    last = 16 << 11
    expected = [
        (nvme.READ, 1, {"prp1": at}, codes.SUCCESS),
        (nvme.READ, 1, {"prp1": at, "cdw10": last}, nvme.LBA_OUT_OF_RANGE),
        (nvme.READ, 1, {"prp1": at, "cdw10": last - 1, "cdw12": 1}, nvme.LBA_OUT_OF_RANGE),
        (nvme.READ, 1, {"prp1": at, "cdw10": 0xFFFFFFFF, "cdw11": 0xFFFFFFFF}, nvme.LBA_OUT_OF_RANGE),
        (nvme.READ, 9, {"prp1": at}, nvme.INVALID_FIELD),
        (nvme.READ, 0, {"prp1": at}, nvme.INVALID_NAMESPACE),
        (0x7F, 1, {}, nvme.INVALID_OPCODE),
        (nvme.READ, 1, {"prp1": at, "cdw12": 2047}, nvme.INVALID_FIELD),  # more than MDTS
        (nvme.READ, 1, {"prp1": at + 3584, "prp2": at + 512, "cdw12": 7}, codes.PRP_OFFSET_INVALID),
        (COMPARE, 1, {"prp1": at, "cdw10": 4}, codes.SUCCESS),
    ]
    for opc, nsid, fields, code in expected:
        status = run(queue, opc, nsid, **fields)
        assert status & 0x7FF == code, (hex(opc), nsid, fields, nvme.describe(status))
        assert nvme.status_dnr(status) == (code != 0)
    for command, name, code in [
        (controller.create_completion_queue(9, 64, at), "too many", codes.INVALID_QUEUE_ID),
        (controller.create_completion_queue(2, 4096, at), "too long", codes.INVALID_QUEUE_SIZE),
        (controller.create_submission_queue(2, 64, at, 2), "no completion queue", 0x100),
        (controller.delete_completion_queue(1), "before its submission queue", codes.INVALID_QUEUE_DELETION),
        (controller.delete_submission_queue(7), "unknown", codes.INVALID_QUEUE_ID),
        (controller.identify(0xEE, at), "unknown structure", nvme.INVALID_FIELD),
    ]:
        with pytest.raises(errors.DriveError, match=f"{name} failed") as caught:
            drive._run(command, name)
        assert caught.value.status is not None
        assert caught.value.status & 0x7FF in (code, nvme.INVALID_FIELD), str(caught.value)
    assert run(queue, nvme.READ, 1, prp1=at) == 0  # the drive keeps working


def test_media_errors_and_read_only() -> None:
    failing = {
        "driver": "blkdebug",
        "image": {"driver": "null-co", "size": 1 << 20, "read-zeroes": True},
        "inject-error": [{"event": "read_aio", "errno": 5, "sector": 100}],
    }
    spaces = [QemuNamespace(backend={"driver": "raw", "file": failing}), QemuNamespace("1MiB", writable=False)]
    with QemuDrive(spaces) as qemu, qemu.open() as drive:
        space = drive.namespace(1)
        with pytest.raises(errors.DriveError, match="namespace 1: read of 1 blocks from 100 failed") as caught:
            space.read(100, 1)
        assert (caught.value.status or 0) & 0x7FF == nvme.UNRECOVERED_READ_ERROR
        assert not space.read(101, 1).any()
        with pytest.raises(errors.DriveError, match="namespace 2: write of 1 blocks from 0 failed") as caught:
            drive.namespace(2).write(0, bytes_of(512))
        assert caught.value.command == "write" and drive.failure is None


def bytes_of(n: int) -> np.ndarray:
    return np.ones(n, np.uint8)


def test_formats_that_are_refused() -> None:
    zones = {"zoned": True, "zoned.zone_size": 1 << 20}
    odd = [
        (QemuNamespace("1MiB", metadata=8), "8 bytes of metadata in a separate buffer"),
        (QemuNamespace("1MiB", metadata=8, options={"mset": 1}), "8 bytes of metadata behind each block"),
        (QemuNamespace("1MiB", metadata=8, options={"pi": 1}), "metadata"),
        (QemuNamespace("4MiB", options=zones), "namespace of zones"),
        (QemuNamespace("2MiB", block=1 << 18), "blocks have 262144 bytes"),
        (QemuNamespace("1MiB"), ""),
    ]
    with QemuDrive([space for space, _ in odd]) as qemu, qemu.open() as drive:
        for nsid, (_, why) in enumerate(odd, 1):
            if why:
                with pytest.raises(errors.DriveError, match=f"namespace {nsid} cannot be used: .*{why}"):
                    drive.namespace(nsid)
            else:
                assert drive.namespace(nsid).nbytes == 1 << 20
        with pytest.raises(errors.DriveError, match="has no namespace 7"):
            drive.namespace(7)
    with (
        QemuDrive(["1MiB"], subsystem=True) as qemu,
        qemu.open() as drive,
        pytest.raises(errors.DriveError, match="shared with other controllers"),
    ):
        drive.namespace(1)


class AdminCalls(RuleBasedStateMachine):
    """Queues come and go, and data stay what they were."""

    qemu: QemuDrive

    @initialize()
    def open(self) -> None:
        self.drive = self.qemu.open(queues=4)
        self.space = self.drive.namespace(1)
        self.model = self.space.read(0, 256)  # the first command creates the host's queue
        self.queues: dict[int, HostQueue] = {}

    @precondition(lambda self: len(self.queues) < 3)
    @rule(entries=st.integers(2, 2048))
    def create(self, entries: int) -> None:
        queue = self.drive.host_queue(entries)
        assert queue.qid not in self.queues
        self.queues[queue.qid] = queue

    @precondition(lambda self: len(self.queues) == 3)
    @rule()
    def create_too_many(self) -> None:
        with pytest.raises(errors.DriveError, match="all are in use"):
            self.drive.host_queue()

    @precondition(lambda self: self.queues)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        qid = data.draw(st.sampled_from(sorted(self.queues)))
        self.drive.delete_pair(qid)
        del self.queues[qid]
        with pytest.raises(errors.DriveError, match="invalid queue identifier"):
            self.drive.delete_pair(qid)

    @precondition(lambda self: self.queues)
    @rule(data=st.data(), times=st.integers(1, 5))
    def use(self, data: st.DataObject, times: int) -> None:
        queue = self.queues[data.draw(st.sampled_from(sorted(self.queues)))]
        assert [run(queue, nvme.FLUSH, 1) for _ in range(times)] == [0] * times

    @rule(lba=st.integers(0, 255), count=st.integers(0, 255), seed=st.integers(0, 255))
    def write(self, lba: int, count: int, seed: int) -> None:
        count = min(count, 256 - lba)
        self.model[512 * lba : 512 * (lba + count)] = data = content(512 * count, seed)
        self.space.write(lba, data)

    @rule(lba=st.integers(0, 255), count=st.integers(0, 255))
    def read(self, lba: int, count: int) -> None:
        count = min(count, 256 - lba)
        assert np.array_equal(self.space.read(lba, count), self.model[512 * lba : 512 * (lba + count)])

    @rule()
    def check_namespaces(self) -> None:
        assert self.drive.namespaces() == [1, 2]
        with pytest.raises(errors.DriveError, match="identify failed"):
            self.drive.identify(0xEE)

    def teardown(self) -> None:
        if hasattr(self, "drive"):
            self.drive.close()


def test_random_admin_commands(shared: QemuDrive) -> None:
    machine = type("Machine", (AdminCalls,), {"qemu": shared})
    few = settings(max_examples=20, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(machine, settings=few)
    gc.collect()  # objects of the last run that Hypothesis references
    with shared.open() as drive:
        block = drive.arena.allocate(drive.arena.nbytes - (1 << 20))  # all memory of the last run has been freed
        block.free()


# -- loss -------------------------------------------------------------------------------------------------------------


def every_call_raises(drive: Drive, match: str) -> None:
    calls: list[Callable[[], object]] = [
        lambda: drive.namespaces(),
        lambda: drive.namespace(1),
        lambda: drive.host_queue(),
        lambda: drive.delete_pair(1),
        lambda: drive.identify(identify.CNS_CONTROLLER),
        lambda: drive.transport.read32(controller.CSTS),
        lambda: drive.transport.write32(controller.CC, 0),
    ]
    for call in calls:
        with pytest.raises(errors.DriveLostError, match=match) as caught:
            call()
        assert caught.value.drive == drive.address


def test_a_drive_that_dies_is_lost_for_every_later_call() -> None:
    with QemuDrive() as qemu, qemu.open() as drive:
        space = drive.namespace(1)
        qemu.kill()
        with pytest.raises(errors.DriveLostError, match=r"qemu:\d+ is lost.* QEMU has ended"):
            space.read(0, 1)
        every_call_raises(drive, "QEMU has ended")
        assert drive.failure is not None
        with pytest.raises(errors.DriveLostError, match="QEMU has ended"):
            qemu.open()


def test_a_drive_that_dies_during_commands_is_noticed_at_once() -> None:
    slow = {"driver": "null-co", "size": 1 << 20, "latency-ns": 3_000_000_000}
    with QemuDrive([QemuNamespace(backend=slow)]) as qemu, qemu.open() as drive:
        space = drive.namespace(1)
        space.flush()
        killer = threading.Timer(0.3, qemu.kill)
        killer.start()
        with pytest.raises(errors.DriveLostError, match=r"QEMU has ended.*\(queue 1, read\)") as caught:
            space.read(0, 1)
        assert (caught.value.namespace, caught.value.command) == (1, "read")
        killer.join()


def test_a_drive_that_stops_is_lost_and_comes_back_late(tmp_path: Path) -> None:
    """A read in flight completes when the drive resumes, into memory that is quarantined until then."""
    image = tmp_path / "image.raw"
    image.write_bytes(b"\xee" * (1 << 20))
    with QemuDrive([QemuNamespace(path=image)], seconds=HANG_SECONDS) as qemu:
        drive = qemu.open()
        space = drive.namespace(1)
        space.read(0, 1)
        queue = drive.host_queue()
        block = drive.arena.allocate(1 << 16)
        address = block.address
        qemu.stop()
        set_timeout(drive, 0.3)
        with pytest.raises(errors.DriveLostError, match=r"register access was not completed within 0.3 s"):
            run(queue, nvme.READ, 1, prp1=address, cdw12=7)
        every_call_raises(drive, "not completed within")
        block.free()
        fresh = [drive.arena.allocate(1 << 16) for _ in range(4)]
        qemu.cont()
        set_timeout(drive, HANG_SECONDS)
        until(lambda: (testing_qemu._state(f"/proc/{qemu.pid}/stat") or "T") not in "Tt")
        until(lambda: (view_of(address, 4096, np.uint8) == 0xEE).all())  # the late write of the stopped command
        assert all(block.address != address and not block.words.any() for block in fresh)
        drive.close()  # the drive obeys again, and close() disables it
        assert qemu.running
        with qemu.open() as reopened:
            assert (reopened.namespace(1).read(0, 1) == 0xEE).all()
            again = [qemu.arena.allocate(1 << 16) for _ in range(4)]
            assert address in [block.address for block in again]  # quarantine is over


def on_disk(disk: NbdServer) -> QemuNamespace:
    return QemuNamespace(
        backend={"driver": "raw", "file": {"driver": "nbd", "server": {"type": "unix", "path": disk.path}}}
    )


@pytest.mark.parametrize("answers", [True, False])
def test_a_read_in_flight_ends_before_a_reset_does(answers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Disabling waits for commands in flight; if they do not complete, QEMU is ended."""
    with NbdServer(np.full(1 << 20, 0xEE, np.uint8)) as disk, QemuDrive([on_disk(disk)], seconds=HANG_SECONDS) as qemu:
        drive = qemu.open()
        space = drive.namespace(1)
        space.flush()
        disk.answering.clear()
        monkeypatch.setattr("warpwell.drives.drive.COMMAND_SECONDS", 0.2)
        with pytest.raises(errors.DriveLostError, match=r"read was not completed within 0.2 s.*\(queue 1, read\)"):
            space.read(0, 8)
        with drive.io() as (_, buffer):
            address = buffer.address
        del buffer, _
        if answers:
            threading.Timer(0.3, disk.answering.set).start()
        else:
            set_timeout(drive, 1.0)
        drive.close()
        received = view_of(address, 4096, np.uint8).copy()
        assert qemu.running == answers and (received == (0xEE if answers else 0)).all()
        disk.answering.set()
        del drive, space
        gc.collect()  # objects that a traceback references
        block = qemu.arena.allocate(1 << 20)  # the freed memory may be used again
        assert block.address <= address < block.address + block.nbytes
        block.view(np.dtype(np.uint8))[:] = 1
        time.sleep(0.2)
        assert (block.view(np.dtype(np.uint8)) == 1).all()


def test_a_drive_that_stops_for_good_is_killed() -> None:
    with QemuDrive(seconds=HANG_SECONDS) as qemu:
        drive = qemu.open()
        qemu.stop()
        set_timeout(drive, 0.2)
        drive.close()
        assert not qemu.running


def test_a_drive_without_the_bus_reports_a_fatal_error() -> None:
    with QemuDrive() as qemu, qemu.open() as drive:
        drive.transport.set_bus_master(False)  # type: ignore[attr-defined]
        with pytest.raises(errors.DriveLostError, match="fatal error"):
            drive.namespaces()
        every_call_raises(drive, "fatal error")
        drive.close()
        with qemu.open() as again:  # the reset of the bus has placed the registers again
            assert again.namespace(1).read(0, 1).size == 512


# -- the socket -------------------------------------------------------------------------------------------------------


def native_store(drive: Drive) -> Callable[[int, int], int]:
    function, state = drive.transport.native_store()
    call = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 6)(function)
    return lambda offset, value: int(call(state, offset, value, 0, 0, 0))


def test_native_stores_and_registers_share_the_socket(drive: Drive) -> None:
    store = native_store(drive)
    space = drive.namespace(1)
    data = content(64 * 512, 3)
    space.write(0, data)
    for k in range(1000):
        assert store(controller.INTMS, k) == 0
        if k % 97 == 0:
            assert drive.transport.read32(controller.VS) == 0x10400
    wrong: list[object] = []

    def stores() -> None:
        for k in range(3000):
            if store(controller.INTMS, k):
                wrong.append(k)

    def registers() -> None:
        for _ in range(150):
            if drive.transport.read32(controller.VS) != 0x10400:
                wrong.append("register")

    def reads() -> None:
        for k in range(60):
            if not np.array_equal(space.read(k, 4), data[512 * k :][:2048]):
                wrong.append("block")

    threads = [threading.Thread(target=target) for target in (stores, stores, registers, reads, reads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
    assert not wrong and drive.failure is None


def test_stores_to_a_stopped_drive_end_at_64_and_lose_it() -> None:
    with QemuDrive(seconds=HANG_SECONDS) as qemu, qemu.open() as drive:
        store = native_store(drive)
        drive.transport.read32(controller.VS)  # a read, after which no store is outstanding
        qemu.stop()
        set_timeout(drive, 0.3)
        done = 0
        while store(controller.INTMS, 0) == 0:
            done += 1
        assert done == 64
        assert store(controller.INTMS, 0) == -1
        every_call_raises(drive, "did not accept a store to a doorbell|not completed within")
    assert drive.failure is not None


def test_a_closed_drive_takes_no_native_store(shared: QemuDrive) -> None:
    drive = shared.open()
    store = native_store(drive)
    assert store(controller.INTMS, 0) == 0
    drive.close()
    assert store(controller.INTMS, 0) == -1
    with pytest.raises(errors.DriveLostError, match="was stopped: open it again"):
        drive.namespaces()


def test_ctrl_c_between_two_lines_leaves_the_protocol_whole(drive: Drive) -> None:
    """Interrupts at random moments of register accesses and reads: each raises, and the next access is right."""
    space = drive.namespace(1)
    data = content(8 * 512, 5)
    space.write(8, data)
    rng = np.random.default_rng(1)
    interrupt_count, handled = 0, []

    def handle(number: int, frame: FrameType | None) -> None:
        handled.append(number)
        signal.default_int_handler(number, frame)

    previous = signal.signal(signal.SIGINT, handle)
    try:
        for k in range(120):
            timer = threading.Timer(float(rng.random()) * 0.004, lambda: os.kill(os.getpid(), signal.SIGINT))
            try:
                timer.start()
                while timer.is_alive():
                    drive.transport.read32(controller.VS)
                    space.read(8, 8)
                until(lambda k=k: len(handled) > k)  # another thread may get the signal from the system
            except KeyboardInterrupt:
                interrupt_count += 1
            timer.join()
            assert drive.transport.read32(controller.VS) == 0x10400
            assert np.array_equal(space.read(8, 8), data)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert interrupt_count > 100 and drive.failure is None


def test_a_handler_that_raises_leaves_registers_right(shared: QemuDrive) -> None:
    """Signals other than Ctrl-C are not kept: an access left in the middle is made good by the next one."""

    class Raised(Exception):
        pass

    def handler(*_: object) -> None:
        raise Raised

    previous = signal.signal(signal.SIGALRM, handler)
    rng = np.random.default_rng(2)
    transport = shared.transport()
    interrupt_count = 0
    try:
        for _ in range(200):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + float(rng.random()) * 2e-3)
                for _ in range(1000):
                    assert transport.read32(controller.VS) == 0x10400
                    assert transport.read64(controller.CAP) & 0xFFFF == 2047
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Raised:
                interrupt_count += 1
            assert transport.read32(controller.VS) == 0x10400
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        transport.close()
    assert interrupt_count > 150


def test_a_command_that_is_abandoned_loses_the_drive() -> None:
    class Raised(Exception):
        pass

    def handler(*_: object) -> None:
        raise Raised

    slow = {"driver": "null-co", "size": 1 << 20, "latency-ns": 500_000_000}
    with QemuDrive([QemuNamespace(backend=slow)]) as qemu, qemu.open() as drive:
        space = drive.namespace(1)
        space.flush()
        previous = signal.signal(signal.SIGALRM, handler)
        try:
            with pytest.raises(Raised):
                signal.setitimer(signal.ITIMER_REAL, 0.1)
                space.read(0, 1)
        finally:
            signal.signal(signal.SIGALRM, previous)
        every_call_raises(drive, "read was abandoned")


def test_a_handler_that_reads_never_changes_what_it_interrupts(shared: QemuDrive) -> None:
    """The read would use the same buffer: it is refused, or runs between two commands."""
    rng = np.random.default_rng(4)
    previous = signal.getsignal(signal.SIGALRM)
    refused = 0
    for _ in range(60):
        with shared.open() as drive:
            space = drive.namespace(1)
            space.write(0, np.full(512, 1, np.uint8))
            space.write(1, np.full(512, 2, np.uint8))

            handled: list[int] = []

            def handler(*_: object, space: Namespace = space, handled: list[int] = handled) -> None:
                nonlocal refused
                handled.append(1)
                try:
                    assert (space.read(1, 1) == 2).all()
                except errors.DriveError:
                    refused += 1

            try:
                signal.signal(signal.SIGALRM, handler)
                signal.setitimer(signal.ITIMER_REAL, 1e-4 + float(rng.random()) * 3e-3)
                while not handled:
                    assert (space.read(0, 1) == 1).all()
            except errors.DriveLostError:
                pass  # the signal came in the middle of a command
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, previous)
    assert refused > 20


def test_a_handler_may_close_the_drive_at_any_moment() -> None:
    """The close does not deadlock, and QEMU has no access to memory that is allocated again."""
    rng = np.random.default_rng(3)
    previous = signal.getsignal(signal.SIGALRM)
    try:
        for _ in range(8):
            with QemuDrive(["1MiB"], seconds=5) as qemu:
                drive = qemu.open()
                space = drive.namespace(1)
                signal.signal(signal.SIGALRM, lambda *_, drive=drive: drive.close())
                signal.setitimer(signal.ITIMER_REAL, 1e-3 + float(rng.random()) * 1e-2)
                with pytest.raises((errors.DriveLostError, errors.ClosedError)):
                    while True:
                        assert not space.read(0, 100).any()
                drive.close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


# -- processes --------------------------------------------------------------------------------------------------------


def resources() -> tuple[set[str], set[str]]:
    """The files that this process has open, and its children."""
    files = {f"{fd}:{os.readlink(f'/proc/self/fd/{fd}')}" for fd in os.listdir("/proc/self/fd") if exists(fd)}
    children = {
        child
        for task in os.listdir("/proc/self/task")
        for child in Path(f"/proc/self/task/{task}/children").read_text().split()
    }
    return files, children


def exists(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def test_a_drive_that_is_dropped_ends_its_qemu_and_one_that_is_open_keeps_it() -> None:
    with QemuDrive() as qemu, qemu.open():
        pass
    before = resources()
    drive = QemuDrive(["1MiB"]).open()
    pid = int(drive.address.removeprefix("qemu:"))
    gc.collect()
    assert drive.namespace(1).read(0, 1).size == 512  # only the drive references the object
    if (child := os.fork()) == 0:
        del drive
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert drive.namespace(1).read(0, 1).size == 512  # the child has closed only its own copy
    drive.close()
    del drive
    gc.collect()
    assert not Path(f"/proc/{pid}").exists()
    for found, earlier in zip(resources(), before, strict=True):
        assert not found - earlier


def test_nothing_is_left_behind() -> None:
    with QemuDrive() as qemu, qemu.open():
        pass  # starts the threads that live as long as the process
    before, threads = resources(), set(threading.enumerate())
    for leave in (lambda q: None, QemuDrive.kill, QemuDrive.stop):
        with QemuDrive(seconds=HANG_SECONDS) as qemu, qemu.open() as drive:
            drive.namespace(1).read(0, 1)
            pid = qemu.pid
            leave(qemu)
            set_timeout(drive, 0.2)
        assert not Path(f"/proc/{pid}").exists()
    for options in ({"options": {"bogus": 1}}, {"namespaces": [QemuNamespace(path="/nonexistent")]}):
        with pytest.raises(errors.DriveLostError, match=r"QEMU has ended.* its output: .*(bogus|No such file)"):
            QemuDrive(**options)
    with pytest.raises(errors.ArgumentError):
        QemuDrive(arena=12345)
    # resources of earlier tests may be freed concurrently
    for found, earlier in zip(resources(), before, strict=True):
        assert not found - earlier
    assert not set(threading.enumerate()) - threads


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_no_drive(drive: Drive) -> None:
    space = drive.namespace(1)
    data = content(512)
    space.write(0, data)
    for _ in range(3):
        child = os.fork()
        if not child:
            code = 1
            try:
                for call in (lambda: space.read(0, 1), drive.namespaces, lambda: drive.transport.read32(controller.VS)):
                    with pytest.raises(errors.ForkError, match="opened in process"):
                        call()
                drive.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert np.array_equal(space.read(0, 1), data)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_rings_no_doorbell_and_waits_for_no_lock_of_the_parents(shared: QemuDrive) -> None:
    """A medium that a child takes along is refused; so is a native store, even if the parent's threads are busy."""
    with shared.open() as drive, DriveMedium(drive.namespace(1)) as medium:
        store = native_store(drive)
        held, over = threading.Event(), threading.Event()

        def hold() -> None:
            with drive.io():
                held.set()
                over.wait(HANG_SECONDS)

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(HANG_SECONDS)
        forwarded = drive.transport._state_words[qtest_store.S_OWED]  # type: ignore[attr-defined]
        ctypes.CDLL(None).pthread_mutex_lock(drive.transport._mutex)  # type: ignore[attr-defined]
        child = os.fork()
        if not child:
            code = 1
            signal.alarm(20)
            try:
                assert store(controller.INTMS, 0) == -1
                for call in (
                    medium.native,
                    shared.transport,
                    shared.open,
                    lambda: medium.read(0, 512),
                    lambda: medium.write(7, np.zeros(9)),
                    lambda: drive.namespace(1),
                ):
                    with pytest.raises(errors.ForkError, match="forked"):
                        call()
                code = 0
            finally:
                os._exit(code)
        ctypes.CDLL(None).pthread_mutex_unlock(drive.transport._mutex)  # type: ignore[attr-defined]
        status = os.waitpid(child, 0)[1]
        over.set()
        thread.join()
        assert status == 0
        assert drive.transport._state_words[qtest_store.S_OWED] == forwarded  # type: ignore[attr-defined]
        assert medium.read(0, 512).size == 512


def test_a_wrong_range_of_blocks_is_named(drive: Drive) -> None:
    space = drive.namespace(1)
    for lba, count in ((0, -1), (-1, 1), (0, 1 << 40), (0, 1.5), ("0", 1), (None, 1)):
        with pytest.raises(errors.ArgumentError):
            space.read(lba, count)  # type: ignore[arg-type]
    assert space.read(np.int32(1), np.uint8(2)).size == 1024  # type: ignore[arg-type]
    with pytest.raises(errors.ArgumentError, match="must be numbers"):
        space.write(0, np.array([None] * 64))
    with pytest.raises(errors.ArgumentError, match=r"pass drive\.namespace\(1\)"):
        DriveMedium(drive)  # type: ignore[arg-type]


def test_a_medium_that_is_closed_still_answers_what_is_in_flight(shared: QemuDrive) -> None:
    """Native threads find the records of commands, even if rings and buffers are freed."""
    with shared.open() as drive:
        medium = DriveMedium(drive.namespace(1))
        calls = NativeCalls(medium.native())
        buffer = np.zeros(4096, np.uint8)
        calls.start_block(nvme.READ, 0, 4096, buffer.ctypes.data, 5)
        drive.transport.fail("test")
        medium.close()
        assert calls.complete() == (5, nvme.ABORTED_BY_HOST, 0)
        assert calls.complete() is None


def test_a_drive_is_open_once_at_a_time(shared: QemuDrive) -> None:
    """A second one would reset the first one's queues, and ring doorbells of its own over them."""
    with shared.open() as drive:
        for again in (shared.open, shared.transport):
            with pytest.raises(errors.DriveError, match=r"qemu:\d+ is already open in this program: close it"):
                again()
        assert drive.namespace(1).read(0, 1).size == 512
    shared.open().close()


def test_memory_that_somebody_has_outlives_the_drive() -> None:
    """An array that is closed after its drive looks at its rings still."""
    with QemuDrive(arena="16MiB") as qemu, qemu.open() as drive:
        block = drive.arena.allocate(8192)
        block.words[:] = 7
        arena = drive.arena
    address = f"{arena.address:x}-"
    assert address in Path("/proc/self/maps").read_text() and (block.words == 7).all()
    assert arena._closed
    with pytest.raises(errors.ClosedError, match="open the drive again"):
        arena.allocate(8)
    del qemu, drive, arena, block
    gc.collect()
    assert address not in Path("/proc/self/maps").read_text()


PROGRAM = """
import os, sys, threading, time
from lab.drives.qemu import QemuDrive
made = []
thread = threading.Thread(target=lambda: made.append(QemuDrive()))
thread.start(); thread.join()
with made[0].open() as drive:  # QEMU did not end with the thread that asked for it
    time.sleep(0.1)
    drive.namespace(1).read(0, 1)
print(made[0].pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_it_ends_with_the_process_and_not_with_a_thread(end: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    with process.stdout:
        pid = int(process.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        process.send_signal(end)
        process.wait(HANG_SECONDS)
    until(lambda: not Path(f"/proc/{pid}").exists() or testing_qemu._state(f"/proc/{pid}/stat") == "Z")


def test_without_qemu_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(errors.DeviceNotFoundError, match="apt-get install qemu-system-x86"):
        QemuDrive()
    assert not QemuDrive.is_installed()


def test_identify_is_raw(drive: Drive) -> None:
    found = identify.controller_of(drive.identify(identify.CNS_CONTROLLER))
    assert int(found["nn"]) >= 2 and int(found["vid"]) in (0x1B36, 0x8086)
