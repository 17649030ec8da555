"""`Admission`: grants device memory to tasks, within free memory and the quotas of their tenants."""

from __future__ import annotations

from .. import errors
from .task import Job
from .tenants import Account, Tenants


class Admission:
    """Memory of a device: tasks hold it from their first launch to their end, and resident arrays until they are freed.

    Parameters
    ----------
    memory : int
        Device memory in bytes.
    tenants : Tenants
    patience : int
        Number of tasks that may be admitted before an older task that does not fit. Then memory is reserved for it.

    Attributes
    ----------
    free : int
        Free memory in bytes.
    barred : frozenset of str
        Tenants over their quota of SM-seconds. Their tasks may not be launched now.
    counts : bool
        Whether any task has needed memory.
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
        self._overtaken: dict[Job, int] = {}

    def allowed(self, job: Job) -> bool:
        """Return True if a job may be launched now: its tenant is within its quotas, and its memory is free."""
        task = job.task
        if self.barred and task.tenant in self.barred:
            return False
        if not task.memory or job in self._admitted:
            return True
        account = self._tenants[task.tenant]
        quota = account.memory
        if job.needs > self.free or (quota is not None and account.held + task.memory > quota):
            self._overtaken.setdefault(job, 0)
            return False
        # A job that was overtaken `patience` times gets the next memory: no job is admitted before it.
        for older, overtaken in self._overtaken.items():
            if overtaken >= self._patience and older is not job and self._takes_memory_of(job, older):
                return False
        return True

    def _takes_memory_of(self, job: Job, older: Job) -> bool:
        """Return True if `job` would use memory that an older job needs, of the tenant's quota or of the device."""
        if (older.arrival, older.number) > (job.arrival, job.number):
            return False
        account = self._tenants[older.task.tenant]
        if older.needs > self._memory - self._reserved:
            return False  # the older job does not fit even if all tasks end
        if account.memory is not None:
            if older.task.memory > account.memory - account.reserved:
                return False
            if account.held + older.task.memory > account.memory:
                return job.task.tenant == older.task.tenant
        return True

    def admit(self, job: Job) -> None:
        """Allocate the memory of a job, unless it was admitted before."""
        if job in self._admitted:
            return
        self._admitted.add(job)
        self._charge(job, 1)
        self._overtaken.pop(job, None)
        for older in self._overtaken:
            if self._takes_memory_of(job, older):
                self._overtaken[older] += 1

    def pass_over(self, job: Job) -> None:
        """Do not keep memory free for a job that was not allowed: the job also waits for data."""
        self._overtaken.pop(job, None)

    def release_job(self, job: Job) -> None:
        """Free the memory of a job that has ended, if it was admitted."""
        if job in self._admitted:
            self._admitted.discard(job)
            self._charge(job, -1)
        self._overtaken.pop(job, None)

    def _charge(self, job: Job, sign: int) -> None:
        self.free -= sign * job.needs
        self._tenants[job.task.tenant].held += sign * job.task.memory

    def reserve(self, tenant: str, nbytes: int) -> None:
        """Count the memory of a resident array, which belongs to no task, for a tenant. `release` undoes this.

        Raises
        ------
        TaskMemoryError
            The memory is not free, or exceeds the quota of the tenant. Nothing is counted.
        QuotaError
            Tenants have settings, but this tenant has no setting.
        """
        account = self._tenants.account(tenant)
        left = self.free if account.memory is None else min(self.free, account.memory - account.held)
        if nbytes > left:
            raise errors.TaskMemoryError(
                f"tenant {tenant!r} may have {max(0, left)} more bytes on the device now, and the array has {nbytes}: "
                "free older arrays, wait for tasks, or copy less"
            )
        self._reserve(account, nbytes)

    def release(self, tenant: str, nbytes: int) -> None:
        """Subtract memory that `reserve` counted."""
        self._reserve(self._tenants.account(tenant), -nbytes)

    def _reserve(self, account: Account, nbytes: int) -> None:
        self._reserved += nbytes
        account.reserved += nbytes
        self.free -= nbytes
        account.held += nbytes
