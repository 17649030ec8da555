"""Small crash campaigns on key-value logs, and planted faults that they must find."""

import contextlib
import errno
import importlib
import json
import os
import random
import subprocess
import sys
import tempfile

import pytest
from tests.harness.until import HANG_SECONDS

from lab.campaigns import kv_crash
from lab.campaigns.crash.kv_faults import Verdict, judge
from lab.campaigns.crash.kv_flips import flip_campaign
from lab.campaigns.crash.kv_load import Script, append_one, contents, write_script
from lab.campaigns.crash.power import Disk, Event, RecordingFiles
from lab.campaigns.kv_crash import Counts, failed_calls, interrupted_calls, power_cuts
from warpwell import errors
from warpwell.kv.log.files import Guard
from warpwell.kv.log.format import COMMIT
from warpwell.kv.log.journal import Floor, Journal
from warpwell.kv.log.log import Log

# A forked child of a process with threads only runs the load and ends.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.fixture
def memory():
    """Yield a folder in memory: a killed process and a simulated disk do not need a real disk with a slow fsync."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        yield folder


@pytest.fixture
def short(monkeypatch):
    """Scripts of fewer steps."""
    write = kv_crash.write_script
    monkeypatch.setattr(kv_crash, "write_script", lambda seed, durability: write(seed, 18, durability, keys=8))


CHILD_PROGRAM = """
import json, sys
from dataclasses import asdict
from lab.campaigns import kv_crash
write = kv_crash.write_script
if sys.argv[2] == "short":
    kv_crash.write_script = lambda seed, durability="commit": write(seed, 18, durability, keys=8)
print(json.dumps(asdict(eval(f"kv_crash.{sys.argv[3]}", {"kv_crash": kv_crash, "memory": sys.argv[1]}))))
"""


def run_in_child(call: str, memory: str, script: str = "long") -> Counts:
    """Run a campaign of kills in a process of its own: to fork this one, with all that was compiled, takes long."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD_PROGRAM, memory, script, call],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Counts(**json.loads(done.stdout))


def show(outcome: object) -> str:
    return "\n".join([repr(outcome), *getattr(outcome, "details", [])])


@pytest.mark.slow
def test_random_kills_lose_nothing(memory):
    outcome = run_in_child("random_kills(40, 1, memory)", memory)
    assert outcome.runs == 40 and outcome.interrupted > 0 and outcome.acknowledged > 0
    assert outcome.wrong == 0, show(outcome)


@pytest.mark.slow
def test_kills_at_every_call_lose_nothing(memory):
    outcome = run_in_child("kills_at_every_call(2, memory)", memory, "short")
    assert outcome.runs > 100 and outcome.interrupted > outcome.runs - 10
    assert outcome.wrong == 0, show(outcome)


def test_power_cuts_lose_nothing(memory):
    outcome = power_cuts(100, 3, memory)
    assert outcome.acknowledged > 0
    assert outcome.wrong == 0, show(outcome)


@pytest.mark.quick("28")
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_failed_calls_lose_nothing(memory, short, code):
    outcome = failed_calls(4, memory, code)
    assert outcome.runs > 30
    assert outcome.wrong == 0, show(outcome)


@pytest.mark.slow
def test_interrupted_calls_lose_nothing(memory, short):
    outcome = interrupted_calls(9, memory)
    assert outcome.runs > 60
    assert outcome.wrong == 0, show(outcome)


@pytest.mark.slow
def test_a_close_that_ctrl_c_interrupts_is_found(memory, short, monkeypatch):
    monkeypatch.setattr("warpwell.kv.records.uninterrupted", contextlib.nullcontext)
    with pytest.raises(errors.SharingError, match="already open"):  # the interrupted close() keeps the lock
        interrupted_calls(9, memory)


def test_flipped_bits_are_noticed(memory):
    outcome = flip_campaign(5, memory, stride=97, value_share=0.001)
    assert outcome.header_bytes > 100 and outcome.value_bytes > 2
    assert outcome.refused > 0 and outcome.found_reading > 0
    assert outcome.wrong == 0, show(outcome)


class Forgetful(RecordingFiles):
    """Does not sync files with a name that ends so, or folders."""

    def __init__(self, folder: str, forgets: str) -> None:
        super().__init__(folder)
        self.forgets = forgets

    def sync(self, fd: int) -> None:
        if not os.readlink(f"/proc/self/fd/{fd}").endswith(self.forgets):
            super().sync(fd)

    def sync_folder(self, path: str) -> None:
        if self.forgets != "/":
            super().sync_folder(path)


@pytest.mark.quick(".jnl")
@pytest.mark.parametrize("forgets", [".val", ".jnl", ".idx", "MANIFEST.new", "/"])
def test_a_forgotten_sync_is_found(memory, forgets):
    assert power_cuts(60, 6, memory, lambda folder: Forgetful(folder, forgets)).wrong > 0


def test_a_floor_before_the_journal_is_found(memory, monkeypatch):
    write = Journal.write
    floors = []
    init = Floor.__init__
    monkeypatch.setattr(Floor, "__init__", lambda self, *a: (init(self, *a), floors.append(self))[0])

    def early(self, records, *, last, **options):
        write(self, records, last=last, **options)
        if last:
            floors[-1].raise_to(self.position, self.salt, 0)

    monkeypatch.setattr(Journal, "write", early)
    assert power_cuts(200, 7, memory).refused > 0


