"""`Tenants`: quotas of tenants on a device, and their use so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any, cast

from .. import errors
from .._check import checked_integer, checked_nbytes
from .executor import Capacity
from .residency import with_room
from .task import INT64_MAX, Job, Task

MAX_IDLE_TENANTS = 1024
"""Maximum number of accounts of idle tenants without settings. Chosen, not fitted."""

_EXPECTED = "pass a dictionary of weights or of dictionaries as {'share': 0.5} by name, or a list of Tenant"


@dataclass(frozen=True)
class Tenant:
    """Settings of a tenant.

    Attributes
    ----------
    name : str
    weight : float
        While two tenants have tasks, weighted policies divide the SM-seconds between them in proportion to their
        weights.
    share : float or None
        Quota of SM-seconds as a fraction of the device, 0 to 1: in any `window` seconds, ``share * processors *
        window``. None: no quota. A task that is running when its tenant exceeds the quota is not stopped; the tenant's
        later tasks wait longer for it.
    memory : float, str or None
        Quota of memory for the tenant's tasks, including preempted ones: bytes, "8GiB", or a fraction of device memory
        up to 1. None: no quota.
    burst : bool
        Whether the tenant may exceed `share` while all waiting tenants are over their quotas, too. A tenant over its
        quota never preempts a task of a tenant within its quota.
    priority : int
        Value that is added to the priority of the tenant's tasks.
    ceiling : int
        Limit of the priorities of the tenant's tasks: from minus this value to this value. Without a limit, they could
        make the tasks of other tenants wait without bound.
    window : float
        Seconds for which unused quota is kept.
    """

    name: str
    weight: float = 1.0
    share: float | None = None
    memory: float | str | None = None
    burst: bool = True
    priority: int = 0
    window: float = 1.0
    ceiling: int = 8

    def __post_init__(self) -> None:
        if type(self.name) is not str or not self.name:
            raise errors.ArgumentError(f"a tenant is named {self.name!r:.40}: give a string", name="tenants")
        if isinstance(self.memory, str):
            nbytes = checked_nbytes(self.memory, "memory", minimum=0, of=f"tenant {self.name!r}")
            object.__setattr__(self, "memory", nbytes)
        checks: dict[str, tuple[Callable[[Any], bool], str]] = {
            "weight": (lambda n: 0 < n < math.inf, "a number, more than 0"),
            "window": (lambda n: 0 < n < math.inf, "a number of seconds, more than 0"),
            "share": (lambda n: 0 < n <= 1, "a number, more than 0 and at most 1: a part of the SM-seconds"),
            "memory": (lambda n: 0 <= n < math.inf, "a number of bytes, 0 or more"),
        }
        for field, (fits, expected) in checks.items():
            value, quota = getattr(self, field), field in ("share", "memory")
            if value is None and quota:
                continue
            if isinstance(value, bool) or not isinstance(value, Real) or not fits(value):
                raise (errors.QuotaError if quota else errors.ArgumentError)(
                    f"{field} of tenant {self.name!r} is {value!r:.40}: give {expected}", name=field
                )
        for name, minimum in (("priority", -INT64_MAX), ("ceiling", 0)):
            value = checked_integer(
                getattr(self, name), name, minimum=minimum, maximum=INT64_MAX, of=f"tenant {self.name!r}"
            )
            object.__setattr__(self, name, value)

    def settings(self) -> dict[str, Any]:
        """Return all fields except the name, as plain data."""
        return {name: value for name, value in asdict(self).items() if name != "name"}


class Account:
    """The use of a device by a tenant, and the memory that its tasks hold.

    Attributes
    ----------
    tenant : Tenant
    used : float
        SM-seconds so far. Kernels that share multiprocessors share their time equally.
    held : int
        Bytes of admitted tasks, including `reserved`.
    reserved : int
        Bytes of arrays that stay on the device.
    memory : int or None
        Quota of bytes.
    credit : float
        SM-seconds left of the quota; below 0 if the tenant is over its quota, infinite without a quota.
    waiting, running : int
        Number of waiting and of resident tasks.
    clock : float
        SM-seconds divided by the weight, which weighted policies compare. An idle tenant that submits a task is raised
        to the minimum of the busy tenants.
    """

    def __init__(self, tenant: Tenant, capacity: Capacity) -> None:
        self.tenant = tenant
        self.used = 0.0
        self.held = 0
        self.reserved = 0
        self.waiting = 0
        self.running = 0
        self.clock = 0.0
        share, memory = tenant.share, cast("float | None", tenant.memory)
        self.rate = math.inf if share is None else share * capacity.processors
        self.bound = math.inf if share is None else self.rate * tenant.window
        self.credit = self.bound
        self.memory = None if memory is None else int(memory * capacity.memory if memory <= 1 else memory)

    def priority(self, task: Task) -> int:
        """Return the priority of a task, limited to the ceiling of the tenant."""
        ceiling = self.tenant.ceiling
        return max(-ceiling, min(task.priority, ceiling))

    @property
    def within(self) -> bool:
        """Whether the tenant is within its quota of SM-seconds."""
        return self.credit > 0


class Tenants(dict[str, Account]):
    """Accounts by name.

    Parameters
    ----------
    capacity : Capacity
    settings : mapping or iterable, optional
        `Tenant` objects; or a mapping of names to `Tenant` objects, weights, or dictionaries of `Tenant`'s fields.
        Without settings, any tenant may submit, and all tenants are equal; with settings, only the named tenants may
        submit.

    Raises
    ------
    QuotaError
        The sum of the quotas exceeds 100 %.
    ArgumentError
        A setting has an unknown name or an invalid value.
    """

    def __init__(self, capacity: Capacity, settings: Mapping[str, Any] | Iterable[Tenant] | None = None) -> None:
        super().__init__()
        self._capacity = capacity
        self._time = 0.0
        for tenant in read_tenants(settings):
            if tenant.name in self:
                raise errors.ArgumentError(f"tenant {tenant.name!r} has two settings: keep one", name="tenants")
            self[tenant.name] = Account(tenant, capacity)
        self.named = bool(self)
        accounts = self.values()
        total = sum(a.tenant.share or 0.0 for a in accounts)
        if total > 1 + 1e-9:
            raise errors.QuotaError(
                f"quotas of SM-seconds sum to {total:.1%}: reduce them to at most 100 %", name="share"
            )
        held = sum(a.memory or 0 for a in accounts)
        if held > capacity.memory:
            raise errors.QuotaError(
                f"quotas of memory sum to {held} bytes, but the device has {capacity.memory}: make them at most 100 %",
                name="memory",
            )
        self.limited = any(a.tenant.share is not None for a in accounts)

    def account(self, name: str) -> Account:
        """Return the account of a tenant; create it if tenants have no settings.

        Raises
        ------
        QuotaError
            Tenants have settings, but this tenant has no setting.
        """
        found = self.get(name)
        if found is None:
            if self.named:
                raise errors.QuotaError(
                    f"tenant {name!r} has no setting: add it to tenants, or submit as one of {', '.join(self)}",
                    name="tenant",
                )
            if len(self) >= MAX_IDLE_TENANTS:
                self._forget()
            found = self[name] = Account(Tenant(name), self._capacity)
        return found

    def _forget(self) -> None:
        """Forget the older half of the idle accounts, because the number of names that programs choose is unbounded."""
        idle = [name for name, a in self.items() if not (a.waiting or a.running or a.held)]
        for name in idle[: (len(idle) + 1) // 2]:
            del self[name]

    def add_waiting(self, account: Account) -> None:
        """Count a waiting task of a tenant. A tenant that was idle gets no compensation for that time.

        If all tenants are idle, their clocks become equal, so that use of an otherwise idle device is free.
        """
        if not (account.waiting or account.running):
            busy = [a.clock for a in self.values() if a.waiting or a.running]
            clocks = busy or [max(a.clock for a in self.values())]
            account.clock = max(account.clock, min(clocks))
        account.waiting += 1

    def charge(self, running: Sequence[Job], now: float) -> None:
        """Charge the tenants of running jobs for the time since the last call.

        The jobs with blocks on the device share the charge equally. A job whose blocks wait for older jobs is not
        charged. So a false claim about the size of a kernel can only raise the charge of its own tenant.
        """
        seconds = now - self._time
        if seconds <= 0:
            return
        self._time = now
        if self.limited:
            for account in self.values():
                if account.rate is not math.inf:
                    account.credit = min(account.bound, account.credit + account.rate * seconds)
        users = with_room(running, self._capacity) if len(running) > 1 and len(self) > 1 else running
        for job in users:
            account, used = self[job.task.tenant], self._capacity.processors / len(users) * seconds
            account.used += used
            account.credit -= used
            account.clock += used / account.tenant.weight

    def barred(self, spare: bool = False) -> frozenset[str]:
        """Return the tenants over their quota. Their tasks may not be launched now.

        A tenant with `burst` is included while a tenant within its quota waits, unless the launch uses capacity that
        the waiting tasks leave free (`spare`).
        """
        if not self.limited:
            return frozenset()
        over = [a for a in self.values() if not a.within]
        if not over:
            return frozenset()
        is_contended = not spare and any(a.waiting and a.within for a in self.values())
        return frozenset(a.tenant.name for a in over if is_contended or not a.tenant.burst)

    def must_yield(self, name: str, rival: str) -> bool:
        """Return True if a tenant is over its quota and `rival` is not, so that a waiting task of `rival` bars it."""
        return self.limited and not self[name].within and self[rival].within

    def wake(self, now: float) -> float | None:
        """Return the first time at which a waiting tenant is within its quota again; None if all are within now."""
        times = [now + max(1e-9, -a.credit / a.rate * (1 + 1e-9)) for a in self.values() if a.waiting and not a.within]
        return min(times, default=None)


def read_tenants(settings: Mapping[str, Any] | Iterable[Tenant] | None) -> list[Tenant]:
    """Return settings of tenants as `Tenant` objects. See `Tenants` for accepted forms and errors."""
    if settings is None:
        return []
    if not isinstance(settings, Mapping):
        found = list(settings) if isinstance(settings, Iterable) else [settings]
        wrong = next((item for item in found if not isinstance(item, Tenant)), None)
        if wrong is not None:
            raise errors.ArgumentError(f"tenants has {wrong!r:.40}, which is not a Tenant: {_EXPECTED}", name="tenants")
        return found
    found = []
    for name, value in settings.items():
        if isinstance(value, Tenant):
            if value.name != name:
                raise errors.ArgumentError(
                    f"the setting of tenant {name!r} names tenant {value.name!r}: use the same name", name="tenants"
                )
            found.append(value)
        elif isinstance(value, Mapping):
            try:
                found.append(Tenant(name, **value))
            except TypeError as error:
                raise errors.ArgumentError(
                    f"setting of tenant {name!r}: {error}; it takes weight, share, memory, burst, priority, "
                    "window, ceiling",
                    name="tenants",
                ) from error
        elif isinstance(value, bool) or not isinstance(value, Real):
            raise errors.ArgumentError(f"setting of tenant {name!r} is {value!r:.40}: {_EXPECTED}", name="tenants")
        else:
            found.append(Tenant(name, weight=float(value)))
    return found
