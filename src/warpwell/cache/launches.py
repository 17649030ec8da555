"""Launches: the records of a cache for each launch, which keep the launch's own errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from .. import errors
from ..nvme.status import describe
from ..targets import Allocator, Block, LaunchFlag
from . import layout as at
from .partition import PageSpace

LAUNCHES_PER_BLOCK = 16
"""Number of launch records that are allocated at a time."""


class CacheLaunch:
    """A launch on a cache: its records and its arguments on the cache.

    Attributes
    ----------
    flag : LaunchFlag
        Of the launch.
    users : int
        Arguments that have begun and not ended.
    stores : bool
        Whether its kernel may store to pages: the cache's own kernels do not.
    nsids : set of int
        The namespaces of the arguments.
    done : callable or None
        Returns whether a launch that continues in a stream is done.
    """

    def __init__(self, block: Block, offset: int, latch: NDArray[np.int64]) -> None:
        self._block = block
        self._offset = offset
        self._latch = latch
        self.users = 0
        self.stores = True
        self.nsids: set[int] = set()
        self.flag: LaunchFlag
        self.done: Callable[[], bool] | None = None

    def space(self, index: int) -> int:
        """Return the address of the launch's copy of a space record."""
        return self._block.address + self._offset + 8 * (at.LAUNCH_WORDS + at.SPACE_WORDS * index)

    def abort(self) -> None:
        """Abort all waits of device code for this launch."""
        if self._latch[at.L_KIND] == at.CLEAR:
            self._latch[at.L_KIND] = at.ABORTED

    def start(self, flag: LaunchFlag) -> None:
        """Set this flag when device code fails."""
        self.flag = flag
        self._latch[: at.L_FLAG] = 0  # clear a late abort of the previous launch
        self._latch[at.L_FLAG] = flag.address

    @property
    def count_address(self) -> int:
        """Address of the counter of maintenance kernels."""
        return self._block.address + self._offset + 8 * at.R_COUNT

    def counted(self) -> int:
        """Return the count of maintenance kernels since `reset`."""
        return int(self._block.read(self._offset + 8 * at.R_COUNT, 8).view(np.int64)[0])

    def reset(self) -> None:
        """Count from 0."""
        self._block.write(self._offset + 8 * at.R_COUNT, np.zeros(1, np.int64))

    def take_error(self) -> tuple[int, int, int, int]:
        """Return kind, namespace, page and value of the latched error, and clear it."""
        record = self._latch
        out = (int(record[at.L_KIND]), int(record[at.L_ARRAY]), int(record[at.L_PAGE]), int(record[at.L_VALUE]))
        if out[0] != at.CLEAR:
            record[: at.L_FLAG] = 0
            self._block.write(self._offset, np.zeros(2, np.int64))  # R_FAILED and R_KIND
            self.flag.clear()
        return out


