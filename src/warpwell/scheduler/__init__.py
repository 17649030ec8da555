"""Scheduler: kernels that arrive at any time share one device. See ``docs/scheduler.md``."""

from .events import Event, Log
from .executor import Capacity, Ended, Executor, Stopped
from .policy import Decision, Hold, Launch, Policy, Preempt, Rates, Resize, View
from .task import Job, Kind, Placement, Profile, Request, State, Task

__all__ = [
    "Capacity",
    "Decision",
    "Ended",
    "Event",
    "Executor",
    "Hold",
    "Job",
    "Kind",
    "Launch",
    "Log",
    "Placement",
    "Policy",
    "Preempt",
    "Profile",
    "Rates",
    "Request",
    "Resize",
    "State",
    "Stopped",
    "Task",
    "View",
]
