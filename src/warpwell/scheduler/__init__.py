"""Scheduler: kernels that arrive at any time share one device. See ``docs/scheduler.md``."""

from .core import Core
from .decision import SourceModel
from .events import Event, Log
from .executor import Capacity, Ended, Executor, Stopped
from .handle import Handle
from .policies import POLICIES
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
