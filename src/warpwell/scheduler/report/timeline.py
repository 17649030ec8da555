"""When each task was on the device: `stays`, and the same as a Chrome trace and as a picture."""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ... import errors
from ..._check import extra
from ..events import Event, Log

MICROSECONDS = 1e6
MAX_BARS = 5000
"""Stays that a picture shows at most: more could not be told apart."""

_ENDS = {"end": "done", "fail": "failed", "cancel": "cancelled", "lost": "lost", "stop": "preempted"}
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")  # Paul Tol's "bright"


@dataclass
class Stay:
    """A time that a task was on the device without a break.

    Attributes
    ----------
    task, name, tenant
        Of its events.
    start, end : float
        Seconds.
    lane : int
        The lowest number that no task beside it has.
    asked : float or None
        When it was asked to leave.
    outcome : str
        "done", "failed", "cancelled", "lost", "preempted"; "running" where the log ends before it did.
    why : dict
        Of its launch.
    """

    task: int
    name: str
    tenant: str
    start: float
    end: float
    lane: int = 0
    asked: float | None = None
    outcome: str = "running"
    why: dict[str, Any] = field(default_factory=dict)


def stays(log: Iterable[Event]) -> list[Stay]:
    """Return every stay of a log, in order of their starts."""
    found: list[Stay] = []
    open_: dict[int, Stay] = {}
    free: list[int] = []
    lanes = 0
    last = 0.0

    def close(stay: Stay, time: float, outcome: str) -> None:
        stay.end, stay.outcome = max(time, stay.start, stay.asked or 0.0), outcome
        free.append(stay.lane)
        free.sort(reverse=True)
        del open_[stay.task]

    for event in log:
        last = max(last, event.time)
        here = open_.get(event.task)
        if event.kind == "launch":
            if here is not None:  # its owner died without an event
                close(here, event.time, "lost")
            lane = free.pop() if free else lanes
            lanes = max(lanes, lane + 1)
            stay = Stay(event.task, event.name, event.tenant, event.time, event.time, lane, why=dict(event.why))
            found.append(stay)
            open_[event.task] = stay
        elif here is not None and event.kind == "preempt":
            here.asked = event.time
        elif here is not None and event.kind in _ENDS:
            close(here, event.time, _ENDS[event.kind])
    for stay in open_.values():
        stay.end = max(last, stay.start)
    return found


def chrome_trace(log: Log) -> dict[str, Any]:
    """Return a log as a trace in Chrome's JSON format: open it in ``chrome://tracing`` or in Perfetto.

    Process 1 is the device, with a row for each task that runs at the same time. Process 2 is the queue, with a row for
    each tenant: what waits there, and, as instants, arrivals and preemptions that were not done.
    """
    events: list[dict[str, Any]] = [
        _named("process_name", 1, 0, f"device ({log.about.get('policy', 'scheduler')})"),
        _named("process_name", 2, 0, "queue"),
    ]
    listed = stays(log)
    tenants = {name: k for k, name in enumerate(dict.fromkeys(event.tenant for event in log))}
    events += [_named("thread_name", 1, lane, f"place {lane}") for lane in sorted({stay.lane for stay in listed})]
    events += [_named("thread_name", 2, k, name) for name, k in tenants.items()]
    for stay in listed:
        about = {"task": stay.task, "tenant": stay.tenant, "outcome": stay.outcome, **stay.why}
        events.append(_slice(stay.name, "task", stay.lane, stay.start, stay.end, about))
        if stay.asked is not None:
            events.append(_slice("leaving", "leaving", stay.lane, stay.asked, stay.end, {"task": stay.task}))
    there: set[int] = set()
    running: set[int] = set()
    for event in log:
        if event.kind in ("arrive", "launch", "stop"):
            there.add(event.task)
        if event.kind == "launch":
            running.add(event.task)
        elif event.kind in _ENDS:
            running.discard(event.task)
            if event.kind != "stop":
                there.discard(event.task)
        if event.kind in ("arrive", "hold", "reject", "cancel", "lost"):
            events.append(
                {
                    "name": f"{event.kind} {event.name}",
                    "cat": event.kind,
                    "ph": "i",
                    "s": "t",
                    "pid": 2,
                    "tid": tenants[event.tenant],
                    "ts": event.time * MICROSECONDS,
                    "args": _plain({"task": event.task, **event.why}),
                }
            )
        if event.kind not in ("hold", "reject", "resize", "preempt"):
            counts = {"running": len(running), "waiting": len(there) - len(running)}
            events.append(
                {"name": "tasks", "ph": "C", "pid": 2, "tid": 0, "ts": event.time * MICROSECONDS, "args": counts}
            )
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {k: str(v) for k, v in log.about.items()}}


