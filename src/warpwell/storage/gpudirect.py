"""`GpuDirectReads`: bulk reads by cuFile if system, file and request allow it, else by staging memory."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import errors
from .._settings import settings
from ..targets import ALIGNMENT, Allocator, Block
from .cufile import CuFileReads, logger
from .file import FileMedium
from .host_reads import StagedReads

CHECK_BYTES = 1 << 20
"""Bytes of each file that are read by cuFile and by pread, and compared, before cuFile is used for it."""
CHECK_SECONDS = 5.0
"""Timeout of that read."""
CHECK_READ_BYTES = 128 << 10
NVME_MODULE = Path("/sys/module/nvme_core")
"""Linux's NVMe driver."""


@dataclass(frozen=True)
class CuFileOptions:
    """Conditions for the use of cuFile. Tests pass a fake library and other limits.

    Parameters
    ----------
    module : module, optional
        The library; default: `cuda.bindings.cufile`, which is loaded only if the host may have P2PDMA.
    device : str
        Device of the arrays.
    allow_compat : bool
        Accept libcufile's compatibility mode, which copies through host memory: for tests of the real library.
    min_run_bytes : int
        Smallest mean size of the reads of a slot; a host call costs microseconds.
    alignment : int
        Offsets and sizes of direct reads are multiples of this number of bytes.
    """

    module: Any = None
    device: str = "cuda"
    allow_compat: bool = False
    min_run_bytes: int = 64 << 10
    alignment: int = 4096


