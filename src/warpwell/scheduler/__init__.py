"""Scheduler: kernels that arrive at any time share one device. See ``docs/scheduler.md``.

In the order in which a task meets them::

    extend.py       the names that policies and executors are written with
    scheduler.py    Scheduler: the user's interface; makes a Task from a launch and its arguments
    callables.py    functions that enqueue other libraries' work, and captured graphs, in the place of launches
    tensors.py      arrays of other libraries as arguments of kernels
    task.py         Task, Profile, Request, Job, Placement, State: the records of a launch and of its place
    accesses.py     the memory that the arguments of a launch use
    data_order.py   DataOrder: which tasks must follow which, because they use the same memory
    batch.py        Batch: short launches in order as one task
    handle.py       Handle: the future that `submit` returns; TaskFuture, its base
    predict/        predicted times of kernels, their class, and how fast kernels run together
    dispatcher.py   Dispatcher: the thread that alone touches a Core; Watchdog: finds tasks that are stuck
    core.py         Core: arrivals, ends, and execution of a policy's decisions; no clock, no threads
    waiting.py      Waiting: waiting tasks, in the buckets of a policy
    tenants.py      Tenant, Tenants: weights, quotas, and the use that each tenant is charged for
    admission.py    Admission: admits tasks to device memory
    policy.py       Policy, and the decisions it may take: Launch, Preempt, Resize, Hold
    policies/       the policies that schedulers run
    decision.py     the rule of the paper: the cost of a preemption, and the condition for it
    residency.py    computes the part of the device that the blocks of a kernel fill
    executor.py     Executor, Capacity, Machine, Ended, Stopped: the interface of the code that runs tasks
    executors/      Engine: launch, preempt, end; on a GPU and on a CPU (blocks are claimed in targets/blocks)
    events.py       Event, Log: the log of events and decisions
    report/         a log as sentences, a timeline, and metrics for Prometheus
    service/        one device for several processes: client, service, device process
"""

from typing import TYPE_CHECKING

from .. import registry

if TYPE_CHECKING:
    from .handle import Handle
    from .policy import Policy
    from .scheduler import Scheduler
    from .service.client import connect
    from .task import Profile
    from .tenants import Tenant

__all__ = ["Handle", "Policy", "Profile", "Scheduler", "Tenant", "connect"]

_HOMES = {
    "Handle": "handle:",
    "Policy": "policy:",
    "Profile": "task:",
    "Scheduler": "scheduler:",
    "Tenant": "tenants:",
    "connect": "service.client:",
}
"""Paths of names, which are imported on first use: the arbiter of programs needs no kernels."""

if not TYPE_CHECKING:
    __getattr__, __dir__ = registry.on_first_use(__name__, _HOMES)
