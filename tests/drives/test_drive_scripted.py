"""Drive on a scripted controller: limits and formats that are refused, answers that break the protocol, statuses."""

import gc
import itertools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.harness.until import HANG_SECONDS

from lab.drives.scripted_drive import CAP, ScriptedDrive
from warpwell import errors, nvme
from warpwell.drives import DmaArena, Drive
from warpwell.drives.medium import NamespaceMedium
from warpwell.nvme import controller
from warpwell.nvme import status as codes


def test_a_drive_of_the_script() -> None:
    wire = ScriptedDrive()
    with Drive(wire, queues=32) as drive:
        assert (drive.queues, drive.entries, drive.version, drive.volatile_cache) == (3, 256, "1.4.0", True)
        space = drive.namespace(1)
        data = np.arange(200 * 10, dtype=np.uint8).reshape(10, 200)[:, :].copy()
        space.write(3, np.resize(data, 1024))
        assert np.array_equal(space.read(3, 2), np.resize(data, 1024))
        space.flush()
    assert wire.closes == 1 and wire.resets == 0 and wire.registers[controller.CSTS] & 1 == 0


@pytest.mark.parametrize(
    ("cap", "why"),
    [
        (CAP & ~(1 << 37), "no NVM command set"),
        (CAP | 1 << 48, "smallest memory page has 8192 bytes"),
        (CAP & ~0xFFFF | 62, "at most 63 entries"),
    ],
)
def test_limits_that_are_refused(cap: int, why: str) -> None:
    wire = ScriptedDrive(cap=cap)
    with pytest.raises(errors.DriveError, match=why) as caught:
        Drive(wire)
    assert not isinstance(caught.value, errors.DriveLostError) and caught.value.drive == "scripted"
    assert wire.closes == 1


@pytest.mark.parametrize(
    ("mdts", "nbytes"), [(0, 2 << 20), (1, 8192), (5, 128 << 10), (9, 2 << 20), (31, 2 << 20), (255, 2 << 20)]
)
def test_a_command_transfers_what_the_drive_allows_and_2_mib_at_most(mdts: int, nbytes: int) -> None:
    wire = ScriptedDrive()
    wire.controller["mdts"] = mdts
    with Drive(wire) as drive:
        assert drive.max_transfer == nbytes


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [("sqes", 0x77, "64 bytes"), ("cqes", 0x33, "16 bytes"), ("cntrltype", 3, "administrative")],
)
def test_controllers_that_are_refused(field: str, value: int, why: str) -> None:
    wire = ScriptedDrive()
    wire.controller[field] = value
    with pytest.raises(errors.DriveError, match=why):
        Drive(wire)
    assert wire.closes == 1 and wire.registers[controller.CC] & 1 == 0


FORMATS: list[tuple[str, Callable[[Any], Any]]] = [
    ("8 bytes of metadata in a separate buffer", lambda n: n["lbaf"].__setitem__(0, 9 << 16 | 8)),
    ("protection information of type 1", lambda n: n.__setitem__("dps", 1)),
    ("blocks have 0 bytes", lambda n: n["lbaf"].__setitem__(0, 8 << 16)),
    ("blocks have 0 bytes", lambda n: n["lbaf"].__setitem__(0, 200 << 16)),
    ("blocks have 262144 bytes, not 512 to 131072", lambda n: n["lbaf"].__setitem__(0, 18 << 16)),
    ("shared with other controllers", lambda n: n.__setitem__("nmic", 1)),
    ("it has 0 blocks", lambda n: n.__setitem__("nsze", 0)),
    ("it has 18446744073709551615 blocks", lambda n: n.__setitem__("nsze", 2**64 - 1)),
]


@pytest.mark.parametrize(("why", "spoil"), FORMATS, ids=[f"{k}" for k in range(len(FORMATS))])
def test_formats_that_are_refused(why: str, spoil: Callable[[Any], Any]) -> None:
    wire = ScriptedDrive()
    spoil(wire.namespace)
    with Drive(wire) as drive:
        with pytest.raises(errors.DriveError, match=f"drive scripted: namespace 1 cannot be used: .*{why}") as caught:
            drive.namespace(1)
        assert caught.value.namespace == 1 and drive.failure is None
        assert drive.namespaces() == [1]  # the drive itself still works
    with pytest.raises(errors.DriveLostError):
        drive.namespaces()


