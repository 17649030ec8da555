"""Residency intervals of the tasks of a log (`residency_intervals`), and a Chrome trace with them."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..events import Event, Log

MICROSECONDS = 1e6
"""Microseconds of a second, the unit of a Chrome trace."""

_ENDS = {"end": "done", "fail": "failed", "cancel": "cancelled", "lost": "lost", "stop": "preempted"}


@dataclass
class Interval:
    """A residency interval: a task is on the device from `start` to `end`.

    Attributes
    ----------
    task, name, tenant
        Fields of its events.
    start, end : float
        Times in seconds.
    lane : int
        Row in the picture: the smallest number that no co-runner has.
    preempt_time : float or None
        Time of its preemption in seconds, after which its blocks leave.
    outcome : str
        "done", "failed", "cancelled", "lost", "preempted"; "running" if the log ends first.
    why : dict
        Reason of its launch.
    """

    task: int
    name: str
    tenant: str
    start: float
    end: float
    lane: int = 0
    preempt_time: float | None = None
    outcome: str = "running"
    why: dict[str, Any] = field(default_factory=dict)


def residency_intervals(log: Iterable[Event]) -> list[Interval]:
    """Return the residency intervals of a log, in order of their starts."""
    found: list[Interval] = []
    open_: dict[int, Interval] = {}
    last = 0.0

    def close(interval: Interval, time: float, outcome: str) -> None:
        interval.end, interval.outcome = max(time, interval.start, interval.preempt_time or 0.0), outcome
        del open_[interval.task]

    for event in log:
        last = max(last, event.time)
        current = open_.get(event.task)
        if event.kind == "launch":
            if current is not None:  # Its device process died before it could write an event.
                close(current, event.time, "lost")
            used = {interval.lane for interval in open_.values()}
            lane = next(lane for lane in itertools.count() if lane not in used)
            interval = Interval(event.task, event.name, event.tenant, event.time, event.time, lane, why=dict(event.why))
            found.append(interval)
            open_[event.task] = interval
        elif current is not None and event.kind == "preempt":
            current.preempt_time = event.time
        elif current is not None and event.kind in _ENDS:
            close(current, event.time, _ENDS[event.kind])
    for interval in open_.values():
        interval.end = max(last, interval.start)
    return found


def chrome_trace(log: Log) -> dict[str, Any]:
    """Return a log as a trace in Chrome's JSON format: open it in ``chrome://tracing`` or in Perfetto.

    Process 1 is the device, with a row for each task that runs at the same time. Process 2 is the queue: counts of
    running and waiting tasks, and, in a row for each tenant, instants for arrivals and declined preemptions.
    """
    events: list[dict[str, Any]] = [
        _named("process_name", 1, 0, f"device ({log.about.get('policy', 'scheduler')})"),
        _named("process_name", 2, 0, "queue"),
    ]
    listed = residency_intervals(log)
    tenants = {name: k for k, name in enumerate(dict.fromkeys(event.tenant for event in log))}
    events += [_named("thread_name", 1, lane, f"place {lane}") for lane in sorted({i.lane for i in listed})]
    events += [_named("thread_name", 2, k, name) for name, k in tenants.items()]
    for interval in listed:
        task = {"task": interval.task}
        details = {**task, "tenant": interval.tenant, "outcome": interval.outcome, **interval.why}
        events.append(_slice(interval.name, "task", interval.lane, interval.start, interval.end, details))
        if interval.preempt_time is not None:
            events.append(_slice("leaving", "leaving", interval.lane, interval.preempt_time, interval.end, task))
    unfinished: set[int] = set()
    running: set[int] = set()
    for event in log:
        if event.kind in ("arrive", "launch", "stop"):
            unfinished.add(event.task)
        if event.kind == "launch":
            running.add(event.task)
        elif event.kind in _ENDS:
            running.discard(event.task)
            if event.kind != "stop":
                unfinished.discard(event.task)
        if event.kind in ("arrive", "hold", "reject", "cancel", "lost"):
            why = _plain({"task": event.task, **event.why})
            instant = {"name": f"{event.kind} {event.name}", "cat": event.kind, "ph": "i", "s": "t", "pid": 2}
            events.append({**instant, "tid": tenants[event.tenant], "ts": event.time * MICROSECONDS, "args": why})
        if event.kind not in ("hold", "reject", "resize", "preempt"):
            counts = {"running": len(running), "waiting": len(unfinished) - len(running)}
            counter = {"name": "tasks", "ph": "C", "pid": 2, "tid": 0}
            events.append({**counter, "ts": event.time * MICROSECONDS, "args": counts})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {k: str(v) for k, v in log.about.items()}}


def write_trace(log: Log, path: str | os.PathLike[str]) -> None:
    """Write `chrome_trace` to a file."""
    with open(path, "w", encoding="utf-8") as stream:
        json.dump(chrome_trace(log), stream, allow_nan=False)


def _named(field: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": field, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _slice(name: str, kind: str, lane: int, start: float, end: float, details: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": start * MICROSECONDS, "dur": (end - start) * MICROSECONDS}
    return {"name": name, "cat": kind, "ph": "X", "pid": 1, "tid": lane, **times, "args": _plain(details)}


def _plain(value: Any) -> Any:
    """Return a value for strict JSON: infinite numbers and NaN as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
