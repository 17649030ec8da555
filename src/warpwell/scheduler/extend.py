"""Names for authors of a policy or an executor. See ``docs/scheduler.md``.

A policy derives from `warpwell.scheduler.Policy`, reads a `View` and returns `Decision` objects. An executor derives
from `Executor`, runs `Job` objects, and returns `Ended` and `Stopped` events. `Core` calls both, and writes a `Log`.
"""

from .core import Core
from .decision import SourceModel
from .events import Event, Log
from .executor import Capacity, Ended, Executor, Stopped
from .policies import POLICIES
from .policies.priority import Priority
from .policy import Decision, Hold, Launch, Preempt, Rates, Resize, View
from .task import Job, Kind, Placement, Request, State, Task

__all__ = [
    "Capacity",
    "Core",
    "Decision",
    "Ended",
    "Event",
    "Executor",
    "Hold",
    "Job",
    "Kind",
    "Launch",
    "Log",
    "POLICIES",
    "Placement",
    "Preempt",
    "Priority",
    "Rates",
    "Request",
    "Resize",
    "SourceModel",
    "State",
    "Stopped",
    "Task",
    "View",
]