def test_a_write_protected_namespace_says_so() -> None:
    wire = ScriptedDrive()
    wire.namespace["nsattr"] = 1
    with Drive(wire) as drive:
        assert not drive.namespace(1).writable


def test_what_the_host_asks_is_checked() -> None:
    with Drive(ScriptedDrive()) as drive:
        space = drive.namespace(1)
        for lba, count in ((0, 65), (-1, 2), (64, 1), (2**64, 1)):
            with pytest.raises(errors.ArgumentError, match=r"of namespace scripted/1 is .*: give an integer"):
                space.read(lba, count)
        with pytest.raises(errors.ArgumentError, match="must be whole blocks of 512"):
            space.write(0, np.zeros(100, np.uint8))
        with pytest.raises(errors.DriveError, match=r"no namespace 2: its namespaces are \[1\]"):
            drive.namespace(2)
        with pytest.raises(errors.ArgumentError):
            drive.namespace(0)
        with pytest.raises(errors.ArgumentError, match="2 to 256"):
            drive.host_queue(257)
        assert space.read(64, 0).size == 0


# -- statuses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dnr", [0, 1])
@pytest.mark.parametrize(
    "code",
    [
        nvme.INVALID_FIELD,
        nvme.LBA_OUT_OF_RANGE,
        codes.WRITE_TO_READ_ONLY_RANGE,
        nvme.UNRECOVERED_READ_ERROR,
        nvme.ABORTED_BY_HOST,
        0x4C0,
        0x7C0,
    ],
)
def test_statuses_of_every_set_are_errors_that_say_what_failed(code: int, dnr: int) -> None:
    wire = ScriptedDrive()
    with Drive(wire) as drive:
        space = drive.namespace(1)
        wire.status = {nvme.READ: nvme.status_of(code, dnr)}
        with pytest.raises(errors.DriveError) as caught:
            space.read(8, 4)
        wire.status = {}
        error = caught.value
        assert (error.drive, error.namespace, error.command) == ("scripted", 1, "read")
        assert error.status == nvme.status_of(code, dnr) and nvme.describe(error.status) in str(error)
        assert "read of 4 blocks from 8 failed" in str(error) and not isinstance(error, errors.DriveLostError)
        assert space.read(8, 4).size == 2048  # the drive keeps working


def test_a_queue_that_is_refused_leaves_nothing() -> None:
    wire = ScriptedDrive()
    with Drive(wire) as drive:
        wire.status = {controller.CREATE_SQ: codes.INVALID_QUEUE_SIZE}
        with pytest.raises(errors.DriveError, match="create I/O submission queue failed: invalid queue size"):
            drive.host_queue()
        assert wire.received_commands[-1] == (0, controller.DELETE_CQ)
        wire.status = {}
        assert [drive.host_queue().qid for _ in range(3)] == [1, 2, 3]
        with pytest.raises(errors.DriveError, match="grants 3 I/O queues, but all are in use"):
            drive.host_queue()
        drive.delete_pair(2)
        assert drive.host_queue().qid == 2


def test_only_commands_that_change_no_data_are_sent_by_themselves() -> None:
    wire = ScriptedDrive()
    with Drive(wire) as drive:
        drive.namespace(1)
        drive.delete_pair(drive.host_queue().qid)
    assert {opc for queue, opc in wire.received_commands if queue == 0} == {0, 1, 4, 5, 6, 9}
    assert not [opc for queue, opc in wire.received_commands if queue]


# -- answers that break the protocol ----------------------------------------------------------------------------------


def wrong(field: str, by: int) -> Callable[[Any], bool]:
    def bend(completion: Any) -> bool:
        completion[field] = (int(completion[field]) + by) % 65536
        return True

    return bend


