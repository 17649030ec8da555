"""Kills of QEMU while kernels write to its drive: what a flush acknowledged stays, and launches end with an error.

    python -m lab campaign drive_losses --runs 200

The drive lies on a disk with a volatile cache (`lab.drives.nbd`), which outlives QEMU: each kill drops a random
half of the sectors that were not flushed, and the next QEMU finds what is left. An item's value tells its index and the
launch that stored it, so the content tells what was lost.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import warpwell as ww
from lab.drives.nbd import NbdServer
from lab.drives.qemu import QemuDrive, QemuNamespace
from warpwell import errors, gpu
from warpwell.drives import Drive, DriveMedium, Namespace
from warpwell.drives.superblock import head_of
from warpwell.nvme import controller as reg

ITEMS = 1 << 15
STORES = 150
"""Items that a launch stores, all over the disk: in many more pages than the cache has."""
PATIENCE = 120.0
"""Time-out of commands, in seconds: other programs may keep QEMU from its cores. A kill is noticed at once."""
OPTIONS: dict[str, Any] = {
    "dtype": "int64",
    "device": "cpu",
    "page_size": 4096,
    "cache": "64KiB",
    "timeout": PATIENCE,
}
LONGEST = 0.12
"""Seconds from the first flush to the kill."""
Opener = Callable[[Namespace], AbstractContextManager[Any]]


@ww.kernel
def write(a, index, values):
    """Store `values` at `index`."""
    i = gpu.grid(1)
    a[index[i]] = values[i]


@dataclass
class Outcome:
    """What a campaign has seen.

    Attributes
    ----------
    lost : list of str
        Items that have another value than one stored since the last flush, in words.
    slowest : float
        Seconds from a kill, or the begin of the launch after it, to the error.
    """

    runs: int = 0
    launches: int = 0
    flushes: int = 0
    dropped: int = 0
    slowest: float = 0.0
    lost: list[str] = field(default_factory=list)
    doubtful: int = 0
    """Items that `Array.recover` named."""


@contextlib.contextmanager
def by_medium(space: Namespace) -> Iterator[Any]:
    """Open a namespace as a medium behind our own controller."""
    medium = DriveMedium(space, queues=2)
    try:
        array = ww.open(medium, "r+", **OPTIONS)
    except BaseException:
        medium.close()
        raise
    try:
        yield array
    finally:
        with contextlib.suppress(errors.DriveError):  # what it holds cannot be written
            array.close()


@contextlib.contextmanager
def by_rings(space: Namespace) -> Iterator[Any]:
    """Open the array on a namespace: the drive serves the cache's own rings."""
    options = {**OPTIONS, "dtype": None}
    array = ww.open(space, "r+", **options)
    try:
        yield array
    finally:
        with contextlib.suppress(errors.DriveError):
            array.close()


class Campaign:
    """Runs on one disk; each ends with a kill."""

    def __init__(self, seed: int, opened: Opener = by_medium) -> None:
        self.outcome = Outcome()
        self._opened = opened
        self._random = random.Random(seed)
        self._launch = 0
        self._least = np.zeros(ITEMS, np.int64)
        """Number of the launch whose value an item has at least: it was flushed."""
        self._last = np.zeros(ITEMS, np.int64)
        items = np.arange(ITEMS)
        head = np.frombuffer(head_of(items.shape, items.dtype), np.int64) if opened is by_rings else items[:0]
        self._first = head.size
        self._disk = NbdServer(np.concatenate((head, items)), seed=seed)

    def run(self, runs: int) -> Outcome:
        """Do so many runs, and look at what they left."""
        with self._disk:
            for _ in range(runs):
                self._one()
            self._check(self._disk.contents().view(np.int64)[self._first :])
        self.outcome.dropped = self._disk.dropped
        return self.outcome

    def _one(self) -> None:
        with (
            QemuDrive([QemuNamespace(backend=self._disk.backend)], seconds=PATIENCE) as qemu,
            qemu.open() as drive,
            self._opened(drive.namespace(1)) as array,
        ):
            self._check(np.array(array[:]))
            self._store(array)
            self._flush(array)
            killed = [float("inf")]

            def kill() -> None:
                killed[0] = time.monotonic()
                qemu.kill()

            timer = threading.Timer(self._random.uniform(0, LONGEST), kill)
            timer.start()
            began = time.monotonic()
            try:
                while True:
                    began = time.monotonic()
                    self._store(array)
                    if self._random.random() < 0.3:
                        began = time.monotonic()
                        self._flush(array)
            except errors.DriveError:
                self.outcome.slowest = max(self.outcome.slowest, time.monotonic() - max(began, killed[0]))
            finally:
                timer.join()
        self._disk.wait_alone()
        self.outcome.runs += 1

    def _store(self, array: Any) -> None:
        self._launch += 1
        index = np.array(self._random.sample(range(ITEMS), STORES))
        self._last[index] = self._launch
        self.outcome.launches += 1
        write[STORES](array, index, self._launch * ITEMS + index)

    def _flush(self, array: Any) -> None:
        array.flush()
        self._least[:] = self._last
        self.outcome.flushes += 1

    def _check(self, found: np.ndarray) -> None:
        launch, index = np.divmod(found, ITEMS)
        wrong = (index != np.arange(ITEMS)) | (launch < self._least) | (launch > self._last)
        for k in np.flatnonzero(wrong)[:3]:
            self.outcome.lost.append(
                f"item {k} has the value of item {index[k]} of launch {launch[k]}: flushed was launch "
                f"{self._least[k]}, stored last {self._last[k]}"
            )
        # a power loss leaves what is durable, and tests go on from there
        self._least[:] = self._last[:] = launch