class Launches:
    """The launch records of a cache, allocated on demand and reused.

    Parameters
    ----------
    memory : Allocator
    """

    def __init__(self, memory: Allocator) -> None:
        self._memory = memory
        self._spaces = np.zeros((0, at.SPACE_WORDS), np.int64)
        self._free: list[CacheLaunch] = []
        self._by_flag: dict[LaunchFlag, CacheLaunch] = {}
        self.blocks: list[Block] = []

    def lay_out(self, spaces: NDArray[np.int64]) -> None:
        """Use new space records; no launch is in flight."""
        self._spaces = spaces.copy()
        self._free, self._by_flag, self.blocks = [], {}, []

    def of(self, flag: LaunchFlag) -> CacheLaunch | None:
        """Return the records of a launch, or None."""
        return self._by_flag.get(flag)

    def take(self, flag: LaunchFlag) -> CacheLaunch:
        """Return the records of a launch; a new launch gets free records."""
        launch = self._by_flag.get(flag)
        if launch is None:
            if not self._free:
                self._make()
            launch = self._free.pop()
            launch.start(flag)
            self._by_flag[flag] = launch
        return launch

    def release(self, launch: CacheLaunch) -> tuple[int, int, int, int]:
        """Free the records of an ended launch; return its latched error."""
        self._by_flag.pop(launch.flag, None)  # first, because Ctrl-C aborts the launches in this table at any time
        latched = launch.take_error()
        launch.users, launch.done, launch.stores = 0, None, True
        launch.nsids = set()
        self._free.append(launch)
        return latched

    def in_streams(self) -> list[CacheLaunch]:
        """Return the launches that continue in streams."""
        return [launch for launch in self._by_flag.values() if launch.done is not None]

    def storing(self) -> bool:
        """Return whether a launch that may store to pages is running."""
        return any(launch.users and launch.stores for launch in self._by_flag.values())

    def _make(self) -> None:
        each = at.LAUNCH_WORDS + at.SPACE_WORDS * len(self._spaces)
        block = self._memory.allocate(8 * each * LAUNCHES_PER_BLOCK)
        latches = self._memory.allocate_shared(8 * at.LATCH_WORDS * LAUNCHES_PER_BLOCK)
        records = np.zeros((LAUNCHES_PER_BLOCK, each), np.int64)
        for k in range(LAUNCHES_PER_BLOCK):
            records[k, at.R_LATCH] = latches.address + 8 * at.LATCH_WORDS * k
            copies = records[k, at.LAUNCH_WORDS :].reshape(-1, at.SPACE_WORDS)
            copies[:] = self._spaces
            copies[:, at.S_LAUNCH] = block.address + 8 * each * k
        block.write(0, records)
        self.blocks += [block, latches]
        latch_records = latches.words.reshape(-1)[: at.LATCH_WORDS * LAUNCHES_PER_BLOCK].reshape(
            LAUNCHES_PER_BLOCK, at.LATCH_WORDS
        )
        self._free += [CacheLaunch(block, 8 * each * k, latch_records[k]) for k in range(LAUNCHES_PER_BLOCK)]


def error_of(
    latched: tuple[int, int, int, int], spaces: Mapping[int, PageSpace], *, page_size: int, timeout: float
) -> Exception:
    """Return the exception for a latched error; it names array, page and block, and the next step."""
    kind, nsid, page, value = latched
    space = spaces.get(nsid)
    name = space.name if space else "an array that was closed"
    local = page - space.base if space else page
    lba = local * (page_size >> space.wire[1]) if space else 0
    where = f"array {name!r}, page {local} (LBA {lba})"
    if kind == at.INDEX_ERROR:
        return errors.IndexRangeError(
            f"a kernel used index {value} of array {name!r} in a dimension of size {page}: compare the index "
            "with the size first (negative indices do not wrap in kernels)",
            array=name,
            index=value,
            size=page,
        )
    if kind == at.READ_ONLY:
        return errors.ReadOnlyError(f'a kernel wrote to array {name!r}, which is read-only: open it with mode="r+"')
    if kind in (at.READ_ERROR, at.WRITE_ERROR):
        action, advice = "reading", "check the drive or file"
        if kind == at.WRITE_ERROR:
            action, advice = "writing", "the page stays in the cache: make room or repair the drive, then call flush()"
        message = f"{action} {where} failed: {describe(value)} (status {value:#06x}); {advice}"
        return errors.MediumError(message, array=name, lba=lba, page=local, status=value)
    if kind == at.NOT_PINNED:
        return errors.KernelError(
            f"a kernel unpinned page {local} of array {name!r}, which no kernel has pinned: call unpin once for each "
            "pin that returned True (the host unpins its own pins)",
            array=name,
        )
    return errors.StallError(
        f"no completion for {timeout:g} s while waiting for {where}: the medium does not answer (or every frame is "
        "pinned); command ids stay quarantined until it does",
        array=name,
        seconds=timeout,
    )
