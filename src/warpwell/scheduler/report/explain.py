"""A log in plain sentences: each event, and the reason for each decision with the figures that it compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..events import Event

QUIET = ("arrive", "stop", "end")
"""Kinds of events that are no decisions."""

Names = dict[int, str]


def sentences(log: Iterable[Event]) -> Iterator[tuple[Event, str]]:
    """Return each event of a log, in the order in which it was written, with a sentence about it."""
    names: Names = {}
    for event in log:
        task = f"{event.name} (task {event.task})"
        if event.kind != "reject":  # it never got a number of its own
            task = names.setdefault(event.task, task)
        yield event, _TELLERS.get(event.kind, _other)(task, event, names)


def _of(number: Any, names: Names) -> str:
    return names.get(number, f"task {number}") if isinstance(number, int) else "another task"


def _list(numbers: Any, names: Names) -> str:
    listed = [_of(n, names) for n in numbers] if isinstance(numbers, list | tuple) else []
    return " and ".join([", ".join(listed[:-1]), listed[-1]] if len(listed) > 1 else listed)


def duration(seconds: Any) -> str:
    """Return seconds in the unit that fits."""
    if not isinstance(seconds, int | float):
        return str(seconds)
    if math.isinf(seconds):
        return "forever"
    size = abs(seconds)
    for bound, unit, scale in ((1.0, "s", 1.0), (1e-3, "ms", 1e3), (0.0, "us", 1e6)):
        if size >= bound:
            return f"{seconds * scale:.4g} {unit}"
    return "0 s"


def figures(why: dict[str, Any], *leave_out: str) -> str:
    """Return the figures of a decision that its sentence left out, in brackets; empty if there are none."""
    told = ", ".join(
        f"{key} = {value:.4g}" if isinstance(value, float) else f"{key} = {value}"
        for key, value in why.items()
        if key not in leave_out and value is not None
    )
    return f" ({told})" if told else ""


def _arrive(task: str, event: Event, names: Names) -> str:
    waited = _list(event.why.get("after"), names)
    order = "to be queued behind" if event.why.get("behind") else "after the end of"
    reason = f" {order} {waited}, because it uses the same data" if waited else ""
    return f"{task} of tenant {event.tenant} arrived{reason}."


_LAUNCH_RULES = {
    "arrival": "it has waited longest",
    "best combination": "of the waiting tasks, it makes the best combination",
    "lanes": "its class is not that of the running kernel",
    "room": "it and the running kernels do not fill the device",
    "alone": "no waiting task would gain by running with it",
    "unknown": "its class is not known, so it runs alone and is measured (a profile= says it)",
    "priority": "it has the highest priority",
    "data": "it uses the same data, so the device starts it next without the host",
    "next": "it is the next of its class, and begins when that one has left",
    "worth": "it makes a better pair, and begins when that one has left",
}


def _launch(task: str, event: Event, names: Names) -> str:
    why = event.why
    beside = why.get("beside")
    company = f"beside {_list(beside, names)}" if beside else "with nothing else running" if beside is not None else ""
    rule = str(why.get("rule", ""))
    reason = _LAUNCH_RULES.get(rule, f"rule {rule!r}" if rule else "")
    text = f"{task} was launched"
    if why.get("behind") is not None:
        text += f" behind {_of(why['behind'], names)}"
    text += (f" {company}" if company else "") + (f": {reason}" if reason else "")
    if why.get("workers") is not None:
        text += f"; it gets {why['workers']} workers"
    text += figures(why, "rule", "beside", "behind", "workers", "plain", "whole") + "."
    if why.get("whole"):
        text += f" It runs whole and cannot be preempted: {str(why['whole']).rstrip('.')}."
    elif why.get("plain"):
        text += " It runs as an ordinary launch, which cannot be preempted."
    return text


_FORMULA = ("S0", "S1", "n", "T", "C", "d", "gain")


def _compared(why: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Return the comparison of a preemption in words, and the figures that it has told."""
    if not all(isinstance(why.get(key), int | float) for key in _FORMULA):
        return "", ()
    s0, s1, n, t, c, d, gain = (float(why[key]) for key in _FORMULA)
    long = "forever" if math.isinf(t) else f"for another T = {duration(t)}"
    text = (
        f"the running kernels would run together {long}, at a sum of normalized IPC of S0 = {s0:.4g}; after the change "
        f"it is S1 = {s1:.4g}, but for the C = {duration(c)} that the change takes, in which the kernel that stays "
        f"does d n = {d:.4g} * {n:.4g} = {d * n:.4g}"
    )
    if math.isfinite(t) and c >= t:
        text += ". C is not below T"
    elif math.isfinite(t):
        after, before = d * n * c + s1 * (t - c), s0 * t
        sign, gained = ">" if after > before else "<=", "gained" if gain > 0 else "are not gained"
        text += f". d n C + S1 (T - C) = {duration(after)} {sign} S0 T = {duration(before)}: "
        text += f"{duration(gain)} of work {gained}"
    return text, _FORMULA