class Comeback(Campaign):
    """Runs on one disk and one QEMU, whose controller fails or is reset in each; the array comes back every time.

    Power is lost, too. An item that is not named by `Array.recover` has the value that was stored last, or, where the
    launch that failed was to store it, the one before.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed, by_rings)

    def run(self, runs: int) -> Outcome:
        """Do so many losses, and look at what they left."""
        with (
            self._disk,
            QemuDrive([QemuNamespace(backend=self._disk.backend)], seconds=PATIENCE) as qemu,
            qemu.open() as drive,
            self._opened(drive.namespace(1)) as array,
        ):
            for _ in range(runs):
                self._come_back(drive, array)
                self.outcome.runs += 1
            array.flush()
            self._disk.lose_power()
            self._least[:] = self._last
            self._check(self._disk.contents().view(np.int64)[self._first :])
        self.outcome.dropped = self._disk.dropped
        return self.outcome

    def _come_back(self, drive: Drive, array: Any) -> None:
        fails = self._random.random() < 0.5
        harm = (lambda: drive.transport.set_bus_master(False)) if fails else lambda: drive.transport.write32(reg.CC, 0)
        timer = threading.Timer(self._random.uniform(0, LONGEST), harm)
        before = self._last.copy()
        timer.start()
        try:
            while True:
                before[:] = self._last
                self._store(array)
                if self._random.random() < 0.3:
                    before[:] = self._last
                    self._flush(array)
        except errors.DriveLostError:
            pass
        timer.join()
        self._disk.lose_power()
        doubtful = array.recover(accept_loss=True)
        self.outcome.doubtful += sum(map(len, doubtful))
        flushed = self._least.copy()
        self._least[:] = before
        for rows in doubtful:
            self._least[rows.start : rows.stop] = flushed[rows.start : rows.stop]
        self._check(np.array(array[:]))
        self._least[:] = flushed  # what the array shows is not flushed


def main(arguments: list[str]) -> int:
    """Run a campaign, print what it saw, and return 1 if something was lost."""
    parser = argparse.ArgumentParser(
        prog="python -m lab campaign drive_losses",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rings", action="store_true", help="the drive serves the rings of kernels itself")
    parser.add_argument("--comeback", action="store_true", help="the controller is lost, and started again in place")
    given = parser.parse_args(arguments)
    campaign = Comeback(given.seed) if given.comeback else Campaign(given.seed, by_rings if given.rings else by_medium)
    outcome = campaign.run(given.runs)
    print(
        f"{outcome.runs} kills, {outcome.launches} launches, {outcome.flushes} flushes, {outcome.dropped} sectors "
        f"dropped; slowest error {outcome.slowest:.3f} s after the kill; {outcome.doubtful} items named; "
        f"lost: {outcome.lost or 'nothing'}"
    )
    return 1 if outcome.lost else 0
