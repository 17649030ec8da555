"""Kills of QEMU while kernels write to its drive: flushed items must survive, and launches must end with an error.

    python -m lab campaign drive_losses --runs 200

The drive is stored on a disk with a volatile cache (`lab.drives.nbd`), which outlives QEMU. Each kill drops a random
half of the unflushed sectors, and the next QEMU reads the remaining sectors. An item's value encodes its index and the
launch that stored it, so the content shows the lost items.
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
"""Number of items that a launch stores, all over the disk, in many more pages than the cache has."""
PATIENCE = 120.0
"""Timeout of commands, in seconds. It is long because QEMU shares its cores; a kill ends commands at once."""
OPTIONS: dict[str, Any] = {
    "dtype": "int64",
    "device": "cpu",
    "page_size": 4096,
    "cache": "64KiB",
    "timeout": PATIENCE,
}
LONGEST = 0.12
"""Longest time from the first flush to the kill, in seconds."""
Opener = Callable[[Namespace], AbstractContextManager[Any]]


@ww.kernel
def write(a, index, values):
    """Store `values` at `index`."""
    i = gpu.grid(1)
    a[index[i]] = values[i]


@dataclass
class Outcome:
    """The result of a campaign.

    Attributes
    ----------
    lost : list of str
        Descriptions of items whose value is older than the last flush, or wrong.
    slowest : float
        Longest time from a kill, or from the start of a launch after it, to the error, in seconds.
    """

    runs: int = 0
    launches: int = 0
    flushes: int = 0
    dropped: int = 0
    slowest: float = 0.0
    lost: list[str] = field(default_factory=list)
    doubtful: int = 0
    """Number of items that `Array.recover` reported as possibly lost."""


@contextlib.contextmanager
def by_medium(space: Namespace) -> Iterator[Any]:
    """Open a namespace as a medium of Warpwell's own controller."""
    medium = DriveMedium(space, queues=2)
    try:
        array = ww.open(medium, "r+", **OPTIONS)
    except BaseException:
        medium.close()
        raise
    try:
        yield array
    finally:
        with contextlib.suppress(errors.DriveError):  # dirty pages cannot be written
            array.close()


@contextlib.contextmanager
def by_rings(space: Namespace) -> Iterator[Any]:
    """Open the array on a namespace, so that the drive serves the cache's own rings."""
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
        self._flushed = np.zeros(ITEMS, np.int64)
        """Number of the launch whose value of each item was flushed last."""
        self._last = np.zeros(ITEMS, np.int64)
        items = np.arange(ITEMS)
        head = np.frombuffer(head_of(items.shape, items.dtype), np.int64) if opened is by_rings else items[:0]
        self._first = head.size
        self._disk = NbdServer(np.concatenate((head, items)), seed=seed)

    def run(self, runs: int) -> Outcome:
        """Execute `runs` runs, and check the disk."""
        with self._disk:
            for _ in range(runs):
                self._run_once()
            self._check(self._disk.contents().view(np.int64)[self._first :])
        self.outcome.dropped = self._disk.dropped
        return self.outcome

    def _run_once(self) -> None:
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
        self._flushed[:] = self._last
        self.outcome.flushes += 1

    def _check(self, found: np.ndarray) -> None:
        launch, index = np.divmod(found, ITEMS)
        wrong = (index != np.arange(ITEMS)) | (launch < self._flushed) | (launch > self._last)
        for k in np.flatnonzero(wrong)[:3]:
            self.outcome.lost.append(
                f"item {k} has the value of item {index[k]} of launch {launch[k]}: flushed was launch "
                f"{self._flushed[k]}, stored last {self._last[k]}"
            )
        # the surviving values are durable, and the next run starts with them
        self._flushed[:] = self._last[:] = launch


class Comeback(Campaign):
    """Runs on one disk and one QEMU: each run fails or resets the controller, cuts the power, and recovers the array.

    An item that `Array.recover` does not report must have its last stored value, or the previous value if the failed
    launch stored the item.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed, by_rings)

    def run(self, runs: int) -> Outcome:
        """Execute `runs` losses, and check the disk."""
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
            self._flushed[:] = self._last
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
        flushed = self._flushed.copy()
        self._flushed[:] = before
        for rows in doubtful:
            self._flushed[rows.start : rows.stop] = flushed[rows.start : rows.stop]
        self._check(np.array(array[:]))
        self._flushed[:] = flushed  # the values of the array are not flushed


def main(arguments: list[str]) -> int:
    """Run a campaign, print its result, and return 1 if items were lost."""
    parser = argparse.ArgumentParser(
        prog="python -m lab campaign drive_losses",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rings", action="store_true", help="let the drive serve the rings of kernels")
    parser.add_argument("--comeback", action="store_true", help="lose the controller, and recover the array in place")
    parsed = parser.parse_args(arguments)
    campaign = (
        Comeback(parsed.seed) if parsed.comeback else Campaign(parsed.seed, by_rings if parsed.rings else by_medium)
    )
    outcome = campaign.run(parsed.runs)
    print(
        f"{outcome.runs} kills, {outcome.launches} launches, {outcome.flushes} flushes, {outcome.dropped} sectors "
        f"dropped; slowest error {outcome.slowest:.3f} s after the kill; {outcome.doubtful} items named; "
        f"lost: {outcome.lost or 'nothing'}"
    )
    return 1 if outcome.lost else 0