_REASONS = {
    "no prediction": "it is not known yet how long the running kernels, or the newcomer, will still take",
    "cancelled": "it was cancelled",
    "over quota": "its tenant is over its quota, and the tenant of the running kernel is not",
    "makes room": "part of its place goes to a newcomer",
    "alone": "nothing else runs any more",
    "grows": "it gets what others have left",
    "priority": "the newcomer's priority is higher",
    "next": "the kernel before it is not nearly over",
    "soon": "the running kernel fills the device for longer, and another task may arrive in the meantime",
}
_TOLD = ("rule", "victim", "newcomer", "for", "mode", "saved", "workers", "younger")


def _because(text: str, event: Event) -> str:
    """Return a sentence: what was done, and why the change was made or weighed."""
    why = event.why
    rule = str(why.get("rule", ""))
    compared, told = _compared(why)
    begin = _REASONS.get(rule, "" if compared else f"rule {rule!r}" if rule else "")
    reason = ": ".join(part for part in (begin, compared) if part)
    reason = f"{reason}{figures(why, *_TOLD, *told)}".strip()
    return f"{text}: {reason}." if reason else f"{text}."


_MODES = {
    "drain": "at the end of the blocks that run",
    "switch": "at once, its state saved",
}


def _preempt(task: str, event: Event, names: Names) -> str:
    newcomer = event.why.get("for", event.why.get("newcomer"))
    mode = str(event.why.get("mode"))
    text = f"{task} was asked to leave, {_MODES.get(mode, mode)}"
    if newcomer is not None:
        text += f", for {_of(newcomer, names)}"
    return _because(text, event)


def _hold(task: str, event: Event, names: Names) -> str:
    victim = event.why.get("victim")
    text = f"{task} was not launched"
    return _because(text if victim is None else f"{text} in the place of {_of(victim, names)}", event)


def _resize(task: str, event: Event, names: Names) -> str:
    workers = event.why.get("workers")
    size = "the whole device" if workers is None else f"{workers} workers"
    size += ", as the youngest" if event.why.get("younger") else ""
    newcomer = event.why.get("for")
    whom = f" for {_of(newcomer, names)}" if newcomer is not None else ""
    return _because(f"{task} gets {size} from now on{whom}", event)


def _stop(task: str, event: Event, names: Names) -> str:
    done = event.why.get("done")
    text = f"{task} has left"
    if event.why.get("rule") == "owner died":
        return f"{text}, because the process that owns the device died ({event.why.get('reason')}). It will run again."
    return text + ("." if done is None else f" with {done} blocks done.")


def _end(task: str, event: Event, names: Names) -> str:
    ran, times = event.why.get("ran"), event.why.get("preemptions")
    text = f"{task} has ended"
    if ran is not None:
        text += f", after {duration(ran)} on the device"
    return text + (f" and {times} preemption{'s' if times != 1 else ''}." if times else ".")


def _fail(task: str, event: Event, names: Names) -> str:
    return f"{task} failed: {event.why.get('error', event.why)}. The others go on."


def _cancel(task: str, event: Event, names: Names) -> str:
    rule, by = event.why.get("rule"), event.why.get("by")
    if rule == "asked":
        return f"{task} was cancelled, as asked."
    if by is not None:
        how = "failed" if "failed" in str(rule) else "was cancelled"
        return f"{task} was cancelled, because {_of(by, names)}, which comes before it, {how}."
    return f"{task} was cancelled{figures(event.why)}."


def _reject(task: str, event: Event, names: Names) -> str:
    need, most = event.why.get("bytes"), event.why.get("most")
    if need is not None and most is not None:
        return f"{event.name} of tenant {event.tenant} was refused: it needs {need} bytes and may have {most}."
    return f"{event.name} of tenant {event.tenant} was refused{figures(event.why)}."


def _lost(task: str, event: Event, names: Names) -> str:
    return f"{task} is lost{figures(event.why)}: the device or process that had its input is gone."


def _other(task: str, event: Event, names: Names) -> str:
    return f"{task}: {event.kind}{figures(event.why)}."


_TELLERS: dict[str, Callable[[str, Event, Names], str]] = {
    "arrive": _arrive,
    "launch": _launch,
    "preempt": _preempt,
    "hold": _hold,
    "resize": _resize,
    "stop": _stop,
    "end": _end,
    "fail": _fail,
    "cancel": _cancel,
    "reject": _reject,
    "lost": _lost,
}