def write_trace(log: Log, path: str | os.PathLike[str]) -> None:
    """Write `chrome_trace` to a file."""
    with open(path, "w", encoding="utf-8") as stream:
        json.dump(chrome_trace(log), stream, allow_nan=False)


def require_pictures() -> None:
    """Import what draws pictures; raise ArgumentError if matplotlib is not installed."""
    try:
        importlib.import_module("matplotlib.figure")  # optional, and slow
    except ImportError:
        message = f"a picture needs matplotlib: install {extra('demo')}"
        raise errors.ArgumentError(message, name="picture") from None


def draw(log: Log, path: str | os.PathLike[str]) -> None:
    """Draw when each task was on the device, one colour a tenant (or a kernel, where there is one tenant).

    The picture has the format of its suffix (.png, .svg, .pdf). Raise ArgumentError if matplotlib is not installed, or
    the log has no launches, or too many.
    """
    listed = stays(log)
    if not 0 < len(listed) <= MAX_BARS:
        raise errors.ArgumentError(
            f"the log has {len(listed)} launches: a picture shows 1 to {MAX_BARS}. Take a part of it, or --trace-out, "
            "which has no limit",
            name="picture",
        )
    require_pictures()
    from matplotlib.figure import Figure

    by_tenant = len({stay.tenant for stay in listed}) > 1
    groups = list(dict.fromkeys(stay.tenant if by_tenant else stay.name for stay in listed))
    colours = {group: _COLOURS[k % len(_COLOURS)] for k, group in enumerate(groups)}
    lanes = max(stay.lane for stay in listed) + 1
    begin, end = min(s.start for s in listed), max(s.end for s in listed)
    unit, scale = ("s", 1.0) if end - begin >= 1 else ("ms", 1e3)

    figure = Figure(figsize=(12, 1.4 + 0.6 * lanes), layout="constrained")
    axes = figure.add_subplot()
    for group in groups:
        bars = [s for s in listed if (s.tenant if by_tenant else s.name) == group]
        axes.barh(
            [s.lane for s in bars],
            [(s.end - s.start) * scale for s in bars],
            left=[(s.start - begin) * scale for s in bars],
            height=0.8,
            color=colours[group],
            label=group,
            edgecolor="white",
            linewidth=0.3,
        )
    leaving = [(s, s.asked) for s in listed if s.asked is not None]
    if leaving:
        axes.barh(
            [s.lane for s, _ in leaving],
            [(s.end - asked) * scale for s, asked in leaving],
            left=[(asked - begin) * scale for _, asked in leaving],
            height=0.8,
            color="none",
            edgecolor="black",
            hatch="////",
            linewidth=0.3,
            label="leaving",
        )
    for stay in listed:
        if (stay.end - stay.start) > 0.04 * (end - begin):
            axes.text(
                (stay.start + stay.end - 2 * begin) / 2 * scale,
                stay.lane,
                f"{stay.name} {stay.task}",
                ha="center",
                va="center",
                fontsize=7,
                clip_on=True,
            )
    axes.set_yticks(range(lanes), [f"place {k}" for k in range(lanes)])
    axes.set_xlabel(unit)
    axes.set_title(", ".join(f"{k} {v}" for k, v in log.about.items() if k in ("policy", "device", "seed")))
    if len(groups) <= 20:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise errors.ArgumentError(f"{path}: {error}: name it .png, .svg or .pdf", name="picture") from None


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _slice(name: str, kind: str, lane: int, start: float, end: float, about: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "cat": kind,
        "ph": "X",
        "pid": 1,
        "tid": lane,
        "ts": start * MICROSECONDS,
        "dur": (end - start) * MICROSECONDS,
        "args": _plain(about),
    }


def _plain(value: Any) -> Any:
    """Return what every reader of JSON takes: infinity and the like as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
