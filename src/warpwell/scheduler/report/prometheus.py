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
"""Upper bounds of histograms, seconds."""

TENANTS = 1024
"""Tenants that have samples of their own; names that programs choose may be without end."""

OTHER_TENANTS = "(others)"
"""Name in the samples of all further tenants."""

OUTCOMES = {"end": "done", "fail": "failed", "cancel": "cancelled", "lost": "lost", "reject": "rejected"}

_FAMILIES = {
    "warpwell_tasks_arrived_total": ("counter", "Tasks that came to the head of their request."),
    "warpwell_tasks_ended_total": ("counter", "Tasks that ended, by outcome."),
    "warpwell_launches_total": ("counter", "Times that a task was put on the device, the first time or again."),
    "warpwell_preemptions_total": ("counter", "Times that a running task was asked to leave, by mode."),
    "warpwell_preemptions_declined_total": ("counter", "Preemptions that were weighed and not done."),
    "warpwell_resident_seconds_total": ("counter", "Seconds that tasks were on the device."),
    "warpwell_tasks": ("gauge", "Tasks that have not ended, by state."),
    "warpwell_turnaround_seconds": ("histogram", "Seconds from a task's arrival to its end."),
    "warpwell_queueing_seconds": ("histogram", "Seconds from a task's arrival to its first launch."),
    "warpwell_leaving_seconds": ("histogram", "Seconds from asking a task to leave until it had left."),
    "warpwell_owner_restarts_total": ("counter", "Times that the process that owns the device was started again."),
    "warpwell_clients": ("gauge", "Processes that are connected."),
    "warpwell_held_bytes": ("gauge", "Bytes held for clients: messages, input, arrays on the device, answers."),
}

Labels = tuple[tuple[str, str], ...]


@dataclass
class _Live:
    """A task that has not ended."""

    tenant: str
    arrival: float
    state: str = "waiting"
    launches: int = 0
    since: float = 0.0
    asked: float | None = None


class _Histogram:
    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect.bisect_left(BUCKETS, value)] += 1
        self.total += value


class LogMetrics:
    """Counts the events of a log; nothing of an event is kept once its task has ended.

    Parameters
    ----------
    policy : str
        A label of every sample about tasks, in addition to the tenant.
    """

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self._families: dict[str, defaultdict[Labels, Any]] = {
            name: defaultdict(_Histogram if kind == "histogram" else float) for name, (kind, _) in _FAMILIES.items()
        }
        self._live: dict[int, _Live] = {}
        self._tenants: dict[str, None] = {}

    def observe_all(self, events: Iterable[Event]) -> LogMetrics:
        """Count events; return self."""
        for event in events:
            self.observe(event)
        return self

    def observe(self, event: Event) -> None:
        """Count an event. Events come in the order of the log."""
        tenant = event.tenant
        if tenant not in self._tenants:
            if len(self._tenants) < TENANTS:
                self._tenants[tenant] = None
            else:
                event = Event(event.time, event.kind, event.task, event.name, OTHER_TENANTS, event.why)
                self._tenants.setdefault(OTHER_TENANTS)
        kind = event.kind
        if kind == "reject":
            self._count("warpwell_tasks_ended_total", event.tenant, outcome="rejected")
            return
        if kind == "hold":
            self._count("warpwell_preemptions_declined_total", event.tenant)
            return
        live = self._live.get(event.task)
        if live is None:
            # a task may end before it arrives (its request failed), and a log may begin in the middle
            live = self._live[event.task] = _Live(event.tenant, event.time)
            if kind == "arrive":
                self._count("warpwell_tasks_arrived_total", event.tenant)
        if kind == "launch":
            self._count("warpwell_launches_total", event.tenant)
            if live.launches == 0:
                self._observe("warpwell_queueing_seconds", event.tenant, event.time - live.arrival)
            live.launches += 1
            live.state, live.since, live.asked = "running", event.time, None
        elif kind == "preempt":
            self._count("warpwell_preemptions_total", event.tenant, mode=str(event.why.get("mode", "drain")))
            live.asked = event.time
        elif kind == "stop":
            if live.asked is not None:
                self._observe("warpwell_leaving_seconds", event.tenant, event.time - live.asked)
            self._left(live, event.time)
        elif kind in OUTCOMES:
            self._left(live, event.time)
            self._count("warpwell_tasks_ended_total", event.tenant, outcome=OUTCOMES[kind])
            if kind == "end":
                self._observe("warpwell_turnaround_seconds", event.tenant, event.time - live.arrival)
            del self._live[event.task]

    def service(self, *, restarts: int, clients: int, held: int) -> None:
        """Set the figures of a service that are not in its log."""
        self._families["warpwell_owner_restarts_total"][()] = restarts
        self._families["warpwell_clients"][()] = clients
        self._families["warpwell_held_bytes"][()] = held

    def render(self, tenant: str | None = None) -> str:
        """Return all samples as text, in the exposition format (version 0.0.4); of a tenant, only its own."""
        states = self._families["warpwell_tasks"]
        states.update({self._of(t, state=s): 0 for t in self._tenants for s in ("running", "waiting")})
        for live in self._live.values():
            states[self._of(live.tenant, state=live.state)] += 1
        lines: list[str] = []
        for name, (kind, text) in _FAMILIES.items():
            samples: list[str] = []
            family = self._families[name]
            for labels in sorted(family):
                if tenant is None or dict(labels).get("tenant") == tenant:
                    samples += _samples(name, labels, family[labels])
            if samples:
                lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *samples]
        return "\n".join(lines) + "\n" if lines else ""

    def _left(self, live: _Live, time: float) -> None:
        if live.state == "running":
            self._families["warpwell_resident_seconds_total"][self._of(live.tenant)] += max(0.0, time - live.since)
        live.state, live.asked = "waiting", None

    def _of(self, tenant: str, **more: str) -> Labels:
        return tuple(sorted({"policy": self.policy, "tenant": tenant, **more}.items()))

    def _count(self, name: str, tenant: str, **more: str) -> None:
        self._families[name][self._of(tenant, **more)] += 1

    def _observe(self, name: str, tenant: str, seconds: float) -> None:
        self._families[name][self._of(tenant)].add(max(0.0, seconds))


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file that is whole at any time, for a collector that reads files."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def _samples(name: str, labels: Labels, value: float | _Histogram) -> list[str]:
    if not isinstance(value, _Histogram):
        return [f"{name}{_labels(labels)} {_number(value)}"]
    histogram, lines, reached = value, [], 0
    for bound, count in zip((*BUCKETS, math.inf), histogram.counts, strict=True):
        reached += count
        lines.append(f"{name}_bucket{_labels((*labels, ('le', _number(bound))))} {reached}")
    lines.append(f"{name}_sum{_labels(labels)} {_number(histogram.total)}")
    lines.append(f"{name}_count{_labels(labels)} {reached}")
    return lines


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    escaped = ((key, value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")) for key, value in labels)
    return "{" + ",".join(f'{key}="{value}"' for key, value in escaped) + "}"


def _number(value: float) -> str:
    if value == math.inf:
        return "+Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)
