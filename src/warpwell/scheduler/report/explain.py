"""A log as sentences: each event, and the reason for each decision with the numbers that it compared."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from ..events import Event

QUIET = ("arrive", "stop", "end")
"""Kinds of events that are not decisions."""

Names = dict[int, str]

_LAUNCH_RULES = {
    "arrival": "it is the first of its queue",
    "best combination": "it makes the best combination of all waiting tasks",
    "lanes": "the running kernel has the other class",
    "room": "it and the running kernels do not fill the device",
    "alone": "no waiting task would gain by running with it",
    "unknown": "its class is unknown, so it runs solo and is measured; profile= would set the class",
    "priority": "it has the highest priority",
    "next": "it is the next of its class, and begins when that task has left",
    "data": "it uses the same data, so the device starts it next without the host",
}
_CHANGE_RULES = {
    "no prediction": "the remaining time of a running kernel or of the arriving task is unknown",
    "cancelled": "it was cancelled",
    "over quota": "its tenant is over its quota, and the tenant of the running kernel is not",
    "makes room": "an arriving task gets part of the device",
    "alone": "no other task runs",
    "grows": "it gets a part of the room that another task has left",
    "priority": "the arriving task's priority is higher",
    "next": "the kernel before it does not end soon",
    "soon": "the running kernel fills the device for longer, and another task may arrive in the meantime",
    "time slice": "programs of one level take time slices",
    "hold time": "its turn has lasted for the hold time of its tenant",
    "fair share": "the running program has a higher level, or its tenant has less use over weight",
}
_MODES = {"drain": "at the end of the running blocks", "switch": "at once, with its state saved"}
_STATED = {"rule", "victim", "newcomer", "for", "mode", "workers", "younger"}
"""Keys of a reason whose values the sentence about a change states, or does not need."""
_FORMULA = ("S0", "S1", "n", "T", "C", "d", "gain")


def sentences(log: Iterable[Event]) -> Iterator[tuple[Event, str]]:
    """Yield each event of a log, in order, with a sentence about it."""
    names: Names = {}
    for event in log:
        task = f"{event.name} (task {event.task})"
        if event.kind != "reject":  # A rejected task has no number of its own.
            task = names.setdefault(event.task, task)
        yield event, _sentence(task, event, names)


def duration(seconds: Any) -> str:
    """Return a time in s, ms or us, with four digits."""
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
            return _change(f"{task} was preempted, {_MODES.get(mode, mode)}{_for(', for ', why, names)}", why)
        case "hold":
            victim = "" if why.get("victim") is None else f" instead of {_name(why['victim'], names)}"
            return _change(f"{task} was not launched{victim}", why)
        case "resize":
            size = "the whole device" if why.get("workers") is None else f"{why['workers']} workers"
            youngest = ", as the youngest kernel" if why.get("younger") else ""
            return _change(f"{task} gets {size}{youngest}{_for(' for ', why, names)}", why)
        case "stop":
            return f"{task} has left" + (f" with {why['done']} blocks done." if "done" in why else ".")
        case "end":
            ran, count = why.get("ran"), why.get("preemptions")
            before = f"{duration(why['prepared'])} of compilation and copies, and " if "prepared" in why else ""
            text = f"{task} has ended" + ("" if ran is None else f", after {before}{duration(ran)} on the device")
            return text + (f" and {count} preemption{'s' if count != 1 else ''}." if count else ".")
        case "fail":
            return f"{task} failed: {why.get('error', why)}. The other tasks continue."
        case "cancel" if why.get("rule") == "asked":
            return f"{task} was cancelled by its submitter."
        case "cancel" if "by" in why:
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
    co_runners, rule = why.get("co_runners"), str(why.get("rule", ""))
    text = f"{task} was launched"
    if why.get("behind") is not None:
        text += f" behind {_name(why['behind'], names)}"
    if co_runners is not None:
        text += f" alongside {_listed(co_runners, names)}" if co_runners else " on the idle device"
    if rule:
        text += f": {_LAUNCH_RULES.get(rule, f'rule {rule!r}')}"
    if why.get("workers") is not None:
        text += f"; it gets {why['workers']} workers"
    text += f"{_figures(why, {'rule', 'co_runners', 'behind', 'workers', 'plain', 'whole'})}."
    if why.get("whole"):
        return f"{text} It cannot be preempted: {str(why['whole']).rstrip('.')}."
    return f"{text} It is an unmodified launch, which cannot be preempted." if why.get("plain") else text


def _change(text: str, why: dict[str, Any]) -> str:
    """Return a sentence about a change, with the reason why it was made or declined."""
    rule, compared = str(why.get("rule", "")), _comparison(why)
    reason = _CHANGE_RULES.get(rule, f"rule {rule!r}" if rule and not compared else "")
    figures = _figures(why, _STATED.union(_FORMULA) if compared else _STATED)
    reason = f"{': '.join(filter(None, (reason, compared)))}{figures}".strip()
    return f"{text}: {reason}." if reason else f"{text}."


def _comparison(why: dict[str, Any]) -> str:
    """Return the comparison of a preemption by the cost formula as text; empty without one."""
    if not all(isinstance(why.get(key), int | float) for key in _FORMULA):
        return ""
    s0, s1, n, t, c, d, gain = (float(why[key]) for key in _FORMULA)
    long = "forever" if math.isinf(t) else f"for another T = {duration(t)}"
    text = (
        f"the running kernels would run together {long}, at a sum of normalized IPC of S0 = {s0:.4g}; after the change "
        f"the sum is S1 = {s1:.4g}, except for the C = {duration(c)} of the change, in which the remaining kernels "
        f"have d n = {d:.4g} * {n:.4g} = {d * n:.4g}"
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
    """Return the arriving task for which a running one was changed, as text; empty without one."""
    number = why.get("for", why.get("newcomer"))
    return "" if number is None else f"{preposition}{_name(number, names)}"


def _figures(why: dict[str, Any], stated: Iterable[str] = ()) -> str:
    """Return the values of a reason that its sentence does not state, in brackets; empty without any."""
    listed = ", ".join(
        f"{key} = {value:.4g}" if isinstance(value, float) else f"{key} = {value}"
        for key, value in why.items()
        if key not in stated and value is not None
    )
    return f" ({listed})" if listed else ""