def test_a_mark_of_values_that_are_not_in_segments_is_found(memory, monkeypatch):
    raise_to = Floor.raise_to
    monkeypatch.setattr(
        Floor, "raise_to", lambda self, position, salt, in_segments: raise_to(self, position, salt, position.seq)
    )
    assert power_cuts(60, 6, memory).wrong > 0


@pytest.mark.slow
def test_an_fsync_that_is_tried_again_is_found(memory, short, monkeypatch):
    def again(self, call):
        try:
            call()
        except OSError:
            call()

    monkeypatch.setattr(Guard, "sync", again)
    outcome = failed_calls(8, memory, errno.EIO)
    assert outcome.lost + outcome.refused + outcome.holes + outcome.wrong_bytes > 0


def recorded(memory: str, seed: int) -> tuple[Script, list[Event]]:
    """Return a load and its calls."""
    script, folder = write_script(seed), os.path.join(memory, "live", "store.kv")
    os.mkdir(os.path.dirname(folder))
    return script, kv_crash._record(script, RecordingFiles(folder), folder)


@pytest.mark.parametrize("seed", [4, 5])  # without and with shards
def test_each_change_of_a_name_may_be_the_only_one_that_survives(memory, seed):
    """Of all calls since the last syncs, a power cut leaves one that creates, replaces or deletes a file, or none."""
    script, events = recorded(memory, seed)
    count = 0
    for at, event in enumerate(events, 1):
        if event.kind in ("create", "rename", "unlink", "mark"):
            done, durable = (kv_crash._last_mark(events[:at], name) for name in ("done", "durable"))
            os.mkdir(f"{memory}/{at}")
            Disk(events[:at]).drop(f"{memory}/{at}/store.kv", None if event.kind == "mark" else event)
            verdict = judge(f"{memory}/{at}/store.kv", script, durable, done + 1, write=False)
            assert not isinstance(verdict, Verdict), f"{event.kind} of {event.target or event.name}: {verdict}"
            count += 1
    assert count > 50


@pytest.mark.parametrize("seed", [4, 5])
def test_a_recovery_makes_a_rename_of_a_killed_writer_durable(memory, seed):
    _, events = recorded(memory, seed)
    renames = [at for at, event in enumerate(events, 1) if event.target == "MANIFEST"]
    assert len(renames) > 3
    for at in renames[1:]:  # the first one creates the store
        for name in ("killed", "cut"):
            os.makedirs(f"{memory}/{at}/{name}")
        Disk(events[:at]).keep(f"{memory}/{at}/killed/store.kv")
        files = RecordingFiles(f"{memory}/{at}/killed/store.kv", events[:at])
        with Log.open(files.folder, writable=True, files=files) as log:
            held = contents(log)
            append_one(log, b"second", b"value")
            log.commit()
            Disk(files.events).drop(f"{memory}/{at}/cut/store.kv")
        with Log.open(f"{memory}/{at}/cut/store.kv", writable=False) as log:
            assert contents(log) == {**held, b"second": b"value"}, f"call {at}"


def test_the_disk_keeps_what_was_synced_and_may_drop_the_rest(tmp_path):
    folder = str(tmp_path / "live")
    files = RecordingFiles(folder)
    files.mkdir(folder)
    files.sync_folder(str(tmp_path))
    fd = files.create(f"{folder}/a")
    files.pwrite(fd, b"x" * 1024, 0)
    files.sync(fd)
    files.sync_folder(folder)
    files.pwrite(fd, b"y" * 1024, 0)
    files.close(fd)
    os.close(os.open(f"{folder}/b", os.O_CREAT))  # creates b without the recorder
    states = set()
    for seed in range(200):
        left = tmp_path / f"left{seed}"
        Disk(files.events).cut(str(left), random.Random(seed))
        data = (left / "a").read_bytes()
        assert len(data) == 1024 and set(data) <= set(b"xy") and not (left / "b").exists()
        states.add((data[:512] == b"y" * 512, data[512:] == b"y" * 512))
    assert states == {(False, False), (True, False), (False, True), (True, True)}


def test_a_salvage_that_takes_torn_groups_is_found(memory, monkeypatch):
    monkeypatch.setattr(kv_crash, "_SALVAGE_EVERY", 1)
    monkeypatch.setattr(
        importlib.import_module("warpwell.kv.salvage"),  # the package has the function of this name
        "_last_committed",
        lambda journal, *_: int(journal.records["seq"][journal.records["flags"] & COMMIT != 0].max(initial=0)),
    )
    assert power_cuts(60, 3, memory).misjudged > 0


def test_a_verify_that_misses_a_damaged_value_is_found(memory, monkeypatch):
    monkeypatch.setattr(kv_crash, "_SALVAGE_EVERY", 1)
    monkeypatch.setattr("warpwell.kv.log.recovery._check_values", lambda *_: None)
    assert power_cuts(10, 3, memory).misjudged > 0
