"""Crash campaigns on the log of key-value stores: ``python -m lab campaign kv_crash``.

Kills at random moments, a kill at every system call, power cuts, failed calls, and flipped bits. The seed is printed.
The same seed repeats the scripts, cuts and flips, but not the exact moments of random kills.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import mmap
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

import numpy as np

from warpwell import errors
from warpwell.kv.log.files import Files
from warpwell.kv.log.log import Log

from .crash.kv_faults import (
    MOMENTS,
    FailingFiles,
    InterceptedFiles,
    InterruptingFiles,
    KillingFiles,
    Verdict,
    judge,
)
from .crash.kv_flips import Flips, flip_campaign
from .crash.kv_load import Run, Script, State, append_one, contents, index_of, padded, write_script
from .crash.power import Disk, Event, RecordingFiles

DURABILITIES = ("commit", "commit", "commit", "none", "always")
_CUTS_A_SCRIPT = 25
_KILLS_A_SCRIPT = 50
_SALVAGE_EVERY = 10
"""Number of kills or cuts of which one is followed by two salvages."""


@dataclass
class Counts:
    """Outcome of a campaign.

    Attributes
    ----------
    runs : int
    lost, holes, wrong_bytes, refused : int
        Runs after which an acknowledged put was missing, the contents were not a prefix of the trace, the store held
        bytes that were never put, or it did not open.
    failed : int
        Runs that ended in an unexpected error.
    misjudged : int
        Runs after which `verify` reported damage of a store that recovered, or did not report damage, or `salvage` did
        not bring what the store had.
    acknowledged : int
        Committing steps that were acknowledged, in all runs.
    interrupted : int
        Runs that crashed before the end of the script.
    seconds : float
    details : list of str
        The first 10 faulty runs.
    """

    runs: int = 0
    lost: int = 0
    holes: int = 0
    wrong_bytes: int = 0
    refused: int = 0
    failed: int = 0
    misjudged: int = 0
    acknowledged: int = 0
    interrupted: int = 0
    seconds: float = 0.0
    details: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> int:
        """Runs with any fault."""
        return self.lost + self.holes + self.wrong_bytes + self.refused + self.failed + self.misjudged

    def add(self, verdict: object, description: str) -> None:
        """Count one run."""
        self.runs += 1
        if isinstance(verdict, Verdict):
            name = {"hole": "holes", "wrong bytes": "wrong_bytes"}.get(verdict.kind, verdict.kind)
            setattr(self, name, getattr(self, name) + 1)
            if len(self.details) < 10:
                self.details.append(f"{description}: {verdict.kind}: {verdict.detail}")


# -- kills ----------------------------------------------------------------------------------------------------


def random_kills(count: int, seed: int, base: str) -> Counts:
    """Kill a process at a random moment of its load, `count` times."""
    rng, counts, start = random.Random(seed), Counts(), time.monotonic()
    while counts.runs < count:
        script = write_script(rng.getrandbits(32), durability=rng.choice(DURABILITIES))
        duration = _duration(script, base)
        for _ in range(min(_KILLS_A_SCRIPT, count - counts.runs)):
            _one_kill(script, counts, base, Files(), rng.uniform(0, 1.05 * duration))
    counts.seconds = time.monotonic() - start
    return counts


def kills_at_every_call(seed: int, base: str, scripts: int = 1) -> Counts:
    """Kill a process before, within and after every system call of a load that changes the disk."""
    rng, counts, start = random.Random(seed), Counts(), time.monotonic()
    for k in range(scripts):
        script = write_script(rng.getrandbits(32), durability=DURABILITIES[-k % len(DURABILITIES)])
        for number in range(1, count_calls(script, base) + 1):
            for moment in MOMENTS:
                _one_kill(script, counts, base, KillingFiles(number, moment), None)
    counts.seconds = time.monotonic() - start
    return counts


def _one_kill(script: Script, counts: Counts, base: str, files: Files, after: float | None) -> None:
    with _folder(base) as folder, mmap.mmap(-1, mmap.PAGESIZE) as shared:
        _note(shared, -1)
        status = _child(lambda: _load(script, folder, files, shared), after)
        acknowledged = int.from_bytes(shared[:8], "little", signed=True)
        counts.acknowledged += max(acknowledged, 0)
        counts.interrupted += os.WIFSIGNALED(status)
        moment = f"{getattr(files, 'moment', '')} {getattr(files, 'number', after)}"
        description = f"{script.durability}, {script.shards} shards, killed {moment}"
        if os.WIFEXITED(status) and os.WEXITSTATUS(status):
            counts.failed += 1
        salvage = counts.runs % _SALVAGE_EVERY == 0
        counts.add(judge(folder, script, acknowledged, acknowledged + 1, salvage=salvage), description)


def _load(script: Script, folder: str, files: Files, shared: mmap.mmap) -> None:
    Run(script, folder, files, lambda done, durable: _note(shared, done)).all()


def _note(shared: mmap.mmap, done: int) -> None:
    shared[:8] = done.to_bytes(8, "little", signed=True)


def _child(body: Callable[[], None], after: float | None) -> int:
    """Run `body` in a forked process, kill it after `after` seconds, and return its wait status."""
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        code = 1
        try:
            body()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    if after is not None:
        time.sleep(after)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return os.waitpid(process, 0)[1]


def _duration(script: Script, base: str) -> float:
    with _folder(base) as folder:  # compiles the native code, so that children do not
        Run(script, folder, Files(), lambda done, durable: None).all()
    with _folder(base) as folder:
        start = time.monotonic()
        status = _child(lambda: Run(script, folder, Files(), lambda done, durable: None).all(), None)
        if status:
            raise RuntimeError("a load fails without being killed")
        return time.monotonic() - start


def count_calls(script: Script, base: str) -> int:
    """Return how many calls of a load change the disk."""
    with _folder(base) as folder:
        files = InterceptedFiles(RecordingFiles(folder))
        Run(script, folder, files, lambda done, durable: None).all()
        return files.count


# -- power cuts -----------------------------------------------------------------------------------------------


def power_cuts(count: int, seed: int, base: str, recorder: Callable[[str], RecordingFiles] = RecordingFiles) -> Counts:
    """Cut the power at random calls of loads.

    In some runs the power fails again after the recovery. In others the process is killed at the call, and the power
    fails only after the recovery. `recorder` executes the system calls of the loads; a test passes a recorder that
    omits syncs, to show that the campaign detects them.
    """
    rng, counts, start = random.Random(seed), Counts(), time.monotonic()
    while counts.runs < count:
        script = write_script(rng.getrandbits(32), durability=rng.choice(DURABILITIES))
        with _folder(base) as folder:
            events = _record(script, recorder(folder), folder)
        for _ in range(min(_CUTS_A_SCRIPT, count - counts.runs)):
            _one_cut(script, events, rng, counts, base)
    counts.seconds = time.monotonic() - start
    return counts


def _record(script: Script, files: RecordingFiles, folder: str) -> list[Event]:
    def acknowledge(done: int, durable: int) -> None:
        files.mark("done", done)
        files.mark("durable", durable)

    Run(script, folder, files, acknowledge).all()
    return files.events


def _one_cut(script: Script, events: list[Event], rng: random.Random, counts: Counts, base: str) -> None:
    at = rng.randint(0, len(events))
    acknowledged, reached = _last_mark(events[:at], "durable"), _last_mark(events[:at], "done") + 1
    counts.acknowledged += max(acknowledged, 0)
    counts.interrupted += at < len(events)
    before = rng.choice(("", "", "cut", "kill"))
    description = f"{script.durability}, {script.shards} shards, {before} after event {at} of {len(events)}, power cut"
    with _folder(base) as folder, _folder(base) as second:
        disk = Disk(events[:at])
        if before == "kill":
            disk.keep(folder)
            acknowledged = reached - 1
        else:
            disk.cut(folder, rng)
        salvage = counts.runs % _SALVAGE_EVERY == 0
        verdict: object = judge(folder, script, acknowledged, reached, write=before == "", salvage=salvage)
        if before and isinstance(verdict, dict):
            files = RecordingFiles(folder, events[:at] if before == "kill" else None)
            verdict = _cut_recovery(script.durability, verdict, files, second, rng)
        counts.add(verdict, description)


def _cut_recovery(durability: str, held: State, files: RecordingFiles, second: str, rng: random.Random) -> object:
    """Recover a store, put records, and cut the power at a call after the recovery."""
    after = {**held, b"second": rng.randbytes(rng.randint(0, 9000))}
    with Log.open(files.folder, writable=True, files=files) as log:
        before = len(files.events)
        if contents(log) != held:
            return Verdict("hole", "a writer recovers other records than a reader")
        append_one(log, b"second", after[b"second"])
        log.commit()
        committed = len(files.events) if durability != "none" else sys.maxsize
        if rng.random() < 0.5:
            locations = {**index_of(log), b"second": append_one(log, b"second", after[b"second"])}
            keys = padded(list(after))[0].view(np.int64)
            log.snapshot(np.column_stack([keys, np.array([locations[key] for key in after], np.int64)]))
            committed = min(committed, len(files.events))
    at = rng.randint(before, len(files.events))
    acknowledged = int(at >= min(committed, len(files.events)))
    Disk(files.events[:at]).cut(second, rng)
    return judge(second, Script([("one", b"second", after[b"second"])], [held, after], durability), acknowledged, 1)


def _last_mark(events: list[Event], name: str) -> int:
    return next((e.inode for e in reversed(events) if e.kind == "mark" and e.name == name), -1)


# -- failed and interrupted calls -----------------------------------------------------------------------------


def failed_calls(seed: int, base: str, code: int, scripts: int = 1) -> Counts:
    """Fail each call of a load, with EIO or ENOSPC, and continue; then check the store, and crash it at random."""

    def fail(recording: RecordingFiles, number: int, _: str) -> FailingFiles:
        return FailingFiles(recording, number, code)

    return _faults(seed, base, scripts, fail, [errno.errorcode[code]], code)


def interrupted_calls(seed: int, base: str, scripts: int = 1) -> Counts:
    """Send SIGINT at each call of a load, and continue; then check the store, and crash it at random."""
    return _faults(seed, base, scripts, InterruptingFiles, ["before", "after"], 0)


def _faults(
    seed: int,
    base: str,
    scripts: int,
    make_files: Callable[[RecordingFiles, int, str], FailingFiles | InterruptingFiles],
    moments: list[str],
    code: int,
) -> Counts:
    rng, counts, start = random.Random(seed), Counts(), time.monotonic()
    for k in range(scripts):
        script = write_script(rng.getrandbits(32), durability=DURABILITIES[-k % len(DURABILITIES)])
        for number in range(1, count_calls(script, base) + 1):
            for moment in moments:
                with _folder(base) as folder:
                    recording = RecordingFiles(folder)
                    files = make_files(recording, number, moment)
                    verdict = _verdict_on_fault(script, recording, files, code, rng, counts, base)
                description = f"{script.durability}, {script.shards} shards, {moment} at call {number} ({files.failed})"
                counts.add(verdict, description)
    counts.seconds = time.monotonic() - start
    return counts


def _verdict_on_fault(
    script: Script,
    recording: RecordingFiles,
    files: FailingFiles | InterruptingFiles,
    code: int,
    rng: random.Random,
    counts: Counts,
    base: str,
) -> object:
    def acknowledge(done: int, durable: int) -> None:
        recording.mark("done", done)
        recording.mark("durable", durable)

    run = Run(script, recording.folder, files, acknowledge)
    problem = _run_with_failure(run, code)
    events = list(recording.events)
    done = _last_mark(events, "done")
    counts.acknowledged += max(done, 0)
    counts.interrupted += run.done < len(script.steps)
    if problem is not None:
        return Verdict("failed", problem)
    verdict: object = _judge_crash(script, events, rng, base)
    created = next((k for k, event in enumerate(events) if event.kind == "mark"), len(events))
    for at in (rng.randint(created, len(events)), rng.randint(created, len(events))):
        if not isinstance(verdict, Verdict):
            verdict = _judge_crash(script, events[:at], rng, base)
        # After a failed sync the disk lacks data that a process sees.
        if not isinstance(verdict, Verdict) and files.failed != "sync":
            verdict = _judge_crash(script, events[:at], None, base)
    if not isinstance(verdict, Verdict):
        verdict = judge(recording.folder, script, done, done + 1, write=False)
    if isinstance(verdict, dict):
        verdict = _reopen_and_cut(script.durability, verdict, recording, rng, base)
    return verdict


def _judge_crash(script: Script, events: list[Event], rng: random.Random | None, base: str) -> object:
    """Judge the store that is left if the power fails after some calls, or, without `rng`, if the process is killed."""
    done, durable = _last_mark(events, "done"), _last_mark(events, "durable")
    with _folder(base) as folder:
        if rng is None:
            Disk(events).keep(folder)
        else:
            Disk(events).cut(folder, rng)
        return judge(folder, script, done if rng is None else durable, done + 1)


def _reopen_and_cut(durability: str, held: State, recording: RecordingFiles, rng: random.Random, base: str) -> object:
    """Recover on a disk that has lost pages and reports no second error, and cut the power after the recovery."""
    with Log.open(recording.folder, writable=True, files=recording) as log:
        if contents(log) != held:
            return Verdict("hole", "a writer recovers other records than a reader")
    with _folder(base) as left:
        Disk(recording.events).cut(left, rng)
        return judge(left, Script([], [held], durability), 0, 0)


def _run_with_failure(run: Run, code: int) -> str | None:
    """Execute all steps, and retry after a full disk or an interrupt; return the problem, or None."""
    for _ in range(4):
        try:
            run.all()
            return None
        except KeyboardInterrupt:
            if code:
                raise
            continue
        except errors.StorageFullError:
            if code != errno.ENOSPC:
                return "EIO was reported as a full disk"
        except errors.StoreFailedError:
            return _check_poisoned(run)
        except OSError as error:  # creating or opening failed: it left nothing behind, and can be retried
            if run.records is not None:
                return f"a bare OSError: {error}"
        if not run.created and os.listdir(os.path.dirname(run.folder)):
            return "a creation that failed left something behind"
    return "the load does not continue after a full disk"


def _check_poisoned(run: Run) -> str | None:
    records = run.records
    if records is None:  # closing it failed
        return None
    for attempt in (lambda: records.put_one(b"k", b"v", False), records.commit, records.log.roll):
        try:
            attempt()
        except errors.StoreFailedError:
            continue
        except errors.ClosedError:
            return None
        return "a store accepts writes after a failed write"
    records.close()
    return None


# -- command line ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _folder(base: str) -> Iterator[str]:
    """Yield the path of a folder that does not exist, and remove the folder afterwards."""
    outer = tempfile.mkdtemp(dir=base)
    try:
        yield os.path.join(outer, "store.kv")
    finally:
        shutil.rmtree(outer, ignore_errors=True)


def main(argv: list[str] | None = None) -> int:
    """Run campaigns and print their outcomes; return 1 if a run was faulty."""
    parser = argparse.ArgumentParser(prog="python -m lab campaign kv_crash", description=__doc__)
    parser.add_argument("--kills", type=int, default=0, metavar="N", help="kills at random moments")
    parser.add_argument("--every-call", action="store_true", help="a kill before, within and after every call")
    parser.add_argument("--cuts", type=int, default=0, metavar="N", help="power cuts")
    parser.add_argument("--faults", action="store_true", help="EIO and ENOSPC at every call")
    parser.add_argument("--interrupts", action="store_true", help="SIGINT at every call")
    parser.add_argument("--flips", action="store_true", help="flip every header byte and a sample of value bytes")
    parser.add_argument("--scripts", type=int, default=2, help="loads for --every-call, --faults and --interrupts")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--folder", default=None, help="folder of the stores (default: in memory)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    seed = options.seed if options.seed is not None else random.SystemRandom().getrandbits(32)
    if not options.json:
        print(f"seed {seed}")
    base = options.folder or ("/dev/shm" if os.path.isdir("/dev/shm") else None)
    outcomes: dict[str, Counts | Flips] = {}
    with tempfile.TemporaryDirectory(prefix="kv_crash-", dir=base) as folder:
        campaigns: list[tuple[str, bool, Callable[[], Counts | Flips]]] = [
            ("random kills", options.kills > 0, lambda: random_kills(options.kills, seed, folder)),
            ("kills at every call", options.every_call, lambda: kills_at_every_call(seed, folder, options.scripts)),
            ("power cuts", options.cuts > 0, lambda: power_cuts(options.cuts, seed, folder)),
            ("EIO at every call", options.faults, lambda: failed_calls(seed, folder, errno.EIO, options.scripts)),
            ("ENOSPC at every call", options.faults, lambda: failed_calls(seed, folder, errno.ENOSPC, options.scripts)),
            ("SIGINT at every call", options.interrupts, lambda: interrupted_calls(seed, folder, options.scripts)),
            ("flipped bits", options.flips, lambda: flip_campaign(seed, folder)),
        ]
        for name, is_wanted, campaign in campaigns:
            if is_wanted:
                outcomes[name] = campaign()
                if not options.json:
                    print(f"{name}: {_line(outcomes[name])}", flush=True)
    if options.json:
        print(json.dumps({"seed": seed, **{name: asdict(outcome) for name, outcome in outcomes.items()}}, indent=1))
    return int(any(outcome.wrong for outcome in outcomes.values()))


def _line(outcome: Counts | Flips) -> str:
    results = {k: v for k, v in asdict(outcome).items() if k not in ("details", "seconds")}
    text = ", ".join(f"{value} {key.replace('_', ' ')}" for key, value in results.items())
    return "\n  ".join([f"{text} ({outcome.seconds:.1f} s)", *outcome.details])
