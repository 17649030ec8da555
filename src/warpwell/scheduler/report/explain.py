"""A log in plain sentences: each event, and the reason for each decision with the figures that it compared."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from ..events import Event

QUIET = ("arrive", "stop", "end")
"""Kinds of events that are no decisions."""

Names = dict[int, str]

_LAUNCH_RULES = {
    "arrival": "it has waited longest",
    "best combination": "of the waiting tasks, it makes the best combination",
    "lanes": "its class is not that of the running kernel",
    "room": "it and the running kernels do not fill the device",
    "alone": "no waiting task would gain by running with it",
    "unknown": "its class is not known, so it runs alone and is measured (a profile= says it)",
    "priority": "it has the highest priority",
    "next": "it is the next of its class, and begins when that one has left",
    "data": "it uses the same data, so the device starts it next without the host",
}
_CHANGE_RULES = {
    "no prediction": "it is not known yet how long the running kernels, or the arriving task, will still take",
    "cancelled": "it was cancelled",
    "over quota": "its tenant is over its quota, and the tenant of the running kernel is not",
    "makes room": "part of its place goes to an arriving task",
    "alone": "nothing else runs any more",
    "grows": "it gets what others have left",
    "priority": "the arriving task's priority is higher",
    "next": "the kernel before it is not nearly over",
    "soon": "the running kernel fills the device for longer, and another task may arrive in the meantime",
    "time slice": "programs of one level take time slices",
    "hold time": "its turn has lasted for the hold time of its tenant",
    "fair share": "the running program is of a higher level, or its tenant has used less over its weight",
}
_MODES = {"drain": "at the end of the blocks that run", "switch": "at once, its state saved"}
_STATED = {"rule", "victim", "newcomer", "for", "mode", "saved", "workers", "younger"}
"""Keys of the reason of a change that its sentence states, or that are no figures."""
_FORMULA = ("S0", "S1", "n", "T", "C", "d", "gain")


def sentences(log: Iterable[Event]) -> Iterator[tuple[Event, str]]:
    """Return each event of a log, in the order in which it was written, with a sentence about it."""
    names: Names = {}
    for event in log:
        task = f"{event.name} (task {event.task})"
        if event.kind != "reject":  # it never got a number of its own
            task = names.setdefault(event.task, task)
        yield event, _sentence(task, event, names)


def duration(seconds: Any) -> str:
    """Return seconds in the unit that fits."""
    if not isinstance(seconds, int | float):
        return str(seconds)
    if math.isinf(seconds):
        return "forever"
    unit, scale = ("s", 1.0) if abs(seconds) >= 1 else ("ms", 1e3) if abs(seconds) >= 1e-3 else ("us", 1e6)
    return f"{seconds * scale:.4g} {unit}"


def _sentence(task: str, event: Event, names: Names) -> str:
    why = event.why
    match event.kind:
        case "arrive":
            waited = _listed(why.get("after"), names)
            order = "to be queued behind" if why.get("behind") else "after the end of"
            reason = f" {order} {waited}, because it uses the same data" if waited else ""
            return f"{task} of tenant {event.tenant} arrived{reason}."
        case "launch":
            return _launch(task, why, names)
        case "preempt":
            mode = str(why.get("mode"))
            return _change(f"{task} was asked to leave, {_MODES.get(mode, mode)}{_for(', for ', why, names)}", why)
        case "hold":
            victim = why.get("victim")
            place = "" if victim is None else f" in the place of {_name(victim, names)}"
            return _change(f"{task} was not launched{place}", why)
        case "resize":
            size = "the whole device" if why.get("workers") is None else f"{why['workers']} workers"
            youngest = ", as the youngest" if why.get("younger") else ""
            return _change(f"{task} gets {size}{youngest} from now on{_for(' for ', why, names)}", why)
        case "stop":
            return f"{task} has left" + (f" with {why['done']} blocks done." if "done" in why else ".")
        case "end":
            ran, count = why.get("ran"), why.get("preemptions")
            text = f"{task} has ended" if ran is None else f"{task} has ended, after {duration(ran)} on the device"
            return text + (f" and {count} preemption{'s' if count != 1 else ''}." if count else ".")
        case "fail":
            return f"{task} failed: {why.get('error', why)}. The others go on."
        case "cancel" if why.get("rule") == "asked":
            return f"{task} was cancelled, as asked."
        case "cancel" if why.get("by") is not None:
            how = "failed" if "failed" in str(why.get("rule")) else "was cancelled"
            return f"{task} was cancelled, because {_name(why['by'], names)}, which comes before it, {how}."
        case "cancel":
            return f"{task} was cancelled{_figures(why)}."
        case "reject" if "bytes" in why and "most" in why:
            need = f"it needs {why['bytes']} bytes and may have {why['most']}"
            return f"{event.name} of tenant {event.tenant} was refused: {need}."
        case "reject":
            return f"{event.name} of tenant {event.tenant} was refused{_figures(why)}."
        case "lost":
            return f"{task} is lost{_figures(why)}: the device or process that had its input is gone."
        case kind:
            return f"{task}: {kind}{_figures(why)}."


def _launch(task: str, why: dict[str, Any], names: Names) -> str:
    beside, rule = why.get("beside"), str(why.get("rule", ""))
    text = f"{task} was launched"
    if why.get("behind") is not None:
        text += f" behind {_name(why['behind'], names)}"
    if beside is not None:
        text += f" beside {_listed(beside, names)}" if beside else " with nothing else running"
    if rule:
        text += f": {_LAUNCH_RULES.get(rule, f'rule {rule!r}')}"
    if why.get("workers") is not None:
        text += f"; it gets {why['workers']} workers"
    text += f"{_figures(why, {'rule', 'beside', 'behind', 'workers', 'plain', 'whole'})}."
    if why.get("whole"):
        return f"{text} It runs whole and cannot be preempted: {str(why['whole']).rstrip('.')}."
    return f"{text} It runs as an ordinary launch, which cannot be preempted." if why.get("plain") else text


def _change(text: str, why: dict[str, Any]) -> str:
    """Return a sentence: what was done, and why the change was made or weighed."""
    rule, compared = str(why.get("rule", "")), _comparison(why)
    reason = _CHANGE_RULES.get(rule, f"rule {rule!r}" if rule and not compared else "")
    figures = _figures(why, _STATED.union(_FORMULA) if compared else _STATED)
    reason = f"{': '.join(filter(None, (reason, compared)))}{figures}".strip()
    return f"{text}: {reason}." if reason else f"{text}."


def _comparison(why: dict[str, Any]) -> str:
    """Return the comparison that the cost formula makes of a preemption in words; empty if it made none."""
    if not all(isinstance(why.get(key), int | float) for key in _FORMULA):
        return ""
    s0, s1, n, t, c, d, gain = (float(why[key]) for key in _FORMULA)
    long = "forever" if math.isinf(t) else f"for another T = {duration(t)}"
    text = (
        f"the running kernels would run together {long}, at a sum of normalized IPC of S0 = {s0:.4g}; after the change "
        f"it is S1 = {s1:.4g}, but for the C = {duration(c)} that the change takes, in which the kernel that stays "
        f"does d n = {d:.4g} * {n:.4g} = {d * n:.4g}"
    )
    if not math.isfinite(t):
        return text
    if c >= t:
        return f"{text}. C is not below T"
    after, before = d * n * c + s1 * (t - c), s0 * t
    sign, gained = ">" if after > before else "<=", "gained" if gain > 0 else "are not gained"
    text += f". d n C + S1 (T - C) = {duration(after)} {sign} S0 T = {duration(before)}"
    return f"{text}: {duration(gain)} of work {gained}"


def _name(number: Any, names: Names) -> str:
    return names.get(number, f"task {number}") if isinstance(number, int) else "another task"


def _listed(numbers: Any, names: Names) -> str:
    listed = [_name(n, names) for n in numbers] if isinstance(numbers, list | tuple) else []
    return " and ".join([", ".join(listed[:-1]), listed[-1]] if len(listed) > 1 else listed)


def _for(preposition: str, why: dict[str, Any], names: Names) -> str:
    """Return for which arriving task a running one was changed; empty if for none."""
    number = why.get("for", why.get("newcomer"))
    return "" if number is None else f"{preposition}{_name(number, names)}"


def _figures(why: dict[str, Any], stated: Iterable[str] = ()) -> str:
    """Return the figures of a decision that its sentence does not state, in brackets, or ""."""
    listed = ", ".join(
        f"{key} = {value:.4g}" if isinstance(value, float) else f"{key} = {value}"
        for key, value in why.items()
        if key not in stated and value is not None
    )
    return f" ({listed})" if listed else ""