@pytest.mark.parametrize("by", [1, 5, 45, 65535])
@pytest.mark.parametrize("field", ["cid", "sqid", "sqhd"])
def test_a_wrong_answer_loses_the_drive(field: str, by: int) -> None:
    wire = ScriptedDrive()
    with Drive(wire) as drive:
        space = drive.namespace(1)
        space.read(0, 1)
        wire.bend = wrong(field, by)
        with pytest.raises(errors.DriveLostError, match=f"completed read with .*{field}.*specification") as caught:
            space.read(0, 1)
        assert (caught.value.namespace, caught.value.command) == (1, "read")
        wire.bend = lambda completion: True
        for call in (lambda: space.read(0, 1), drive.namespaces, drive.host_queue, lambda: drive.delete_pair(1)):
            with pytest.raises(errors.DriveLostError, match="completed read with"):
                call()
    # close() has disabled the controller nevertheless.
    assert wire.resets == 0 and wire.registers[controller.CC] & 1 == 0


def test_a_stale_phase_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warpwell.drives.drive.COMMAND_SECONDS", 0.1)
    wire = ScriptedDrive()
    with Drive(wire) as drive:
        wire.bend = wrong("status", 1)
        with pytest.raises(errors.DriveLostError, match=r"identify was not completed within 0.1 s"):
            drive.namespaces()


def test_an_answer_that_never_comes_is_a_loss_and_memory_waits_for_the_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warpwell.drives.drive.COMMAND_SECONDS", 0.1)
    wire = ScriptedDrive()
    drive = Drive(wire)
    wire.bend = lambda completion: False
    with pytest.raises(errors.DriveLostError, match="not completed"):
        drive.namespaces()
    before = drive.arena.allocate(4096).address  # the block is dropped at once
    assert drive.arena.allocate(4096).address != before  # its memory is quarantined
    wire.obeys = False  # the controller cannot be disabled either
    drive.timeout = 0.05
    drive.close()
    assert wire.resets == 1 and wire.closes == 1
    found = {drive.arena.allocate(4096).address for _ in range(3)}
    assert before in found or len(found) == 1


def test_fatal_status_and_registers_of_ones_lose_the_drive() -> None:
    for status, why in ((2, r"fatal error \(CSTS 0x3\)"), (controller.ALL_ONES, "it was removed")):
        wire = ScriptedDrive()
        drive = Drive(wire)
        drive.timeout = 0.05
        wire.bend = lambda completion: False
        wire.registers[controller.CSTS] |= status
        with pytest.raises(errors.DriveLostError, match=why):
            drive.namespaces()
        wire.registers[controller.CSTS] = 0
        drive.close()


def test_a_drive_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warpwell.drives.drive.MIN_START_SECONDS", 0.1)
    wire = ScriptedDrive(cap=CAP & ~(0xFF << 24))
    wire.obeys = False
    with pytest.raises(errors.DriveLostError, match=r"not ready 0.1 s after it was enabled"):
        Drive(wire)
    assert wire.closes == 1
    wire = ScriptedDrive()
    wire.registers[controller.VS] = controller.ALL_ONES
    with pytest.raises(errors.DriveLostError, match="all ones"):
        Drive(wire)


def test_rings_wrap() -> None:
    """The phase of an entry changes each time round; one that does not is an old answer."""
    wire = ScriptedDrive()
    with Drive(wire) as drive:
        queue = drive.host_queue(2)
        command = np.zeros((), nvme.COMMAND)
        command["nsid"] = 1
        assert [queue.run(command, "flush", seconds=HANG_SECONDS).status for _ in range(9)] == [0] * 9
        for _ in range(100):
            assert drive.namespaces() == [1]


@given(
    st.lists(st.sampled_from(["read", "write", "flush", "queue", "delete", "identify"]), max_size=30),
    st.integers(0, 2**32),
)
def test_any_sequence_of_calls(calls: list[str], seed: int) -> None:
    """Contents equal an array's, and the queues are the created ones that were not deleted."""
    rng = np.random.default_rng(seed)
    with Drive(ScriptedDrive()) as drive:
        space = drive.namespace(1)
        model, queues = np.zeros(64 * 512, np.uint8), set()
        space.flush()  # creates the host's queue
        for call in calls:
            lba = int(rng.integers(64))
            count = int(rng.integers(65 - lba))
            part = slice(512 * lba, 512 * (lba + count))
            if call == "read":
                assert np.array_equal(space.read(lba, count), model[part])
            elif call == "write":
                model[part] = rng.integers(0, 256, 512 * count, dtype=np.uint8)
                space.write(lba, model[part])
            elif call == "queue" and len(queues) < 2:
                queue = drive.host_queue(int(rng.integers(2, 257)))
                assert queue.qid not in queues
                queues.add(queue.qid)
            elif call == "delete" and queues:
                drive.delete_pair(queues.pop())
            elif call == "identify":
                assert drive.namespaces() == [1]
            else:
                space.flush()


