"""Tenants: the share of a device that each may use, and its use so far."""

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
from .task import MOST, Job, Task

IDLE = 1024
"""Tenants without settings that are remembered while they want nothing."""

_TAKEN = "give a dictionary by name, of weights or of dictionaries as {'share': 0.5}, or a list of Tenant"


@dataclass(frozen=True)
class Tenant:
    """Settings of a tenant.

    Attributes
    ----------
    name : str
    weight : float
        Policies that weigh tenants give twice the weight twice the SM-seconds while both want them.
    share : float or None
        Quota of SM-seconds as a fraction of the device, 0 to 1: in any `window` seconds, ``share * processors *
        window``. None: no quota. A task that runs is not stopped for it; what it took too much is paid back by
        waiting.
    memory : float, str or None
        Quota of memory for its tasks, including preempted ones: bytes, "8GiB", or up to 1 a fraction of the device's.
        None: no quota.
    burst : bool
        Whether it may exceed `share` while no tenant within its quota waits. Over its quota, its tasks preempt no task
        of a tenant within its quota.
    priority : int
        Added to the priority of its tasks.
    ceiling : int
        Priorities of its tasks are limited to this value and its negative: larger ones would let others wait without
        bound.
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
        for field, (fits, wanted) in checks.items():
            value, quota = getattr(self, field), field in ("share", "memory")
            if value is None and quota:
                continue
            if isinstance(value, bool) or not isinstance(value, Real) or not fits(value):
                raise (errors.QuotaError if quota else errors.ArgumentError)(
                    f"{field} of tenant {self.name!r} is {value!r:.40}: give {wanted}", name=field
                )
        for name, least in (("priority", -MOST), ("ceiling", 0)):
            value = checked_integer(getattr(self, name), name, minimum=least, maximum=MOST, of=f"tenant {self.name!r}")
            object.__setattr__(self, name, value)

    def settings(self) -> dict[str, Any]:
        """Return its fields but the name, as plain data."""
        return {name: value for name, value in asdict(self).items() if name != "name"}


class Account:
    """The use of a tenant, and the memory that it holds.

    Attributes
    ----------
    tenant : Tenant
    used : float
        SM-seconds so far. Kernels that share multiprocessors share their time equally.
    held : int
        Bytes of admitted tasks, and those that are reserved.
    reserved : int
        Bytes of arrays that stay on the device.
    memory : int or None
        Quota of bytes.
    credit : float
        SM-seconds of quota that it may still take; below 0 it is over its quota. Infinite without one.
    waiting, running : int
        Its tasks that wait, and that are resident.
    clock : float
        SM-seconds by weight, brought up to that of the others when it starts to want something: what weighted policies
        compare.
    """

    def __init__(self, tenant: Tenant, capacity: Capacity) -> None:
        self.tenant = tenant
        self.used = 0.0
        self.held = 0
        self.reserved = 0
        self.waiting = 0
        self.running = 0
        self.clock = 0.0
        self.weight = tenant.weight
        share, memory = tenant.share, cast("float | None", tenant.memory)
        self.rate = math.inf if share is None else share * capacity.processors
        self.bound = math.inf if share is None else self.rate * tenant.window
        self.credit = self.bound
        self.memory = None if memory is None else int(memory * capacity.memory if memory <= 1 else memory)

    @property
    def name(self) -> str:
        """The tenant's name."""
        return self.tenant.name

    def priority(self, task: Task) -> int:
        """Return the priority of one of its tasks, as far as it counts."""
        most = self.tenant.ceiling
        return max(-most, min(task.priority, most))

    @property
    def within(self) -> bool:
        """Whether it is within its quota of SM-seconds."""
        return self.credit > 0


