"""Names for authors of a policy or an executor. See ``docs/scheduler.md``.

A policy derives from `warpwell.scheduler.Policy`, reads a `View` and returns `Decision` objects. An executor derives
from `Executor`, runs `Job` objects, and returns `Ended` and `Stopped` events. `Core` calls both, and writes a `Log`.
"""

from typing import TYPE_CHECKING

from .. import registry

if TYPE_CHECKING:
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

_FROM = {
    "core": "Core",
    "decision": "SourceModel",
    "events": "Event Log",
    "executor": "Capacity Ended Executor Stopped",
    "policies": "POLICIES",
    "policies.priority": "Priority",
    "policy": "Decision Hold Launch Preempt Rates Resize View",
    "task": "Job Kind Placement Request State Task",
}
"""Names of modules that are imported when a name is first used, because reading a log needs no policy."""

if not TYPE_CHECKING:
    _HOMES = {name: f".{module}:" for module, names in _FROM.items() for name in names.split()}
    __getattr__, __dir__ = registry.on_first_use(__name__, _HOMES)