class GpuDirectReads:
    """Bulk reads by `CuFileReads` or `StagedReads`, chosen for each slot, by the same methods.

    An error of cuFile is logged; then its reads are repeated through staging memory, and all later reads use it too.
    One thread at a time calls the methods (`Bulk` has a lock for it), with the context of the GPU current.

    Parameters
    ----------
    staged : StagedReads
    staging : Block
        Memory of the slots, in shared memory.
    memory : Allocator
        Allocates as much device memory when cuFile is chosen first.
    slots : int
    zero : callable
        ``zero(address, nbytes)`` clears device memory before all later work on a slot.
    failure : str, optional
        Why cuFile is not used for any array.
    """

    def __init__(
        self,
        staged: StagedReads,
        staging: Block,
        memory: Allocator,
        *,
        slots: int,
        zero: Callable[[int, int], None],
        options: CuFileOptions,
        failure: str = "",
    ) -> None:
        self.staged, self.failure = staged, failure
        self._staging, self._memory, self._slots, self._zero = staging, memory, slots, zero
        self._options = options
        self._slot_bytes = staging.nbytes // slots
        self._block: Block | None = None
        self._cufile: CuFileReads | None = None
        self._obstacles: dict[int, str] = {}
        self._requests: dict[int, tuple[int, Any, Any, Any]] = {}
        """Arguments of `start` of the slots that cuFile reads."""
        self._direct: dict[int, int] = {}
        """Number of reads of the slots whose data are in device memory."""

    def obstacle(self, nsid: int) -> str:
        """Return why an array is not read by cuFile, or an empty string; no slot is in use at the first call for it."""
        if nsid not in self._obstacles:
            medium = self.staged.controller.medium(nsid)
            found = self._obstacles[nsid] = self._find_obstacle(nsid, medium)
            if isinstance(medium, FileMedium) and self._memory.device == self._options.device:
                medium.bulk_reads = f"staged, because {found}" if found else "by cuFile"
        return self._obstacles[nsid]

    def _find_obstacle(self, nsid: int, medium: Any) -> str:
        if self._memory.device != self._options.device:
            return f"the device is {self._memory.device}"
        if settings.gpudirect == "off":
            return "WARPWELL_GPUDIRECT is off"
        if not isinstance(medium, FileMedium) or medium.direct_fileno() < 0:
            return "it is not a file that Warpwell reads with O_DIRECT"
        if self.failure:
            return self.failure
        try:
            cufile = self._cufile = self._cufile or self._open()
            cufile.open_file(nsid, medium.direct_fileno(), medium.nbytes)
        except Exception as error:  # an error of libcufile or its loader, or an unsupported file system
            if self._cufile is None:
                self._block, self.failure = None, _text(error)
            return _text(error)
        try:
            self._compare(nsid, medium)
        except Exception as error:  # of libcufile
            self._fall_back(_text(error))
        return self.failure

    def _open(self) -> CuFileReads:
        if self._options.module is None and (obstacle := host_obstacle()):
            raise errors.WarpwellError(obstacle)
        module = self._options.module or importlib.import_module("cuda.bindings.cufile")
        self._block = self._memory.allocate(self._slots * self._slot_bytes)
        return CuFileReads(
            module,
            self._block,
            slots=self._slots,
            slot_bytes=self._slot_bytes,
            allow_compat=self._options.allow_compat,
            zero=self._zero,
        )

    def _compare(self, nsid: int, medium: FileMedium) -> None:
        """Raise if cuFile reads anything else than pread at the start of a file."""
        assert self._cufile is not None and self._block is not None
        nbytes = min(CHECK_BYTES, self._slot_bytes, medium.nbytes // ALIGNMENT * ALIGNMENT)
        starts = np.arange(0, nbytes, CHECK_READ_BYTES)
        counts = np.minimum(CHECK_READ_BYTES, nbytes - starts) // 512
        self._cufile.start(0, nsid, starts // 512, counts, self._block.address + starts)
        if not self._cufile.wait(0, CHECK_SECONDS, lambda: False) or self._cufile.statuses(0).any():
            raise errors.WarpwellError("the first read failed")
        if not np.array_equal(self._block.read(0, nbytes), medium.read(0, nbytes)):
            raise errors.WarpwellError("the first read returned other bytes than pread")

    def _fall_back(self, reason: str) -> None:
        """Repeat the reads of cuFile by staging memory, and do not use it again."""
        logger.warning("cuFile failed, and bulk reads go through host memory from now on: %s", reason)
        self.failure = reason
        for nsid, obstacle in list(self._obstacles.items()):
            if not obstacle:
                del self._obstacles[nsid]
                self.obstacle(nsid)
        requests, self._requests = self._requests, {}
        self.close()
        for slot, request in requests.items():
            self.staged.start(slot, *request)

    # -- methods of both readers --------------------------------------------------------------------------------

    def start(self, slot: int, nsid: int, blocks: NDArray[np.int64], counts: Any, buffers: NDArray[np.int64]) -> None:
        """Start reads in a slot that is done; see `StagedReads.start`. `buffers` are addresses in staging memory."""
        self._requests.pop(slot, None)
        self._direct.pop(slot, None)
        if self._is_suitable(nsid, blocks, counts, buffers):
            assert self._cufile is not None and self._block is not None
            try:
                self._cufile.start(slot, nsid, blocks, counts, buffers + self._block.address - self._staging.address)
                self._requests[slot] = nsid, blocks, counts, buffers
                return
            except Exception as error:  # of libcufile
                self._fall_back(_text(error))
        self.staged.start(slot, nsid, blocks, counts, buffers)

    def _is_suitable(self, nsid: int, blocks: NDArray[np.int64], counts: Any, buffers: NDArray[np.int64]) -> bool:
        offset = int(buffers[0]) - self._staging.address if len(blocks) else -1
        if not 0 <= offset < self._staging.nbytes or 512 * np.mean(counts) < self._options.min_run_bytes:
            return False
        step = self._options.alignment // 512
        return not (blocks % step).any() and not (counts % step).any() and not self.obstacle(nsid)

    def wait(self, slot: int, seconds: float, stopped: Callable[[], bool]) -> bool:
        """Wait until a slot is done; return False if no read completes for `seconds`, or if `stopped` returns True."""
        if slot in self._requests:
            assert self._cufile is not None
            try:
                done = self._cufile.wait(slot, seconds, stopped)
                if done and not self._cufile.statuses(slot).any():
                    self._direct[slot] = len(self._requests.pop(slot)[1])
                    return True
                if not done and stopped():
                    return False
                self._fall_back("a read failed" if done else f"no read completed for {seconds:g} s")
            except Exception as error:  # of libcufile
                self._fall_back(_text(error))
        return self.staged.wait(slot, seconds, stopped)

    def statuses(self, slot: int) -> NDArray[np.int64]:
        """Return the NVMe status of each read of a slot: 0 for success."""
        return np.zeros(self._direct[slot], np.int64) if slot in self._direct else self.staged.statuses(slot)

    def device_address(self, slot: int) -> int:
        """Return the address of the data of a slot that is done, if they are in device memory; else 0."""
        if slot not in self._direct:
            return 0
        assert self._block is not None
        return self._block.address + slot * self._slot_bytes

    def cancel(self) -> None:
        """Submit no more reads; wait for those in flight (`left`)."""
        self.staged.cancel()
        self._requests.clear()
        if self._cufile is not None:
            self._cufile.cancel()

    def left(self) -> int:
        """Return how many reads are not done."""
        try:
            return self.staged.left() + (self._cufile.left() if self._cufile is not None else 0)
        except Exception as error:  # of libcufile
            self._fall_back(_text(error))
            return self.staged.left()

    # -- life ---------------------------------------------------------------------------------------------------

    def close_file(self, nsid: int) -> None:
        """Deregister an array's file before its medium is closed."""
        if self._obstacles.pop(nsid, None) == "" and self._cufile is not None:
            try:
                self._cufile.close_file(nsid)
            except Exception as error:  # an error of libcufile; another thread may be reading another file
                logger.warning("cuFile failed to deregister %s: %s", self.staged.controller.medium(nsid).name, error)

    def close(self) -> None:
        """Deregister everything at libcufile, in bounded time; device memory stays for work on its data."""
        cufile, self._cufile = self._cufile, None
        if cufile is not None:
            cufile.close()


def host_obstacle() -> str:
    """Return why this host has no P2PDMA for NVMe drives, or an empty string; libcufile is not loaded for this."""
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    if release is None or (int(release[1]), int(release[2])) < (6, 2):
        return f"Linux {os.uname().release} is older than 6.2"
    if not NVME_MODULE.exists():
        return "the host has no NVMe driver"
    try:
        multipath = (NVME_MODULE / "parameters" / "multipath").read_text().strip()
    except OSError:  # a kernel without multipath
        return ""
    return "" if multipath == "N" else "nvme_core has multipath=Y; P2PDMA needs multipath=N"


def _text(error: Exception) -> str:
    """Return an error in one line."""
    return (str(error).splitlines() or [type(error).__name__])[0]
