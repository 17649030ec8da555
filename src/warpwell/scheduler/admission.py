"""Admission: which tasks may have memory of the device, as far as it is free and their tenants' quotas go."""

from __future__ import annotations

from .. import errors
from .task import Job
from .tenants import Account, Tenants


class Admission:
    """Memory of a device, by tasks that hold it from their first launch to their end, and by arrays that stay there.

    Parameters
    ----------
    memory : int
        Bytes of the device.
    tenants : Tenants
    patience : int
        How many tasks may be admitted past one that does not fit, before memory is kept free for it.

    Attributes
    ----------
    free : int
        Bytes.
    barred : frozenset of str
        Tenants that may launch nothing now, for their quota of time.
    counts : bool
        Whether any task ever needed memory.
    """

    def __init__(self, memory: int, tenants: Tenants, patience: int) -> None:
        self._memory = memory
        self._tenants = tenants
        self._patience = patience
        self.free = memory
        self.barred: frozenset[str] = frozenset()
        self.counts = False
        self._reserved = 0
        self._admitted: set[Job] = set()
        self._crowded: dict[Job, int] = {}

    def allowed(self, job: Job) -> bool:
        """Whether a job may be launched now: its tenant is within its quota, and its memory is there."""
        task = job.task
        if self.barred and task.tenant in self.barred:
            return False
        if not task.memory or job in self._admitted:
            return True
        account = self._tenants[task.tenant]
        most = account.memory
        if job.needs > self.free or (most is not None and account.held + task.memory > most):
            self._crowded.setdefault(job, 0)
            return False
        # A job that too many others were admitted past gets the next memory: no new job is admitted before it.
        for other, passed in self._crowded.items():
            if passed >= self._patience and other is not job and self._stands_in_the_way(job, other):
                return False
        return True

    def _stands_in_the_way(self, job: Job, other: Job) -> bool:
        """Whether admitting a job takes memory that an older one needs: of its tenant's quota, or of the device."""
        if (other.arrival, other.number) > (job.arrival, job.number):
            return False
        account = self._tenants[other.task.tenant]
        if other.needs > self._memory - self._reserved:
            return False  # the end of no task makes room for it
        if account.memory is not None:
            if other.task.memory > account.memory - account.reserved:
                return False
            if account.held + other.task.memory > account.memory:
                return job.task.tenant == other.task.tenant
        return True

    def admit(self, job: Job) -> None:
        """Give a job its memory, unless it has it."""
        if job in self._admitted:
            return
        self._admitted.add(job)
        self._take(job, 1)
        self._crowded.pop(job, None)
        for other in self._crowded:
            if self._stands_in_the_way(job, other):
                self._crowded[other] += 1

    def pass_over(self, job: Job) -> None:
        """Keep no memory free for a job that was not allowed, because it waits for data, too."""
        self._crowded.pop(job, None)

    def gone(self, job: Job) -> None:
        """Take back the memory of a job that has ended, if it had it."""
        if job in self._admitted:
            self._admitted.discard(job)
            self._take(job, -1)
        self._crowded.pop(job, None)

    def _take(self, job: Job, sign: int) -> None:
        self.free -= sign * job.needs
        self._tenants[job.task.tenant].held += sign * job.task.memory

    def reserve(self, tenant: str, nbytes: int) -> None:
        """Count memory for a tenant that no task holds: an array that stays on the device. `release` gives it back.

        Raises
        ------
        TaskMemoryError
            It is not free, or over the tenant's quota. Nothing is counted.
        QuotaError
            There are settings of tenants, and none names this one.
        """
        account = self._tenants.account(tenant)
        left = self.free if account.memory is None else min(self.free, account.memory - account.held)
        if nbytes > left:
            raise errors.TaskMemoryError(
                f"tenant {tenant!r} may have {max(0, left)} more bytes on the device now, and the array has {nbytes}: "
                "free other arrays, wait for tasks, or put less there"
            )
        self._reserve(account, nbytes)

    def release(self, tenant: str, nbytes: int) -> None:
        """Give back memory that `reserve` counted."""
        self._reserve(self._tenants.account(tenant), -nbytes)

    def _reserve(self, account: Account, nbytes: int) -> None:
        self._reserved += nbytes
        account.reserved += nbytes
        self.free -= nbytes
        account.held += nbytes
