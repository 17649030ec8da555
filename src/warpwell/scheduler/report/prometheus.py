"""`LogMetrics`: counters, gauges and histograms of a scheduler's log, in Prometheus' text format."""

from __future__ import annotations

import bisect
import math
import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ...replacing import replacing
from ..events import Event

BUCKETS = (1e-4, 2.5e-4, 1e-3, 2.5e-3, 1e-2, 2.5e-2, 0.1, 0.25, 1.0, 2.5, 10.0, 25.0, 100.0)
"""Upper bounds of histograms, in seconds: two for each power of ten. Chosen, not fitted."""

MAX_TENANTS = 1024
"""Maximum number of tenants with samples of their own, because programs may choose any number of names."""

OTHER_TENANTS = "(others)"
"""Tenant label of the samples of all further tenants."""

OUTCOMES = {"end": "done", "fail": "failed", "cancel": "cancelled", "lost": "lost", "reject": "rejected"}

_FAMILIES = {
    "warpwell_tasks_arrived_total": ("counter", "Tasks that became the head of their request."),
    "warpwell_tasks_ended_total": ("counter", "Tasks that ended, by outcome."),
    "warpwell_launches_total": ("counter", "Launches of tasks, including launches after a preemption."),
    "warpwell_preemptions_total": ("counter", "Preemptions of running tasks, by mode."),
    "warpwell_preemptions_declined_total": ("counter", "Preemptions that the policy considered and declined."),
    "warpwell_resident_seconds_total": ("counter", "Total time of tasks on the device, in seconds."),
    "warpwell_tasks": ("gauge", "Tasks that have not ended, by state."),
    "warpwell_turnaround_seconds": ("histogram", "Seconds from a task's arrival to its end."),
    "warpwell_queueing_seconds": ("histogram", "Seconds from a task's arrival to its first launch."),
    "warpwell_leaving_seconds": ("histogram", "Seconds from a task's preemption until its blocks had left."),
    "warpwell_owner_restarts_total": ("counter", "Restarts of the device process."),
    "warpwell_clients": ("gauge", "Connected processes."),
    "warpwell_held_bytes": ("gauge", "Bytes held for clients: messages, input, arrays on the device, answers."),
}

Labels = tuple[tuple[str, str], ...]


@dataclass
class _Task:
    """A task that has not ended; `since` is the time of its launch."""

    tenant: str
    arrival: float
    state: str = "waiting"
    was_launched: bool = False
    since: float = 0.0
    preempt_time: float | None = None


class _Histogram:
    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect.bisect_left(BUCKETS, value)] += 1
        self.total += value


class LogMetrics:
    """Counts the events of a log; it deletes the state of a task at its end.

    Parameters
    ----------
    policy : str
        Label of every sample about tasks, in addition to the tenant.
    """

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self._families: dict[str, defaultdict[Labels, Any]] = {
            name: defaultdict(_Histogram if kind == "histogram" else float) for name, (kind, _) in _FAMILIES.items()
        }
        self._unfinished: dict[int, _Task] = {}
        self._tenants: set[str] = set()

    def observe_all(self, events: Iterable[Event]) -> LogMetrics:
        """Count events; return self."""
        for event in events:
            self.observe(event)
        return self

    def observe(self, event: Event) -> None:
        """Count an event. The caller passes events in the order of the log."""
        kind, time, tenant = event.kind, event.time, event.tenant
        if tenant not in self._tenants and len(self._tenants) >= MAX_TENANTS:
            tenant = OTHER_TENANTS
        self._tenants.add(tenant)
        if kind == "reject":
            self._count("warpwell_tasks_ended_total", tenant, outcome="rejected")
            return
        if kind == "hold":
            self._count("warpwell_preemptions_declined_total", tenant)
            return
        task = self._unfinished.get(event.task)
        if task is None:
            # A task may end before it arrives (its request failed), and a log may begin in the middle.
            task = self._unfinished[event.task] = _Task(tenant, time)
            if kind == "arrive":
                self._count("warpwell_tasks_arrived_total", tenant)
        if kind == "launch":
            self._count("warpwell_launches_total", tenant)
            if not task.was_launched:
                self._observe("warpwell_queueing_seconds", tenant, time - task.arrival)
            task.state, task.was_launched, task.since, task.preempt_time = "running", True, time, None
        elif kind == "preempt":
            self._count("warpwell_preemptions_total", tenant, mode=str(event.why.get("mode", "drain")))
            task.preempt_time = time
        elif kind == "stop" or kind in OUTCOMES:
            if task.state == "running":
                self._families["warpwell_resident_seconds_total"][self._labels(tenant)] += max(0.0, time - task.since)
            if kind == "stop":
                if task.preempt_time is not None:
                    self._observe("warpwell_leaving_seconds", tenant, time - task.preempt_time)
                task.state, task.preempt_time = "waiting", None
                return
            self._count("warpwell_tasks_ended_total", tenant, outcome=OUTCOMES[kind])
            if kind == "end":
                self._observe("warpwell_turnaround_seconds", tenant, time - task.arrival)
            del self._unfinished[event.task]

    def set_service(self, restarts: int, clients: int, held: int) -> None:
        """Set the values of a service that are not in its log."""
        self._families["warpwell_owner_restarts_total"][()] = restarts
        self._families["warpwell_clients"][()] = clients
        self._families["warpwell_held_bytes"][()] = held

    def render(self, tenant: str | None = None) -> str:
        """Return all samples, or the samples of a tenant, as text in the exposition format (version 0.0.4)."""
        states = self._families["warpwell_tasks"]
        states.update({self._labels(t, state=s): 0 for t in self._tenants for s in ("running", "waiting")})
        for task in self._unfinished.values():
            states[self._labels(task.tenant, state=task.state)] += 1
        text = ""
        for name, (kind, description) in _FAMILIES.items():
            family = self._families[name]
            selected = [labels for labels in sorted(family) if tenant in (None, dict(labels).get("tenant"))]
            if selected:
                samples = "".join(_samples(name, labels, family[labels]) for labels in selected)
                text += f"# HELP {name} {description}\n# TYPE {name} {kind}\n{samples}"
        return text

    def _labels(self, tenant: str, **more: str) -> Labels:
        return tuple(sorted({"policy": self.policy, "tenant": tenant, **more}.items()))

    def _count(self, name: str, tenant: str, **more: str) -> None:
        self._families[name][self._labels(tenant, **more)] += 1

    def _observe(self, name: str, tenant: str, seconds: float) -> None:
        self._families[name][self._labels(tenant)].add(max(0.0, seconds))


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file atomically, for a collector that reads files."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def _samples(name: str, labels: Labels, value: float | _Histogram) -> str:
    if not isinstance(value, _Histogram):
        return f"{name}{_label_text(labels)} {_number(value)}\n"
    text, total = "", 0
    for bound, count in zip((*BUCKETS, math.inf), value.counts, strict=True):
        total += count
        text += f"{name}_bucket{_label_text((*labels, ('le', _number(bound))))} {total}\n"
    label_text = _label_text(labels)
    return f"{text}{name}_sum{label_text} {_number(value.total)}\n{name}_count{label_text} {total}\n"


def _label_text(labels: Labels) -> str:
    if not labels:
        return ""
    escaped = ((key, value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")) for key, value in labels)
    return "{" + ",".join(f'{key}="{value}"' for key, value in escaped) + "}"


def _number(value: float) -> str:
    if value == math.inf:
        return "+Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)