# -- memory -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 40000), max_size=60), st.integers(0, 2**32))
def test_the_arena_gives_out_each_byte_once_and_zeroed(sizes: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    arena = DmaArena(1 << 20)
    held = []
    for size in sizes:
        if held and rng.random() < 0.4:
            held.pop(int(rng.integers(len(held)))).free()
        block = arena.allocate(size)
        assert block.address % 4096 == 0
        assert arena.address <= block.address <= block.address + block.nbytes <= arena.address + arena.nbytes
        assert not block.view(np.dtype(np.uint8)).any()
        block.view(np.dtype(np.uint8))[:] = 255
        held.append(block)
        ranges = sorted((b.address, b.address + b.nbytes) for b in held)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))
    held.clear()
    block = None
    full_block = arena.allocate(1 << 20)  # all memory was freed, and merged to one block
    assert full_block.address == arena.address and not full_block.words.any()
    full_block.free()
    arena.close()
    with pytest.raises(errors.ClosedError):
        arena.allocate(1)


def test_memory_for_a_gpu_is_locked_as_long_as_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[tuple[int, int]] = []

    def pin(address: int, nbytes: int) -> Callable[[], object] | None:
        if nbytes > 1 << 16:
            return None  # as CUDA refuses
        locked.append((address, nbytes))
        return lambda: locked.remove((address, nbytes))

    monkeypatch.setattr("warpwell.drives.arena.pin", pin)
    arena = DmaArena(1 << 20)
    memory = arena.memory("cuda")
    first, second = memory.allocate_shared(5000), memory.allocate_shared(16)
    assert locked == [(first.address, 8192), (second.address, 4096)]
    assert memory.device == "cuda" and not first.view(np.dtype(np.uint8)).any()
    address = first.address
    first.free()
    assert locked == [(second.address, 4096)]
    with pytest.raises(errors.DriveError, match="CUDA does not page-lock 70000 bytes"):
        memory.allocate_shared(70000)
    gc.collect()
    assert memory.allocate_shared(5000).address == address  # the refused memory was freed, too


def test_an_arena_lies_where_a_drive_can_reach_it() -> None:
    arena = DmaArena(1 << 16, ranges=[(0, 0xFFFF), (0x200_0000_0000, 0x200_FFFF_FFFF)])
    low_arena = DmaArena(1 << 16, ranges=[(0, 0xFFFF), (0x200_0000_0000, 0x200_FFFF_FFFF)])
    assert {a.address >> 32 for a in (arena, low_arena)} == {0x200} and arena.address != low_arena.address
    with pytest.raises(errors.DriveError, match="choose a smaller arena"):
        DmaArena(1 << 20, ranges=[(0x200_0000_0000, 0x200_0000_FFFF)])
    with pytest.raises(errors.ArgumentError, match="power of two"):
        DmaArena(3 << 20)
    with pytest.raises(errors.DriveError, match="no 131072 in one piece"):
        arena.allocate(1 << 17)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_gets_a_copy_and_no_drive() -> None:
    drive = Drive(ScriptedDrive())
    space = drive.namespace(1)
    block = drive.arena.allocate(4096)
    block.words[:] = 7
    child = os.fork()
    if not child:
        code = 1
        try:
            block.words[:] = 9  # the child's own copy of the memory
            for call in (lambda: space.read(0, 1), drive.namespaces, lambda: drive.arena.allocate(1)):
                with pytest.raises(errors.ForkError, match="open another drive here"):
                    call()
            drive.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert (block.words == 7).all() and space.read(0, 1).size == 512
    drive.close()


