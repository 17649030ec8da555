"""Scheduler: kernels that arrive at any time share one device. See ``docs/scheduler.md``.

In the order in which a task meets them::

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
    decision.py     the rule of the paper: what a preemption costs, and when it pays
    residency.py    computes which blocks of kernels fit on the device together
    executor.py     Executor, Capacity, Machine, Ended, Stopped: the interface of the code that runs tasks
    executors/      the executors of a GPU and of a CPU: launch, preempt, end (blocks are claimed in targets/blocks)
    events.py       Event, Log: the log of events and decisions
    report/         a log as sentences, a timeline, and metrics for Prometheus
    service/        one device for several processes: client, service, device process
"""

from typing import TYPE_CHECKING

from .. import registry

if TYPE_CHECKING:
    from .core import Core
    from .decision import SourceModel
    from .events import Event, Log
    from .executor import Capacity, Ended, Executor, Stopped
    from .handle import Handle
    from .policies import POLICIES
    from .policies.priority import Priority
    from .policy import Decision, Hold, Launch, Policy, Preempt, Rates, Resize, View
    from .scheduler import Scheduler
    from .service.client import Client, connect
    from .task import Job, Kind, Placement, Profile, Request, State, Task
    from .tenants import Tenant

__all__ = [
    "Capacity",
    "Client",
    "Core",
    "Decision",
    "Ended",
    "Event",
    "Executor",
    "Handle",
    "Hold",
    "Job",
    "Kind",
    "Launch",
    "Log",
    "POLICIES",
    "Placement",
    "Policy",
    "Preempt",
    "Priority",
    "Profile",
    "Rates",
    "Request",
    "Resize",
    "Scheduler",
    "SourceModel",
    "State",
    "Stopped",
    "Task",
    "Tenant",
    "View",
    "connect",
]

_FROM = {
    "core": "Core",
    "decision": "SourceModel",
    "events": "Event Log",
    "executor": "Capacity Ended Executor Stopped",
    "handle": "Handle",
    "policies": "POLICIES",
    "policies.priority": "Priority",
    "policy": "Decision Hold Launch Policy Preempt Rates Resize View",
    "scheduler": "Scheduler",
    "service.client": "Client connect",
    "task": "Job Kind Placement Profile Request State Task",
    "tenants": "Tenant",
}
"""Names of modules that are imported when a name is first used: the arbiter of programs needs no kernels."""

if not TYPE_CHECKING:
    _HOMES = {name: f"{module}:" for module, names in _FROM.items() for name in names.split()}
    __getattr__, __dir__ = registry.on_first_use(__name__, _HOMES)