class Tenants(dict[str, Account]):
    """Accounts by name.

    Parameters
    ----------
    capacity : Capacity
    settings : mapping or iterable, optional
        `Tenant` objects; or by name `Tenant` objects, weights, or dictionaries of `Tenant`'s fields. Without settings
        any tenant is welcome and all are alike; with them, only those named.

    Raises
    ------
    QuotaError
        Quotas are over 100 % together.
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
                f"quotas of SM-seconds are {total:.1%} together: make them at most 100 %", name="share"
            )
        held = sum(a.memory or 0 for a in accounts)
        if held > capacity.memory:
            raise errors.QuotaError(
                f"quotas of memory are {held} bytes together and the device has {capacity.memory}: "
                "make them at most 100 %",
                name="memory",
            )
        self.limited = any(a.tenant.share is not None for a in accounts)

    def account(self, name: str) -> Account:
        """Return the account that a task of this tenant is charged to.

        Raises
        ------
        QuotaError
            There are settings, and none names this tenant.
        """
        found = self.get(name)
        if found is None:
            if self.named:
                raise errors.QuotaError(
                    f"tenant {name!r} has no setting: add it to tenants, or submit as one of {', '.join(self)}",
                    name="tenant",
                )
            if len(self) >= IDLE:
                self._forget()
            found = self[name] = Account(Tenant(name), self._capacity)
        return found

    def _forget(self) -> None:
        """Forget half of those that want nothing, who came first: names that programs choose may be without end."""
        idle = [a.name for a in self.values() if not (a.waiting or a.running or a.held)]
        for name in idle[: (len(idle) + 1) // 2]:
            del self[name]

    def wants(self, account: Account, count: int = 1) -> None:
        """Note that tasks of a tenant begin to wait. A tenant that wanted nothing does not catch up on it.

        If no tenant wants anything, all begin anew: using an idle device costs nothing.
        """
        if not (account.waiting or account.running):
            busy = [a.clock for a in self.values() if a.waiting or a.running]
            clocks = busy or [max(a.clock for a in self.values())]
            account.clock = max(account.clock, min(clocks))
        account.waiting += count

    def charge(self, running: Sequence[Job], now: float) -> None:
        """Charge the tenants of running jobs for the time since the last call.

        The jobs that have room on the device share the charge equally. A job that waits for room behind older ones is
        not charged. So a claim about a kernel's size can only raise what its own tenant pays.
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
            self._use(self[job.task.tenant], self._capacity.processors / len(users) * seconds)

    @staticmethod
    def _use(account: Account, used: float) -> None:
        account.used += used
        account.credit -= used
        account.clock += used / account.weight

    def barred(self, spare: bool = False) -> frozenset[str]:
        """Return the tenants whose tasks may not be launched now: those over their quota.

        Those with `burst` are among them while others wait, unless it is for what the others leave (`spare`).
        """
        if not self.limited:
            return frozenset()
        over = [a for a in self.values() if not a.within]
        if not over:
            return frozenset()
        others = not spare and any(a.waiting and a.within for a in self.values())
        return frozenset(a.name for a in over if others or not a.tenant.burst)

    def must_yield(self, name: str, other: str) -> bool:
        """Return True if a tenant is over its quota and `other` is not, so that a waiting task of `other` bars it."""
        return self.limited and not self[name].within and self[other].within

    def wake(self, now: float) -> float | None:
        """Return when the first tenant that waits over its quota is within it again."""
        times = [now + max(1e-9, -a.credit / a.rate * (1 + 1e-9)) for a in self.values() if a.waiting and not a.within]
        return min(times, default=None)


def read_tenants(settings: Mapping[str, Any] | Iterable[Tenant] | None) -> list[Tenant]:
    """Return settings of tenants as objects; see `Tenants` for their forms and for errors."""
    if settings is None:
        return []
    if not isinstance(settings, Mapping):
        if not isinstance(settings, Iterable):
            raise errors.ArgumentError(f"tenants is {settings!r:.40}: {_TAKEN}", name="tenants")
        found = list(settings)
        wrong = next((one for one in found if not isinstance(one, Tenant)), None)
        if wrong is not None:
            raise errors.ArgumentError(f"tenants has {wrong!r:.40}, which is not a Tenant: {_TAKEN}", name="tenants")
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
            raise errors.ArgumentError(f"setting of tenant {name!r} is {value!r:.40}: {_TAKEN}", name="tenants")
        else:
            found.append(Tenant(name, weight=float(value)))
    return found