def test_a_flush_that_fails_loses_the_drive_for_the_rings() -> None:
    wire = ScriptedDrive()
    with Drive(wire) as drive:
        medium = NamespaceMedium(drive.namespace(1), writable=True)
        medium.sync()
        wire.status[nvme.FLUSH] = 0x280
        with pytest.raises(errors.DriveLostError, match="since the last flush may be lost"):
            medium.sync()
        wire.status.clear()
        with pytest.raises(errors.DriveLostError):  # the drive would report success now
            medium.sync()


# -- started again after a loss ---------------------------------------------------------------------------------------


def lost_drive() -> tuple[ScriptedDrive, Drive]:
    wire = ScriptedDrive()
    drive = Drive(wire)
    drive.namespace(1).write(3, np.full(512, 7, np.uint8))
    wire.fail("of a test")
    return wire, drive


def test_a_drive_is_started_again() -> None:
    wire, drive = lost_drive()
    with drive:
        address = drive.arena.allocate(4096).address  # freed while it was lost
        drive.recover()
        assert (drive.failure, wire.generation, wire.resets, wire.closes) == (None, 1, 0, 0)
        assert (drive.namespace(1).read(3, 1) == 7).all() and drive.spare_queues == 2
        assert address in {drive.arena.allocate(4096).address for _ in range(200)}
        wire.fail("too late", 0)  # reported by a thread that used the old controller
        assert drive.failure is None
    with pytest.raises(errors.ClosedError):
        drive.recover()


def test_a_function_is_reset_where_the_controller_cannot_be_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    wire, drive = lost_drive()
    drive.timeout = 0.05
    wire.obeys = False
    with drive:
        with pytest.raises(errors.DriveLostError, match="not disabled within"):
            drive.recover()
        assert drive.failure is not None and "of a test" in str(drive.failure) and wire.generation == 0
        calls: list[str] = []

        def reset() -> bool:
            calls.append("reset")
            wire.obeys, wire.registers[controller.CC], wire.registers[controller.CSTS], wire._rings = True, 0, 0, {}
            return True

        monkeypatch.setattr(wire, "reset_function", reset)
        monkeypatch.setattr(wire, "restore", lambda: calls.append("restore"))
        drive.recover()
        assert calls == ["restore", "reset", "restore"] and drive.failure is None
        assert (drive.namespace(1).read(3, 1) == 7).all()


def test_another_drive_that_comes_back_is_refused() -> None:
    wire, drive = lost_drive()
    with drive:
        wire.controller["sn"] = b"another"
        wire.controller["mdts"] = 1
        with pytest.raises(
            errors.DriveLostError, match=r"a different drive answers .*serial is 'another'.*max_transfer is 8192"
        ):
            drive.recover()
        assert drive.failure is not None and drive.serial == "" and drive.max_transfer > 8192
        held = drive.arena.allocate(4096).address  # it is enabled: freed memory is quarantined
        assert held not in {drive.arena.allocate(4096).address for _ in range(20)}
        wire.controller["sn"], wire.controller["mdts"] = b"", 0
        medium = NamespaceMedium(Drive(foreign := ScriptedDrive()).namespace(1), writable=True)
        drive.recover()
        assert drive.failure is None
    foreign.fail("of a test")
    medium.namespace.drive.recover()
    foreign.namespace["nsze"] = 63
    with pytest.raises(errors.DriveError, match=r"is a different one after the restart .blocks is 63, but was 64"):
        medium.renew()
    medium.namespace.drive.close()


def test_a_drive_that_somebody_does_not_leave_stays_lost() -> None:
    class Guest:
        is_quiet = False

        def quiesce(self) -> bool:
            return self.is_quiet

    guest = Guest()
    wire, drive = lost_drive()
    with drive:
        drive.serve(guest)
        for _ in range(2):
            with pytest.raises(errors.DriveError, match="a thread still uses it"):
                drive.recover()
        assert drive.failure is not None and wire.registers[controller.CC] & 1
        guest.is_quiet = True
        with drive.held(), pytest.raises(errors.DriveError, match="signal's handler"):
            drive._in_io = True
            try:
                drive.recover()
            finally:
                drive._in_io = False
        drive.recover()
        assert drive.failure is None
